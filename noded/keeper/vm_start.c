/*
 * Starts the three processes of a VM: makes directory, groups and sockets, describes each process to the jail stage, spawns.
 * Keeper's thread. Whatever fails is cleaned up by the steps of vm.c, which see what was made.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "keeper/confine.h"
#include "keeper/files.h"
#include "roles.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ROLE_MEMORY_FACTOR 8 /* shadow memory and quarantine */
#else
#define ROLE_MEMORY_FACTOR 1
#endif
#define BROKER_MEMORY                                                                                                              \
	(128 * MIB * ROLE_MEMORY_FACTOR) /* a call and a reply of 4 MiB each in a few copies, libcurl, resolver threads */
#define CHANNEL_MEMORY (64 * MIB * ROLE_MEMORY_FACTOR) /* a call, a reply and a result, and 16 MiB towards the broker */
#define CTL_BACKLOG 16                                 /* keepers that died before they were heard */
#define BROKER_PIDS 64
#define CHANNEL_PIDS 16
#define VMM_CPU_EXTRA_PERCENT 50 /* of one CPU, beside one CPU a vcpu: main loop, block layer */
#define ROLE_NOFILE 256
#define VMM_NOFILE 256
#define GOLDEN_EXTRA_MIB 64 /* of files that a golden VM writes, beside its memory */
/* Roles write to keeper's stderr, which may be a long log file, and the broker to its spool; nothing else that grows is in reach.
 */
#define ROLE_FSIZE (UINT64_C(1) << 30)

static const char *const role_names[SLOT_ROLES] = { "broker", "channel", "vmm" };
static const enum confine_kind confine_kinds[SLOT_ROLES] = { CONFINE_BROKER, CONFINE_CHANNEL, CONFINE_VMM };

/* Descriptors that are made for the start and closed when it is over; the processes have their copies. */
struct start_fds {
	int keeper_broker[2], broker_channel[2];
	int ctl, kill;
	struct vmm_wires wires; /* of VMM and channel; the driver's */
};

static void close_pair(int fd[2])
{
	for (int i = 0; i < 2; i++)
		if (fd[i] >= 0)
			close(fd[i]);
}

static void close_fds(struct start_fds *f)
{
	close_pair(f->keeper_broker);
	close_pair(f->broker_channel);
	vmm_wires_close(&f->wires);
	if (f->ctl >= 0)
		close(f->ctl);
	if (f->kill >= 0)
		close(f->kill);
}

/* The way in for a keeper that comes after this one: a socket in a directory that only root can enter. */
static int open_ctl(const struct vm *vm, struct err *e)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd;

	if (!text_fmt(at.sun_path, sizeof(at.sun_path), "%s/%s/%s", vm->keeper->vm_dir, vm->journal.vm, VM_CTL_NAME))
		return err_set(e, ERR_LIMIT, "run_dir is too long");
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0 && listen(fd, CTL_BACKLOG) == 0)
		return fd;
	err_set_errno(e, "listen on %s", at.sun_path);
	if (fd >= 0)
		close(fd);
	return -1;
}

/* dir: room for the path that it points to. state_fd is the caller's to close. */
static int vmm_params(const struct vm *vm, char *dir, size_t size, struct vmm_params *out, struct err *e)
{
	const int *image = vm->keeper->host.image_fd;

	*out = (struct vmm_params){
		.start = VMM_COLD,
		.memory_mib = vm->journal.memory_mib,
		.vcpus = vm->journal.vcpus,
		.kernel_fd = image[IMAGE_KERNEL],
		.initramfs_fd = image[IMAGE_INITRAMFS],
		.rootfs_fd = image[IMAGE_ROOTFS],
		.ram_fd = -1,
		.state_fd = -1,
		.answer_ms = (uint32_t)vm->keeper->host.boot_timeout_ms / 2, /* so that the boot's end names what did not come */
		.uid = slots_uid(vm->keeper->slots, vm->journal.slot, SLOT_VMM),
		.dir = dir,
	};
	if (!text_fmt(dir, size, "%s/%s", vm->keeper->vm_dir, vm->journal.vm))
		return err_set(e, ERR_LIMIT, "run_dir is too long");
	return golden_params(vm, out, e);
}

