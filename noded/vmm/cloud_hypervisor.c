/*
 * The Cloud Hypervisor driver: one process a VM, controlled over its API by channel (ch_api.c), which gets a connected socket; the
 * listening one is the VMM's own descriptor, so there is no path to either. The guest's channel is a vsock that the VMM turns into
 * connections to unix sockets of its tree; the one that is there is channel's.
 *
 * Called by keeper. probe may block for up to 5 s at start.
 */
#include "vmm/ch_config.h"
#include "vmm/probe.h"
#include "vmm/vmm.h"

#include "common/text.h"
#include "proto/guest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define VERSION_MIN 53
/* Beside guest memory. Page tables and devices with KVM; without, what stands behind the API is another emulator with all of its
 * translated code. */
#define OVERHEAD_KVM_MIB 96
#define OVERHEAD_EMULATED_MIB 352
#define NOFILE 4096 /* it grows its table to that before it starts, so that nothing stalls later */
#define STRING(x) #x
#define TEXT_OF(x) STRING(x)
#define GUEST_SOCKET CH_VSOCK "_" TEXT_OF(GUEST_VSOCK_PORT)

_Static_assert(CH_FD_API == 3 && CH_FD_EVENTS == 4, "the command line says so");

static int ch_probe(struct vmm_host *host, struct err *e)
{
	char version[40];

	if (vmm_probe_version(host->binary, "cloud_hypervisor", "cloud-hypervisor v", version, sizeof(version), e))
		return -1;
	if (!text_fmt(host->version, sizeof(host->version), "cloud-hypervisor %s", version))
		return err_set(e, ERR_INVALID, "%s --version names no version", host->binary);
	if (strtoul(version, NULL, 10) < VERSION_MIN)
		return err_set(e, ERR_INVALID,
				"%s is too old: v%d or newer is needed (before it a vsock stays stuck after a restore, private "
				"memory "
				"was "
				"counted twice, and known holes are open)",
				host->version, VERSION_MIN);
	return 0;
}

/* --- descriptors -------------------------------------------------------------------------------------------------------------- */

static int plan_fd(const struct vmm_host *host, const struct vmm_params *p, struct err *e)
{
	struct vmm_plan plan = {
		.kind = VMM_CLOUD_HYPERVISOR,
		.start = (uint8_t)p->start,
		.memory_mib = p->memory_mib,
		.vcpus = p->vcpus,
		.ram_fd = -1,
		.state_fd = -1,
		.answer_ms = p->answer_ms,
	};
	struct buf body = BUF_INIT(VMM_PLAN_BODY_MAX);
	const char *number = strchr(host->version, ' ');
	int fd = -1;

	if (!number || !text_fmt(plan.version, sizeof(plan.version), "v%s", number + 1) ||
			(p->start != VMM_COLD && !text_copy(plan.snapshot, sizeof(plan.snapshot), "file://" CH_SNAPSHOT)))
		err_set(e, ERR_INTERNAL, "version or snapshot of the plan");
	else if (ch_config(host, p, &body, e) == 0) {
		plan.create = buf_steal(&body, NULL);
		fd = plan.create ? vmm_plan_write(&plan, e) : err_set(e, ERR_NOMEM, "no memory");
	}
	vmm_plan_free(&plan);
	buf_free(&body);
	return fd;
}

/* The API's socket: bound for a moment in a directory of root's alone, connected to, and without a name from then on. */
static int open_api(const struct vmm_params *p, int *listener, int *client, struct err *e)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int rc = -1;

	*listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	*client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (*listener < 0 || *client < 0)
		return err_set_errno(e, "make the API's sockets");
	if (!text_fmt(at.sun_path, sizeof(at.sun_path), "%s/api", p->dir))
		return err_set(e, ERR_LIMIT, "run_dir is too long");
	unlink(at.sun_path);
	if (bind(*listener, (const struct sockaddr *)&at, sizeof(at)) != 0)
		return err_set_errno(e, "bind %s", at.sun_path);
	if (listen(*listener, 1) == 0 && connect(*client, (const struct sockaddr *)&at, sizeof(at)) == 0)
		rc = 0;
	else
		err_set_errno(e, "connect to %s", at.sun_path);
	unlink(at.sun_path);
	return rc;
}

static int add_api(const struct vmm_params *p, struct vmm_wires *w, struct err *e)
{
	int listener, client, rc = open_api(p, &listener, &client, e);

	if (rc != 0) {
		if (listener >= 0)
			close(listener);
		if (client >= 0)
			close(client);
		return -1;
	}
	rc = vmm_wires_channel(w, client);
	return vmm_wires_vmm(w, listener) == 0 && rc == 0 ? 0 : err_set_errno(e, "descriptors of the API");
}

