/*
 * The operator's calls about images of guests: begin, pieces, complete, list, use, rollback, remove. On operator_listen only; on
 * the loop. A body of pieces is bounded (IMAGE_BODY_MAX) and goes to the store as it is; whole files are checked there, piece by
 * piece.
 */
#include "api_internal.h"

#include "common/text.h"
#include "proto/link.h"

#define NOTE_MAX 200

/* --- showing ------------------------------------------------------------------------------------------------------------ */

static void put_labels(struct jw *w, const char *name, const char *list)
{
	char label[STORE_SELECTOR_MAX];

	jw_karray(w, name);
	if (strcmp(list, "-") != 0) {
		do {
			size_t n = strcspn(list, ",");

			if (text_fmt(label, sizeof(label), "%.*s", (int)n, list))
				jw_str(w, *label ? label : "*");
			list += n;
		} while (*list++ == ',');
	}
	jw_close(w);
}

static void put_image(struct jw *w, const struct store_image *m)
{
	char hex[2 * SHA256_LEN + 1];

	jw_object(w);
	jw_kstr(w, "id", m->hash);
	jw_kstr(w, "state", m->ready ? "ready" : "uploading");
	jw_kstr(w, "kernel_version", *m->kernel_version ? m->kernel_version : NULL);
	jw_kstr(w, "note", *m->note ? m->note : NULL);
	put_labels(w, "used_by", m->used_by); /* "*": all hosts that no label here is of */
	put_labels(w, "rollback_for", m->previous_of);
	jw_kint(w, "nodes", m->nodes);
	jw_kobject(w, "files");
	for (int i = 0; i < STORE_IMAGE_FILES; i++) {
		text_hex(m->files[i].sha256, SHA256_LEN, hex);
		jw_kobject(w, store_image_files[i]);
		jw_kstr(w, "sha256", hex);
		jw_kint(w, "bytes", (int64_t)m->files[i].size);
		jw_kint(w, "stored_bytes", (int64_t)m->files[i].stored);
		jw_close(w);
	}
	jw_close(w);
	json_time(w, "created_at", m->created_at_ms);
	jw_close(w);
}

static void on_list(void *arg, const struct store_images *m, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024 * 1024);
	struct jw w;

	if (!r)
		return;
	list_begin(&w, &out);
	for (size_t i = 0; i < m->count; i++)
		put_image(&w, &m->images[i]);
	list_end(&w, NULL);
	api_reply(r, 200, &out);
}

void operator_image_list(struct api_req *r)
{
	struct err e;

	api_asked(store_image_list(r->api->opt.store, NULL, on_list, api_hold(r), &e), r, &e);
}

static void on_one(void *arg, const struct store_images *m, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(64 * 1024);
	struct jw w;

	if (!r)
		return;
	if (m->count == 0) {
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such image.");
		return;
	}
	jw_init(&w, &out);
	put_image(&w, &m->images[0]);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

static void show_one(struct api_req *r, const char *hash)
{
	struct err e;

	api_asked(store_image_list(r->api->opt.store, hash, on_one, api_hold(r), &e), r, &e);
}

/* The hash in the path, or NULL after a 404. */
static const char *image_hash(struct api_req *r)
{
	const char *s = api_param(r, 0);

	if (strlen(s) == 2 * SHA256_LEN && strspn(s, "0123456789abcdef") == 2 * SHA256_LEN)
		return s;
	api_problem(r, PROBLEM_NOT_FOUND, "There is no such image; an image's name is 64 hexadecimal digits.");
	return NULL;
}

void operator_image_get(struct api_req *r)
{
	const char *hash = image_hash(r);

	if (hash)
		show_one(r, hash);
}

/* --- an upload ---------------------------------------------------------------------------------------------------------- */

static void on_begun(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "image");
	else
		show_one(r, r->state);
}

static void read_hash(struct body *b, const char *name, uint8_t out[SHA256_LEN])
{
	const char *s = body_text(b, name, 2 * SHA256_LEN, 2 * SHA256_LEN, true);
	struct pointer at = { .up = NULL, .key = name };

	if (s && (strspn(s, "0123456789abcdef") != 2 * SHA256_LEN || !text_unhex(s, out, SHA256_LEN)))
		field_bad(&b->errors, &at, "must be a SHA-256 in 64 lower-case hexadecimal digits");
}

