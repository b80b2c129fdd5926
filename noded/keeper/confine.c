/* Chooses filter and Landlock of a process (confine.h). Keeper's thread, pure. */
#include "keeper/confine.h"

#include "jail/seccomp.h"

/* 0: none of ours. Cloud Hypervisor brings lists of its own, one a thread. */
static int filter_of(const struct host *h, enum confine_kind kind)
{
	switch (kind) {
	case CONFINE_LINK: return SECCOMP_LINK;
	case CONFINE_BROKER: return SECCOMP_BROKER;
	case CONFINE_CHANNEL: return SECCOMP_CHANNEL;
	default: break;
	}
	if (h->driver != &vmm_qemu)
		return 0;
	return h->vmm.kvm ? SECCOMP_QEMU_KVM : SECCOMP_QEMU_TCG;
}

int confine_job(const struct noded_config *c, const struct host *h, enum confine_kind kind, struct jail_job *job, struct err *e)
{
	static const uint8_t landlock[] = {
		[CONFINE_LINK] = JAIL_LANDLOCK, /* it serves metrics */
		[CONFINE_BROKER] = JAIL_LANDLOCK | JAIL_LANDLOCK_NO_BIND,
		[CONFINE_CHANNEL] = JAIL_LANDLOCK | JAIL_LANDLOCK_NO_BIND | JAIL_LANDLOCK_NO_CONNECT,
		[CONFINE_VMM] = JAIL_LANDLOCK | JAIL_LANDLOCK_NO_BIND | JAIL_LANDLOCK_NO_CONNECT,
	};
	int who = filter_of(h, kind);

	/* Without a tree of its own it would see the host's. */
	if (job->confined)
		job->landlock = landlock[kind];
	/* What stands in for Cloud Hypervisor where there is no KVM may be a script around another VMM. */
	if (job->confined && kind == CONFINE_VMM && who == 0 && !h->vmm.kvm)
		job->landlock |= JAIL_LANDLOCK_EXEC;
	if (who != 0 && seccomp_fill(job, (enum seccomp_who)who, c->seccomp == CONFIG_SECCOMP_LOG, e))
		return -1;
	return 0;
}
