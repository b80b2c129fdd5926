/*
 * Whether what an earlier noded left of a VM can be gone on with, and what of it may be left to the next one: pure decisions over
 * what was looked at, for tables. adopt.c looks, and carries them out.
 */
#ifndef NODED_KEEPER_ADOPT_H
#define NODED_KEEPER_ADOPT_H

#include "keeper/journal.h"
#include "keeper/stats.h"
#include "proto/errcode.h"

#include <stdbool.h>

/* One process of the journal's, as it is now. */
struct adopt_proc {
	bool named;     /* the journal says that it was started */
	bool alive;     /* the pid is still the process that was started then */
	bool in_group;  /* and is in its control group, where this noded makes its own */
	bool right_uid; /* and has the user id that its slot gives it now */
};

struct adopt_seen {
	enum journal_kind kind;
	enum journal_state state;
	bool same_boot; /* of the host */
	bool nonce;     /* the broker was told by what it knows us */
	bool slot;      /* its slot is one of ours, and nobody else's */
	bool socket;    /* the broker's socket is there */
	struct adopt_proc proc[SLOT_ROLES];
};

enum adopt_verdict {
	ADOPT_TAKE,        /* its broker is asked */
	ADOPT_OVER,        /* nothing was left of it already then: only its end is to be reported */
	ADOPT_OTHER_BOOT,  /* the host was started anew: its pids mean nothing */
	ADOPT_GOLDEN,      /* nobody's run: made again */
	ADOPT_NOT_STARTED, /* it waited for its turn, or its processes were being made */
	ADOPT_OLD_JOURNAL, /* of a noded whose brokers cannot be asked */
	ADOPT_NO_BROKER,   /* the broker has ended; the rest, if it lives, has nobody who accounts for it */
	ADOPT_MOVED,       /* cgroup_parent, uid_base or max_vms are others now: its end could not be watched */
	ADOPT_NO_SOCKET,   /* nothing to ask it by */
	ADOPT_VERDICTS
};

enum adopt_verdict adopt_judge(const struct adopt_seen *seen);

/* What a verdict other than ADOPT_TAKE means for the run. */
struct adopt_meaning {
	const char *text; /* of its end */
	enum errcode code;
	enum stats_adoption count;
};
const struct adopt_meaning *adopt_meaning(enum adopt_verdict v);

/* At SIGTERM: which VMs live on. */
struct adopt_leave {
	bool ending;       /* keeper has ended it, or its end is reported */
	bool broker_alive; /* and connected */
	bool has_inputs;   /* its broker has not been given the run yet: only this keeper could */
	bool golden;
	bool boots_unasked; /* without a run: its broker does not wait for a later noded then */
};
bool adopt_may_leave(const struct adopt_leave *l);

#endif
