/* What the files of keeper share: its one struct and the struct of a VM. Nobody outside keeper/ includes this. */
#ifndef NODED_KEEPER_INTERNAL_H
#define NODED_KEEPER_INTERNAL_H

#include "keeper/admission.h"
#include "keeper/adopt.h"
#include "keeper/child.h"
#include "keeper/host.h"
#include "keeper/identity.h"
#include "keeper/images.h"
#include "keeper/journal.h"
#include "keeper/pool.h"
#include "keeper/slots.h"
#include "keeper/stats.h"
#include "keeper/vm_step.h"
#include "noded/config.h"

#include "common/framed.h"
#include "proto/assignment.h"
#include "proto/errcode.h"
#include "proto/role.h"

struct event;
struct event_base;

#define VM_ROLE_PIDS (64 + 16) /* limits of broker and channel */
#define VM_NO_SLOT UINT32_MAX  /* a run that waits for a warm VM to give its slot up */
#define VM_CTL_NAME "ctl"      /* socket in a VM's directory: the way to its broker for a later keeper */
#define VM_EARLY_FRAMES 16     /* from link, before the broker was there to take them */

/* The last frame of a kind that the broker sent towards link and that has not been answered: said again to a new link. */
enum replay { REPLAY_START, REPLAY_BLOB, REPLAY_EVENTS, REPLAY_END, REPLAY_COUNT };
struct frame {
	uint8_t type;
	uint8_t *body; /* owned */
	size_t n;
};

struct vm_proc {
	enum proc_state state;
	struct child *child;   /* NULL unless alive or killed */
	struct cgroup *cgroup; /* NULL only in PROC_NONE */
};

/* What a run is started with. */
struct vm_inputs {
	uint8_t *assignment, *secrets; /* owned; secrets are wiped when freed */
	size_t assignment_len, secrets_len;
};

struct vm {
	struct keeper *keeper;
	struct vm *next;
	struct journal journal; /* as it stands on disk: ids, token, slot, reservation, state */
	struct vm_want want;
	struct vm_seen seen; /* but the processes' states, which are below */
	struct vm_proc proc[SLOT_ROLES];
	struct framed *broker; /* NULL before it was started and after it is gone */
	struct event *timer;   /* retries of what was busy; the boot's backstop */
	int64_t retry_ms;      /* 0 = no retry is due */
	char spool_path[600];  /* "" = memfd */
	int spool_fd;          /* read and write; -1 = there is none */
	bool spool_lost;       /* its file has no name any more; said once */
	struct frame replay[REPLAY_COUNT];
	struct frame early[VM_EARLY_FRAMES];
	size_t early_count;
	/* Until the broker has them. */
	uint8_t *assignment;
	size_t assignment_len;
	uint8_t *secrets; /* opened; wiped when freed */
	size_t secrets_len;
	struct vm_inputs again_inputs; /* the broker has them, and a second boot would need them */
	int64_t received_boot_ns;
	int64_t adopt_began_ns;        /* when its broker was asked; 0 = nothing is asked */
	int64_t lease_ns;              /* as the broker that was taken over had it; 0 = it was not */
	int64_t boot_began_ns;         /* when its turn to boot came */
	int64_t exec_boot_ns;          /* 0 until the VMM was exec'd */
	int64_t destroy_boot_ns;       /* when the VMM's end was ordered or seen; 0 = not yet */
	int64_t gone_ms;               /* from there to gone; -1 = not gone */
	uint64_t memory_bytes, cpu_us; /* of the VMM's group, as last read for metrics */
	bool start_counted;
	bool vmm_ended; /* by itself: the broker gets the text below */
	int vmm_status;
	char vmm_text[256];
	char broker_text[128]; /* how the broker ended, when it did by itself */
	bool channel_waited;   /* its time to end by itself is running or over */
	bool booting;          /* holds one of the boot places */
	bool unreserved;       /* a warm VM whose reservation was given to a run; it is on its way out */
	struct golden *making; /* owned: this is a golden VM */
	bool clone_failed;     /* and was counted as that */
	bool prepared;         /* the broker was told to boot without a run */
	bool warm_ready;       /* ... and its guest has said hello */
	int64_t warm_since_ms; /* boot clock; 0 = not ready */
	bool again;            /* it did not boot; when it is gone it starts once more */
	bool booted_again;     /* ... as it did */
	bool recovered;        /* from the journal of an earlier noded */
	bool silent;           /* fenced: report nothing */
	bool refused;          /* the report is a refusal */
	bool refuse_failed;    /* ... that counts as an attempt */
	enum errcode end_code; /* of keeper's own report */
	char end_text[513];
};

