/*
 * clone3 into cgroup and namespaces, then exec of ourselves as the jail stage (spawn.h). Between clone and exec the child only
 * makes plain system calls: keeper has one thread, but its memory is not the child's to use.
 */
#include "jail/spawn.h"

#include "jail/sealed.h"

#include "roles.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SLOTS (JAIL_FDS_MAX + 2) /* job, status, and what the process gets */

static int make_job_fd(struct jail_job *job, struct err *e)
{
	struct buf b = BUF_INIT(JAIL_JOB_MAX);
	int fd;

	jail_job_encode(job, &b);
	fd = sealed_file("job", &b, e);
	buf_free(&b);
	return fd;
}

/* In the child. Never returns. */
static void child(const int *fds, int count, int status, char *const argv[], char *const envp[])
{
	static const char failed[] = "start the jail stage: exec of noded failed";
	int parked[SLOTS] = { 0 };
	sigset_t none;

	/* First out of the way of the numbers that they are to get, then onto them. */
	for (int i = 0; i < count; i++) {
		parked[i] = fcntl(fds[i], F_DUPFD, JAIL_FD_JOB + SLOTS);
		if (parked[i] < 0)
			goto fail;
	}
	status = parked[1];
	for (int i = 0; i < count; i++)
		if (dup2(parked[i], JAIL_FD_JOB + i) < 0)
			goto fail;
	if (dup2(2, 1) < 0 || syscall(SYS_close_range, JAIL_FD_JOB + (unsigned int)count, ~0U, 0) != 0)
		goto fail;
	status = JAIL_FD_STATUS;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	execve("/proc/self/exe", argv, envp);
fail:
	if (write(status, failed, sizeof(failed) - 1) < 0)
		_exit(126);
	_exit(125);
}

static long clone_child(uint64_t flags, int cgroup_fd, int *pidfd)
{
	struct clone_args args = { .exit_signal = SIGCHLD };

	args.flags = flags | (unsigned int)CLONE_PIDFD;
	args.pidfd = (uintptr_t)pidfd;
	if (cgroup_fd >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (unsigned int)cgroup_fd;
	}
	return syscall(SYS_clone3, &args, sizeof(args));
}

static uint64_t namespaces(const struct jail_job *job, enum jail_net net)
{
	if (!job->confined)
		return 0;
	return (unsigned int)(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS |
			      (net == JAIL_NET_EMPTY ? CLONE_NEWNET : 0));
}

int jail_spawn(struct jail_job *job, enum jail_net net, int cgroup_fd, const int *fds, size_t fd_count, struct jail_spawned *out,
		struct err *e)
{
	static char *argv[] = { (char *)"noded", (char *)"--role", (char *)"jail", NULL };
	char **envp = job->env;
	static char *no_env[] = { NULL };
	int all[SLOTS], pipes[2] = { -1, -1 };
	long pid;

	if (fd_count > JAIL_FDS_MAX)
		return err_set(e, ERR_INTERNAL, "too many descriptors");
	job->fd_count = (uint32_t)fd_count;
	all[0] = make_job_fd(job, e);
	if (all[0] < 0)
		return -1;
	if (pipe2(pipes, O_CLOEXEC) != 0) {
		err_set_errno(e, "pipe");
		goto fail;
	}
	if (fcntl(pipes[0], F_SETFL, O_NONBLOCK) != 0) {
		err_set_errno(e, "pipe");
		goto fail;
	}
	all[1] = pipes[1];
	for (size_t i = 0; i < fd_count; i++)
		all[2 + i] = fds[i];
	out->pidfd = -1;
	pid = clone_child(namespaces(job, net), cgroup_fd, &out->pidfd);
	if (pid == 0)
		child(all, (int)fd_count + 2, pipes[1], argv, envp ? envp : no_env);
	if (pid < 0) {
		err_set_errno(e, "clone3 of %s", job->name);
		goto fail;
	}
	close(pipes[1]);
	close(all[0]);
	out->pid = (pid_t)pid;
	out->status = pipes[0];
	return 0;
fail:
	close(all[0]);
	if (pipes[0] >= 0) {
		close(pipes[0]);
		close(pipes[1]);
	}
	return -1;
}
