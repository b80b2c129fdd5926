/* Small files that must be whole or absent. Blocks; used before the loop runs. */
#ifndef CONTROLD_FILES_H
#define CONTROLD_FILES_H

#include "../common/buf.h"
#include "../common/error.h"

#include <stdbool.h>
#include <sys/types.h>

/* The whole file appended to out (bounded by out->max). secret: refuses a file that group or others can touch. */
int file_read(const char *path, bool secret, struct buf *out, struct err *e) EPH_MUST_CHECK;
/* Written beside, fsynced, then put in place. replace = false: ERR_CONFLICT when it exists already. */
int file_write(const char *path, const void *p, size_t n, mode_t mode, bool replace, struct err *e) EPH_MUST_CHECK;
bool file_exists(const char *path);
/* mkdir -p for the last two parts at most, 0700. */
int file_mkdir(const char *path, struct err *e) EPH_MUST_CHECK;

#endif
