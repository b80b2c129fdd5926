/* Who asks: bearers by their keyed hash, and keys. Called by api on the loop's thread; does not block. */
#include "store_internal.h"

#include "common/text.h"

static const struct pg_stmt stmt_auth = {
	.name = "auth",
	.sql = "SELECT result, is_operator, org_id, org_name, key_id, key_name, member_id, role, default_model, default_cost, "
	       "allow_emulated "
	       "FROM eph_auth($1)",
	.nparams = 1,
};

static void read_principal(const struct pg_rows *rows, struct store_principal *p)
{
	const char *result = pg_text(rows, 0, 0);

	p->result = strcmp(result, "ok") == 0         ? STORE_AUTH_OK
		    : strcmp(result, "disabled") == 0 ? STORE_AUTH_DISABLED
						      : STORE_AUTH_EXPIRED;
	if (p->result != STORE_AUTH_OK)
		return;
	p->is_operator = pg_bool(rows, 0, 1);
	col_text(rows, 0, 2, p->org_id, sizeof(p->org_id));
	col_text(rows, 0, 3, p->org_name, sizeof(p->org_name));
	col_text(rows, 0, 4, p->key_id, sizeof(p->key_id));
	col_text(rows, 0, 5, p->key_name, sizeof(p->key_name));
	col_text(rows, 0, 6, p->member_id, sizeof(p->member_id));
	p->role = store_role_parse(pg_text(rows, 0, 7));
	col_text(rows, 0, 8, p->default_model, sizeof(p->default_model));
	p->default_cost_micros = pg_i64(rows, 0, 9);
	p->allow_emulated = pg_bool(rows, 0, 10);
}

static void on_auth(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_principal p = { .result = STORE_AUTH_UNKNOWN };

	(void)sqlstate;
	if (e) {
		c->cb.auth(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	if (pg_nrows(rows) > 0)
		read_principal(rows, &p);
	c->cb.auth(c->arg, &p, NULL);
	free(c);
}

int store_auth(struct store *s, const uint8_t key_hash[32], store_auth_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.auth = cb;
	params_bytes(&p, key_hash, 32);
	return call_exec(c, s->reads, &stmt_auth, &p, on_auth, e);
}

/* ---- keys
 * ------------------------------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_key_list = {
	.name = "key_list",
	.sql = "SELECT k.id, k.org_id, k.name, coalesce(k.member_id, ''), eph_key_role(k.role, m.role), k.created_at_ms, "
	       "coalesce(k.expires_at_ms, 0), coalesce(k.revoked_at_ms, 0), k.last_used_at_ms "
	       "FROM api_keys k LEFT JOIN members m ON m.id = k.member_id WHERE k.org_id = $1 AND ($2::text IS NULL OR "
	       "(k.created_at_ms, k.id) < (SELECT c.created_at_ms, c.id FROM api_keys c WHERE c.id = $2 AND c.org_id = $1)) "
	       "ORDER BY k.created_at_ms DESC, k.id DESC LIMIT $3",
	.nparams = 3,
};

static void read_key(const struct pg_rows *rows, int i, struct store_key *k)
{
	col_text(rows, i, 0, k->id, sizeof(k->id));
	col_text(rows, i, 1, k->org_id, sizeof(k->org_id));
	col_text(rows, i, 2, k->name, sizeof(k->name));
	col_text(rows, i, 3, k->member_id, sizeof(k->member_id));
	k->role = store_role_parse(pg_text(rows, i, 4));
	k->created_at_ms = pg_i64(rows, i, 5);
	k->expires_at_ms = pg_i64(rows, i, 6);
	k->revoked_at_ms = pg_i64(rows, i, 7);
	k->last_used_at_ms = pg_i64(rows, i, 8);
}

static void on_keys(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_key keys[STORE_LIST_MAX];
	struct store_keys out = { .keys = keys };

	(void)sqlstate;
	if (e) {
		c->cb.keys(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	memset(keys, 0, sizeof(keys));
	for (int i = 0; i < pg_nrows(rows) && i < c->limit; i++)
		read_key(rows, i, &keys[out.count++]);
	if (pg_nrows(rows) > c->limit && out.count > 0)
		out.next_cursor = keys[out.count - 1].id;
	c->cb.keys(c->arg, &out, NULL);
	free(c);
}

int store_key_list(struct store *s, const char *org_id, const char *cursor, int limit, store_keys_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.keys = cb;
	c->limit = limit < 1 ? 1 : limit > STORE_LIST_MAX ? STORE_LIST_MAX : limit;
	params_text(&p, org_id);
	params_text(&p, cursor);
	params_i64(&p, c->limit + 1);
	return call_exec(c, s->reads, &stmt_key_list, &p, on_keys, e);
}

static const struct pg_stmt stmt_key_create = {
	.name = "key_create",
	.sql = "SELECT result, detail FROM eph_key_create($1, $2, $3, $4, $5, $6, $7)",
	.nparams = 7,
};

int store_key_create(struct store *s, const struct store_key_new *k, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	id_make("key", c->id);
	params_text(&p, c->id);
	params_text(&p, k->org_id);
	params_bytes(&p, k->key_hash, 32);
	params_text(&p, k->name ? k->name : "");
	params_text(&p, k->member_id ? k->member_id : "");
	params_text(&p, store_role_text(k->role));
	params_i64(&p, k->expires_at_ms);
	return call_exec(c, s->money, &stmt_key_create, &p, call_done_rows, e);
}

static const struct pg_stmt stmt_key_revoke = {
	.name = "key_revoke",
	.sql = "SELECT result, detail FROM eph_key_revoke($1, $2, $3)",
	.nparams = 3,
};

int store_key_revoke(struct store *s, const char *org_id, const char *key_id, bool keep_admin, store_done_cb cb, void *arg,
		struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	if (!text_copy(c->id, sizeof(c->id), key_id))
		c->id[0] = '\0';
	params_text(&p, org_id);
	params_text(&p, c->id);
	params_bool(&p, keep_admin);
	return call_exec(c, s->money, &stmt_key_revoke, &p, call_done_rows, e);
}
