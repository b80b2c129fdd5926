/* The next step for a VM (vm_step.h). Pure. */
#include "keeper/vm_step.h"

enum vm_step vm_next(const struct vm_want *want, const struct vm_seen *seen)
{
	/* What ended by itself is cleaned up whether or not anybody asked. */
	if (seen->vmm == PROC_LEFT)
		return STEP_CLEAN_VMM;
	if (!want->destroy && !want->end)
		return STEP_NONE;
	if (seen->waiting)
		return STEP_UNQUEUE;
	if (seen->vmm == PROC_ALIVE)
		return STEP_KILL_VMM;
	if (seen->vmm == PROC_KILLED)
		return STEP_NONE;
	/* The broker hears of it only when it is true. */
	if (!want->end)
		return seen->told || seen->broker != PROC_ALIVE ? STEP_NONE : STEP_TELL_BROKER;
	if (seen->broker == PROC_ALIVE)
		return STEP_KILL_BROKER;
	if (seen->channel == PROC_ALIVE)
		return STEP_KILL_CHANNEL;
	if (seen->broker == PROC_LEFT)
		return STEP_CLEAN_BROKER;
	if (seen->channel == PROC_LEFT)
		return STEP_CLEAN_CHANNEL;
	if (seen->broker != PROC_NONE || seen->channel != PROC_NONE)
		return STEP_NONE;
	if (!seen->closed)
		return STEP_CLOSE;
	if (want->forget)
		return STEP_FORGET;
	return seen->reported ? STEP_NONE : STEP_REPORT;
}

const char *vm_step_name(enum vm_step s)
{
	static const char *const names[] = { "none", "unqueue", "kill-vmm", "clean-vmm", "tell-broker", "kill-channel",
		"kill-broker", "clean-channel", "clean-broker", "close", "report", "forget" };

	return names[s];
}

bool vm_may_sign(const struct vm_seen *seen)
{
	return seen->vmm == PROC_NONE && seen->told && !seen->receipt;
}

enum vm_overdue vm_overdue(const struct vm_watch *w, int64_t now_ns)
{
	if (w->vmm_alive && w->lease_ns > 0 && now_ns - w->lease_ns > VM_LEASE_BACKSTOP_NS)
		return VM_LEASE_OVERDUE;
	if (w->boot_began_ns > 0 && now_ns - w->boot_began_ns > w->boot_limit_ns + VM_BOOT_BACKSTOP_NS)
		return VM_BOOT_OVERDUE;
	return VM_IN_TIME;
}

int64_t vm_lease_later(int64_t have, int64_t offered, int64_t now_ns)
{
	if (offered > now_ns + VM_LEASE_LONGEST_NS)
		offered = now_ns + VM_LEASE_LONGEST_NS;
	return offered > have ? offered : have;
}

int vm_link_pause_ms(int backoff_ms, int64_t lease_ns, int64_t now_ns)
{
	int64_t share_ms = lease_ns > now_ns ? (lease_ns - now_ns) / 4000000 : INT32_MAX;

	if (share_ms < LINK_RESTART_MIN_MS)
		share_ms = LINK_RESTART_MIN_MS;
	return backoff_ms < share_ms ? backoff_ms : (int)share_ms;
}
