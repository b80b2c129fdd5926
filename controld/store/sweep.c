/*
 * What time does: one statement a kind, called by jobs/ on the loop's thread; does not block. Any number of controlds may sweep at
 * once, rows that another one holds are skipped. What a sweep ended is settled and told like any other end.
 */
#include "store_internal.h"

#include "common/log.h"
#include "common/text.h"

#define START_MS 180000 /* a claim that did not become running by then: boots end after 30 s at the latest */
#define CANCEL_MS 30000 /* a cancel that its host did not carry out */
#define SLACK_MS 120000 /* over a run's own timeout, which its broker keeps */

static const struct pg_stmt stmt_clock = {
	.name = "sweep_clock",
	.sql = "SELECT eph_sweep_clock($1, $2, $3, $4)",
	.nparams = 4,
};

#define SWEPT "SELECT coalesce(run_id, ''), outcome, coalesce(node_id, ''), memory_mib, vcpus, emulated FROM "

static const struct pg_stmt stmt_queue = {
	.name = "sweep_queue",
	.sql = SWEPT "eph_sweep_queue($1, $2, $3) UNION ALL " SWEPT "eph_sweep_disabled($3)",
	.nparams = 3,
};
static const struct pg_stmt stmt_claimed = {
	.name = "sweep_claimed", .sql = SWEPT "eph_sweep_claimed($1, $2, $3, $4)", .nparams = 4
};
static const struct pg_stmt stmt_lost = { .name = "sweep_lost", .sql = SWEPT "eph_sweep_lost($1, $2, $3)", .nparams = 3 };
static const struct pg_stmt stmt_ending = { .name = "sweep_ending", .sql = SWEPT "eph_sweep_ending($1, $2, $3, $4)", .nparams = 4 };
static const struct pg_stmt stmt_expire = { .name = "sweep_expire", .sql = "SELECT eph_sweep_expire($1)", .nparams = 1 };
static const struct pg_stmt stmt_partitions = { .name = "partitions_make", .sql = "SELECT eph_partitions_make()", .nparams = 0 };
static const struct pg_stmt stmt_old = {
	.name = "partitions_old", .sql = "SELECT parent, name, pending FROM eph_partitions_old($1)", .nparams = 1
};