struct link_side {
	struct child *child;
	struct framed *frames; /* NULL while there is no link */
	struct event *restart; /* timer */
	int64_t started_ms;
	int backoff_ms;
	struct cgroup *group; /* of the link that lives; NULL = none */
	uint32_t groups;      /* made so far: each has a name of its own */
	char root[128];       /* where its tree is mounted */
};

struct keeper {
	const struct noded_config *config;
	struct event_base *base;
	struct host host;
	struct identity *identity;
	struct join_token *token; /* NULL once enrolled */
	char *token_text;
	struct slots *slots;
	struct admission admission;
	struct pool pool;
	struct {
		struct golden *of[POOL_SIZES]; /* ready; NULL = none */
		struct vm *vm;                 /* of the one that is made now */
		char dir[600];
		uint32_t failures;
		int64_t pause_until_ms;
	} golden;
	int metrics_fd; /* bound; 0 = none */
	char metrics_address[300];
	struct event *metrics_timer;
	uint32_t metrics_ticks;
	struct keeper_stats stats, stats_told; /* as they are; as link was told last */
	struct link_side link;
	struct images *images; /* NULL before the loop */
	bool bye_said;         /* link was told to say that this host stops */
	struct vm *vms;
	uint32_t booting, max_booting;
	uint64_t epoch;
	int64_t lease_deadline_boot_ns; /* 0 = never granted */
	bool draining, dirty;
	bool stopping; /* nothing new; the loop is left when what is to end has ended */
	bool ends_all; /* ... which is every VM; else those that can live on are left to the next noded */
	int ready_fd;
	int lock_fd;
	char tag[9]; /* last part of our cgroups' names: a hash of state_dir, so that nodeds side by side leave each other's alone
		      */
	char journal_dir[600], spool_dir[600], vm_dir[128];
	struct event *signals[2], *stop_timer, *sweep_timer, *turn;
	struct event *reconcile_timer;
	size_t reconcile_slice;
	uint64_t reconcile_finds; /* when this round began */
	int exit_status;
	uint32_t sweeps;
};

/* keeper.c */
void keeper_changed(struct keeper *k);       /* capacity may have changed: tell link once per turn, start who waits */
void keeper_maybe_stopped(struct keeper *k); /* when stopping: leaves the loop as soon as nothing is left */

/* link_side.c */
int link_side_start(struct keeper *k, struct err *e) EPH_MUST_CHECK;
void link_side_stop(struct keeper *k);
/* link_group.c: the group that holds the next link, and its end. */
int link_group_begin(struct keeper *k, struct jail_job *job, struct err *e) EPH_MUST_CHECK;
void link_group_end(struct keeper *k);
void link_side_send(struct keeper *k, uint8_t type, const void *body, size_t n);
void link_side_capacity(struct keeper *k);
void link_side_vm(struct keeper *k, struct vm *vm); /* RF_LINK_VM with the spool, then what is unanswered */
void link_side_relay(struct keeper *k, struct vm *vm, uint8_t type, const void *body, size_t n); /* RF_LINK_FROM_BROKER */
void link_side_gone(struct keeper *k, const uint8_t token[TOKEN_LEN]);
void link_side_refused(struct keeper *k, const char *run_id, const uint8_t token[TOKEN_LEN], bool failed, enum errcode code,
		const char *text);

