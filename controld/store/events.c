/*
 * Reading the timeline: pages of events, and the receipt. Equal pages that are asked for while one is under way share its
 * statement, so that a thousand viewers of one run cost one read. Called by api on the loop's thread; does not block.
 */
#include "store_internal.h"

#include "common/text.h"

#define PAGE_BYTES (4 * 1024 * 1024)
#define SHARED_MAX 256 /* pages under way that are looked through for an equal one */

/* One statement and all who wait for it. */
struct page_read {
	struct page_read *next;
	struct store *s;
	char run_id[ID_MAX], org_id[ID_MAX]; /* org_id "" = any */
	int64_t after;
	int limit;
	struct page_reader *readers, **tail;
};

struct page_reader {
	struct page_reader *next;
	store_events_cb cb;
	void *arg;
};

/* Head, completeness and events are of one snapshot. */
static const struct pg_stmt stmt_events = {
	.name = "events_page",
	.sql = "SELECT h.head, h.complete, e.seq, e.bytes, e.hash FROM ("
	       "SELECT coalesce(l.seq, r.head_seq, 0) AS head, r.settled_at_ms IS NOT NULL AS complete "
	       "FROM runs r LEFT JOIN run_live l ON l.run_id = r.run_id "
	       "WHERE r.run_id = $1 AND ($2::text IS NULL OR r.org_id = $2) AND r.expires_at_ms > eph_now_ms()) h "
	       "LEFT JOIN (SELECT x.seq, x.bytes, x.hash, sum(length(x.bytes)) OVER (ORDER BY x.seq) - length(x.bytes) AS before "
	       "FROM ("
	       "SELECT v.seq, v.bytes, v.hash FROM events v WHERE v.run_id = $1 AND v.seq > $3 ORDER BY v.seq LIMIT $4) x) e "
	       "ON e.before < $5 ORDER BY e.seq",
	.nparams = 5,
};

static void page_detach(struct page_read *r)
{
	struct page_read **at = &r->s->page_reads;

	while (*at && *at != r)
		at = &(*at)->next;
	if (*at)
		*at = r->next;
}

static void page_answer(struct page_read *r, const struct store_events *out, const struct err *e)
{
	while (r->readers) {
		struct page_reader *reader = r->readers;

		r->readers = reader->next;
		reader->cb(reader->arg, out, e);
		free(reader);
	}
}

static void on_page(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct page_read *r = arg;
	struct store_events out = { .found = false };
	struct store_event *list = NULL;
	int n = e ? 0 : pg_nrows(rows);
	struct err no_memory;

	(void)sqlstate;
	page_detach(r); /* a reader that asks again in its callback gets a new statement */
	if (!e) {
		list = calloc(n > 0 ? (size_t)n : 1, sizeof(*list));
		if (!list) {
			err_set(&no_memory, ERR_NOMEM, "no memory for a page of events");
			e = &no_memory;
		}
	}
	for (int i = 0; !e && i < n; i++) {
		struct store_event *v = &list[out.count];

		out.found = true;
		out.head_seq = pg_i64(rows, i, 0);
		out.complete = pg_bool(rows, i, 1);
		if (pg_is_null(rows, i, 2))
			continue;
		v->seq = pg_i64(rows, i, 2);
		v->bytes = pg_bytea(rows, i, 3, &v->len);
		col_bytes(rows, i, 4, v->hash, sizeof(v->hash));
		if (!v->bytes)
			break;
		out.count++;
	}
	out.events = list;
	page_answer(r, e ? NULL : &out, e ? call_error(e) : NULL);
	for (size_t i = 0; i < out.count; i++)
		free((void *)(uintptr_t)list[i].bytes);
	free(list);
	free(r);
}

static struct page_read *page_find(struct store *s, const char *org_id, const char *run_id, int64_t after, int limit)
{
	struct page_read *r = s->page_reads;

	for (int i = 0; r && i < SHARED_MAX; i++, r = r->next) {
		if (r->after == after && r->limit == limit && strcmp(r->run_id, run_id) == 0 && strcmp(r->org_id, org_id) == 0)
			return r;
	}
	return NULL;
}

static int page_start(struct store *s, const char *org_id, const char *run_id, int64_t after, int limit, struct page_read **out,
		struct err *e)
{
	struct page_read *r;
	struct params p = { .n = 0 };

	if (!s->reads)
		return err_set(e, ERR_UNAVAILABLE, "the store is closing");
	r = calloc(1, sizeof(*r));
	if (!r || !text_copy(r->run_id, sizeof(r->run_id), run_id) || !text_copy(r->org_id, sizeof(r->org_id), org_id)) {
		free(r);
		return err_set(e, ERR_NOMEM, "no memory for a page of events");
	}
	r->s = s;
	r->after = after;
	r->limit = limit;
	r->tail = &r->readers;
	params_text(&p, run_id);
	params_text(&p, org_id[0] ? org_id : NULL);
	params_i64(&p, after);
	params_i64(&p, limit);
	params_i64(&p, PAGE_BYTES);
	if (pgev_exec(s->reads, &stmt_events, p.p, on_page, r, e) != 0) {
		free(r);
		return -1;
	}
	r->next = s->page_reads;
	s->page_reads = r;
	*out = r;
	return 0;
}

