/*
 * The agent loop: asks the model, runs its tool calls, until it answers without one.
 */
#ifndef GUEST_LOOP_H
#define GUEST_LOOP_H

#include "channel.h"
#include "setup.h"

/* Ends with the result sent and the channel closed by the host, or with an error. Blocks all along; the channel is served. */
int loop_run(struct channel *ch, int sigchld_fd, const struct setup *s, struct err *e) EPH_MUST_CHECK;

#endif
