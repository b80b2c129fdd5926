/* Hosts: join tokens, enrolment, lists, drain and revoke. Called by api and dispatch on the loop's thread; does not block. */
#include "store_internal.h"

#include "common/text.h"

/* ---- join tokens and enrolment
 * --------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_token = {
	.name = "node_token",
	.sql = "INSERT INTO node_tokens (id, secret_hash, uses_left, expires_at_ms, labels, isolation, created_at_ms) "
	       "VALUES ($1, $2, $3, $4, $5, $6, eph_now_ms()) RETURNING 'done', ''",
	.nparams = 6,
};

int store_node_token_create(struct store *s, const uint8_t secret_hash[32], int64_t uses, int64_t expires_at_ms, const char *labels,
		const char *isolation, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	id_make("nt", c->id);
	params_text(&p, c->id);
	params_bytes(&p, secret_hash, 32);
	params_i64(&p, uses);
	params_i64(&p, expires_at_ms);
	params_text(&p, labels ? labels : "");
	params_text(&p, isolation);
	return call_exec(c, s->money, &stmt_token, &p, call_done_rows, e);
}

static const struct pg_stmt stmt_enrol = {
	.name = "node_enrol",
	.sql = "SELECT result, coalesce(node_id, '') FROM eph_enrol($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
	.nparams = 10,
};

static void on_enrol(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	static const struct {
		const char *text;
		enum store_enrol_result result;
	} table[] = {
		{ "ok", STORE_ENROL_OK },
		{ "expired", STORE_ENROL_EXPIRED },
		{ "used_up", STORE_ENROL_USED_UP },
		{ "isolation", STORE_ENROL_ISOLATION },
		{ "key_revoked", STORE_ENROL_KEY_REVOKED },
	};
	struct call *c = arg;
	struct store_enrol out = { .result = STORE_ENROL_UNKNOWN_TOKEN };

	(void)sqlstate;
	if (!e) {
		for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
			if (strcmp(pg_text(rows, 0, 0), table[i].text) == 0)
				out.result = table[i].result;
		}
		if (out.result == STORE_ENROL_OK)
			col_text(rows, 0, 1, out.node_id, sizeof(out.node_id));
	}
	c->cb.enrol(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(c);
}

int store_node_enrol(struct store *s, const uint8_t secret_hash[32], const struct link_enrol *n, store_enrol_cb cb, void *arg,
		struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.enrol = cb;
	id_make("node", c->id);
	params_text(&p, c->id);
	params_bytes(&p, secret_hash, 32);
	params_text(&p, n->name);
	params_text(&p, n->labels);
	params_text(&p, strcmp(n->isolation, "kvm") == 0 ? "kvm" : "emulated");
	params_bytes(&p, n->sign_key, sizeof(n->sign_key));
	params_bytes(&p, n->seal_key, sizeof(n->seal_key));
	params_bytes(&p, n->receipt_key, sizeof(n->receipt_key));
	params_bytes(&p, n->seal_sig, sizeof(n->seal_sig));
	params_bytes(&p, n->receipt_sig, sizeof(n->receipt_sig));
	return call_exec(c, s->money, &stmt_enrol, &p, on_enrol, e);
}

static const struct pg_stmt stmt_certify = {
	.name = "node_certify",
	.sql = "WITH u AS (UPDATE nodes SET certificate = $2 WHERE id = $1 RETURNING id) "
	       "SELECT CASE WHEN EXISTS (SELECT 1 FROM u) THEN 'done' ELSE 'not_found' END, ''",
	.nparams = 2,
};

int store_node_certify(
		struct store *s, const char *node_id, const uint8_t certificate[64], store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	if (!text_copy(c->id, sizeof(c->id), node_id))
		c->id[0] = '\0';
	params_text(&p, c->id);
	params_bytes(&p, certificate, 64);
	return call_exec(c, s->money, &stmt_certify, &p, call_done_rows, e);
}

/* ---- lists
 * ----------------------------------------------------------------------------------------------------------------------------- */

#define NODE_COLUMNS                                                                                                               \
	"n.id, n.name, n.labels, n.isolation, n.state, n.sign_key, n.seal_key, n.receipt_key, v.lease_until_ms > eph_now_ms(), "   \
	"v.failed_in_row >= 3, v.lease_until_ms, v.seen_at_ms, n.created_at_ms, v.total_memory_mib, v.total_vcpus, "               \
	"v.total_slots, "                                                                                                          \
	"v.free_memory_mib, v.free_vcpus, v.free_slots, "                                                                          \
	"(SELECT count(*) FROM run_live l WHERE l.node_id = n.id AND l.state <> 'ended'), "                                        \
	"v.stopped_at_ms > 0 AND v.lease_until_ms <= v.stopped_at_ms, v.failed_in_row, v.probation_until_ms, v.image, "            \
	"v.image_state, v.image_note "                                                                                             \
	"FROM nodes n JOIN nodes_live v ON v.node_id = n.id "

static const struct pg_stmt stmt_node_get = {
	.name = "node_get",
	.sql = "SELECT " NODE_COLUMNS "WHERE n.id = $1",
	.nparams = 1,
};