/* broker_side.c */
int broker_side_open(struct vm *vm, int fd, struct err *e) EPH_MUST_CHECK;
int broker_side_assign(struct vm *vm, struct err *e) EPH_MUST_CHECK;
int broker_side_prepare(struct vm *vm, struct err *e) EPH_MUST_CHECK;
void broker_side_from_link(struct vm *vm, uint8_t type, const uint8_t *body, size_t n);
void broker_side_exited(struct vm *vm);
void broker_side_gone(struct vm *vm);
void broker_side_lease(struct vm *vm, int64_t deadline_boot_ns);
void frame_clear(struct frame *f);

/* vm_admit.c */
void vm_assign(struct keeper *k, const uint8_t *assignment, size_t n, const uint8_t *sealed, size_t sealed_len,
		int64_t received_boot_ns);
bool vm_fill_journal(struct keeper *k, enum journal_kind kind, uint32_t memory_mib, uint32_t vcpus, struct journal *j);
int vm_open_spool(struct vm *vm, struct err *e) EPH_MUST_CHECK; /* makes the file, or the memory, with no space yet */
/* Reserves for a VM and writes its journal entry; NULL: e says why not. */
struct vm *vm_admit(struct keeper *k, struct journal *j, struct err *e);

/* pool_side.c */
void pool_open(struct keeper *k);
/* The warm VM that serves a run of this size soonest; NULL = none. It is the caller's to make a run of. */
struct vm *pool_take(struct keeper *k, uint32_t memory_mib, uint32_t vcpus);
/* Ends warm VMs until this fits; false, and none is ended, when all of them would not be enough. */
bool pool_make_room(struct keeper *k, uint32_t memory_mib, uint32_t vcpus);
void pool_came(struct keeper *k, uint32_t memory_mib, uint32_t vcpus); /* a run did, served or not */
void pool_turn(struct keeper *k);                                      /* makes and ends warm VMs as the target says */
void pool_ready(struct vm *vm);
void pool_lost(struct vm *vm);                                  /* it ended without having been asked to */
void pool_offer(const struct keeper *k, struct admission *out); /* what is free when no warm VM is counted */
uint32_t pool_slots(const struct keeper *k);                    /* that warm VMs hold */
void pool_image_changed(struct keeper *k);                      /* also of the VMM: none of the old ones is used any more */

/* golden.c */
void golden_open(struct keeper *k);
void golden_close(struct keeper *k);
void golden_turn(struct keeper *k);                                             /* makes and drops snapshots */
bool golden_comes(const struct keeper *k, uint32_t memory_mib, uint32_t vcpus); /* it is not there yet, and is being made or next */
int golden_choose(struct vm *vm, struct err *e) EPH_MUST_CHECK;                 /* cold or clone; what a golden VM writes to */
int golden_params(const struct vm *vm, struct vmm_params *p, struct err *e) EPH_MUST_CHECK; /* state_fd is the caller's */
int golden_side_open(struct vm *vm, int fd, struct err *e) EPH_MUST_CHECK;                  /* channel's frames, of a golden VM */
void golden_over(struct vm *vm);                                                            /* nothing of it is alive any more */
void golden_clone_failed(struct vm *vm, const char *why); /* if it was one: it is not to happen again */
void golden_free(struct golden *g);

/* vm.c */
extern const char *const vm_role_names[SLOT_ROLES];
struct vm *vm_find(struct keeper *k, const uint8_t token[TOKEN_LEN]);
struct vm *vm_named(const struct keeper *k, const char *id);
void vm_run_waiting(struct keeper *k);               /* starts those whose turn it is */
void vm_boot_over(struct vm *vm);                    /* gives the boot place back */
void vm_step_all(struct vm *vm);                     /* carries out steps until there is nothing to do; vm may be freed */
void vm_fail_start(struct vm *vm, const char *text); /* nothing was granted: ends as a refusal that counts */
void vm_end(struct vm *vm, enum errcode code, const char *text); /* keeper ends it */
void vm_kill_silently(struct vm *vm);
void vm_done(struct vm *vm); /* controld has the end */
struct vm *vm_new(struct keeper *k, const struct journal *j);
void vm_free(struct vm *vm);  /* kills its processes; out of the list first */
void vm_leave(struct vm *vm); /* frees it, and lets its processes live */