/* Every descriptor of VMM and channel, by its driver. */
static int open_wires(struct vm *vm, struct start_fds *f, struct err *e)
{
	const struct host *h = &vm->keeper->host;
	struct vmm_params params;
	char dir[256];
	int rc;

	if (vmm_params(vm, dir, sizeof(dir), &params, e))
		return -1;
	rc = params.start == VMM_GOLDEN && h->driver->golden_begin ? h->driver->golden_begin(&params, e) : 0;
	if (rc == 0)
		rc = h->driver->open(&h->vmm, &params, &f->wires, e);
	if (params.state_fd >= 0)
		close(params.state_fd);
	return rc;
}

static int open_fds(struct vm *vm, struct start_fds *f, struct err *e)
{
	*f = (struct start_fds){ .keeper_broker = { -1, -1 }, .broker_channel = { -1, -1 }, .ctl = -1, .kill = -1 };
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, f->keeper_broker) != 0 ||
			socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, f->broker_channel) != 0)
		return err_set_errno(e, "make sockets");
	if (open_wires(vm, f, e))
		return -1;
	f->ctl = open_ctl(vm, e);
	if (f->ctl < 0)
		return -1;
	f->kill = cgroup_open_kill(vm->proc[SLOT_VMM].cgroup, e);
	return f->kill < 0 ? -1 : 0;
}

/* --- groups and directories --------------------------------------------------------------------------------------------------- */

static void role_limits(const struct vm *vm, enum slot_role role, struct cgroup_limits *out)
{
	const struct host *h = &vm->keeper->host;
	const struct journal *j = &vm->journal;

	switch (role) {
	case SLOT_BROKER: *out = (struct cgroup_limits){ BROKER_MEMORY, BROKER_PIDS, 0 }; break;
	case SLOT_CHANNEL: *out = (struct cgroup_limits){ CHANNEL_MEMORY, CHANNEL_PIDS, 0 }; break;
	default:
		out->memory_bytes = (j->memory_mib + (uint64_t)h->driver->overhead_mib(&h->vmm)) * MIB;
		out->pids = h->driver->pids(j->vcpus);
		out->cpu_percent = j->vcpus * 100 + VMM_CPU_EXTRA_PERCENT;
		break;
	}
}

int vm_make_places(struct vm *vm, struct err *e)
{
	struct keeper *k = vm->keeper;
	char path[256];

	for (int role = 0; role < SLOT_ROLES; role++) {
		struct cgroup_limits limits = { 0 };

		role_limits(vm, (enum slot_role)role, &limits);
		if (cgroup_make(k->host.cgroups, vm->journal.cgroup[role], &limits, &vm->proc[role].cgroup, e))
			return -1;
		vm->proc[role].state = PROC_LEFT; /* what is made must be cleaned up, whether or not a process comes */
		if (!text_fmt(path, sizeof(path), "%s/%s/%s", k->vm_dir, vm->journal.vm, role_names[role]))
			return err_set(e, ERR_LIMIT, "run_dir is too long");
		if (files_mkdir(path, 0700, e))
			return -1;
	}
	return vm->proc[SLOT_BROKER].cgroup ? vm_egress_shut(vm, e) : 0;
}

/* --- jobs --------------------------------------------------------------------------------------------------------------------- */

static bool bind_libraries(struct jail_job *job)
{
	return jail_job_bind(job, "/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", JAIL_BIND_OPTIONAL) &&
	       jail_job_bind(job, "/usr/lib64", "/usr/lib64", JAIL_BIND_OPTIONAL) && jail_job_link(job, "usr/lib", "/lib") &&
	       jail_job_link(job, "usr/lib64", "/lib64") &&
	       jail_job_bind(job, "/etc/ld.so.cache", "/etc/ld.so.cache", JAIL_BIND_OPTIONAL) &&
	       jail_job_bind(job, "/dev/null", "/dev/null", JAIL_BIND_DEVICE) &&
	       jail_job_bind(job, "/dev/urandom", "/dev/urandom", JAIL_BIND_DEVICE);
}

