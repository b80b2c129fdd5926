/*
 * The clockwork of controld: what must happen without anybody asking. Owns timers, nothing else; every job is a statement of the
 * store, any number of controlds may run the same job at once. On the loop's thread; never blocks. Made by main.c after the store.
 */
#ifndef CONTROLD_JOBS_H
#define CONTROLD_JOBS_H

#include "common/error.h"

struct event_base;
struct jobs;
struct store;

int jobs_new(struct event_base *base, struct store *store, struct jobs **out, struct err *e) EPH_MUST_CHECK;
/* Before store_close. NULL is allowed. */
void jobs_free(struct jobs *j);

#endif
