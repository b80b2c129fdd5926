/*
 * What link knows of one run, what it wants to ask next for it, and what an answer changes. Pure: no socket, no clock of its own,
 * so that every path is tested by table. One request at a time for each run; events in order of seq; START before events, events
 * before FINISH; nothing after the run's fence said stale or unknown.
 */
#ifndef LINK_RUNS_H
#define LINK_RUNS_H

#include "common/buf.h"
#include "common/error.h"
#include "proto/link.h"

#include <stdbool.h>
#include <stdint.h>

enum run_grant {
	GRANT_NONE,   /* START was not asked for */
	GRANT_WANTED, /* the broker asked; no answer yet */
	GRANT_GIVEN,  /* applied, or the run was already on its way when this link process began */
};

struct link_run {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];

	uint64_t first_seq;  /* of the spool */
	uint64_t last_seq;   /* written and named by the broker; below first_seq = none */
	uint64_t next_send;  /* next seq that controld wants */
	int64_t spent, held; /* meter, micros */
	struct buf finish;   /* encoded run_end */
	uint64_t finish_seq; /* its last_seq: all events up to it go first */
	uint64_t blob_offset;
	uint64_t sent_last;    /* of an EVENTS request that is out: its last seq */
	int64_t not_before_ms; /* CLOCK_BOOTTIME */
	enum run_grant grant;
	uint32_t refuse_code;
	uint32_t failures; /* in a row, for the pause before the next try */
	uint32_t stuck;    /* answers in a row that moved nothing on */

	/* What is due. */
	bool has_spool;
	bool finish_due;
	bool refuse_due;
	bool refuse_failed;
	bool blob_due;
	uint8_t under_way; /* enum link_type of the request that is out; 0 = none */
	bool over;         /* answered to the end: the entry can go */

	uint8_t blob_sha[SHA256_LEN];
	char refuse_reason[513];
};

void link_run_init(struct link_run *r, const char *run_id, const uint8_t token[TOKEN_LEN]);
void link_run_free(struct link_run *r);

/* The request that this run wants now; 0 = none (yet). */
enum link_type link_run_want(const struct link_run *r, int64_t now_ms);

/* What the rest of link must do about an answer. */
struct link_effect {
	bool started;   /* tell the broker RF_LB_STARTED with `fence` */
	bool finished;  /* tell the broker RF_LB_FINISHED with `fence` */
	bool kill;      /* tell keeper: fenced */
	bool done;      /* tell keeper: nothing more to report of this run */
	uint64_t acked; /* not 0: tell the broker that events up to here are stored */
	uint8_t fence;
};

/* A request came back without an answer, or with LINK_BUSY: again after a pause. */
void link_run_failed(struct link_run *r, int64_t now_ms);
/* controld will never take it (LINK_BAD), or the node is revoked. */
void link_run_rejected(struct link_run *r, struct link_effect *out);
/* The fence of an answer with LINK_OK to what is under way; expected_seq of EVENTS and FINISH. */
void link_run_answered(struct link_run *r, uint8_t fence, uint64_t expected_seq, int64_t now_ms, struct link_effect *out);
/* The answer to BLOB has no fence. */
void link_run_blob_answered(struct link_run *r);

/* Pause before try number `failures`: 100 ms doubling to 5 s. */
int64_t link_pause_ms(uint32_t failures);
/* Until when a lease granted for a request sent at sent_ns may be used: a twelfth less, because it runs from the sending. */
int64_t link_lease_deadline_ns(int64_t sent_ns, uint32_t lease_ms);
/*
 * How long a poll may be parked, of at most `longest`, and how long its answer is then waited for: a sixth and a third of the lease
 * (0: not granted yet), so that when a controld stands still another one is asked while the lease lasts.
 */
uint32_t link_park_ms(uint32_t longest, uint32_t lease_ms);
uint32_t link_patience_ms(uint32_t park_ms, uint32_t lease_ms);

#endif
