/*
 * What a host says of a run that it holds: start, finish, refuse. Each is one statement that locks the run and judges the token
 * first. Called by dispatch on the loop's thread; does not block.
 */
#include "store_internal.h"

#include "common/text.h"

enum fence fence_parse(const char *s)
{
	static const struct {
		const char *text;
		enum fence fence;
	} table[] = {
		{ "applied", FENCE_APPLIED },
		{ "duplicate", FENCE_DUPLICATE },
		{ "stale", FENCE_STALE },
		{ "gap", FENCE_GAP },
	};

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		if (strcmp(s, table[i].text) == 0)
			return table[i].fence;
	}
	return FENCE_UNKNOWN;
}

static struct call *fence_call(struct store *s, const char *run_id, store_fence_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);

	if (!c)
		return NULL;
	c->cb.fence = cb;
	if (!text_copy(c->id, sizeof(c->id), run_id)) {
		free(c);
		err_set(e, ERR_INVALID, "that is no run id");
		return NULL;
	}
	return c;
}

/* ---- start
 * ------------------------------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_start = {
	.name = "run_start",
	.sql = "SELECT eph_start($1, $2, $3)",
	.nparams = 3,
};

static void on_start(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_fence out = { .expected_seq = 0 };

	(void)sqlstate;
	if (e) {
		c->cb.fence(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	out.fence = fence_parse(pg_text(rows, 0, 0));
	if (out.fence == FENCE_APPLIED)
		hub_run_changed(c->s, c->id);
	c->cb.fence(c->arg, &out, NULL);
	free(c);
}

int store_run_start(struct store *s, const char *node_id, const char *run_id, const uint8_t token[TOKEN_LEN], store_fence_cb cb,
		void *arg, struct err *e)
{
	struct call *c = fence_call(s, run_id, cb, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	params_text(&p, node_id);
	params_text(&p, c->id);
	params_bytes(&p, token, TOKEN_LEN);
	return call_exec(c, s->events, &stmt_start, &p, on_start, e);
}

/* ---- finish
 * ------------------------------------------------------------------------------------------------------------------------ */

static const struct pg_stmt stmt_finish = {
	.name = "run_finish",
	.sql = "SELECT fence, expected FROM eph_finish($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
	.nparams = 14,
};

