/*
 * Groups below a parent that noded does not use any more, because cgroup_parent is another one now (cgroup.h). Keeper's, at start,
 * as root. Nothing is killed that does not carry this noded's tag, and rmdir refuses whatever is not empty.
 */
#include "jail/cgroup_internal.h"

#include "common/text.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

static bool ends_with(const char *name, const char *tag)
{
	const char *dot = strrchr(name, '.');

	return dot && strcmp(dot + 1, tag) == 0;
}

/* Our groups in `dir`: killed where they can be (v2), then removed. True when none is left. */
static bool clear(const char *dir, const char *tag)
{
	DIR *d = opendir(dir);
	struct dirent *entry;
	char path[CGROUP_PATH_MAX + 300];
	bool all = true;
	struct err ignored;

	if (!d)
		return true;
	while ((entry = readdir(d)) != NULL) {
		if (entry->d_type != DT_DIR || !ends_with(entry->d_name, tag) ||
				!text_fmt(path, sizeof(path), "%s/%s", dir, entry->d_name))
			continue;
		(void)!cgroup_write(path, "cgroup.kill", "1", &ignored);
		all = (rmdir(path) == 0 || errno == ENOENT) && all;
	}
	closedir(d);
	return all;
}

/* The parent and the levels above it, down to the first that is in use. True when the parent itself is gone. */
static bool remove_levels(const char *point, const char *parent)
{
	char path[CGROUP_PATH_MAX];
	size_t top = strlen(point);
	bool gone;
	char *slash;

	if (!text_fmt(path, sizeof(path), "%s%s", point, parent))
		return true;
	gone = rmdir(path) == 0 || errno != EBUSY;
	while (gone && (slash = strrchr(path, '/')) != NULL && (size_t)(slash - path) > top) {
		*slash = '\0';
		if (rmdir(path) != 0 && errno != ENOENT)
			break;
	}
	return gone;
}

bool cgroups_forget(const char *parent, const char *tag)
{
	static const char *const hierarchies[] = { "", "memory", "pids", "cpu" };
	static char mounts[256 * 1024];
	char point[CGROUP_PATH_MAX], root[CGROUP_PATH_MAX], dir[CGROUP_PATH_MAX];
	bool gone = true;

	if (parent[0] != '/' || parent[1] == '\0' || strstr(parent, "/..") ||
			!cgroup_read("/proc/self/mountinfo", mounts, sizeof(mounts)))
		return true;
	for (size_t i = 0; i < sizeof(hierarchies) / sizeof(hierarchies[0]); i++) {
		if (!cgroup_parse_mount(mounts, hierarchies[i], point, root, sizeof(point)) ||
				!text_fmt(dir, sizeof(dir), "%s%s", point, parent) || access(dir, F_OK) != 0)
			continue;
		gone = clear(dir, tag) && remove_levels(point, parent) && gone;
	}
	return gone;
}