static void swept(struct call *c, int64_t changed, const struct err *e)
{
	const struct store_swept out = { .changed = changed };

	c->cb.swept(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(c);
}

static void on_number(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	(void)sqlstate;
	swept(arg, e ? 0 : pg_i64(rows, 0, 0), e);
}

/* The gap since the last write of anybody is no work that is left. */
static void on_clock(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	(void)sqlstate;
	if (!e && pg_i64(rows, 0, 0) > 5000)
		log_warn("no sweep for a while; leases count from now gap_ms=%lld", (long long)pg_i64(rows, 0, 0));
	swept(arg, 0, e);
}

/* One row of a sweep. True when it moved something. */
static bool take_row(struct store *s, enum store_sweep what, const struct pg_rows *rows, int i)
{
	const char *run = pg_text(rows, i, 0), *outcome = pg_text(rows, i, 1), *node = pg_text(rows, i, 2);
	const uint32_t memory = (uint32_t)pg_i64(rows, i, 3), vcpus = (uint32_t)pg_i64(rows, i, 4);

	if (strcmp(outcome, "waiting") == 0) { /* every controld finds this by itself */
		if (s->hooks.on_queued)
			s->hooks.on_queued(s->hooks.arg, memory, vcpus, pg_bool(rows, i, 5), 1);
		return false;
	}
	if (run[0]) {
		log_info("swept run=%s outcome=%s node=%s", run, outcome, node);
		hub_run_changed(s, run);
	}
	if (strcmp(outcome, "ended") == 0 && what == STORE_SWEEP_LOST)
		figures_lost(s);
	if (strcmp(outcome, "requeued") == 0)
		figures_requeued(s, FIGURES_CLAIM_LOST);
	if (strcmp(outcome, "ended") == 0)
		settle_soon(s, run);
	else
		hub_queued(s, memory, vcpus, pg_bool(rows, i, 5), 1);
	if (node[0])
		hub_node_changed(s, node);
	return true;
}

static void on_runs(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	int64_t changed = 0;

	(void)sqlstate;
	for (int i = 0; !e && i < pg_nrows(rows); i++)
		changed += take_row(c->s, (enum store_sweep)c->kind, rows, i);
	swept(c, changed, e);
}

/* ---- partitions: made ahead, then old ones detached and dropped one at a time
 * ----------------------------------------------------------- */

static void on_dropped(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	(void)rows;
	(void)sqlstate;
	swept(arg, e ? 0 : 1, e);
}

/* Detached (or detached and not dropped, when an earlier sweep broke off there). */
static void on_detached(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	char sql[128];
	struct err refused;

	(void)rows;
	(void)sqlstate;
	if (e) {
		swept(c, 0, e);
		return;
	}
	if (!text_fmt(sql, sizeof(sql), "DROP TABLE IF EXISTS %s", c->text)) {
		swept(c, 0, NULL);
		return;
	}
	log_info("partition past its retention name=%s", c->text);
	if (!c->s->listen)
		err_set(&refused, ERR_UNAVAILABLE, "the store is closing");
	else if (pgev_sql(c->s->listen, sql, on_dropped, c, &refused) == 0)
		return;
	swept(c, 0, &refused);
}

static void on_old(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	char sql[256];
	struct err refused;

	(void)sqlstate;
	if (e || pg_nrows(rows) == 0) {
		swept(c, 0, e);
		return;
	}
	/* Names from the catalog, of our own making: table_YYYYMMDD. */
	col_text(rows, 0, 1, c->text, sizeof(c->text));
	if (pg_is_null(rows, 0, 0)) {
		on_detached(c, rows, "", NULL);
		return;
	}
	if (!text_fmt(sql, sizeof(sql), "ALTER TABLE %s DETACH PARTITION %s %s", pg_text(rows, 0, 0), c->text,
			    pg_bool(rows, 0, 2) ? "FINALIZE" : "CONCURRENTLY")) {
		swept(c, 0, NULL);
		return;
	}
	if (!c->s->listen)
		err_set(&refused, ERR_UNAVAILABLE, "the store is closing");
	else if (pgev_sql(c->s->listen, sql, on_detached, c, &refused) == 0)
		return;
	swept(c, 0, &refused);
}

static void on_made(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct params p = { .n = 0 };
	struct err refused;

	(void)sqlstate;
	if (e) {
		swept(c, 0, e);
		return;
	}
	if (pg_i64(rows, 0, 0) > 0)
		log_info("partitions made count=%lld", (long long)pg_i64(rows, 0, 0));
	params_i64(&p, c->s->opt.retention_ms);
	if (!c->s->events)
		err_set(&refused, ERR_UNAVAILABLE, "the store is closing");
	else if (pgev_exec(c->s->events, &stmt_old, p.p, on_old, c, &refused) == 0)
		return;
	swept(c, 0, &refused);
}

/* ---- all kinds
 * ---------------------------------------------------------------------------------------------------------------------------- */

static int sweep_exec(struct store *s, struct call *c, enum store_sweep what, struct params *p, struct err *e)
{
	const struct store_options *o = &s->opt;

	switch (what) {
	case STORE_SWEEP_CLOCK:
		params_text(p, s->instance);
		params_text(p, EPHEMERAL_VERSION);
		params_i64(p, STORE_BINARY);
		params_i64(p, o->lease_ms);
		return call_exec(c, s->events, &stmt_clock, p, on_clock, e);
	case STORE_SWEEP_QUEUE:
		params_i64(p, o->queue_timeout_ms);
		params_i64(p, o->max_running_per_org);
		params_i64(p, STORE_SWEEP_ROWS);
		return call_exec(c, s->events, &stmt_queue, p, on_runs, e);
	case STORE_SWEEP_CLAIMED:
		params_i64(p, o->lease_ms);
		params_i64(p, o->lease_grace_ms);
		params_i64(p, START_MS);
		params_i64(p, STORE_SWEEP_ROWS);
		return call_exec(c, s->events, &stmt_claimed, p, on_runs, e);
	case STORE_SWEEP_LOST:
		params_i64(p, o->lease_ms);
		params_i64(p, o->lease_grace_ms);
		params_i64(p, STORE_SWEEP_ROWS);
		return call_exec(c, s->events, &stmt_lost, p, on_runs, e);
	case STORE_SWEEP_ENDING:
		params_i64(p, o->ending_timeout_ms);
		params_i64(p, CANCEL_MS);
		params_i64(p, SLACK_MS);
		params_i64(p, STORE_SWEEP_ROWS);
		return call_exec(c, s->events, &stmt_ending, p, on_runs, e);
	case STORE_SWEEP_SETTLE: return settle_sweep(s, c, e);
	case STORE_SWEEP_PARTITIONS: return call_exec(c, s->events, &stmt_partitions, p, on_made, e);
	case STORE_SWEEP_EXPIRE: params_i64(p, STORE_SWEEP_ROWS); return call_exec(c, s->events, &stmt_expire, p, on_number, e);
	case STORE_SWEEP_COUNT: break;
	}
	free(c);
	return err_set(e, ERR_INTERNAL, "no such sweep");
}

int store_sweep(struct store *s, enum store_sweep what, store_swept_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.swept = cb;
	c->kind = (int)what;
	return sweep_exec(s, c, what, &p, e);
}
