/*
 * Starts a process through the jail stage. Keeper's, on its one thread; does not wait for the child: the status descriptor tells.
 */
#ifndef NODED_JAIL_SPAWN_H
#define NODED_JAIL_SPAWN_H

#include "jail/job.h"

#include <sys/types.h>

enum jail_net { JAIL_NET_HOST, JAIL_NET_EMPTY };

struct jail_spawned {
	pid_t pid;
	int pidfd;  /* readable when it ended; owned by the caller */
	int status; /* non-blocking; EOF without a byte = exec'd, else the text of what failed; owned by the caller */
};

/* cgroup_fd: v2 group it is born in, -1 = keeper's own. fds[i] becomes descriptor 3 + i of the process; they stay the caller's.
 * Sets job->fd_count. */
int jail_spawn(struct jail_job *job, enum jail_net net, int cgroup_fd, const int *fds, size_t fd_count, struct jail_spawned *out,
		struct err *e) EPH_MUST_CHECK;

#endif
