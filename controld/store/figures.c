/* Figures for metrics (figures.h): counting, and the two statements behind it. On the loop's thread; does not block. */
#include "store/figures.h"

#include "store_internal.h"

#include "common/clock.h"
#include "common/json.h"
#include "common/metrics.h"
#include "proto/event.h"

#include <event2/event.h>

#define READ_EVERY_MS 3000
#define LOOKED_MS 300000 /* nobody asked for so long: nothing is read or counted by statement any more */
#define SETTLED_MAX 1000 /* runs whose ends wait to be looked at */
#define SETTLED_MS 1000

const uint32_t figures_bounds_ms[FIGURES_BUCKETS] = { 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000,
	600000 };
const char *const figures_create_names[FIGURES_CREATES] = { "created", "replayed", "key_mismatch", "key_in_progress", "no_money",
	"too_many_queued", "no_node", "disabled", "unavailable", "error" };
const char *const figures_mode_names[FIGURES_MODES] = { "cold", "clone", "warm", "other" };
const char *const figures_requeue_names[FIGURES_REQUEUES] = { "no_room", "start_failed", "claim_lost" };
const char *const figures_end_names[FIGURES_ENDS] = { "succeeded", "failed", "cancelled", "timed_out", "interrupted" };
const char *const figures_state_names[FIGURES_STATES] = { "queued", "claimed", "running", "ending", "ended" };
const char *const figures_node_names[FIGURES_NODES] = { "live", "draining", "probation", "stopped", "lost", "unseen" };
const char *const figures_pool_names[FIGURES_POOLS] = { "events", "money", "reads", "listen" };

_Static_assert(STORE_ORG_DISABLED + 1 == FIGURES_CREATE_UNAVAILABLE, "a name for each result of a create");

struct figures {
	struct store *s;
	struct store_figures f;
	int64_t looked_ms;      /* CLOCK_BOOTTIME; 0 = never */
	bool reading, counting; /* a statement is under way */
	struct event *read_timer, *settled_timer;
	struct buf settled; /* ids, an array under construction; empty = none */
	int settled_count;
};

static bool looked_at(const struct figures *g)
{
	return g->looked_ms != 0 && clock_boot_ms() - g->looked_ms < LOOKED_MS;
}

static void after(struct event *timer, int ms)
{
	const struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };

	if (!event_pending(timer, EV_TIMEOUT, NULL))
		event_add(timer, &tv);
}

static void took(struct figures_times *t, int64_t ms)
{
	metrics_took(figures_bounds_ms, FIGURES_BUCKETS, t->bucket, &t->sum_ms, ms);
}

static size_t index_of(const char *const *names, size_t n, const char *name)
{
	size_t i = 0;

	while (i < n && strcmp(names[i], name) != 0)
		i++;
	return i;
}

/* ---- read off the database ------------------------------------------------------------------------------------------------- */

/* The order of a node's states: what it can do about a run comes first. Nodes that are revoked or removed are none. */
static const struct pg_stmt stmt_read = {
	.name = "figures",
	.sql = "SELECT 'run', state, count(*), max(eph_now_ms() - CASE WHEN state = 'ended' THEN state_at_ms ELSE created_at_ms "
	       "END), 0 "
	       "FROM run_live GROUP BY state UNION ALL "
	       "SELECT 'node', CASE WHEN v.total_memory_mib = 0 AND v.lease_until_ms = 0 THEN 'unseen' "
	       "WHEN v.stopped_at_ms > 0 AND v.lease_until_ms <= v.stopped_at_ms THEN 'stopped' "
	       "WHEN v.lease_until_ms <= eph_now_ms() THEN 'lost' "
	       "WHEN n.state = 'draining' THEN 'draining' WHEN v.failed_in_row >= 3 THEN 'probation' ELSE 'live' END AS what, "
	       "count(*), sum(v.free_slots), sum(v.total_slots) "
	       "FROM nodes n JOIN nodes_live v ON v.node_id = n.id WHERE n.state <> 'revoked' AND n.removed_at_ms IS NULL GROUP BY "
	       "what "
	       "UNION ALL SELECT 'schema', '', (SELECT count(*) FROM schema_migrations), 0, 0",
	.nparams = 0,
};

