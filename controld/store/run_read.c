/*
 * Runs as clients see them: one, and pages. What moves is joined from run_live; what a caller's struct points to lives in one arena
 * for the callback. Called by api on the loop's thread; does not block.
 */
#include "store_internal.h"

#include "common/json.h"
#include "common/text.h"

/* Everything that struct store_run's views point to. Freed after the callback. */
struct arena {
	struct arena_block {
		struct arena_block *next;
	} * blocks;
};

static void *arena_take(struct arena *a, size_t n)
{
	struct arena_block *b = calloc(1, sizeof(*b) + n);

	if (!b)
		return NULL;
	b->next = a->blocks;
	a->blocks = b;
	return b + 1;
}

static void arena_free(struct arena *a)
{
	while (a->blocks) {
		struct arena_block *b = a->blocks;

		a->blocks = b->next;
		free(b);
	}
}

static const char *arena_text(struct arena *a, const char *s, size_t n)
{
	char *copy = arena_take(a, n + 1);

	if (!copy)
		return "";
	memcpy(copy, s, n);
	return copy;
}

/* ---- columns
 * ------------------------------------------------------------------------------------------------------------------------ */

enum col {
	C_ID,
	C_ORG,
	C_STATUS,
	C_STATE,
	C_ENDED,
	C_SETTLED,
	C_ERROR_CODE,
	C_ERROR_MESSAGE,
	C_USAGE,
	C_COST,
	C_FROM_METER,
	C_METER,
	C_CAP,
	C_RELEASED,
	C_CREATED,
	C_STARTED,
	C_EXPIRES,
	C_CANCEL,
	C_MODEL,
	C_SIZE,
	C_TIMEOUT,
	C_CALLS,
	C_MEMORY,
	C_VCPUS,
	C_ATTEMPT,
	C_SHELL,
	C_ZDR,
	C_ISOLATION,
	C_NODE,
	C_NODE_NAME,
	C_WAIT_REASON,
	C_WAIT_SINCE,
	C_META,
	C_HEAD,
	C_PRICE,
	C_PROMPT,
	C_REQUEST,
	C_OUTPUT,
	C_FILES,
};

#define RUN_COLUMNS                                                                                                                \
	"r.run_id, r.org_id, CASE WHEN l.state IN ('running', 'ending') THEN 'running' ELSE r.status END, coalesce(l.state, ''), " \
	"coalesce(r.ended_at_ms, 0), coalesce(r.settled_at_ms, 0), coalesce(r.error_code, ''), coalesce(r.error_message, ''), "    \
	"r.usage, r.cost, "                                                                                                        \
	"r.cost_from_meter, least(coalesce(l.spent + l.held, 0), r.cap_micros), r.cap_micros, coalesce(r.released_micros, 0), "    \
	"r.created_at_ms, "                                                                                                        \
	"coalesce(l.started_at_ms, r.started_at_ms, 0), r.expires_at_ms, coalesce(l.cancel_requested_at_ms, "                      \
	"r.cancel_requested_at_ms, 0), "                                                                                           \
	"r.model, r.size, r.timeout_s, r.max_model_calls, r.memory_mib, r.vcpus, coalesce(l.attempt, r.attempt, 0), r.shell, "     \
	"r.zero_data_retention, coalesce(r.isolation, v.isolation, ''), coalesce(n.id, ''), coalesce(n.name, ''), "                \
	"CASE WHEN l.state <> 'queued' OR l.state IS NULL OR q.run_id IS NULL THEN '' WHEN NOT q.ready THEN 'organization_limit' " \
	"WHEN NOT eph_servable(r.class_id, true, q.avoid) THEN 'no_node' ELSE 'capacity' END, coalesce(l.state_at_ms, 0), "        \
	"(SELECT jsonb_object_agg(m.k, m.v) FROM run_meta m WHERE m.run_id = r.run_id), coalesce(l.seq, r.head_seq, 0), r.price, "

#define RUN_JOINS                                                                                                                  \
	"LEFT JOIN run_live l ON l.run_id = r.run_id LEFT JOIN queue q ON q.run_id = l.run_id "                                    \
	"LEFT JOIN nodes n ON n.id = coalesce(l.node_id, r.node_id) LEFT JOIN nodes_live v ON v.node_id = l.node_id AND "          \
	"l.started_at_ms IS NOT NULL "                                                                                             \
	"LEFT JOIN run_content c ON c.run_id = r.run_id "

