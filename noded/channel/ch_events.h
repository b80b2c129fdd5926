/*
 * Cloud Hypervisor's event monitor: records of JSON with an empty line after each, on a pipe that loses what does not fit, whole or
 * from its middle on. So events are hints: what cannot be read is left out, and nothing waits for one.
 *
 * Pure; used by ch_api.c on channel's only thread.
 */
#ifndef NODED_CHANNEL_CH_EVENTS_H
#define NODED_CHANNEL_CH_EVENTS_H

#include "common/buf.h"

#include <stddef.h>

struct ch_events {
	struct buf record;
	unsigned int records; /* of all kinds, in one VM's life */
};

void ch_events_init(struct ch_events *v);
void ch_events_free(struct ch_events *v);
/* on_event gets RESET, SHUTDOWN or GUEST_PANICKED for the records that mean one. */
void ch_events_feed(struct ch_events *v, const char *bytes, size_t n, void (*on_event)(void *arg, const char *name), void *arg);

#endif
