/*
 * `noded doctor` on what the kernel offers: KVM, killing by group, seccomp, Landlock, limits and settings. What has to be tried is
 * tried in a child, so that nothing of it stays with this process.
 */
#include "doctor/doctor_internal.h"

#include "common/clock.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define KILL_MS 2000
#define PIDS_OF_A_VM 100       /* threads of its VMM, broker and channel, with room */
#define DESCRIPTORS_OF_A_VM 24 /* that keeper has open */
#define DESCRIPTORS_OF_KEEPER 256
#define SYS_LANDLOCK_CREATE_RULESET 444
#define LANDLOCK_VERSION_FLAG 1

/* The number that a file of /proc holds; -1 where there is none, INT64_MAX for "max". */
static int64_t read_number(const char *path)
{
	char text[64], *end;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	int64_t value;

	if (fd >= 0)
		close(fd);
	if (n <= 0)
		return -1;
	text[n] = '\0';
	if (strncmp(text, "max", 3) == 0)
		return INT64_MAX;
	value = strtoll(text, &end, 10);
	return end == text ? -1 : value;
}

static void look_at_kvm(struct doctor *d)
{
	bool cpu = host_cpu_has("vmx") || host_cpu_has("svm"), nested = host_cpu_has("hypervisor");
	int fd;

	if (d->config->kvm == KVM_OFF) {
		doctor_say(d, "kvm", FINDING_WARN, "set kvm = auto", "not used: kvm = off");
		return;
	}
	if (!cpu) {
		doctor_say(d, "kvm", FINDING_WARN,
				nested ? "this host is a VM itself: turn on nested virtualization where it is defined, or use "
					 "another host"
				       : "turn on virtualization (VT-x, AMD-V) in the firmware",
				"the CPU offers neither vmx nor svm%s", nested ? " (it is a VM's)" : "");
		return;
	}
	fd = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	if (fd < 0) {
		doctor_say(d, "kvm", FINDING_WARN,
				errno == ENOENT ? "load kvm_intel or kvm_amd (modprobe); in a container pass the device /dev/kvm"
						: "let noded open it: in a container, allow the device",
				"/dev/kvm: %s", strerror(errno));
		return;
	}
	close(fd);
	doctor_say(d, "kvm", FINDING_OK, NULL, "/dev/kvm opens, the CPU has %s%s", host_cpu_has("vmx") ? "vmx" : "svm",
			nested ? ", nested in another hypervisor" : "");
}

/* --- killing by group ----------------------------------------------------------------------------------------------------------
 */

static bool ended_within(int pidfd, int ms)
{
	struct pollfd p = { .fd = pidfd, .events = POLLIN };

	return poll(&p, 1, ms) == 1;
}

static int kill_in(struct cgroup *g, struct err *e)
{
	pid_t pid = fork();
	char path[CGROUP_PATH_MAX + 32], number[16];
	int pidfd, fd, status, rc = 0;

	if (pid < 0)
		return err_set_errno(e, "fork");
	if (pid == 0) {
		for (;;)
			pause();
	}
	pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (!text_fmt(path, sizeof(path), "%s/cgroup.procs", cgroup_dir(g, 0)) ||
			!text_fmt(number, sizeof(number), "%d", (int)pid)) {
		rc = err_set(e, ERR_LIMIT, "the group's path is too long");
	} else {
		fd = open(path, O_WRONLY | O_CLOEXEC);
		if (fd < 0 || write(fd, number, strlen(number)) < 0)
			rc = err_set_errno(e, "%s", path);
		if (fd >= 0)
			close(fd);
	}
	if (rc == 0) {
		cgroup_kill(g);
		if (pidfd < 0 || !ended_within(pidfd, KILL_MS))
			rc = err_set(e, ERR_INTERNAL, "a process outlived its group's cgroup.kill by %d ms", KILL_MS);
	}
	kill(pid, SIGKILL);
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		continue;
	if (pidfd >= 0)
		close(pidfd);
	return rc;
}

static void look_at_kill(struct doctor *d)
{
	const struct cgroup_limits limits = { .memory_bytes = UINT64_C(64) << 20, .pids = 16 };
	int64_t deadline = clock_boot_ms() + KILL_MS;
	struct err e = { .code = ERR_INTERNAL };
	struct cgroup *g = NULL;
	char name[CGROUP_NAME_MAX];
	int rc;

	if (!d->host.cgroups || !text_fmt(name, sizeof(name), "ephemeral-doctor-%d", (int)getpid()))
		return; /* said already */
	rc = cgroup_make(d->host.cgroups, name, &limits, &g, &e);
	if (rc == 0)
		rc = kill_in(g, &e);
	if (rc == 0)
		doctor_say(d, "kill", FINDING_OK, NULL, "a group's processes end at once with cgroup.kill");
	else
		doctor_say(d, "kill", FINDING_FAIL, "use Linux 5.14 or newer with cgroup2 mounted", "%s", e.text);
	while (g && cgroup_remove(g, &e) == 1 && clock_boot_ms() < deadline)
		poll(NULL, 0, 2);
	cgroup_free(g);
}

