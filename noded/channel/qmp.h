/*
 * The VMM's monitor (QMP) as a state machine over bytes: greeting, capabilities, events. An escaped guest speaks here, so lines are
 * bounded, JSON is strict, and what comes out is one of a few words. No descriptors, no time.
 *
 * One per VM, on channel's only thread. Never blocks.
 */
#ifndef NODED_CHANNEL_QMP_H
#define NODED_CHANNEL_QMP_H

#include "common/error.h"

#include <stddef.h>

struct qmp;

struct qmp_ops {
	void (*send)(void *arg, const char *line, size_t n); /* one command with its newline */
	void (*on_up)(void *arg);                            /* the monitor answered: the VM runs */
	void (*on_event)(void *arg, const char *name);       /* RESET, SHUTDOWN or GUEST_PANICKED */
	void *arg;
};

struct qmp *qmp_new(const struct qmp_ops *ops); /* NULL when memory ran out */
void qmp_free(struct qmp *q);
/* Bytes as they come, in any cut. -1: the monitor said something that QMP does not say here; feed no more. */
int qmp_feed(struct qmp *q, const char *bytes, size_t n, struct err *e) EPH_MUST_CHECK;

#endif
