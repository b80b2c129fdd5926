/*
 * Creating runs. Owns the creates that wait: those that come within 2 ms of each other go to Postgres as one call and one
 * transaction (eph_run_create), the files of each before it. Called by api on the loop's thread; does not block.
 *
 * A transaction that loses a lock, or that Postgres refuses, fails for all of its creates; then each is sent alone once, so that a
 * key that somebody else is using holds up nobody but its own request (409), and a bad row nobody but its own.
 */
#include "store_internal.h"

#include "common/json.h"
#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>

#define BATCH_ROWS 50
#define BATCH_BYTES (4 * 1024 * 1024)
#define BATCH_US 2000
#define ONE_BYTES (8 * 1024 * 1024) /* the JSON of one create: prompt and request, escaped once more */
#define WAITING_MAX 5000
#define AGAIN_MAX 5

struct create {
	struct create *next;
	struct store *s;
	store_create_cb cb;
	void *arg;
	char *json; /* "{...}" without its number in the batch */
	size_t json_len;
	char org_id[ID_MAX];
	bool keyed, emulated;
	uint32_t memory_mib, vcpus;
	int again; /* times that it was put back */
	bool alone;
	struct store_file *files; /* data owned, until stored */
	size_t file_count, file_at;
};

struct creates {
	struct store *s;
	struct create *head, **tail;
	int waiting;   /* in the list */
	int in_flight; /* batches */
	struct event *timer;
};

struct batch {
	struct store *s;
	struct create *rows[BATCH_ROWS];
	int count;
};

static void create_free(struct create *c)
{
	for (size_t i = 0; c->files && i < c->file_count; i++)
		free((void *)(uintptr_t)c->files[i].data);
	free(c->files);
	free(c->json);
	free(c);
}

static void create_fail(struct create *c, const struct err *e)
{
	figures_created(c->s, NULL, e);
	c->cb(c->arg, NULL, e);
	create_free(c);
}

static void create_result(struct create *c, const struct store_create *result)
{
	figures_created(c->s, result, NULL);
	c->cb(c->arg, result, NULL);
	create_free(c);
}

/* ---- batches
 * ---------------------------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_create = {
	.name = "run_create",
	.sql = "SELECT idx, result, run_id, created_at_ms, needed, available, lim FROM eph_run_create($1, $2, $3, $4, $5)",
	.nparams = 5,
};

static void arm(struct creates *q)
{
	const bool now = q->in_flight == 0 || q->waiting >= BATCH_ROWS;
	const struct timeval soon = { 0, now ? 0 : BATCH_US };

	if (q->head && (now || !event_pending(q->timer, EV_TIMEOUT, NULL)))
		event_add(q->timer, &soon);
}

static void put_back(struct store *s, struct create *c)
{
	struct creates *q = s->creates;
	struct err e;

	if (!q) {
		err_set(&e, ERR_UNAVAILABLE, "the store is closing");
		create_fail(c, &e);
		return;
	}
	c->again++;
	c->next = NULL;
	*q->tail = c;
	q->tail = &c->next;
	q->waiting++;
}

/*
 * The files of a create that was refused after they were stored (store_run_judge had said yes a moment before): they go an hour
 * after every run could have left the queue that found them there before this, and not later.
 */
#define FILES_KEPT_MS INT64_C(90000000) /* after the last create that named them: eph_sweep_expire */
#define FILES_UNWANTED_MS INT64_C(3600000)

static const struct pg_stmt stmt_unwanted = {
	.name = "file_unwanted",
	.sql = "UPDATE chunk_files SET used_at_ms = least(used_at_ms, eph_now_ms() - $3::bigint) WHERE org_id = $1 AND sha256 = $2",
	.nparams = 3,
};

static void files_unwanted(struct create *c)
{
	const int64_t wait_ms = c->s->opt.queue_timeout_ms + FILES_UNWANTED_MS;
	const int64_t earlier = wait_ms < FILES_KEPT_MS ? FILES_KEPT_MS - wait_ms : 0;

	for (size_t i = 0; c->files && i < c->file_count; i++) {
		struct params p = { .n = 0 };
		struct err e;

		params_text(&p, c->org_id);
		params_bytes(&p, c->files[i].sha256, SHA256_LEN);
		params_i64(&p, earlier);
		if (!c->s->money || pgev_exec(c->s->money, &stmt_unwanted, p.p, NULL, NULL, &e) != 0)
			return;
	}
}

