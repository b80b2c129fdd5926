/*
 * The control group of link: a network's peers must not be able to take the host's memory or its process ids by way of it. A group
 * for each life of link; what is left of one (a kernel that takes its time) is removed at the next start. Keeper's loop.
 */
#include "keeper/keeper_internal.h"

#include "common/log.h"
#include "common/text.h"
#include "jail/cgroup.h"

#include <inttypes.h>

/*
 * Measured (2 CPUs, release): 10 MiB and 14 threads without runs, 11 MiB with two runs of 1 MiB output each. The rest is what may
 * come: twelve requests of 2 MiB, each twice in nng; of each run an output of 1 MiB that waits, its copy in a request; up to 32
 * threads of nng's on a large host, and 64 left behind that hang in a close. A build with sanitizers keeps 256 MiB of freed memory.
 */
#define LINK_MEMORY_BASE (UINT64_C(512) << 20)
#define LINK_MEMORY_A_RUN (UINT64_C(4) << 20)
#define LINK_PIDS 256

int link_group_begin(struct keeper *k, struct jail_job *job, struct err *e)
{
	const struct cgroup_limits limits = {
		.memory_bytes = LINK_MEMORY_BASE + LINK_MEMORY_A_RUN * k->admission.total_slots,
		.pids = LINK_PIDS,
	};
	char name[CGROUP_NAME_MAX], procs[CGROUP_PATH_MAX + 32];

	link_group_end(k);
	if (!text_fmt(name, sizeof(name), "link_%" PRIx64 "_%" PRIu32 ".%s", k->epoch, k->link.groups++, k->tag))
		return err_set(e, ERR_INTERNAL, "name");
	if (cgroup_make(k->host.cgroups, name, &limits, &k->link.group, e))
		return err_wrap(e, "link's group");
	for (size_t i = 1; i < cgroup_dirs(k->link.group); i++)
		if (!text_fmt(procs, sizeof(procs), "%s/cgroup.procs", cgroup_dir(k->link.group, i)) || !jail_job_group(job, procs))
			return err_set(e, ERR_LIMIT, "too many cgroups");
	return 0;
}

void link_group_end(struct keeper *k)
{
	struct cgroup *g = k->link.group;
	struct err e;

	if (!g)
		return;
	k->link.group = NULL;
	if (cgroup_oom_kills(g) > 0) {
		k->stats.oom_kills[STATS_ROLE_LINK]++;
		log_error("link was over its memory limit peak_mib=%" PRIu64, cgroup_memory_peak(g) >> 20);
	}
	cgroup_kill(g);
	if (cgroup_remove(g, &e) != 0)
		log_debug("link's group stays until its processes are gone path=%s", cgroup_dir(g, 0));
	cgroup_free(g);
}
