/* Members of an organization. Called by api on the loop's thread; does not block. */
#include "store_internal.h"

#include "common/text.h"

/* ---- reading ------------------------------------------------------------------------------------------------------------------
 */

#define MEMBER_COLUMNS "m.id, m.name, m.email, m.role, m.created_at_ms FROM members m "

/* The cursor may be a member who was removed since. */
static const struct pg_stmt stmt_member_list = {
	.name = "member_list",
	.sql = "SELECT " MEMBER_COLUMNS "WHERE m.org_id = $1 AND m.removed_at_ms IS NULL AND ($2::text IS NULL OR "
	       "(m.created_at_ms, m.id) < (SELECT c.created_at_ms, c.id FROM members c WHERE c.id = $2 AND c.org_id = $1)) "
	       "ORDER BY m.created_at_ms DESC, m.id DESC LIMIT $3",
	.nparams = 3,
};

static const struct pg_stmt stmt_member_get = {
	.name = "member_get",
	.sql = "SELECT " MEMBER_COLUMNS "WHERE m.org_id = $1 AND m.id = $2 AND m.removed_at_ms IS NULL",
	.nparams = 2,
};

static void read_member(const struct pg_rows *rows, int i, struct store_member *m)
{
	col_text(rows, i, 0, m->id, sizeof(m->id));
	col_text(rows, i, 1, m->name, sizeof(m->name));
	col_text(rows, i, 2, m->email, sizeof(m->email));
	m->role = store_role_parse(pg_text(rows, i, 3));
	m->created_at_ms = pg_i64(rows, i, 4);
}

static void on_members(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_member members[STORE_LIST_MAX];
	struct store_members out = { .members = members };

	(void)sqlstate;
	if (e) {
		c->cb.members(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	memset(members, 0, sizeof(members));
	for (int i = 0; i < pg_nrows(rows) && i < c->limit; i++)
		read_member(rows, i, &members[out.count++]);
	if (pg_nrows(rows) > c->limit && out.count > 0)
		out.next_cursor = members[out.count - 1].id;
	c->cb.members(c->arg, &out, NULL);
	free(c);
}

int store_member_list(
		struct store *s, const char *org_id, const char *cursor, int limit, store_members_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.members = cb;
	c->limit = limit < 1 ? 1 : limit > STORE_LIST_MAX ? STORE_LIST_MAX : limit;
	params_text(&p, org_id);
	params_text(&p, cursor);
	params_i64(&p, c->limit + 1);
	return call_exec(c, s->reads, &stmt_member_list, &p, on_members, e);
}

int store_member_get(struct store *s, const char *org_id, const char *member_id, store_members_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.members = cb;
	c->limit = 1;
	params_text(&p, org_id);
	params_text(&p, member_id);
	return call_exec(c, s->reads, &stmt_member_get, &p, on_members, e);
}

/* ---- changing -----------------------------------------------------------------------------------------------------------------
 */

static const struct pg_stmt stmt_member_create = {
	.name = "member_create",
	.sql = "SELECT result, detail FROM eph_member_create($1, $2, $3, $4, $5)",
	.nparams = 5,
};

int store_member_create(struct store *s, const char *org_id, const struct store_member_change *m, store_done_cb cb, void *arg,
		struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	id_make("mem", c->id);
	params_text(&p, c->id);
	params_text(&p, org_id);
	params_text(&p, m->name);
	params_text(&p, m->email);
	params_text(&p, store_role_text(m->role));
	return call_exec(c, s->money, &stmt_member_create, &p, call_done_rows, e);
}

static const struct pg_stmt stmt_member_update = {
	.name = "member_update",
	.sql = "SELECT result, detail FROM eph_member_update($1, $2, $3, $4, $5)",
	.nparams = 5,
};

int store_member_update(struct store *s, const char *org_id, const char *member_id, const struct store_member_change *m,
		store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	if (!text_copy(c->id, sizeof(c->id), member_id))
		c->id[0] = '\0';
	params_text(&p, org_id);
	params_text(&p, c->id);
	params_text(&p, m->name);
	params_text(&p, m->email);
	params_text(&p, m->role == STORE_ROLE_NONE ? NULL : store_role_text(m->role));
	return call_exec(c, s->money, &stmt_member_update, &p, call_done_rows, e);
}

static const struct pg_stmt stmt_member_remove = {
	.name = "member_remove",
	.sql = "SELECT result, detail FROM eph_member_remove($1, $2)",
	.nparams = 2,
};

int store_member_remove(struct store *s, const char *org_id, const char *member_id, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	if (!text_copy(c->id, sizeof(c->id), member_id))
		c->id[0] = '\0';
	params_text(&p, org_id);
	params_text(&p, c->id);
	return call_exec(c, s->money, &stmt_member_remove, &p, call_done_rows, e);
}
