/* What this host has room for besides memory and CPUs: processes, and space on disk. Keeper's; reads files of the kernel, no waits.
 */
#ifndef NODED_KEEPER_ROOM_H
#define NODED_KEEPER_ROOM_H

#include "common/error.h"
#include "jail/cgroup.h"

#include <stdint.h>

/* Processes and threads that the kernel and our control groups allow, less a part that is the host's own. */
uint32_t room_pids(const struct cgroups *c);
/* ERR_CONFLICT when the file system of `dir` has less than `bytes` and what is kept free for journals. */
int room_on_disk(const char *dir, int64_t bytes, struct err *e) EPH_MUST_CHECK;

#endif
