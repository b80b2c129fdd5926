/*
 * The life of a run as its broker sees it: the states, which moves are legal, and what to do next. Pure: facts come in, one step
 * comes out; session.c carries the steps out.
 *
 *                    +-> READY -+
 *                    |          v
 *   NEW -> BOOT -> PROBE --> START -> SETUP -> WORK -> DESTROY -> SIGN -> FINISH -> OVER
 *           |        |        |        |                ^  |
 *           +--------+--------+--------+----------------+  +--> OVER   (never started: refused; fenced, or no run ever: not a word)
 *
 * A warm VM boots and answers the probe before any run is known, and waits in READY for one. A run that comes while it still boots
 * takes the straight way, as one that had the VM started.
 *
 * Whatever ends a run, the VM is destroyed first. START is asked before anything of the run reaches the guest; when a run ends
 * while its answer is outstanding, the VM is destroyed at once and DESTROY waits for the answer, because only then it is known
 * whether this is a refusal or an end.
 */
#ifndef BROKER_RUN_H
#define BROKER_RUN_H

#include "proto/errcode.h"
#include "proto/link.h"

#include <stdbool.h>
#include <stdint.h>

enum run_state {
	RUN_NEW,
	RUN_BOOT,
	RUN_PROBE,
	RUN_READY,
	RUN_START,
	RUN_SETUP,
	RUN_WORK,
	RUN_DESTROY,
	RUN_SIGN,
	RUN_FINISH,
	RUN_OVER,
	RUN_STATES
};

/* What has happened. Facts are only ever added. */
struct run_seen {
	bool prepared;    /* keeper wants the VM warm: it boots without a run */
	bool assigned;    /* keeper's assignment came */
	bool vmm_up;      /* channel greeted the monitor */
	bool hello;       /* the guest answered the probe */
	bool start_asked; /* START went out: its answer decides between refusal and end */
	uint8_t fence;    /* answer to START: enum fence, 0 = none yet */
	bool setup_acked;
	bool ending;    /* there is a reason to end */
	bool fenced;    /* the run is no longer ours: nothing is reported */
	bool gone;      /* keeper says that nothing of the VM is left */
	bool is_signed; /* the receipt's signature came, or was waited for long enough */
	bool finished;  /* link says that the end is stored, or fenced */
};

enum run_step {
	STEP_WAIT,
	STEP_BOOT,    /* -> BOOT: the boot's deadline runs */
	STEP_PROBE,   /* -> PROBE: ask the guest for its hello */
	STEP_READY,   /* -> READY: tell keeper that a run may come */
	STEP_START,   /* -> START: write microvm.ready, ask controld */
	STEP_SETUP,   /* -> SETUP: hand over; compute runs, setup and files go to the guest */
	STEP_WORK,    /* -> WORK: write worker.started, the timeout runs */
	STEP_DESTROY, /* -> DESTROY: order the kill; refuse every call from here on */
	STEP_SIGN,    /* -> SIGN: write microvm.destroyed, ask for the signature */
	STEP_FINISH,  /* -> FINISH: report the end */
	STEP_REFUSE,  /* -> OVER: say that the run did not start here */
	STEP_LEAVE,   /* -> OVER: nothing more to say */
};

/* May the state follow START's answer? */
bool run_granted(uint8_t fence);
enum run_step run_next(enum run_state state, const struct run_seen *seen);
enum run_state run_step_state(enum run_state from, enum run_step step);
bool run_move_legal(enum run_state from, enum run_state to);
const char *run_state_name(enum run_state s);
const char *run_step_name(enum run_step s);
/* The one setter: logs, aborts on a move that is not legal. */
void run_set(enum run_state *state, enum run_state to, const char *run_id);

/* The code a run ends with when `code` is what went wrong: before hand-over the VM did not start, whatever part of it failed. */
enum errcode run_code_before_start(enum errcode code);

#endif
