/*
 * What a host counts: figures that only grow, a few that are read off, and their bounded names. Kept by keeper in one struct, of
 * which a broker tells its part (RF_KEEPER_STATS) and which link is told once a second when something
 * moved (RF_LINK_STATS) and shows as metrics. Counting is `k->stats.x[WHY]++` and allocates nothing. Used on keeper's loop, read
 * on link's.
 *
 * Every field is a u64, so that the whole is one array on the wire; both ends are the same executable.
 */
#ifndef NODED_KEEPER_STATS_H
#define NODED_KEEPER_STATS_H

#include "common/buf.h"
#include "common/error.h"

#include <stdint.h>

/* How a VM came to be. */
enum stats_mode { STATS_COLD, STATS_CLONE, STATS_WARM, STATS_MODES };
/* Where an attempt to start a run ended: its worker started; the host's fault; ended before it began (cancel, lease, fence). */
enum stats_start { STATS_START_OK, STATS_START_FAILED, STATS_START_ENDED, STATS_STARTS };
/* Why an assignment was not taken. */
enum stats_refusal {
	STATS_REFUSED_MEMORY,
	STATS_REFUSED_VCPUS,
	STATS_REFUSED_SLOTS,
	STATS_REFUSED_DISK,
	STATS_REFUSED_PIDS,
	STATS_REFUSED_DRAINING,
	STATS_REFUSED_STOPPING,
	STATS_REFUSED_IMAGE,
	STATS_REFUSED_SIZE,  /* of the run: no such VM can be made */
	STATS_REFUSED_OTHER, /* journal, memory of noded */
	STATS_REFUSALS
};
/* What became of a VM that an earlier noded left: taken over, or killed because of. */
enum stats_adoption {
	STATS_ADOPTED,
	STATS_ADOPT_JOURNAL, /* its journal is bad or of another version */
	STATS_ADOPT_BOOT,    /* the host was booted since */
	STATS_ADOPT_PROCESS, /* broker, channel or VMM is gone, or the pid is another's */
	STATS_ADOPT_REFUSED, /* its broker did not answer, or not rightly */
	STATS_ADOPT_UNFIT,   /* of a kind that is not taken over: golden, half started */
	STATS_ADOPTIONS
};
/* What reconcile found that belongs to nothing. */
enum stats_leftover {
	STATS_LEFT_PROCESS,
	STATS_LEFT_CGROUP,
	STATS_LEFT_DIRECTORY,
	STATS_LEFT_SOCKET,
	STATS_LEFT_JOURNAL,
	STATS_LEFT_SLOT,
	STATS_LEFT_DISK,
	STATS_LEFT_LEASE,
	STATS_LEFTOVERS
};
enum stats_golden { STATS_GOLDEN_MADE, STATS_GOLDEN_FAILED, STATS_GOLDEN_DISCARDED, STATS_GOLDENS };
/* What became of warm VMs: handed to a run; put away for room or because the target fell; too old; ended by itself. */
enum stats_warm { STATS_WARM_TAKEN, STATS_WARM_EVICTED, STATS_WARM_EXPIRED, STATS_WARM_DIED, STATS_WARMS };
enum stats_role { STATS_ROLE_BROKER, STATS_ROLE_CHANNEL, STATS_ROLE_VMM, STATS_ROLE_LINK, STATS_ROLES };
/* VMs by what they are now. */
enum stats_vm { STATS_VM_STARTING, STATS_VM_RUNNING, STATS_VM_ENDING, STATS_VM_WARM, STATS_VM_GOLDEN, STATS_VMS };
/* Calls of guests that a broker judged. */
enum stats_call { STATS_CALL_MODEL, STATS_CALLS };
enum stats_call_result {
	STATS_CALL_OK,
	STATS_CALL_BUDGET, /* the money or the time does not reach */
	STATS_CALL_FAILED, /* no usable answer */
	STATS_CALL_CUT,    /* the run ended while it was under way */
	STATS_CALL_RESULTS
};

/* Which rule of a run's policy a broker refused by. */
enum stats_denial { STATS_DENIED_TOOL, STATS_DENIALS };