void operator_image_begin(struct api_req *r)
{
	static const char *const bytes[STORE_IMAGE_FILES] = { "kernel_bytes", "initramfs_bytes", "rootfs_bytes" };
	struct pointer at = { .up = NULL, .key = "image" };
	uint8_t all[LINK_IMAGE_FILES][SHA256_LEN] = { { 0 } }, said[SHA256_LEN] = { 0 }, name[SHA256_LEN];
	struct store_image m = { .note = "" };
	const char *version, *note;
	struct body b;
	struct err e;
	char *hash;

	body_open(&b, r, "image kernel kernel_bytes initramfs initramfs_bytes rootfs rootfs_bytes kernel_version note");
	read_hash(&b, "image", said);
	for (int i = 0; i < STORE_IMAGE_FILES; i++) {
		read_hash(&b, store_image_files[i], all[i]);
		memcpy(m.files[i].sha256, all[i], SHA256_LEN);
		m.files[i].size = (uint64_t)body_int(&b, bytes[i], 1, STORE_IMAGE_FILE_BYTES_MAX, 1, true);
	}
	version = body_text(&b, "kernel_version", 0, sizeof(m.kernel_version) - 1, false);
	note = body_text(&b, "note", 0, NOTE_MAX, false);
	link_image_hash(all, name);
	if (!field_errors_any(&b.errors) && memcmp(name, said, sizeof(name)) != 0)
		field_bad(&b.errors, &at, "is not the hash over these three files; take it from image.json as pack wrote it");
	if (!body_ok(&b, r))
		return;
	text_hex(name, sizeof(name), m.hash);
	m.note = note ? note : "";
	hash = strdup(m.hash);
	if (!hash || !text_copy(m.kernel_version, sizeof(m.kernel_version), version ? version : "")) {
		free(hash);
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
	} else {
		api_set_state(r, hash, free);
		api_asked(store_image_begin(r->api->opt.store, &m, on_begun, api_hold(r), &e), r, &e);
	}
	body_free(&b);
}

static void on_put(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "image");
	else
		api_reply_empty(r, 204);
}

void operator_image_put(struct api_req *r)
{
	const char *hash = image_hash(r);
	struct field_errors fe;
	const uint8_t *p;
	int64_t offset;
	struct err e;
	size_t n;

	if (!hash)
		return;
	field_errors_init(&fe);
	if (api_query_int(r, "offset", 0, STORE_IMAGE_FILE_BYTES_MAX, 0, &offset, &fe) == 0 && offset % STORE_FILE_CHUNK != 0)
		query_bad(&fe, "offset", "must be a multiple of %d", STORE_FILE_CHUNK);
	if (field_errors_any(&fe)) {
		api_problem_fields(r, &fe);
		return;
	}
	p = http_body(r->http, &n);
	if (n == 0)
		api_problem(r, PROBLEM_INVALID_REQUEST, "The body is empty, but must be bytes of the file, from `offset` on.");
	else
		api_asked(store_image_put(r->api->opt.store, hash, api_param(r, 1), (uint64_t)offset, p, n, on_put, api_hold(r),
					  &e),
				r, &e);
}

/* --- what is done with it ----------------------------------------------------------------------------------------------- */

static void on_done_show(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "image");
	else
		show_one(r, api_param(r, 0));
}

void operator_image_complete(struct api_req *r)
{
	const char *hash = image_hash(r);
	struct body b;
	struct err e;

	if (!hash)
		return;
	body_open(&b, r, "");
	if (!body_ok(&b, r))
		return;
	body_free(&b);
	api_asked(store_image_complete(r->api->opt.store, hash, on_done_show, api_hold(r), &e), r, &e);
}

/* "label" of the body in out, "" without; false when r was answered. */
static bool read_label(struct api_req *r, char out[STORE_SELECTOR_MAX])
{
	struct pointer at = { .up = NULL, .key = "label" };
	const char *label;
	struct body b;

	body_open(&b, r, "label");
	label = body_text(&b, "label", 0, STORE_SELECTOR_MAX - 1, false);
	if (label) {
		labels_check(&b, "label", label);
		if (strchr(label, ',') && !field_errors_any(&b.errors))
			field_bad(&b.errors, &at, "must be one label, like pool=blue");
	}
	if (!body_ok(&b, r))
		return false;
	if (!text_copy(out, STORE_SELECTOR_MAX, label ? label : ""))
		out[0] = '\0';
	body_free(&b);
	return true;
}

void operator_image_use(struct api_req *r)
{
	char label[STORE_SELECTOR_MAX];
	const char *hash = image_hash(r);
	struct err e;

	if (hash && read_label(r, label))
		api_asked(store_image_use(r->api->opt.store, label, hash, on_done_show, api_hold(r), &e), r, &e);
}

static void on_rolled_back(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct err e2;

	if (!r)
		return;
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "image");
	else
		api_asked(store_image_list(r->api->opt.store, NULL, on_list, api_hold(r), &e2), r, &e2);
}

void operator_image_rollback(struct api_req *r)
{
	char label[STORE_SELECTOR_MAX];
	struct err e;

	if (read_label(r, label))
		api_asked(store_image_use(r->api->opt.store, label, NULL, on_rolled_back, api_hold(r), &e), r, &e);
}

void operator_image_remove(struct api_req *r)
{
	const char *hash = image_hash(r);
	struct err e;

	if (hash)
		api_asked(store_image_remove(r->api->opt.store, hash, on_put, api_hold(r), &e), r, &e);
}