/* A pipe whose writing end the VMM opens once more by its number, for which the pipe has to be its own. */
static int open_pipe(const struct vmm_params *p, int ends[2], struct err *e)
{
	if (pipe2(ends, O_CLOEXEC) != 0)
		return err_set_errno(e, "make a pipe");
	if (fchown(ends[1], p->uid, p->uid) == 0)
		return 0;
	err_set_errno(e, "give a pipe to the VMM");
	close(ends[0]);
	close(ends[1]);
	return -1;
}

/* Channel's order is guest, control, console, plan, events; the VMM's is enum ch_fd. */
static int ch_open(const struct vmm_host *host, const struct vmm_params *p, struct vmm_wires *w, struct err *e)
{
	int guest = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), console[2], events[2], plan, rc;

	if (vmm_wires_channel(w, guest))
		return err_set_errno(e, "make the guest's socket");
	if (add_api(p, w, e) || open_pipe(p, events, e))
		return -1;
	if (open_pipe(p, console, e)) {
		close(events[0]);
		close(events[1]);
		return -1;
	}
	rc = vmm_wires_vmm(w, events[1]) + vmm_wires_vmm(w, console[1]) + vmm_wires_channel(w, console[0]);
	plan = plan_fd(host, p, e);
	if (plan < 0) {
		close(events[0]);
		return -1;
	}
	rc += vmm_wires_channel(w, plan) + vmm_wires_channel(w, events[0]);
	if (rc != 0 || vmm_wires_lend(w, p->kernel_fd) || vmm_wires_lend(w, p->initramfs_fd) || vmm_wires_lend(w, p->rootfs_fd) ||
			vmm_wires_lend(w, guest))
		return err_set_errno(e, "descriptors of the VMM");
	return 0;
}

/* --- describe ----------------------------------------------------------------------------------------------------------------- */

/* A static program needs nothing else; what a dynamic one needs is in host->files. */
static bool tree(const struct vmm_host *host, const struct vmm_params *p, struct jail_job *job)
{
	static const char *const devices[] = { "/dev/null", "/dev/zero", "/dev/urandom" };

	for (size_t i = 0; i < sizeof(devices) / sizeof(devices[0]); i++)
		if (!jail_job_bind(job, devices[i], devices[i], JAIL_BIND_DEVICE))
			return false;
	if (host->kvm && !jail_job_bind(job, "/dev/kvm", "/dev/kvm", JAIL_BIND_DEVICE | JAIL_BIND_OWN))
		return false;
	if (p->start != VMM_COLD && (!p->golden_dir || !jail_job_bind(job, p->golden_dir, CH_GOLDEN,
								       p->start == VMM_GOLDEN ? JAIL_BIND_WRITE : 0)))
		return false;
	return jail_job_bind(job, host->binary, host->binary, 0) && vmm_bind_files(host, job) &&
	       jail_job_listen(job, CH_FD_GUEST - 3, GUEST_SOCKET);
}

static int ch_describe(const struct vmm_host *host, const struct vmm_params *p, struct jail_job *job, struct err *e)
{
	static const char *const args[] = { "--api-socket", "fd=3", "--event-monitor", "fd=4", "--seccomp", "true" };
	bool ok = jail_job_arg(job, host->binary);

	if (!job->confined)
		return err_set(e, ERR_INVALID, "Cloud Hypervisor needs a tree of its own: insecure_no_jail goes with QEMU alone");
	for (size_t i = 0; i < sizeof(args) / sizeof(args[0]); i++)
		ok = ok && jail_job_arg(job, args[i]);
	if (!ok || !tree(host, p, job))
		return err_set(e, ERR_LIMIT, "the VMM's job is too long (vmm_files?)");
	job->stdio_fd = CH_FD_CONSOLE;
	job->nofile = NOFILE;
	/* Of a golden VM memory is a file. The others have nothing that they may write to. */
	job->fsize = p->start == VMM_GOLDEN ? (p->memory_mib + 64) * MIB : 0;
	return 0;
}

static uint32_t ch_overhead_mib(const struct vmm_host *host)
{
	if (host->overhead_mib > 0)
		return host->overhead_mib;
	return host->kvm ? OVERHEAD_KVM_MIB : OVERHEAD_EMULATED_MIB;
}

/* Its own threads are a few, a worker of io_uring may stand beside each; without KVM another emulator stands behind. */
static uint32_t ch_pids(uint32_t vcpus)
{
	return vcpus + 160;
}

const struct vmm_driver vmm_cloud_hypervisor = {
	.name = "cloud-hypervisor",
	.kind = VMM_CLOUD_HYPERVISOR,
	.boot_again = true,
	.probe = ch_probe,
	.open = ch_open,
	.describe = ch_describe,
	.golden_begin = ch_golden_begin,
	.golden_seal = ch_golden_seal,
	.overhead_mib = ch_overhead_mib,
	.pids = ch_pids,
};
