/*
 * keeper's start, loop and end (keeper.h). Root, one thread. Order of a start: directories, lock, what the host must have,
 * identity, what an earlier noded left, link. Order of a stop by SIGINT: nothing new, all VMs ended and reported, link, then exit;
 * what could not be reported within STOP_MS stays in the journal for the next start. By SIGTERM the VMs that can go on without us
 * do, for the next noded to take over, and only the others are ended.
 */
#include "keeper/keeper.h"
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "keeper/files.h"
#include "keeper/room.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <sodium.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define STOP_MS 5000
#define WATCH_SECONDS 3 /* between looks at deadlines that brokers ought to keep */
#define SWEEP_EVERY 5   /* looks between two sweeps of spools and slots */
#define VCPUS_PER_CPU 8
#define NOFILE_WANTED 65536

/* --- the loop's own events ---------------------------------------------------------------------------------------------------- */

void keeper_changed(struct keeper *k)
{
	if (!k->dirty)
		event_active(k->turn, EV_TIMEOUT, 0);
	k->dirty = true;
}

static void on_turn(evutil_socket_t fd, short what, void *arg)
{
	struct keeper *k = arg;

	(void)fd;
	(void)what;
	k->dirty = false;
	golden_turn(k);
	pool_turn(k);
	vm_run_waiting(k);
	link_side_capacity(k);
}

static void stop_loop(struct keeper *k)
{
	event_base_loopbreak(k->base);
}

/* Nothing to wait for: what still lives is left to the next noded. */
void keeper_maybe_stopped(struct keeper *k)
{
	if (!k->stopping)
		return;
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (k->ends_all || !adopt_stays(vm))
			return;
	/* Where nothing stays the host says that it stops: it is shown so at once, and not when its lease has run out. */
	if (k->vms || !k->link.frames || !identity_enrolled(k->identity))
		stop_loop(k);
	else if (!k->bye_said)
		link_side_send(k, RF_LINK_BYE, NULL, 0);
	k->bye_said = true;
}

static void on_stop_timer(evutil_socket_t fd, short what, void *arg)
{
	struct keeper *k = arg;

	(void)fd;
	(void)what;
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (k->ends_all || !adopt_stays(vm))
			log_warn("run=%s vm=%s not reported before the stop; the next start does it", vm->journal.run_id,
					vm->journal.vm);
	stop_loop(k);
}

static void end_at_stop(struct vm *vm)
{
	if (!vm->keeper->ends_all && adopt_stays(vm))
		log_info("run=%s vm=%s stays for the next noded; without one its lease ends it lease_ms=%lld", vm->journal.run_id,
				vm->journal.vm, (long long)((vm->keeper->lease_deadline_boot_ns - clock_boot_ns()) / 1000000));
	/* Where the broker's end is on its way, nothing is added to it. */
	else if (!vm->replay[REPLAY_END].body)
		vm_end(vm, ERRCODE_NODE_RESTARTED, "noded was stopped while the run was on this host");
}

/* SIGTERM is a restart or an upgrade: runs go on. SIGINT ends them. */
static void on_signal(evutil_socket_t sig, short what, void *arg)
{
	const struct timeval tv = { .tv_sec = STOP_MS / 1000 };
	struct keeper *k = arg;
	struct vm *next;

	(void)what;
	if (k->stopping) {
		log_warn("second signal: leaving at once signal=%d", (int)sig);
		k->exit_status = -1;
		stop_loop(k);
		return;
	}
	k->ends_all = sig == SIGINT;
	log_info("stopping signal=%d runs=\"%s\"", (int)sig, k->ends_all ? "are ended" : "go on where they can");
	k->stopping = true;
	link_side_capacity(k);
	event_add(k->stop_timer, &tv);
	for (struct vm *vm = k->vms; vm; vm = next) {
		next = vm->next;
		end_at_stop(vm);
	}
	keeper_maybe_stopped(k);
}

