/*
 * Reading a POST /v1/runs: body to request, echo and hashes; and the list of large ones. Called by runs.c; creation_read runs on
 * any thread, all else on the loop. Does not block.
 */
#include "create.h"

#include "common/text.h"

#include <event2/buffer.h>
#include <sodium.h>
#include <stdlib.h>

#define ECHO_MAX (2 * 1024 * 1024) /* the request without its files' contents */

static void creation_free(void *state)
{
	struct creation *cr = state;

	if (cr->prev) {
		*cr->prev = cr->next;
		if (cr->next)
			cr->next->prev = cr->prev;
	}
	if (cr->body)
		evbuffer_free(cr->body);
	free(cr->key_header);
	field_errors_free(&cr->errors);
	run_request_free(cr->rq);
	buf_free(&cr->echo);
	free(cr);
}

struct creation *creation_new(struct api_req *r)
{
	struct creation *cr = calloc(1, sizeof(*cr));
	const char *header = http_header(r->http, "Idempotency-Key");

	if (!cr)
		return NULL;
	cr->r = r;
	field_errors_init(&cr->errors);
	buf_init(&cr->echo, ECHO_MAX);
	cr->key_header = header ? strdup(header) : NULL;
	cr->body = http_take_body(r->http);
	api_set_state(r, cr, creation_free);
	return cr->body && !header == !cr->key_header ? cr : NULL;
}

static bool describe(struct creation *cr)
{
	struct buf identity = BUF_INIT(2 * RUN_BODY_MAX);
	bool fine = run_request_echo(cr->rq, &cr->echo) && buf_cstr(&cr->echo);

	if (fine && cr->rq->idempotency_key[0]) {
		fine = run_request_identity(cr->rq, &identity);
		if (fine)
			secrets_body_hash(cr->r->api->opt.secrets, identity.data, identity.len, cr->identity);
	}
	if (fine)
		crypto_hash_sha256(cr->request_hash, cr->echo.data, cr->echo.len);
	buf_free(&identity);
	return fine;
}

void creation_read(struct creation *cr)
{
	size_t n = evbuffer_get_length(cr->body);
	const uint8_t *p = n > 0 ? evbuffer_pullup(cr->body, -1) : (const uint8_t *)"";

	if (!p)
		cr->no_memory = true;
	else if (run_request_parse(p, n, cr->key_header, &cr->r->api->limits, &cr->rq, &cr->errors) == 0)
		cr->no_memory = !describe(cr);
	evbuffer_free(cr->body);
	cr->body = NULL;
}

/* --- the list of large ones ------------------------------------------------------------------------------------------------ */

void creation_count(struct creation *cr, size_t bytes)
{
	struct api *a = cr->r->api;

	cr->large = bytes;
	cr->next = a->large;
	cr->prev = &a->large;
	if (cr->next)
		cr->next->prev = &cr->next;
	a->large = cr;
}

size_t creations_bytes(const struct api *a)
{
	size_t sum = 0;

	for (const struct creation *cr = a->large; cr; cr = cr->next)
		sum += cr->large;
	return sum;
}

void creations_forget(struct api *a)
{
	for (struct creation *cr = a->large; cr; cr = cr->next)
		cr->prev = NULL;
	a->large = NULL;
}
