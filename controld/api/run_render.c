/* The JSON of a run. Pure; called by the run handlers. */
#include "run_render.h"

#include "common/text.h"
#include "proto/errcode.h"

/* --- pieces ------------------------------------------------------------------------------------------------------------- */

static void put_time(struct jw *w, const char *name, int64_t unix_ms)
{
	char text[32];

	if (unix_ms <= 0) {
		jw_knull(w, name);
		return;
	}
	text_time_ms(unix_ms, text);
	jw_kstr(w, name, text);
}

/* "" stands for nothing in the store. */
static void put_text(struct jw *w, const char *name, const char *s)
{
	jw_kstr(w, name, s && *s ? s : NULL);
}

bool utf8_mend(struct buf *out, const uint8_t *p, size_t n)
{
	static const char replacement[] = "\xef\xbf\xbd";
	size_t start = 0, i = 0;

	while (i < n) {
		size_t len = p[i] < 0x80 ? 1 : p[i] >= 0xf0 ? 4 : p[i] >= 0xe0 ? 3 : 2;

		if (len <= n - i && text_utf8_clean((const char *)p + i, len)) {
			i += len;
			continue;
		}
		buf_add(out, p + start, i - start);
		buf_add(out, replacement, 3);
		start = ++i;
	}
	return buf_add(out, p + start, n - start) && !out->failed;
}

static void put_output(struct jw *w, const struct store_run *run)
{
	struct buf mended = BUF_INIT(4 * 1024 * 1024);

	if (!run->has_output) {
		jw_knull(w, "output");
	} else if (text_utf8_clean((const char *)run->output, run->output_len)) {
		jw_kstrn(w, "output", (const char *)run->output, run->output_len);
	} else {
		if (!utf8_mend(&mended, run->output, run->output_len))
			w->failed = true;
		jw_kstrn(w, "output", (const char *)mended.data, mended.len);
		buf_free(&mended);
	}
}

static void put_error(struct jw *w, const struct store_run *run)
{
	enum errcode code = errcode_parse(run->error_code);
	bool known = code < ERRCODE_COUNT;

	if (!*run->error_code) {
		jw_knull(w, "error");
		return;
	}
	jw_kobject(w, "error");
	jw_kstr(w, "code", run->error_code);
	jw_kstr(w, "message", *run->error_message ? run->error_message : known ? errcode_title(code) : run->error_code);
	jw_kstr(w, "remedy", known ? errcode_remedy(code) : "Start the run again.");
	jw_close(w);
}

/* --- money -------------------------------------------------------------------------------------------------------------- */

static int64_t at_most(int64_t v, int64_t limit)
{
	return v < limit ? v : limit;
}

struct cost run_shown_cost(const struct store_run *run)
{
	struct cost c = { .total = run->reserved_micros > 0 ? run->reserved_micros : run->cap_micros };
	int64_t left = c.total;

	if (run->ended)
		return run->cost;
	c.run_fee = at_most(run->price.run_fee, left);
	left -= c.run_fee;
	if (!price_of((int64_t)run->timeout_s * 1000, run->price.compute, &c.compute))
		c.compute = left;
	c.compute = at_most(c.compute, left);
	c.model = left - c.compute;
	return c;
}

static void put_cost(struct jw *w, const struct store_run *run)
{
	struct cost c = run_shown_cost(run);

	jw_kint(w, "cost_micros", c.total);
	jw_kbool(w, "cost_final", run->ended && run->settled);
	jw_kstr(w, "cost_note",
			run->ended && run->settled ? NULL
			: run->ended               ? "Provisional until the charge is booked; this takes a moment."
				     : "Provisional: the whole reservation, split as a run of full length would use it. Final once "
				       "the run has ended and is settled.");
	jw_kbool(w, "billing_pending", run->ended && !run->settled);
	jw_kobject(w, "cost");
	jw_kint(w, "run_fee_micros", c.run_fee);
	jw_kint(w, "compute_micros", c.compute);
	jw_kint(w, "model_micros", c.model);
	jw_kint(w, "web_micros", c.web);
	jw_close(w);
	jw_kint(w, "reserved_micros", run->reserved_micros);
	jw_kint(w, "released_micros", run->released_micros);
}

