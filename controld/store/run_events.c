/*
 * Events from hosts. Owns the batches that wait: those of all nodes that come within 5 ms (or until 1,000 records are there) go to
 * Postgres as one statement. With nothing under way a batch leaves in the loop's next turn, so that a lone run's events do not
 * wait. Called by dispatch on the loop's thread; does not block. Every record was judged by event_check() before. A statement that
 * Postgres refuses all the same is sent again batch by batch: one host's events never hold up another's.
 */
#include "store_internal.h"

#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>

#define MERGE_US 5000
#define MERGE_RECORDS 1000
#define MERGE_BYTES (2 * 1024 * 1024)
#define MERGE_BATCHES 256
#define WAITING_BYTES_MAX (64 * 1024 * 1024)

struct piece {
	struct piece *next;
	store_fence_cb cb;
	void *arg;
	char run_id[ID_MAX], node_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	int64_t spent, held, first_seq, last_t_ms;
	uint32_t count;
	bool alone; /* was part of a statement that was refused */
	uint16_t *types;
	uint32_t *lens;
	uint8_t *bytes;
	size_t bytes_len;
};

struct batches {
	struct store *s;
	struct piece *head, **tail;
	size_t records, bytes; /* waiting */
	int in_flight;
	struct event *timer;
};

struct merged {
	struct store *s;
	struct piece *pieces[MERGE_BATCHES];
	int count;
};

static void piece_free(struct piece *p)
{
	free(p->types);
	free(p->lens);
	free(p->bytes);
	free(p);
}

static void piece_answer(struct piece *p, const struct store_fence *f, const struct err *e)
{
	p->cb(p->arg, f, e);
	piece_free(p);
}

/* ---- one statement
 * --------------------------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_events_in = {
	.name = "run_events",
	.sql = "SELECT idx, fence, expected FROM eph_events($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
	.nparams = 11,
};

static void arm(struct batches *b)
{
	const bool now = b->in_flight == 0 || b->records >= MERGE_RECORDS || b->bytes >= MERGE_BYTES;
	const struct timeval soon = { 0, now ? 0 : MERGE_US };

	if (b->head && (now || !event_pending(b->timer, EV_TIMEOUT, NULL)))
		event_add(b->timer, &soon);
}

static void put(struct batches *b, struct piece *p)
{
	p->next = NULL;
	*b->tail = p;
	b->tail = &p->next;
	b->records += p->count;
	b->bytes += p->bytes_len;
}

/* False when there is nobody to blame but the one batch, or the failure is not the batches'. */
static bool send_each(struct batches *b, const struct merged *m, const struct err *e)
{
	if (!b || m->count < 2 || (e->code != ERR_INTERNAL && e->code != ERR_CONFLICT))
		return false;
	for (int i = 0; i < m->count; i++) {
		m->pieces[i]->alone = true;
		put(b, m->pieces[i]);
	}
	return true;
}

static void count_events(struct store *s, const struct piece *p)
{
	size_t at = 0;

	for (uint32_t i = 0; i < p->count; at += p->lens[i++])
		figures_event(s, p->run_id, p->first_seq + i, (enum event_type)p->types[i], p->bytes + at, p->lens[i]);
}

static void on_merged(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct merged *m = arg;
	struct batches *b = m->s->batches;
	struct err missing;

	(void)sqlstate;
	if (b)
		b->in_flight--;
	if (e)
		call_error(e);
	if (e && send_each(b, m, e)) {
		free(m);
		arm(b);
		return;
	}
	for (int i = 0; !e && i < pg_nrows(rows); i++) {
		int64_t idx = pg_i64(rows, i, 0) - 1;
		struct store_fence out;
		struct piece *p;

		if (idx < 0 || idx >= m->count || !m->pieces[idx])
			continue;
		p = m->pieces[idx];
		m->pieces[idx] = NULL;
		out.fence = fence_parse(pg_text(rows, i, 1));
		out.expected_seq = pg_i64(rows, i, 2);
		if (out.fence == FENCE_APPLIED && p->count > 0) {
			hub_run_changed(m->s, p->run_id);
			count_events(m->s, p);
		}
		piece_answer(p, &out, NULL);
	}
	err_set(&missing, ERR_INTERNAL, "a batch of events was not answered");
	for (int i = 0; i < m->count; i++) {
		if (m->pieces[i])
			piece_answer(m->pieces[i], NULL, e ? e : call_error(&missing));
	}
	b = m->s->batches;
	free(m);
	if (b)
		arm(b);
}