static void read_row(struct figures_read *r, const struct pg_rows *rows, int i)
{
	const char *kind = pg_text(rows, i, 0), *what = pg_text(rows, i, 1);
	const int64_t count = pg_i64(rows, i, 2);
	size_t at;

	if (strcmp(kind, "schema") == 0) {
		r->schema_version = count;
	} else if (strcmp(kind, "run") == 0) {
		at = index_of(figures_state_names, FIGURES_STATES, what);
		if (at == FIGURES_STATES)
			return;
		r->runs[at] = (uint64_t)count;
		if (at == FIGURES_QUEUED)
			r->oldest_queued_ms = pg_i64(rows, i, 3);
		else if (at == FIGURES_UNSETTLED)
			r->oldest_unsettled_ms = pg_i64(rows, i, 3);
	} else {
		at = index_of(figures_node_names, FIGURES_NODES, what);
		if (at == FIGURES_NODES)
			return;
		r->nodes[at] = (uint64_t)count;
		if (at == FIGURES_NODE_LIVE) {
			r->free_slots = (uint64_t)pg_i64(rows, i, 3);
			r->total_slots = (uint64_t)pg_i64(rows, i, 4);
		}
	}
}

static void on_read(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct figures *g = arg;

	(void)sqlstate;
	g->reading = false;
	if (e) {
		call_error(e);
		g->f.read.failed = true;
		return;
	}
	g->f.read = (struct figures_read){ .at_boot_ms = clock_boot_ms() };
	for (int i = 0; i < pg_nrows(rows); i++)
		read_row(&g->f.read, rows, i);
}

static void read_now(struct figures *g)
{
	struct err e;

	if (g->reading || !g->s->reads)
		return;
	if (pgev_exec(g->s->reads, &stmt_read, NULL, on_read, g, &e) == 0)
		g->reading = true;
	else
		g->f.read.failed = true;
}

static void on_read_timer(evutil_socket_t fd, short what, void *arg)
{
	struct figures *g = arg;

	(void)fd;
	(void)what;
	if (!looked_at(g))
		return;
	read_now(g);
	after(g->read_timer, READ_EVERY_MS);
}

const struct store_figures *store_figures(struct store *s)
{
	const struct pgev *pools[FIGURES_POOLS] = { s->events, s->money, s->reads, s->listen };
	struct figures *g = s->figures;

	g->looked_ms = clock_boot_ms();
	if (!event_pending(g->read_timer, EV_TIMEOUT, NULL))
		after(g->read_timer, 0);
	for (size_t i = 0; i < FIGURES_POOLS; i++) {
		g->f.pools[i].connected = pools[i] && pgev_connected(pools[i]);
		g->f.pools[i].outstanding = pools[i] ? (uint64_t)pgev_outstanding(pools[i]) : 0;
	}
	return &g->f;
}

/* ---- counting -------------------------------------------------------------------------------------------------------------- */

void figures_created(struct store *s, const struct store_create *c, const struct err *e)
{
	uint64_t *creates = s->figures->f.creates;

	if (e)
		creates[e->code == ERR_UNAVAILABLE ? FIGURES_CREATE_UNAVAILABLE : FIGURES_CREATE_ERROR]++;
	else if (c->result <= STORE_ORG_DISABLED)
		creates[c->result]++;
}

void figures_claimed(struct store *s, const struct assignment *a)
{
	struct store_figures *f = &s->figures->f;

	f->claims++;
	if (a->attempt > 1)
		f->claims_again++;
	else
		took(&f->claim, a->age_ms);
}

void figures_requeued(struct store *s, enum figures_requeue why)
{
	s->figures->f.requeues[why]++;
}

void figures_lost(struct store *s)
{
	s->figures->f.lost_runs++;
}

