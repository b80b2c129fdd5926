/*
 * `next`: what a host is answered when it asks for work. One call renews its lease, takes the meters of what it holds, claims runs
 * that fit, and says again what the host seems not to have heard. Called by dispatch on the loop's thread; does not block.
 */
#include "store_internal.h"

#include "common/log.h"
#include "common/text.h"

enum col {
	C_KIND,
	C_RESULT,
	C_RUN,
	C_TOKEN,
	C_COMMAND,
	C_ATTEMPT,
	C_QUEUED,
	C_AGE,
	C_NEXT_SEQ,
	C_PREV_HASH,
	C_REQUEST_HASH,
	C_TIMEOUT,
	C_CALLS,
	C_MEMORY,
	C_VCPUS,
	C_SHELL,
	C_ZDR,
	C_CAP,
	C_PRICE,
	C_PROMPT,
	C_FILES,
	C_MODEL,
	C_UPSTREAM,
	C_BASE_URL,
	C_ANY_ADDRESS,
	C_LIMIT_PARAM,
	C_MAX_OUTPUT,
	C_MIN_OUTPUT,
	C_PER_BYTE,
	C_OVERHEAD,
	C_CALL_TIMEOUT,
	C_SEALED_KEY,
	C_PROVIDER,
};

static const struct pg_stmt stmt_next = {
	.name = "next",
	.sql = "SELECT kind, result, run_id, token, command_id, attempt, queued_at_ms, age_ms, next_seq, prev_hash, request_hash, "
	       "timeout_s, "
	       "max_model_calls, memory_mib, vcpus, shell, zdr, cap, price, prompt, files, model, upstream, base_url, any_address, "
	       "limit_param, "
	       "max_output, min_output, per_byte, overhead, call_timeout, sealed_key, provider "
	       "FROM eph_next($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)",
	.nparams = 18,
};

/* ---- what came
 * ------------------------------------------------------------------------------------------------------------------------ */

static void read_model(const struct pg_rows *rows, int i, struct model_spec *m)
{
	col_text(rows, i, C_MODEL, m->id, sizeof(m->id));
	col_text(rows, i, C_UPSTREAM, m->upstream, sizeof(m->upstream));
	col_text(rows, i, C_BASE_URL, m->base_url, sizeof(m->base_url));
	m->any_address = pg_bool(rows, i, C_ANY_ADDRESS);
	m->limit_param =
			strcmp(pg_text(rows, i, C_LIMIT_PARAM), "max_tokens") == 0 ? LIMIT_MAX_TOKENS : LIMIT_MAX_COMPLETION_TOKENS;
	m->max_output_tokens = pg_i64(rows, i, C_MAX_OUTPUT);
	m->min_output_tokens = pg_i64(rows, i, C_MIN_OUTPUT);
	m->tokens_per_byte_milli = pg_i64(rows, i, C_PER_BYTE);
	m->overhead_tokens = pg_i64(rows, i, C_OVERHEAD);
	m->call_timeout_ms = pg_i64(rows, i, C_CALL_TIMEOUT);
}

/* False when memory ran out or a path is longer than a host takes. */
static bool read_assign_files(const struct pg_rows *rows, int i, struct assignment *a)
{
	struct store_file files[GUEST_FILES_MAX];
	int n = files_read(pg_text(rows, i, C_FILES), files, GUEST_FILES_MAX);

	if (n <= 0)
		return n == 0;
	a->files = calloc((size_t)n, sizeof(*a->files));
	if (!a->files)
		return false;
	for (int k = 0; k < n; k++) {
		size_t len = strcspn(files[k].path, "\n");

		if (len > GUEST_PATH_MAX)
			return false;
		memcpy(a->files[k].path, files[k].path, len);
		a->files[k].size = files[k].size;
		memcpy(a->files[k].sha256, files[k].sha256, SHA256_LEN);
		a->file_count++;
	}
	return true;
}

