/*
 * What the roles of noded say to each other over socketpairs (common/framed.h). Bodies are wire.h messages, listed here; codecs for
 * those with more than a field or two are below. keeper relays between link and a VM's broker without reading the body.
 *
 *   link <-> keeper <-> broker <-> channel <-> (guest, VMM)
 */
#ifndef PROTO_ROLE_H
#define PROTO_ROLE_H

#include "assignment.h"
#include "model.h"

#define ROLE_FRAME_MAX (MODEL_CALL_BYTES_MAX + 65536)

enum role_frame {
	/* keeper -> link */
	RF_LINK_INIT = 1,    /* struct role_link_init; first frame */
	RF_LINK_VM,          /* struct role_vm + descriptor of the spool (read only): a run lives here; sent again to a new link */
	RF_LINK_CAPACITY,    /* u32 free_memory_mib, free_vcpus, free_slots, total_memory_mib, total_vcpus, total_slots */
	RF_LINK_FROM_BROKER, /* token[16], u8 type (enum role_frame RF_BL_*), rest = body */
	RF_LINK_REFUSED,     /* run_id str, token[16], bool failed, u32 errcode, str reason */
	RF_LINK_ENDED, /* token[16], encoded run_end: keeper ended the run because its broker is gone; spool holds all events */
	RF_LINK_GONE,  /* token[16]: nothing of this run is left here but its spool */
	RF_LINK_STATS, /* struct keeper_stats (noded/keeper/stats.h): all that this host counts, when it moved */
	RF_LINK_HOST,  /* struct role_host: what metrics say of this host; first and when it changes. With the first one the metrics
			  listener's descriptor, if there is one */
	RF_LINK_IMAGE, /* encoded link_image: what this host starts VMs from, and how it is doing; when it changes */
	RF_LINK_IMAGE_ASK,   /* encoded link_image_blob: a piece that keeper wants; one at a time */
	RF_LINK_BYE,         /* empty: this host stops and holds nothing; say so, answer RF_KEEPER_BYE */
	RF_LINK_OBEYED = 29, /* u64 id: answer to RF_KEEPER_COMMAND */
	RF_LINK_RUNS = 30,   /* u32 count, token[16] each: the runs that are here; answered by RF_KEEPER_RUNS */

	/* link -> keeper */
	RF_KEEPER_ENROLLED = 32, /* encoded link_enrol_reply */
	RF_KEEPER_ASSIGN,        /* bytes assignment, bytes sealed, i64 received_boot_ns */
	RF_KEEPER_LEASE,         /* i64 deadline_boot_ns: for every broker */
	RF_KEEPER_TO_BROKER,     /* token[16], u8 type (RF_LB_*), rest = body */
	RF_KEEPER_DONE,          /* token[16]: finish (or fencing) acknowledged; journal may go, spool after its keep time */
	RF_KEEPER_KILL,          /* token[16]: fenced; destroy without a word */
	RF_KEEPER_DRAIN,         /* bool */
	RF_KEEPER_SIGN,          /* token[16] not used by link; reserved */
	RF_KEEPER_IMAGE,         /* encoded link_image_reply: what this host shall have */
	RF_KEEPER_IMAGE_BLOB,    /* u64 offset, u64 total, bytes; total 0 = it was not to be had */
	RF_KEEPER_BYE,           /* empty: the goodbye is said, or nobody hears it */
	RF_KEEPER_COMMAND =
			59,  /* u64 id: the frames of this command of controld were the ones before; answered by RF_LINK_OBEYED */
	RF_KEEPER_RUNS = 60, /* u32 dropped: runs that link held and keeper does not; u32 count, token[16] each: those it did not
				know */

	/* keeper -> broker */
	RF_BROKER_ASSIGN = 64, /* struct role_broker_assign + descriptor of the run's spool, read and write, preallocated */
	RF_BROKER_LEASE,       /* i64 deadline_boot_ns */
	RF_BROKER_FROM_LINK,   /* u8 type (RF_LB_*), rest = body */
	RF_BROKER_VMM_EXITED,  /* i32 wait status, str text (signal, OOM, exit code, last console line) */
	RF_BROKER_GONE,        /* i64 gone_ms: the VM, its cgroup and directory are gone */
	RF_BROKER_SIGNATURE,   /* 64 bytes */
	RF_BROKER_PREPARE,     /* i64 boot_deadline_ms from now: boot and probe a VM that has no run yet */

	RF_BROKER_IDENTITY = 80, /* struct role_identity (adopt.h): the first frame */
	RF_BROKER_ADOPT,         /* struct role_adopt: the first frame of a later keeper, on the broker's listening socket */

	/* broker -> keeper */
	RF_KEEPER_DESTROY = 96, /* str reason: kill the VM and say RF_BROKER_GONE */
	RF_KEEPER_TO_LINK,      /* u8 type (RF_BL_*), rest = body */
	RF_KEEPER_SIGN_DIGEST,  /* 32 bytes: sign with the receipt key; answered by RF_BROKER_SIGNATURE */
	RF_KEEPER_END,          /* empty: this broker has nothing more to do; reap it */
	RF_KEEPER_METER,        /* i64 spent, i64 held: kept by keeper for the case that the broker dies */
	RF_KEEPER_READY = 104,  /* empty: the prepared VM's guest said hello; an assignment may come */
	RF_KEEPER_STATS,        /* struct stats_broker (noded/keeper/stats.h): what is new since the last one */

