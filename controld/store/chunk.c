/*
 * Contents of files in pieces of 256 KiB, once an organization and hash. A file counts as stored only when its row says that all
 * pieces are there, so that an upload that broke off is done again. Called by run_create.c (put) and dispatch (blob) on the loop's
 * thread; does not block. Pieces of one file go one after the other: a large upload never fills the connection that leases share.
 */
#include "store_internal.h"

#include "common/text.h"

#include <inttypes.h>

struct put {
	struct store *s;
	char org_id[ID_MAX];
	uint8_t sha256[SHA256_LEN];
	uint64_t size, at;
	uint8_t *data;
	store_done_cb cb;
	void *arg;
};

static const struct pg_stmt stmt_touch = {
	.name = "file_touch",
	.sql = "INSERT INTO chunk_files AS f (org_id, sha256, size, complete, used_at_ms) VALUES ($1, $2, $3::bigint, $3::bigint = "
	       "0, eph_now_ms()) "
	       "ON CONFLICT (org_id, sha256) DO UPDATE SET used_at_ms = EXCLUDED.used_at_ms RETURNING complete",
	.nparams = 3,
};

static const struct pg_stmt stmt_chunk = {
	.name = "file_chunk",
	.sql = "INSERT INTO chunks (org_id, sha256, position, data) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
	.nparams = 4,
};

static const struct pg_stmt stmt_complete = {
	.name = "file_complete",
	.sql = "UPDATE chunk_files SET complete = true WHERE org_id = $1 AND sha256 = $2",
	.nparams = 2,
};

static void put_done(struct put *u, const struct err *e)
{
	const struct store_done d = { .result = STORE_DONE, .id = "", .detail = "" };

	u->cb(u->arg, e ? NULL : &d, e);
	free(u->data);
	free(u);
}

static int put_exec(struct put *u, const struct pg_stmt *st, const struct params *p, pg_cb cb, struct err *e)
{
	if (!u->s->money)
		return err_set(e, ERR_UNAVAILABLE, "the store is closing");
	return pgev_exec(u->s->money, st, p->p, cb, u, e);
}

static void on_put_end(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	(void)rows;
	(void)sqlstate;
	put_done(arg, e ? call_error(e) : NULL);
}

static void on_put_chunk(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e);

static void put_next(struct put *u)
{
	struct params p = { .n = 0 };
	uint64_t left = u->size - u->at, piece = left < STORE_FILE_CHUNK ? left : STORE_FILE_CHUNK;
	struct err e;
	int result;

	params_text(&p, u->org_id);
	params_bytes(&p, u->sha256, sizeof(u->sha256));
	if (left == 0) {
		result = put_exec(u, &stmt_complete, &p, on_put_end, &e);
	} else {
		params_i64(&p, (int64_t)(u->at / STORE_FILE_CHUNK));
		params_bytes(&p, u->data + u->at, (size_t)piece);
		u->at += piece;
		result = put_exec(u, &stmt_chunk, &p, on_put_chunk, &e);
	}
	if (result != 0)
		put_done(u, &e);
}

static void on_put_chunk(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	(void)rows;
	(void)sqlstate;
	if (e)
		put_done(arg, call_error(e));
	else
		put_next(arg);
}

static void on_touched(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct put *u = arg;

	(void)sqlstate;
	if (e)
		put_done(u, call_error(e));
	else if (pg_bool(rows, 0, 0))
		put_done(u, NULL);
	else
		put_next(u);
}

int chunk_put(struct store *s, const char *org_id, const struct store_file *f, store_done_cb cb, void *arg, struct err *e)
{
	struct put *u = calloc(1, sizeof(*u));
	struct params p = { .n = 0 };

	if (!u || !text_copy(u->org_id, sizeof(u->org_id), org_id))
		goto no_memory;
	u->s = s;
	u->size = f->size;
	u->cb = cb;
	u->arg = arg;
	memcpy(u->sha256, f->sha256, sizeof(u->sha256));
	u->data = malloc(f->size > 0 ? (size_t)f->size : 1);
	if (!u->data)
		goto no_memory;
	if (f->size > 0)
		memcpy(u->data, f->data, (size_t)f->size);
	params_text(&p, u->org_id);
	params_bytes(&p, u->sha256, sizeof(u->sha256));
	params_i64(&p, (int64_t)u->size);
	if (put_exec(u, &stmt_touch, &p, on_touched, e) == 0)
		return 0;
	free(u->data);
	free(u);
	return -1;
no_memory:
	free(u);
	return err_set(e, ERR_NOMEM, "no memory for a file");
}

/* ---- for hosts ------------------------------------------------------------------------------------------------------------------
 */

/* Only a file of the run that this node holds by this token. */
static const struct pg_stmt stmt_blob = {
	.name = "blob",
	.sql = "SELECT f.size, c.data FROM run_live l JOIN run_files f ON f.run_id = l.run_id AND f.sha256 = $4 "
	       "LEFT JOIN chunks c ON c.org_id = l.org_id AND c.sha256 = f.sha256 AND c.position = $5 "
	       "WHERE l.run_id = $2 AND l.node_id = $1 AND l.token = $3 LIMIT 1",
	.nparams = 5,
};

void chunk_on_blob(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_blob b = { .found = false };
	uint8_t *bytes = NULL;
	size_t len = 0;

	(void)sqlstate;
	if (!e && pg_nrows(rows) == 1) {
		b.total = (uint64_t)pg_i64(rows, 0, 0);
		bytes = pg_bytea(rows, 0, 1, &len);
		b.found = bytes != NULL || b.total == 0;
		b.bytes = bytes;
		b.len = (uint32_t)len;
	}
	c->cb.blob(c->arg, e ? NULL : &b, e ? call_error(e) : NULL);
	free(bytes);
	free(c);
}

int store_blob(struct store *s, const char *node_id, const struct link_blob *b, store_blob_cb cb, void *arg, struct err *e)
{
	struct call *c;
	struct params p = { .n = 0 };

	if (b->offset % STORE_FILE_CHUNK != 0 || b->offset > INT32_MAX)
		return err_set(e, ERR_INVALID, "an offset is a multiple of %d", STORE_FILE_CHUNK);
	c = call_new(s, arg, e);
	if (!c)
		return -1;
	c->cb.blob = cb;
	params_text(&p, node_id);
	params_text(&p, b->run_id);
	params_bytes(&p, b->token, TOKEN_LEN);
	params_bytes(&p, b->sha256, SHA256_LEN);
	params_i64(&p, (int64_t)(b->offset / STORE_FILE_CHUNK));
	return call_exec(c, s->reads, &stmt_blob, &p, chunk_on_blob, e);
}