/* adopt.c */
#define ADOPT_LIMIT_NS INT64_C(15000000000) /* a broker has this long to answer, as long as a host that is busy may need */
enum adopt_verdict adopt_look(const struct vm *vm, bool slot); /* slot: it is this VM's alone */
/* Connects and asks. -1: nothing was asked, and what was made is cleaned up with the VM. */
int adopt_begin(struct vm *vm, struct err *e) EPH_MUST_CHECK;
int adopt_answered(struct vm *vm, const uint8_t *body, size_t n, int fd, struct err *e) EPH_MUST_CHECK; /* takes fd over */
void adopt_over(struct vm *vm);                    /* its broker will not speak */
void adopt_failed(struct vm *vm, const char *why); /* ends the VM; may free it */
bool adopt_identify(struct vm *vm);                /* tells a new broker what a later keeper will say; false: it does not take it */
bool adopt_stays(const struct vm *vm);             /* it can live on without this keeper */

/* vm_again.c: a run whose VMM did not boot starts once more, where the driver says so. */
void vm_again_keep(struct vm *vm);   /* the broker has the assignment: what for a second start, or forgotten */
void vm_again_forget(struct vm *vm); /* it booted */
bool vm_again_refused(struct vm *vm, const uint8_t *body, size_t n); /* body of RF_BL_REFUSE; true: nobody is told */
bool vm_again_begin(struct vm *vm); /* all of it is gone: true when it waits for its turn to boot once more */

/* vm_start.c */
int vm_watch_process(struct vm *vm, enum slot_role role, struct err *e) EPH_MUST_CHECK; /* of an earlier keeper, by the journal */
int vm_start(struct vm *vm, struct err *e) EPH_MUST_CHECK;
int vm_link_job(struct keeper *k, struct jail_job *job, struct err *e) EPH_MUST_CHECK;
/* Its parts, also for what tests put in a process' place: groups with their limits and directories; all that a process gets. */
int vm_make_places(struct vm *vm, struct err *e) EPH_MUST_CHECK;
int vm_process_job(struct vm *vm, enum slot_role role, struct jail_job *job, struct err *e) EPH_MUST_CHECK;

/* vm_egress.c: where the broker may connect to: nowhere; what its run needs */
int vm_egress_shut(struct vm *vm, struct err *e) EPH_MUST_CHECK;
int vm_egress_open(struct vm *vm, struct err *e) EPH_MUST_CHECK;

/* vm_end.c */
void vm_report(struct vm *vm); /* continues the spool, tells link */

/* metrics.c */
int metrics_open(struct keeper *k, struct err *e) EPH_MUST_CHECK;
void metrics_close(struct keeper *k);
void metrics_tell(struct keeper *k); /* a new link, or this host's image or VMM changed */
void metrics_started(struct vm *vm); /* START is asked for */
void metrics_not_started(struct vm *vm, bool failed);
void metrics_ended(struct vm *vm, enum slot_role role, int status, bool by_itself);
void metrics_look_at_vm(struct vm *vm); /* also before its group goes */

/* recover.c */
int recover(struct keeper *k, struct err *e) EPH_MUST_CHECK;
void recover_sweep_spools(struct keeper *k);
uint32_t recover_look_at_slots(struct keeper *k);              /* slots whose ids somebody else uses: they rest */
void recover_entry(struct keeper *k, const struct journal *j); /* takes its VM over, or ends it */

/* reconcile.c */
int reconcile_start(struct keeper *k, struct err *e) EPH_MUST_CHECK;
void reconcile_groups(struct keeper *k);
void reconcile_directories(struct keeper *k);
bool reconcile_is_ours(const struct keeper *k, const char *group); /* by the tag that ends its name */
/* Answer to RF_LINK_RUNS: so many runs it dropped, these tokens it did not know. */
void reconcile_link_says(struct keeper *k, uint32_t dropped, const uint8_t *unknown, size_t count);

#endif
