/*
 * Settlement follows an end within milliseconds: whoever ends a run names it here, and what was named goes to eph_settle as one
 * call. What is lost on the way (a crash, a lock) the sweep finds; one that fails is followed by one that takes each run by itself,
 * so that a run that cannot be settled holds up no other. Owns the list of runs that wait. On the loop's thread; does not block.
 */
#include "store_internal.h"

#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>

#define SETTLE_ROWS 200
#define SETTLE_US 5000

struct settler {
	struct store *s;
	struct buf ids; /* an array under construction; empty = none */
	int count;      /* at most SETTLE_ROWS; more are left to the sweep */
	int in_flight;
	bool each; /* the last sweep failed: the next goes run by run */
	struct event *timer;
};

static const struct pg_stmt stmt_settle = {
	.name = "settle",
	.sql = "SELECT kind, coalesce(run_id, ''), memory_mib, vcpus, emulated, count FROM eph_settle($1, $2, $3)",
	.nparams = 3,
};

static const struct pg_stmt stmt_settle_each = {
	.name = "settle_each",
	.sql = "SELECT kind, coalesce(run_id, ''), memory_mib, vcpus, emulated, count FROM eph_settle_each($1, $2)",
	.nparams = 2,
};

/* Tells who waits. Returns how many runs were settled. */
static int64_t take_settled(struct store *s, const struct pg_rows *rows)
{
	int64_t settled = 0;

	for (int i = 0; i < pg_nrows(rows); i++) {
		if (strcmp(pg_text(rows, i, 0), "settled") == 0) {
			hub_run_changed(s, pg_text(rows, i, 1));
			figures_settled(s, pg_text(rows, i, 1));
			settled++;
		} else if (strcmp(pg_text(rows, i, 0), "failed") == 0) {
			log_error("a run cannot be settled run=%s", pg_text(rows, i, 1));
		} else {
			hub_queued(s, (uint32_t)pg_i64(rows, i, 2), (uint32_t)pg_i64(rows, i, 3), pg_bool(rows, i, 4),
					(uint32_t)pg_i64(rows, i, 5));
		}
	}
	return settled;
}

static void arm(struct settler *t)
{
	const bool now = t->in_flight == 0 || t->count >= SETTLE_ROWS;
	const struct timeval soon = { 0, now ? 0 : SETTLE_US };

	if (t->count > 0 && (now || !event_pending(t->timer, EV_TIMEOUT, NULL)))
		event_add(t->timer, &soon);
}

static void on_settled(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct settler *t = arg;

	(void)sqlstate;
	t->in_flight--;
	if (e)
		call_error(e);
	else
		take_settled(t->s, rows);
	arm(t);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct settler *t = arg;
	struct params p = { .n = 0 };
	struct err e;

	(void)fd;
	(void)what;
	if (t->count == 0)
		return;
	array_end(&t->ids);
	params_text(&p, buf_cstr(&t->ids));
	params_i64(&p, SETTLE_ROWS);
	params_i64(&p, t->s->opt.max_running_per_org);
	if (!t->ids.failed && t->s->money && pgev_exec(t->s->money, &stmt_settle, p.p, on_settled, t, &e) == 0)
		t->in_flight++;
	buf_reset(&t->ids);
	t->count = 0;
}

void settle_soon(struct store *s, const char *run_id)
{
	struct settler *t = s->settler;

	if (t->count >= SETTLE_ROWS)
		return; /* the sweep comes within a second */
	if (t->count == 0)
		array_begin(&t->ids);
	array_text(&t->ids, run_id);
	t->count++;
	arm(t);
}

/* ---- the sweep
 * ------------------------------------------------------------------------------------------------------------------------ */

static void on_swept(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_swept out = { .changed = 0 };

	(void)sqlstate;
	c->s->settler->each = e && (e->code == ERR_INTERNAL || e->code == ERR_CONFLICT);
	if (!e)
		out.changed = take_settled(c->s, rows);
	c->cb.swept(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(c);
}

int settle_sweep(struct store *s, struct call *c, struct err *e)
{
	struct params p = { .n = 0 };

	if (!s->settler->each)
		params_text(&p, NULL);
	params_i64(&p, STORE_SWEEP_ROWS);
	params_i64(&p, s->opt.max_running_per_org);
	return call_exec(c, s->money, s->settler->each ? &stmt_settle_each : &stmt_settle, &p, on_swept, e);
}

int settler_new(struct store *s, struct settler **out, struct err *e)
{
	struct settler *t = calloc(1, sizeof(*t));

	if (t)
		t->timer = evtimer_new(s->base, on_timer, t);
	if (!t || !t->timer) {
		free(t);
		return err_set(e, ERR_NOMEM, "no memory to settle runs");
	}
	t->s = s;
	buf_init(&t->ids, (size_t)ID_MAX * (SETTLE_ROWS + 2));
	*out = t;
	return 0;
}

void settler_free(struct settler *t)
{
	if (!t)
		return;
	event_free(t->timer);
	buf_free(&t->ids);
	free(t);
}
