/* The `files` of a run request: paths, contents, their hashes. Pure; part of run_request. */
#include "run_request.h"

#include "common/text.h"

#include <sodium.h>
#include <stdlib.h>

struct file_reading {
	struct run_request *rq;
	struct field_errors *errors;
	size_t total; /* bytes of all inline files so far */
	bool over;    /* the total limit was reported */
};

static void unknown_member(struct file_reading *r, const struct json *v, const struct pointer *at)
{
	static const char *const known[] = { "path", "content", "content_base64", "file_id" };
	size_t i, k;

	for (i = 0; i < json_len(v); i++) {
		struct pointer here = { .up = at, .key = json_key(v, i) };

		for (k = 0; k < sizeof(known) / sizeof(known[0]) && strcmp(known[k], here.key) != 0; k++)
			continue;
		if (k == sizeof(known) / sizeof(known[0]))
			field_bad(r->errors, &here, "is not a member of a file; it has `path` and `content` or `content_base64`");
	}
}

/* True when `a` is `b`, or a directory on the way to it. */
static bool path_covers(const char *a, const char *b)
{
	size_t n = strlen(a);

	return strncmp(a, b, n) == 0 && (b[n] == '\0' || b[n] == '/');
}

static void check_clash(struct file_reading *r, const char *path, const struct pointer *at)
{
	size_t i;

	for (i = 0; i < r->rq->file_count; i++) {
		const char *other = r->rq->files[i].path;

		if (strcmp(other, path) == 0)
			field_bad(r->errors, at, "stands twice; each path may be given once");
		else if (path_covers(other, path) || path_covers(path, other))
			field_bad(r->errors, at, "needs a directory where another file is to be; give one of them another path");
		else
			continue;
		return;
	}
}

static bool read_path(struct file_reading *r, const struct json *v, const struct pointer *up, struct run_file *f)
{
	const struct json *path = json_get(v, "path");
	struct pointer at = { .up = up, .key = "path" };

	if (!path) {
		field_bad(r->errors, &at, "is missing; it must be a relative path");
		return false;
	}
	if (json_type(path) != JSON_STRING) {
		field_bad(r->errors, &at, "is of type %s, but must be a string", json_type_name(json_type(path)));
		return false;
	}
	if (json_len(path) > GUEST_PATH_MAX || !guest_path_ok(json_as_text(path)) ||
			!text_copy(f->path, sizeof(f->path), json_as_text(path))) {
		field_bad(r->errors, &at, "must be a relative path of 1 to %d bytes without empty, \".\" or \"..\" parts",
				GUEST_PATH_MAX);
		return false;
	}
	check_clash(r, f->path, &at);
	return true;
}

/* Keeps n bytes within what all inline files may have together. */
static bool fits(struct file_reading *r, size_t n, const struct pointer *at)
{
	if (n <= RUN_INLINE_MAX - r->total) {
		r->total += n;
		return true;
	}
	if (!r->over)
		field_bad(r->errors, at, "brings the inline files over %d bytes (8 MiB) together; send less or smaller files",
				RUN_INLINE_MAX);
	r->over = true;
	return false;
}

static void take_text(struct file_reading *r, const struct json *text, const struct pointer *at, struct run_file *f)
{
	if (json_type(text) != JSON_STRING) {
		field_bad(r->errors, at, "is of type %s, but must be a string; use `content_base64` for bytes",
				json_type_name(json_type(text)));
		return;
	}
	if (!fits(r, json_len(text), at))
		return;
	f->size = json_len(text);
	f->data = malloc(f->size + 1);
	if (!f->data)
		field_bad(r->errors, at, "could not be kept: memory is short; send the request again");
	else
		memcpy(f->data, json_as_text(text), f->size);
}

static void take_base64(struct file_reading *r, const struct json *text, const struct pointer *at, struct run_file *f)
{
	struct buf bytes = BUF_INIT(RUN_INLINE_MAX + 3);
	size_t n;

	if (json_type(text) != JSON_STRING) {
		field_bad(r->errors, at, "is of type %s, but must be a string of base64", json_type_name(json_type(text)));
		return;
	}
	n = json_len(text);
	if (n / 4 * 3 > RUN_INLINE_MAX + 2) {
		fits(r, RUN_INLINE_MAX + 1, at);
		return;
	}
	if (!text_unb64(json_as_text(text), n, &bytes)) {
		field_bad(r->errors, at, "is not base64 (RFC 4648 alphabet with + and /, padded with =, no line breaks)");
	} else if (fits(r, bytes.len, at)) {
		f->data = (uint8_t *)buf_steal(&bytes, &f->size);
		if (!f->data)
			field_bad(r->errors, at, "could not be kept: memory is short; send the request again");
	}
	buf_free(&bytes);
}

static void read_file(struct file_reading *r, const struct json *v, const struct pointer *at)
{
	const struct json *text = json_get(v, "content"), *b64 = json_get(v, "content_base64"), *id = json_get(v, "file_id");
	struct pointer at_text = { .up = at, .key = "content" }, at_b64 = { .up = at, .key = "content_base64" };
	struct pointer at_id = { .up = at, .key = "file_id" };
	struct run_file *f = &r->rq->files[r->rq->file_count];

	if (json_type(v) != JSON_OBJECT) {
		field_bad(r->errors, at, "is of type %s, but must be an object with `path` and `content` or `content_base64`",
				json_type_name(json_type(v)));
		return;
	}
	unknown_member(r, v, at);
	read_path(r, v, at, f);
	if ((text != NULL) + (b64 != NULL) + (id != NULL) != 1)
		field_bad(r->errors, at, "must have exactly one of `content` (text) and `content_base64` (bytes)");
	else if (id)
		field_later(r->errors, &at_id,
				"is not available in this version; send the file inline as `content` or `content_base64`");
	else if (text)
		take_text(r, text, &at_text, f);
	else
		take_base64(r, b64, &at_b64, f);
	if (f->data)
		crypto_hash_sha256(f->sha256, f->data, f->size);
	r->rq->file_count++;
}

void run_files_parse(struct run_request *rq, const struct json *v, const struct pointer *at, struct field_errors *errors)
{
	struct file_reading r = { .rq = rq, .errors = errors };
	size_t i, n = json_len(v);

	if (n > RUN_FILES_MAX) {
		field_bad(errors, at, "has %zu files, but at most %d are taken; pack them into an archive", n, RUN_FILES_MAX);
		n = RUN_FILES_MAX;
	}
	for (i = 0; i < n; i++) {
		struct pointer here = { .up = at, .key = NULL, .index = i };

		read_file(&r, json_at(v, i), &here);
	}
}
