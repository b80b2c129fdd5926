/*
 * Reaping as PID 1: every process without a parent becomes our child. All of them are reaped in one place, which also catches the
 * end of the one that the agent waits for, so that no status is ever taken by somebody else.
 */
#ifndef GUEST_CHILDREN_H
#define GUEST_CHILDREN_H

#include "common/error.h"

#include <stdbool.h>
#include <sys/types.h>

struct child_end {
	pid_t pid;
	bool done;
	bool has_signal; /* code is the signal that ended it */
	int code;
};

/* Blocks every signal and returns a descriptor that is readable when a child has ended. */
int children_init(struct err *e) EPH_MUST_CHECK;
/* From now on `end` is filled when end->pid ends; NULL: nobody is waited for. */
void children_watch(struct child_end *end);
/* Empties the descriptor and reaps all that has ended. */
void children_reap(void);

#endif
