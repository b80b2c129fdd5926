/*
 * POST /v1/runs: the checks that need the database, the create, the answer. run_request.c has read the body; the store does the
 * rest in one transaction. Runs on the loop, does not block.
 */
#include "api_internal.h"

#include "common/log.h"
#include "common/price.h"
#include "common/text.h"
#include "proto/tools.h"
#include "run_render.h"
#include "secrets.h"

#include <inttypes.h>
#include <sodium.h>
#include <stdlib.h>

#define ECHO_MAX (2 * 1024 * 1024) /* the request without its files' contents */
#define PREFER_WAIT_MAX 60
#define QUEUE_FULL_RETRY_S 5

struct creation {
	struct run_request *rq;
	int64_t wait_seconds; /* Prefer: wait=N; 0 = none */
	int64_t cap_micros;
};

static void creation_free(void *state)
{
	struct creation *c = state;

	run_request_free(c->rq);
	free(c);
}

/* Prefer is a wish: what cannot be read is ignored, as RFC 7240 says. */
static int64_t prefer_wait(const char *h)
{
	while (h && *h) {
		char number[8];
		size_t n;
		int64_t v;
		struct err e;

		h += strspn(h, " \t,;");
		if (strncasecmp(h, "wait", 4) == 0 && h[4 + strspn(h + 4, " \t")] == '=') {
			h += 4 + strspn(h + 4, " \t") + 1;
			h += strspn(h, " \t");
			n = strspn(h, "0123456789");
			if (n == 0 || n >= sizeof(number))
				return 0;
			memcpy(number, h, n);
			number[n] = '\0';
			if (text_i64(number, 0, 9999999, &v, &e) == -1)
				return 0;
			return v < PREFER_WAIT_MAX ? v : PREFER_WAIT_MAX;
		}
		h += strcspn(h, ",");
	}
	return 0;
}

static void problem_at(struct api_req *r, const char *field, const char *fmt, ...) EPH_PRINTF(3, 4);

/* A 400 for one field that only the database could judge. */
static void problem_at(struct api_req *r, const char *field, const char *fmt, ...)
{
	struct pointer at = { .up = NULL, .key = field };
	struct field_errors fe;
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	if (vsnprintf(text, sizeof(text), fmt, ap) < 0)
		text[0] = '\0';
	va_end(ap);
	field_errors_init(&fe);
	field_bad(&fe, &at, "%s", text);
	api_problem_fields(r, &fe);
}

/* --- the end: what the store says --------------------------------------------------------------------------------------- */

static void answer_created(struct api_req *r, const struct store_create *c)
{
	struct creation *cr = r->state;
	char text[128];

	if (text_fmt(text, sizeof(text), "/v1/runs/%s", c->run_id))
		api_header(r, "Location", text);
	if (c->result == STORE_REPLAYED) {
		api_header(r, "Idempotency-Replayed", "true");
	} else {
		log_info("run created run=%s org=%s key=%s cap_micros=%" PRId64 " size=%s req=%s", c->run_id, r->who.org_id,
				r->who.key_id, cr->cap_micros, api_size_name(cr->rq->size), r->id);
		api_wake(r->api, API_WAKE_QUEUED, c->run_id);
	}
	if (cr->wait_seconds > 0) {
		if (text_fmt(text, sizeof(text), "wait=%" PRId64, cr->wait_seconds))
			api_header(r, "Preference-Applied", text);
		run_wait_answer(r, c->run_id, cr->wait_seconds, 201);
		return;
	}
	run_answer(r, c->run_id, 201);
}

static void answer_insufficient(struct api_req *r, const struct store_create *c)
{
	char needed[32], available[32];

	text_dollars(c->needed_micros, needed);
	text_dollars(c->available_micros, available);
	api_problem(r, PROBLEM_INSUFFICIENT_BALANCE,
			"This run reserves %s (%" PRId64 " micros), but %s (%" PRId64
			" micros) are free. Lower max_cost_micros, wait until running runs "
			"settle, or have the operator add credit: ephemeral admin org credit %s DOLLARS.",
			needed, c->needed_micros, available, c->available_micros, r->who.org_id);
}

/* The fields of draft-ietf-httpapi-ratelimit-headers: which quota, how large, what is left, when to come back. */
static void rate_limit(struct api_req *r, int64_t limit)
{
	char text[96];

	if (text_fmt(text, sizeof(text), "\"queued-runs\";q=%" PRId64, limit))
		api_header(r, "RateLimit-Policy", text);
	if (text_fmt(text, sizeof(text), "\"queued-runs\";r=0;t=%d", QUEUE_FULL_RETRY_S))
		api_header(r, "RateLimit", text);
}

