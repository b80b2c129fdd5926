/*
 * Images of guests: uploads in pieces, the check of what came, which hosts shall have which, pieces for hosts. The bytes are the
 * system's own rows of the chunk tables. Called by api (operator routes) and dispatch on the loop's thread; does not block: pieces
 * go one after the other, and a file is hashed piece by piece as it is read back (about 1 ms a piece).
 */
#include "store_internal.h"

#include "common/text.h"

#include <inttypes.h>
#include <sodium.h>

const char *const store_image_files[STORE_IMAGE_FILES] = { "kernel", "initramfs", "rootfs" };

/* ---- reading ------------------------------------------------------------------------------------------------------------------
 */

#define STORED(i) "coalesce(eph_image_stored(i.hashes[" #i "], i.sizes[" #i "]), 0)"

static const struct pg_stmt stmt_list = {
	.name = "image_list",
	.sql = "SELECT i.hash, encode(i.hashes[1], 'hex'), encode(i.hashes[2], 'hex'), encode(i.hashes[3], 'hex'), i.sizes[1], "
	       "i.sizes[2], "
	       "i.sizes[3], " STORED(1) ", " STORED(2) ", " STORED(
			       3) ", i.kernel_version, i.note, i.ready, i.created_at_ms, "
				  "coalesce((SELECT string_agg(u.label, ',' ORDER BY u.label) FROM image_use u WHERE u.hash = "
				  "i.hash), '-'), "
				  "coalesce((SELECT string_agg(u.label, ',' ORDER BY u.label) FROM image_use u WHERE u.previous = "
				  "i.hash), '-'), "
				  "(SELECT count(*) FROM nodes n JOIN nodes_live v ON v.node_id = n.id WHERE v.image = i.hash AND "
				  "n.removed_at_ms IS NULL "
				  "AND n.state <> 'revoked' AND v.lease_until_ms > eph_now_ms()) "
				  "FROM images i WHERE $1::text IS NULL OR i.hash = $1 ORDER BY i.created_at_ms DESC, i.hash LIMIT "
				  "32",
	.nparams = 1,
};

static void read_image(const struct pg_rows *rows, int row, struct store_image *m)
{
	col_text(rows, row, 0, m->hash, sizeof(m->hash));
	for (int k = 0; k < STORE_IMAGE_FILES; k++) {
		if (!text_unhex(pg_text(rows, row, 1 + k), m->files[k].sha256, SHA256_LEN))
			memset(m->files[k].sha256, 0, SHA256_LEN);
		m->files[k].size = (uint64_t)pg_i64(rows, row, 4 + k);
		m->files[k].stored = (uint64_t)pg_i64(rows, row, 7 + k);
	}
	col_text(rows, row, 10, m->kernel_version, sizeof(m->kernel_version));
	m->note = pg_text(rows, row, 11);
	m->ready = pg_bool(rows, row, 12);
	m->created_at_ms = pg_i64(rows, row, 13);
	m->used_by = pg_text(rows, row, 14);
	m->previous_of = pg_text(rows, row, 15);
	m->nodes = pg_i64(rows, row, 16);
}