/* True when the create is done with. */
static bool take_row(struct create *c, const struct pg_rows *rows, int i)
{
	struct store_create out = { .result = STORE_IN_PROGRESS };

	if (strcmp(pg_text(rows, i, 1), "again") == 0 && c->again < AGAIN_MAX)
		return false;
	create_result_read(rows, i, 1, &out);
	if (out.result != STORE_CREATED && out.result != STORE_REPLAYED && out.result != STORE_IN_PROGRESS)
		files_unwanted(c);
	if (out.result == STORE_CREATED)
		hub_queued(c->s, c->memory_mib, c->vcpus, c->emulated, 1);
	create_result(c, &out);
	return true;
}

static void batch_failed(struct batch *b, const struct err *e)
{
	const struct store_create busy = { .result = STORE_IN_PROGRESS };

	call_error(e);
	for (int i = 0; i < b->count; i++) {
		struct create *c = b->rows[i];

		if ((e->code == ERR_CONFLICT || (e->code == ERR_INTERNAL && b->count > 1)) && !c->alone && c->again < AGAIN_MAX) {
			c->alone = true;
			put_back(b->s, c);
		} else if (e->code == ERR_CONFLICT && c->keyed) {
			create_result(c, &busy);
		} else {
			create_fail(c, e);
		}
	}
}

static void on_batch(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct batch *b = arg;
	struct store *s = b->s;

	(void)sqlstate;
	if (s->creates)
		s->creates->in_flight--;
	if (e)
		batch_failed(b, e);
	for (int i = 0; !e && i < pg_nrows(rows); i++) {
		int64_t idx = pg_i64(rows, i, 0);

		check_warn(idx >= 0 && idx < b->count);
		if (idx < 0 || idx >= b->count || !b->rows[idx])
			continue;
		if (!take_row(b->rows[idx], rows, i))
			put_back(s, b->rows[idx]);
		b->rows[idx] = NULL;
	}
	for (int i = 0; !e && i < b->count; i++) {
		struct err missing;

		if (b->rows[i] && err_set(&missing, ERR_INTERNAL, "a create was not answered") != 0)
			create_fail(b->rows[i], call_error(&missing));
	}
	free(b);
	if (s->creates)
		arm(s->creates);
}

/* Takes what fits into one call off the list. */
static struct batch *batch_take(struct creates *q, struct buf *json)
{
	struct batch *b = calloc(1, sizeof(*b));

	if (!b)
		return NULL;
	b->s = q->s;
	buf_add_char(json, '[');
	while (q->head && b->count < BATCH_ROWS) {
		struct create *c = q->head;

		if (b->count > 0 && (c->alone || b->rows[0]->alone || json->len + c->json_len > BATCH_BYTES))
			break;
		q->head = c->next;
		if (!q->head)
			q->tail = &q->head;
		q->waiting--;
		buf_printf(json, "%s{\"idx\":%d,", b->count > 0 ? "," : "", b->count);
		buf_add(json, c->json + 1, c->json_len - 1);
		b->rows[b->count++] = c;
	}
	buf_add_char(json, ']');
	return b;
}

static void batch_send(struct creates *q)
{
	struct store *s = q->s;
	struct buf json = BUF_INIT(BATCH_BYTES + ONE_BYTES);
	struct params p = { .n = 0 };
	struct batch *b = batch_take(q, &json);
	struct err e;
	int result = -1;

	if (!b) {
		buf_free(&json);
		return; /* what waits is tried again by the next arm */
	}
	params_text(&p, buf_cstr(&json));
	params_i64(&p, s->opt.max_queued_per_org);
	params_i64(&p, s->opt.max_running_per_org);
	params_i64(&p, s->opt.retention_ms);
	params_i64(&p, s->opt.idempotency_ms);
	if (json.failed || !p.p[0].data)
		err_set(&e, ERR_NOMEM, "no memory to create runs");
	else if (!s->money)
		err_set(&e, ERR_UNAVAILABLE, "the store is closing");
	else
		result = pgev_exec(s->money, &stmt_create, p.p, on_batch, b, &e);
	buf_free(&json);
	if (result == 0) {
		q->in_flight++;
		return;
	}
	for (int i = 0; i < b->count; i++)
		create_fail(b->rows[i], &e);
	free(b);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct creates *q = arg;

	(void)fd;
	(void)what;
	/* A row that must be alone ends its batch: the rest follows at once. */
	for (int i = 0; q->head && i < 16; i++)
		batch_send(q);
	arm(q);
}

