/*
 * What this host must have before a VM may start here, checked in the order in which an operator would mend it (host.h). Called
 * once at start and by -t, before the loop runs; blocks for up to a second.
 */
#include "keeper/host_internal.h"

#include "common/log.h"
#include "common/text.h"
#include "jail/landlock.h"
#include "jail/seccomp.h"
#include "keeper/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BOOT_MS_KVM 10000
#define BOOT_MS_EMULATED 30000
#define HOST_RESERVE_MIB 1024 /* left to everything that is not a VM */

static int check_root(const struct noded_config *c, struct host *h, struct err *e)
{
	(void)c;
	(void)h;
	if (geteuid() != 0)
		return err_set(e, ERR_DENIED,
				"noded must be started as root: it makes namespaces and user ids for VMs, and drops root in all "
				"else");
	return 0;
}

static int read_boot_id(const struct noded_config *c, struct host *h, struct err *e)
{
	(void)c;
	return journal_boot_id(h->boot_id, e);
}

/* Tries the namespaces in a child, so that what they change ends with it. */
static int check_namespaces(const struct noded_config *c, struct host *h, struct err *e)
{
	const int flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWCGROUP;
	int status;
	pid_t pid;

	(void)h;
	if (c->insecure_no_jail)
		return 0;
	pid = fork();
	if (pid < 0)
		return err_set_errno(e, "fork");
	if (pid == 0)
		_exit(unshare(flags) == 0 ? 0 : (errno & 0x7f) | 0x80);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return err_set_errno(e, "wait");
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
		return 0;
	errno = WIFEXITED(status) ? WEXITSTATUS(status) & 0x7f : EINVAL;
	return err_set_errno(e,
			"namespaces cannot be made here (in a container run it privileged; insecure_no_jail = true goes without)");
}

static int find_binary(const char *key, const char *name, char *out, size_t size, struct err *e)
{
	const char *path = getenv("PATH");

	if (strchr(name, '/')) {
		if (name[0] != '/' || strstr(name, "/../") != NULL)
			return err_set(e, ERR_INVALID, "%s = %s must be an absolute path without .. or a plain name", key, name);
		return text_copy(out, size, name) ? 0 : err_set(e, ERR_LIMIT, "%s is too long", key);
	}
	if (!path || !*path)
		path = "/usr/local/bin:/usr/bin:/bin";
	while (*path) {
		size_t n = strcspn(path, ":");

		if (n > 0 && path[0] == '/' && text_fmt(out, size, "%.*s/%s", (int)n, path, name) && access(out, X_OK) == 0)
			return 0;
		path += n + (path[n] == ':');
	}
	return err_set(e, ERR_NOT_FOUND, "%s was not found in PATH: install it (for QEMU: qemu-system-x86), or set %s to its path",
			name, key);
}

/* Proves at start, and not at the first run, that a broker can be kept from connecting. */
static int check_filters(const struct noded_config *c, struct host *h, struct err *e)
{
	static const struct egress_rules none = { .global = false };
	static const struct cgroup_limits limits = { .pids = 1 };
	struct cgroup *g = NULL;
	char name[CGROUP_NAME_MAX];
	int rc;

	if (seccomp_check_host(e))
		return -1;
	/* Without groups the step before has failed, and only doctor comes here. */
	if (c->insecure_no_jail || !h->cgroups)
		return 0;
	if (egress_open(&h->egress, e))
		return -1;
	if (!text_fmt(name, sizeof(name), "ephemeral-filter-%d", (int)getpid()))
		return err_set(e, ERR_INTERNAL, "name");
	if (cgroup_make(h->cgroups, name, &limits, &g, e))
		return -1;
	rc = egress_attach(h->egress, cgroup_dir_fd(g), &none, e);
	if (cgroup_remove(g, &(struct err){ .code = ERR_NONE }) != 0)
		log_warn("cgroup of the start check stays behind name=%s", name);
	cgroup_free(g);
	return rc;
}

/* The node may be there without anything behind it, so a VM with a CPU is made. */
static bool kvm_works(int fd)
{
	int vm = ioctl(fd, KVM_GET_API_VERSION, 0) == KVM_API_VERSION ? ioctl(fd, KVM_CREATE_VM, 0) : -1;
	int vcpu = vm >= 0 ? ioctl(vm, KVM_CREATE_VCPU, 0) : -1;

	if (vcpu >= 0)
		close(vcpu);
	if (vm >= 0)
		close(vm);
	return vcpu >= 0;
}

