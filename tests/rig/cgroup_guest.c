/*
 * The init of a guest in which noded's cgroup code (noded/jail/cgroup*.c) is put to the test on version 2 alone, which the host of
 * the test need not have. Runs the cases one after the other, each in a process of its own and from a bare hierarchy, and says on
 * the serial port that would be the agent's: `case NAME ok` or `case NAME FAIL why` each, `end` at last. Runs in a guest only;
 * blocks wherever it likes.
 */
#include "cgroup_guest.h"

#include "common/text.h"
#include "guest-agent/init.h"
#include "guest-agent/transport.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAUSE_MS 5
#define PAUSES 2000 /* ten seconds */
#define CASE_PAUSES 4000
#define WHY_MAX 600

static char *why; /* of the case that runs; shared with its process */

void fail(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(why, WHY_MAX, fmt, ap);
	va_end(ap);
	_exit(1);
}

bool again(int *tries)
{
	(void)poll(NULL, 0, PAUSE_MS);
	return ++*tries > PAUSES;
}

struct cgroups *open_at(const char *parent)
{
	struct cgroups *c = NULL;
	struct err e;

	if (cgroups_open(parent, &c, &e))
		fail("cgroups_open(\"%s\"): %s", parent, e.text);
	if (strcmp(cgroups_text(c), "v2") != 0)
		fail("found \"%s\", which is not version 2 alone", cgroups_text(c));
	return c;
}

struct cgroup *make(struct cgroups *c, const char *name, uint64_t memory, uint32_t pids, uint32_t percent)
{
	struct cgroup_limits limits = { .memory_bytes = memory, .pids = pids, .cpu_percent = percent };
	struct cgroup *g = NULL;
	struct err e;

	if (cgroup_make(c, name, &limits, &g, &e))
		fail("cgroup_make %s: %s", name, e.text);
	must(cgroup_dirs(g) == 1 && exists(cgroup_dir(g, 0)));
	return g;
}

void end(struct cgroup *g)
{
	struct err e = { .code = ERR_NONE };

	cgroup_kill(g);
	must_become(!cgroup_populated(g));
	if (cgroup_remove(g, &e) != 0 || exists(cgroup_dir(g, 0)))
		fail("remove %s: %s", cgroup_dir(g, 0), e.text);
	cgroup_free(g);
}

void make_dir(const char *path)
{
	if (mkdir(path, 0755) != 0)
		fail("make %s: %s", path, strerror(errno));
}

void put(const char *dir, const char *file, const char *value)
{
	struct err e;

	if (cgroup_write(dir, file, value, &e))
		fail("%s", e.text);
}

bool is(const char *dir, const char *file, const char *text)
{
	char path[CGROUP_PATH_MAX + 64], got[4096];
	size_t n = strlen(text);

	if (!text_fmt(path, sizeof path, "%s/%s", dir, file) || !cgroup_read(path, got, sizeof got) || strncmp(got, text, n) != 0)
		return false;
	return got[n] == '\0' || strcmp(got + n, "\n") == 0;
}

bool exists(const char *dir)
{
	return access(dir, F_OK) == 0;
}

void enter(const char *dir)
{
	put(dir, "cgroup.procs", "0");
}

bool stands_in(pid_t pid, const char *path)
{
	char dir[64], line[CGROUP_PATH_MAX];

	return text_fmt(dir, sizeof dir, "/proc/%d", (int)pid) && text_fmt(line, sizeof line, "0::%s", path) &&
	       is(dir, "cgroup", line);
}

void do_nothing(void)
{
	for (;;)
		pause();
}

pid_t park(const char *dir)
{
	pid_t pid = fork();
	char number[24];

	if (pid == 0)
		do_nothing();
	must(pid > 0 && text_fmt(number, sizeof number, "%d", (int)pid));
	put(dir, "cgroup.procs", number);
	return pid;
}

pid_t born_in(const struct cgroup *g, void (*body)(void))
{
	struct clone_args args = { .flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (unsigned int)cgroup_dir_fd(g) };
	long pid = syscall(SYS_clone3, &args, sizeof args);

	if (pid == 0) {
		body();
		_exit(0);
	}
	return (pid_t)pid;
}

