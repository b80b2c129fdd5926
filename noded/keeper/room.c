/* Reads of what the host allows (room.h). Keeper's thread; small reads of proc and cgroupfs. */
#include "keeper/room.h"

#include "common/text.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define HOST_PIDS 512 /* of everything else on the host */
#define DISK_KEPT_FREE (INT64_C(8) << 20)
#define MIB (INT64_C(1) << 20)

static bool read_text(const char *path, char *out, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, out, size - 1);

	if (fd >= 0)
		close(fd);
	out[n > 0 ? n : 0] = '\0';
	return n > 0;
}

/* A file with one number; "max", or no such file, is no limit. */
static uint64_t limit_in(const char *path)
{
	char text[64];

	return read_text(path, text, sizeof(text)) && text[0] >= '0' && text[0] <= '9' ? strtoull(text, NULL, 10) : UINT32_MAX;
}

/* The least of a group's limits and those above it. `group` is cut. */
static uint64_t least_above(const char *mount, char *group)
{
	uint64_t least = UINT32_MAX, one;
	char path[1400], *slash;

	for (;;) {
		if (text_fmt(path, sizeof(path), "%s%s/pids.max", mount, group)) {
			one = limit_in(path);
			least = one < least ? one : least;
		}
		slash = strrchr(group, '/');
		if (!slash || group[0] == '\0')
			return least;
		*slash = '\0';
	}
}

static uint64_t group_limit(void)
{
	char text[8192], *line, *next, group[1024];
	uint64_t least = UINT32_MAX, one;

	if (!read_text("/proc/self/cgroup", text, sizeof(text)))
		return least;
	for (line = text; line && *line; line = next) {
		bool unified = strncmp(line, "0::", 3) == 0;
		char *name = strchr(line, ':'), *path = name ? strchr(name + 1, ':') : NULL;

		next = strchr(line, '\n');
		if (next)
			*next++ = '\0';
		if (!path || (!unified && strncmp(name, ":pids:", 6) != 0) || !text_copy(group, sizeof(group), path + 1))
			continue;
		one = least_above(unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/pids", group);
		least = one < least ? one : least;
	}
	return least;
}

uint32_t room_pids(void)
{
	uint64_t least = limit_in("/proc/sys/kernel/pid_max"), one = limit_in("/proc/sys/kernel/threads-max");

	least = one < least ? one : least;
	one = group_limit();
	least = one < least ? one : least;
	return least > HOST_PIDS ? (uint32_t)(least - HOST_PIDS) : 0;
}

int room_on_disk(const char *dir, int64_t bytes, struct err *e)
{
	struct statvfs st;
	int64_t left;

	if (statvfs(dir, &st) != 0)
		return err_set_errno(e, "look at the file system of %s", dir);
	left = (int64_t)(st.f_bavail * st.f_frsize);
	if (left >= bytes + DISK_KEPT_FREE)
		return 0;
	return err_set(e, ERR_CONFLICT, "%" PRId64 " MiB are free on the disk of %s, %" PRId64 " MiB are needed: make room there",
			left / MIB, dir, (bytes + DISK_KEPT_FREE) / MIB);
}
