/*
 * cgroup v2 in the guest: one group for all user processes with the limits, one below it for each tool call, killed as a whole.
 */
#ifndef GUEST_CGROUP_H
#define GUEST_CGROUP_H

#include "common/error.h"

#include <stdbool.h>

/* Makes the worker group and its limits. Once, with /sys/fs/cgroup mounted. */
int cgroup_init(struct err *e) EPH_MUST_CHECK;

struct cgroup {
	int dir;    /* for CLONE_INTO_CGROUP */
	int events; /* cgroup.events; poll it for POLLPRI */
	int kill;   /* cgroup.kill */
	char name[24];
};

/* A fresh empty group for one tool call. */
int cgroup_open(struct cgroup *g, struct err *e) EPH_MUST_CHECK;
void cgroup_kill(const struct cgroup *g);
bool cgroup_populated(const struct cgroup *g);
/* Removes the group (it must be empty) and closes its descriptors. */
void cgroup_close(struct cgroup *g);
/* The machine as a whole has hardly any memory left, whoever has it. */
bool cgroup_machine_short(void);
/* How many processes the memory limit of the worker group has ended so far. */
long cgroup_oom_kills(void);
/* The memory limit of the worker group in MiB. */
long cgroup_memory_mib(void);

#endif