static bool read_assign(const struct pg_rows *rows, int i, struct store_assign *out)
{
	struct assignment *a = &out->a;
	int64_t p[8];

	col_text(rows, i, C_RUN, a->run_id, sizeof(a->run_id));
	col_bytes(rows, i, C_TOKEN, a->token, sizeof(a->token));
	a->attempt = (uint32_t)pg_i64(rows, i, C_ATTEMPT);
	a->queued_at_ms = pg_i64(rows, i, C_QUEUED);
	a->age_ms = pg_i64(rows, i, C_AGE);
	a->next_seq = (uint64_t)pg_i64(rows, i, C_NEXT_SEQ);
	col_bytes(rows, i, C_PREV_HASH, a->prev_hash, sizeof(a->prev_hash));
	col_bytes(rows, i, C_REQUEST_HASH, a->request_hash, sizeof(a->request_hash));
	a->timeout_s = (uint32_t)pg_i64(rows, i, C_TIMEOUT);
	a->max_model_calls = (uint32_t)pg_i64(rows, i, C_CALLS);
	a->memory_mib = (uint32_t)pg_i64(rows, i, C_MEMORY);
	a->vcpus = (uint32_t)pg_i64(rows, i, C_VCPUS);
	a->shell = pg_bool(rows, i, C_SHELL);
	a->zero_data_retention = pg_bool(rows, i, C_ZDR);
	a->cap_micros = pg_i64(rows, i, C_CAP);
	if (array_read_i64(pg_text(rows, i, C_PRICE), p, 8))
		a->price = (struct price){ p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7] };
	read_model(rows, i, &a->model);
	col_text(rows, i, C_PROVIDER, out->provider, sizeof(out->provider));
	out->sealed_key = pg_bytea(rows, i, C_SEALED_KEY, &out->sealed_key_len);
	a->prompt = strdup(pg_text(rows, i, C_PROMPT));
	return a->prompt && (out->sealed_key || pg_is_null(rows, i, C_SEALED_KEY)) && read_assign_files(rows, i, a);
}

static void assign_drop(struct store_assign *v)
{
	free(v->a.prompt);
	free(v->a.files);
	free((void *)(uintptr_t)v->sealed_key);
	*v = (struct store_assign){ .sealed_key = NULL };
}

/* Kills have id 0: they are found anew each time and need no acknowledgement. */
static void read_command(const struct pg_rows *rows, int i, struct link_command *c)
{
	static const struct {
		const char *text;
		enum link_command_kind kind;
	} kinds[] = { { "cancel", LINK_CMD_CANCEL }, { "drain", LINK_CMD_DRAIN }, { "undrain", LINK_CMD_UNDRAIN } };

	c->id = (uint64_t)pg_i64(rows, i, C_COMMAND);
	c->kind = LINK_CMD_KILL;
	for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
		if (strcmp(pg_text(rows, i, C_RESULT), kinds[k].text) == 0)
			c->kind = (uint8_t)kinds[k].kind;
	}
	col_text(rows, i, C_RUN, c->run_id, sizeof(c->run_id));
	col_bytes(rows, i, C_TOKEN, c->token, sizeof(c->token));
}

static enum store_next_result read_state(const char *s)
{
	if (strcmp(s, "ok") == 0)
		return STORE_NEXT_OK;
	if (strcmp(s, "revoked") == 0)
		return STORE_NEXT_REVOKED;
	return strcmp(s, "old_epoch") == 0 ? STORE_NEXT_OLD_EPOCH : STORE_NEXT_UNKNOWN_NODE;
}

/* A claim that cannot be read (no memory) is left out: the host will be told again. */
static void read_next(struct store *s, const struct pg_rows *rows, struct store_next *out)
{
	for (int i = 0; i < pg_nrows(rows); i++) {
		const char *kind = pg_text(rows, i, C_KIND);

		if (strcmp(kind, "state") == 0) {
			out->result = read_state(pg_text(rows, i, C_RESULT));
		} else if (strcmp(kind, "assign") == 0 && out->assign_count < STORE_CLAIM_MAX) {
			struct store_assign *v = &out->assigns[out->assign_count];

			if (read_assign(rows, i, v)) {
				hub_run_changed(s, v->a.run_id);
				figures_claimed(s, &v->a);
				out->assign_count++;
			} else { /* half of it would be another run: without its prompt, files or key */
				log_error("a claim cannot be read run=%s", pg_text(rows, i, C_RUN));
				assign_drop(v);
			}
		} else if (out->command_count < LINK_COMMANDS_MAX) {
			read_command(rows, i, &out->commands[out->command_count++]);
		}
	}
}

static void next_free(struct store_next *n)
{
	for (size_t i = 0; n->assigns && i < n->assign_count; i++)
		assign_drop(&n->assigns[i]);
	free(n->assigns);
	free(n->commands);
}

