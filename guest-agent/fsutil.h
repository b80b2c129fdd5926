/*
 * Small reads and writes of kernel files (/proc, /sys, cgroup) and of short texts. Blocking only as long as the kernel does.
 */
#ifndef GUEST_FSUTIL_H
#define GUEST_FSUTIL_H

#include "common/error.h"

#include <stdbool.h>

/* Scope-bound descriptor: closed when the scope is left unless fd_steal took it. */
#define AUTO_FD __attribute__((cleanup(fd_cleanup)))
void fd_cleanup(int *fd);
int fd_steal(int *fd);

/* Writes text to an existing file below dirfd (AT_FDCWD for a path from the root). */
int fs_write(int dirfd, const char *path, const char *text, struct err *e) EPH_MUST_CHECK;
/* Reads at most size - 1 bytes and terminates; a longer file is cut; a trailing newline is removed. */
int fs_read(int dirfd, const char *path, char *out, size_t size, struct err *e) EPH_MUST_CHECK;
/* Value in KiB of a line "name:   N kB" of /proc/meminfo; -1 when there is none. */
long fs_meminfo_kib(const char *name);
/* Copies the value of key=value from a kernel command line; false when it is not there or too long. The last one counts. */
bool fs_boot_option(const char *cmdline, const char *key, char *out, size_t size);

#endif
