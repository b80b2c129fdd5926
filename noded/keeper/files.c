/* Whole-or-nothing file operations (files.h). Keeper's thread; blocks on the disk. */
#include "keeper/files.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 1024

int files_mkdir(const char *path, mode_t mode, struct err *e)
{
	char part[PATH_BYTES];
	struct stat st;

	if (!text_copy(part, sizeof(part), path))
		return err_set(e, ERR_LIMIT, "path is too long: %s", path);
	for (char *p = part + 1; (p = strchr(p, '/')) != NULL; p++) {
		*p = '\0';
		/* By chmod, whatever the umask is: controld, another user, may keep its own directory beside ours. */
		if (mkdir(part, 0755) == 0 ? chmod(part, 0755) != 0 : errno != EEXIST)
			return err_set_errno(e, "make directory %s", part);
		*p = '/';
	}
	if (mkdir(part, mode) != 0 && errno != EEXIST)
		return err_set_errno(e, "make directory %s", part);
	if (stat(part, &st) != 0 || !S_ISDIR(st.st_mode))
		return err_set(e, ERR_INVALID, "%s is no directory", part);
	if (st.st_uid != geteuid())
		return err_set(e, ERR_DENIED,
				"%s belongs to user %u, who could change what noded (user %u) keeps there: chown %u %s", part,
				(unsigned int)st.st_uid, (unsigned int)geteuid(), (unsigned int)geteuid(), part);
	if (st.st_mode & (S_IWGRP | S_IWOTH))
		return err_set(e, ERR_DENIED, "%s can be written to by others (mode %04o): chmod go-w %s", part,
				(unsigned int)(st.st_mode & 07777), part);
	return 0;
}

static int sync_dir(const char *dir, struct err *e)
{
	int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc;

	if (fd < 0)
		return err_set_errno(e, "open %s", dir);
	rc = fsync(fd) == 0 ? 0 : err_set_errno(e, "fsync %s", dir);
	close(fd);
	return rc;
}

static int write_whole(int fd, const uint8_t *p, size_t n)
{
	while (n > 0) {
		ssize_t done = write(fd, p, n);

		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return -1;
		p += done;
		n -= (size_t)done;
	}
	return 0;
}

int files_store(const char *dir, const char *name, const void *bytes, size_t n, mode_t mode, struct err *e)
{
	char path[PATH_BYTES], temporary[PATH_BYTES];
	int fd;

	if (!text_fmt(path, sizeof(path), "%s/%s", dir, name) || !text_fmt(temporary, sizeof(temporary), "%s/.%s.tmp", dir, name))
		return err_set(e, ERR_LIMIT, "path is too long: %s/%s", dir, name);
	fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, mode);
	if (fd < 0)
		return err_set_errno(e, "create %s", temporary);
	if (write_whole(fd, bytes, n) != 0 || fsync(fd) != 0) {
		err_set_errno(e, "write %s", temporary);
		close(fd);
		unlink(temporary);
		return -1;
	}
	close(fd);
	if (rename(temporary, path) != 0) {
		err_set_errno(e, "rename to %s", path);
		unlink(temporary);
		return -1;
	}
	return sync_dir(dir, e);
}

int files_load(const char *path, struct buf *out, struct err *e)
{
	int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	uint8_t chunk[16384];
	ssize_t n;

	if (fd < 0 && errno == ENOENT)
		return err_set(e, ERR_NOT_FOUND, "%s is not there", path);
	if (fd < 0)
		return err_set_errno(e, "open %s", path);
	while ((n = read(fd, chunk, sizeof(chunk))) != 0) {
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			err_set_errno(e, "read %s", path);
			close(fd);
			return -1;
		}
		if (!buf_add(out, chunk, (size_t)n)) {
			close(fd);
			return err_set(e, ERR_LIMIT, "%s is longer than %zu bytes", path, out->max);
		}
	}
	close(fd);
	return 0;
}

int files_remove(const char *dir, const char *name, struct err *e)
{
	char path[PATH_BYTES];

	if (!text_fmt(path, sizeof(path), "%s/%s", dir, name))
		return err_set(e, ERR_LIMIT, "path is too long: %s/%s", dir, name);
	if (unlink(path) != 0 && errno != ENOENT)
		return err_set_errno(e, "remove %s", path);
	return sync_dir(dir, e);
}
