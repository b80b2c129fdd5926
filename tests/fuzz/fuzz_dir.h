/* A directory of a target's own for readers that want files: in memory where the system has that, removed at the end. */
#ifndef EPH_FUZZ_DIR_H
#define EPH_FUZZ_DIR_H

#include "fuzz.h"

#include <ftw.h>
#include <stdbool.h>
#include <unistd.h>

static char fuzz_dir[64];

static int fuzz_dir_remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
	(void)st;
	(void)type;
	(void)at;
	return remove(path);
}

static void fuzz_dir_remove(void)
{
	(void)nftw(fuzz_dir, fuzz_dir_remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Makes it at the first call; the path is in fuzz_dir. True at that first call. */
static bool fuzz_dir_made(void)
{
	int n;

	if (*fuzz_dir)
		return false;
	n = snprintf(fuzz_dir, sizeof(fuzz_dir), "%s/fuzz.XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
	must(n > 0 && mkdtemp(fuzz_dir) && atexit(fuzz_dir_remove) == 0);
	return true;
}

#endif
