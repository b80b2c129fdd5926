/*
 * The event monitor: pretty-printed records with a blank line after each, on a file or a descriptor that is made non-blocking. What
 * does not fit is lost, wholly or from its middle on, as with the real one.
 */
#ifndef STANDIN_EVENTS_H
#define STANDIN_EVENTS_H

#include "common/error.h"

/* fd -1 and path NULL: events go nowhere. */
int events_open(const char *path, int fd, struct err *e) EPH_MUST_CHECK;
/* key NULL: no properties. */
void event_say(const char *source, const char *name, const char *key, const char *value);
/* Bytes as they are: for faults. */
void event_raw(const char *bytes, size_t n);

#endif
