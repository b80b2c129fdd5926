/*
 * Checks the guest image before anything boots from it: the three files must be what image.json says. Called at start by host.c,
 * which reads about 160 MB; later by images.c, which reads nothing.
 */
#include "keeper/host_internal.h"

#include "common/json.h"
#include "common/text.h"
#include "keeper/files.h"
#include "keeper/image_store.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIX "make the image again with deploy/guest-image/build and pack, or set image_dir"

static const struct image_part {
	const char *file, *key;
} parts[IMAGE_FILES] = {
	[IMAGE_KERNEL] = { "vmlinux", "kernel" },
	[IMAGE_INITRAMFS] = { "initramfs.cpio", "initramfs" },
	[IMAGE_ROOTFS] = { "rootfs.sqfs", "rootfs" },
};

static int hash_file(int fd, const char *path, char hex[2 * SHA256_LEN + 1], struct err *e)
{
	crypto_hash_sha256_state state;
	uint8_t hash[SHA256_LEN], chunk[65536];
	off_t at = 0;
	ssize_t n;

	crypto_hash_sha256_init(&state);
	while ((n = pread(fd, chunk, sizeof(chunk), at)) != 0) {
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return err_set_errno(e, "read %s", path);
		crypto_hash_sha256_update(&state, chunk, (unsigned long long)n);
		at += n;
	}
	crypto_hash_sha256_final(&state, hash);
	text_hex(hash, sizeof(hash), hex);
	return 0;
}

static int check_part(struct host *h, const char *dir, enum image_file which, const struct json *described, struct err *e)
{
	const char *want = json_get_text(described, parts[which].key);
	char hex[2 * SHA256_LEN + 1], *path = h->image_path[which];
	struct stat st;

	if (!text_fmt(path, sizeof(h->image_path[which]), "%s/%s", dir, parts[which].file))
		return err_set(e, ERR_LIMIT, "image_dir is too long");
	if (!want)
		return err_set(e, ERR_INVALID, "%s/image.json names no %s; " FIX, dir, parts[which].key);
	h->image_fd[which] = open(path, O_RDONLY | O_CLOEXEC);
	if (h->image_fd[which] < 0)
		return err_set_errno(e, "%s (" FIX ")", path);
	if (fstat(h->image_fd[which], &st) != 0 || !S_ISREG(st.st_mode))
		return err_set(e, ERR_INVALID, "%s is no file; " FIX, path);
	/* VMMs read it with ids of their own. */
	if (!(st.st_mode & S_IROTH))
		return err_set(e, ERR_DENIED, "%s must be readable for everybody: chmod 0444", path);
	h->image_stat[which] = st;
	if (hash_file(h->image_fd[which], path, hex, e))
		return -1;
	if (strcmp(hex, want) != 0)
		return err_set(e, ERR_INVALID, "%s is not what image.json describes (SHA-256 %.12s..., expected %.12s...); " FIX,
				path, hex, want);
	return 0;
}

static int check_all(struct host *h, const char *dir, const struct json *described, struct err *e)
{
	const char *image = json_get_text(described, "image");

	if (!image || !text_unhex(image, h->image_hash, sizeof(h->image_hash)))
		return err_set(e, ERR_INVALID, "%s/image.json has no image hash; " FIX, dir);
	text_hex(h->image_hash, sizeof(h->image_hash), h->image_name);
	for (int i = 0; i < IMAGE_FILES; i++)
		if (check_part(h, dir, (enum image_file)i, described, e))
			return -1;
	return 0;
}

int host_open_image(struct host *h, const char *dir, struct err *e)
{
	struct buf b = BUF_INIT(65536);
	struct json *described = NULL;
	char path[1024];
	int rc = -1;

	if (!text_fmt(path, sizeof(path), "%s/image.json", dir))
		return err_set(e, ERR_LIMIT, "image_dir is too long");
	if (files_load(path, &b, e))
		err_wrap(e, "guest image (" FIX ")");
	else if (json_parse((const char *)b.data, b.len, &described, e))
		err_wrap(e, "%s", path);
	else
		rc = check_all(h, dir, described, e);
	json_free(described);
	buf_free(&b);
	return rc;
}

void host_drop_image(struct host *h)
{
	for (int i = 0; i < IMAGE_FILES; i++)
		if (h->image_fd[i] >= 0) {
			close(h->image_fd[i]);
			h->image_fd[i] = -1;
		}
	h->image_name[0] = '\0';
	memset(h->image_hash, 0, sizeof(h->image_hash));
}

void host_open_stored_image(struct host *h, const char *state_dir)
{
	char dir[1024], image[1024], name[65];
	struct err e;

	h->image_stored = true;
	h->image_note[0] = '\0';
	if (!text_fmt(dir, sizeof(dir), "%s/images", state_dir) || !image_store_current(dir, name))
		return;
	if (text_fmt(image, sizeof(image), "%s/%s", dir, name) && host_open_image(h, image, &e) == 0 &&
			strcmp(h->image_name, name) == 0)
		return;
	host_drop_image(h);
	if (!text_fmt(h->image_note, sizeof(h->image_note), "%.250s", e.text))
		h->image_note[0] = '\0';
}

/* Other links to a local file may come and go, which moves its change time; of stored ones nothing may move. */
static bool same_file(const struct stat *a, const struct stat *b, bool stored)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
	       a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec &&
	       (!stored || (a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec));
}

int host_image_unchanged(const struct host *h, struct err *e)
{
	for (int i = 0; i < IMAGE_FILES; i++) {
		struct stat st;

		if (h->image_fd[i] < 0 || stat(h->image_path[i], &st) != 0)
			return err_set_errno(e, "%s", h->image_path[i]);
		if (!same_file(&st, &h->image_stat[i], h->image_stored))
			return err_set(e, ERR_INVALID, "%s is not the file that was checked any more", h->image_path[i]);
	}
	return 0;
}

int host_switch_image(struct host *h, const char *dir, const char *name, struct err *e)
{
	struct host next = { .image_stored = true };

	for (int i = 0; i < IMAGE_FILES; i++)
		next.image_fd[i] = -1;
	for (int i = 0; i < IMAGE_FILES; i++) {
		if (!text_fmt(next.image_path[i], sizeof(next.image_path[i]), "%s/%s/%s", dir, name, parts[i].file)) {
			host_drop_image(&next);
			return err_set(e, ERR_LIMIT, "state_dir is too long");
		}
		next.image_fd[i] = open(next.image_path[i], O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
		if (next.image_fd[i] < 0 || fstat(next.image_fd[i], &next.image_stat[i]) != 0) {
			err_set_errno(e, "%s", next.image_path[i]);
			host_drop_image(&next);
			return -1;
		}
	}
	host_drop_image(h); /* VMs that run, or are starting, have descriptors of their own */
	memcpy(h->image_fd, next.image_fd, sizeof(h->image_fd));
	memcpy(h->image_path, next.image_path, sizeof(h->image_path));
	memcpy(h->image_stat, next.image_stat, sizeof(h->image_stat));
	h->image_stored = true;
	if (!text_copy(h->image_name, sizeof(h->image_name), name) || !text_unhex(name, h->image_hash, sizeof(h->image_hash)))
		return err_set(e, ERR_INTERNAL, "an image's name is no hash");
	return 0;
}
