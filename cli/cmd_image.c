/*
 * `admin image …`: images of guests, from a directory that deploy/guest-image/pack wrote to the hosts that shall start VMs from
 * them. An upload goes in pieces and is gone on with where it broke off. Blocks; keeps nothing.
 */
#include "cli.h"

#include "admin.h"
#include "api.h"
#include "common/text.h"
#include "show.h"
#include "term.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIECE ((size_t)2 * 1024 * 1024) /* a multiple of the service's chunks */
#define COMPLETE_MS 600000              /* the service reads everything once more */
#define FILES 3

static const struct part {
	const char *name, *file, *size;
} parts[FILES] = {
	{ "kernel", "vmlinux", "kernel_bytes" },
	{ "initramfs", "initramfs.cpio", "initramfs_bytes" },
	{ "rootfs", "rootfs.sqfs", "rootfs_bytes" },
};

struct upload {
	struct api api;
	int fd[FILES];
	int64_t size[FILES];
	char id[128];
	int64_t done, all; /* bytes */
};

/* --- what is in the directory ------------------------------------------------------------------------------------------------- */

static int open_part(const char *dir, int i, struct upload *u, struct err *e)
{
	char path[4096];
	struct stat st;

	if (!text_fmt(path, sizeof path, "%s/%s", dir, parts[i].file))
		return err_set(e, ERR_LIMIT, "the directory's name is too long");
	u->fd[i] = open(path, O_RDONLY | O_CLOEXEC);
	if (u->fd[i] < 0)
		return err_set_errno(e, "%s", path);
	if (fstat(u->fd[i], &st) != 0 || !S_ISREG(st.st_mode) || st.st_size == 0)
		return err_set(e, ERR_INVALID, "%s is no file, or empty: make the image again with deploy/guest-image/pack", path);
	u->size[i] = st.st_size;
	u->all += st.st_size;
	return 0;
}

static int read_description(const char *dir, struct json **out, struct err *e)
{
	struct buf b = BUF_INIT(65536);
	char path[4096], piece[4096];
	ssize_t n;
	int fd, rc = -1;

	if (!text_fmt(path, sizeof path, "%s/image.json", dir))
		return err_set(e, ERR_LIMIT, "the directory's name is too long");
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return err_set_errno(e, "%s (a directory that deploy/guest-image/pack wrote is wanted)", path);
	while ((n = read(fd, piece, sizeof piece)) > 0)
		if (!buf_add(&b, piece, (size_t)n))
			break;
	close(fd);
	if (n != 0 || b.len == 0)
		err_set(e, ERR_INVALID, "%s cannot be read, or is too long to be an image's description", path);
	else if (json_parse((const char *)b.data, b.len, out, e) != 0)
		err_wrap(e, "%s", path);
	else
		rc = 0;
	buf_free(&b);
	return rc;
}

static int put_description(const struct args *a, const struct json *described, struct upload *u, struct jw *w, struct err *e)
{
	const char *image = json_get_text(described, "image");

	if (image == NULL || !text_copy(u->id, sizeof u->id, image))
		return err_set(e, ERR_INVALID, "image.json names no image");
	jw_kstr(w, "image", image);
	for (int i = 0; i < FILES; i++) {
		if (json_get_text(described, parts[i].name) == NULL)
			return err_set(e, ERR_INVALID, "image.json names no %s", parts[i].name);
		if (open_part(a->words[0], i, u, e) != 0)
			return -1;
		jw_kstr(w, parts[i].name, json_get_text(described, parts[i].name));
		jw_kint(w, parts[i].size, u->size[i]);
	}
	if (json_get_text(described, "kernel_version") != NULL)
		jw_kstr(w, "kernel_version", json_get_text(described, "kernel_version"));
	if (args_value(a, "note") != NULL)
		jw_kstr(w, "note", args_value(a, "note"));
	return 0;
}

/* --- sending ------------------------------------------------------------------------------------------------------------------ */

static void progress(const struct upload *u, const char *what)
{
	if (u->api.json || !term_is_terminal(stderr))
		return;
	(void)fprintf(stderr, "\r\033[K%s: %" PRId64 " of %" PRId64 " MiB", what, u->done >> 20, u->all >> 20);
	(void)fflush(stderr);
}

static void progress_end(const struct upload *u)
{
	if (!u->api.json && term_is_terminal(stderr))
		(void)fputs("\r\033[K", stderr);
}

static int ask(struct upload *u, const struct api_call *call, struct answer *out)
{
	return api_ask(&u->api, call, out);
}

static int send_piece(struct upload *u, int i, int64_t at, size_t n)
{
	struct buf b = BUF_INIT(PIECE + 4096);
	char path[512];
	struct api_call call = {
		.method = "PUT", .path = path, .body = &b, .type = "application/octet-stream", .timeout_ms = 120000
	};
	struct answer answer = { .json = NULL };
	uint8_t piece[64 * 1024];
	int rc = CLI_OK;

	while (b.len < n) {
		size_t want = n - b.len < sizeof piece ? n - b.len : sizeof piece;
		ssize_t got = pread(u->fd[i], piece, want, (off_t)(at + (int64_t)b.len));

		if (got <= 0 || !buf_add(&b, piece, (size_t)got))
			break;
	}
	if (b.len < n || !text_fmt(path, sizeof path, "/v1/operator/images/%s/%s?offset=%" PRId64, u->id, parts[i].name, at)) {
		term_complain("%s got shorter while it was read", parts[i].file);
		rc = CLI_USE;
	} else {
		rc = ask(u, &call, &answer);
		answer_free(&answer);
	}
	buf_free(&b);
	return rc;
}