	RF_KEEPER_ADOPTED = 110, /* struct role_adopted, + descriptor of the spool when there is a run */

	/* broker -> link (relayed) */
	RF_BL_START = 112, /* empty */
	RF_BL_EVENTS,      /* u64 last_seq in the spool, i64 spent, i64 held */
	RF_BL_FINISH,      /* encoded run_end */
	RF_BL_REFUSE,      /* bool failed, u32 errcode, str reason: start failed before worker.started */
	RF_BL_BLOB,        /* sha256[32], u64 offset */

	/* link -> broker (relayed) */
	RF_LB_STARTED = 128, /* u8 fence */
	RF_LB_CANCEL,        /* empty */
	RF_LB_FINISHED,      /* u8 fence: the run's end is stored (or fenced) */
	RF_LB_BLOB,          /* u64 total, bytes; total 0 = not found */
	RF_LB_ACKED,         /* u64 seq stored at controld */

	/* broker -> channel */
	RF_CH_PROBE = 160,  /* nonce[16] */
	RF_CH_SETUP,        /* encoded guest_setup */
	RF_CH_FILE,         /* u32 index, bytes (<= 32 KiB) */
	RF_CH_FILES_END,    /* empty */
	RF_CH_REPLY,        /* u32 stream, u8 kind, encoded reply */
	RF_CH_EVENT_CREDIT, /* u32 bytes of events taken: give the guest credit back */
	RF_CH_STOP,         /* str text: ask the agent to stop (courtesy before a kill) */
	RF_CH_SNAPSHOT, /* empty + descriptors that the driver's snapshot needs; from keeper, to the channel of a golden VM: stop
			   the VM and write its snapshot; answered by RF_CB_SNAPSHOT */

	/* channel -> broker */
	RF_CB_VMM_UP = 192, /* empty: the VMM answered and the VM runs */
	RF_CB_HELLO,        /* encoded guest_hello (decoded and encoded again) */
	RF_CB_SETUP_ACK,    /* encoded guest_setup_ack */
	RF_CB_CALL,         /* u32 stream, u8 kind, encoded call */
	RF_CB_EVENT,        /* encoded guest_event */
	RF_CB_RESULT,       /* bytes (<= GUEST_RESULT_MAX + 1) */
	RF_CB_FATAL,        /* str text from the agent (hostile) */
	RF_CB_PROTOCOL,     /* str what: the guest broke the protocol */
	RF_CB_VMM_EVENT,    /* str name: RESET, SHUTDOWN, GUEST_PANICKED, or "qmp: ...", "api: ..." */
	RF_CB_FILE_CREDIT,  /* u32 bytes of files the guest took: send more */
	RF_CB_CONSOLE,      /* bytes: last <= 2 KiB of the VM's console and stderr; sent on request of an end that failed */
	RF_CB_SNAPSHOT,     /* bool done, str why not */
	RF_CB_GUEST_OPEN,   /* empty: the agent has opened its end of the guest channel; once */
};

struct role_link_init {
	char node_id[ID_MAX]; /* "" = not enrolled yet: enrol with join_token first */
	char join_token[8192];
	char addresses[513];
	char ca_pem[4097];
	uint8_t sign_secret[64]; /* Ed25519 secret key: request signatures only */
	uint8_t seal_public[32], receipt_public[32];
	uint8_t seal_sig[64], receipt_sig[64];
	char name[65];
	char isolation[16];
	char labels[513];
	uint64_t epoch;
	uint32_t poll_ms; /* longest NEXT */
};
void role_link_init_encode(const struct role_link_init *m, struct buf *out);
int role_link_init_decode(const void *p, size_t n, struct role_link_init *out, struct err *e) EPH_MUST_CHECK;

/* What metrics say about the host in labels. */
struct role_host {
	char vmm[65]; /* "qemu 7.2.22" */
	char image[65];
	char isolation[16];
	char jail[129];
};
void role_host_encode(const struct role_host *m, struct buf *out);
int role_host_decode(const void *p, size_t n, struct role_host *out, struct err *e) EPH_MUST_CHECK;

enum role_vm_state { VM_STARTING = 1, VM_RUNNING, VM_ENDED };
struct role_vm {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	uint8_t state;
	uint64_t first_seq; /* of the spool */
};
void role_vm_encode(const struct role_vm *m, struct buf *out);
int role_vm_decode(const void *p, size_t n, struct role_vm *out, struct err *e) EPH_MUST_CHECK;

struct role_broker_assign {
	uint8_t *assignment;
	uint32_t assignment_len; /* encoded */
	uint8_t *secrets;
	uint32_t secrets_len;     /* encoded run_secrets, opened by keeper */
	int64_t received_boot_ns; /* when link got it: t = age_ms + time since */
	int64_t lease_deadline_boot_ns;
	int64_t boot_deadline_ms; /* from now */
	uint8_t image_hash[SHA256_LEN];
	char image[65]; /* short name for the timeline */
	char vmm[65];   /* "qemu 7.2.22" */
	char isolation[16];
	char jail[129];      /* "full" or what is missing ("none: --insecure-no-jail") */
	char start_mode[16]; /* "cold" */
};
void role_broker_assign_encode(const struct role_broker_assign *m, struct buf *out);
int role_broker_assign_decode(const void *p, size_t n, struct role_broker_assign *out, struct err *e) EPH_MUST_CHECK;
void role_broker_assign_free(struct role_broker_assign *m);

#endif