/* What name resolution and TLS of broker and link read. */
static bool bind_network(struct jail_job *job)
{
	static const char *const files[] = { "/etc/ssl", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates",
		"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services" };

	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		if (!jail_job_bind(job, files[i], files[i], JAIL_BIND_OPTIONAL))
			return false;
	return true;
}

static bool common_env(struct jail_job *job)
{
#if defined(__SANITIZE_ADDRESS__)
	/* The leak check at exit wants ptrace, which no role has. */
	if (!jail_job_env(job, "ASAN_OPTIONS=detect_leaks=0"))
		return false;
#endif
#if defined(EPHEMERAL_TEST_CLOCK)
	const char *clock_file = getenv("EPHEMERAL_CLOCK_FILE");
	char text[1100];

	if (clock_file && *clock_file &&
			(!text_fmt(text, sizeof(text), "EPHEMERAL_CLOCK_FILE=%s", clock_file) || !jail_job_env(job, text) ||
					!jail_job_bind(job, clock_file, clock_file, JAIL_BIND_OPTIONAL)))
		return false;
#endif
	return jail_job_env(job, "LC_ALL=C") && jail_job_env(job, "PATH=/");
}

/* noded itself in one of its roles. */
static bool role_args(const struct keeper *k, const char *role, struct jail_job *job)
{
	static const char *const levels[] = { "debug", "info", "warn", "error" };

	job->self = true;
	return jail_job_arg(job, "noded") && jail_job_arg(job, "--role") && jail_job_arg(job, role) &&
	       jail_job_arg(job, "--log-level") && jail_job_arg(job, levels[k->config->log_level]) &&
	       (!k->config->log_json || jail_job_arg(job, "--log-json"));
}

static int role_job(struct keeper *k, enum slot_role role, struct jail_job *job, struct err *e)
{
	job->nofile = ROLE_NOFILE;
	job->fsize = ROLE_FSIZE;
	if (role_args(k, role_names[role], job) && bind_libraries(job) && (role != SLOT_BROKER || bind_network(job)))
		return 0;
	return err_set(e, ERR_LIMIT, "job of %s is too long", role_names[role]);
}

static int vmm_job(struct vm *vm, struct jail_job *job, struct err *e)
{
	const struct host *h = &vm->keeper->host;
	struct vmm_params params;
	char dir[256];

	job->nofile = VMM_NOFILE;
	job->fsize = vm->making ? (vm->journal.memory_mib + GOLDEN_EXTRA_MIB) * MIB : 0; /* others have nothing to write to */
	if (vmm_params(vm, dir, sizeof(dir), &params, e))
		return -1;
	if (params.state_fd >= 0)
		close(params.state_fd); /* describing takes none */
	return h->driver->describe(&h->vmm, &params, job, e);
}

int vm_process_job(struct vm *vm, enum slot_role role, struct jail_job *job, struct err *e)
{
	struct keeper *k = vm->keeper;
	const struct cgroup *g = vm->proc[role].cgroup;
	char procs[CGROUP_PATH_MAX + 32];

	*job = (struct jail_job){ .stdio_fd = -1, .confined = !k->config->insecure_no_jail };
	job->uid = job->gid = slots_uid(k->slots, vm->journal.slot, role);
	if (!text_fmt(job->name, sizeof(job->name), "%s %.40s", role_names[role], vm->journal.vm) ||
			!text_fmt(job->root, sizeof(job->root), "%s/%s/%s", k->vm_dir, vm->journal.vm, role_names[role]))
		return err_set(e, ERR_LIMIT, "run_dir is too long");
	for (size_t i = 1; i < cgroup_dirs(g); i++)
		if (!text_fmt(procs, sizeof(procs), "%s/cgroup.procs", cgroup_dir(g, i)) || !jail_job_group(job, procs))
			return err_set(e, ERR_LIMIT, "too many cgroups");
	if (!common_env(job))
		return err_set(e, ERR_LIMIT, "environment is too long");
	if (role == SLOT_VMM ? vmm_job(vm, job, e) : role_job(k, role, job, e))
		return -1;
	return confine_job(k->config, &k->host, confine_kinds[role], job, e);
}

