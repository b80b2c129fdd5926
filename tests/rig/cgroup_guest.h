/*
 * What noded's cgroup code is asked in a guest that has version 2 alone. A case is a process of its own, as root, that begins in
 * the true root of a hierarchy with no other group; it returns when all held and calls fail() when something did not. May block.
 */
#ifndef RIG_CGROUP_GUEST_H
#define RIG_CGROUP_GUEST_H

#include "noded/jail/cgroup_internal.h"

#include <sys/types.h>

#define ROOT "/sys/fs/cgroup"
#define MIB (UINT64_C(1) << 20)

struct cgroup_case {
	const char *name;
	void (*run)(void);
};

/* Each ends with an entry without a name. */
extern const struct cgroup_case place_cases[]; /* cgroup_places.c: where groups can be made */
extern const struct cgroup_case group_cases[]; /* cgroup_groups.c: one group */

/* Ends the case with these words. */
void fail(const char *fmt, ...) __attribute__((noreturn)) EPH_PRINTF(1, 2);
#define must(cond) ((cond) ? (void)0 : fail("line %d: %s: not so", __LINE__, #cond))
/* Within a time that is long for what a kernel does. */
#define must_become(cond)                                                                                                          \
	do {                                                                                                                       \
		int tries = 0;                                                                                                     \
		while (!(cond))                                                                                                    \
			if (again(&tries))                                                                                         \
				fail("line %d: %s: not so in time", __LINE__, #cond);                                              \
	} while (0)
/* A few milliseconds; true when there were enough of them. */
bool again(int *tries);

struct cgroups *open_at(const char *parent); /* "" = own */
struct cgroup *make(struct cgroups *c, const char *name, uint64_t memory, uint32_t pids, uint32_t percent);
/* Kills, waits until nobody lives, removes; the directory is gone then. */
void end(struct cgroup *g);
void make_dir(const char *path);
/* Writes or ends the case. */
void put(const char *dir, const char *file, const char *value);
bool is(const char *dir, const char *file, const char *text); /* the file says this and nothing else */
bool exists(const char *dir);
void enter(const char *dir); /* this process */
/* Where a process stands, as this one sees it. */
bool stands_in(pid_t pid, const char *path);
pid_t park(const char *dir); /* a child that does nothing, there */
/* A child born in the group, as noded's are. -1 with errno. */
pid_t born_in(const struct cgroup *g, void (*body)(void));
void do_nothing(void) __attribute__((noreturn));
bool died_by(pid_t child, int signal); /* waits for it */

#endif
