/*
 * Small reads and writes of kernel files. Owns nothing; called by every part of the agent.
 */
#include "fsutil.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void fd_cleanup(int *fd)
{
	if (*fd >= 0)
		close(*fd);
}

int fd_steal(int *fd)
{
	int taken = *fd;

	*fd = -1;
	return taken;
}

int fs_write(int dirfd, const char *path, const char *text, struct err *e)
{
	AUTO_FD int fd = openat(dirfd, path, O_WRONLY | O_CLOEXEC);
	size_t n = strlen(text);

	if (fd < 0)
		return err_set_errno(e, "open %s", path);
	if (write(fd, text, n) != (ssize_t)n)
		return err_set_errno(e, "write \"%s\" to %s", text, path);
	return 0;
}

int fs_read(int dirfd, const char *path, char *out, size_t size, struct err *e)
{
	AUTO_FD int fd = openat(dirfd, path, O_RDONLY | O_CLOEXEC);
	size_t have = 0;

	out[0] = '\0';
	if (fd < 0)
		return err_set_errno(e, "open %s", path);
	while (have < size - 1) {
		ssize_t n = read(fd, out + have, size - 1 - have);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return err_set_errno(e, "read %s", path);
		if (n == 0)
			break;
		have += (size_t)n;
	}
	while (have > 0 && out[have - 1] == '\n')
		have--;
	out[have] = '\0';
	return 0;
}

long fs_meminfo_kib(const char *name)
{
	char text[4096], *line;
	size_t len = strlen(name);
	struct err e;

	if (fs_read(AT_FDCWD, "/proc/meminfo", text, sizeof text, &e) < 0)
		return -1;
	for (line = text; line != NULL; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, name, len) == 0 && line[len] == ':')
			return strtol(line + len + 1, NULL, 10);
	}
	return -1;
}

bool fs_boot_option(const char *cmdline, const char *key, char *out, size_t size)
{
	size_t key_len = strlen(key);
	bool found = false;

	while (*cmdline != '\0') {
		size_t n = strcspn(cmdline, " \n");

		if (n > key_len && strncmp(cmdline, key, key_len) == 0 && cmdline[key_len] == '=') {
			size_t len = n - key_len - 1;

			found = len < size;
			if (found) {
				memcpy(out, cmdline + key_len + 1, len);
				out[len] = '\0';
			}
		}
		cmdline += n;
		cmdline += *cmdline != '\0';
	}
	return found;
}
