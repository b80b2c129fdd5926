/*
 * Golden VMs: one of each size that runs ask for is booted up to where its agent waits for the first word, made a snapshot of, and
 * ended. VMs of that size then go on from the snapshot instead of booting. Nothing was said to the guest before, so it holds no
 * nonce, no entropy and no time that a clone would share; the agent takes those with its setup.
 *
 * A snapshot is of one image, VMM binary and size, and lives no longer than this process. It is dropped when anything of that
 * changes, or when a clone does not come up. It is in nobody's way: runs boot cold until it is there, and it boots when none does.
 * Keeper's loop; blocks on small files.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "jail/cgroup.h"
#include "jail/sealed.h"
#include "keeper/files.h"

#include <dirent.h>
#include <event2/event.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FRAME_MAX 65536
#define MIB (UINT64_C(1) << 20)
#define LOOK_MS 100         /* between looks at how busy the guest is */
#define IDLE_US 25000       /* CPU time between two looks of a guest that waits */
#define IDLE_LOOKS 3        /* in a row */
#define LOOKS_MAX 100       /* then it is taken as it is */
#define PAUSE_ROOM_MS 10000 /* there was no room for it */
#define PAUSE_FIRST_MS 2000 /* after one that came to nothing, or whose clone did; doubles */
#define PAUSE_MAX_MS 600000

struct golden {
	struct keeper *keeper;
	uint32_t memory_mib, vcpus;
	uint8_t image_hash[SHA256_LEN];
	char vmm[65];
	struct stat binary;
	int ram_fd, state_fd; /* memfds, sealed when it is ready; -1: the driver's snapshots are files */
	char dir[700];        /* of those */
	uint32_t counted_mib; /* taken from what runs may have */
	/* While it is made. */
	struct event *look;
	uint64_t cpu_us;
	uint32_t looks, idle;
	bool asked, done;
};

/* --- making and dropping ------------------------------------------------------------------------------------------------------ */

static void remove_dir(const char *path)
{
	DIR *d = opendir(path);
	struct dirent *entry;
	char below[1400];

	while (d && (entry = readdir(d)) != NULL)
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
				text_fmt(below, sizeof(below), "%s/%s", path, entry->d_name) && unlink(below) != 0)
			remove_dir(below); /* two levels are all that a driver makes */
	if (d)
		closedir(d);
	rmdir(path);
}

void golden_free(struct golden *g)
{
	if (!g)
		return;
	if (g->look)
		event_free(g->look);
	if (g->ram_fd >= 0)
		close(g->ram_fd);
	if (g->state_fd >= 0)
		close(g->state_fd);
	if (g->dir[0])
		remove_dir(g->dir);
	free(g);
}

/* Memory of the snapshot is memory that no VM has. */
static void count_memory(struct golden *g, bool add)
{
	struct admission *a = &g->keeper->admission;
	struct stat st;

	if (add && g->ram_fd >= 0 && fstat(g->ram_fd, &st) == 0)
		g->counted_mib = (uint32_t)(((uint64_t)st.st_blocks * 512 + MIB - 1) / MIB);
	if (add && g->counted_mib > a->total_memory_mib)
		g->counted_mib = a->total_memory_mib;
	if (add)
		a->total_memory_mib -= g->counted_mib;
	else
		a->total_memory_mib += g->counted_mib;
}

static void drop(struct keeper *k, int i, const char *why)
{
	struct golden *g = k->golden.of[i];

	log_info("golden snapshot dropped memory_mib=%u vcpus=%u reason=\"%s\"", g->memory_mib, g->vcpus, why);
	k->stats.goldens[STATS_GOLDEN_DISCARDED]++;
	count_memory(g, false);
	golden_free(g); /* clones that run have their own hold on it */
	k->golden.of[i] = NULL;
	keeper_changed(k);
}

static void pause_after_failure(struct keeper *k)
{
	int64_t pause = PAUSE_FIRST_MS;

	for (uint32_t i = 0; i < k->golden.failures && pause < PAUSE_MAX_MS; i++)
		pause *= 2;
	k->golden.failures++;
	k->golden.pause_until_ms = clock_boot_ms() + (pause < PAUSE_MAX_MS ? pause : PAUSE_MAX_MS);
}

