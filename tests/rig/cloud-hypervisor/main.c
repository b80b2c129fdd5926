/*
 * A stand-in for Cloud Hypervisor v53.0, for tests on hosts without KVM: the same command line, API, events, exit statuses and
 * files, with a QEMU microvm behind it. README.md says what is real and what is not.
 *
 * One process, one thread, one poll loop; a call of the API may block it while QEMU answers. QEMU is a child that dies with it.
 */
#include "api.h"
#include "args.h"
#include "events.h"
#include "faults.h"
#include "http.h"
#include "vm.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#define FDS_MAX (1 + HTTP_CONNECTIONS_MAX + 1 + VM_FDS)
#define TICK_MS 100 /* for the fault that reboots */

static int fail(const char *what, const struct err *e)
{
	fprintf(stderr, "cloud-hypervisor: %s: %s\n", what, e->text);
	return 1;
}

/* SIGTERM and SIGINT end it with status 0. */
static int open_signals(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* Until something ends it; returns the exit status. */
static int loop(int signals)
{
	int status = 0;

	while (!api_shutdown_asked()) {
		struct pollfd fds[FDS_MAX] = { { .fd = signals, .events = POLLIN } };
		size_t api = http_poll(fds + 1), vm_count = vm_poll(fds + 1 + api);

		if (poll(fds, 1 + api + vm_count, fault("reboot-after-ms") ? TICK_MS : -1) < 0 && errno != EINTR)
			return 1;
		if (fds[0].revents != 0)
			return 0;
		/* The machine first: a call may replace it. */
		if (vm_ready(fds + 1 + api, vm_count, &status))
			return status;
		http_ready(fds + 1, api);
	}
	return status;
}

static int log_to(const char *path, struct err *e)
{
	int fd = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : 2;

	if (fd < 0)
		return err_set_errno(e, "%s", path);
	if (fd != 2) {
		dup2(fd, 2);
		close(fd);
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct args args;
	struct err e;
	int status, signals;

	faults_load();
	status = args_parse(argc, argv, api_version(), &args);
	if (status >= 0)
		return status;
	umask(077);
	signal(SIGPIPE, SIG_IGN);
	signals = open_signals();
	if (log_to(args.log_file, &e))
		return fail("log", &e);
	if (events_open(args.event_path, args.event_fd, &e))
		return fail("event monitor", &e);
	event_say("vmm", "starting", NULL, NULL);
	if (http_open(args.api_path, args.api_fd, api_handle, NULL, &e))
		return fail("API", &e);
	status = loop(signals);
	vm_end();
	event_say("vmm", "shutdown", NULL, NULL);
	if (status == 0)
		http_close();
	return status;
}
