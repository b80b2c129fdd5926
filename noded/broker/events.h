/*
 * What goes onto a run's timeline from its host: numbering, time, bytes, hash and spool are done here, before anyone else learns of
 * an event; rate and size are bounded here. Runs on the broker's thread; blocks on the spool's disk only.
 *
 * Bounds: EVENT_RATE_PER_SECOND by token bucket for what the guest causes (the caller keeps it waiting: back-pressure, never a
 * loss), and per run EVENT_RUN_COUNT_MAX events and EVENT_RUN_BYTES_MAX less a reserve. Above these the guest's events are counted,
 * not kept: `events.truncated` says so once when it begins and once, with the sums, before the end. The reserve is for the host's
 * own events; a last part of it is kept for microvm.destroyed, which always fits.
 */
#ifndef BROKER_EVENTS_H
#define BROKER_EVENTS_H

#include "noded/spool.h"

#include "common/error.h"
#include "proto/guest.h"

#include <stdbool.h>
#include <stdint.h>

struct events;

struct events_options {
	struct spool *spool;      /* outlives it */
	int64_t age_ms;           /* of the run when the assignment was made */
	int64_t received_boot_ns; /* when it came to this host */
	/* The meter as it stands now: goes into each record. */
	void (*meter)(void *arg, int64_t *spent, int64_t *held);
	/* Something was appended: up to this seq the spool may be read. */
	void (*appended)(void *arg, uint64_t seq);
	void *arg;
};

struct events *events_new(const struct events_options *opt); /* NULL: no memory */
void events_free(struct events *ev);

int64_t events_t_ms(const struct events *ev, int64_t boot_ns);

/* The host's own event; data is a whole JSON object. -1: the spool is full or broken (the run must end). */
int events_host(struct events *ev, enum event_type type, const struct buf *data, struct err *e) EPH_MUST_CHECK;
/* microvm.destroyed, preceded by the sums of what was not kept. */
int events_last(struct events *ev, const struct buf *destroyed, struct err *e) EPH_MUST_CHECK;

/* May one more guest event be taken now? If not, *wait_ms is when to ask again. */
bool events_ready(struct events *ev, int64_t boot_ns, int64_t *wait_ms);
/* Takes one guest event (views are not kept): writes it, holds the begun character of an output chunk back, or counts it as
 * dropped. -1: the spool is broken. */
int events_guest(struct events *ev, const struct guest_event *g, int64_t boot_ns, struct err *e) EPH_MUST_CHECK;

uint64_t events_dropped(const struct events *ev);

#endif