bool host_cpu_has(const char *flag)
{
	char text[8192], word[32], *flags;
	int fd = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 2);

	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = '\0';
	flags = strstr(text, "\nflags");
	if (!flags || !text_fmt(word, sizeof(word), " %s ", flag))
		return false;
	n = (ssize_t)strcspn(flags + 1, "\n");
	flags[1 + n] = ' '; /* the last flag ends as the others do */
	flags[2 + n] = '\0';
	return strstr(flags, word) != NULL;
}

/* There are hosts with a KVM in software alone, which makes VMs that no usual kernel boots in. */
static bool cpu_virtualizes(void)
{
	return host_cpu_has("vmx") || host_cpu_has("svm");
}

/* Finds KVM, and who may open it where the VMM sees the host's own node. */
static bool find_kvm(const struct noded_config *c, struct host *h)
{
	struct stat st;
	int fd = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	bool works = fd >= 0 && cpu_virtualizes() && kvm_works(fd);

	if (works && fstat(fd, &st) == 0 && (st.st_mode & S_IWOTH) == 0) {
		if (st.st_mode & S_IWGRP)
			h->vmm.kvm_gid = st.st_gid;
		works = !c->insecure_no_jail || h->vmm.kvm_gid != 0;
	}
	if (fd >= 0)
		close(fd);
	return works;
}

/* Decides between KVM and emulation. */
static int choose_isolation(const struct noded_config *c, struct host *h, struct err *e)
{
	if (c->kvm != KVM_OFF && c->isolation != ISOLATION_EMULATED && find_kvm(c, h)) {
		h->vmm.kvm = true;
		h->isolation = "kvm";
		return 0;
	}
	if (c->isolation == ISOLATION_KVM)
		return err_set(e, ERR_NOT_FOUND,
				"isolation = kvm, but this host has no KVM that boots a guest: enable virtualization (vmx or svm) "
				"on it");
	if (c->emulation != EMULATION_ALLOW)
		return err_set(e, ERR_NOT_FOUND,
				"KVM %s; enable virtualization (vmx or svm) on this host, or set emulation = allow to run VMs "
				"emulated (slow, not "
				"isolation class kvm)",
				c->kvm == KVM_OFF ? "is not used (kvm = off)" : "cannot boot a guest here");
	h->isolation = "emulated";
	h->vmm.tsc_khz = vmm_measure_tsc_khz();
	if (h->vmm.tsc_khz == 0)
		return err_set(e, ERR_INVALID,
				"the time stamp counter of this host cannot be measured, and emulated VMs do not boot without");
	return 0;
}

static int open_cgroups(const struct noded_config *c, struct host *h, struct err *e)
{
	return cgroups_open(c->cgroup_parent, &h->cgroups, e);
}

static int use_qemu(const struct noded_config *c, struct host *h, struct err *e)
{
	h->driver = &vmm_qemu;
	return find_binary("qemu", c->qemu, h->binary, sizeof(h->binary), e) ? -1 : h->driver->probe(&h->vmm, e);
}

static int use_cloud_hypervisor(const struct noded_config *c, struct host *h, struct err *e)
{
	h->driver = &vmm_cloud_hypervisor;
	return find_binary("cloud_hypervisor", c->cloud_hypervisor, h->binary, sizeof(h->binary), e) ? -1
												     : h->driver->probe(&h->vmm, e);
}

