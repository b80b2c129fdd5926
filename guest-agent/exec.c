/*
 * Runs one job at a time: clone into a cgroup of its own, watch output, time and the channel in one poll loop, kill the group at
 * the end of the main process or at the time limit, wait until it is empty. Owns the pipes and the cgroup during the job.
 * Called on the only thread; blocks in job_run, where the channel is served all along.
 *
 *   RUNNING --main process ended, time limit, machine short of memory--> KILLED --group empty, pipes read empty--> DONE
 */
#include "exec.h"

#include "cgroup.h"
#include "children.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "confine.h"
#include "fsutil.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* From the kill to an empty group. A process in an uninterruptible wait that is longer means a broken machine. */
#define GONE_MS 30000
#define READ_CHUNK 65536
/* Reads of one pipe in one turn, so that a flood never keeps the channel waiting. */
#define READS_A_TURN 4
/* How often the machine's memory is looked at while a job runs. */
#define MEMORY_LOOK_MS 200

enum job_state { JOB_RUNNING, JOB_KILLED, JOB_DONE };

struct run {
	const struct job *job;
	struct job_end *end;
	struct cgroup group;
	struct child_end child;
	int pipes[2]; /* read ends of stdout and stderr; -1 at their end */
	enum job_state state;
	int64_t started_ms, limit_at_ms, gone_by_ms, look_at_ms;
};

/* --- the child --------------------------------------------------------------------------------------------------------------- */

static void child_fail(const struct err *e)
{
	dprintf(2, "the worker could not be started: %s\n", e->text);
	_exit(126);
}

static void child_exec(const struct job *job)
{
	static const char *const env[] = {
		"PATH=/usr/local/bin:/usr/bin:/bin",
		"HOME=" WORKER_HOME,
		"USER=" WORKER_NAME,
		"LOGNAME=" WORKER_NAME,
		"SHELL=/bin/bash",
		"LANG=C.UTF-8",
		"TERM=dumb",
		"PAGER=cat",
		NULL,
	};
	const char *const argv[] = { "bash", "-c", job->command, NULL };

	execve("/bin/bash", (char *const *)argv, (char *const *)env);
}

/*
 * Runs in the child, a copy of this process, already in its group. Never returns. The folder is entered while still root: only root
 * can change where its path leads, and a worker that took the permissions off it can put them back by its next command.
 */
static void child_main(const struct job *job, const int out[2])
{
	struct err e;
	int null = open("/dev/null", O_RDONLY);

	if (null < 0 || dup2(null, 0) < 0 || dup2(out[0], 1) < 0 || dup2(out[1], 2) < 0)
		_exit(126);
	close_range(3, ~0U, 0);
	setsid();
	if (chdir(job->cwd) < 0) {
		err_set_errno(&e, "enter %s", job->cwd);
		child_fail(&e);
	}
	if (confine_self(&e) < 0)
		child_fail(&e);
	if (job->command == NULL)
		_exit(job->inner(job->inner_arg));
	child_exec(job);
	err_set_errno(&e, "run /bin/bash");
	child_fail(&e);
}

/* --- start ------------------------------------------------------------------------------------------------------------------- */

/* An IPC namespace of its own: shared memory, queues and semaphores end with the job, like everything else that takes memory. */
static int clone_into(const struct cgroup *g)
{
	struct clone_args args = { .flags = CLONE_INTO_CGROUP | CLONE_NEWIPC, .exit_signal = SIGCHLD, .cgroup = (__u64)g->dir };

	return (int)syscall(SYS_clone3, &args, sizeof args);
}

static int start(struct run *r, struct err *e)
{
	AUTO_FD int out_r = -1, out_w = -1, err_r = -1, err_w = -1;
	int fds[2], pid;

	if (pipe2(fds, O_CLOEXEC) < 0)
		return err_set_errno(e, "make a pipe");
	out_r = fds[0], out_w = fds[1];
	if (pipe2(fds, O_CLOEXEC) < 0)
		return err_set_errno(e, "make a pipe");
	err_r = fds[0], err_w = fds[1];
	if (fcntl(out_r, F_SETFL, O_NONBLOCK) < 0 || fcntl(err_r, F_SETFL, O_NONBLOCK) < 0)
		return err_set_errno(e, "set up a pipe");
	pid = clone_into(&r->group);
	if (pid < 0)
		return err_set_errno(e, "start a process");
	if (pid == 0)
		child_main(r->job, (const int[2]){ out_w, err_w });
	r->child.pid = pid;
	children_watch(&r->child);
	r->pipes[0] = fd_steal(&out_r);
	r->pipes[1] = fd_steal(&err_r);
	r->started_ms = clock_boot_ms();
	r->limit_at_ms = r->started_ms + r->job->limit_ms;
	r->look_at_ms = r->started_ms + MEMORY_LOOK_MS;
	return 0;
}

/* --- the loop ---------------------------------------------------------------------------------------------------------------- */

static void close_pipe(int *fd)
{
	close(*fd);
	*fd = -1;
}

