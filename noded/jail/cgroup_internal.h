/* Shared by cgroup.c (groups) and cgroup_find.c (where they can be made). */
#ifndef NODED_JAIL_CGROUP_INTERNAL_H
#define NODED_JAIL_CGROUP_INTERNAL_H

#include "jail/cgroup.h"

struct cgroups {
	char v2[CGROUP_PATH_MAX];
	char v1[CGROUP_CTL_COUNT][CGROUP_PATH_MAX]; /* "" = the controller is on v2 */
	bool on_v2[CGROUP_CTL_COUNT];
	char text[64];
};

/* Reads a small file of procfs or cgroupfs; false when it cannot be read. Longer content is cut. */
bool cgroup_read(const char *path, char *out, size_t size);
/* One write(2) of `value` into dir/file. */
int cgroup_write(const char *dir, const char *file, const char *value, struct err *e) EPH_MUST_CHECK;

/* Finds where groups can be made in each hierarchy, and on v2 passes the controllers on to there. */
int cgroup_find(struct cgroups *c, const char *parent, struct err *e) EPH_MUST_CHECK;

#endif
