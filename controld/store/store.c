/*
 * Opening and closing the store, calls under way, readiness. Owns the four connections and the parts that live as long as they do.
 * Called by main.c; everything on the loop's thread; nothing blocks.
 *
 * One connection a class, so that a wallet under load never delays a lease: events (leases, claims, events, finish, sweeps), money
 * (create, settle, credit), reads, listen (LISTEN and NOTIFY; commits there are not waited for, they are hints).
 */
#include "store_internal.h"

#include "common/log.h"
#include "common/text.h"

struct call *call_new(struct store *s, void *arg, struct err *e)
{
	struct call *c = calloc(1, sizeof(*c));

	if (!c) {
		err_set(e, ERR_NOMEM, "no memory for a statement");
		return NULL;
	}
	c->s = s;
	c->arg = arg;
	return c;
}

int call_exec(struct call *c, struct pgev *pg, const struct pg_stmt *st, const struct params *p, pg_cb cb, struct err *e)
{
	check_abort(p->n == st->nparams);
	if (!pg) {
		free(c);
		return err_set(e, ERR_UNAVAILABLE, "the store is closing");
	}
	if (pgev_exec(pg, st, p->p, cb, c, e) != 0) {
		free(c);
		return -1;
	}
	return 0;
}

const struct err *call_error(const struct err *e)
{
	if (e->code == ERR_INTERNAL)
		log_error("store: %s", e->text);
	else
		log_warn("store: %s", e->text);
	return e;
}