int vm_link_job(struct keeper *k, struct jail_job *job, struct err *e)
{
	*job = (struct jail_job){ .stdio_fd = -1, .confined = !k->config->insecure_no_jail, .fsize = ROLE_FSIZE };
	job->uid = job->gid = (uint32_t)k->config->uid_base - 1;
	job->nofile = 4096; /* a spool a VM, a socket and threads of nng's a controld */
	if (text_copy(job->name, sizeof(job->name), "link") && text_copy(job->root, sizeof(job->root), k->link.root) &&
			common_env(job) && role_args(k, "link", job) && bind_libraries(job) && bind_network(job))
		return confine_job(k->config, &k->host, CONFINE_LINK, job, e);
	return err_set(e, ERR_LIMIT, "job of link is too long");
}

/* --- spawning ----------------------------------------------------------------------------------------------------------------- */

static void on_vmm_exec(void *arg, const struct err *e)
{
	struct vm *vm = arg;
	struct err fail;

	if (e) {
		vm_fail_start(vm, e->text);
		return;
	}
	vm->exec_boot_ns = clock_boot_ns();
	if (vm->making)
		return; /* its channel says how it goes */
	/* Now, so that the boot's deadline counts from here. */
	if (vm->journal.kind == JOURNAL_RUN ? broker_side_assign(vm, &fail) : broker_side_prepare(vm, &fail))
		vm_fail_start(vm, fail.text);
}

static void on_role_exec(void *arg, const struct err *e)
{
	if (e)
		vm_fail_start(arg, e->text);
}

static void proc_left(struct vm *vm, enum slot_role role)
{
	vm->proc[role].child = NULL; /* freed after the callback */
	vm->proc[role].state = PROC_LEFT;
}

static void on_vmm_exit(void *arg, int status)
{
	struct vm *vm = arg;
	struct vm_proc *p = &vm->proc[SLOT_VMM];
	bool expected = p->state == PROC_KILLED;
	char text[64];

	child_status_text(status, text);
	log_info("run=%s vm=%s vmm ended status=\"%s\" expected=%d memory_peak_mib=%" PRIu64, vm->journal.run_id, vm->journal.vm,
			text, expected, cgroup_memory_peak(p->cgroup) / MIB);
	metrics_ended(vm, SLOT_VMM, status, !expected);
	proc_left(vm, SLOT_VMM);
	vm_boot_over(vm);
	if (!expected) {
		bool oom = cgroup_oom_kills(p->cgroup) > 0;

		vm->vmm_ended = true;
		vm->vmm_status = status;
		if (vm->destroy_boot_ns == 0)
			vm->destroy_boot_ns = clock_boot_ns();
		if (!text_fmt(vm->vmm_text, sizeof(vm->vmm_text),
				    oom ? "The VM was killed because it used more memory than its limit: %s."
					: "The VMM ended by itself: %s. Its last words are in the log of noded.",
				    text))
			vm->vmm_text[0] = '\0';
		if (vm->making)
			vm_fail_start(vm, vm->vmm_text);
		else if (vm->exec_boot_ns > 0)
			broker_side_exited(vm);
	}
	vm_step_all(vm);
}

/* For those who set the limits. */
static void say_peak(const struct vm *vm, enum slot_role role)
{
	log_info("vm=%s %s ended memory_peak_kib=%" PRIu64, vm->journal.vm, role_names[role],
			cgroup_memory_peak(vm->proc[role].cgroup) / 1024);
}

static void on_channel_exit(void *arg, int status)
{
	struct vm *vm = arg;
	char text[64];

	child_status_text(status, text);
	if (vm->proc[SLOT_CHANNEL].state == PROC_ALIVE && status != 0)
		log_warn("run=%s vm=%s channel ended status=\"%s\"", vm->journal.run_id, vm->journal.vm, text);
	metrics_ended(vm, SLOT_CHANNEL, status, false);
	say_peak(vm, SLOT_CHANNEL);
	proc_left(vm, SLOT_CHANNEL);
	/* The broker sees the end of its socket and decides; without a channel nothing could be said to the VM anyhow. */
	vm_step_all(vm);
}

