/*
 * Keeper's children: every process that it started, by pidfd, and those of an earlier keeper that it took over. A child is told of
 * when it exec'd (or why it could not) and when it ended; it is reaped here and nowhere else. One loop, one thread.
 */
#ifndef NODED_KEEPER_CHILD_H
#define NODED_KEEPER_CHILD_H

#include "common/error.h"
#include "jail/spawn.h"

#include <stdbool.h>
#include <stdint.h>

struct event_base;
struct child;

struct child_ops {
	/* Once: e NULL when the program runs, else why the jail stage gave up (on_exit follows). */
	void (*on_exec)(void *arg, const struct err *e);
	/* Once, last: status as waitpid gives it. The child is freed after it returns. */
	void (*on_exit)(void *arg, int status);
	void *arg;
};

/* Takes the descriptors of `spawned` over, also when it fails (the process is killed then). */
int child_new(struct event_base *base, const struct jail_spawned *spawned, const struct child_ops *ops, struct child **out,
		struct err *e) EPH_MUST_CHECK;
/*
 * A process that another keeper started: watched from now on, if `pid` is still the one that was started at `start_time`
 * (ERR_NOT_FOUND when it is not). on_exec is never called; on_exit gets CHILD_STATUS_UNKNOWN, because only a parent is told more.
 */
#define CHILD_STATUS_UNKNOWN (-1)
int child_adopt(struct event_base *base, int32_t pid, uint64_t start_time, const struct child_ops *ops, struct child **out,
		struct err *e) EPH_MUST_CHECK;
void child_kill(struct child *c); /* SIGKILL; on_exit follows */
/* Kills and forgets: no callback comes any more. For keeper's own end; blocks for half a second at most, to reap it. */
void child_drop(struct child *c);
void child_leave(struct child *c); /* forgets it and lets it live: for the next keeper */
int32_t child_pid(const struct child *c);
uint64_t child_start_time(const struct child *c); /* 0 if it was gone before it could be read */

/* "exit code 1", "signal 9 (Killed)", "exit status unknown to this noded". */
void child_status_text(int status, char out[64]);

#endif
