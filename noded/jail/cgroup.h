/*
 * Control groups of one host, whichever way it binds controllers: all on v2, or (hybrid hosts) v2 for killing and v1 for limits.
 * Groups are made flat below noded's own group of each hierarchy, one set of directories a group, named by the caller.
 *
 * Used by keeper only, as root, on its one thread. File operations on cgroupfs do not block on devices. Owns the directories it
 * made until cgroup_remove says that they are gone; a `struct cgroup` that is freed before leaves them for recovery at the next
 * start.
 */
#ifndef NODED_JAIL_CGROUP_H
#define NODED_JAIL_CGROUP_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CGROUP_PATH_MAX 512
#define CGROUP_NAME_MAX 96
#define CGROUP_DIRS_MAX 4 /* v2, and v1 memory, pids, cpu */

enum cgroup_ctl { CGROUP_MEMORY, CGROUP_PIDS, CGROUP_CPU, CGROUP_CTL_COUNT };

struct cgroup_limits {
	uint64_t memory_bytes; /* swap is always 0 beyond it */
	uint32_t pids;
	uint32_t cpu_percent; /* of one CPU; 0 = no quota */
};

struct cgroups; /* where groups can be made on this host */
struct cgroup;  /* one group: its directories in each hierarchy */

/* `parent` overrides noded's own group in every hierarchy ("/ephemeral"; NULL or "" = own). Says which piece is missing. */
int cgroups_open(const char *parent, struct cgroups **out, struct err *e) EPH_MUST_CHECK;
void cgroups_free(struct cgroups *c);
/* "v2" or "v2 + v1 memory pids cpu", for the log. */
const char *cgroups_text(const struct cgroups *c);
/* Processes and threads that the kernel, and the groups which ours are made in, allow in all; UINT32_MAX = no limit. */
uint32_t cgroups_pids(const struct cgroups *c);
/* Calls back with the name of every group of ours that exists below the parents (any hierarchy; a name may come more than once). */
void cgroups_each(const struct cgroups *c, const char *prefix, void (*fn)(void *arg, const char *name), void *arg);

/* A parent that was used before: kills and removes what is named `….tag` below it, then the parent and the levels above it that are
 * empty. False when something of it is still there: try again later. */
bool cgroups_forget(const char *parent, const char *tag) EPH_MUST_CHECK;

/* Makes the directories and sets the limits. A directory that is there already is an error: names are never used twice. */
int cgroup_make(struct cgroups *c, const char *name, const struct cgroup_limits *limits, struct cgroup **out,
		struct err *e) EPH_MUST_CHECK;
/* The same group as it may have been left behind; directories need not exist. NULL: no memory or the name is too long. */
struct cgroup *cgroup_adopt(struct cgroups *c, const char *name);
void cgroup_free(struct cgroup *g);

int cgroup_dir_fd(const struct cgroup *g); /* v2 directory, for CLONE_INTO_CGROUP; owned by g; -1 for an adopted group */
int cgroup_open_kill(const struct cgroup *g, struct err *e); /* new descriptor of cgroup.kill, write only; -1 on error */
size_t cgroup_dirs(const struct cgroup *g); /* directories, v2 first; the rest are v1 and entered by the process itself */
const char *cgroup_dir(const struct cgroup *g, size_t i);

void cgroup_kill(const struct cgroup *g);                          /* all processes of it; a group that is gone is fine */
bool cgroup_populated(const struct cgroup *g);                     /* any live process in any hierarchy */
int cgroup_remove(struct cgroup *g, struct err *e) EPH_MUST_CHECK; /* 0 all gone, 1 still busy, -1 error */
uint64_t cgroup_oom_kills(const struct cgroup *g);
uint64_t cgroup_memory_peak(const struct cgroup *g); /* bytes; 0 unknown */
uint64_t cgroup_memory_now(const struct cgroup *g);  /* bytes; 0 unknown */
uint64_t cgroup_cpu_us(const struct cgroup *g);      /* CPU time so far; 0 unknown */

/* Pure, for tests. Path of this process in the hierarchy of `controller` ("" = v2) from the text of /proc/self/cgroup. */
bool cgroup_parse_self(const char *text, const char *controller, char *out, size_t size);
/* Mount point and mounted root of the hierarchy from the text of /proc/self/mountinfo (the last that matches). */
bool cgroup_parse_mount(const char *text, const char *controller, char *point, char *root, size_t size);
/* Directory of `path` (a path of /proc/self/cgroup) below a mount of `root` at `point`. */
bool cgroup_join(const char *point, const char *root, const char *path, char *out, size_t size);

#endif