static void on_images(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_image list[STORE_IMAGES_MAX];
	struct store_images out = { .images = list };

	(void)sqlstate;
	for (int i = 0; !e && i < pg_nrows(rows) && i < STORE_IMAGES_MAX; i++)
		read_image(rows, i, &list[out.count++]);
	c->cb.images(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(c);
}

int store_image_list(struct store *s, const char *hash, store_images_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.images = cb;
	params_text(&p, hash);
	return call_exec(c, s->reads, &stmt_list, &p, on_images, e);
}

/* ---- an upload ----------------------------------------------------------------------------------------------------------------
 */

static const struct pg_stmt stmt_begin = {
	.name = "image_begin",
	.sql = "SELECT result, detail FROM eph_image_begin($1, ARRAY['kernel', 'initramfs', 'rootfs'], ARRAY[$2, $3, $4]::bytea[], "
	       "ARRAY[$5, $6, $7]::bigint[], $8, $9)",
	.nparams = 9,
};

int store_image_begin(struct store *s, const struct store_image *m, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	params_text(&p, m->hash);
	for (int k = 0; k < STORE_IMAGE_FILES; k++)
		params_bytes(&p, m->files[k].sha256, SHA256_LEN);
	for (int k = 0; k < STORE_IMAGE_FILES; k++)
		params_i64(&p, (int64_t)m->files[k].size);
	params_text(&p, m->kernel_version);
	params_text(&p, m->note ? m->note : "");
	return call_exec(c, s->money, &stmt_begin, &p, call_done_rows, e);
}

/* Pieces of one body, one after the other. */
struct pieces {
	struct store *s;
	char hash[STORE_IMAGE_HASH_MAX], file[16];
	uint64_t offset;
	size_t at, len;
	uint8_t *data;
	store_done_cb cb;
	void *arg;
};

static const struct pg_stmt stmt_put = {
	.name = "image_put",
	.sql = "SELECT result, detail FROM eph_image_put($1, $2, $3, $4)",
	.nparams = 4,
};

static void pieces_end(struct pieces *u, const struct store_done *d, const struct err *e)
{
	u->cb(u->arg, e ? NULL : d, e);
	free(u->data);
	free(u);
}

static int pieces_next(struct pieces *u, struct err *e);

static void on_piece(void *arg, const struct store_done *d, const struct err *e)
{
	struct pieces *u = arg;
	struct err failed;

	if (e || d->result != STORE_DONE || u->at == u->len)
		pieces_end(u, d, e);
	else if (pieces_next(u, &failed) != 0)
		pieces_end(u, NULL, &failed);
}

static int pieces_next(struct pieces *u, struct err *e)
{
	struct call *c = call_new(u->s, u, e);
	struct params p = { .n = 0 };
	size_t left = u->len - u->at, piece = left < STORE_FILE_CHUNK ? left : STORE_FILE_CHUNK;

	if (!c)
		return -1;
	c->cb.done = on_piece;
	params_text(&p, u->hash);
	params_text(&p, u->file);
	params_i64(&p, (int64_t)((u->offset + u->at) / STORE_FILE_CHUNK));
	params_bytes(&p, u->data + u->at, piece);
	u->at += piece;
	return call_exec(c, u->s->money, &stmt_put, &p, call_done_rows, e);
}

int store_image_put(struct store *s, const char *hash, const char *file, uint64_t offset, const void *data, size_t len,
		store_done_cb cb, void *arg, struct err *e)
{
	struct pieces *u;

	if (len == 0 || offset % STORE_FILE_CHUNK != 0 || offset > STORE_IMAGE_FILE_BYTES_MAX)
		return err_set(e, ERR_INVALID, "an offset is a multiple of %d", STORE_FILE_CHUNK);
	u = calloc(1, sizeof(*u));
	if (!u)
		return err_set(e, ERR_NOMEM, "no memory for a piece of an image");
	*u = (struct pieces){ .s = s, .offset = offset, .len = len, .cb = cb, .arg = arg };
	u->data = malloc(len);
	if (!u->data || !text_copy(u->hash, sizeof(u->hash), hash) || !text_copy(u->file, sizeof(u->file), file)) {
		err_set(e, ERR_NOMEM, "no memory for a piece of an image");
	} else {
		memcpy(u->data, data, len);
		if (pieces_next(u, e) == 0)
			return 0;
	}
	free(u->data);
	free(u);
	return -1;
}

/* ---- the check ----------------------------------------------------------------------------------------------------------------
 */

/* Reads the files back and hashes them, one piece a turn; then says for each what it found, and at last that the image is ready. */
struct reading {
	struct store *s;
	struct store_image image;
	int file;
	uint64_t at;
	bool wrong; /* some file is: the first one, and whether all of it was there */
	int wrong_file;
	bool whole;
	crypto_hash_sha256_state sha;
	store_done_cb cb;
	void *arg;
};

static const struct pg_stmt stmt_read = {
	.name = "image_read",
	.sql = "SELECT data FROM chunks WHERE org_id = '' AND sha256 = $1 AND position = $2",
	.nparams = 2,
};
static const struct pg_stmt stmt_checked = {
	.name = "image_checked",
	.sql = "SELECT 'done', '' FROM eph_image_file_checked($1, $2)",
	.nparams = 2,
};
static const struct pg_stmt stmt_ready = {
	.name = "image_ready",
	.sql = "SELECT result, detail FROM eph_image_ready($1)",
	.nparams = 1,
};

static void reading_step(struct reading *r);

static void reading_end(struct reading *r, const struct store_done *d, const struct err *e)
{
	r->cb(r->arg, e ? NULL : d, e);
	free(r);
}

static void reading_failed(struct reading *r, const struct err *e)
{
	reading_end(r, NULL, e);
}

static void on_ready(void *arg, const struct store_done *d, const struct err *e)
{
	reading_end(arg, d, e);
}

static void next_file(struct reading *r)
{
	r->file++;
	r->at = 0;
	crypto_hash_sha256_init(&r->sha);
	reading_step(r);
}

static void on_checked(void *arg, const struct store_done *d, const struct err *e)
{
	(void)d;
	if (e)
		reading_failed(arg, e);
	else
		next_file(arg);
}

/* All of a file was read; or a piece of it was not there, and nothing is said of the rest. */
static void file_end(struct reading *r, bool whole)
{
	uint8_t hash[SHA256_LEN];
	struct params p = { .n = 0 };
	struct err e;
	struct call *c;
	bool good;

	crypto_hash_sha256_final(&r->sha, hash);
	good = whole && memcmp(hash, r->image.files[r->file].sha256, SHA256_LEN) == 0;
	if (!good && !r->wrong) {
		r->wrong = true;
		r->wrong_file = r->file;
		r->whole = whole;
	}
	if (!whole) {
		next_file(r);
		return;
	}
	c = call_new(r->s, r, &e);
	if (!c) {
		reading_failed(r, &e);
		return;
	}
	c->cb.done = on_checked;
	params_bytes(&p, r->image.files[r->file].sha256, SHA256_LEN);
	params_bool(&p, good);
	if (call_exec(c, r->s->money, &stmt_checked, &p, call_done_rows, &e) != 0)
		reading_failed(r, &e);
}

static void on_read(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct reading *r = arg;
	uint8_t *bytes;
	size_t len = 0;

	(void)sqlstate;
	if (e) {
		reading_failed(r, call_error(e));
		return;
	}
	bytes = pg_nrows(rows) == 1 ? pg_bytea(rows, 0, 0, &len) : NULL;
	if (bytes)
		crypto_hash_sha256_update(&r->sha, bytes, len);
	free(bytes);
	r->at += len;
	if (len == 0)
		file_end(r, false);
	else
		reading_step(r);
}

static void all_read(struct reading *r)
{
	struct store_done d = { .result = STORE_DONE_CONFLICT, .id = "" };
	struct params p = { .n = 0 };
	struct call *c;
	struct err e;
	char text[160];

	if (r->wrong) {
		if (!text_fmt(text, sizeof(text), "%s %s; send it again, then complete", store_image_files[r->wrong_file],
				    r->whole ? "is not what its SHA-256 says" : "has not come as a whole"))
			text[0] = '\0';
		d.detail = text;
		reading_end(r, &d, NULL);
		return;
	}
	c = call_new(r->s, r, &e);
	if (!c) {
		reading_failed(r, &e);
		return;
	}
	c->cb.done = on_ready;
	params_text(&p, r->image.hash);
	if (call_exec(c, r->s->money, &stmt_ready, &p, call_done_rows, &e) != 0)
		reading_failed(r, &e);
}

static void reading_step(struct reading *r)
{
	struct params p = { .n = 0 };
	struct err e;

	if (r->file == STORE_IMAGE_FILES) {
		all_read(r);
		return;
	}
	if (r->at >= r->image.files[r->file].size) {
		file_end(r, true);
		return;
	}
	params_bytes(&p, r->image.files[r->file].sha256, SHA256_LEN);
	params_i64(&p, (int64_t)(r->at / STORE_FILE_CHUNK));
	if (!r->s->reads) {
		err_set(&e, ERR_UNAVAILABLE, "the store is closing");
		reading_failed(r, &e);
	} else if (pgev_exec(r->s->reads, &stmt_read, p.p, on_read, r, &e) != 0) {
		reading_failed(r, &e);
	}
}

static void on_found(void *arg, const struct store_images *m, const struct err *e)
{
	struct reading *r = arg;
	const struct store_done none = { .result = STORE_DONE_NOT_FOUND, .id = "", .detail = "" };

	if (e || m->count == 0) {
		reading_end(r, &none, e);
		return;
	}
	r->image = m->images[0];
	r->image.note = r->image.used_by = r->image.previous_of = NULL;
	crypto_hash_sha256_init(&r->sha);
	if (r->image.ready) {
		const struct store_done d = { .result = STORE_DONE, .id = "", .detail = "" };

		reading_end(r, &d, NULL);
		return;
	}
	reading_step(r);
}

int store_image_complete(struct store *s, const char *hash, store_done_cb cb, void *arg, struct err *e)
{
	struct reading *r = calloc(1, sizeof(*r));

	if (!r)
		return err_set(e, ERR_NOMEM, "no memory to check an image");
	*r = (struct reading){ .s = s, .cb = cb, .arg = arg };
	if (store_image_list(s, hash, on_found, r, e) == 0)
		return 0;
	free(r);
	return -1;
}

/* ---- which hosts shall have it --------------------------------------------------------------------------------------------------
 */

static const struct pg_stmt stmt_use = {
	.name = "image_use",
	.sql = "SELECT result, detail FROM eph_image_use($1, $2)",
	.nparams = 2,
};
static const struct pg_stmt stmt_rollback = {
	.name = "image_rollback",
	.sql = "SELECT result, detail FROM eph_image_rollback($1)",
	.nparams = 1,
};
static const struct pg_stmt stmt_remove = {
	.name = "image_remove",
	.sql = "SELECT result, detail FROM eph_image_remove($1)",
	.nparams = 1,
};

int store_image_use(struct store *s, const char *label, const char *hash, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	params_text(&p, label);
	if (hash)
		params_text(&p, hash);
	return call_exec(c, s->money, hash ? &stmt_use : &stmt_rollback, &p, call_done_rows, e);
}

int store_image_remove(struct store *s, const char *hash, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	params_text(&p, hash);
	return call_exec(c, s->money, &stmt_remove, &p, call_done_rows, e);
}

/* ---- for hosts ------------------------------------------------------------------------------------------------------------------
 */

static const struct pg_stmt stmt_wanted = {
	.name = "image_wanted",
	.sql = "SELECT hash, encode(hashes[1], 'hex'), encode(hashes[2], 'hex'), encode(hashes[3], 'hex'), sizes[1], sizes[2], "
	       "sizes[3] "
	       "FROM eph_image_wanted($1, $2, $3, $4)",
	.nparams = 4,
};

static void on_wanted(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_image m = { .hash = "" };
	struct store_images out = { .images = &m };

	(void)sqlstate;
	if (!e && pg_nrows(rows) == 1) {
		col_text(rows, 0, 0, m.hash, sizeof(m.hash));
		out.count = 1;
		for (int k = 0; k < STORE_IMAGE_FILES; k++) {
			if (!text_unhex(pg_text(rows, 0, 1 + k), m.files[k].sha256, SHA256_LEN))
				out.count = 0;
			m.files[k].size = (uint64_t)pg_i64(rows, 0, 4 + k);
		}
	}
	c->cb.images(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(c);
}

int store_image_wanted(
		struct store *s, const char *node_id, const struct link_image *m, store_images_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.images = cb;
	params_text(&p, node_id);
	params_text(&p, m->current);
	params_text(&p, m->state);
	params_text(&p, m->note);
	return call_exec(c, s->reads, &stmt_wanted, &p, on_wanted, e);
}

static const struct pg_stmt stmt_blob = {
	.name = "image_blob",
	.sql = "SELECT f.size, c.data FROM chunk_files f JOIN chunks c ON c.org_id = '' AND c.sha256 = f.sha256 AND c.position = "
	       "$2 "
	       "WHERE f.org_id = '' AND f.sha256 = $1 AND f.complete",
	.nparams = 2,
};

int store_image_blob(struct store *s, const struct link_image_blob *b, store_blob_cb cb, void *arg, struct err *e)
{
	struct call *c;
	struct params p = { .n = 0 };

	if (b->offset % STORE_FILE_CHUNK != 0 || b->offset > STORE_IMAGE_FILE_BYTES_MAX)
		return err_set(e, ERR_INVALID, "an offset is a multiple of %d", STORE_FILE_CHUNK);
	c = call_new(s, arg, e);
	if (!c)
		return -1;
	c->cb.blob = cb;
	params_bytes(&p, b->sha256, SHA256_LEN);
	params_i64(&p, (int64_t)(b->offset / STORE_FILE_CHUNK));
	return call_exec(c, s->reads, &stmt_blob, &p, chunk_on_blob, e);
}