static void on_create(void *arg, const struct store_create *c, const struct err *e)
{
	struct api_req *r = arg;
	struct creation *cr = r->state;

	if (e && e->code == ERR_CONFLICT && cr->rq->idempotency_key[0] && r->http) {
		/* Its row is locked by a request with the same key that takes long. */
		r = api_back(arg, NULL);
		if (r)
			api_problem(r, PROBLEM_IDEMPOTENCY_IN_PROGRESS,
					"A request with this Idempotency-Key is still in progress; send it again.");
		return;
	}
	r = api_back(arg, e);
	if (!r)
		return;
	switch (c->result) {
	case STORE_CREATED:
	case STORE_REPLAYED: answer_created(r, c); return;
	case STORE_IDEMPOTENCY_MISMATCH:
		api_problem(r, PROBLEM_IDEMPOTENCY_MISMATCH,
				"This Idempotency-Key was used within 24 hours with another body. Use a fresh key for a new "
				"run, or the same body for a retry.");
		return;
	case STORE_IN_PROGRESS:
		api_problem(r, PROBLEM_IDEMPOTENCY_IN_PROGRESS,
				"A request with this Idempotency-Key is still in progress; send it again.");
		return;
	case STORE_INSUFFICIENT: answer_insufficient(r, c); return;
	case STORE_TOO_MANY_QUEUED:
		api_retry_after(r, QUEUE_FULL_RETRY_S);
		rate_limit(r, c->limit);
		api_problem(r, PROBLEM_RATE_LIMITED,
				"Your organization has %" PRId64
				" runs queued, which is its limit. Try again when some have started.",
				c->limit);
		return;
	case STORE_NO_NODE:
		api_retry_after(r, 30);
		api_problem(r, PROBLEM_NO_NODE,
				"No host could ever run size %s%s. Ask for another size, or have the operator add a host "
				"(ephemeral admin node token)%s.",
				api_size_name(cr->rq->size), r->who.allow_emulated ? "" : " with hardware isolation (KVM)",
				r->who.allow_emulated ? "" : " or allow your organization emulated ones (allow_emulated)");
		return;
	case STORE_ORG_DISABLED:
		api_problem(r, PROBLEM_FORBIDDEN, "Your organization is disabled. Ask the operator of this service.");
		return;
	}
	api_problem(r, PROBLEM_INTERNAL, "The service made a mistake. Tell the operator this request_id.");
}

/* --- the create --------------------------------------------------------------------------------------------------------- */

static void fill_lists(const struct run_request *rq, struct store_file *files, struct store_pair *pairs)
{
	size_t i;

	for (i = 0; i < rq->file_count; i++) {
		files[i] = (struct store_file){ .path = rq->files[i].path, .size = rq->files[i].size, .data = rq->files[i].data };
		memcpy(files[i].sha256, rq->files[i].sha256, sizeof(files[i].sha256));
	}
	for (i = 0; i < rq->metadata_count; i++)
		pairs[i] = (struct store_pair){ .key = rq->metadata[i].key, .value = rq->metadata[i].value };
}

static void create_with(struct api_req *r, const struct store_model *m, const char *echo, size_t echo_len,
		const uint8_t identity[SECRETS_HASH_LEN])
{
	struct creation *cr = r->state;
	const struct run_request *rq = cr->rq;
	struct store_file files[RUN_FILES_MAX];
	struct store_pair pairs[RUN_METADATA_MAX];
	struct store_run_new n = {
		.org_id = r->who.org_id,
		.key_id = r->who.key_id,
		.member_id = r->who.member_id,
		.idempotency_key = rq->idempotency_key[0] ? rq->idempotency_key : NULL,
		.request_json = echo,
		.prompt = rq->prompt,
		.prompt_len = rq->prompt_len,
		.model = m->spec.id,
		.price = m->price,
		.cap_micros = cr->cap_micros,
		.timeout_s = (uint32_t)rq->timeout_seconds,
		.max_model_calls = (uint32_t)rq->max_model_calls,
		.memory_mib = r->api->opt.sizes[rq->size].memory_mib,
		.vcpus = r->api->opt.sizes[rq->size].vcpus,
		.size = api_size_name(rq->size),
		.shell = rq->shell,
		.allow_emulated = r->who.allow_emulated,
		.metadata = pairs,
		.metadata_count = rq->metadata_count,
		.files = files,
		.file_count = rq->file_count,
	};
	struct err e;

	memcpy(n.idempotency_hash, identity, sizeof(n.idempotency_hash));
	crypto_hash_sha256(n.request_hash, (const uint8_t *)echo, echo_len);
	fill_lists(rq, files, pairs);
	api_asked(store_run_create(r->api->opt.store, &n, on_create, api_hold(r), &e), r, &e);
}

