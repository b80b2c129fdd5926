/* Reading and cancelling runs: one, a list, cancel, receipt. Runs on the loop, does not block. */
#include "api_internal.h"

#include "common/text.h"
#include "run_render.h"

#include <sodium.h>
#include <stdlib.h>

#define FILTER_LIMIT_DEFAULT 20

static struct run_view view_of(const struct api_req *r, bool in_list)
{
	return (struct run_view){ .public_url = r->api->public_url, .hide_node = r->api->opt.hide_node, .in_list = in_list };
}

static void no_such_run(struct api_req *r)
{
	api_problem(r, PROBLEM_NOT_FOUND, "There is no such run in your organization; records are kept for the retention period.");
}

/* --- one ---------------------------------------------------------------------------------------------------------------- */

struct answering {
	struct api_req *r;
	int status;
};

static void on_run(void *arg, const struct store_runs *runs, const struct err *e)
{
	struct answering *ask = arg;
	int status = ask->status;
	struct api_req *r = api_back(ask->r, e);
	struct buf out = BUF_INIT(API_REPLY_MAX);
	struct run_view view;
	struct jw w;

	free(ask);
	if (!r)
		return;
	if (runs->count == 0) {
		no_such_run(r);
		return;
	}
	view = view_of(r, false);
	jw_init(&w, &out);
	run_render(&w, &runs->runs[0], &view);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, status, &out);
}

void run_answer(struct api_req *r, const char *run_id, int status)
{
	struct answering *ask = malloc(sizeof(*ask));
	struct err e;
	int rc;

	if (!ask) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
		return;
	}
	ask->r = api_hold(r);
	ask->status = status;
	rc = store_run_get(r->api->opt.store, r->who.org_id, run_id, on_run, ask, &e);
	if (rc == -1)
		free(ask);
	api_asked(rc, r, &e);
}

/* False after a 404: an id that is none cannot be found, and the store need not be asked. */
static bool run_id_ok(struct api_req *r)
{
	if (id_valid("run", api_param(r, 0)))
		return true;
	no_such_run(r);
	return false;
}

void runs_get(struct api_req *r)
{
	if (run_id_ok(r))
		run_answer(r, api_param(r, 0), 200);
}

void runs_wait(struct api_req *r)
{
	struct field_errors fe;
	int64_t seconds;

	field_errors_init(&fe);
	if (api_query_int(r, "timeout_seconds", 1, 60, 30, &seconds, &fe) == -1)
		api_problem_fields(r, &fe);
	else if (run_id_ok(r))
		run_wait_answer(r, api_param(r, 0), seconds, 200);
}

/* --- cancel ------------------------------------------------------------------------------------------------------------- */

static void on_cancel(void *arg, const struct store_cancel *c, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	if (c->result == STORE_CANCEL_NOT_FOUND) {
		no_such_run(r);
		return;
	}
	if (c->result == STORE_CANCEL_REQUESTED)
		api_wake(r->api, API_WAKE_CANCEL, api_param(r, 0));
	run_answer(r, api_param(r, 0), 200);
}

void runs_cancel(struct api_req *r)
{
	struct body b;
	struct err e;

	body_open(&b, r, "");
	if (!body_ok(&b, r))
		return;
	body_free(&b);
	if (run_id_ok(r))
		api_asked(store_run_cancel(r->api->opt.store, r->who.org_id, api_param(r, 0), on_cancel, api_hold(r), &e), r, &e);
}

/* --- list --------------------------------------------------------------------------------------------------------------- */

static void on_runs(void *arg, const struct store_runs *runs, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(API_REPLY_MAX);
	struct run_view view;
	struct jw w;
	size_t i;

	if (!r)
		return;
	view = view_of(r, true);
	list_begin(&w, &out);
	for (i = 0; i < runs->count; i++)
		run_render(&w, &runs->runs[i], &view);
	list_end(&w, runs->next_cursor);
	api_reply(r, 200, &out);
}

static bool status_known(const char *s)
{
	static const char *const all[] = { "queued", "running", "succeeded", "failed", "cancelled", "timed_out", "interrupted" };
	size_t i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		if (strcmp(all[i], s) == 0)
			return true;
	return false;
}

/* metadata.KEY=VALUE, each of them must match. */
static size_t read_metadata_filter(struct api_req *r, struct store_pair pairs[STORE_METADATA_MAX], struct field_errors *fe)
{
	size_t i, count = 0;

	for (i = 0; i < http_query_size(r->http); i++) {
		const char *name, *value;

		http_query_at(r->http, i, &name, &value);
		if (strncmp(name, "metadata.", 9) != 0)
			continue;
		if (count == STORE_METADATA_MAX)
			query_bad(fe, name, "is one too many; at most %d metadata filters are taken", STORE_METADATA_MAX);
		else
			pairs[count++] = (struct store_pair){ .key = name + 9, .value = value };
	}
	return count;
}

