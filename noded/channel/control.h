/*
 * The control of a VMM as a state machine over bytes, one for each driver behind a table of operations: QEMU's monitor (qmp.c),
 * Cloud Hypervisor's API (ch_api.c). An escaped guest speaks here, so everything that comes in is bounded and strict, and what
 * comes out is one of a few words. No descriptors of its own, no time.
 *
 * One per VM, on channel's only thread. Never blocks.
 */
#ifndef NODED_CHANNEL_CONTROL_H
#define NODED_CHANNEL_CONTROL_H

#include "vmm/plan.h"

#include <stdbool.h>
#include <stddef.h>

/* What a control wants done. */
struct control_ops {
	/* Bytes for the VMM. */
	void (*send)(void *arg, const void *bytes, size_t n);
	/* The same with a descriptor that rides along with the first byte. -1: it could not be sent at once. */
	int (*send_fd)(void *arg, const void *bytes, size_t n, int fd, struct err *e);
	/* The VMM is who we think it is: the guest's connection may be taken. QEMU's guest has its stream from the start. */
	void (*on_known)(void *arg);
	/* The VM runs. Once. */
	void (*on_up)(void *arg);
	/* RESET, SHUTDOWN or GUEST_PANICKED. */
	void (*on_event)(void *arg, const char *name);
	/* The agent opened its end of the guest channel. Once. */
	void (*on_guest_open)(void *arg);
	/* The snapshot is made (why is NULL), or why it is not. */
	void (*on_snapshot)(void *arg, const char *why);
	/* An answer is awaited from now on, or not any more: the plan's answer_ms is for each. `what` names it. */
	void (*on_wait)(void *arg, const char *what);
	void *arg;
};

struct control;

/* NULL when memory ran out. The plan must live as long. */
struct control *control_new(const struct vmm_plan *plan, const struct control_ops *ops);
void control_free(struct control *c);

/* Each -1: the VMM said or did something that cannot be; e says what. Feed no more. */
/* Once, before anything else: says what is to be said first. */
int control_start(struct control *c, struct err *e) EPH_MUST_CHECK;
/* Bytes of the control's stream, as they come, in any cut. */
int control_feed(struct control *c, const void *bytes, size_t n, struct err *e) EPH_MUST_CHECK;
/* Bytes of the pipe of events. They are hints: what cannot be read is left out, so this never fails. */
void control_events(struct control *c, const void *bytes, size_t n);
/* Stops the VM and has its snapshot written; answered by on_snapshot, later or before this returns. The descriptors stay the
 * caller's and must live until then. */
void control_snapshot(struct control *c, const int *fds, size_t fd_count);
/* The word that ends the VMM, for when nobody is left who would. */
const char *control_quit(const struct control *c);
/* "qmp" | "api", for texts. */
const char *control_name(const struct control *c);

/* What a driver's control is made of; for control.c and the drivers only. */
struct control_driver {
	const char *name, *quit;
	void *(*make)(const struct vmm_plan *plan, const struct control_ops *ops);
	void (*free)(void *state);
	int (*start)(void *state, struct err *e);
	int (*feed)(void *state, const char *bytes, size_t n, struct err *e);
	void (*events)(void *state, const char *bytes, size_t n); /* NULL: has no such pipe */
	void (*snapshot)(void *state, const int *fds, size_t fd_count);
};
extern const struct control_driver control_qmp, control_ch;

#endif