static void create_ready(struct create *c)
{
	struct creates *q = c->s->creates;

	c->again = -1;
	put_back(c->s, c);
	if (q)
		arm(q);
}

/* ---- files first
 * -------------------------------------------------------------------------------------------------------------------- */

static void files_next(struct create *c);

static void on_file(void *arg, const struct store_done *d, const struct err *e)
{
	struct create *c = arg;

	(void)d;
	if (e) {
		create_fail(c, e);
		return;
	}
	free((void *)(uintptr_t)c->files[c->file_at].data);
	c->files[c->file_at].data = NULL;
	c->file_at++;
	files_next(c);
}

static void files_next(struct create *c)
{
	struct err e;

	if (c->file_at == c->file_count)
		create_ready(c);
	else if (chunk_put(c->s, c->org_id, &c->files[c->file_at], on_file, c, &e) != 0)
		create_fail(c, &e);
}

static bool files_copy(struct create *c, const struct store_run_new *r)
{
	if (r->file_count == 0)
		return true;
	c->files = calloc(r->file_count, sizeof(*c->files));
	if (!c->files)
		return false;
	for (size_t i = 0; i < r->file_count; i++) {
		uint8_t *data = malloc(r->files[i].size > 0 ? (size_t)r->files[i].size : 1);

		if (!data)
			return false;
		if (r->files[i].size > 0)
			memcpy(data, r->files[i].data, (size_t)r->files[i].size);
		c->files[i] = r->files[i];
		c->files[i].path = NULL; /* a view; it is in the JSON */
		c->files[i].data = data;
		c->file_count++;
	}
	return true;
}

/* ---- one create
 * ----------------------------------------------------------------------------------------------------------------------- */

static void write_hex(struct jw *w, const char *key, const uint8_t *p, size_t n)
{
	char hex[2 * SHA256_LEN + 1];

	check_abort(n <= SHA256_LEN);
	text_hex(p, n, hex);
	jw_kstr(w, key, hex);
}

static void write_lists(struct jw *w, const struct store_run_new *r)
{
	const int64_t price[8] = { r->price.run_fee, r->price.compute, r->price.input, r->price.cached_input, r->price.output,
		r->price.model_percent, r->price.web_request, r->price.web_search };

	jw_karray(w, "price");
	for (size_t i = 0; i < 8; i++)
		jw_int(w, price[i]);
	jw_close(w);
	if (r->metadata_count > 0) {
		jw_kobject(w, "meta");
		for (size_t i = 0; i < r->metadata_count; i++)
			jw_kstr(w, r->metadata[i].key, r->metadata[i].value);
		jw_close(w);
	}
	if (r->file_count == 0)
		return;
	jw_karray(w, "files");
	for (size_t i = 0; i < r->file_count; i++) {
		jw_object(w);
		jw_kstr(w, "path", r->files[i].path);
		jw_kint(w, "size", (int64_t)r->files[i].size);
		write_hex(w, "sha256", r->files[i].sha256, SHA256_LEN);
		jw_close(w);
	}
	jw_close(w);
}

