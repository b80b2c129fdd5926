/* /healthz (the process answers), /readyz (it can do its work, with reasons), /problems/NAME. Runs on the loop, does not block. */
#include "api_internal.h"

#include "common/text.h"

#include <inttypes.h>

#define PARTITIONS_MIN_DAYS 2

void health_live(struct api_req *r)
{
	struct buf out = BUF_INIT(256);
	struct jw w;

	jw_init(&w, &out);
	jw_object(&w);
	jw_kstr(&w, "status", "ok");
	jw_kstr(&w, "version", EPHEMERAL_VERSION);
	jw_close(&w);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

/* Lines of text as an array; an empty buffer is an empty array. */
static void put_lines(struct jw *w, const char *name, struct buf *lines)
{
	const char *p = buf_cstr(lines);

	jw_karray(w, name);
	while (p && *p) {
		size_t n = strcspn(p, "\n");

		if (n > 0)
			jw_strn(w, p, n);
		p += n;
		p += strspn(p, "\n");
	}
	jw_close(w);
}

static void answer_ready(struct api_req *r, struct buf *reasons, struct buf *warnings, const struct store_health *h)
{
	struct buf out = BUF_INIT(64 * 1024);
	bool ready;
	struct jw w;

	if (r->api->draining)
		buf_add_str(reasons, "this controld is going down\n");
	if (r->api->opt.not_ready)
		r->api->opt.not_ready(r->api->opt.arg, reasons);
	ready = reasons->len == 0;
	jw_init(&w, &out);
	jw_object(&w);
	jw_kstr(&w, "status", ready ? "ready" : "not ready");
	put_lines(&w, "reasons", reasons);
	put_lines(&w, "warnings", warnings);
	if (h) {
		jw_kint(&w, "schema_version", h->schema_version);
		jw_kint(&w, "nodes_live", h->nodes_live);
		jw_kint(&w, "queued", h->queued);
		jw_kint(&w, "running", h->running);
	}
	jw_close(&w);
	if (!jw_end(&w))
		out.failed = true;
	if (!ready)
		api_retry_after(r, 1);
	api_reply(r, ready ? 200 : 503, &out);
	buf_free(reasons);
	buf_free(warnings);
}

static void on_health(void *arg, const struct store_health *h, const struct err *e)
{
	struct api_req *r = api_back(arg, NULL);
	struct buf reasons = BUF_INIT(8192), warnings = BUF_INIT(8192);

	if (!r)
		return;
	if (e) {
		buf_printf(&reasons, "Postgres does not answer: %s\n", e->text);
	} else {
		if (h->partitions_ahead_days < 0)
			buf_add_str(&reasons, "there is no partition for today's runs\n");
		else if (h->partitions_ahead_days < PARTITIONS_MIN_DAYS)
			buf_printf(&warnings, "partitions reach only %" PRId64 " days ahead\n", h->partitions_ahead_days);
		if (!h->synchronous_replication)
			buf_add_str(&warnings, "synchronous replication is off: a failover may lose the last moments\n");
		if (h->nodes_live == 0)
			buf_add_str(&warnings, "no node is live: runs will wait\n");
	}
	answer_ready(r, &reasons, &warnings, h);
}

void health_ready(struct api_req *r)
{
	struct buf reasons = BUF_INIT(8192), warnings = BUF_INIT(8192);
	struct err e;

	if (store_health(r->api->opt.store, on_health, api_hold(r), &e) == 0)
		return;
	r->holds--;
	buf_printf(&reasons, "Postgres does not answer: %s\n", e.text);
	answer_ready(r, &reasons, &warnings, NULL);
}

void problems_page(struct api_req *r)
{
	enum problem p = problem_parse(api_param(r, 0));
	char text[2048];

	if (p == PROBLEM_COUNT)
		api_problem(r, PROBLEM_NOT_FOUND, "There is no problem type of this name.");
	else if (text_fmt(text, sizeof(text), "%s (%d)\n%s.\n\n%s\n", problem_name(p), problem_status(p), problem_title(p),
				 problem_help(p)))
		api_reply_text(r, 200, text);
	else
		api_problem(r, PROBLEM_INTERNAL, "The text did not fit.");
}