/* A worker started: how, and how long after its run was created. Its bytes were judged before. */
void figures_event(struct store *s, const char *run_id, int64_t seq, enum event_type type, const uint8_t *bytes, size_t n)
{
	enum figures_mode mode = FIGURES_OTHER;
	struct json *doc;
	const char *text;
	int64_t t_ms;
	struct err e;

	if (type != EV_WORKER_STARTED || event_check(bytes, n, run_id, (uint64_t)seq, &type, &t_ms, &e) != 0 ||
			json_parse((const char *)bytes, n, &doc, &e) != 0)
		return;
	text = json_get_text(json_get(doc, "data"), "start_mode");
	if (text)
		mode = (enum figures_mode)index_of(figures_mode_names, FIGURES_OTHER, text);
	took(&s->figures->f.start[mode], t_ms);
	json_free(doc);
}

/* ---- ends: looked at once they are settled ---------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_ends = {
	.name = "figures_ends",
	.sql = "SELECT r.status, coalesce(r.error_code, ''), coalesce(r.settled_at_ms - r.ended_at_ms, 0), "
	       "(SELECT coalesce(sum(c), 0) FROM unnest(r.cost) AS c) "
	       "FROM unnest($1::text[]) AS t(id) JOIN LATERAL (SELECT * FROM runs WHERE run_id = t.id) AS r ON true",
	.nparams = 1,
};

static void on_ends(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct figures *g = arg;

	(void)sqlstate;
	g->counting = false;
	if (e)
		call_error(e);
	for (int i = 0; !e && i < pg_nrows(rows); i++) {
		const size_t end = index_of(figures_end_names, FIGURES_ENDS, pg_text(rows, i, 0));
		const enum errcode code = errcode_parse(pg_text(rows, i, 1));

		if (end == FIGURES_ENDS)
			continue;
		g->f.ended[end]++;
		if (code != ERRCODE_NONE && code < ERRCODE_COUNT)
			g->f.errors[code]++;
		took(&g->f.settle, pg_i64(rows, i, 2));
		g->f.charged_micros += (uint64_t)pg_i64(rows, i, 3);
	}
	if (g->settled_count > 0)
		after(g->settled_timer, SETTLED_MS);
}

static void on_settled_timer(evutil_socket_t fd, short what, void *arg)
{
	struct figures *g = arg;
	struct params p = { .n = 0 };
	struct err e;

	(void)fd;
	(void)what;
	if (g->settled_count == 0 || g->counting)
		return;
	array_end(&g->settled);
	params_text(&p, buf_cstr(&g->settled));
	if (!g->settled.failed && g->s->reads && pgev_exec(g->s->reads, &stmt_ends, p.p, on_ends, g, &e) == 0)
		g->counting = true;
	else
		g->f.not_looked_at += (uint64_t)g->settled_count;
	buf_reset(&g->settled);
	g->settled_count = 0;
}

void figures_settled(struct store *s, const char *run_id)
{
	struct figures *g = s->figures;

	if (!looked_at(g))
		return;
	if (g->settled_count >= SETTLED_MAX) {
		g->f.not_looked_at++;
		return;
	}
	if (g->settled_count == 0)
		array_begin(&g->settled);
	array_text(&g->settled, run_id);
	g->settled_count++;
	if (!g->counting)
		after(g->settled_timer, SETTLED_MS);
}

/* ---- up and down ------------------------------------------------------------------------------------------------------------ */

int figures_new(struct store *s, struct figures **out, struct err *e)
{
	struct figures *g = calloc(1, sizeof(*g));

	if (!g)
		return err_set(e, ERR_NOMEM, "no memory for figures");
	g->s = s;
	buf_init(&g->settled, (size_t)ID_MAX * (SETTLED_MAX + 2));
	g->read_timer = evtimer_new(s->base, on_read_timer, g);
	g->settled_timer = evtimer_new(s->base, on_settled_timer, g);
	*out = g;
	if (g->read_timer && g->settled_timer)
		return 0;
	return err_set(e, ERR_NOMEM, "no memory for figures");
}

/* When the connections are closed: no statement of ours is under way. */
void figures_free(struct figures *g)
{
	if (!g)
		return;
	if (g->read_timer)
		event_free(g->read_timer);
	if (g->settled_timer)
		event_free(g->settled_timer);
	buf_free(&g->settled);
	free(g);
}