/* Upper bounds in ms of a histogram's buckets; one more takes the rest. */
#define STATS_BUCKETS 14
extern const uint32_t stats_bounds_ms[STATS_BUCKETS];
struct stats_times {
	uint64_t bucket[STATS_BUCKETS + 1];
	uint64_t sum_ms;
};

/* A broker's part; it sends what is new since its last frame. */
struct stats_broker {
	uint64_t calls[STATS_CALLS][STATS_CALL_RESULTS];
	uint64_t denials[STATS_DENIALS];
	uint64_t model_attempts_again; /* attempts of a model call beyond its first */
	uint64_t over_hold;            /* replies whose usage was above the hold */
	uint64_t over_hold_micros;     /* what the operator lost by them */
	uint64_t unmetered;            /* replies without usage: charged their hold */
	uint64_t spool_full;           /* runs ended because their spool could not be written */
};

struct keeper_stats {
	/* Grow. */
	uint64_t starts[STATS_MODES][STATS_STARTS];
	struct stats_times start[STATS_MODES]; /* the assignment came -> worker.started was asked for */
	struct stats_times destroy;            /* the order to kill, or the VMM's end -> gone */
	uint64_t boots_again;                  /* runs whose VM did not boot and was started once more */
	uint64_t refusals[STATS_REFUSALS];
	uint64_t adoptions[STATS_ADOPTIONS];
	uint64_t leftovers[STATS_LEFTOVERS];
	uint64_t goldens[STATS_GOLDENS];
	uint64_t warm[STATS_WARMS];
	uint64_t vmm_ended; /* by itself */
	uint64_t oom_kills[STATS_ROLES];
	uint64_t seccomp_kills[STATS_ROLES];
	uint64_t lease_overdue; /* VMs destroyed by keeper because their broker let the lease pass */
	uint64_t link_restarts;
	uint64_t vm_cpu_us; /* of all VMMs, as last read */
	struct stats_broker broker;
	/* Are. */
	uint64_t pool_target, pool_ready, pool_making;
	uint64_t vms[STATS_VMS];
	uint64_t booting, max_booting;
	uint64_t vm_memory_bytes, vm_memory_max_bytes; /* of all VMMs' groups together; of the largest */
	uint64_t used_memory_mib, total_memory_mib, used_vcpus, total_vcpus, used_slots, total_slots;
	uint64_t spool_bytes;                       /* of the spools of runs that are here, as preallocated */
	uint64_t disk_free_bytes, disk_total_bytes; /* of state_dir's file system */
	uint64_t draining, stopping;
};

/* Names for labels, one for each value of the enum. */
extern const char *const stats_mode_names[STATS_MODES];
extern const char *const stats_start_names[STATS_STARTS];
extern const char *const stats_refusal_names[STATS_REFUSALS];
extern const char *const stats_adoption_names[STATS_ADOPTIONS];
extern const char *const stats_leftover_names[STATS_LEFTOVERS];
extern const char *const stats_golden_names[STATS_GOLDENS];
extern const char *const stats_warm_names[STATS_WARMS];
extern const char *const stats_role_names[STATS_ROLES];
extern const char *const stats_vm_names[STATS_VMS];
extern const char *const stats_call_names[STATS_CALLS];
extern const char *const stats_call_result_names[STATS_CALL_RESULTS];
extern const char *const stats_denial_names[STATS_DENIALS];

void stats_took(struct stats_times *t, int64_t ms); /* one observation; below 0 counts as 0 */

/* RF_LINK_STATS and RF_KEEPER_STATS. */
void keeper_stats_encode(const struct keeper_stats *s, struct buf *out);
int keeper_stats_decode(const void *p, size_t n, struct keeper_stats *out, struct err *e) EPH_MUST_CHECK;
void stats_broker_encode(const struct stats_broker *s, struct buf *out);
/* Adds what a broker says; a figure that is out of all reason (it is not believed) is refused, and nothing is added. */
int stats_broker_add(const void *p, size_t n, struct stats_broker *sum, struct err *e) EPH_MUST_CHECK;

#endif
