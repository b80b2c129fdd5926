/*
 * What every driver's probe begins with: is the VMM a program, and what does it say to --version.
 *
 * Keeper's thread at start; spawns the VMM and waits up to 5 s for it.
 */
#ifndef NODED_VMM_PROBE_H
#define NODED_VMM_PROBE_H

#include "common/error.h"

#include <stddef.h>
#include <stdint.h>

/*
 * Runs `binary --version`, which must begin with `begins`, and gives what follows that (in `out`, terminated) up to the first
 * character that no version has in it. `key` is the configuration's name of the path, for errors.
 */
int vmm_probe_version(
		const char *binary, const char *key, const char *begins, char *out, size_t size, struct err *e) EPH_MUST_CHECK;

/* Reads what a child prints until its end, `limit_ms` are over, or `size` is full; terminated. Returns the length. */
size_t vmm_read_output(int fd, int64_t limit_ms, char *out, size_t size);

#endif
