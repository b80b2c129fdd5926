/*
 * Checks the guest image before anything boots from it: the three files must be what image.json says. Called once at start by
 * host.c; reads about 160 MB.
 */
#include "keeper/host_internal.h"

#include "common/json.h"
#include "common/text.h"
#include "keeper/files.h"

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
