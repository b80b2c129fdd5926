/*
 * Model calls of one run: one at a time, each with up to MODEL_ATTEMPTS attempts, each attempt with a hold of its own that is on
 * the host before its first byte leaves. Runs on the broker's thread, never blocks. Holds the provider's key.
 */
#ifndef BROKER_MODEL_H
#define BROKER_MODEL_H

#include "meter.h"

#include "common/error.h"
#include "proto/assignment.h"
#include "proto/errcode.h"
#include "proto/model.h"

#include <stdbool.h>
#include <stdint.h>

#define MODEL_ATTEMPTS 4

struct event_base;
struct curlev;
struct model;

/* What one call came to, for its event. */
struct model_report {
	uint32_t call;
	uint32_t attempts;
	struct meter_tokens tokens; /* of all attempts that were charged by tokens */
	int64_t cost_micros;        /* of all attempts */
	const char *finish;         /* finish reason, or "error" */
	int64_t duration_ms;
	uint32_t unmetered, over_hold; /* attempts charged their hold: without usage, with more than it */
	int64_t over_hold_micros;      /* what those cost beyond it, as far as it can be told */
	char note[161];                /* "" or what was unusual */
};

struct model_options {
	struct event_base *base;
	struct curlev *curl;
	const struct assignment *a; /* outlives the model */
	const char *key;            /* copied, wiped in model_free */
	struct meter *meter;
	/* Milliseconds since hand-over, and what is left of the run's timeout. */
	int64_t (*compute_ms)(void *arg);
	int64_t (*time_left_ms)(void *arg);
	/* The meter moved: write it to the spool and tell keeper. False: it could not be written, so nothing may be sent. */
	bool (*meter_moved)(void *arg);
	/* Exactly one of these ends each call that model_start took. The reply is the callee's to keep or free. */
	void (*on_reply)(void *arg, struct model_reply *reply, const struct model_report *report);
	void (*on_failed)(void *arg, enum errcode code, const char *text, const struct model_report *report);
	void *arg;
};

struct model *model_new(const struct model_options *opt); /* NULL: no memory */
void model_free(struct model *m);
bool model_busy(const struct model *m);
/* Takes the call over (frees its parts). Answers from the loop, never from inside. ERR_INVALID: the guest broke the protocol; no
 * callback comes then. */
int model_start(struct model *m, struct model_call *call, struct err *e) EPH_MUST_CHECK;
/* Ends a call under way without an answer: an attempt whose 2xx head came is charged. True when there was one; report is filled. */
bool model_cancel(struct model *m, struct model_report *report);

#endif
