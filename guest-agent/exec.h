/*
 * Runs one thing as user `worker`: a shell command, or a function of ours in a child. It has a time limit, its output is handed
 * over as it comes, and nothing that it started outlives it.
 */
#ifndef GUEST_EXEC_H
#define GUEST_EXEC_H

#include "channel.h"
#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* stream: 1 stdout, 2 stderr. */
typedef void job_output_fn(void *ctx, int stream, const uint8_t *p, size_t n);
/* Called once a turn; returns the CLOCK_BOOTTIME ms at which it wants to be called again, or -1. */
typedef int64_t job_tick_fn(void *ctx, int64_t now_ms);
/* Runs in the child as worker, in the working directory; its result is the exit code, what it writes to 1 and 2 the output. */
typedef int job_inner_fn(void *arg);

struct job {
	const char *command; /* for bash -c; or NULL and `inner` */
	job_inner_fn *inner;
	void *inner_arg;
	const char *cwd;
	int64_t limit_ms;
	job_output_fn *on_output;
	job_tick_fn *on_tick; /* may be NULL */
	void *ctx;
};

struct job_end {
	bool started; /* false: nothing ran, `why` says why */
	struct err why;
	bool timed_out; /* killed at its time limit */
	bool has_signal;
	bool out_of_memory; /* the memory limit ended a process of it */
	int code;
	uint32_t duration_ms;
};

/*
 * Serves the channel while the job runs. -1 only when the channel is over or the machine is broken; a job that fails, or cannot be
 * started, is an ordinary end.
 */
int job_run(struct channel *ch, int sigchld_fd, const struct job *job, struct job_end *end, struct err *e) EPH_MUST_CHECK;

#endif
