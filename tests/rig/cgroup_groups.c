/*
 * Cases of cgroup_guest.h: what one group on version 2 holds its processes to, and how it ends.
 */
#include "cgroup_guest.h"

#include "common/text.h"
#include "jail/cgroup_internal.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LIMIT (16 * MIB)
#define NOBODY 65534

/* --- limits ----------------------------------------------------------------------------------------------------------------------
 */

static void fill(size_t bytes)
{
	volatile char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		_exit(1);
	for (size_t i = 0; i < bytes; i += 4096)
		p[i] = 1;
}

static void fill_within(void)
{
	fill(LIMIT / 2);
}

static void fill_beyond(void)
{
	fill(4 * LIMIT);
}

static void memory(void)
{
	struct cgroups *c = open_at("/ephemeral");
	struct cgroup *g = make(c, "vm_m.tag", LIMIT, 16, 0), *beside = make(c, "vm_b.tag", LIMIT, 16, 0);
	pid_t same = born_in(g, do_nothing), other = born_in(beside, do_nothing), one = born_in(g, fill_within);
	int status;

	must(same > 0 && other > 0 && waitpid(one, &status, 0) == one && status == 0);
	must(cgroup_oom_kills(g) == 0);
	must(cgroup_memory_peak(g) >= LIMIT / 2 && cgroup_memory_peak(g) < LIMIT);
	one = born_in(g, fill_beyond);
	must(one > 0 && died_by(one, SIGKILL));
	must(died_by(same, SIGKILL)); /* the group goes as one */
	must(cgroup_oom_kills(g) >= 1 && cgroup_memory_peak(g) > LIMIT - MIB && cgroup_memory_peak(g) <= LIMIT);
	must_become(!cgroup_populated(g));
	must(cgroup_populated(beside) && cgroup_oom_kills(beside) == 0 && cgroup_memory_now(beside) < LIMIT / 2);
	end(g);
	end(beside);
}

/* Ends with the number of children that it got before the kernel had no more. */
static void fork_on(void)
{
	int count = 0;

	for (;;) {
		pid_t pid = fork();

		if (pid == 0)
			do_nothing();
		if (pid < 0)
			_exit(errno == EAGAIN ? count : 99);
		if (++count == 50)
			_exit(count);
	}
}

static void pids(void)
{
	struct cgroups *c = open_at("/ephemeral");
	struct cgroup *g = make(c, "vm_p.tag", 64 * MIB, 4, 0);
	pid_t one = born_in(g, fork_on);
	int status;

	must(one > 0 && waitpid(one, &status, 0) == one && WIFEXITED(status));
	if (WEXITSTATUS(status) != 3)
		fail("a group of 4 let its first process have %d more", WEXITSTATUS(status));
	must(born_in(g, do_nothing) > 0);
	must(born_in(g, do_nothing) < 0 && errno == EAGAIN);
	end(g);
}

static int64_t now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void spin(void)
{
	for (volatile unsigned int i = 0;; i++)
		continue;
}

/* Does the group use less than `percent` of a CPU, or more, over half a second? A guest may stand still meanwhile: a few tries. */
static bool uses(const struct cgroup *g, bool less, unsigned int percent)
{
	for (int tries = 0; tries < 6; tries++) {
		int64_t from = now_us();
		uint64_t used = cgroup_cpu_us(g);
		int pauses = 0;

		while (now_us() - from < 500000 && !again(&pauses))
			continue;
		used = (cgroup_cpu_us(g) - used) * 100 / (uint64_t)(now_us() - from);
		if (less ? used > 0 && used < percent : used > percent)
			return true;
	}
	return false;
}

static void cpu(void)
{
	struct cgroups *c = open_at("/ephemeral");
	struct cgroup *g = make(c, "vm_c.tag", 64 * MIB, 4, 20), *beside = make(c, "vm_d.tag", 64 * MIB, 4, 0);

	must(is(cgroup_dir(beside, 0), "cpu.max", "max 100000"));
	must(born_in(g, spin) > 0 && uses(g, true, 35));
	end(g);
	must(born_in(beside, spin) > 0 && uses(beside, false, 60));
	end(beside);
}

/* --- the end
 * ----------------------------------------------------------------------------------------------------------------------- */

/* Always another process, which its parent does not wait for. */
static void run_away(void)
{
	for (;;)
		if (fork() > 0)
			_exit(0);
}

/* Processes in sessions of their own, one that takes no signal, one that is stopped, one that is a new one all the time. */
static void grow_tree(void)
{
	(void)setsid();
	if (fork() == 0) {
		(void)setsid();
		if (fork() == 0) {
			(void)setsid();
			for (int s = 1; s < NSIG; s++)
				(void)signal(s, SIG_IGN);
			do_nothing();
		}
		_exit(0);
	}
	if (fork() == 0) {
		(void)setsid();
		(void)raise(SIGSTOP);
		do_nothing();
	}
	if (fork() == 0) {
		(void)setsid();
		run_away();
	}
	do_nothing();
}

static unsigned int members(const struct cgroup *g)
{
	char path[CGROUP_PATH_MAX + 32], text[4096];
	unsigned int lines = 0;

	must(text_fmt(path, sizeof path, "%s/cgroup.procs", cgroup_dir(g, 0)) && cgroup_read(path, text, sizeof text));
	for (const char *p = text; (p = strchr(p, '\n')) != NULL; p++)
		lines++;
	return lines;
}