/* May free the VM. */
static void watch(struct keeper *k, struct vm *vm)
{
	const struct vm_watch w = {
		.boot_began_ns = vm->booting ? vm->boot_began_ns : 0,
		.boot_limit_ns = k->host.boot_timeout_ms * INT64_C(1000000),
		.lease_ns = vm->journal.kind != JOURNAL_RUN            ? 0 /* others serve nobody */
			    : k->lease_deadline_boot_ns > vm->lease_ns ? k->lease_deadline_boot_ns
								       : vm->lease_ns,
		.vmm_alive = vm->proc[SLOT_VMM].state == PROC_ALIVE,
	};

	if (vm->adopt_began_ns > 0 && clock_boot_ns() - vm->adopt_began_ns > ADOPT_LIMIT_NS) {
		adopt_failed(vm, "it does not answer");
		return;
	}
	switch (vm_overdue(&w, clock_boot_ns())) {
	case VM_BOOT_OVERDUE: vm_fail_start(vm, "the boot is far over its deadline, and the broker did not end it"); break;
	case VM_LEASE_OVERDUE:
		k->stats.lease_overdue++;
		log_error("run=%s vm=%s outlives the lease: destroyed, its broker did not do it", vm->journal.run_id,
				vm->journal.vm);
		vm->want.destroy = true;
		vm_step_all(vm);
		break;
	case VM_IN_TIME: break;
	}
}

static void on_sweep(evutil_socket_t fd, short what, void *arg)
{
	struct keeper *k = arg;
	struct err unusable;
	struct vm *next;

	(void)fd;
	(void)what;
	for (struct vm *vm = k->vms; vm; vm = next) {
		next = vm->next;
		watch(k, vm);
	}
	keeper_changed(k); /* the pool's target moves with time */
	if (++k->sweeps % SWEEP_EVERY != 0)
		return;
	recover_sweep_spools(k);
	(void)recover_look_at_slots(k);
	(void)images_usable(k->images, &unusable); /* it says so itself */
}

static int add_events(struct keeper *k, struct err *e)
{
	const struct timeval sweep = { .tv_sec = WATCH_SECONDS };

	k->signals[0] = evsignal_new(k->base, SIGTERM, on_signal, k);
	k->signals[1] = evsignal_new(k->base, SIGINT, on_signal, k);
	k->stop_timer = event_new(k->base, -1, 0, on_stop_timer, k);
	k->sweep_timer = event_new(k->base, -1, EV_PERSIST, on_sweep, k);
	k->turn = event_new(k->base, -1, 0, on_turn, k);
	if (!k->signals[0] || !k->signals[1] || !k->stop_timer || !k->sweep_timer || !k->turn ||
			event_add(k->signals[0], NULL) != 0 || event_add(k->signals[1], NULL) != 0 ||
			event_add(k->sweep_timer, &sweep) != 0)
		return err_set(e, ERR_NOMEM, "no memory");
	return 0;
}

/* --- start -------------------------------------------------------------------------------------------------------------------- */

static int make_directories(struct keeper *k, struct err *e)
{
	const struct noded_config *c = k->config;

	if (!text_fmt(k->journal_dir, sizeof(k->journal_dir), "%s/journal", c->state_dir) ||
			!text_fmt(k->spool_dir, sizeof(k->spool_dir), "%s/spool", c->state_dir) ||
			!text_fmt(k->vm_dir, sizeof(k->vm_dir), "%s/vm", c->run_dir) ||
			!text_fmt(k->link.root, sizeof(k->link.root), "%s/link", c->run_dir))
		return err_set(e, ERR_LIMIT, "state_dir or run_dir is too long");
	if (files_mkdir(c->state_dir, 0700, e) || files_mkdir(k->journal_dir, 0700, e) || files_mkdir(k->spool_dir, 0700, e) ||
			files_mkdir(c->run_dir, 0700, e) || files_mkdir(k->vm_dir, 0700, e) || files_mkdir(k->link.root, 0700, e))
		return -1;
	return 0;
}

static void make_tag(struct keeper *k)
{
	uint8_t hash[crypto_generichash_BYTES_MIN];

	crypto_generichash(hash, sizeof(hash), (const uint8_t *)k->config->state_dir, strlen(k->config->state_dir), NULL, 0);
	text_hex(hash, (sizeof(k->tag) - 1) / 2, k->tag);
}