void runs_list(struct api_req *r)
{
	struct store_pair pairs[STORE_METADATA_MAX];
	struct store_run_filter f = { .metadata = pairs };
	struct field_errors fe;
	int64_t limit;
	struct err e;

	field_errors_init(&fe);
	api_query_int(r, "limit", 1, STORE_LIST_MAX, FILTER_LIMIT_DEFAULT, &limit, &fe);
	f.limit = (int)limit;
	f.status = http_query(r->http, "status", NULL);
	if (f.status && !status_known(f.status))
		query_bad(&fe, "status", "must be queued, running, succeeded, failed, cancelled, timed_out or interrupted");
	f.cursor = http_query(r->http, "cursor", NULL);
	if (f.cursor && !*f.cursor)
		f.cursor = NULL;
	if (f.cursor && !id_valid("run", f.cursor))
		query_bad(&fe, "cursor", "must be the next_cursor of the page before, unchanged");
	if (http_query(r->http, "workflow", NULL))
		query_bad(&fe, "workflow", "is not available in this version; leave it out");
	f.metadata_count = read_metadata_filter(r, pairs, &fe);
	if (field_errors_any(&fe)) {
		api_problem_fields(r, &fe);
		return;
	}
	api_asked(store_run_list(r->api->opt.store, r->who.org_id, &f, on_runs, api_hold(r), &e), r, &e);
}

/* --- receipt ------------------------------------------------------------------------------------------------------------ */

static void put_hex(struct jw *w, const char *name, const uint8_t *p, size_t n)
{
	char hex[2 * 64 + 1];

	if (sodium_is_zero(p, n)) {
		jw_knull(w, name);
		return;
	}
	text_hex(p, n, hex);
	jw_kstr(w, name, hex);
}

/* With hide_node the certificate cannot be checked any more, since it is over the id; what is left still proves that all that this
 * key signed is of one host. */
static void put_node(struct jw *w, const struct api *a, const struct store_receipt *rc)
{
	if (!rc->has_signature) {
		jw_knull(w, "node");
		return;
	}
	jw_kobject(w, "node");
	jw_kstr(w, "id", a->opt.hide_node ? NULL : rc->node_id);
	put_hex(w, "signature", rc->signature, sizeof(rc->signature));
	put_hex(w, "receipt_key", rc->receipt_key, sizeof(rc->receipt_key));
	put_hex(w, "receipt_key_signature", rc->receipt_sig, sizeof(rc->receipt_sig));
	put_hex(w, "sign_key", rc->sign_key, sizeof(rc->sign_key));
	put_hex(w, "certificate", rc->node_certificate, sizeof(rc->node_certificate));
	if (a->opt.root_key)
		put_hex(w, "root_key", a->opt.root_key, 32);
	else
		jw_knull(w, "root_key");
	jw_close(w);
}

static void put_receipt(struct jw *w, const struct api_req *r, const struct store_receipt *rc)
{
	jw_object(w);
	jw_kstr(w, "run_id", api_param(r, 0));
	jw_kint(w, "attempt", rc->attempt);
	put_hex(w, "request_sha256", rc->request_hash, SHA256_LEN);
	put_hex(w, "image_sha256", rc->image_hash, SHA256_LEN);
	jw_kstr(w, "isolation", *rc->isolation ? rc->isolation : NULL);
	jw_kint(w, "host_last_seq", rc->last_seq);
	put_hex(w, "host_last_hash", rc->last_hash, EVENT_HASH_LEN);
	jw_kint(w, "last_seq", rc->head_seq);
	put_hex(w, "last_hash", rc->head_hash, EVENT_HASH_LEN);
	jw_kobject(w, "usage");
	jw_kint(w, "model_calls", rc->usage.model_calls);
	jw_kint(w, "input_tokens", rc->usage.input_tokens);
	jw_kint(w, "cached_input_tokens", rc->usage.cached_input_tokens);
	jw_kint(w, "output_tokens", rc->usage.output_tokens);
	jw_kint(w, "web_requests", rc->usage.web_requests);
	jw_kint(w, "web_searches", rc->usage.web_searches);
	jw_kint(w, "compute_ms", rc->usage.compute_ms);
	jw_kint(w, "unmetered_model_micros", rc->usage.unmetered_model_micros);
	jw_close(w);
	jw_kint(w, "cost_micros", rc->cost.total);
	put_node(w, r->api, rc);
	jw_close(w);
}

static void on_receipt(void *arg, const struct store_receipt *rc, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(64 * 1024);
	struct jw w;

	if (!r)
		return;
	if (!rc->found) {
		no_such_run(r);
		return;
	}
	if (!rc->ended) {
		api_problem(r, PROBLEM_CONFLICT,
				"The run has not ended yet; its receipt is made at the end. GET /v1/runs/%s/wait waits for it.",
				api_param(r, 0));
		return;
	}
	jw_init(&w, &out);
	put_receipt(&w, r, rc);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

void runs_receipt(struct api_req *r)
{
	struct err e;

	if (run_id_ok(r))
		api_asked(store_receipt(r->api->opt.store, r->who.org_id, api_param(r, 0), on_receipt, api_hold(r), &e), r, &e);
}