/* By the descriptor that a broker has, in a process that has no rights but it. */
static void kill_by_descriptor(void)
{
	struct cgroups *c = open_at("/ephemeral");
	struct cgroup *g = make(c, "vm_k.tag", 64 * MIB, 16, 100);
	struct err e;
	int fd = cgroup_open_kill(g, &e), status;
	pid_t one = born_in(g, grow_tree), broker;

	must(fd >= 0 && one > 0);
	must_become(members(g) >= 4);
	must(cgroup_populated(g) && cgroup_remove(g, &e) == 1);
	broker = fork();
	if (broker == 0)
		_exit(setgid(NOBODY) == 0 && setuid(NOBODY) == 0 && write(fd, "1", 1) == 1 ? 0 : 1);
	must(waitpid(broker, &status, 0) == broker && status == 0);
	must(died_by(one, SIGKILL));
	must_become(!cgroup_populated(g));
	must(members(g) == 0 && cgroup_remove(g, &e) == 0 && !exists(cgroup_dir(g, 0)));
	cgroup_kill(g);
	must(!cgroup_populated(g) && cgroup_remove(g, &e) == 0);
	close(fd);
}

/* What a noded left behind is ended by the next one, by its name. */
static void adopt(void)
{
	struct cgroups *c = open_at("/ephemeral");
	struct cgroup *g = make(c, "vm_a.tag", 64 * MIB, 16, 100), *twice = NULL;
	struct cgroup_limits limits = { .pids = 4 };
	pid_t one = born_in(g, grow_tree);
	struct err e;

	cgroup_free(g);
	must(cgroup_make(c, "vm_a.tag", &limits, &twice, &e) == -1 && e.sys == EEXIST);
	g = cgroup_adopt(c, "vm_a.tag");
	must(g && cgroup_dir_fd(g) == -1 && cgroup_populated(g));
	cgroup_kill(g);
	must(died_by(one, SIGKILL));
	end(g);
	g = cgroup_adopt(c, "vm_never.tag");
	must(g && !cgroup_populated(g) && cgroup_oom_kills(g) == 0);
	end(g);
}

static void on_name(void *arg, const char *name)
{
	char *names = arg;
	size_t n = strlen(names);

	must(text_fmt(names + n, 200 - n, "%s ", name));
}

static void each(void)
{
	struct cgroups *c = open_at("/ephemeral");
	struct cgroup *g = make(c, "vm_1.tag", 64 * MIB, 4, 0), *other = make(c, "link_1.tag", 64 * MIB, 4, 0);
	char names[200] = "";

	cgroups_each(c, "vm_", on_name, names);
	must(strcmp(names, "vm_1.tag ") == 0);
	end(g);
	end(other);
	names[0] = '\0';
	cgroups_each(c, "", on_name, names);
	must(strstr(names, "vm_1") == NULL && strstr(names, "link_1") == NULL);
}

/* What is allowed in all is the least of the kernel's numbers and of the groups that ours are made in. */
static void pids_above(void)
{
	struct cgroups *c = open_at("/upper/place");
	uint32_t kernel = cgroups_pids(c);
	struct err e;

	must(kernel > 700 && kernel < UINT32_MAX);
	must(cgroup_write(ROOT "/upper", "pids.max", "700", &e) == 0 && cgroups_pids(c) == 700);
	must(cgroup_write(ROOT "/upper/place", "pids.max", "800", &e) == 0 && cgroups_pids(c) == 700);
	must(cgroup_write(ROOT "/upper/place", "pids.max", "600", &e) == 0 && cgroups_pids(c) == 600);
	must(cgroup_write(ROOT "/upper", "pids.max", "max", &e) == 0 && cgroups_pids(c) == 600);
}

/* cgroup_parent is another one now: ours are killed, another noded's are not touched, and the levels go once they are empty. */
static void forget(void)
{
	struct cgroups *c = open_at("/old/place");
	struct cgroup *mine = make(c, "vm_1.tag", 64 * MIB, 4, 0), *other = make(c, "vm_2.gat", 64 * MIB, 4, 0);
	pid_t one = born_in(mine, do_nothing), two = born_in(other, do_nothing);

	must(one > 0 && two > 0);
	must(!cgroups_forget("/old/place", "tag"));
	must(died_by(one, SIGKILL));
	must_become(!cgroups_forget("/old/place", "tag") && !exists(cgroup_dir(mine, 0)));
	must(cgroup_populated(other) && waitpid(two, NULL, WNOHANG) == 0);
	must(!cgroups_forget("/old", "tag") && exists(cgroup_dir(other, 0)));
	end(other);
	must(cgroups_forget("/old/place", "tag"));
	must(!exists(ROOT "/old/place") && !exists(ROOT "/old") && exists(ROOT));
	must(cgroups_forget("/old/place", "tag") && cgroups_forget("", "tag") && cgroups_forget("/", "tag"));
}

const struct cgroup_case group_cases[] = {
	{ "memory", memory },
	{ "pids", pids },
	{ "pids-above", pids_above },
	{ "cpu", cpu },
	{ "kill-by-descriptor", kill_by_descriptor },
	{ "adopt", adopt },
	{ "each", each },
	{ "forget", forget },
	{ NULL, NULL },
};