/* --- confinement ---------------------------------------------------------------------------------------------------------------
 */

/* In a child: a filter that allows everything. */
static int try_seccomp(void)
{
	struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { .len = 1, .filter = &allow };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		return errno;
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0 ? 0 : errno;
}

static void look_at_seccomp(struct doctor *d)
{
	int status = 0;
	pid_t pid = fork();

	if (pid == 0)
		_exit(try_seccomp() & 0x7f);
	while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
		continue;
	if (pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0)
		doctor_say(d, "seccomp", FINDING_OK, NULL, "filters can be installed");
	else
		doctor_say(d, "seccomp", FINDING_FAIL, "use a kernel with CONFIG_SECCOMP_FILTER; in a container allow seccomp(2)",
				"a filter cannot be installed: %s",
				pid < 0 ? "no process for it" : strerror(WIFEXITED(status) ? WEXITSTATUS(status) : EINVAL));
}

static void look_at_landlock(struct doctor *d)
{
	long abi = syscall(SYS_LANDLOCK_CREATE_RULESET, NULL, 0, LANDLOCK_VERSION_FLAG);

	if (abi > 0)
		doctor_say(d, "landlock", FINDING_OK, NULL, "ABI %ld", abi);
	else
		doctor_say(d, "landlock", FINDING_WARN, "start Linux 5.13 or newer with landlock in lsm= to have one more wall",
				"%s: VMs are held by the other walls alone",
				errno == EOPNOTSUPP ? "built into the kernel and turned off" : "this kernel has none");
}

/* --- limits and settings -------------------------------------------------------------------------------------------------------
 */

static void look_at_pids(struct doctor *d)
{
	int64_t want = d->config->max_vms * PIDS_OF_A_VM, have = read_number("/proc/sys/kernel/pid_max"),
		threads = read_number("/proc/sys/kernel/threads-max");

	if (threads >= 0 && threads < have)
		have = threads;
	if (have < want)
		doctor_say(d, "processes", FINDING_WARN, "raise sysctl kernel.pid_max and kernel.threads-max, or lower max_vms",
				"the host has %" PRId64 ", %" PRId64 " VMs at once may need %" PRId64, have, d->config->max_vms,
				want);
	else
		doctor_say(d, "processes", FINDING_OK, NULL, "enough for %" PRId64 " VMs at once", d->config->max_vms);
}

static void look_at_descriptors(struct doctor *d)
{
	rlim_t want = (rlim_t)d->config->max_vms * DESCRIPTORS_OF_A_VM + DESCRIPTORS_OF_KEEPER;
	struct rlimit r = { 0, 0 };

	(void)getrlimit(RLIMIT_NOFILE, &r);
	if (r.rlim_max < want)
		doctor_say(d, "descriptors", FINDING_FAIL, "raise the hard limit (systemd: LimitNOFILE=), or lower max_vms",
				"a process may have %" PRIu64 ", %" PRId64 " VMs at once need %" PRIu64, (uint64_t)r.rlim_max,
				d->config->max_vms, (uint64_t)want);
	else
		doctor_say(d, "descriptors", FINDING_OK, NULL, "enough for %" PRId64 " VMs at once", d->config->max_vms);
}

static void look_at_settings(struct doctor *d)
{
	static const char *const kinds[] = { "mnt", "net", "ipc", "uts", "pid", "cgroup" };
	size_t low = 0;

	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		char path[64];
		int64_t max = text_fmt(path, sizeof(path), "/proc/sys/user/max_%s_namespaces", kinds[i]) ? read_number(path) : -1;

		/* Each of a VM's three processes is born in namespaces of its own, and link is. */
		if (max >= 0 && max < 3 * d->config->max_vms + 1) {
			doctor_say(d, "sysctl", FINDING_FAIL, "raise it, or lower max_vms",
					"user.max_%s_namespaces = %" PRId64 ", %" PRId64 " VMs at once need %" PRId64, kinds[i],
					max, d->config->max_vms, 3 * d->config->max_vms + 1);
			low++;
		}
	}
	if (read_number("/proc/sys/vm/overcommit_memory") == 2) {
		doctor_say(d, "sysctl", FINDING_WARN, "set vm.overcommit_memory = 0 and let memory_mib bound the VMs",
				"vm.overcommit_memory = 2: VMs fail to start before the memory is used up");
		low++;
	}
	if (low == 0)
		doctor_say(d, "sysctl", FINDING_OK, NULL, "no setting stands in the way");
}

void doctor_look_at_kernel(struct doctor *d)
{
	look_at_kvm(d);
	look_at_kill(d);
	look_at_seccomp(d);
	look_at_landlock(d);
	look_at_pids(d);
	look_at_descriptors(d);
	look_at_settings(d);
}
