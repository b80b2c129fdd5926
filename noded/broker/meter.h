/*
 * The meter of one run: what is spent, what is held, what may still be promised. Pure integer arithmetic without clock or memory
 * of its own; used by the broker's one thread. Whatever sequence of holds and charges it is taken through,
 *
 *     spent + held <= cap
 *
 * as long as compute stays within meter_compute_limit_ms. Times are milliseconds since hand-over (START granted).
 */
#ifndef BROKER_METER_H
#define BROKER_METER_H

#include "proto/assignment.h"

#include <stdbool.h>
#include <stdint.h>

struct meter {
	/* Fixed by meter_init. */
	struct price price;
	int64_t cap;
	int64_t highest_input; /* micros per million: the dearest way an input token of this row can be billed */
	/* Moves. */
	bool started;          /* handed over: the run fee is due, compute runs */
	struct usage usage;    /* all but compute_ms */
	bool open;             /* one attempt's hold */
	int64_t hold_model;    /* micros of the open hold: tokens */
	int64_t hold_until_ms; /* compute is promised up to here while the hold is open */
	/* Counted for the log and the operator. */
	uint32_t unmetered; /* replies that carried no (or nonsense) usage: the hold was charged */
	uint32_t over_hold; /* replies whose usage was above the hold: the hold was charged */
};

void meter_init(struct meter *m, const struct price *price, int64_t cap);
void meter_start(struct meter *m);

/* Everything that is charged so far, compute up to compute_ms included; never above the cap. */
int64_t meter_spent(const struct meter *m, int64_t compute_ms);
/* What the open hold promises beyond that; 0 without one. spent + held <= cap. */
int64_t meter_held(const struct meter *m, int64_t compute_ms);
/* Milliseconds of compute that spent and held pay for together. */
int64_t meter_paid_ms(const struct meter *m, int64_t compute_ms);
/* Longest the run may compute with what is charged and held: at this many ms since hand-over it must be stopped. INT64_MAX when
 * compute is free. */
int64_t meter_compute_limit_ms(const struct meter *m);

/* Largest number of input tokens that a request can be billed: bytes * tokens_per_byte + overhead, or, when known_tokens >= 0, that
 * count plus the bytes since. INT64_MAX on overflow. */
int64_t meter_input_bound(const struct model_spec *spec, uint64_t bytes, int64_t known_tokens, uint64_t bytes_since);

struct meter_plan {
	/* What is asked. */
	int64_t now_ms;       /* compute so far */
	int64_t time_left_ms; /* of the run's timeout, of the call's own timeout: the least */
	int64_t input_tokens; /* bound, from meter_input_bound */
	uint32_t wish_tokens; /* 0 = none */
	/* What comes out. */
	int64_t deadline_ms;    /* since hand-over */
	bool deadline_by_money; /* the quarter for compute was the least */
	int64_t output_tokens;  /* limit to write into the request, >= 1 */
	int64_t needed;         /* micros that the least such call needs beyond what is spent */
};
/* Decides deadline and output limit of one attempt. False: the money does not reach for min_output_tokens (or no time that money
 * could buy); `needed` is set in both cases. Opens nothing. */
bool meter_plan(const struct meter *m, const struct model_spec *spec, struct meter_plan *p);
/* Opens the hold that a plan needs; it must be written to the spool before the request's first byte leaves. */
void meter_hold(struct meter *m, const struct meter_plan *p);

/* Ends of an attempt: exactly one of these for each meter_hold. */
void meter_release(struct meter *m); /* no 2xx head came: costs nothing */

struct meter_tokens {
	int64_t input, cached, output;
};
enum meter_charge { METER_CHARGED = 1, METER_UNMETERED, METER_OVER_HOLD };
/* A 2xx head came. t NULL: no usage. *micros (may be NULL) is what this attempt cost. */
enum meter_charge meter_settle(struct meter *m, const struct meter_tokens *t, int64_t *micros);

/* The run's end: usage with compute, cost clamped to the cap, parts adding up. An open hold is charged in full first. */
void meter_final(struct meter *m, int64_t compute_ms, struct usage *usage, struct cost *cost);

#endif
