/*
 * Following a run over server-sent events, with exact resume, and showing it. Used by `run --wait` and `events --follow`.
 */
#ifndef CLI_WATCH_H
#define CLI_WATCH_H

#include "api.h"
#include "timeline.h"

struct watch {
	struct api *api;
	const char *run; /* its id */
	uint64_t after;  /* seq of the last event that is not wanted */
	bool ndjson;     /* print each event's bytes, one a line, instead of the timeline */
	bool output;     /* print output and cost parts at the end */
	struct timeline form;
};

/* Until the run is settled. The exit status: the run's end (CLI_OK, CLI_ENDED), CLI_DETACHED after Ctrl-C, CLI_ASK. */
int watch_run(struct watch *w);

/*
 * Asks until the run is over or the deadline passed (milliseconds of the monotonic clock; 0 = none). CLI_OK: *answer is the run;
 * CLI_ASK after a complaint, CLI_DETACHED after Ctrl-C and a note. answer_free(answer) in every case.
 */
int run_wait(struct api *api, const char *id, int64_t deadline_ms, struct answer *answer);

/* Output of a run object, or its error and remedy; to standard output. */
void watch_print_output(const struct json *run);
/* The exit status for a run's status. */
int watch_exit(const char *status);

#endif
