/*
 * Everything that anybody may send to the two listeners: any route, key, header, query and body, on a played HTTP server and store.
 * First line: 'm' or 'o' (listener), a digit (how many hints come to who waits, + 4: then the client goes), '-', the store's
 * script; the rest is a request as HTTP writes it, with LF. 'g' before the script: the client goes before the store's first answer.
 *
 * Each request is answered exactly once. What is refused says so in a problem of JSON with the same status and with the header
 * that its status asks for; 500 comes only from a fault of the store, 503 only from the store too. What reaches the store was
 * checked (api_store.c).
 */
/* link: controld_api controld_base ephproto_link ephproto ephloop_event EPH::sodium EPH::event */
/* sources: tests/fuzz/api_http.c tests/fuzz/api_store.c tests/fuzz/api_store_run.c */
/* sources: tests/fuzz/api_store_change.c tests/fuzz/api_store_list.c tests/fuzz/api_store_images.c */
/* within: controld */
/* reads: controld/api/ */
/* reached: 82 % of lines, 66 % of branches; the rest is memory that runs out, start and end of the listeners, a drain */
#include "api_play.h"

#include "common/json.h"
#include "common/log.h"
#include "common/text.h"
#include "controld/api/api_internal.h"

#include <event2/event.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEYRING                                                                                                                    \
	"ephemeral keyring 1\nhash 1 AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8\nseal 1 "                                         \
	"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8\n"

static struct secrets *secrets;
static struct api *api;

static void start(void)
{
	struct api_options opt = { .listen = "127.0.0.1:0",
		.operator_listen = "127.0.0.1:0",
		.link_addresses = "tls+tcp://127.0.0.1:9",
		.ca_pem = "-----BEGIN CERTIFICATE-----\n",
		.default_timeout_seconds = 300,
		.max_timeout_seconds = 3600,
		.default_cost_micros = 100000,
		.max_cost_micros = 1000000,
		.queue_timeout_seconds = 600,
		.sizes = { { 512, 1 }, { 1024, 1 }, { 2048, 2 } } };
	int fd = memfd_create("keyring", MFD_CLOEXEC);
	char path[64];
	struct err e;

	log_init("fuzz", LOG_LEVEL_ERROR + 1, false);
	must(fd >= 0 && write(fd, KEYRING, strlen(KEYRING)) == (ssize_t)strlen(KEYRING) && fchmod(fd, 0400) == 0);
	must(text_fmt(path, sizeof(path), "/proc/self/fd/%d", fd));
	must(secrets_load(path, &secrets, &e) == 0);
	close(fd);
	opt.base = event_base_new();
	opt.secrets = secrets;
	must(opt.base && api_start(&opt, &api, &e) == 0);
}

/* --- what an answer must be ------------------------------------------------------------------------------------------------------
 */

static void check_problem(const struct play *r, const struct json *doc)
{
	const char *type = json_get_text(doc, "type"), *name = type ? strrchr(type, '/') : NULL;
	const struct json *status = json_get(doc, "status");
	enum problem p;

	must(strcmp(r->type, "application/problem+json") == 0 && name);
	p = problem_parse(name + 1);
	must(p < PROBLEM_COUNT && problem_status(p) == r->status);
	must(status && json_as_int(status) == r->status);
	must(json_get_text(doc, "title") && json_get_text(doc, "detail") && *json_get_text(doc, "detail"));
	must(id_valid("req", json_get_text(doc, "request_id")));
	must(strcmp(json_get_text(doc, "request_id"), play_answered(r, "Request-Id")) == 0);
	must((r->status != 503 && r->status != 429) || play_answered(r, "Retry-After"));
	must(r->status != 401 || play_answered(r, "WWW-Authenticate"));
	must(r->status != 405 || play_answered(r, "Allow"));
}

static void check_answer(struct play *r)
{
	const char *text = r->reply.len > 0 ? buf_cstr(&r->reply) : "";
	const struct store_played *store = store_played();
	bool ready = strcmp(r->path, "/readyz") == 0;
	struct json *doc = NULL;
	struct err e;

	must(r->answers == 1);
	must(play_answered(r, "Request-Id") && play_answered(r, "Cache-Control"));
	must(r->status != 500 || store->broken);
	must(r->status != 503 || store->failed || ready || strstr(text, "no-node") || strstr(text, "event streams") ||
			strstr(text, "waiting clients"));
	must(r->status != 400 || store->changes == 0);
	if (r->streaming || r->reply.len == 0 || strncmp(r->type, "text/plain", 10) == 0) {
		must(r->status < 300);
		must(r->reply.len == 0 || text_utf8_clean((const char *)r->reply.data, r->reply.len));
		return;
	}
	must(json_parse((const char *)r->reply.data, r->reply.len, &doc, &e) == 0);
	must(json_type(doc) == JSON_OBJECT);
	if (r->status >= 400 && !ready)
		check_problem(r, doc);
	json_free(doc);
}

/* --- one request
 * ------------------------------------------------------------------------------------------------------------------ */

/* What still waits is told that the server ends, as at a shutdown; or its client goes (then true). */
static bool end_all(struct play *r, bool leave)
{
	void (*on_close)(void *arg) = leave ? r->on_close : NULL;

	if (on_close) {
		r->on_close = NULL;
		on_close(r->on_close_arg);
	}
	event_streams_end(api);
	run_waits_end(api);
	for (unsigned i = 0; i < 1000 && store_play_step(); i++)
		continue;
	must(api->requests == NULL && api->request_count == 0 && api->stream_count == 0);
	auth_cache_clear(api->auth);
	store_play_end();
	return on_close != NULL;
}

static void exchange(bool on_operator, unsigned control, const char *script, const uint8_t *p, size_t n)
{
	bool gone = *script == 'g', left;
	struct play r;

	if (play_read(&r, p, n)) {
		store_play_begin(script + gone, secrets);
		play_hand(&r, on_operator);
		left = gone && r.on_close && r.answers == 0;
		if (left) {
			void (*leave)(void *arg) = r.on_close;

			r.on_close = NULL;
			leave(r.on_close_arg);
		}
		for (unsigned i = 0; i < 1000 && store_play_step(); i++)
			continue;
		for (unsigned hint = 0; hint < control % 4; hint++) {
			store_play_hints();
			for (unsigned i = 0; i < 1000 && store_play_step(); i++)
				continue;
		}
		left = end_all(&r, control & 4) || left;
		if (left)
			must(r.answers == 0 || r.streaming);
		else
			check_answer(&r);
	}
	play_free(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	const uint8_t *line = n ? memchr(p, '\n', n) : NULL;
	char script[64];

	if (!api)
		start();
	if (!line || line - p < 3 || (size_t)(line - p - 3) >= sizeof(script))
		return 0;
	memcpy(script, p + 3, (size_t)(line - p - 3));
	script[line - p - 3] = '\0';
	if (strlen(script) != (size_t)(line - p - 3))
		return 0;
	exchange(p[0] == 'o', p[1], script, line + 1, n - (size_t)(line + 1 - p));
	return 0;
}
