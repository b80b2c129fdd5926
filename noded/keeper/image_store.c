/* Where images lie on a host (image_store.h). Called by images.c and host.c; blocks on the file system, not on its disk. */
#include "keeper/image_store.h"

#include "common/buf.h"
#include "common/json.h"
#include "common/log.h"
#include "common/text.h"
#include "keeper/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define SPARE_BYTES (UINT64_C(64) << 20) /* of the disk, left to journals and spools */

const char *const image_file_names[IMAGE_FILES] = { "vmlinux", "initramfs.cpio", "rootfs.sqfs" };
static const char *const keys[IMAGE_FILES] = { "kernel", "initramfs", "rootfs" };

/* A directory of files; what else may be in it is left alone, and so is it then. */
static void remove_dir(const char *path)
{
	char file[1100];
	DIR *d = opendir(path);
	struct dirent *entry;

	if (!d)
		return;
	while ((entry = readdir(d)))
		if (entry->d_name[0] != '.' && text_fmt(file, sizeof(file), "%s/%s", path, entry->d_name))
			(void)unlink(file);
	closedir(d);
	if (rmdir(path) != 0 && errno != ENOENT)
		log_warn("%s cannot be removed error=\"%s\"", path, strerror(errno));
}

static bool incoming(const char *dir, int file, char out[1024])
{
	return text_fmt(out, 1024, "%s/incoming/%s", dir, image_file_names[file]);
}

void image_store_clear(const char *dir)
{
	char path[1024];

	if (text_fmt(path, sizeof(path), "%s/incoming", dir))
		remove_dir(path);
}

static int make_incoming(const char *dir, struct err *e)
{
	char path[1024];

	if (!text_fmt(path, sizeof(path), "%s/incoming", dir))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	return files_mkdir(path, 0755, e);
}

int image_store_create(const char *dir, int file, uint64_t size, struct err *e)
{
	struct statvfs vfs;
	char path[1024];
	int fd;

	if (make_incoming(dir, e))
		return -1;
	if (statvfs(dir, &vfs) == 0 && (uint64_t)vfs.f_bavail * vfs.f_frsize < size + SPARE_BYTES)
		return err_set(e, ERR_LIMIT, "the disk is full: %s has %llu MiB, an image's file needs %llu and 64 are kept free",
				dir, (unsigned long long)((uint64_t)vfs.f_bavail * vfs.f_frsize >> 20),
				(unsigned long long)(size >> 20));
	if (!incoming(dir, file, path))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	(void)unlink(path);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	return fd >= 0 ? fd : err_set_errno(e, "%s", path);
}

/* The description of an image here names this hash for this file. */
static bool described(const char *dir, const char *name, int file, const char *hex)
{
	struct buf b = BUF_INIT(65536);
	struct json *v = NULL;
	char path[1024];
	struct err e;
	bool same = false;

	if (text_fmt(path, sizeof(path), "%s/%s/image.json", dir, name) && files_load(path, &b, &e) == 0 &&
			json_parse((const char *)b.data, b.len, &v, &e) == 0)
		same = json_get_text(v, keys[file]) && strcmp(json_get_text(v, keys[file]), hex) == 0;
	json_free(v);
	buf_free(&b);
	return same;
}

int image_store_find(
		const char *dir, const char *current, const char *wanted, const uint8_t sha256[SHA256_LEN], uint64_t size, int file)
{
	const char *const names[] = { wanted, current };
	char hex[2 * SHA256_LEN + 1], path[1024];
	struct stat st;

	text_hex(sha256, SHA256_LEN, hex);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		int fd;

		if (!names[i][0] || !described(dir, names[i], file, hex) ||
				!text_fmt(path, sizeof(path), "%s/%s/%s", dir, names[i], image_file_names[file]))
			continue;
		fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
		if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size == size)
			return fd;
		if (fd >= 0)
			close(fd);
	}
	return -1;
}

int image_store_link(const char *dir, int fd, int file, struct err *e)
{
	char from[64], path[1024];

	if (make_incoming(dir, e))
		return -1;
	if (!incoming(dir, file, path) || !text_fmt(from, sizeof(from), "/proc/self/fd/%d", fd))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	(void)unlink(path);
	return linkat(AT_FDCWD, from, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0 ? 0 : err_set_errno(e, "%s", path);
}

void image_store_distrust(const char *dir, const char *name, int file)
{
	char path[1024];

	if (file < 0 && text_fmt(path, sizeof(path), "%s/%s", dir, name))
		remove_dir(path);
	if (file >= 0 && text_fmt(path, sizeof(path), "%s/%s/%s", dir, name, image_file_names[file]))
		(void)unlink(path);
}

static int describe(const char *dir, const char *name, const uint8_t sha256[IMAGE_FILES][SHA256_LEN], struct err *e)
{
	struct buf b = BUF_INIT(4096);
	char path[1024], hex[2 * SHA256_LEN + 1];
	struct jw w;
	int rc = -1;

	jw_init(&w, &b);
	jw_object(&w);
	for (int i = 0; i < IMAGE_FILES; i++) {
		text_hex(sha256[i], SHA256_LEN, hex);
		jw_kstr(&w, keys[i], hex);
	}
	jw_kstr(&w, "image", name);
	jw_close(&w);
	if (!jw_end(&w) || !text_fmt(path, sizeof(path), "%s/incoming", dir))
		err_set(e, ERR_NOMEM, "no memory");
	else
		rc = files_store(path, "image.json", b.data, b.len, 0444, e);
	buf_free(&b);
	return rc;
}

int image_store_place(const char *dir, const char *name, const uint8_t sha256[IMAGE_FILES][SHA256_LEN], struct err *e)
{
	char from[1024], to[1024];

	if (!text_fmt(from, sizeof(from), "%s/incoming", dir) || !text_fmt(to, sizeof(to), "%s/%s", dir, name))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	if (describe(dir, name, sha256, e))
		return -1;
	remove_dir(to);
	if (rename(from, to) != 0)
		return err_set_errno(e, "%s", to);
	return files_store(dir, "current", name, strlen(name), 0644, e);
}

bool image_store_current(const char *dir, char name[65])
{
	struct buf b = BUF_INIT(64);
	char path[1024];
	struct err e;
	bool ok;

	ok = text_fmt(path, sizeof(path), "%s/current", dir) && files_load(path, &b, &e) == 0 && b.len == 64;
	if (ok) {
		memcpy(name, b.data, 64);
		name[64] = '\0';
		ok = strspn(name, "0123456789abcdef") == 64;
	}
	buf_free(&b);
	return ok;
}

void image_store_prune(const char *dir, const char *name)
{
	char path[1024], newest[65] = "";
	struct dirent *entry;
	int64_t newest_s = 0;
	DIR *d = opendir(dir);
	struct stat st;

	if (!d)
		return;
	while ((entry = readdir(d)))
		if (strlen(entry->d_name) == 64 && strcmp(entry->d_name, name) != 0 &&
				fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_mtim.tv_sec >= newest_s &&
				text_copy(newest, sizeof(newest), entry->d_name))
			newest_s = st.st_mtim.tv_sec;
	rewinddir(d);
	while ((entry = readdir(d)))
		if (strlen(entry->d_name) == 64 && strcmp(entry->d_name, name) != 0 && strcmp(entry->d_name, newest) != 0 &&
				text_fmt(path, sizeof(path), "%s/%s", dir, entry->d_name))
			remove_dir(path);
	closedir(d);
}
