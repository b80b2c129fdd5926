/*
 * What a create would be answered, asked without making anything (eph_run_judge), and how such an answer is read. Called by api on
 * the loop's thread, and by run_create.c; does not block.
 */
#include "store_internal.h"

#include "common/text.h"

static const struct {
	const char *text;
	enum store_create_result result;
} results[] = {
	{ "created", STORE_CREATED },
	{ "replayed", STORE_REPLAYED },
	{ "mismatch", STORE_IDEMPOTENCY_MISMATCH },
	{ "insufficient", STORE_INSUFFICIENT },
	{ "too_many_queued", STORE_TOO_MANY_QUEUED },
	{ "no_node", STORE_NO_NODE },
	{ "disabled", STORE_ORG_DISABLED },
	{ "admissible", STORE_ADMISSIBLE },
};

void create_result_read(const struct pg_rows *rows, int row, int at, struct store_create *out)
{
	const char *text = pg_text(rows, row, at);

	for (size_t k = 0; k < sizeof(results) / sizeof(results[0]); k++) {
		if (strcmp(text, results[k].text) == 0)
			out->result = results[k].result;
	}
	if (out->result == STORE_CREATED || out->result == STORE_REPLAYED) {
		col_text(rows, row, at + 1, out->run_id, sizeof(out->run_id));
		out->created_at_ms = pg_i64(rows, row, at + 2);
	}
	out->needed_micros = pg_i64(rows, row, at + 3);
	out->available_micros = pg_i64(rows, row, at + 4);
	out->limit = pg_i64(rows, row, at + 5);
}

static const struct pg_stmt stmt_judge = {
	.name = "run_judge",
	.sql = "SELECT result, run_id, created_at_ms, needed, available, lim FROM eph_run_judge($1, $2, $3, $4, $5, $6, $7, $8)",
	.nparams = 8,
};

static void on_judged(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_create out = { .result = STORE_IN_PROGRESS };

	(void)sqlstate;
	if (!e)
		create_result_read(rows, 0, 0, &out);
	c->cb.create(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(c);
}

int store_run_judge(struct store *s, const struct store_run_new *r, store_create_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.create = cb;
	params_text(&p, r->org_id);
	params_text(&p, r->idempotency_key);
	params_bytes(&p, r->idempotency_hash, sizeof(r->idempotency_hash));
	params_i64(&p, r->cap_micros);
	params_i64(&p, r->memory_mib);
	params_i64(&p, r->vcpus);
	params_bool(&p, r->allow_emulated);
	params_i64(&p, s->opt.max_queued_per_org);
	return call_exec(c, s->money, &stmt_judge, &p, on_judged, e);
}