static void on_finish(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_fence out;

	(void)sqlstate;
	if (e) {
		c->cb.fence(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	out.fence = fence_parse(pg_text(rows, 0, 0));
	out.expected_seq = pg_i64(rows, 0, 1);
	if (out.fence == FENCE_APPLIED) {
		hub_run_changed(c->s, c->id);
		settle_soon(c->s, c->id);
	}
	c->cb.fence(c->arg, &out, NULL);
	free(c);
}

static void numbers(struct buf *b, const int64_t *v, size_t n)
{
	array_begin(b);
	for (size_t i = 0; i < n; i++)
		array_i64(b, v[i] < 0 ? 0 : v[i]);
	array_end(b);
}

/* What the host says of the end, judged once more. */
static enum errcode finish_code(const struct run_end *end)
{
	if (end->code >= ERRCODE_COUNT)
		return ERRCODE_INTERNAL;
	if (end->output_len > GUEST_RESULT_MAX && end->code == ERRCODE_NONE)
		return ERRCODE_OUTPUT_TOO_LARGE;
	return (enum errcode)end->code;
}

int store_run_finish(struct store *s, const char *node_id, const struct link_finish *f, store_fence_cb cb, void *arg, struct err *e)
{
	const struct run_end *end = &f->end;
	const struct usage *u = &end->usage;
	const int64_t usage[8] = { u->model_calls, u->input_tokens, u->cached_input_tokens, u->output_tokens, u->web_requests,
		u->web_searches, u->compute_ms, u->unmetered_model_micros };
	const int64_t cost[4] = { end->cost.run_fee, end->cost.compute, end->cost.model, end->cost.web };
	const enum errcode code = finish_code(end);
	const bool changed = code != (enum errcode)end->code;
	const bool keep_output = end->output_len > 0 && end->output_len <= GUEST_RESULT_MAX;
	struct buf usage_text = BUF_INIT(512), cost_text = BUF_INIT(256);
	struct call *c = fence_call(s, f->run_id, cb, arg, e);
	struct params p = { .n = 0 };
	int result;

	if (!c)
		return -1;
	numbers(&usage_text, usage, 8);
	numbers(&cost_text, cost, 4);
	params_text(&p, node_id);
	params_text(&p, c->id);
	params_bytes(&p, f->token, TOKEN_LEN);
	params_text(&p, outcome_text(errcode_outcome(code)));
	params_text(&p, errcode_text(code));
	params_text(&p, end->detail[0] && !changed ? end->detail : code == ERRCODE_NONE ? "" : errcode_title(code));
	params_text(&p, buf_cstr(&usage_text));
	params_text(&p, buf_cstr(&cost_text));
	params_i64(&p, end->last_seq > INT64_MAX ? INT64_MAX : (int64_t)end->last_seq);
	params_bytes(&p, end->last_hash, sizeof(end->last_hash));
	params_bytes(&p, end->image_hash, sizeof(end->image_hash));
	params_text(&p, end->isolation);
	params_bytes(&p, end->receipt_signature, sizeof(end->receipt_signature));
	params_bytes(&p, keep_output ? end->output : (const uint8_t *)"", keep_output ? end->output_len : 0);
	result = call_exec(c, s->events, &stmt_finish, &p, on_finish, e);
	buf_free(&usage_text);
	buf_free(&cost_text);
	return result;
}

/* ---- refuse
 * ------------------------------------------------------------------------------------------------------------------------ */

static const struct pg_stmt stmt_refuse = {
	.name = "run_refuse",
	.sql = "SELECT fence, coalesce(outcome, ''), memory_mib, vcpus, emulated FROM eph_refuse($1, $2, $3, $4, $5, $6)",
	.nparams = 6,
};

static void on_refuse(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_fence out = { .expected_seq = 0 };

	(void)sqlstate;
	if (e) {
		c->cb.fence(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	out.fence = fence_parse(pg_text(rows, 0, 0));
	if (out.fence == FENCE_APPLIED) {
		hub_run_changed(c->s, c->id);
		if (strcmp(pg_text(rows, 0, 1), "ended") == 0)
			settle_soon(c->s, c->id);
		else
			hub_queued(c->s, (uint32_t)pg_i64(rows, 0, 2), (uint32_t)pg_i64(rows, 0, 3), pg_bool(rows, 0, 4), 1);
		if (strcmp(pg_text(rows, 0, 1), "ended") != 0)
			figures_requeued(c->s, c->kind ? FIGURES_START_FAILED : FIGURES_NO_ROOM);
	}
	c->cb.fence(c->arg, &out, NULL);
	free(c);
}

int store_run_refuse(struct store *s, const char *node_id, const struct link_refuse *r, store_fence_cb cb, void *arg, struct err *e)
{
	const enum errcode code =
			r->code == ERRCODE_NONE || r->code >= ERRCODE_COUNT ? ERRCODE_VM_START_FAILED : (enum errcode)r->code;
	struct call *c = fence_call(s, r->run_id, cb, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	params_text(&p, node_id);
	params_text(&p, c->id);
	params_bytes(&p, r->token, TOKEN_LEN);
	c->kind = r->failed;
	params_bool(&p, r->failed);
	params_text(&p, errcode_outcome(code) == OUTCOME_FAILED ? errcode_text(code) : errcode_text(ERRCODE_VM_START_FAILED));
	params_text(&p, r->reason[0] ? r->reason : errcode_title(code));
	return call_exec(c, s->events, &stmt_refuse, &p, on_refuse, e);
}
