/* Watches, kills and reaps children by pidfd (child.h). Keeper's loop; never blocks. */
#include "keeper/child.h"

#include "common/log.h"
#include "common/text.h"
#include "keeper/journal.h"

#include <errno.h>
#include <event2/event.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define DROP_WAIT_MS 500

struct child {
	struct child_ops ops;
	pid_t pid;
	int pidfd, status_fd;
	uint64_t start_time;
	struct event *exited, *status;
	char text[ERR_TEXT_MAX]; /* what the jail stage says */
	size_t text_len;
	bool told; /* on_exec was called */
};

static void destroy(struct child *c)
{
	if (c->exited)
		event_free(c->exited);
	if (c->status)
		event_free(c->status);
	if (c->status_fd >= 0)
		close(c->status_fd);
	if (c->pidfd >= 0)
		close(c->pidfd);
	free(c);
}

static void send_kill(const struct child *c)
{
	syscall(SYS_pidfd_send_signal, c->pidfd, SIGKILL, NULL, 0);
}

/* Reads the jail stage's words; at their end says whether it exec'd. */
static void read_status(struct child *c)
{
	struct err e;

	while (!c->told) {
		size_t room = sizeof(c->text) - 1 - c->text_len;
		ssize_t n = room > 0 ? read(c->status_fd, c->text + c->text_len, room) : 0;

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return;
		if (n > 0) {
			c->text_len += (size_t)n;
			continue;
		}
		c->told = true;
		event_del(c->status);
		c->text[c->text_len] = '\0';
		if (c->text_len > 0)
			err_set(&e, ERR_INTERNAL, "%s", c->text);
		c->ops.on_exec(c->ops.arg, c->text_len > 0 ? &e : NULL);
	}
}

static void on_status(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	read_status(arg);
}

static int reap(const struct child *c)
{
	siginfo_t si = { .si_pid = 0 };

	while (waitid((idtype_t)P_PIDFD, (id_t)c->pidfd, &si, WEXITED | WNOHANG) != 0)
		if (errno != EINTR)
			return CHILD_STATUS_UNKNOWN; /* ECHILD: another keeper's child */
	if (si.si_code == CLD_EXITED)
		return (si.si_status & 0xff) << 8;
	return si.si_status & 0x7f;
}

static void on_exited(evutil_socket_t fd, short what, void *arg)
{
	struct child *c = arg;
	int status = reap(c);

	(void)fd;
	(void)what;
	event_del(c->exited);
	/* It may have ended before the loop came to its words: they go first. */
	read_status(c);
	if (!c->told) {
		struct err e;

		c->told = true;
		err_set(&e, ERR_INTERNAL, "the jail stage ended without a word");
		c->ops.on_exec(c->ops.arg, &e);
	}
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS)
		log_error("killed by its system call filter pid=%d: the kernel's log has the number of the call (audit type=1326 "
			  "with this pid; "
			  "dmesg or ausearch -m SECCOMP)",
				(int)c->pid);
	c->ops.on_exit(c->ops.arg, status);
	destroy(c);
}

int child_new(struct event_base *base, const struct jail_spawned *spawned, const struct child_ops *ops, struct child **out,
		struct err *e)
{
	struct child *c = calloc(1, sizeof(*c));

	*out = NULL;
	if (!c) {
		syscall(SYS_pidfd_send_signal, spawned->pidfd, SIGKILL, NULL, 0);
		close(spawned->pidfd);
		close(spawned->status);
		return err_set(e, ERR_NOMEM, "no memory");
	}
	c->ops = *ops;
	c->pid = spawned->pid;
	c->pidfd = spawned->pidfd;
	c->status_fd = spawned->status;
	c->start_time = journal_start_time(c->pid);
	c->exited = event_new(base, c->pidfd, EV_READ | EV_PERSIST, on_exited, c);
	c->status = event_new(base, c->status_fd, EV_READ | EV_PERSIST, on_status, c);
	if (!c->exited || !c->status || event_add(c->exited, NULL) != 0 || event_add(c->status, NULL) != 0) {
		send_kill(c);
		destroy(c);
		return err_set(e, ERR_NOMEM, "no memory");
	}
	*out = c;
	return 0;
}

int child_adopt(struct event_base *base, int32_t pid, uint64_t start_time, const struct child_ops *ops, struct child **out,
		struct err *e)
{
	struct child *c = calloc(1, sizeof(*c));

	*out = NULL;
	if (!c)
		return err_set(e, ERR_NOMEM, "no memory");
	*c = (struct child){ .ops = *ops, .pid = pid, .pidfd = -1, .status_fd = -1, .start_time = start_time, .told = true };
	if (pid > 0 && start_time > 0)
		c->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	/* Checked after it was opened, so that the number cannot have changed hands in between. */
	if (c->pidfd < 0 || journal_start_time(pid) != start_time) {
		destroy(c);
		return err_set(e, ERR_NOT_FOUND, "process %d is not there any more", (int)pid);
	}
	c->exited = event_new(base, c->pidfd, EV_READ | EV_PERSIST, on_exited, c);
	if (!c->exited || event_add(c->exited, NULL) != 0) {
		destroy(c);
		return err_set(e, ERR_NOMEM, "no memory");
	}
	*out = c;
	return 0;
}

void child_leave(struct child *c)
{
	destroy(c);
}

void child_kill(struct child *c)
{
	send_kill(c);
}

void child_drop(struct child *c)
{
	struct pollfd p = { .fd = c->pidfd, .events = POLLIN };

	send_kill(c);
	if (poll(&p, 1, DROP_WAIT_MS) > 0)
		reap(c);
	destroy(c);
}

int32_t child_pid(const struct child *c)
{
	return c->pid;
}

uint64_t child_start_time(const struct child *c)
{
	return c->start_time;
}

void child_status_text(int status, char out[64])
{
	bool ok;

	if (status == CHILD_STATUS_UNKNOWN)
		ok = text_copy(out, 64, "exit status unknown to this noded");
	else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS)
		ok = text_fmt(out, 64, "signal %d, a call that its filter does not list", SIGSYS);
	else if (WIFSIGNALED(status))
		ok = text_fmt(out, 64, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
	else
		ok = text_fmt(out, 64, "exit code %d", WEXITSTATUS(status));
	(void)ok;
}
