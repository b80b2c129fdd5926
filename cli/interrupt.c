/* Ctrl-C by a self-pipe. Used by the verbs that follow a run; owns the pipe for the life of the process. */
#include "interrupt.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

static int pipe_fds[2] = { -1, -1 };
static volatile sig_atomic_t seen;

static void on_signal(int number)
{
	int saved = errno;
	ssize_t written;

	if (seen)
		_exit(128 + number);
	seen = 1;
	written = write(pipe_fds[1], "x", 1); /* a full pipe is readable anyway */
	(void)written;
	errno = saved;
}

void interrupt_install(void)
{
	struct sigaction action = { .sa_handler = on_signal };

	if (pipe_fds[0] >= 0 || pipe2(pipe_fds, O_CLOEXEC | O_NONBLOCK) != 0)
		return; /* without the pipe Ctrl-C ends us, as it does by default */
	sigemptyset(&action.sa_mask);
	(void)sigaction(SIGINT, &action, NULL);
	(void)sigaction(SIGTERM, &action, NULL);
	(void)sigaction(SIGHUP, &action, NULL);
}

bool interrupt_seen(void)
{
	return seen != 0;
}

int interrupt_fd(void)
{
	return pipe_fds[0];
}

bool interrupt_sleep_ms(int64_t ms)
{
	struct pollfd p = { .fd = pipe_fds[0], .events = POLLIN };

	if (!seen && ms > 0)
		(void)poll(&p, 1, ms > 3600000 ? 3600000 : (int)ms);
	return !seen;
}
