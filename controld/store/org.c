/* Organizations and the money that comes in. Called by api (operator routes) on the loop's thread; does not block. */
#include "store_internal.h"

#include "common/text.h"

/* ---- reading ------------------------------------------------------------------------------------------------------------------
 */

#define ORG_COLUMNS                                                                                                                \
	"o.id, o.name, o.disabled, o.allow_emulated, h.unlimited, o.default_model, o.default_cost_micros, h.balance, h.reserved, " \
	"coalesce(h.max_queued, 0), coalesce(h.max_running, 0), o.created_at_ms, o.selector FROM organizations o JOIN org_hot h "  \
	"ON h.org_id = o.id "

/* A cursor is the id of the last row of the page before. */
static const struct pg_stmt stmt_org_list = {
	.name = "org_list",
	.sql = "SELECT " ORG_COLUMNS "WHERE $1::text IS NULL OR (o.created_at_ms, o.id) < (SELECT c.created_at_ms, c.id FROM "
	       "organizations c WHERE c.id = $1) "
	       "ORDER BY o.created_at_ms DESC, o.id DESC LIMIT $2",
	.nparams = 2,
};

static const struct pg_stmt stmt_org_get = {
	.name = "org_get",
	.sql = "SELECT " ORG_COLUMNS "WHERE o.id = $1",
	.nparams = 1,
};

static void read_org(const struct pg_rows *rows, int i, struct store_org *o)
{
	col_text(rows, i, 0, o->id, sizeof(o->id));
	col_text(rows, i, 1, o->name, sizeof(o->name));
	o->disabled = pg_bool(rows, i, 2);
	o->allow_emulated = pg_bool(rows, i, 3);
	o->unlimited = pg_bool(rows, i, 4);
	col_text(rows, i, 5, o->default_model, sizeof(o->default_model));
	o->default_cost_micros = pg_i64(rows, i, 6);
	o->balance_micros = pg_i64(rows, i, 7);
	o->reserved_micros = pg_i64(rows, i, 8);
	o->max_queued = pg_i64(rows, i, 9);
	o->max_running = pg_i64(rows, i, 10);
	o->created_at_ms = pg_i64(rows, i, 11);
	col_text(rows, i, 12, o->selector, sizeof(o->selector));
}

