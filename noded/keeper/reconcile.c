/*
 * What is on this host against what keeper knows, in both directions: at the start and every reconcile_seconds. A round is cut into
 * slices, one turn of the loop each, so that nothing waits for it; each reads one directory, or /proc, or the list of VMs. What
 * belongs to nothing is removed, what is missing is made again where that can be, and each find is logged with what was done and
 * counted (STATS_LEFT_*). Keeper's loop; blocks for small files only.
 */
#include "keeper/keeper_internal.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "jail/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <event2/event.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLICE_PAUSE_MS 20
#define SOCKETS 2

static const char *const socket_names[SOCKETS] = { VM_CTL_NAME, "api" };

/* --- groups ------------------------------------------------------------------------------------------------------------------- */

bool reconcile_is_ours(const struct keeper *k, const char *group)
{
	const char *tag = strrchr(group, '.');

	return tag && strcmp(tag + 1, k->tag) == 0;
}

static bool has_group(const struct keeper *k, const char *name)
{
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		for (int role = 0; role < SLOT_ROLES; role++)
			if (strcmp(vm->journal.cgroup[role], name) == 0)
				return true;
	return false;
}

/* Its entry in the journal was lost, or never whole. */
static void on_group(void *arg, const char *name)
{
	struct keeper *k = arg;
	struct cgroup *g;
	struct err e;
	bool lived, gone;

	if (!reconcile_is_ours(k, name) || has_group(k, name))
		return;
	g = cgroup_adopt(k->host.cgroups, name);
	if (!g)
		return;
	lived = cgroup_populated(g);
	cgroup_kill(g);
	gone = cgroup_remove(g, &e) == 0;
	cgroup_free(g);
	k->stats.leftovers[STATS_LEFT_CGROUP]++;
	k->stats.leftovers[STATS_LEFT_PROCESS] += lived;
	log_warn("a group of no VM name=%s had_processes=%d removed=%d", name, lived, gone);
}

void reconcile_groups(struct keeper *k)
{
	cgroups_each(k->host.cgroups, "vm_", on_group, k);
}

/* --- directories and sockets -------------------------------------------------------------------------------------------------- */

static void remove_directory(struct keeper *k, const char *id)
{
	char path[512];
	bool gone;

	for (int i = 0; i < SOCKETS; i++)
		if (text_fmt(path, sizeof(path), "%s/%s/%s", k->vm_dir, id, socket_names[i]) && unlink(path) == 0) {
			k->stats.leftovers[STATS_LEFT_SOCKET]++;
			log_warn("a socket of no VM is removed path=%s", path);
		}
	for (int i = 0; i < SLOT_ROLES; i++)
		if (text_fmt(path, sizeof(path), "%s/%s/%s", k->vm_dir, id, vm_role_names[i]))
			rmdir(path);
	gone = text_fmt(path, sizeof(path), "%s/%s", k->vm_dir, id) && rmdir(path) == 0;
	k->stats.leftovers[STATS_LEFT_DIRECTORY]++;
	log_warn("a directory of no VM path=%s removed=%d errno=%d", path, gone, gone ? 0 : errno);
}

void reconcile_directories(struct keeper *k)
{
	DIR *d = opendir(k->vm_dir);
	struct dirent *entry;

	if (!d)
		return;
	while ((entry = readdir(d)) != NULL)
		if (id_valid("vm", entry->d_name) && !vm_named(k, entry->d_name))
			remove_directory(k, entry->d_name);
	closedir(d);
}

/* --- journal ------------------------------------------------------------------------------------------------------------------ */

static void on_entry(void *arg, const struct journal *j)
{
	struct keeper *k = arg;

	if (vm_named(k, j->vm))
		return;
	k->stats.leftovers[STATS_LEFT_JOURNAL]++;
	log_warn("run=%s vm=%s an entry of the journal that nobody here made: treated as at a start", j->run_id, j->vm);
	recover_entry(k, j);
}

static void reconcile_journal(struct keeper *k)
{
	char path[700];
	struct err e;

	for (const struct vm *vm = k->vms; vm; vm = vm->next) {
		if (!text_fmt(path, sizeof(path), "%s/%s", k->journal_dir, vm->journal.vm) || access(path, F_OK) == 0 ||
				errno != ENOENT)
			continue;
		k->stats.leftovers[STATS_LEFT_JOURNAL]++;
		if (journal_store(k->journal_dir, &vm->journal, &e) == 0)
			log_warn("run=%s vm=%s its journal entry was gone, and is written again", vm->journal.run_id,
					vm->journal.vm);
		else
			log_error("run=%s vm=%s its journal entry is gone error=\"%s\"", vm->journal.run_id, vm->journal.vm,
					e.text);
	}
	if (journal_each(k->journal_dir, on_entry, k, &e))
		log_error("journal error=\"%s\"", e.text);
}

/* --- spools and disk ---------------------------------------------------------------------------------------------------------- */