static int take_lock(struct keeper *k, struct err *e)
{
	char path[600];

	if (!text_fmt(path, sizeof(path), "%s/lock", k->config->state_dir))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	k->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (k->lock_fd < 0)
		return err_set_errno(e, "open %s", path);
	if (flock(k->lock_fd, LOCK_EX | LOCK_NB) == 0)
		return 0;
	if (errno == EWOULDBLOCK)
		return err_set(e, ERR_CONFLICT, "another noded works on %s: stop it first, or give this one a state_dir of its own",
				k->config->state_dir);
	return err_set_errno(e, "lock %s", path);
}

/* Grows with each start, whatever the wall clock does. */
static int next_epoch(struct keeper *k, struct err *e)
{
	struct buf b = BUF_INIT(64);
	struct wire_reader r;
	char path[600];
	uint64_t last = 0, now = (uint64_t)clock_real_ms();
	int rc;

	if (!text_fmt(path, sizeof(path), "%s/epoch", k->config->state_dir))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	if (files_load(path, &b, e) == 0) {
		wire_read_init(&r, b.data, b.len);
		last = wire_u64(&r);
		if (wire_end(&r, "epoch", e))
			last = 0;
	}
	buf_reset(&b);
	k->epoch = now > last ? now : last + 1;
	wire_put_u64(&b, k->epoch);
	rc = files_store(k->config->state_dir, "epoch", b.data, b.len, 0600, e);
	buf_free(&b);
	return rc;
}

static int load_token(struct keeper *k, struct err *e)
{
	const char *path = k->config->join_token_file;

	if (identity_enrolled(k->identity))
		return 0;
	if (!path || !*path)
		return err_set(e, ERR_NOT_FOUND,
				"this host is not enrolled: make a token with `ephemeral admin node token`, put it into a file and "
				"set join_token_file");
	k->token = calloc(1, sizeof(*k->token));
	if (!k->token)
		return err_set(e, ERR_NOMEM, "no memory");
	return identity_read_token(path, &k->token_text, k->token, e);
}

static int reserve(struct keeper *k, struct err *e)
{
	const struct noded_config *c = k->config;
	const struct host *h = &k->host;

	k->admission = (struct admission){
		.total_memory_mib = c->memory_mib > 0 ? (uint32_t)c->memory_mib : h->memory_mib,
		.total_vcpus = c->vcpus > 0 ? (uint32_t)c->vcpus : h->cpus * VCPUS_PER_CPU,
		.total_slots = (uint32_t)c->max_vms,
		.total_pids = room_pids(k->host.cgroups),
		.pids_each = VM_ROLE_PIDS + h->driver->pids(0),
		.pids_per_vcpu = h->driver->pids(1) - h->driver->pids(0),
		.overhead_mib = h->driver->overhead_mib(&h->vmm) + 32, /* broker and channel use about 16 MiB each */
	};
	pool_open(k);
	golden_open(k);
	k->max_booting = c->max_concurrent_boots > 0 ? (uint32_t)c->max_concurrent_boots : h->cpus;
	return slots_new((uint32_t)c->uid_base, (uint32_t)c->max_vms, &k->slots, e);
}

static void say_host(const struct keeper *k)
{
	const struct host *h = &k->host;

	log_info("host vmm=\"%s\" isolation=%s jail=\"%s\" cgroups=\"%s\" image=%.12s memory_mib=%u vcpus=%u slots=%u boots=%u "
		 "tsc_khz=%" PRIu64,
			h->vmm.version, h->isolation, h->jail, cgroups_text(h->cgroups), h->image_name[0] ? h->image_name : "none",
			k->admission.total_memory_mib, k->admission.total_vcpus, k->admission.total_slots, k->max_booting,
			h->vmm.tsc_khz);
	if (!h->vmm.kvm)
		log_warn("NO KVM: VMs are emulated on this host. They are slow, and emulation is not sold as isolation");
	if (k->config->seccomp == CONFIG_SECCOMP_LOG)
		log_warn("SECCOMP ONLY LOGS: seccomp = log is set. Calls that a filter does not list are done");
	if (k->config->insecure_no_jail)
		log_warn("NO JAIL: insecure_no_jail is set. An escaped guest sees this host's files and processes");
}

