/* What holds a process beside its tree, ids and groups: its system call filter, and Landlock. One place for all kinds of process.
 */
#ifndef NODED_KEEPER_CONFINE_H
#define NODED_KEEPER_CONFINE_H

#include "jail/job.h"
#include "keeper/host.h"
#include "noded/config.h"

enum confine_kind { CONFINE_LINK, CONFINE_BROKER, CONFINE_CHANNEL, CONFINE_VMM };

/* Last, when the job is otherwise complete. */
int confine_job(const struct noded_config *c, const struct host *h, enum confine_kind kind, struct jail_job *job,
		struct err *e) EPH_MUST_CHECK;

#endif
