/*
 * Turns a child of the agent into a process of user `worker`: no right left that the agent had. Called between fork and exec (or
 * before an inner job runs), in the child, which ends when this fails.
 */
#ifndef GUEST_CONFINE_H
#define GUEST_CONFINE_H

#include "common/error.h"

#define WORKER_NAME "worker"
#define WORKER_UID 1000
#define WORKER_HOME "/home/worker"

int confine_self(struct err *e) EPH_MUST_CHECK;

#endif
