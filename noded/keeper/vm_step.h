/*
 * What to do next about one VM, as a pure function of what is wanted of it and what is seen of it. vm.c calls it in a loop and
 * carries the step out; tests call it by table.
 */
#ifndef NODED_KEEPER_VM_STEP_H
#define NODED_KEEPER_VM_STEP_H

#include <stdbool.h>
#include <stdint.h>

/*
 * One process of a VM with its group and ids:
 *
 *   none -> alive -> killed -> left -> none
 *             \-----------------^
 */
enum proc_state {
	PROC_NONE, /* nothing of it is left, or it never was */
	PROC_ALIVE,
	PROC_KILLED, /* the kill was sent, it has not been reaped */
	PROC_LEFT,   /* reaped (or of an earlier noded): its group and directory are still there */
	PROC_STATES,
};

struct vm_want {
	bool destroy; /* the VMM must go */
	bool end;     /* broker and channel must go too; implies destroy */
	bool forget;  /* controld has the end, or must not hear of it */
};

struct vm_seen {
	enum proc_state vmm, channel, broker;
	bool waiting;  /* for its turn to boot: nothing was started */
	bool told;     /* the broker was told that the VM is gone */
	bool closed;   /* slot and reservation were given back */
	bool reported; /* the broker's finish or keeper's own report went to link */
	bool receipt;  /* a receipt was signed */
};

enum vm_step {
	STEP_NONE,    /* wait for something to happen */
	STEP_UNQUEUE, /* take it out of the boot queue */
	STEP_KILL_VMM,
	STEP_CLEAN_VMM, /* group, directory; may have to be tried again */
	STEP_TELL_BROKER,
	STEP_KILL_CHANNEL,
	STEP_KILL_BROKER,
	STEP_CLEAN_CHANNEL,
	STEP_CLEAN_BROKER,
	STEP_CLOSE,  /* nothing is left: give back slot and reservation */
	STEP_REPORT, /* no broker reported the end: keeper does */
	STEP_FORGET, /* journal and entry */
};

enum vm_step vm_next(const struct vm_want *want, const struct vm_seen *seen);
const char *vm_step_name(enum vm_step s);

/* A receipt says that the VM is destroyed: there is one, and only when that is true, whatever a broker asks for. */
bool vm_may_sign(const struct vm_seen *seen);

/*
 * Deadlines are the broker's to keep; keeper looks after them only in case a broker stands still, or there is none yet. Times are
 * CLOCK_BOOTTIME ns.
 */
#define VM_BOOT_BACKSTOP_NS INT64_C(15000000000)
#define VM_LEASE_BACKSTOP_NS INT64_C(5000000000) /* controld calls this node lost 15 s after the deadline that brokers have */

struct vm_watch {
	int64_t boot_began_ns; /* 0 = it does not boot */
	int64_t boot_limit_ns; /* how long a boot may take */
	int64_t lease_ns;      /* the node's deadline; 0 = never granted */
	bool vmm_alive;
};

enum vm_overdue { VM_IN_TIME, VM_BOOT_OVERDUE, VM_LEASE_OVERDUE };

enum vm_overdue vm_overdue(const struct vm_watch *w, int64_t now_ns);

/*
 * The node's lease after link said `offered`: it only grows, by answers in whatever order, and never beyond the longest that a
 * controld gives (an hour): link talks to a network and has no right to let a VM live for ever.
 */
#define VM_LEASE_LONGEST_NS INT64_C(3600000000000)
int64_t vm_lease_later(int64_t have, int64_t offered, int64_t now_ns);

/*
 * How long the next link may be waited for, when `backoff_ms` is what its earlier ends call for: never more than a quarter of what
 * is left of the lease, because only a link renews it and every VM here dies with it. At least LINK_RESTART_MIN_MS.
 */
#define LINK_RESTART_MIN_MS 200
int vm_link_pause_ms(int backoff_ms, int64_t lease_ns, int64_t now_ns);

#endif
