/*
 * Small files that must be whole or absent: keyring, certificates, keys. Called by secrets.c, pki.c and main.c before the loop
 * runs; blocks. A name in the same directory is written first, so that a crash leaves the old file or none.
 */
#include "files.h"

#include "../common/ids.h"
#include "../common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

static int read_fd(int fd, const char *path, struct buf *out, struct err *e)
{
	for (;;) {
		uint8_t chunk[4096];
		ssize_t n = read(fd, chunk, sizeof(chunk));

		if (n == 0)
			return 0;
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return err_set_errno(e, "read %s", path);
		if (!buf_add(out, chunk, (size_t)n))
			return err_set(e, ERR_LIMIT, "%s is over %zu bytes", path, out->max);
	}
}

int file_read(const char *path, bool secret, struct buf *out, struct err *e)
{
	struct stat st;
	int rc, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

	if (fd < 0 && errno == ENOENT)
		return err_set(e, ERR_NOT_FOUND, "%s does not exist", path);
	if (fd < 0)
		return err_set_errno(e, "open %s", path);
	if (fstat(fd, &st) != 0)
		rc = err_set_errno(e, "stat %s", path);
	else if (!S_ISREG(st.st_mode))
		rc = err_set(e, ERR_INVALID, "%s is not a regular file", path);
	else if (secret && (st.st_mode & 077) != 0)
		rc = err_set(e, ERR_DENIED, "%s can be read or written by others (mode %04o): chmod 0400 it", path,
				(unsigned)(st.st_mode & 07777));
	else
		rc = read_fd(fd, path, out, e);
	close(fd);
	return rc;
}

static int write_all(int fd, const void *p, size_t n)
{
	const uint8_t *at = p;

	while (n > 0) {
		ssize_t done = write(fd, at, n);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return -1;
		at += done;
		n -= (size_t)done;
	}
	return 0;
}

static void sync_dir(const char *path)
{
	char dir[PATH_MAX];
	const char *slash = strrchr(path, '/');
	int fd;

	if (!text_fmt(dir, sizeof(dir), "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : "."))
		return;
	fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return;
	(void)fsync(fd);
	close(fd);
}

int file_write(const char *path, const void *p, size_t n, mode_t mode, bool replace, struct err *e)
{
	char tmp[PATH_MAX], id[ID_MAX];
	int fd, failed;

	id_make("tmp", id);
	if (!text_fmt(tmp, sizeof(tmp), "%s.%s", path, id))
		return err_set(e, ERR_LIMIT, "the path %s is too long", path);
	fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return err_set_errno(e, "create %s", tmp);
	failed = write_all(fd, p, n) != 0 || fchmod(fd, mode) != 0 || fsync(fd) != 0;
	if (failed)
		err_set_errno(e, "write %s", tmp);
	close(fd);
	if (!failed && replace && rename(tmp, path) != 0)
		failed = err_set_errno(e, "put %s in place", path) != 0;
	if (!failed && !replace && link(tmp, path) != 0) {
		/* link, unlike rename, refuses to replace: of two writers one wins whole. */
		failed = 1;
		if (errno == EEXIST)
			err_set(e, ERR_CONFLICT, "%s exists already", path);
		else
			err_set_errno(e, "put %s in place", path);
	}
	if (failed || !replace)
		(void)unlink(tmp);
	if (!failed)
		sync_dir(path);
	return failed ? -1 : 0;
}

bool file_exists(const char *path)
{
	return access(path, F_OK) == 0;
}

int file_mkdir(const char *path, struct err *e)
{
	char parent[PATH_MAX];
	const char *slash = strrchr(path, '/');
	struct stat st;

	if (mkdir(path, 0700) == 0)
		return 0;
	if (errno == ENOENT && slash && slash != path && text_fmt(parent, sizeof(parent), "%.*s", (int)(slash - path), path)) {
		/* By chmod, whatever the umask is: others may keep their directories beside ours. */
		if (mkdir(parent, 0755) == 0 ? chmod(parent, 0755) != 0 : errno != EEXIST)
			return err_set_errno(e, "make the directory %s", parent);
		if (mkdir(path, 0700) == 0)
			return 0;
	}
	if (errno == EEXIST && stat(path, &st) == 0 && S_ISDIR(st.st_mode))
		return 0;
	return err_set_errno(e, "make the directory %s", path);
}