static bool binary_is(const struct golden *g)
{
	struct stat st;

	return stat(g->keeper->host.binary, &st) == 0 && st.st_dev == g->binary.st_dev && st.st_ino == g->binary.st_ino &&
	       st.st_size == g->binary.st_size && st.st_mtim.tv_sec == g->binary.st_mtim.tv_sec &&
	       st.st_mtim.tv_nsec == g->binary.st_mtim.tv_nsec;
}

static bool is_current(const struct golden *g)
{
	const struct host *h = &g->keeper->host;

	return memcmp(g->image_hash, h->image_hash, SHA256_LEN) == 0 && strcmp(g->vmm, h->vmm.version) == 0 && binary_is(g);
}

/* --- for the VMs -------------------------------------------------------------------------------------------------------------- */

static bool wanted(const struct keeper *k)
{
	return k->config->start_mode == START_MODE_AUTO;
}

static int find(const struct keeper *k, uint32_t memory_mib, uint32_t vcpus)
{
	for (int i = 0; i < POOL_SIZES; i++)
		if (k->golden.of[i] && k->golden.of[i]->memory_mib == memory_mib && k->golden.of[i]->vcpus == vcpus)
			return i;
	return -1;
}

/* What a VM starts from; NULL: it boots. */
static struct golden *source(const struct vm *vm)
{
	int i = find(vm->keeper, vm->journal.memory_mib, vm->journal.vcpus);

	if (!wanted(vm->keeper) || vm->journal.kind == JOURNAL_GOLDEN || i < 0 || !is_current(vm->keeper->golden.of[i]))
		return NULL;
	return vm->keeper->golden.of[i];
}

