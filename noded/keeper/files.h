/* Small file operations of keeper's that must be whole or not at all. They block on the disk, for a few hundred microseconds. */
#ifndef NODED_KEEPER_FILES_H
#define NODED_KEEPER_FILES_H

#include "common/buf.h"
#include "common/error.h"

#include <sys/types.h>

/* Makes `path` and what is above it. Only a directory that is made here gets `mode`; those above it get 0755. One that is there
 * already must be this user's, and nobody else may write to it. */
int files_mkdir(const char *path, mode_t mode, struct err *e) EPH_MUST_CHECK;
/* Writes dir/name through a temporary file, fsync and rename, then fsync of the directory. */
int files_store(const char *dir, const char *name, const void *bytes, size_t n, mode_t mode, struct err *e) EPH_MUST_CHECK;
/* Appends the file's bytes to out; ERR_NOT_FOUND when there is none, ERR_LIMIT when it does not fit out->max. */
int files_load(const char *path, struct buf *out, struct err *e) EPH_MUST_CHECK;
/* unlink + fsync of the directory; a file that is not there is fine. */
int files_remove(const char *dir, const char *name, struct err *e) EPH_MUST_CHECK;

#endif