static void on_broker_exit(void *arg, int status)
{
	struct vm *vm = arg;
	bool expected = vm->proc[SLOT_BROKER].state == PROC_KILLED || vm->want.end;
	char text[64];

	child_status_text(status, text);
	metrics_ended(vm, SLOT_BROKER, status, false);
	say_peak(vm, SLOT_BROKER);
	proc_left(vm, SLOT_BROKER);
	if (!expected && status != 0)
		log_error("run=%s vm=%s broker ended status=\"%s\"", vm->journal.run_id, vm->journal.vm, text);
	if (!text_fmt(vm->broker_text, sizeof(vm->broker_text), "the broker ended unexpectedly: %s", text))
		vm->broker_text[0] = '\0';
	/* What it still said waits in its socket; whose end decides whether this was unexpected. */
	if (!vm->broker && !expected)
		vm_end(vm, ERRCODE_BROKER_LOST, vm->broker_text);
	else
		vm_step_all(vm);
}

static void (*const on_exit_of[SLOT_ROLES])(void *, int) = { on_broker_exit, on_channel_exit, on_vmm_exit };

int vm_watch_process(struct vm *vm, enum slot_role role, struct err *e)
{
	const struct child_ops ops = { .on_exit = on_exit_of[role], .arg = vm };
	const struct journal_process *p = &vm->journal.process[role];

	return child_adopt(vm->keeper->base, p->pid, p->start_time, &ops, &vm->proc[role].child, e);
}

static int spawn(struct vm *vm, enum slot_role role, const int *fds, size_t count, struct err *e)
{
	struct child_ops ops = { .on_exec = role == SLOT_VMM ? on_vmm_exec : on_role_exec, .on_exit = on_exit_of[role], .arg = vm };
	struct vm_proc *p = &vm->proc[role];
	struct jail_spawned spawned;
	struct jail_job job;
	int rc;

	rc = vm_process_job(vm, role, &job, e);
	if (rc == 0)
		rc = jail_spawn(&job, role == SLOT_BROKER ? JAIL_NET_HOST : JAIL_NET_EMPTY, cgroup_dir_fd(p->cgroup), fds, count,
				&spawned, e);
	jail_job_free(&job);
	if (rc)
		return -1;
	if (child_new(vm->keeper->base, &spawned, &ops, &p->child, e))
		return -1;
	p->state = PROC_ALIVE;
	vm->journal.process[role].pid = child_pid(p->child);
	vm->journal.process[role].start_time = child_start_time(p->child);
	return 0;
}

static int spawn_all(struct vm *vm, struct start_fds *f, struct err *e)
{
	const int broker[] = { f->keeper_broker[1], f->broker_channel[0], f->ctl, f->kill };
	int channel[1 + VMM_WIRES_MAX] = { f->broker_channel[1] };
	int rc;

	if (vm->making)
		channel[0] = f->keeper_broker[1]; /* there is no broker: its channel speaks to keeper */
	memcpy(channel + 1, f->wires.channel, f->wires.channel_count * sizeof(int));
	if (spawn(vm, SLOT_VMM, f->wires.vmm, f->wires.vmm_count, e) ||
			spawn(vm, SLOT_CHANNEL, channel, 1 + f->wires.channel_count, e) ||
			(!vm->making && spawn(vm, SLOT_BROKER, broker, 4, e)))
		return -1;
	rc = vm->making ? golden_side_open(vm, f->keeper_broker[0], e) : broker_side_open(vm, f->keeper_broker[0], e);
	f->keeper_broker[0] = -1; /* taken over also when it fails */
	if (rc)
		return -1;
	if (!vm->making && !adopt_identify(vm))
		return err_set(e, ERR_UNAVAILABLE, "the broker does not take frames");
	return journal_store(vm->keeper->journal_dir, &vm->journal, e);
}

int vm_start(struct vm *vm, struct err *e)
{
	struct start_fds f;
	int rc = -1;

	/* It may have waited while the image changed: it starts from what is here now. */
	if (!images_usable(vm->keeper->images, e))
		return -1;
	memcpy(vm->journal.image_hash, vm->keeper->host.image_hash, SHA256_LEN);
	if (golden_choose(vm, e) || vm_make_places(vm, e))
		return -1;
	if (open_fds(vm, &f, e) == 0)
		rc = spawn_all(vm, &f, e);
	close_fds(&f);
	return rc;
}