static const struct pg_stmt stmt_run_get = {
	.name = "run_get",
	.sql = "SELECT " RUN_COLUMNS
	       "c.prompt, c.request, o.output, (SELECT string_agg(f.size || ' ' || encode(f.sha256, 'hex') || ' ' || f.path, "
	       "E'\\n' ORDER BY f.position) FROM run_files f WHERE f.run_id = r.run_id) FROM runs r " RUN_JOINS
	       "LEFT JOIN run_output o ON o.run_id = r.run_id "
	       "WHERE r.run_id = $1 AND ($2::text IS NULL OR r.org_id = $2) AND r.expires_at_ms > eph_now_ms()",
	.nparams = 2,
};

/*
 * A page: first the ids, from the one index that has them in order, then what is shown of them. $2: the cursor; 'run_g' is above
 * every id. $3: how many. The literal bound makes the planner see that it is a short walk; pairs are compared as pairs, so that no
 * other index has the order, whatever the tables held when the plan was made.
 */
#define LIST_HEAD "SELECT " RUN_COLUMNS "left(c.prompt, 200), '', NULL, NULL FROM (SELECT x.run_id FROM ("
#define LIST_TAIL                                                                                                                  \
	" LIMIT 101) x ORDER BY x.run_id DESC LIMIT $3) page JOIN runs r ON r.run_id = page.run_id " RUN_JOINS                     \
	"ORDER BY r.run_id DESC"
#define CURSOR "coalesce($2, 'run_g')"
#define SHOWN "r.expires_at_ms > eph_now_ms() "
/* The statuses queued and running are run_live's; an end is the row's own. */
#define STATUS "CASE WHEN l.state IN ('running', 'ending') THEN 'running' ELSE r.status END"

static const struct pg_stmt stmt_run_list = {
	.name = "run_list",
	.sql = LIST_HEAD "SELECT r.run_id FROM runs r WHERE (r.org_id, r.run_id) < ($1, " CURSOR ") AND r.org_id >= $1 AND " SHOWN
			 "ORDER BY r.org_id DESC, r.run_id DESC" LIST_TAIL,
	.nparams = 3,
};

/* Queued and running are few among an organization's runs, and so may those of one end be: each is found by an index of its own. */
static const struct pg_stmt stmt_run_list_live = {
	.name = "run_list_live",
	.sql = LIST_HEAD "SELECT l.run_id FROM run_live l WHERE (l.org_id, l.run_id) < ($1, " CURSOR
			 ") AND l.org_id >= $1 AND $4 = CASE "
			 "WHEN l.state IN ('running', 'ending') THEN 'running' WHEN l.state <> 'ended' THEN 'queued' END "
			 "ORDER BY l.org_id DESC, l.run_id DESC" LIST_TAIL,
	.nparams = 4,
};

static const struct pg_stmt stmt_run_list_ended = {
	.name = "run_list_ended",
	.sql = LIST_HEAD "SELECT r.run_id FROM runs r WHERE r.org_id = $1 AND (r.status, r.run_id) < ($4, " CURSOR
			 ") AND r.status >= $4 "
			 "AND r.ended_at_ms IS NOT NULL AND " SHOWN "ORDER BY r.status DESC, r.run_id DESC" LIST_TAIL,
	.nparams = 4,
};

/* $4: a status or NULL; $5, $6: the first pair, whose index is walked; $7: all pairs as an object. */
static const struct pg_stmt stmt_run_list_meta = {
	.name = "run_list_meta",
	.sql = LIST_HEAD
	"SELECT r.run_id FROM run_meta f JOIN runs r ON r.run_id = f.run_id LEFT JOIN run_live l ON l.run_id = r.run_id "
	"WHERE f.org_id = $1 AND f.k = $5 AND f.v = $6 AND f.run_id < " CURSOR " AND " SHOWN "AND ($4::text IS NULL OR $4 = " STATUS
	") AND NOT EXISTS (SELECT 1 FROM jsonb_each_text($7::jsonb) w WHERE NOT EXISTS ("
	"SELECT 1 FROM run_meta m WHERE m.org_id = $1 AND m.k = w.key AND m.v = w.value AND m.run_id = r.run_id)) "
	"ORDER BY f.run_id DESC" LIST_TAIL,
	.nparams = 7,
};

/* ---- rows
 * --------------------------------------------------------------------------------------------------------------------------- */

static void read_metadata(struct arena *a, const struct pg_rows *rows, int i, struct store_run *r)
{
	struct json *meta;
	struct store_pair *pairs;
	struct err ignored;
	const char *text = pg_text(rows, i, C_META);

	if (text[0] == '\0' || json_parse(text, strlen(text), &meta, &ignored) != 0)
		return;
	pairs = arena_take(a, json_len(meta) * sizeof(*pairs));
	for (size_t k = 0; pairs && k < json_len(meta); k++) {
		const struct json *v = json_at(meta, k);

		pairs[k].key = arena_text(a, json_key(meta, k), strlen(json_key(meta, k)));
		pairs[k].value = arena_text(a, json_as_text(v), json_len(v));
		r->metadata_count++;
	}
	r->metadata = pairs;
	json_free(meta);
}