static int send_part(struct upload *u, int i, int64_t stored)
{
	int64_t at = stored >= u->size[i] ? u->size[i] : stored - stored % (256 * 1024);
	int rc = CLI_OK;

	u->done += at;
	while (rc == CLI_OK && at < u->size[i]) {
		size_t n = u->size[i] - at > (int64_t)PIECE ? PIECE : (size_t)(u->size[i] - at);

		progress(u, parts[i].name);
		rc = send_piece(u, i, at, n);
		at += (int64_t)n;
		u->done += (int64_t)n;
	}
	return rc;
}

/* After the service has said what it has of the image. */
static int send_all(struct upload *u, const struct json *have)
{
	char path[256];
	struct api_call call = { .method = "POST", .path = path, .timeout_ms = COMPLETE_MS, .safe = true };
	struct answer answer = { .json = NULL };
	int rc = CLI_OK;

	for (int i = 0; rc == CLI_OK && i < FILES; i++)
		rc = send_part(u, i, json_get_int(json_get(json_get(have, "files"), parts[i].name), "stored_bytes", 0));
	if (rc == CLI_OK && text_fmt(path, sizeof path, "/v1/operator/images/%s/complete", u->id)) {
		progress(u, "checking");
		rc = ask(u, &call, &answer);
		progress_end(u);
		if (rc == CLI_OK && u->api.json)
			(void)api_print_json(&answer);
		else if (rc == CLI_OK)
			term_say("%s", u->id);
		answer_free(&answer);
	} else {
		progress_end(u);
	}
	if (rc != CLI_OK)
		term_note("What came is kept; the same command goes on from there.");
	return rc;
}

int cmd_image_add(const struct args *a)
{
	struct upload u = { .fd = { -1, -1, -1 } };
	struct api_call call = { .method = "POST", .path = "/v1/operator/images", .safe = true };
	struct answer answer = { .json = NULL };
	struct json *described = NULL;
	struct admin_body o;
	struct err e;
	int rc;

	admin_begin(&o);
	rc = api_open_operator(&u.api, a);
	if (rc == CLI_OK &&
			(read_description(a->words[0], &described, &e) != 0 || put_description(a, described, &u, &o.w, &e) != 0))
		rc = admin_use(&e);
	jw_close(&o.w);
	if (rc == CLI_OK && !jw_end(&o.w)) {
		term_complain("a value is too long, or no valid UTF-8");
		rc = CLI_USE;
	}
	if (rc == CLI_OK) {
		call.body = &o.b;
		rc = ask(&u, &call, &answer);
		if (rc == CLI_OK)
			rc = send_all(&u, answer.json);
		answer_free(&answer);
	}
	json_free(described);
	buf_free(&o.b);
	for (int i = 0; i < FILES; i++)
		if (u.fd[i] >= 0)
			close(u.fd[i]);
	api_close(&u.api);
	return rc;
}

/* --- the others --------------------------------------------------------------------------------------------------------------- */

static void show_images(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "IMAGE", "id", 64, SHOW_TEXT },
		{ "STATE", "state", 9, SHOW_TEXT },
		{ "HOSTS", "nodes", 5, SHOW_COUNT },
		{ "CREATED", "created_at", 19, SHOW_TIME },
		{ "USED BY", "used_by", 24, SHOW_TEXT },
		{ "NOTE", "note", 24, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_image_list(const struct args *a)
{
	return admin_ask(a, "GET", "/v1/operator/images", NULL, NULL, show_images);
}

/* The one label of --label, which is a list option everywhere else. */
static int put_label(const struct args *a, struct admin_body *o)
{
	const char *label = args_value(a, "label");

	admin_begin(o);
	if (label == NULL)
		return CLI_OK;
	if (strchr(label, '=') == NULL || label[0] == '=' || strchr(label, ',') != NULL) {
		term_complain("--label %s: it must be KEY=VALUE, without commas", label);
		buf_free(&o->b);
		return CLI_USE;
	}
	jw_kstr(&o->w, "label", label);
	return CLI_OK;
}

static void show_used(const struct json *v)
{
	if (json_get_text(v, "id") != NULL)
		term_note("Hosts fetch it within about 10 s and start new VMs from it; those that run keep theirs.");
}

int cmd_image_use(const struct args *a)
{
	char path[ADMIN_PATH_MAX];
	struct admin_body o;
	int rc = put_label(a, &o);

	if (rc != CLI_OK)
		return rc;
	if (admin_no_slash(a->words[0]) && admin_path(path, "/v1/operator/images/", a->words[0], "/use"))
		return admin_ask(a, "POST", path, &o, NULL, show_used);
	buf_free(&o.b);
	return admin_bad_word("an image");
}

int cmd_image_rollback(const struct args *a)
{
	struct admin_body o;
	int rc = put_label(a, &o);

	return rc != CLI_OK ? rc : admin_ask(a, "POST", "/v1/operator/images/rollback", &o, NULL, show_images);
}

int cmd_image_remove(const struct args *a)
{
	char path[ADMIN_PATH_MAX];

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/images/", a->words[0], ""))
		return admin_bad_word("an image");
	return admin_ask(a, "DELETE", path, NULL, NULL, NULL);
}