int golden_choose(struct vm *vm, struct err *e)
{
	struct golden *g = vm->making;

	if (!g) {
		vm->journal.start_mode = source(vm) ? JOURNAL_CLONE : JOURNAL_COLD;
		return 0;
	}
	if (vm->keeper->host.driver->golden_begin) {
		if (!text_fmt(g->dir, sizeof(g->dir), "%s/%s", vm->keeper->golden.dir, vm->journal.vm))
			return err_set(e, ERR_LIMIT, "state_dir is too long");
		return 0; /* it is made when its owner's number is known */
	}
	g->ram_fd = memfd_create("golden-ram", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	g->state_fd = memfd_create("golden-state", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	/* Everybody's mode: the VMM opens it by its descriptor's path, for writing too; what may be done is the seals'. */
	if (g->ram_fd < 0 || g->state_fd < 0 || ftruncate(g->ram_fd, (off_t)(g->memory_mib * MIB)) != 0 ||
			fchmod(g->ram_fd, 0666) != 0)
		return err_set_errno(e, "memory for a golden VM");
	return 0;
}

int golden_params(const struct vm *vm, struct vmm_params *p, struct err *e)
{
	struct golden *g = vm->making ? vm->making : vm->journal.start_mode == JOURNAL_CLONE ? source(vm) : NULL;
	char path[64];

	if (!g)
		return vm->journal.start_mode == JOURNAL_CLONE ? err_set(e, ERR_NOT_FOUND, "the snapshot is gone") : 0;
	p->start = vm->making ? VMM_GOLDEN : VMM_CLONE;
	p->ram_fd = g->ram_fd;
	p->golden_dir = g->dir[0] ? g->dir : NULL;
	if (vm->making || g->state_fd < 0)
		return 0;
	/* Each clone reads from the beginning, so each has an open file of its own. */
	p->state_fd = text_fmt(path, sizeof(path), "/proc/self/fd/%d", g->state_fd) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	return p->state_fd >= 0 ? 0 : err_set_errno(e, "open the snapshot's state");
}

void golden_clone_failed(struct vm *vm, const char *why)
{
	struct keeper *k = vm->keeper;
	int i = find(k, vm->journal.memory_mib, vm->journal.vcpus);

	if (vm->journal.start_mode != JOURNAL_CLONE || vm->clone_failed || vm->warm_ready || vm->journal.state >= JOURNAL_ASKED)
		return;
	vm->clone_failed = true;
	log_warn("run=%s vm=%s clone did not come up reason=\"%s\"", vm->journal.run_id, vm->journal.vm, why);
	pause_after_failure(k);
	if (i >= 0)
		drop(k, i, "a clone of it did not come up");
}

/* --- its own VM --------------------------------------------------------------------------------------------------------------- */

static void ask_for_snapshot(struct vm *vm)
{
	struct golden *g = vm->making;
	const int *fds = g->state_fd >= 0 ? &g->state_fd : NULL;

	g->asked = true;
	if (!vm->broker || !framed_send_fds(vm->broker, RF_CH_SNAPSHOT, NULL, 0, fds, fds ? 1 : 0))
		vm_fail_start(vm, "channel does not take frames");
}

/* Its agent has opened the channel and is on its way to wait there: when the guest has nothing to do any more, it does. */
static void on_look(evutil_socket_t fd, short what, void *arg)
{
	const struct timeval tv = { .tv_usec = LOOK_MS * 1000 };
	struct vm *vm = arg;
	struct golden *g = vm->making;
	uint64_t cpu_us = vm->proc[SLOT_VMM].cgroup ? cgroup_cpu_us(vm->proc[SLOT_VMM].cgroup) : 0;

	(void)fd;
	(void)what;
	if (vm->want.end)
		return;
	g->idle = g->looks > 0 && cpu_us > 0 && cpu_us - g->cpu_us < IDLE_US ? g->idle + 1 : 0;
	g->cpu_us = cpu_us;
	if (++g->looks >= LOOKS_MAX || g->idle >= IDLE_LOOKS)
		ask_for_snapshot(vm);
	else
		event_add(g->look, &tv);
}

static int take_snapshot(struct vm *vm, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	char why[ERR_TEXT_MAX];
	bool done;

	wire_read_init(&r, body, n);
	done = wire_bool(&r);
	wire_str_fixed(&r, why, sizeof(why));
	if (wire_end(&r, "snapshot", e))
		return -1;
	if (!vm->making->asked)
		return err_set(e, ERR_PROTOCOL, "a snapshot that nobody asked for");
	if (!done)
		return err_set(e, ERR_UNAVAILABLE, "no snapshot: %s", why);
	vm->making->done = true;
	vm_kill_silently(vm); /* what is left to do is done when nothing of it is alive: golden_over */
	return 0;
}

static void on_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	const struct timeval soon = { .tv_usec = LOOK_MS * 1000 };
	struct vm *vm = arg;
	struct err e;
	int rc = 0;

	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	if (vm->want.end)
		return;
	switch (type) {
	case RF_CB_VMM_UP:
	case RF_CB_CONSOLE: break;
	case RF_CB_GUEST_OPEN:
		if (vm->making->looks == 0)
			event_add(vm->making->look, &soon);
		break;
	case RF_CB_SNAPSHOT: rc = take_snapshot(vm, body, n, &e); break;
	default: rc = err_set(&e, ERR_PROTOCOL, "the golden VM's channel says type %u", type); break;
	}
	if (rc != 0)
		vm_fail_start(vm, e.text);
}

static void on_end(void *arg, const struct err *e)
{
	struct vm *vm = arg;

	framed_free(vm->broker);
	vm->broker = NULL;
	vm_fail_start(vm, e ? e->text : "its channel ended");
}

int golden_side_open(struct vm *vm, int fd, struct err *e)
{
	struct framed_options opt = {
		.fd = fd, .max_frame = FRAME_MAX, .max_queued = FRAME_MAX, .on_frame = on_frame, .on_end = on_end, .arg = vm
	};

	if (framed_new(vm->keeper->base, &opt, &vm->broker, e))
		return -1;
	vm->making->look = event_new(vm->keeper->base, -1, 0, on_look, vm);
	return vm->making->look ? 0 : err_set(e, ERR_NOMEM, "no memory");
}

/* Nobody can write to it from here on. */
static int seal(struct golden *g, struct err *e)
{
	if (g->dir[0])
		return g->keeper->host.driver->golden_seal(g->dir, e);
	if (sealed_close(g->ram_fd, "a golden VM's memory", e))
		return -1;
	return sealed_close(g->state_fd, "a golden VM's state", e);
}

static int place_of(const struct keeper *k)
{
	for (int i = 0; i < POOL_SIZES; i++)
		if (!k->golden.of[i])
			return i;
	return -1;
}

void golden_over(struct vm *vm)
{
	struct keeper *k = vm->keeper;
	struct golden *g = vm->making;
	int i = place_of(k);
	struct err e = { 0 };

	if (!g || k->golden.vm != vm)
		return;
	k->golden.vm = NULL;
	keeper_changed(k);
	if (!g->done || i < 0 || !is_current(g) || seal(g, &e)) {
		log_warn("no golden snapshot memory_mib=%u vcpus=%u error=\"%s\"", g->memory_mib, g->vcpus, e.text);
		k->stats.goldens[STATS_GOLDEN_FAILED]++;
		pause_after_failure(k);
		return; /* freed with its VM */
	}
	count_memory(g, true);
	k->golden.of[i] = g;
	vm->making = NULL;
	k->golden.failures = 0;
	k->stats.goldens[STATS_GOLDEN_MADE]++;
	log_info("golden snapshot ready memory_mib=%u vcpus=%u held_mib=%u looks=%u", g->memory_mib, g->vcpus, g->counted_mib,
			g->looks);
}

/* --- by itself ---------------------------------------------------------------------------------------------------------------- */

void golden_open(struct keeper *k)
{
	DIR *d;
	struct dirent *entry;
	char path[1400];
	struct err e;

	if (!text_fmt(k->golden.dir, sizeof(k->golden.dir), "%s/golden", k->config->state_dir) ||
			files_mkdir(k->golden.dir, 0700, &e))
		return; /* then drivers that need it fail with their own words */
	d = opendir(k->golden.dir);
	while (d && (entry = readdir(d)) != NULL)
		if (id_valid("vm", entry->d_name) && text_fmt(path, sizeof(path), "%s/%s", k->golden.dir, entry->d_name))
			remove_dir(path); /* an earlier noded's */
	if (d)
		closedir(d);
}

void golden_close(struct keeper *k)
{
	for (int i = 0; i < POOL_SIZES; i++) {
		golden_free(k->golden.of[i]);
		k->golden.of[i] = NULL;
	}
}

static void make(struct keeper *k, const struct pool_size *size)
{
	struct golden *g = calloc(1, sizeof(*g));
	struct journal j;
	struct vm *vm = NULL;
	struct err e = { 0 };

	if (!g)
		return;
	*g = (struct golden){ .keeper = k, .memory_mib = size->memory_mib, .vcpus = size->vcpus, .ram_fd = -1, .state_fd = -1 };
	memcpy(g->image_hash, k->host.image_hash, SHA256_LEN);
	if (text_copy(g->vmm, sizeof(g->vmm), k->host.vmm.version) && stat(k->host.binary, &g->binary) == 0 &&
			vm_fill_journal(k, JOURNAL_GOLDEN, size->memory_mib, size->vcpus, &j))
		vm = vm_admit(k, &j, &e);
	if (!vm) {
		log_debug("no golden snapshot now reason=\"%s\"", e.text);
		golden_free(g);
		k->golden.pause_until_ms = clock_boot_ms() + PAUSE_ROOM_MS;
		return;
	}
	vm->making = g;
	k->golden.vm = vm;
	vm->seen.waiting = true;
}

static bool runs_start(const struct keeper *k)
{
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (vm->journal.kind == JOURNAL_RUN && !vm->want.end && (vm->seen.waiting || vm->booting))
			return true;
	return false;
}

static bool size_is_asked_for(const struct keeper *k, const struct golden *g)
{
	for (int i = 0; i < POOL_SIZES; i++)
		if (k->pool.size[i].memory_mib == g->memory_mib && k->pool.size[i].vcpus == g->vcpus)
			return true;
	return false;
}

bool golden_comes(const struct keeper *k, uint32_t memory_mib, uint32_t vcpus)
{
	return wanted(k) && find(k, memory_mib, vcpus) < 0 && clock_boot_ms() >= k->golden.pause_until_ms;
}

void golden_turn(struct keeper *k)
{
	for (int i = 0; i < POOL_SIZES; i++)
		if (k->golden.of[i] && !is_current(k->golden.of[i]))
			drop(k, i, "image or VMM changed");
		else if (k->golden.of[i] && !size_is_asked_for(k, k->golden.of[i]))
			drop(k, i, "nobody asks for this size");
	if (!wanted(k) || k->golden.vm || k->stopping || k->draining || k->lease_deadline_boot_ns == 0 || runs_start(k))
		return;
	for (int i = 0; i < POOL_SIZES && !k->golden.vm; i++) {
		const struct pool_size *size = &k->pool.size[i];

		if (size->memory_mib > 0 && golden_comes(k, size->memory_mib, size->vcpus))
			make(k, size);
	}
}
