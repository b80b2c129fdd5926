/*
 * Reaping as PID 1. Owns the signal descriptor and the one place that calls waitid. Called on the only thread; never blocks.
 */
#include "children.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

/* Reaped in one go: as many as can have ended at once. Processes that end as fast as they are reaped must not keep the agent here.
 */
#define REAP_MAX 256

static int signal_fd = -1;
static struct child_end *watched;

int children_init(struct err *e)
{
	/* Faults must still end the process: a machine whose agent is broken restarts, and its host sees that. */
	static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS };
	sigset_t blocked, child;

	sigfillset(&blocked);
	for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
		sigdelset(&blocked, faults[i]);
	if (sigprocmask(SIG_SETMASK, &blocked, NULL) < 0)
		return err_set_errno(e, "block signals");
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	signal_fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
	if (signal_fd < 0)
		return err_set_errno(e, "signalfd");
	return signal_fd;
}

void children_watch(struct child_end *end)
{
	watched = end;
}

void children_reap(void)
{
	struct signalfd_siginfo unused[8];
	siginfo_t info;

	while (read(signal_fd, unused, sizeof unused) > 0)
		continue;
	for (int i = 0; i < REAP_MAX; i++) {
		memset(&info, 0, sizeof info);
		if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG) < 0 || info.si_pid == 0)
			return;
		if (watched != NULL && info.si_pid == watched->pid) {
			watched->done = true;
			watched->has_signal = info.si_code != CLD_EXITED;
			watched->code = info.si_status;
		}
	}
	(void)kill(getpid(), SIGCHLD); /* blocked, so it makes the descriptor readable again */
}