/* Without KVM it boots nothing, so it is never chosen there; asked for, it may be a stand-in that knows how. */
static int find_vmm(const struct noded_config *c, struct host *h, struct err *e)
{
	bool kvm = c->kvm != KVM_OFF && c->isolation != ISOLATION_EMULATED && find_kvm(c, h);

	h->vmm.files = c->vmm_files;
	h->vmm.overhead_mib = (uint32_t)c->vmm_overhead_mib;
	if (c->vmm == CONFIG_VMM_QEMU)
		return use_qemu(c, h, e);
	if (c->vmm == CONFIG_VMM_AUTO) {
		if (!kvm || c->insecure_no_jail ||
				find_binary("cloud_hypervisor", c->cloud_hypervisor, h->binary, sizeof(h->binary), e))
			return use_qemu(c, h, e);
		if (use_cloud_hypervisor(c, h, e) == 0)
			return 0;
		log_warn("Cloud Hypervisor is here and not used, QEMU is: error=\"%s\"", e->text);
		return use_qemu(c, h, e);
	}
	if (!kvm && c->emulation != EMULATION_ALLOW)
		return err_set(e, ERR_NOT_FOUND,
				"vmm = cloud-hypervisor, which needs KVM, and KVM cannot boot a guest here; enable virtualization "
				"(vmx or "
				"svm) on this host, or set vmm = qemu with emulation = allow");
	if (!kvm)
		log_warn("vmm = cloud-hypervisor without KVM: the real one boots no guest so, and nothing here is isolation");
	return use_cloud_hypervisor(c, h, e);
}

static int open_image(const struct noded_config *c, struct host *h, struct err *e)
{
	if (c->image_dir && *c->image_dir)
		return host_open_image(h, c->image_dir, e);
	host_open_stored_image(h, c->state_dir);
	return 0;
}

static int count_host(const struct noded_config *c, struct host *h, struct err *e)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	char text[4096];
	const char *line;
	uint64_t kib = 0;
	int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = '\0';
	line = strstr(text, "MemAvailable:");
	if (line)
		kib = strtoull(line + strlen("MemAvailable:"), NULL, 10);
	h->cpus = cpus > 0 ? (uint32_t)cpus : 1;
	h->memory_mib = kib / 1024 > HOST_RESERVE_MIB ? (uint32_t)(kib / 1024 - HOST_RESERVE_MIB) : 0;
	if (h->memory_mib == 0 && c->memory_mib == 0)
		return err_set(e, ERR_LIMIT, "less than %d MiB of memory are available; free some, or set memory_mib",
				HOST_RESERVE_MIB);
	return 0;
}

const struct host_step host_steps[] = {
	{ "root", check_root, "start noded as root" },
	{ "boot id", read_boot_id, "mount /proc" },
	{ "namespaces", check_namespaces,
			"allow them (sysctl user.max_*_namespaces), or give the container that noded runs in all privileges" },
	{ "cgroups", open_cgroups,
			"mount cgroup2, delegate memory, pids and cpu to noded's group (systemd: Delegate=yes), or set "
			"cgroup_parent" },
	{ "filters", check_filters,
			"use a kernel with CONFIG_SECCOMP_FILTER and CONFIG_CGROUP_BPF; in a container run it privileged; "
			"insecure_no_jail = "
			"true goes without the connect filter" },
	{ "vmm", find_vmm,
			"install cloud-hypervisor (where KVM is) or qemu-system-x86, or set cloud_hypervisor or qemu to the path "
			"of one that is new "
			"enough" },
	{ "isolation", choose_isolation,
			"enable virtualization in the firmware (in a VM: nested virtualization of its host), load kvm_intel or "
			"kvm_amd, "
			"or set emulation = allow" },
	{ "image", open_image, "make it anew with deploy/guest-image/build and pack, or set image_dir" },
	{ "memory", count_host, "free memory, or set memory_mib" },
};
const size_t host_step_count = sizeof(host_steps) / sizeof(host_steps[0]);

void host_init(const struct noded_config *c, struct host *h)
{
	*h = (struct host){ .driver = &vmm_qemu };
	h->vmm.binary = h->binary;
	for (int i = 0; i < IMAGE_FILES; i++)
		h->image_fd[i] = -1;
	h->jail = c->insecure_no_jail ? "none: insecure_no_jail" : landlock_abi() > 0 ? "full" : "full, without landlock";
}

int host_open(const struct noded_config *c, struct host *h, struct err *e)
{
	host_init(c, h);
	for (size_t i = 0; i < host_step_count; i++)
		if (host_steps[i].check(c, h, e)) {
			host_close(h);
			return -1;
		}
	h->boot_timeout_ms = c->boot_timeout_ms > 0 ? c->boot_timeout_ms : h->vmm.kvm ? BOOT_MS_KVM : BOOT_MS_EMULATED;
	return 0;
}

void host_close(struct host *h)
{
	egress_free(h->egress);
	h->egress = NULL;
	cgroups_free(h->cgroups);
	h->cgroups = NULL;
	host_drop_image(h);
}
