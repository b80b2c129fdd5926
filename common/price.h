/*
 * Money arithmetic, the one piece of code that broker and controld share. Integer micros (millionths of a US dollar), prices in
 * micros per million units (tokens, milliseconds, requests). All arithmetic is overflow-checked; nothing here allocates.
 */
#ifndef EPH_PRICE_H
#define EPH_PRICE_H

#include "error.h"

#include <stdbool.h>
#include <stdint.h>

#define PRICE_MICROS_MAX INT64_C(1000000000000000) /* a billion dollars: above it is refused wherever money comes in */

/* One price row set, fixed for a run when it is created. All >= 0. */
struct price {
	int64_t run_fee;       /* micros, once, at `running` */
	int64_t compute;       /* micros per million milliseconds */
	int64_t input;         /* micros per million input tokens */
	int64_t cached_input;  /* micros per million cached input tokens */
	int64_t output;        /* micros per million output tokens */
	int64_t model_percent; /* hundredths of a percent added to the model part (500 = 5 %) */
	int64_t web_request;   /* micros per million requests */
	int64_t web_search;    /* micros per million searches */
};

struct usage {
	int64_t model_calls;
	int64_t input_tokens; /* includes cached */
	int64_t cached_input_tokens;
	int64_t output_tokens;
	int64_t web_requests;
	int64_t web_searches;
	int64_t compute_ms;
	int64_t unmetered_model_micros; /* holds charged because a reply carried no usage; part of the model component */
};

struct cost {
	int64_t run_fee, compute, model, web;
	int64_t total; /* the sum of the four, exactly */
};

/* units * per_million / 1e6, rounded up. False on overflow or a negative argument. */
bool price_of(int64_t units, int64_t per_million, int64_t *micros) EPH_MUST_CHECK;
/* Each component is one product over the whole run, rounded up once. False on overflow or usage that makes no sense
 * (negative, cached > input). */
bool price_cost(const struct price *p, const struct usage *u, struct cost *out) EPH_MUST_CHECK;
/* Clamps total to cap by lowering model, then web, then compute, then run_fee, so that the parts still add up. */
void price_clamp(struct cost *c, int64_t cap);
/* Model part for one call's token counts (rounded up), for holds and per-call display. */
bool price_model(const struct price *p, int64_t input, int64_t cached, int64_t output, int64_t *micros) EPH_MUST_CHECK;
#define PRICE_MIN_CALL_MS 1000 /* a call that compute money cannot keep open this long is not made */
/* The least money left with which a call is made whose tokens cost at most `tokens`: while it is open, for call_ms at most, a
 * quarter of what is left may go into compute, and the rest must pay the tokens. INT64_MAX when no amount is enough. */
int64_t price_call_room(const struct price *p, int64_t tokens, int64_t call_ms);
/* The least cap with which a run makes sense: run fee, a second of compute, and room for one minimal call of at most call_ms. */
int64_t price_min_cap(const struct price *p, int64_t min_input_tokens, int64_t min_output_tokens, int64_t call_ms);

#endif
