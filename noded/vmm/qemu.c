/*
 * The QEMU driver: machine type microvm, with KVM where the host has it, else emulated (TCG). Everything the VMM may talk to is an
 * inherited descriptor; no listener, no path to write to, no network device.
 *
 * Called by keeper. probe may block for up to 5 s at start.
 */
#include "vmm/vmm.h"

#include "common/text.h"
#include "proto/guest.h"
#include "vmm/cmdline.h"
#include "vmm/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Translated code is kept in here. QEMU's own default is an eighth of the host's memory, which no limit could be derived from. */
#define TB_SIZE_MIB 128
/* Beside guest memory, measured with 256 and 512 MiB guests: translated code up to TB_SIZE_MIB, QEMU itself 75 MiB, the kernel's
 * 53 MB once more while it is loaded; file pages of the root are charged too, but given back under pressure. */
#define OVERHEAD_TCG_MIB 320
#define OVERHEAD_KVM_MIB 160

/* The VMM's descriptors, in the order of qemu_open. */
enum qemu_fd { FD_GUEST = 3, FD_QMP, FD_CONSOLE, FD_KERNEL, FD_INITRAMFS, FD_ROOTFS, FD_RAM, FD_STATE };

/* A snapshot takes 10 to 200 ms, going on from one as long; with a loaded host far more. */
#define ANSWER_MS 20000

/* --- probe -------------------------------------------------------------------------------------------------------------------- */

static int qemu_probe(struct vmm_host *host, struct err *e)
{
	char version[32];

	if (vmm_probe_version(host->binary, "qemu", "QEMU emulator version ", version, sizeof(version), e))
		return -1;
	version[strspn(version, "0123456789.")] = '\0';
	if (version[0] == '\0' || !text_fmt(host->version, sizeof(host->version), "qemu %s", version))
		return err_set(e, ERR_INVALID, "%s --version names no version", host->binary);
	if (strtoul(version, NULL, 10) < 7)
		return err_set(e, ERR_INVALID, "%s is too old: QEMU 7 or newer is needed", host->version);
	return 0;
}

/* --- descriptors ---------------------------------------------------------------------------------------------------------------
 */

static int lend_image(const struct vmm_params *p, struct vmm_wires *w)
{
	if (vmm_wires_lend(w, p->kernel_fd) || vmm_wires_lend(w, p->initramfs_fd) || vmm_wires_lend(w, p->rootfs_fd))
		return -1;
	return 0;
}

/* Memory and, for a clone, state: the golden's memory is written in place, a clone maps its own copy of what it writes. */
static int lend_snapshot(const struct vmm_params *p, struct vmm_wires *w)
{
	if (p->start == VMM_COLD)
		return 0;
	if (vmm_wires_lend(w, p->ram_fd))
		return -1;
	return p->start == VMM_CLONE ? vmm_wires_lend(w, p->state_fd) : 0;
}

static int qemu_open(const struct vmm_host *host, const struct vmm_params *p, struct vmm_wires *w, struct err *e)
{
	struct vmm_plan plan = {
		.kind = VMM_QEMU,
		.start = (uint8_t)p->start,
		.memory_mib = p->memory_mib,
		.vcpus = p->vcpus,
		.ram_fd = p->start == VMM_COLD ? -1 : FD_RAM,
		.state_fd = p->start == VMM_CLONE ? FD_STATE : -1,
		.answer_ms = p->start == VMM_COLD ? 0 : ANSWER_MS,
	};
	int console[2], fd;

	(void)host;
	/* The guest's stream, then the monitor's: FD_GUEST and FD_QMP, CHANNEL_FD_GUEST and CHANNEL_FD_CONTROL. */
	for (int i = 0; i < 2; i++)
		if (vmm_wires_pair(w))
			return err_set_errno(e, "make sockets");
	if (pipe2(console, O_CLOEXEC) != 0)
		return err_set_errno(e, "make a pipe");
	if (vmm_wires_channel(w, console[0]) + vmm_wires_vmm(w, console[1]) != 0 || lend_image(p, w) || lend_snapshot(p, w))
		return err_set_errno(e, "descriptors of the VMM");
	fd = vmm_plan_write(&plan, e);
	if (fd < 0)
		return -1;
	return vmm_wires_channel(w, fd) == 0 ? 0 : err_set_errno(e, "descriptors of the channel");
}

/* --- describe ----------------------------------------------------------------------------------------------------------------- */

/* One argument, formatted. */
static bool arg(struct jail_job *job, const char *fmt, ...) EPH_PRINTF(2, 3);

static bool arg(struct jail_job *job, const char *fmt, ...)
{
	char text[JAIL_ARG_MAX];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	return n > 0 && (size_t)n < sizeof(text) && jail_job_arg(job, text);
}

/* A flag and its value. */
#define ARG2(job, flag, ...) (arg((job), "%s", (flag)) && arg((job), __VA_ARGS__))

static bool kernel_args(const struct vmm_host *host, struct jail_job *job)
{
	char line[1024];

	return vmm_cmdline(host, "pci=off eph.bus=mmio eph.channel=virtio:" GUEST_PORT_NAME, line, sizeof(line)) &&
	       ARG2(job, "-append", "%s", line);
}