static void on_next(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_next out = { .result = STORE_NEXT_UNKNOWN_NODE };
	struct err no_memory;

	(void)sqlstate;
	if (!e) {
		out.assigns = calloc(STORE_CLAIM_MAX, sizeof(*out.assigns));
		out.commands = calloc(LINK_COMMANDS_MAX, sizeof(*out.commands));
		if (!out.assigns || !out.commands) {
			err_set(&no_memory, ERR_NOMEM, "no memory for a host's work");
			e = &no_memory;
		} else {
			read_next(c->s, rows, &out);
		}
	}
	if (out.result == STORE_NEXT_OK)
		out.lease_ms = (uint32_t)c->s->opt.lease_ms;
	out.waiting = out.assign_count == 0 && out.command_count == 0;
	c->cb.next(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	next_free(&out);
	free(c);
}

/* ---- what is asked
 * ---------------------------------------------------------------------------------------------------------------------- */

static int64_t bounded(uint64_t v)
{
	return v > INT32_MAX ? INT32_MAX : (int64_t)v;
}

enum { A_RUNS, A_SPENT, A_HELD, A_COUNT };

static bool write_held(const struct link_next *n, struct buf a[A_COUNT], struct buf *tokens)
{
	for (int i = 0; i < A_COUNT; i++)
		array_begin(&a[i]);
	for (uint32_t i = 0; i < n->held_count; i++) {
		const struct link_held *h = &n->held[i];

		array_text(&a[A_RUNS], h->run_id);
		array_i64(&a[A_SPENT], h->spent_micros < 0 ? 0 : h->spent_micros);
		array_i64(&a[A_HELD], h->held_micros < 0 ? 0 : h->held_micros);
		buf_add(tokens, h->token, TOKEN_LEN);
	}
	for (int i = 0; i < A_COUNT; i++) {
		array_end(&a[i]);
		if (!buf_cstr(&a[i]) || a[i].failed)
			return false;
	}
	return !tokens->failed;
}

static void fill(struct store *s, const char *node_id, const struct link_next *n, const struct buf a[A_COUNT],
		const struct buf *tokens, uint32_t want, const uint8_t fresh[STORE_CLAIM_MAX * TOKEN_LEN], struct params *p)
{
	params_text(p, node_id);
	params_i64(p, n->epoch > INT64_MAX ? INT64_MAX : (int64_t)n->epoch);
	params_i64(p, bounded(n->free_memory_mib));
	params_i64(p, bounded(n->free_vcpus));
	params_i64(p, bounded(n->free_slots));
	params_i64(p, bounded(n->total_memory_mib));
	params_i64(p, bounded(n->total_vcpus));
	params_i64(p, bounded(n->total_slots));
	params_text(p, n->isolation);
	params_bool(p, n->draining);
	params_i64(p, n->last_command > INT64_MAX ? INT64_MAX : (int64_t)n->last_command);
	params_text(p, (const char *)a[A_RUNS].data);
	params_bytes(p, tokens->data ? tokens->data : (const uint8_t *)"", tokens->len);
	params_text(p, (const char *)a[A_SPENT].data);
	params_text(p, (const char *)a[A_HELD].data);
	params_i64(p, want);
	params_bytes(p, fresh, (size_t)want * TOKEN_LEN);
	params_i64(p, s->opt.lease_ms);
}

int store_next(struct store *s, const char *node_id, const struct link_next *n, uint32_t max_claims, store_next_cb cb, void *arg,
		struct err *e)
{
	const uint32_t want = max_claims > STORE_CLAIM_MAX ? STORE_CLAIM_MAX : max_claims;
	struct buf a[A_COUNT], tokens = BUF_INIT(LINK_RUNS_MAX * TOKEN_LEN);
	uint8_t fresh[STORE_CLAIM_MAX * TOKEN_LEN];
	struct params p = { .n = 0 };
	struct call *c;
	int result = -1;

	if (n->held_count > LINK_RUNS_MAX)
		return err_set(e, ERR_LIMIT, "a host holds at most %d runs", LINK_RUNS_MAX);
	c = call_new(s, arg, e);
	if (!c)
		return -1;
	c->cb.next = cb;
	random_bytes(fresh, sizeof(fresh));
	for (int i = 0; i < A_COUNT; i++)
		buf_init(&a[i], (size_t)LINK_RUNS_MAX * ID_MAX + 16);
	if (write_held(n, a, &tokens)) {
		fill(s, node_id, n, a, &tokens, want, fresh, &p);
		result = call_exec(c, s->events, &stmt_next, &p, on_next, e);
	} else {
		free(c);
		err_set(e, ERR_INVALID, "a host's list of runs cannot be written down");
	}
	for (int i = 0; i < A_COUNT; i++)
		buf_free(&a[i]);
	buf_free(&tokens);
	return result;
}