int store_events_page(struct store *s, const char *org_id, const char *run_id, int64_t after, int limit, store_events_cb cb,
		void *arg, struct err *e)
{
	struct page_reader *reader;
	struct page_read *r;

	if (!org_id)
		org_id = "";
	if (strlen(run_id) >= ID_MAX || strlen(org_id) >= ID_MAX)
		return err_set(e, ERR_INVALID, "that is no run id");
	limit = limit < 1 ? 1 : limit > STORE_EVENTS_PAGE_MAX ? STORE_EVENTS_PAGE_MAX : limit;
	reader = calloc(1, sizeof(*reader));
	if (!reader)
		return err_set(e, ERR_NOMEM, "no memory for a page of events");
	reader->cb = cb;
	reader->arg = arg;
	r = page_find(s, org_id, run_id, after, limit);
	if (!r && page_start(s, org_id, run_id, after, limit, &r, e) != 0) {
		free(reader);
		return -1;
	}
	*r->tail = reader;
	r->tail = &reader->next;
	return 0;
}

/* ---- receipt --------------------------------------------------------------------------------------------------------------------
 */

static const struct pg_stmt stmt_receipt = {
	.name = "receipt",
	.sql = "SELECT r.ended_at_ms IS NOT NULL, r.receipt_signature, coalesce(r.attempt, 0), r.request_hash, r.image_hash, "
	       "coalesce(r.isolation, ''), "
	       "coalesce(r.node_id, ''), coalesce(r.node_seq, 0), r.node_hash, r.usage, n.sign_key, n.receipt_key, n.receipt_sig, "
	       "n.certificate, "
	       "coalesce(l.seq, r.head_seq, 0), coalesce(l.hash, r.head_hash), r.cost "
	       "FROM runs r LEFT JOIN run_live l ON l.run_id = r.run_id LEFT JOIN nodes n ON n.id = r.node_id "
	       "WHERE r.run_id = $1 AND ($2::text IS NULL OR r.org_id = $2) AND r.expires_at_ms > eph_now_ms()",
	.nparams = 2,
};

static void read_receipt(const struct pg_rows *rows, struct store_receipt *r)
{
	int64_t u[8], c[4];

	r->found = true;
	r->ended = pg_bool(rows, 0, 0);
	r->has_signature = col_bytes(rows, 0, 1, r->signature, sizeof(r->signature));
	r->attempt = (uint32_t)pg_i64(rows, 0, 2);
	col_bytes(rows, 0, 3, r->request_hash, sizeof(r->request_hash));
	col_bytes(rows, 0, 4, r->image_hash, sizeof(r->image_hash));
	col_text(rows, 0, 5, r->isolation, sizeof(r->isolation));
	col_text(rows, 0, 6, r->node_id, sizeof(r->node_id));
	r->last_seq = pg_i64(rows, 0, 7);
	col_bytes(rows, 0, 8, r->last_hash, sizeof(r->last_hash));
	if (array_read_i64(pg_text(rows, 0, 9), u, 8))
		r->usage = (struct usage){ u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7] };
	col_bytes(rows, 0, 10, r->sign_key, sizeof(r->sign_key));
	col_bytes(rows, 0, 11, r->receipt_key, sizeof(r->receipt_key));
	col_bytes(rows, 0, 12, r->receipt_sig, sizeof(r->receipt_sig));
	col_bytes(rows, 0, 13, r->node_certificate, sizeof(r->node_certificate));
	r->head_seq = pg_i64(rows, 0, 14);
	col_bytes(rows, 0, 15, r->head_hash, sizeof(r->head_hash));
	if (array_read_i64(pg_text(rows, 0, 16), c, 4))
		r->cost = (struct cost){ c[0], c[1], c[2], c[3], c[0] + c[1] + c[2] + c[3] };
}

static void on_receipt(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_receipt r;

	(void)sqlstate;
	memset(&r, 0, sizeof(r));
	if (!e && pg_nrows(rows) == 1)
		read_receipt(rows, &r);
	c->cb.receipt(c->arg, e ? NULL : &r, e ? call_error(e) : NULL);
	free(c);
}

int store_receipt(struct store *s, const char *org_id, const char *run_id, store_receipt_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.receipt = cb;
	params_text(&p, run_id);
	params_text(&p, org_id);
	return call_exec(c, s->reads, &stmt_receipt, &p, on_receipt, e);
}