static bool machine_args(const struct vmm_host *host, const struct vmm_params *p, struct jail_job *job)
{
	return ARG2(job, "-M", "microvm,pit=off,pic=off,isa-serial=on%s", p->start == VMM_COLD ? "" : ",memory-backend=ram") &&
	       (host->kvm ? ARG2(job, "-accel", "kvm") : ARG2(job, "-accel", "tcg,thread=multi,tb-size=%d", TB_SIZE_MIB)) &&
	       ARG2(job, "-cpu", "%s", host->kvm ? "host" : "Nehalem,+rdrand,-spec-ctrl") &&
	       ARG2(job, "-smp", "%" PRIu32, p->vcpus) && ARG2(job, "-m", "%" PRIu32 "M", p->memory_mib) &&
	       arg(job, "-nodefaults") && arg(job, "-no-user-config") && ARG2(job, "-display", "none") && arg(job, "-no-reboot");
}

/* Golden: its memory is a file that it shares; clone: the same file, of which it never changes a byte. */
static bool memory_args(const struct vmm_params *p, struct jail_job *job)
{
	if (p->start == VMM_COLD)
		return true;
	return ARG2(job, "-object", "memory-backend-file,id=ram,size=%" PRIu32 "M,mem-path=/proc/self/fd/%d,share=%s",
			       p->memory_mib, FD_RAM, p->start == VMM_GOLDEN ? "on" : "off") &&
	       (p->start == VMM_GOLDEN || ARG2(job, "-incoming", "defer"));
}

/* No locks on the image: it is read only, and a lock that anybody who can read the file may take would stop every start. */
static bool device_args(struct jail_job *job)
{
	return ARG2(job, "-chardev", "stdio,id=console,signal=off") && ARG2(job, "-serial", "chardev:console") &&
	       ARG2(job, "-device", "virtio-serial-device") && ARG2(job, "-chardev", "socket,id=guest,fd=%d", FD_GUEST) &&
	       ARG2(job, "-device", "virtserialport,id=port,chardev=guest,name=%s", GUEST_PORT_NAME) &&
	       ARG2(job, "-chardev", "socket,id=qmp,fd=%d", FD_QMP) && ARG2(job, "-mon", "chardev=qmp,mode=control") &&
	       ARG2(job, "-drive", "id=root,file=/proc/self/fd/%d,format=raw,if=none,readonly=on,file.locking=off", FD_ROOTFS) &&
	       ARG2(job, "-device", "virtio-blk-device,drive=root");
}

/* What the VMM must find in its tree: itself, its libraries and firmware. Directories that are links on this host stay links. */
static bool tree(const struct vmm_host *host, struct jail_job *job)
{
	static const char *const dirs[] = { "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/share/qemu", "/usr/share/seabios" };
	static const char *const files[] = { "/dev/null", "/dev/zero", "/dev/urandom" };

	for (size_t i = 0; i < sizeof(dirs) / sizeof(dirs[0]); i++)
		if (!jail_job_bind(job, dirs[i], dirs[i], JAIL_BIND_OPTIONAL))
			return false;
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		if (!jail_job_bind(job, files[i], files[i], JAIL_BIND_DEVICE))
			return false;
	if (host->kvm && !jail_job_bind(job, "/dev/kvm", "/dev/kvm", JAIL_BIND_DEVICE | JAIL_BIND_OWN))
		return false;
	return jail_job_bind(job, host->binary, host->binary, 0) && vmm_bind_files(host, job) &&
	       jail_job_link(job, "usr/lib", "/lib") && jail_job_link(job, "usr/lib64", "/lib64") &&
	       jail_job_bind(job, "/etc/ld.so.cache", "/etc/ld.so.cache", JAIL_BIND_OPTIONAL);
}

static int qemu_describe(const struct vmm_host *host, const struct vmm_params *p, struct jail_job *job, struct err *e)
{
	bool ok = arg(job, "%s", host->binary) && machine_args(host, p, job) && memory_args(p, job) &&
		  ARG2(job, "-kernel", "/proc/self/fd/%d", FD_KERNEL) && ARG2(job, "-initrd", "/proc/self/fd/%d", FD_INITRAMFS) &&
		  kernel_args(host, job) && device_args(job) &&
		  ARG2(job, "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");

	if (!ok || (job->confined && !tree(host, job)))
		return err_set(e, ERR_LIMIT, "the VMM's command line is too long");
	job->stdio_fd = FD_CONSOLE;
	job->group = host->kvm && !job->confined ? host->kvm_gid : 0;
	return 0;
}

static uint32_t qemu_overhead_mib(const struct vmm_host *host)
{
	if (host->overhead_mib > 0)
		return host->overhead_mib;
	return host->kvm ? OVERHEAD_KVM_MIB : OVERHEAD_TCG_MIB;
}

/* vcpu threads, main loop, RCU, workers of the block layer. */
static uint32_t qemu_pids(uint32_t vcpus)
{
	return vcpus + 80;
}

const struct vmm_driver vmm_qemu = {
	.name = "qemu",
	.kind = VMM_QEMU,
	.open = qemu_open,
	.probe = qemu_probe,
	.describe = qemu_describe,
	.overhead_mib = qemu_overhead_mib,
	.pids = qemu_pids,
};