static void put_usage(struct jw *w, const struct usage *u)
{
	jw_kobject(w, "usage");
	jw_kint(w, "model_calls", u->model_calls);
	jw_kint(w, "input_tokens", u->input_tokens);
	jw_kint(w, "cached_input_tokens", u->cached_input_tokens);
	jw_kint(w, "output_tokens", u->output_tokens);
	jw_kint(w, "total_tokens", u->input_tokens + u->output_tokens); /* cached ones are part of the input */
	jw_kint(w, "web_requests", u->web_requests);
	jw_kint(w, "web_searches", u->web_searches);
	jw_kint(w, "compute_ms", u->compute_ms);
	jw_close(w);
}

/* --- what was asked ----------------------------------------------------------------------------------------------------- */

static void put_prompt(struct jw *w, const struct store_run *run, bool cut)
{
	size_t i, chars = 0, n = run->prompt_len;

	if (cut) {
		for (i = 0; i < run->prompt_len; i++) {
			if (((unsigned char)run->prompt[i] & 0xc0) != 0x80 && chars++ == RUN_LIST_PROMPT_MAX) {
				n = i;
				break;
			}
		}
	}
	jw_kstrn(w, "prompt", run->prompt ? run->prompt : "", n);
}

static void put_files(struct jw *w, const struct store_run *run)
{
	char hex[2 * SHA256_LEN + 1];
	size_t i;

	jw_karray(w, "files");
	for (i = 0; i < run->file_count; i++) {
		text_hex(run->files[i].sha256, SHA256_LEN, hex);
		jw_object(w);
		jw_kstr(w, "path", run->files[i].path);
		jw_kint(w, "size", (int64_t)run->files[i].size);
		jw_kstr(w, "sha256", hex);
		jw_close(w);
	}
	jw_close(w);
}

static void put_metadata(struct jw *w, const struct store_run *run)
{
	size_t i;

	jw_kobject(w, "metadata");
	for (i = 0; i < run->metadata_count; i++)
		jw_kstr(w, run->metadata[i].key, run->metadata[i].value);
	jw_close(w);
}

static void put_resolved(struct jw *w, const struct store_run *run)
{
	put_text(w, "model", run->model);
	jw_knull(w, "workflow");
	jw_kbool(w, "web", false);
	jw_kbool(w, "shell", run->shell);
	jw_kint(w, "timeout_seconds", run->timeout_s);
	jw_kint(w, "max_cost_micros", run->cap_micros);
	jw_kint(w, "max_model_calls", run->max_model_calls);
	put_text(w, "size", run->size);
	jw_kbool(w, "zero_data_retention", run->zero_data_retention);
	put_metadata(w, run);
}

static void put_waiting(struct jw *w, const struct store_run *run)
{
	if (!*run->waiting_reason) {
		jw_knull(w, "waiting_for");
		return;
	}
	jw_kobject(w, "waiting_for");
	jw_kstr(w, "reason", run->waiting_reason);
	put_time(w, "since", run->waiting_since_ms);
	jw_close(w);
}

static void put_place(struct jw *w, const struct store_run *run, const struct run_view *view)
{
	char url[1200];

	put_text(w, "isolation", run->isolation);
	put_text(w, "node", view->hide_node ? "" : *run->node_name ? run->node_name : run->node_id);
	jw_kstr(w, "url", text_fmt(url, sizeof(url), "%s/v1/runs/%s", view->public_url, run->id) ? url : NULL);
}

void run_render(struct jw *w, const struct store_run *run, const struct run_view *view)
{
	jw_object(w);
	jw_kstr(w, "id", run->id);
	jw_kstr(w, "status", run->status);
	if (!view->in_list)
		put_output(w, run);
	put_error(w, run);
	put_cost(w, run);
	put_usage(w, &run->usage);
	put_time(w, "created_at", run->created_at_ms);
	put_time(w, "started_at", run->started_at_ms);
	put_time(w, "ended_at", run->ended_at_ms);
	put_time(w, "expires_at", run->expires_at_ms);
	put_time(w, "cancel_requested_at", run->cancel_requested_at_ms);
	put_waiting(w, run);
	put_resolved(w, run);
	put_place(w, run, view);
	put_prompt(w, run, view->in_list);
	if (!view->in_list) {
		put_files(w, run);
		jw_key(w, "request");
		if (run->request_json && *run->request_json)
			jw_raw(w, run->request_json, strlen(run->request_json));
		else
			jw_null(w);
	}
	jw_close(w);
}
