/* The file tree that a jailed process sees: a small tmpfs with read-only binds. Jail stage only, as root, in its own mount
 * namespace. */
#ifndef NODED_JAIL_TREE_H
#define NODED_JAIL_TREE_H

#include "jail/job.h"

/* Builds the tree over job->root and makes it this process' root; nothing of the host's tree is left reachable. */
int jail_tree_enter(const struct jail_job *job, struct err *e) EPH_MUST_CHECK;

#endif