static const struct pg_stmt stmt_node_list = {
	.name = "node_list",
	.sql = "SELECT " NODE_COLUMNS "WHERE n.removed_at_ms IS NULL AND ($1::text IS NULL OR n.no < (SELECT c.no FROM nodes c "
	       "WHERE c.id = $1)) ORDER BY n.no DESC LIMIT $2",
	.nparams = 2,
};

static void read_node(const struct pg_rows *rows, int i, struct store_node *n)
{
	uint32_t *numbers[] = { &n->total_memory_mib, &n->total_vcpus, &n->total_slots, &n->free_memory_mib, &n->free_vcpus,
		&n->free_slots };

	col_text(rows, i, 0, n->id, sizeof(n->id));
	col_text(rows, i, 1, n->name, sizeof(n->name));
	col_text(rows, i, 2, n->labels, sizeof(n->labels));
	col_text(rows, i, 3, n->isolation, sizeof(n->isolation));
	col_text(rows, i, 4, n->state, sizeof(n->state));
	col_bytes(rows, i, 5, n->sign_key, sizeof(n->sign_key));
	col_bytes(rows, i, 6, n->seal_key, sizeof(n->seal_key));
	col_bytes(rows, i, 7, n->receipt_key, sizeof(n->receipt_key));
	n->live = pg_bool(rows, i, 8);
	n->probation = pg_bool(rows, i, 9);
	n->lease_until_ms = pg_i64(rows, i, 10);
	n->last_seen_ms = pg_i64(rows, i, 11);
	n->created_at_ms = pg_i64(rows, i, 12);
	for (int k = 0; k < 6; k++)
		*numbers[k] = (uint32_t)pg_i64(rows, i, 13 + k);
	n->runs = pg_i64(rows, i, 19);
	n->stopped = pg_bool(rows, i, 20);
	n->failed_starts = pg_i64(rows, i, 21);
	n->probation_until_ms = pg_i64(rows, i, 22);
	col_text(rows, i, 23, n->image, sizeof(n->image));
	col_text(rows, i, 24, n->image_state, sizeof(n->image_state));
	col_text(rows, i, 25, n->image_note, sizeof(n->image_note));
}

static void on_nodes(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_nodes out = { .count = 0 };
	struct store_node *nodes = calloc((size_t)c->limit, sizeof(*nodes));
	struct err no_memory;

	(void)sqlstate;
	if (!e && !nodes) {
		err_set(&no_memory, ERR_NOMEM, "no memory for hosts");
		e = &no_memory;
	}
	for (int i = 0; !e && i < pg_nrows(rows) && i < c->limit; i++)
		read_node(rows, i, &nodes[out.count++]);
	if (!e && pg_nrows(rows) > c->limit && out.count > 0)
		out.next_cursor = nodes[out.count - 1].id;
	out.nodes = nodes;
	c->cb.nodes(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(nodes);
	free(c);
}

int store_node_get(struct store *s, const char *node_id, store_nodes_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.nodes = cb;
	c->limit = 1;
	params_text(&p, node_id);
	return call_exec(c, s->reads, &stmt_node_get, &p, on_nodes, e);
}

int store_node_list(struct store *s, const char *cursor, int limit, store_nodes_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.nodes = cb;
	c->limit = limit < 1 ? 1 : limit > STORE_LIST_MAX ? STORE_LIST_MAX : limit;
	params_text(&p, cursor);
	params_i64(&p, c->limit + 1);
	return call_exec(c, s->reads, &stmt_node_list, &p, on_nodes, e);
}

/* ---- actions
 * ---------------------------------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_node_act = {
	.name = "node_act",
	.sql = "SELECT result, detail FROM eph_node_act($1, $2)",
	.nparams = 2,
};

static void on_act(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;

	if (!e && strcmp(pg_text(rows, 0, 0), "done") == 0)
		hub_node_changed(c->s, c->id);
	call_done_rows(c, rows, sqlstate, e);
}

int store_node_act(struct store *s, const char *node_id, enum store_node_action a, store_done_cb cb, void *arg, struct err *e)
{
	static const char *const names[] = { "drain", "undrain", "revoke", "remove" };
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	if (!text_copy(c->id, sizeof(c->id), node_id))
		c->id[0] = '\0';
	params_text(&p, c->id);
	params_text(&p, names[a]);
	return call_exec(c, s->events, &stmt_node_act, &p, on_act, e);
}

static const struct pg_stmt stmt_node_bye = {
	.name = "node_bye",
	.sql = "SELECT CASE WHEN eph_node_bye($1, $2) THEN 'done' ELSE 'conflict' END, 'a newer process of this node has taken "
	       "over'",
	.nparams = 2,
};

int store_node_bye(struct store *s, const char *node_id, uint64_t epoch, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	params_text(&p, node_id);
	params_i64(&p, epoch > INT64_MAX - 1 ? INT64_MAX - 1 : (int64_t)epoch);
	return call_exec(c, s->events, &stmt_node_bye, &p, call_done_rows, e);
}

static const struct pg_stmt stmt_waits = {
	.name = "somebody_waits",
	.sql = "SELECT CASE WHEN eph_somebody_waits() THEN 'done' ELSE 'not_found' END, ''",
	.nparams = 0,
};

int store_somebody_waits(struct store *s, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	return call_exec(c, s->events, &stmt_waits, &p, call_done_rows, e);
}