/* A spool whose name is gone serves on, but no later noded could go on with it. What belongs to no VM goes by its age
 * (recover_sweep_spools, which the loop calls more often than this). */
static void reconcile_spools(struct keeper *k)
{
	struct stat st;

	for (struct vm *vm = k->vms; vm; vm = vm->next) {
		if (vm->spool_fd < 0 || !vm->spool_path[0] || vm->spool_lost || fstat(vm->spool_fd, &st) != 0 || st.st_nlink > 0)
			continue;
		vm->spool_lost = true;
		k->stats.leftovers[STATS_LEFT_DISK]++;
		log_error("run=%s vm=%s somebody removed its record: it goes on, but not beyond this noded path=%s",
				vm->journal.run_id, vm->journal.vm, vm->spool_path);
	}
}

/* --- slots and processes ------------------------------------------------------------------------------------------------------ */

static bool has_slot(const struct keeper *k, uint32_t slot)
{
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (vm->journal.slot == slot && !vm->seen.closed)
			return true;
	return false;
}

static void reconcile_slots(struct keeper *k)
{
	uint32_t foreign;

	for (uint32_t slot = 0; slot < slots_count(k->slots); slot++) {
		const bool taken = slots_taken(k->slots, slot), held = has_slot(k, slot);

		if (taken == held)
			continue;
		k->stats.leftovers[STATS_LEFT_SLOT]++;
		log_error("slot=%u is %s: put right", slot, taken ? "taken by no VM" : "free, and a VM has it");
		if (taken)
			slots_give(k->slots, slot);
		else if (!slots_hold(k->slots, slot))
			log_odd("slot", __FILE__, __LINE__);
	}
	foreign = recover_look_at_slots(k);
	k->stats.leftovers[STATS_LEFT_PROCESS] += foreign;
}

/* --- what link holds ---------------------------------------------------------------------------------------------------------- */

/* Link answers for what it holds and we do not (it drops it), and for what we have and it does not know (it is told again). */
static void reconcile_leases(struct keeper *k)
{
	struct buf b = BUF_INIT(64 * 1024);
	uint32_t count = 0;

	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		count += vm->journal.kind == JOURNAL_RUN && !vm->want.forget;
	wire_put_u32(&b, count);
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (vm->journal.kind == JOURNAL_RUN && !vm->want.forget)
			wire_put_raw(&b, vm->journal.token, TOKEN_LEN);
	if (!b.failed)
		link_side_send(k, RF_LINK_RUNS, b.data, b.len);
	buf_free(&b);
}

void reconcile_link_says(struct keeper *k, uint32_t dropped, const uint8_t *unknown, size_t count)
{
	k->stats.leftovers[STATS_LEFT_LEASE] += dropped;
	if (dropped > 0)
		log_error("link held runs that are not here: dropped, controld gives them to others or ends them runs=%u", dropped);
	for (size_t i = 0; i < count; i++) {
		struct vm *vm = vm_find(k, unknown + i * TOKEN_LEN);

		if (!vm || vm->want.forget)
			continue; /* its end crossed with our list */
		k->stats.leftovers[STATS_LEFT_LEASE]++;
		log_error("run=%s vm=%s link did not know of it, and is told again", vm->journal.run_id, vm->journal.vm);
		link_side_vm(k, vm);
	}
}

/* --- rounds ------------------------------------------------------------------------------------------------------------------- */

static void (*const slices[])(struct keeper *) = { reconcile_groups, reconcile_directories, reconcile_journal, reconcile_spools,
	reconcile_slots, reconcile_leases };
#define SLICES (sizeof(slices) / sizeof(slices[0]))

static uint64_t finds(const struct keeper *k)
{
	uint64_t sum = 0;

	for (int i = 0; i < STATS_LEFTOVERS; i++)
		sum += k->stats.leftovers[i];
	return sum;
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct timeval next = { .tv_usec = SLICE_PAUSE_MS * 1000 };
	struct keeper *k = arg;

	(void)fd;
	(void)what;
	if (k->stopping)
		return;
	if (k->reconcile_slice == 0)
		k->reconcile_finds = finds(k);
	slices[k->reconcile_slice++](k);
	if (k->reconcile_slice == SLICES) {
		log_debug("reconciled finds=%llu", (unsigned long long)(finds(k) - k->reconcile_finds));
		k->reconcile_slice = 0;
		next = (struct timeval){ .tv_sec = k->config->reconcile_seconds };
	}
	event_add(k->reconcile_timer, &next);
}

int reconcile_start(struct keeper *k, struct err *e)
{
	const struct timeval first = { .tv_sec = k->config->reconcile_seconds };

	k->reconcile_timer = event_new(k->base, -1, 0, on_timer, k);
	if (!k->reconcile_timer || event_add(k->reconcile_timer, &first) != 0)
		return err_set(e, ERR_NOMEM, "no memory");
	return 0;
}