static void raise_nofile(void)
{
	struct rlimit r;

	if (getrlimit(RLIMIT_NOFILE, &r) == 0 && r.rlim_cur < NOFILE_WANTED) {
		r.rlim_cur = r.rlim_max < NOFILE_WANTED ? r.rlim_max : NOFILE_WANTED;
		setrlimit(RLIMIT_NOFILE, &r);
	}
}

/* Descriptors 0 to 2 must be something, or a socket of ours would get their numbers. */
static void fill_stdio(void)
{
	int fd;

	do
		fd = open("/dev/null", O_RDWR);
	while (fd >= 0 && fd <= 2);
	if (fd > 2)
		close(fd);
	fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		dup2(fd, 0);
		close(fd);
	}
}

static int start(struct keeper *k, struct err *e)
{
	if (make_directories(k, e) || take_lock(k, e) || host_open(k->config, &k->host, e))
		return -1;
	if (identity_open(k->config->state_dir, &k->identity, e) || load_token(k, e) || next_epoch(k, e) || reserve(k, e))
		return -1;
	say_host(k);
	k->base = event_base_new();
	if (!k->base)
		return err_set(e, ERR_NOMEM, "no memory");
	if (add_events(k, e) || metrics_open(k, e) || images_open(k, &k->images, e) || recover(k, e))
		return -1;
	return link_side_start(k, e);
}

static void free_event(struct event *ev)
{
	if (ev)
		event_free(ev);
}

static void stop(struct keeper *k)
{
	link_side_stop(k);
	metrics_close(k);
	/* Journal and cgroups stay for the next start, which also ends what was half made. */
	while (k->vms) {
		if (k->ends_all)
			vm_free(k->vms);
		else
			vm_leave(k->vms);
	}
	images_free(k->images);
	for (int i = 0; i < 2; i++)
		free_event(k->signals[i]);
	free_event(k->stop_timer);
	free_event(k->sweep_timer);
	free_event(k->reconcile_timer);
	free_event(k->turn);
	if (k->base)
		event_base_free(k->base);
	golden_close(k);
	slots_free(k->slots);
	host_close(&k->host);
	identity_free(k->identity);
	free(k->token_text);
	free(k->token);
	if (k->lock_fd >= 0)
		close(k->lock_fd);
	if (k->ready_fd >= 0)
		close(k->ready_fd);
	free(k);
}

static int check(const struct noded_config *config)
{
	struct host h;
	struct err e;

	if (host_open(config, &h, &e)) {
		fprintf(stderr, "noded: %s\n", e.text);
		return -1;
	}
	printf("configuration: good\nvmm: %s\nisolation: %s\njail: %s\ncgroups: %s\nimage: %s\n", h.vmm.version, h.isolation,
			h.jail, cgroups_text(h.cgroups), h.image_name[0] ? h.image_name : "none yet (controld has it)");
	host_close(&h);
	return 0;
}

int keeper_main(const struct noded_config *config, bool check_only, int ready_fd)
{
	struct keeper *k;
	struct err e;
	int status;

	if (sodium_init() < 0) {
		log_error("libsodium cannot start");
		return -1;
	}
	signal(SIGPIPE, SIG_IGN);
	if (check_only)
		return check(config);
	k = calloc(1, sizeof(*k));
	if (!k)
		return -1;
	k->config = config;
	k->ready_fd = ready_fd;
	k->lock_fd = -1;
	make_tag(k);
	fill_stdio();
	if (ready_fd >= 0)
		fcntl(ready_fd, F_SETFD, FD_CLOEXEC);
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	raise_nofile();
	umask(077);
	if (start(k, &e)) {
		log_error("cannot start error=\"%s\"", e.text);
		k->exit_status = -1;
	} else if (event_base_dispatch(k->base) < 0) {
		log_error("event loop failed");
		k->exit_status = -1;
	}
	status = k->exit_status;
	log_info("stopped");
	stop(k);
	return status;
}
