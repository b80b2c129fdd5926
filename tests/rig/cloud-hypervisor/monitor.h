/*
 * QEMU's monitor (QMP), one command after the other: a call waits for its answer, with a deadline; events that come meanwhile go to
 * on_event. Used by machine.c alone.
 */
#ifndef STANDIN_MONITOR_H
#define STANDIN_MONITOR_H

#include "common/buf.h"
#include "common/error.h"
#include "common/json.h"

struct monitor {
	int fd; /* owned */
	struct buf in;
	void (*on_event)(void *arg, const char *name, const struct json *data);
	void *arg;
};

/* Waits for the greeting and leaves negotiation. */
int monitor_open(struct monitor *m, int fd, struct err *e) EPH_MUST_CHECK;
void monitor_close(struct monitor *m);
/* `arguments` is JSON or NULL. answer (may be NULL) is what "return" holds, for json_free. */
int monitor_call(struct monitor *m, const char *command, const char *arguments, struct json **answer, struct err *e) EPH_MUST_CHECK;
/* Gives QEMU a descriptor under a name. */
int monitor_give(struct monitor *m, const char *name, int fd, struct err *e) EPH_MUST_CHECK;
/* When the descriptor is readable: events. -1: QEMU is gone. */
int monitor_read(struct monitor *m, struct err *e) EPH_MUST_CHECK;
/* The same, but waits until something comes. */
int monitor_wait(struct monitor *m, struct err *e) EPH_MUST_CHECK;

#endif