static struct merged *take(struct batches *b)
{
	struct merged *m = calloc(1, sizeof(*m));
	size_t records = 0, bytes = 0;

	if (!m)
		return NULL;
	m->s = b->s;
	while (b->head && m->count < MERGE_BATCHES) {
		struct piece *p = b->head;

		if (m->count > 0 && (p->alone || m->pieces[0]->alone || records + p->count > MERGE_RECORDS ||
						    bytes + p->bytes_len > MERGE_BYTES))
			break;
		records += p->count;
		bytes += p->bytes_len;
		b->head = p->next;
		if (!b->head)
			b->tail = &b->head;
		b->records -= p->count;
		b->bytes -= p->bytes_len;
		m->pieces[m->count++] = p;
	}
	return m;
}

/* The arrays of eph_events, in its order. */
enum { A_NODES, A_RUNS, A_SPENT, A_HELD, A_FIRST, A_COUNTS, A_LAST_T, A_TYPES, A_LENS, A_COUNT };

static void write_arrays(const struct merged *m, struct buf a[A_COUNT], struct buf *tokens, struct buf *blob)
{
	for (int i = 0; i < A_COUNT; i++)
		array_begin(&a[i]);
	for (int i = 0; i < m->count; i++) {
		const struct piece *p = m->pieces[i];

		array_text(&a[A_NODES], p->node_id);
		array_text(&a[A_RUNS], p->run_id);
		buf_add(tokens, p->token, TOKEN_LEN);
		array_i64(&a[A_SPENT], p->spent);
		array_i64(&a[A_HELD], p->held);
		array_i64(&a[A_FIRST], p->first_seq);
		array_i64(&a[A_COUNTS], p->count);
		array_i64(&a[A_LAST_T], p->last_t_ms);
		for (uint32_t k = 0; k < p->count; k++) {
			array_text(&a[A_TYPES], event_type_text((enum event_type)p->types[k]));
			array_i64(&a[A_LENS], p->lens[k]);
		}
		buf_add(blob, p->bytes, p->bytes_len);
	}
	for (int i = 0; i < A_COUNT; i++)
		array_end(&a[i]);
}

static int send_merged(struct store *s, struct merged *m, struct err *e)
{
	struct buf a[A_COUNT], tokens = BUF_INIT(MERGE_BATCHES * TOKEN_LEN), blob = BUF_INIT(MERGE_BYTES + LINK_MESSAGE_MAX);
	struct params p = { .n = 0 };
	bool failed = false;
	int result = -1;

	for (int i = 0; i < A_COUNT; i++)
		buf_init(&a[i], 256 * 1024);
	write_arrays(m, a, &tokens, &blob);
	for (int i = 0; i < A_COUNT; i++) {
		if (i == A_SPENT)
			params_bytes(&p, tokens.data ? tokens.data : (const uint8_t *)"", tokens.len);
		params_text(&p, buf_cstr(&a[i]));
		failed = failed || a[i].failed || !a[i].data;
	}
	params_bytes(&p, blob.data ? blob.data : (const uint8_t *)"", blob.len);
	if (failed || blob.failed || tokens.failed)
		err_set(e, ERR_INTERNAL, "a batch of events cannot be written down");
	else if (!s->events)
		err_set(e, ERR_UNAVAILABLE, "the store is closing");
	else
		result = pgev_exec(s->events, &stmt_events_in, p.p, on_merged, m, e);
	for (int i = 0; i < A_COUNT; i++)
		buf_free(&a[i]);
	buf_free(&tokens);
	buf_free(&blob);
	return result;
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct batches *b = arg;
	struct err e;

	(void)fd;
	(void)what;
	for (int i = 0; b->head && i < 16; i++) {
		struct merged *m = take(b);

		if (!m)
			break;
		if (send_merged(b->s, m, &e) == 0) {
			b->in_flight++;
			continue;
		}
		call_error(&e);
		for (int k = 0; k < m->count; k++)
			piece_answer(m->pieces[k], NULL, &e);
		free(m);
	}
	arm(b);
}