static void create_now(struct api_req *r, const struct store_model *m)
{
	const struct run_request *rq = ((struct creation *)r->state)->rq;
	struct buf echo = BUF_INIT(ECHO_MAX), identity = BUF_INIT(2 * RUN_BODY_MAX);
	uint8_t hash[SECRETS_HASH_LEN] = { 0 };

	if (!run_request_echo(rq, &echo) || !buf_cstr(&echo) || (rq->idempotency_key[0] && !run_request_identity(rq, &identity))) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
	} else {
		if (rq->idempotency_key[0])
			secrets_body_hash(r->api->opt.secrets, identity.data, identity.len, hash);
		create_with(r, m, (const char *)echo.data, echo.len, hash);
	}
	buf_free(&echo);
	buf_free(&identity);
}

/* The first call must be payable, or the run would end before it began. */
static int64_t minimum_cap(const struct store_model *m, const struct run_request *rq)
{
	int64_t tokens = m->spec.overhead_tokens, per_byte = m->spec.tokens_per_byte_milli;
	int64_t bytes = (int64_t)rq->prompt_len + AGENT_REQUEST_BYTES;
	int64_t call_ms = (int64_t)rq->timeout_seconds * 1000;

	if (per_byte > 0 && per_byte <= 1000000)
		tokens += (bytes * per_byte + 999) / 1000;
	return price_min_cap(&m->price, tokens, m->spec.min_output_tokens,
			call_ms < m->spec.call_timeout_ms ? call_ms : m->spec.call_timeout_ms);
}

static void on_model(void *arg, const struct store_models *models, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct creation *cr = r ? r->state : NULL;
	const struct store_model *m;
	const char *wanted;
	int64_t minimum;

	if (!r)
		return;
	wanted = cr->rq->model ? cr->rq->model : r->who.default_model;
	if (models->count == 0) {
		problem_at(r, "model", "is %.128s, which is no model here; GET /v1/models lists them", wanted);
		return;
	}
	m = &models->models[0];
	if (!m->priced) {
		problem_at(r, "model",
				"is %.128s, which has no price yet, so nothing can be reserved for it; choose another or ask the "
				"operator",
				wanted);
		return;
	}
	minimum = minimum_cap(m, cr->rq);
	if (cr->cap_micros < minimum) {
		problem_at(r, "max_cost_micros",
				"is %" PRId64 "%s, but one call of %.128s with this prompt needs at least %" PRId64
				"; raise it or choose a cheaper model",
				cr->cap_micros, cr->rq->max_cost_micros ? "" : " (the default)", wanted, minimum);
		return;
	}
	create_now(r, m);
}

void runs_create(struct api_req *r)
{
	struct creation *cr = calloc(1, sizeof(*cr));
	struct field_errors fe;
	struct err e;
	const char *model;
	size_t n;
	const uint8_t *body = http_body(r->http, &n);

	if (!cr) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
		return;
	}
	field_errors_init(&fe);
	if (http_header_count(r->http, "Idempotency-Key") > 1)
		header_bad(&fe, "Idempotency-Key", "stands there more than once; send it once");
	if (run_request_parse(body, n, http_header(r->http, "Idempotency-Key"), &r->api->limits, &cr->rq, &fe) == -1) {
		free(cr);
		api_problem_fields(r, &fe);
		return;
	}
	cr->wait_seconds = prefer_wait(http_header(r->http, "Prefer"));
	cr->cap_micros = cr->rq->max_cost_micros      ? cr->rq->max_cost_micros
			 : r->who.default_cost_micros ? r->who.default_cost_micros
						      : r->api->opt.default_cost_micros;
	api_set_state(r, cr, creation_free);
	model = cr->rq->model ? cr->rq->model : r->who.default_model;
	if (!*model) {
		problem_at(r, "model", "is missing, and your organization has no default; GET /v1/models lists them");
		return;
	}
	api_asked(store_model_get(r->api->opt.store, model, on_model, api_hold(r), &e), r, &e);
}
