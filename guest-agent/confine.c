/*
 * Drops everything the agent may do, in the child, in the order in which each step is still allowed. Owns nothing.
 */
#include "confine.h"

#include "fsutil.h"
#include "seccomp.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int drop_capabilities(struct err *e)
{
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3, .pid = 0 };
	struct __user_cap_data_struct none[2] = { { 0 } };

	if (syscall(SYS_capset, &head, none) < 0)
		return err_set_errno(e, "drop capabilities");
	return 0;
}

static int set_limits(struct err *e)
{
	/* Processes and memory are bounded by the cgroup, disk by the writable layer. */
	static const struct {
		__rlimit_resource_t what;
		struct rlimit value;
	} limits[] = {
		{ RLIMIT_CORE, { 0, 0 } },
		{ RLIMIT_NOFILE, { 1024, 4096 } },
		{ RLIMIT_MEMLOCK, { 1 << 20, 1 << 20 } },
		{ RLIMIT_MSGQUEUE, { 65536, 65536 } },
		{ RLIMIT_SIGPENDING, { 256, 256 } },
		{ RLIMIT_NICE, { 0, 0 } },
		{ RLIMIT_RTPRIO, { 0, 0 } },
	};

	for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
		if (setrlimit(limits[i].what, &limits[i].value) < 0)
			return err_set_errno(e, "set resource limit %d", (int)limits[i].what);
	return 0;
}

static void reset_signals(void)
{
	sigset_t none;

	for (int s = 1; s < NSIG; s++)
		signal(s, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

int confine_self(struct err *e)
{
	reset_signals();
	umask(022);
	/* While still root, so that the worker cannot go below 0 again. */
	if (fs_write(AT_FDCWD, "/proc/self/oom_score_adj", "0", e) < 0 || set_limits(e) < 0)
		return -1;
	for (int cap = 0; prctl(PR_CAPBSET_READ, cap) >= 0; cap++)
		if (prctl(PR_CAPBSET_DROP, cap) < 0)
			return err_set_errno(e, "drop capability %d from the bounding set", cap);
	if (setgroups(0, NULL) < 0 || setresgid(WORKER_UID, WORKER_UID, WORKER_UID) < 0 ||
			setresuid(WORKER_UID, WORKER_UID, WORKER_UID) < 0)
		return err_set_errno(e, "become user %s", WORKER_NAME);
	if (drop_capabilities(e) < 0)
		return -1;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return err_set_errno(e, "set no_new_privs");
	return seccomp_install(e);
}
