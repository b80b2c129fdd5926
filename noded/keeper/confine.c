/* Chooses the filter of a process (confine.h). Keeper's thread, pure. */
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
	int who = filter_of(h, kind);

	if (who != 0 && seccomp_fill(job, (enum seccomp_who)who, c->seccomp == CONFIG_SECCOMP_LOG, e))
		return -1;
	return 0;
}