/* ---- one batch
 * ------------------------------------------------------------------------------------------------------------------------------ */

static bool piece_fill(struct piece *p, const struct link_events *ev)
{
	size_t at = 0;

	for (uint32_t i = 0; i < ev->record_count; i++)
		p->bytes_len += ev->records[i].len;
	p->count = ev->record_count;
	p->types = calloc(ev->record_count + 1, sizeof(*p->types));
	p->lens = calloc(ev->record_count + 1, sizeof(*p->lens));
	p->bytes = malloc(p->bytes_len + 1);
	if (!p->types || !p->lens || !p->bytes)
		return false;
	for (uint32_t i = 0; i < ev->record_count; i++) {
		p->types[i] = ev->records[i].type;
		p->lens[i] = ev->records[i].len;
		if (ev->records[i].len > 0)
			memcpy(p->bytes + at, ev->records[i].bytes, ev->records[i].len);
		at += ev->records[i].len;
	}
	return true;
}

static int64_t not_negative(int64_t v)
{
	return v < 0 ? 0 : v > PRICE_MICROS_MAX ? PRICE_MICROS_MAX : v;
}

int store_run_events(struct store *s, const char *node_id, const struct link_events *ev, int64_t last_t_ms, store_fence_cb cb,
		void *arg, struct err *e)
{
	struct batches *b = s->batches;
	struct piece *p;

	if (!b || b->bytes >= WAITING_BYTES_MAX)
		return err_set(e, ERR_UNAVAILABLE, "too many events wait to be stored");
	if (ev->record_count > LINK_EVENTS_MAX || ev->first_seq > INT32_MAX)
		return err_set(e, ERR_LIMIT, "a batch has at most %d records", LINK_EVENTS_MAX);
	for (uint32_t i = 0; i < ev->record_count; i++) {
		if (ev->records[i].type >= EV_COUNT)
			return err_set(e, ERR_INVALID, "record %u has no type of ours", i);
	}
	p = calloc(1, sizeof(*p));
	if (!p || !piece_fill(p, ev)) {
		if (p)
			piece_free(p);
		return err_set(e, ERR_NOMEM, "no memory for events");
	}
	if (!text_copy(p->run_id, sizeof(p->run_id), ev->run_id) || !text_copy(p->node_id, sizeof(p->node_id), node_id)) {
		piece_free(p);
		return err_set(e, ERR_INVALID, "that is no id");
	}
	p->cb = cb;
	p->arg = arg;
	memcpy(p->token, ev->token, TOKEN_LEN);
	p->spent = not_negative(ev->spent_micros);
	p->held = not_negative(ev->held_micros);
	p->first_seq = (int64_t)ev->first_seq;
	p->last_t_ms = not_negative(last_t_ms);
	put(b, p);
	arm(b);
	return 0;
}

int batches_new(struct store *s, struct batches **out, struct err *e)
{
	struct batches *b = calloc(1, sizeof(*b));

	if (b)
		b->timer = evtimer_new(s->base, on_timer, b);
	if (!b || !b->timer) {
		free(b);
		return err_set(e, ERR_NOMEM, "no memory for events");
	}
	b->s = s;
	b->tail = &b->head;
	*out = b;
	return 0;
}

void batches_free(struct batches *b)
{
	struct err e;

	if (!b)
		return;
	err_set(&e, ERR_UNAVAILABLE, "the store is closing");
	while (b->head) {
		struct piece *p = b->head;

		b->head = p->next;
		piece_answer(p, NULL, &e);
	}
	event_free(b->timer);
	free(b);
}
