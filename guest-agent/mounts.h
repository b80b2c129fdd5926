/*
 * The root that user processes see: a read-only image below a tmpfs, and the kernel file systems in it.
 */
#ifndef GUEST_MOUNTS_H
#define GUEST_MOUNTS_H

#include "common/error.h"

/* Assembles the root from the virtio disk and makes it this process' root directory. Descriptors opened before stay valid. */
int mounts_enter_root(struct err *e) EPH_MUST_CHECK;

#endif