int files_read(const char *text, struct store_file *out, size_t max)
{
	int n = 0;
	struct err ignored;

	for (const char *line = text; *line && (size_t)n < max; n++) {
		char number[24], hex[2 * SHA256_LEN + 1];
		size_t len = strcspn(line, " ");
		int64_t size;

		if (len == 0 || len >= sizeof(number) || strlen(line) < len + 1 + 2 * SHA256_LEN + 2)
			return -1;
		memcpy(number, line, len);
		number[len] = '\0';
		memcpy(hex, line + len + 1, 2 * SHA256_LEN);
		hex[2 * SHA256_LEN] = '\0';
		if (text_i64(number, 0, INT64_MAX, &size, &ignored) != 0 || !text_unhex(hex, out[n].sha256, SHA256_LEN))
			return -1;
		out[n].size = (uint64_t)size;
		out[n].path = line + len + 1 + 2 * SHA256_LEN + 1;
		line = out[n].path + strcspn(out[n].path, "\n");
		if (*line == '\n')
			line++;
	}
	return n;
}

static void read_files(struct arena *a, const struct pg_rows *rows, int i, struct store_run *r)
{
	const char *text = pg_text(rows, i, C_FILES);
	struct store_file *files = text[0] ? arena_take(a, GUEST_FILES_MAX * sizeof(*files)) : NULL;
	int n = files ? files_read(text, files, GUEST_FILES_MAX) : 0;

	for (int k = 0; k < n; k++)
		files[k].path = arena_text(a, files[k].path, strcspn(files[k].path, "\n"));
	r->files = files;
	r->file_count = n > 0 ? (size_t)n : 0;
}

static void read_money(const struct pg_rows *rows, int i, struct store_run *r)
{
	int64_t u[8], c[4], p[8];

	r->cap_micros = pg_i64(rows, i, C_CAP);
	r->reserved_micros = r->cap_micros;
	r->released_micros = pg_i64(rows, i, C_RELEASED);
	r->cost_from_meter = pg_bool(rows, i, C_FROM_METER);
	if (array_read_i64(pg_text(rows, i, C_USAGE), u, 8))
		r->usage = (struct usage){ u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7] };
	if (array_read_i64(pg_text(rows, i, C_COST), c, 4))
		r->cost = (struct cost){ c[0], c[1], c[2], c[3], c[0] + c[1] + c[2] + c[3] };
	else
		r->cost.total = pg_i64(rows, i, C_METER);
	if (array_read_i64(pg_text(rows, i, C_PRICE), p, 8))
		r->price = (struct price){ p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7] };
}

static void read_content(struct arena *a, const struct pg_rows *rows, int i, struct store_run *r)
{
	size_t len = 0;
	uint8_t *output = pg_bytea(rows, i, C_OUTPUT, &len);

	r->prompt = pg_text(rows, i, C_PROMPT);
	r->prompt_len = strlen(r->prompt);
	r->request_json = pg_text(rows, i, C_REQUEST);
	r->has_output = output != NULL;
	if (output) {
		r->output = (const uint8_t *)arena_text(a, (const char *)output, len);
		r->output_len = len;
	}
	free(output);
	read_metadata(a, rows, i, r);
	read_files(a, rows, i, r);
}

