/*
 * The broker of one run: what broker.c (process, clocks, meter), from_keeper.c (keeper's frames), alone.c (life without keeper),
 * session.c (steps and ends), worker.c (frames of channel, model calls) and files.c (the run's files) share. One process, one
 * thread, one run.
 */
#ifndef BROKER_INTERNAL_H
#define BROKER_INTERNAL_H

#include "events.h"
#include "meter.h"
#include "model.h"
#include "run.h"

#include "keeper/stats.h"
#include "noded/spool.h"

#include "common/curlev.h"
#include "common/framed.h"
#include "proto/adopt.h"
#include "proto/role.h"

#include <event2/event.h>
#include <sodium.h>

/* Deadlines, CLOCK_BOOTTIME ns; 0 = not set. One timerfd serves the earliest. */
enum deadline {
	DL_BOOT,    /* VMM's exec to the guest's hello */
	DL_SETUP,   /* hand-over to the guest's acknowledgement */
	DL_TIMEOUT, /* the run's own, from worker.started */
	DL_LEASE,   /* the node's */
	DL_COMPUTE, /* the cap pays for no more compute */
	DL_GRACE,   /* the VM seems gone: how long keeper has to say why */
	DL_KILL,    /* keeper did not kill in time: we do */
	DL_SIGN,    /* a receipt without signature is better than none */
	DL_RATE,    /* the next guest event may be taken */
	DL_ALONE,   /* no keeper came back for long after the lease */
	DL_COUNT
};

#define SETUP_DEADLINE_MS 120000
#define GRACE_MS 300
#define KILL_DEADLINE_MS 1000
#define SIGN_DEADLINE_MS 5000
#define FILE_PIECE (32 * 1024)
#define TOOL_TIMEOUT_MS 120000
#define QUEUE_BYTES_MAX (MODEL_CALL_BYTES_MAX + 2 * 1024 * 1024) /* frames of the guest that wait for the rate */

/* A frame that waits behind guest events which the rate holds back: order is kept. */
struct waiting {
	struct waiting *next;
	uint8_t type;
	size_t n;
	uint8_t body[];
};

struct files {
	uint32_t index;   /* file being sent */
	uint64_t offset;  /* of it, asked for so far */
	bool asked;       /* an RF_BL_BLOB is under way */
	bool over;        /* RF_CH_FILES_END was sent */
	struct buf chunk; /* of the current file, not sent yet */
	size_t chunk_sent;
	uint64_t credit; /* bytes that the guest takes */
	crypto_hash_sha256_state hash;
};

struct broker {
	struct event_base *base;
	struct framed *keeper; /* NULL while there is none */
	struct framed *channel;
	struct event *timer, *tick, *notify;
	int64_t deadlines[DL_COUNT];

	struct role_identity identity; /* vm "": keeper never said it */
	struct event *ctl;             /* BROKER_FD_CTL, pending only without a keeper; NULL: there is no such socket */
	struct framed *suitor;         /* connected to it, and has not said who it is */

	struct role_broker_assign ra;
	struct assignment a;
	struct spool *spool; /* NULL until assigned */
	struct events *events;
	struct curlev *curl;
	struct model *model;
	struct meter meter;
	struct stats_broker tally; /* since keeper was told last */
	struct files files;

	int64_t boot_ns; /* when the VM's boot began: with the assignment, or before it */
	int64_t boot_limit_ms;
	int64_t ready_ns;    /* the guest's hello */
	int64_t assigned_ns; /* when the run took the VM */
	int64_t handover_ns; /* 0 = START not granted */
	int64_t killed_ns;   /* order to kill; compute ends */
	int64_t gone_ms;
	int64_t worker_t_ms; /* -1 = never */
	uint64_t last_seq;   /* spooled */
	struct buf output;   /* of a run that succeeded */
	struct waiting *queue, **queue_tail;
	size_t queue_bytes;

	int timer_fd;
	int kill_fd; /* the VMM's cgroup.kill; -1 absent */
	enum run_state state;
	enum errcode code; /* why the run ends; valid when seen.ending */
	uint32_t ticks;
	uint32_t calls; /* model calls of the guest so far */
	uint32_t call_stream;
	struct guest_hello hello;

	struct run_seen seen;
	bool channel_gone;
	bool notify_due;
	bool flushing; /* the end: what waits is written without regard to the rate */
	bool leaving;
	uint8_t nonce[GUEST_NONCE_LEN];
	uint8_t signature[64];
	struct guest_setup_ack ack;
	char vmm_text[257]; /* what the channel said about the VM's end, until keeper says more */
	char detail[1025];
};

/* broker.c */
void broker_deadline(struct broker *b, enum deadline which, int64_t at_ns); /* 0 clears */
int64_t broker_compute_ms(const struct broker *b);
void broker_meter(const struct broker *b, int64_t *spent, int64_t *held);
bool broker_meter_moved(struct broker *b); /* spool and keeper learn it now, the compute limit is set anew */
void broker_notify(struct broker *b);      /* link is told, once per turn of the loop */
void broker_notify_now(struct broker *b);
void broker_to_link(struct broker *b, uint8_t type, const void *body, size_t n);
void broker_kill(struct broker *b);                                         /* by our own descriptor */
void broker_give_up(struct broker *b);                                      /* kills and leaves: nobody is there to account to */
void broker_spooled_meter(struct broker *b, int64_t *spent, int64_t *held); /* as broker_meter; the spool learns what it pays */

/* from_keeper.c */
struct framed_options keeper_options(struct broker *b, int fd);

/* alone.c */
int alone_open(struct broker *b, struct err *e) EPH_MUST_CHECK;
void alone_close(struct broker *b);
bool alone_begin(struct broker *b); /* keeper is gone. False: this broker cannot go on without it */
void alone_frame(struct broker *b, uint8_t type, const uint8_t *body, size_t n); /* of a suitor */
void alone_suitor_left(struct broker *b);

/* tally.c: what metrics count of this run; keeper is told once a second, and at the end */
void tally_call(struct broker *b, const struct model_report *r, enum stats_call_result result);
void tally_tell(struct broker *b);

/* session.c */
void session_advance(struct broker *b);
/* The first reason counts. Ends nothing by itself but the model call: the state machine does the rest. */
void session_end(struct broker *b, enum errcode code, const char *fmt, ...) EPH_PRINTF(3, 4);
/* An event of the host; a failure ends the run. */
void session_event(struct broker *b, enum event_type type, const struct buf *data);
void session_spool_failed(struct broker *b, const struct err *e);
void session_model_event(struct broker *b, const struct model_report *r);
void session_say_again(struct broker *b); /* to a new keeper: everything that waits for an answer */

/* worker.c */
void worker_frame(struct broker *b, uint8_t type, const uint8_t *body, size_t n);
void worker_channel_end(struct broker *b, const struct err *e);
void worker_drain(struct broker *b); /* takes waiting frames as far as the rate (or the end) allows */
void worker_queue_free(struct broker *b);
int worker_setup(struct broker *b, struct err *e) EPH_MUST_CHECK; /* model, setup message, files */

/* files.c */
int files_start(struct broker *b, struct err *e) EPH_MUST_CHECK;
void files_blob(struct broker *b, const uint8_t *body, size_t n); /* RF_LB_BLOB */
void files_credit(struct broker *b, uint32_t bytes);
void files_ask_again(struct broker *b); /* for the piece that is under way */
void files_free(struct broker *b);

#endif
