/*
 * One thread beside a loop, for work that takes longer than a turn of the loop may: reading a large body, hashing it. Items go in
 * by worker_post on the loop's thread, `run` is called on the other one, `done` on the loop's again, in order. The queue is bounded
 * by what the items say they weigh; there is no lock that anybody outside sees.
 */
#ifndef EPH_WORKER_H
#define EPH_WORKER_H

#include "error.h"
#include "inbox.h"

#include <stdbool.h>
#include <stddef.h>

struct event_base;
struct worker;

/* Embedded in the caller's struct. The worker holds it from worker_post until `done`. */
struct worker_item {
	struct inbox_item item; /* the worker's own */
	struct worker_item *next;
	size_t weight;                       /* bytes of memory that it holds */
	void (*run)(struct worker_item *it); /* on the worker's thread; touches nothing that the loop touches meanwhile */
	void (*done)(struct worker_item *it, bool ran); /* on the loop; ran is false when the worker ended before its turn */
};

/* Takes items that weigh at most max_weight together, the one that is worked on included. */
int worker_new(struct event_base *base, size_t max_weight, struct worker **out, struct err *e) EPH_MUST_CHECK;
/* False: full; the item is the caller's still. */
bool worker_post(struct worker *w, struct worker_item *it) EPH_MUST_CHECK;
/* Waits for the item that is worked on, and calls `done` for it and for all that wait. Not from a `done`. NULL is fine. */
void worker_free(struct worker *w);

#endif