/* Reads a bounded part; false: the pipe is empty, or at its end. */
static bool read_pipe(struct run *r, int i)
{
	static uint8_t chunk[READ_CHUNK];

	for (int turn = 0; turn < READS_A_TURN && r->pipes[i] >= 0; turn++) {
		ssize_t n = read(r->pipes[i], chunk, sizeof chunk);

		if (n > 0) {
			r->job->on_output(r->job->ctx, i + 1, chunk, (size_t)n);
			continue;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0 || errno != EAGAIN)
			close_pipe(&r->pipes[i]);
		return false;
	}
	return r->pipes[i] >= 0;
}

/*
 * Nobody is left who could write: what the pipes hold is all. Their end is not waited for, since a descriptor of the other end can
 * outlive its processes, on its way in a ring of sockets.
 */
static void drain_pipes(struct run *r)
{
	for (int i = 0; i < 2; i++)
		while (read_pipe(r, i))
			continue;
}

static void kill_group(struct run *r, int64_t now)
{
	r->end->duration_ms = (uint32_t)(now - r->started_ms);
	r->gone_by_ms = now + GONE_MS;
	r->state = JOB_KILLED;
	cgroup_kill(&r->group);
}

/*
 * What the kernel keeps for processes without counting it against their group (file locks, sockets, terminals, ...) can use up the
 * machine, the agent's part included. It goes with the processes, so they end before that.
 */
static bool machine_is_short(struct run *r, int64_t now)
{
	if (now < r->look_at_ms)
		return false;
	r->look_at_ms = now + MEMORY_LOOK_MS;
	return cgroup_machine_short();
}

/* Decides the next state from what was seen. */
static int advance(struct run *r, struct err *e)
{
	int64_t now = clock_boot_ms();

	if (r->state == JOB_RUNNING && r->child.done) {
		kill_group(r, now);
	} else if (r->state == JOB_RUNNING && machine_is_short(r, now)) {
		r->end->out_of_memory = true;
		kill_group(r, now);
	} else if (r->state == JOB_RUNNING && now >= r->limit_at_ms) {
		r->end->timed_out = true;
		kill_group(r, now);
	}
	if (r->state != JOB_KILLED)
		return 0;
	if (r->child.done && !cgroup_populated(&r->group)) {
		drain_pipes(r);
		r->state = JOB_DONE;
	} else if (now >= r->gone_by_ms) {
		return err_set(e, ERR_INTERNAL, "processes of a command outlived their kill by %d ms", GONE_MS);
	}
	return 0;
}

static int poll_timeout(const struct run *r, int64_t tick_at)
{
	int64_t now = clock_boot_ms();
	int64_t until = r->state == JOB_RUNNING ? r->limit_at_ms : r->gone_by_ms;

	if (r->state == JOB_RUNNING && r->look_at_ms < until)
		until = r->look_at_ms;
	if (tick_at >= 0 && tick_at < until)
		until = tick_at;
	if (until <= now)
		return 0;
	return until - now > 60000 ? 60000 : (int)(until - now);
}

static int turn(struct run *r, struct channel *ch, int sigchld_fd, struct err *e)
{
	int64_t tick_at = r->job->on_tick != NULL ? r->job->on_tick(r->job->ctx, clock_boot_ms()) : -1;
	struct pollfd p[5] = {
		channel_pollfd(ch),
		{ .fd = sigchld_fd, .events = POLLIN },
		{ .fd = r->pipes[0], .events = POLLIN },
		{ .fd = r->pipes[1], .events = POLLIN },
		/* always says POLLERR when it changed; only asked once the kill was ordered */
		{ .fd = r->state == JOB_KILLED ? r->group.events : -1, .events = POLLPRI },
	};

	if (poll(p, sizeof p / sizeof p[0], poll_timeout(r, tick_at)) < 0 && errno != EINTR)
		return err_set_errno(e, "poll");
	if (channel_serve(ch, p[0].revents, e) < 0)
		return -1;
	for (int i = 0; i < 2; i++)
		if (p[2 + i].revents != 0)
			read_pipe(r, i);
	if (p[1].revents != 0)
		children_reap();
	return advance(r, e);
}

/* Descriptors that were sent over a socket which is itself on its way stay open until the kernel looks for such; a close makes it.
 */
static void collect_in_flight(void)
{
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd >= 0)
		close(fd);
}

static void close_run(struct run *r)
{
	children_reap();
	children_watch(NULL);
	for (int i = 0; i < 2; i++)
		fd_cleanup(&r->pipes[i]);
	collect_in_flight();
	cgroup_close(&r->group);
}

int job_run(struct channel *ch, int sigchld_fd, const struct job *job, struct job_end *end, struct err *e)
{
	struct run r = { .job = job, .end = end, .pipes = { -1, -1 }, .state = JOB_RUNNING };
	long oom_before = cgroup_oom_kills();
	int rc = 0;

	*end = (struct job_end){ .timed_out = false };
	if (cgroup_open(&r.group, &end->why) < 0)
		return 0;
	if (start(&r, &end->why) < 0) {
		close_run(&r);
		return 0;
	}
	end->started = true;
	while (rc == 0 && r.state != JOB_DONE)
		rc = turn(&r, ch, sigchld_fd, e);
	if (rc < 0)
		cgroup_kill(&r.group);
	end->has_signal = r.child.has_signal;
	end->code = r.child.code;
	end->out_of_memory = end->out_of_memory || cgroup_oom_kills() > oom_before;
	close_run(&r);
	return rc;
}