static void read_run(struct arena *a, const struct pg_rows *rows, int i, struct store_run *r)
{
	col_text(rows, i, C_ID, r->id, sizeof(r->id));
	col_text(rows, i, C_ORG, r->org_id, sizeof(r->org_id));
	col_text(rows, i, C_STATUS, r->status, sizeof(r->status));
	col_text(rows, i, C_STATE, r->state, sizeof(r->state));
	r->ended_at_ms = pg_i64(rows, i, C_ENDED);
	r->ended = r->ended_at_ms != 0;
	r->settled_at_ms = pg_i64(rows, i, C_SETTLED);
	r->settled = r->settled_at_ms != 0;
	r->error_code = pg_text(rows, i, C_ERROR_CODE);
	r->error_message = pg_text(rows, i, C_ERROR_MESSAGE);
	read_money(rows, i, r);
	r->created_at_ms = pg_i64(rows, i, C_CREATED);
	r->started_at_ms = pg_i64(rows, i, C_STARTED);
	r->expires_at_ms = pg_i64(rows, i, C_EXPIRES);
	r->cancel_requested_at_ms = pg_i64(rows, i, C_CANCEL);
	col_text(rows, i, C_MODEL, r->model, sizeof(r->model));
	col_text(rows, i, C_SIZE, r->size, sizeof(r->size));
	r->timeout_s = (uint32_t)pg_i64(rows, i, C_TIMEOUT);
	r->max_model_calls = (uint32_t)pg_i64(rows, i, C_CALLS);
	r->memory_mib = (uint32_t)pg_i64(rows, i, C_MEMORY);
	r->vcpus = (uint32_t)pg_i64(rows, i, C_VCPUS);
	r->attempt = (uint32_t)pg_i64(rows, i, C_ATTEMPT);
	r->shell = pg_bool(rows, i, C_SHELL);
	r->zero_data_retention = pg_bool(rows, i, C_ZDR);
	col_text(rows, i, C_ISOLATION, r->isolation, sizeof(r->isolation));
	col_text(rows, i, C_NODE, r->node_id, sizeof(r->node_id));
	col_text(rows, i, C_NODE_NAME, r->node_name, sizeof(r->node_name));
	col_text(rows, i, C_WAIT_REASON, r->waiting_reason, sizeof(r->waiting_reason));
	if (r->waiting_reason[0])
		r->waiting_since_ms = pg_i64(rows, i, C_WAIT_SINCE);
	r->head_seq = pg_i64(rows, i, C_HEAD);
	read_content(a, rows, i, r);
}

static void on_runs(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct arena a = { NULL };
	struct store_runs out = { .count = 0 };
	int n = e ? 0 : pg_nrows(rows);
	struct store_run *runs = arena_take(&a, (size_t)(c->limit + 1) * sizeof(*runs));
	struct err no_memory;

	(void)sqlstate;
	if (!e && !runs) {
		err_set(&no_memory, ERR_NOMEM, "no memory for runs");
		e = &no_memory;
	}
	for (int i = 0; !e && i < n && i < c->limit; i++)
		read_run(&a, rows, i, &runs[out.count++]);
	if (n > c->limit && out.count > 0)
		out.next_cursor = runs[out.count - 1].id;
	out.runs = runs;
	c->cb.runs(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	arena_free(&a);
	free(c);
}

int store_run_get(struct store *s, const char *org_id, const char *run_id, store_runs_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.runs = cb;
	c->limit = 1;
	params_text(&p, run_id);
	params_text(&p, org_id);
	return call_exec(c, s->reads, &stmt_run_get, &p, on_runs, e);
}

/* False when a pair is no clean text. */
static bool pairs_json(const struct store_pair *pairs, size_t n, struct buf *out)
{
	struct jw w;

	jw_init(&w, out);
	jw_object(&w);
	for (size_t i = 0; i < n; i++)
		jw_kstr(&w, pairs[i].key, pairs[i].value);
	jw_close(&w);
	return jw_end(&w) && buf_cstr(out);
}

static bool status_is_live(const char *status)
{
	return strcmp(status, "queued") == 0 || strcmp(status, "running") == 0;
}

int store_run_list(
		struct store *s, const char *org_id, const struct store_run_filter *f, store_runs_cb cb, void *arg, struct err *e)
{
	struct buf meta = BUF_INIT(64 * 1024);
	struct params p = { .n = 0 };
	struct call *c;
	int result;

	if (f->metadata_count > STORE_METADATA_MAX ||
			(f->metadata_count > 0 && !pairs_json(f->metadata, f->metadata_count, &meta))) {
		buf_free(&meta);
		return err_set(e, ERR_INVALID, "the metadata to look for is too much, or no clean text");
	}
	c = call_new(s, arg, e);
	if (!c) {
		buf_free(&meta);
		return -1;
	}
	c->cb.runs = cb;
	c->limit = f->limit < 1 ? 1 : f->limit > STORE_LIST_MAX ? STORE_LIST_MAX : f->limit;
	params_text(&p, org_id);
	params_text(&p, f->cursor);
	params_i64(&p, c->limit + 1);
	if (f->metadata_count > 0) {
		params_text(&p, f->status);
		params_text(&p, f->metadata[0].key);
		params_text(&p, f->metadata[0].value);
		params_text(&p, buf_cstr(&meta));
		result = call_exec(c, s->reads, &stmt_run_list_meta, &p, on_runs, e);
	} else if (f->status) {
		params_text(&p, f->status);
		result = call_exec(c, s->reads, status_is_live(f->status) ? &stmt_run_list_live : &stmt_run_list_ended, &p, on_runs,
				e);
	} else {
		result = call_exec(c, s->reads, &stmt_run_list, &p, on_runs, e);
	}
	buf_free(&meta);
	return result;
}