static void on_orgs(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_org orgs[STORE_LIST_MAX];
	struct store_orgs out = { .orgs = orgs };

	(void)sqlstate;
	if (e) {
		c->cb.orgs(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	memset(orgs, 0, sizeof(orgs));
	/* One row more than asked for says that there is a next page. */
	for (int i = 0; i < pg_nrows(rows) && i < c->limit; i++)
		read_org(rows, i, &orgs[out.count++]);
	if (pg_nrows(rows) > c->limit && out.count > 0)
		out.next_cursor = orgs[out.count - 1].id;
	c->cb.orgs(c->arg, &out, NULL);
	free(c);
}

int store_org_list(struct store *s, const char *cursor, int limit, store_orgs_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.orgs = cb;
	c->limit = limit < 1 ? 1 : limit > STORE_LIST_MAX ? STORE_LIST_MAX : limit;
	params_text(&p, cursor);
	params_i64(&p, c->limit + 1);
	return call_exec(c, s->reads, &stmt_org_list, &p, on_orgs, e);
}

int store_org_get(struct store *s, const char *org_id, store_orgs_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.orgs = cb;
	c->limit = 1;
	params_text(&p, org_id);
	return call_exec(c, s->reads, &stmt_org_get, &p, on_orgs, e);
}

/* ---- changing -----------------------------------------------------------------------------------------------------------------
 */

static const struct pg_stmt stmt_org_create = {
	.name = "org_create",
	.sql = "SELECT result, detail FROM eph_org_create($1, $2, $3, $4, $5, $6, $7, $8)",
	.nparams = 8,
};

int store_org_create(struct store *s, const struct store_org_change *o, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	id_make("org", c->id);
	params_text(&p, c->id);
	params_text(&p, o->name);
	params_bool(&p, o->allow_emulated == 1);
	params_bool(&p, o->unlimited == 1);
	params_text(&p, o->default_model ? o->default_model : "");
	params_i64(&p, o->default_cost_micros > 0 ? o->default_cost_micros : 0);
	params_i64(&p, o->max_queued > 0 ? o->max_queued : 0);
	params_i64(&p, o->max_running > 0 ? o->max_running : 0);
	return call_exec(c, s->money, &stmt_org_create, &p, call_done_rows, e);
}

static const struct pg_stmt stmt_org_update = {
	.name = "org_update",
	.sql = "SELECT result, detail FROM eph_org_update($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
	.nparams = 10,
};

int store_org_update(
		struct store *s, const char *org_id, const struct store_org_change *o, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	if (!text_copy(c->id, sizeof(c->id), org_id))
		c->id[0] = '\0';
	params_text(&p, c->id);
	params_text(&p, o->name);
	params_bool_or_null(&p, o->disabled);
	params_bool_or_null(&p, o->allow_emulated);
	params_bool_or_null(&p, o->unlimited);
	params_text(&p, o->default_model);
	params_i64_or_null(&p, o->default_cost_micros, -1);
	params_i64_or_null(&p, o->max_queued, -1);
	params_i64_or_null(&p, o->max_running, -1);
	params_text(&p, o->selector);
	return call_exec(c, s->money, &stmt_org_update, &p, call_done_rows, e);
}

/* ---- what an organization may know of itself
 * -------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_me = {
	.name = "me",
	.sql = "SELECT o.id, o.name, h.balance, h.reserved, h.unlimited, o.allow_emulated, "
	       "(SELECT count(*) FROM queue q WHERE q.org_id = o.id), "
	       "h.open - (SELECT count(*) FROM queue q WHERE q.org_id = o.id), "
	       "coalesce(h.max_queued, $2), coalesce(h.max_running, $3), c.run_fee, c.compute, c.web_request, c.web_search "
	       "FROM organizations o JOIN org_hot h ON h.org_id = o.id CROSS JOIN LATERAL (SELECT * FROM common_prices p "
	       "WHERE p.valid_from_ms <= eph_now_ms() ORDER BY p.valid_from_ms DESC LIMIT 1) c WHERE o.id = $1",
	.nparams = 3,
};

static void on_me(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_me me = { .queued = 0 };

	(void)sqlstate;
	if (e) {
		c->cb.me(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	if (pg_nrows(rows) == 1) {
		col_text(rows, 0, 0, me.org_id, sizeof(me.org_id));
		col_text(rows, 0, 1, me.org_name, sizeof(me.org_name));
		me.balance_micros = pg_i64(rows, 0, 2);
		me.reserved_micros = pg_i64(rows, 0, 3);
		me.unlimited = pg_bool(rows, 0, 4);
		me.allow_emulated = pg_bool(rows, 0, 5);
		me.queued = pg_i64(rows, 0, 6);
		me.running = pg_i64(rows, 0, 7);
		me.max_queued = pg_i64(rows, 0, 8);
		me.max_running = pg_i64(rows, 0, 9);
		me.price.run_fee = pg_i64(rows, 0, 10);
		me.price.compute = pg_i64(rows, 0, 11);
		me.price.web_request = pg_i64(rows, 0, 12);
		me.price.web_search = pg_i64(rows, 0, 13);
	}
	c->cb.me(c->arg, &me, NULL);
	free(c);
}

int store_me(struct store *s, const char *org_id, store_me_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.me = cb;
	params_text(&p, org_id);
	params_i64(&p, s->opt.max_queued_per_org);
	params_i64(&p, s->opt.max_running_per_org);
	return call_exec(c, s->reads, &stmt_me, &p, on_me, e);
}