void call_done_rows(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_done d = { .result = STORE_DONE, .id = "", .detail = "" };
	const char *result;

	(void)sqlstate;
	if (e) {
		c->cb.done(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	result = pg_text(rows, 0, 0);
	d.detail = pg_text(rows, 0, 1);
	if (strcmp(result, "done") == 0)
		d.id = c->id;
	else if (strcmp(result, "not_found") == 0)
		d.result = STORE_DONE_NOT_FOUND;
	else if (strcmp(result, "limit") == 0)
		d.result = STORE_DONE_LIMIT;
	else
		d.result = STORE_DONE_CONFLICT;
	c->cb.done(c->arg, &d, NULL);
	free(c);
}

/* ---- opening ----------------------------------------------------------------------------------------------------------------- */

/*
 * Short statements over many partitions: planning costs more than executing, so plans are made once; they are made when tables may
 * be empty, so they may not settle for walking whole tables; and what such plans are said to cost must not wake the compiler.
 * ephemeral.hide_node is ours (0012): what the functions that write events ask.
 */
#define SESSION                                                                                                                    \
	"SELECT set_config('plan_cache_mode', 'force_generic_plan', false), set_config('enable_seqscan', 'off', false), "          \
	"set_config('enable_bitmapscan', 'off', false), set_config('jit', 'off', false), set_config('ephemeral.hide_node', "

static void on_connect(void *arg, struct pgev *pg)
{
	const struct store *s = arg;
	struct err e;

	if (pgev_sql(pg, s->opt.hide_node ? SESSION "'on', false)" : SESSION "'off', false)", NULL, NULL, &e) != 0)
		log_warn("store: %s", e.text);
}

static int open_class(struct store *s, const char *name, struct pgev **out, struct err *e)
{
	struct pgev_options opt = {
		.conninfo = s->conninfo,
		.class_name = name,
		.statement_timeout_ms = 10000,
		.lock_timeout_ms = STORE_LOCK_MS,
		.idle_in_tx_timeout_ms = 10000,
		.max_outstanding = 4096,
		.on_connect = on_connect,
		.arg = s,
	};

	if (strcmp(name, "listen") == 0) {
		opt.on_connect = hub_on_listen_connect;
		opt.on_notify = hub_on_notify;
		opt.max_outstanding = 256;
	}
	return pgev_new(s->base, &opt, out, e);
}

static void default_options(struct store_options *o)
{
	const struct {
		int64_t *value, fallback;
	} table[] = {
		{ &o->lease_ms, 60000 },
		{ &o->lease_grace_ms, 10000 },
		{ &o->queue_timeout_ms, 600000 },
		{ &o->ending_timeout_ms, 60000 },
		{ &o->retention_ms, INT64_C(30) * 86400000 },
		{ &o->idempotency_ms, 86400000 },
		{ &o->max_queued_per_org, 10000 },
		{ &o->max_running_per_org, 100 },
	};

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		if (*table[i].value <= 0)
			*table[i].value = table[i].fallback;
	}
}

int store_open(struct event_base *base, const struct store_options *opt, struct store **out, struct err *e)
{
	struct store *s = calloc(1, sizeof(*s));
	uint8_t random[8];

	if (!s)
		return err_set(e, ERR_NOMEM, "no memory for the store");
	s->base = base;
	s->opt = *opt;
	default_options(&s->opt);
	random_bytes(random, sizeof(random));
	text_hex(random, sizeof(random), s->instance);
	s->conninfo = strdup(opt->conninfo);
	s->opt.conninfo = s->conninfo;
	if (!s->conninfo) {
		err_set(e, ERR_NOMEM, "no memory for the store");
		goto fail;
	}
	if (hub_new(s, &s->hub, e) != 0 || creates_new(s, &s->creates, e) != 0 || batches_new(s, &s->batches, e) != 0 ||
			settler_new(s, &s->settler, e) != 0 || catalog_new(s, &s->catalog, e) != 0 ||
			figures_new(s, &s->figures, e) != 0)
		goto fail;
	if (open_class(s, "events", &s->events, e) != 0 || open_class(s, "money", &s->money, e) != 0 ||
			open_class(s, "reads", &s->reads, e) != 0 || open_class(s, "listen", &s->listen, e) != 0)
		goto fail;
	*out = s;
	return 0;
fail:
	store_close(s);
	return -1;
}

void store_set_hooks(struct store *s, const struct store_hooks *hooks)
{
	s->hooks = *hooks;
}

/* The connections end first: each calls what is outstanding on it. A part is out of the struct before it ends, so that a callback
 * that asks for more is refused. */
void store_close(struct store *s)
{
	struct pgev **classes[] = { &s->events, &s->money, &s->reads, &s->listen };
	struct creates *creates;
	struct batches *batches;

	if (!s)
		return;
	memset(&s->hooks, 0, sizeof(s->hooks));
	for (size_t i = 0; i < sizeof(classes) / sizeof(classes[0]); i++) {
		struct pgev *pg = *classes[i];

		*classes[i] = NULL;
		if (pg)
			pgev_free(pg);
	}
	creates = s->creates;
	s->creates = NULL;
	creates_free(creates);
	batches = s->batches;
	s->batches = NULL;
	batches_free(batches);
	settler_free(s->settler);
	catalog_free(s->catalog);
	figures_free(s->figures);
	hub_free(s->hub);
	free(s->conninfo);
	free(s);
}

bool store_connected(const struct store *s)
{
	return s->events && pgev_connected(s->events) && pgev_connected(s->money) && pgev_connected(s->reads) &&
	       pgev_connected(s->listen);
}

/* ---- roles ----------------------------------------------------------------------------------------------------------------------
 */

static const char *const role_texts[] = { "", "viewer", "member", "admin" };

const char *store_role_text(enum store_role r)
{
	return r <= STORE_ROLE_ADMIN ? role_texts[r] : "";
}

enum store_role store_role_parse(const char *s)
{
	for (int r = STORE_ROLE_VIEWER; r <= STORE_ROLE_ADMIN; r++) {
		if (strcmp(s, role_texts[r]) == 0)
			return (enum store_role)r;
	}
	return STORE_ROLE_NONE;
}

/* ---- readiness
 * -------------------------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_health = {
	.name = "health",
	.sql = "SELECT (SELECT count(*) FROM schema_migrations), eph_partitions_ahead(), "
	       "current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', "
	       "'local'), "
	       "(SELECT count(*) FROM queue), (SELECT count(*) FROM run_live WHERE node_id IS NOT NULL AND state IN ('running', "
	       "'ending')), "
	       "(SELECT count(*) FROM nodes_live WHERE lease_until_ms > eph_now_ms()), eph_now_ms()",
	.nparams = 0,
};

/* Anybody may ask, without a key: one statement at a time answers all who wait for it. */
struct health_reader {
	struct health_reader *next;
	store_health_cb cb;
	void *arg;
};

static void on_health(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct store *s = arg;
	struct health_reader *reader = s->health, *next;
	struct store_health h = { 0 };

	(void)sqlstate;
	s->health = NULL; /* one that asks again in its callback gets a new statement */
	if (e)
		call_error(e);
	else
		h = (struct store_health){
			.schema_version = pg_i64(rows, 0, 0),
			.partitions_ahead_days = pg_i64(rows, 0, 1),
			.synchronous_replication = pg_bool(rows, 0, 2),
			.queued = pg_i64(rows, 0, 3),
			.running = pg_i64(rows, 0, 4),
			.nodes_live = pg_i64(rows, 0, 5),
			.now_ms = pg_i64(rows, 0, 6),
		};
	for (; reader; reader = next) {
		next = reader->next;
		reader->cb(reader->arg, e ? NULL : &h, e);
		free(reader);
	}
}

int store_health(struct store *s, store_health_cb cb, void *arg, struct err *e)
{
	struct health_reader *reader = calloc(1, sizeof(*reader));

	if (!reader)
		return err_set(e, ERR_NOMEM, "no memory for a statement");
	if (!s->health) {
		const int result = s->reads ? pgev_exec(s->reads, &stmt_health, NULL, on_health, s, e)
					    : err_set(e, ERR_UNAVAILABLE, "the store is closing");

		if (result != 0) {
			free(reader);
			return -1;
		}
	}
	*reader = (struct health_reader){ .next = s->health, .cb = cb, .arg = arg };
	s->health = reader;
	return 0;
}
