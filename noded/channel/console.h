/*
 * The VM's console: the pipe that it and the VMM's stdout and stderr are written to, its last 16 KiB, and what of it the broker
 * gets to see. Hostile text from the first byte.
 *
 * One per VM, on channel's only thread. Never blocks.
 */
#ifndef NODED_CHANNEL_CONSOLE_H
#define NODED_CHANNEL_CONSOLE_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>

struct event_base;
struct console;

struct console_ops {
	void (*send)(void *arg, const char *bytes, size_t n); /* for the broker: the last bytes, 2 KiB at most */
	bool (*booting)(void *arg);                           /* while true, what comes is sent once a second */
	void *arg;
};

/* fd stays the caller's. */
int console_new(struct event_base *base, int fd, const struct console_ops *ops, struct console **out, struct err *e) EPH_MUST_CHECK;
/* Sends what the broker has not seen, if there is something. */
void console_send(struct console *c);
/* Before the end: takes what is still in the pipe. */
void console_drain(struct console *c);
void console_free(struct console *c);

#endif