bool died_by(pid_t child, int signal)
{
	int status = 0;

	must_become(waitpid(child, &status, WNOHANG) == child);
	return WIFSIGNALED(status) && WTERMSIG(status) == signal;
}

/* --- one case after the other ---------------------------------------------------------------------------------------------------
 */

/* Every group below `dir`, the deepest first. True when none is left. */
static bool cleared(const char *dir)
{
	DIR *d = opendir(dir);
	struct dirent *entry;
	bool all = d != NULL;

	while (d && (entry = readdir(d)) != NULL) {
		char path[CGROUP_PATH_MAX];
		struct err ignored;

		if (entry->d_type != DT_DIR || entry->d_name[0] == '.')
			continue;
		if (!text_fmt(path, sizeof path, "%s/%s", dir, entry->d_name)) {
			all = false;
			continue;
		}
		(void)!cgroup_write(path, "cgroup.kill", "1", &ignored);
		all = cleared(path) && rmdir(path) == 0 && all;
	}
	if (d)
		closedir(d);
	return all;
}

/* The processes of a case are orphans of init once it is over. */
static bool bare(void)
{
	struct err e;

	while (waitpid(-1, NULL, WNOHANG) > 0)
		continue;
	return cleared(ROOT) && cgroup_write(ROOT, "cgroup.subtree_control", "-memory -pids -cpu", &e) == 0;
}

static bool over(pid_t pid, int *status)
{
	pid_t done;

	while ((done = waitpid(-1, status, WNOHANG)) > 0)
		if (done == pid)
			return true;
	return false;
}

static void run_case(int port, const struct cgroup_case *one)
{
	char line[WHY_MAX + 200];
	int status = 0, pauses = 0;
	pid_t pid;

	why[0] = '\0';
	pid = fork();
	if (pid == 0) {
		put("/proc/self", "oom_score_adj", "0"); /* init is beyond the killer's reach, and that is inherited */
		one->run();
		_exit(0);
	}
	while (pid > 0 && pauses < CASE_PAUSES && !over(pid, &status)) {
		(void)poll(NULL, 0, PAUSE_MS);
		pauses++;
	}
	if (pauses >= CASE_PAUSES) {
		(void)kill(pid, SIGKILL);
		(void)waitpid(pid, &status, 0);
	}
	if ((pid < 0 || status != 0) && why[0] == '\0' &&
			!text_fmt(why, WHY_MAX, "ended with status %d after %d ms", status, pauses * PAUSE_MS))
		why[0] = '?';
	for (int tries = 0; !bare();)
		if (again(&tries)) {
			if (why[0] == '\0' && !text_copy(why, WHY_MAX, "its groups cannot be removed"))
				why[0] = '?';
			break;
		}
	if (!text_fmt(line, sizeof line, "case %s %s%s\n", one->name, why[0] ? "FAIL " : "ok", why) ||
			write(port, line, strlen(line)) < 0)
		init_power_off();
}

static void run_all(int port)
{
	static const struct cgroup_case *const lists[] = { place_cases, group_cases };

	for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
		for (const struct cgroup_case *one = lists[i]; one->name; one++)
			run_case(port, one);
	(void)!write(port, "end\n", 4);
}

int main(void)
{
	struct boot_options options;
	struct transport port;
	struct err e = { .code = ERR_NONE };
	int fd;

	if (getpid() != 1) {
		fputs("This is the init of a guest in a test; it cannot be started by hand.\n", stderr);
		return 2;
	}
	if (init_early(&options, &e) < 0 || init_modules(&options, &e) < 0 || transport_parse(options.channel, &port, &e) < 0 ||
			(fd = transport_open(&port, &e)) < 0) {
		fprintf(stderr, "cgroup_guest: %s\n", e.text);
		init_power_off();
	}
	why = mmap(NULL, WHY_MAX, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (why == MAP_FAILED || fcntl(fd, F_SETFL, 0) < 0 || mount("cgroup2", ROOT, "cgroup2", 0, NULL) != 0)
		fprintf(stderr, "cgroup_guest: %s\n", strerror(errno));
	else
		run_all(fd);
	init_power_off();
}
