/* Landlock: the kernel's own list of which files a process may use and how, held whatever becomes of its file tree. Jail stage
 * only. */
#ifndef NODED_JAIL_LANDLOCK_H
#define NODED_JAIL_LANDLOCK_H

#include "jail/job.h"

/* ABI that this kernel speaks; 0 = it has none, or it is turned off. */
int landlock_abi(void);
/* For the rest of this process' life and every exec; `program`: descriptor of what is exec'd, -1 = job->argv[0]. Does nothing where
 * the kernel has none. In the new tree, with no new privileges. */
int landlock_enter(const struct jail_job *job, int program, struct err *e) EPH_MUST_CHECK;

#endif