static bool write_create(const struct store_run_new *r, struct buf *out)
{
	struct jw w;
	uint8_t random[10];

	random_bytes(random, sizeof(random));
	jw_init(&w, out);
	jw_object(&w);
	write_hex(&w, "run", random, sizeof(random));
	jw_kstr(&w, "org", r->org_id);
	jw_kstr(&w, "key", r->key_id);
	jw_kstr(&w, "member", r->member_id ? r->member_id : "");
	if (r->idempotency_key) {
		jw_kstr(&w, "ik", r->idempotency_key);
		write_hex(&w, "ih", r->idempotency_hash, sizeof(r->idempotency_hash));
	}
	jw_kstr(&w, "request", r->request_json);
	write_hex(&w, "rh", r->request_hash, sizeof(r->request_hash));
	jw_kstrn(&w, "prompt", r->prompt, r->prompt_len);
	jw_kstr(&w, "model", r->model);
	jw_kint(&w, "cap", r->cap_micros);
	jw_kint(&w, "timeout", r->timeout_s);
	jw_kint(&w, "calls", r->max_model_calls);
	jw_kint(&w, "mem", r->memory_mib);
	jw_kint(&w, "vcpus", r->vcpus);
	jw_kstr(&w, "size", r->size);
	jw_kbool(&w, "shell", r->shell);
	jw_kbool(&w, "zdr", r->zero_data_retention);
	jw_kbool(&w, "emu", r->allow_emulated);
	write_lists(&w, r);
	jw_close(&w);
	return jw_end(&w);
}

static int judge(const struct store *s, const struct store_run_new *r, struct err *e)
{
	if (!s->creates)
		return err_set(e, ERR_UNAVAILABLE, "the store is closing");
	if (s->creates->waiting >= WAITING_MAX)
		return err_set(e, ERR_UNAVAILABLE, "too many runs are being created");
	if (r->file_count > GUEST_FILES_MAX || r->metadata_count > STORE_METADATA_MAX)
		return err_set(e, ERR_LIMIT, "a run has at most %d files and %d metadata pairs", GUEST_FILES_MAX,
				STORE_METADATA_MAX);
	for (size_t i = 0; i < r->file_count; i++) {
		if (r->files[i].size > GUEST_FILE_MAX || strlen(r->files[i].path) > GUEST_PATH_MAX ||
				strchr(r->files[i].path, '\n'))
			return err_set(e, ERR_INVALID, "files[%zu]: the path or size is not allowed", i);
	}
	return 0;
}

int store_run_create(struct store *s, const struct store_run_new *r, store_create_cb cb, void *arg, struct err *e)
{
	struct buf json = BUF_INIT(ONE_BYTES);
	struct create *c;

	if (judge(s, r, e) != 0)
		return -1;
	c = calloc(1, sizeof(*c));
	if (!c)
		return err_set(e, ERR_NOMEM, "no memory to create a run");
	c->s = s;
	c->cb = cb;
	c->arg = arg;
	c->keyed = r->idempotency_key != NULL;
	c->emulated = r->allow_emulated;
	c->memory_mib = r->memory_mib;
	c->vcpus = r->vcpus;
	if (!write_create(r, &json)) {
		buf_free(&json);
		create_free(c);
		return err_set(e, ERR_INVALID, "the request is too large, or a text in it is not clean UTF-8");
	}
	c->json = buf_steal(&json, &c->json_len);
	if (!c->json || !text_copy(c->org_id, sizeof(c->org_id), r->org_id) || !files_copy(c, r)) {
		create_free(c);
		return err_set(e, ERR_NOMEM, "no memory to create a run");
	}
	if (c->file_count == 0) {
		create_ready(c);
		return 0;
	}
	if (chunk_put(s, c->org_id, &c->files[0], on_file, c, e) != 0) {
		create_free(c);
		return -1;
	}
	return 0;
}

int creates_new(struct store *s, struct creates **out, struct err *e)
{
	struct creates *q = calloc(1, sizeof(*q));

	if (q)
		q->timer = evtimer_new(s->base, on_timer, q);
	if (!q || !q->timer) {
		free(q);
		return err_set(e, ERR_NOMEM, "no memory for creates");
	}
	q->s = s;
	q->tail = &q->head;
	*out = q;
	return 0;
}

void creates_free(struct creates *q)
{
	struct err e;

	if (!q)
		return;
	err_set(&e, ERR_UNAVAILABLE, "the store is closing");
	while (q->head) {
		struct create *c = q->head;

		q->head = c->next;
		create_fail(c, &e);
	}
	event_free(q->timer);
	free(q);
}
