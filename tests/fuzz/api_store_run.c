/* Runs, receipts and events of fuzz_api's store. */
#include "api_store.h"

#include "controld/api/run_request.h"
#include "proto/tools.h"

ANSWER(created, store_create, store_create_cb)
{
	r->result = o->what >= '1' && o->what <= '7' ? (enum store_create_result)(o->what - '0') : STORE_CREATED;
	COPY(r->run_id, RUN);
	r->needed_micros = o->number;
	r->limit = 100;
	played.changes += r->result == STORE_CREATED;
}

static void run_fits(const struct store_run_new *n)
{
	org_fits(n->org_id);
	must(id_valid("key", n->key_id));
	text_fits_or_null(n->idempotency_key, RUN_IDEMPOTENCY_MAX);
	must(n->prompt_len > 0 && n->prompt_len <= RUN_PROMPT_MAX && text_utf8_clean(n->prompt, n->prompt_len));
	text_fits(n->request_json, 2, 2 * 1024 * 1024);
	text_fits(n->model, 1, STORE_NAME_MAX - 1);
	within(n->cap_micros, 1, PRICE_MICROS_MAX);
	within(n->timeout_s, 1, 3600);
	within(n->max_model_calls, 1, RUN_MODEL_CALLS_MAX);
	must(n->memory_mib > 0 && n->vcpus > 0 && n->metadata_count <= STORE_METADATA_MAX && n->file_count <= RUN_FILES_MAX);
	for (size_t i = 0; i < n->metadata_count; i++) {
		text_fits(n->metadata[i].key, 1, 4 * RUN_METADATA_KEY_MAX);
		text_fits(n->metadata[i].value, 0, 4 * RUN_METADATA_VALUE_MAX);
	}
	for (size_t i = 0; i < n->file_count; i++)
		must(guest_path_ok(n->files[i].path) && n->files[i].data);
}

int store_run_create(struct store *s, const struct store_run_new *n, store_create_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_MEMBER);
	run_fits(n);
	return OWE(created, "", n->cap_micros);
}

ANSWER(judged, store_create, store_create_cb)
{
	r->result = o->what >= '1' && o->what <= '7' ? (enum store_create_result)(o->what - '0') : STORE_ADMISSIBLE;
	COPY(r->run_id, RUN);
	r->needed_micros = o->number;
	r->limit = 100;
}

int store_run_judge(struct store *s, const struct store_run_new *n, store_create_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_MEMBER);
	org_fits(n->org_id);
	text_fits_or_null(n->idempotency_key, RUN_IDEMPOTENCY_MAX);
	within(n->cap_micros, 1, PRICE_MICROS_MAX);
	return OWE(judged, "", n->cap_micros);
}

ANSWER(run_rows, store_runs, store_runs_cb)
{
	static const struct store_pair pair = { NASTY, NASTY };
	static const struct store_file file = { .path = "a/\"b", .size = 3 };
	static struct store_run run[2];

	run[0] = (struct store_run){ .output = (const uint8_t *)"\xff\x00out", .output_len = 5, .has_output = true };
	COPY(run[0].id, RUN);
	COPY(run[0].org_id, ORG);
	COPY(run[0].status, o->what == '3' ? "failed" : "queued");
	run[0].ended = o->what == '3';
	run[0].error_code = o->what == '3' ? "model_error" : "";
	run[0].error_message = o->what == '3' ? NASTY : "";
	run[0].request_json = o->what == '2' ? "" : "{\"prompt\":\"x\"}";
	run[0].prompt = NASTY;
	run[0].prompt_len = strlen(NASTY);
	run[0].metadata = &pair;
	run[0].files = &file;
	run[0].metadata_count = run[0].file_count = 1;
	run[0].cap_micros = PRICE_MICROS_MAX;
	run[1] = run[0];
	r->runs = run;
	r->count = rows(o);
	r->next_cursor = o->what == '2' ? RUN : NULL;
}

int store_run_get(struct store *s, const char *org_id, const char *run_id, store_runs_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	must(id_valid("run", run_id));
	return OWE(run_rows, "", 0);
}

int store_run_list(
		struct store *s, const char *org_id, const struct store_run_filter *f, store_runs_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	page_fits(f->cursor, f->limit);
	text_fits_or_null(f->status, 24);
	must(f->metadata_count <= STORE_METADATA_MAX);
	for (size_t i = 0; i < f->metadata_count; i++) {
		text_fits(f->metadata[i].key, 0, SIZE_MAX);
		text_fits(f->metadata[i].value, 0, SIZE_MAX);
	}
	return OWE(run_rows, "", 0);
}

ANSWER(cancelled, store_cancel, store_cancel_cb)
{
	r->result = o->what >= '1' && o->what <= '3' ? (enum store_cancel_result)(o->what - '0') : STORE_CANCEL_REQUESTED;
	played.changes += r->result != STORE_CANCEL_NOT_FOUND;
}

int store_run_cancel(struct store *s, const char *org_id, const char *run_id, store_cancel_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_MEMBER);
	org_fits(org_id);
	must(id_valid("run", run_id));
	return OWE(cancelled, "", 0);
}

ANSWER(receipt, store_receipt, store_receipt_cb)
{
	r->found = o->what != '1';
	r->ended = o->what != '2';
	r->has_signature = o->what == '3';
	memset(r->signature, o->what, sizeof(r->signature));
}

int store_receipt(struct store *s, const char *org_id, const char *run_id, store_receipt_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	must(id_valid("run", run_id));
	return OWE(receipt, "", 0);
}

ANSWER(page, store_events, store_events_cb)
{
	static const char bytes[] =
			"{\"run_id\":\"r\",\"seq\":1,\"at\":\"x\",\"t\":0,\"source\":\"host\",\"type\":\"run.queued\",\"data\":{}}";
	static const char bad[] = "{\"run_id\":\"r\",\"seq\":1}";
	static struct store_event ev[2];

	r->found = o->what != '1';
	r->complete = o->what == '2';
	r->head_seq = 2;
	r->events = ev;
	for (int64_t seq = 1; seq <= 2; seq++)
		if (seq > o->number && o->what != '4') {
			const char *b = o->what == '3' ? bad : bytes;

			ev[r->count++] = (struct store_event){ .seq = seq, .bytes = (const uint8_t *)b, .len = strlen(b) };
		}
}

int store_events_page(struct store *s, const char *org_id, const char *run_id, int64_t after, int limit, store_events_cb cb,
		void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	must(id_valid("run", run_id));
	within(after, 0, INT64_C(1000000000000));
	within(limit, 1, STORE_EVENTS_PAGE_MAX);
	return OWE(page, "", after);
}
