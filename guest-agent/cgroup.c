/*
 * The guest's cgroups. Owns /sys/fs/cgroup/worker and what is below it; the agent itself stays in the root group, without limits.
 * Called on the only thread; never blocks.
 */
#include "cgroup.h"

#include "common/log.h"
#include "common/text.h"
#include "fsutil.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROOT "/sys/fs/cgroup"
#define PIDS_MAX "128"
/*
 * Kept back for the agent (its messages and buffers are at most about 24 MiB) and for what the kernel holds without counting it
 * against the group, sockets above all (init.c bounds them). A sixteenth of the memory more for what grows with the machine.
 */
#define RESERVE_MIB 64
#define RESERVE_PART 16
#define MEMORY_MIN_MIB 32
/* With less than this available in the whole machine the agent itself would soon wait for memory. */
#define SHORT_MIB 32

static int worker_dir = -1;
static long memory_mib;
static unsigned int made; /* groups so far: each has a name of its own */

static int set_limits(struct err *e)
{
	long available = fs_meminfo_kib("MemAvailable") / 1024;
	long reserve = RESERVE_MIB + fs_meminfo_kib("MemTotal") / 1024 / RESERVE_PART;
	char text[32];

	memory_mib = available - reserve;
	if (memory_mib < MEMORY_MIN_MIB)
		return err_set(e, ERR_LIMIT, "the machine has %ld MiB free, at least %ld are needed", available,
				reserve + MEMORY_MIN_MIB);
	if (!text_fmt(text, sizeof text, "%ldM", memory_mib))
		return err_set(e, ERR_INTERNAL, "memory limit");
	if (fs_write(worker_dir, "pids.max", PIDS_MAX, e) < 0 || fs_write(worker_dir, "memory.max", text, e) < 0)
		return -1;
	/* the agent answers the host first */
	return fs_write(worker_dir, "cpu.weight", "20", e);
}

int cgroup_init(struct err *e)
{
	if (fs_write(AT_FDCWD, ROOT "/cgroup.subtree_control", "+pids +memory +cpu", e) < 0)
		return -1;
	if (mkdir(ROOT "/worker", 0755) < 0 && errno != EEXIST)
		return err_set_errno(e, "make the worker cgroup");
	worker_dir = open(ROOT "/worker", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (worker_dir < 0)
		return err_set_errno(e, "open the worker cgroup");
	return set_limits(e);
}

int cgroup_open(struct cgroup *g, struct err *e)
{
	*g = (struct cgroup){ .dir = -1, .events = -1, .kill = -1 };
	if (!text_fmt(g->name, sizeof g->name, "call-%u", ++made))
		return err_set(e, ERR_INTERNAL, "cgroup name");
	if (mkdirat(worker_dir, g->name, 0755) < 0)
		return err_set_errno(e, "make cgroup %s", g->name);
	g->dir = openat(worker_dir, g->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (g->dir >= 0)
		g->events = openat(g->dir, "cgroup.events", O_RDONLY | O_CLOEXEC);
	if (g->events >= 0)
		g->kill = openat(g->dir, "cgroup.kill", O_WRONLY | O_CLOEXEC);
	if (g->kill < 0) {
		err_set_errno(e, "open cgroup %s", g->name);
		cgroup_close(g);
		return -1;
	}
	return 0;
}

void cgroup_kill(const struct cgroup *g)
{
	if (write(g->kill, "1", 1) != 1)
		log_error("cgroup not killed name=%s errno=%d", g->name, errno);
}

bool cgroup_populated(const struct cgroup *g)
{
	char text[128];
	ssize_t n = pread(g->events, text, sizeof text - 1, 0);

	if (n <= 0)
		return true;
	text[n] = '\0';
	return strstr(text, "populated 0") == NULL;
}

void cgroup_close(struct cgroup *g)
{
	fd_cleanup(&g->kill);
	fd_cleanup(&g->events);
	fd_cleanup(&g->dir);
	if (unlinkat(worker_dir, g->name, AT_REMOVEDIR) < 0)
		log_error("cgroup not removed name=%s errno=%d", g->name, errno);
}

long cgroup_oom_kills(void)
{
	char text[256], *found;
	struct err e;

	if (fs_read(worker_dir, "memory.events", text, sizeof text, &e) < 0)
		return 0;
	found = strstr(text, "oom_kill ");
	return found == NULL ? 0 : strtol(found + strlen("oom_kill "), NULL, 10);
}

bool cgroup_machine_short(void)
{
	long kib = fs_meminfo_kib("MemAvailable");

	return kib >= 0 && kib < SHORT_MIB * 1024;
}

long cgroup_memory_mib(void)
{
	return memory_mib;
}
