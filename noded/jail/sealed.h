/* Bytes for another process that neither it nor we can change any more: jobs of the jail stage, plans of VMMs. Any thread; no
 * waits. */
#ifndef NODED_JAIL_SEALED_H
#define NODED_JAIL_SEALED_H

#include "common/buf.h"
#include "common/error.h"

/* A memory file with what is in `b`, sealed; the caller closes it. `what` is its name, and for errors. -1: b has failed, or no
 * memory. */
int sealed_file(const char *what, const struct buf *b, struct err *e) EPH_MUST_CHECK;
/* Seals a memory file that allows it: its size and its bytes stay as they are. */
int sealed_close(int fd, const char *what, struct err *e) EPH_MUST_CHECK;

#endif
