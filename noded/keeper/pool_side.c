/*
 * The pool of warm VMs: booted, greeted by their broker, waiting for a run of their size; each is used once. How many there ought
 * to be is pool.c's; here they are made and ended. They are in nobody's way: a run that has no room ends as many as it needs, boots
 * of runs come first, and what controld is offered does not count them. Keeper's loop; blocks for journal and spool of a new one.
 */
#include "keeper/keeper_internal.h"
#include "keeper/room.h"

#include "common/clock.h"
#include "common/log.h"
#include "spool.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <string.h>

void pool_open(struct keeper *k)
{
	const struct noded_config *c = k->config;

	pool_init(&k->pool, (uint32_t)c->warm_min, (uint32_t)c->warm_max, (uint32_t)c->warm_memory_mib, (uint32_t)c->warm_vcpus,
			clock_boot_ms());
}

static bool is_warm(const struct vm *vm)
{
	return vm->journal.kind == JOURNAL_WARM && !vm->want.end && !vm->want.destroy;
}

/* Of the image and the VMM that new VMs would have. */
static bool is_current(const struct vm *vm)
{
	const struct host *h = &vm->keeper->host;

	return memcmp(vm->journal.image_hash, h->image_hash, SHA256_LEN) == 0 && strcmp(vm->journal.vmm, h->vmm.version) == 0;
}

static bool is_of_size(const struct vm *vm, uint32_t memory_mib, uint32_t vcpus)
{
	return vm->journal.memory_mib == memory_mib && vm->journal.vcpus == vcpus;
}

/* --- for runs ----------------------------------------------------------------------------------------------------------------- */

/* It waits for its turn, or has a broker that hears; one that is being taken over has not said yet how it is. */
static bool can_be_given(const struct vm *vm)
{
	return is_warm(vm) && is_current(vm) && !vm->vmm_ended && vm->adopt_began_ns == 0 && (vm->seen.waiting || vm->broker);
}

/* The list is in the order of their making: of two that are as far, the older one. */
static bool is_further(const struct vm *vm, const struct vm *than)
{
	if (!than)
		return true;
	if (vm->warm_ready != than->warm_ready)
		return vm->warm_ready;
	return than->seen.waiting && !vm->seen.waiting;
}

struct vm *pool_take(struct keeper *k, uint32_t memory_mib, uint32_t vcpus)
{
	struct vm *best = NULL;

	for (struct vm *vm = k->vms; vm; vm = vm->next)
		if (can_be_given(vm) && is_of_size(vm, memory_mib, vcpus) && is_further(vm, best))
			best = vm;
	return best;
}

void pool_came(struct keeper *k, uint32_t memory_mib, uint32_t vcpus)
{
	pool_demand(&k->pool, memory_mib, vcpus, clock_boot_ms());
}

static void put_away(struct vm *vm, enum stats_warm why, const char *text)
{
	log_info("vm=%s warm, put away reason=\"%s\"", vm->journal.vm, text);
	vm->keeper->stats.warm[why]++;
	vm_kill_silently(vm);
}

void pool_offer(const struct keeper *k, struct admission *out)
{
	*out = k->admission;
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (is_warm(vm)) {
			admission_give_vm(out, vm->journal.memory_mib, vm->journal.vcpus);
			admission_give_slot(out);
		}
}

uint32_t pool_slots(const struct keeper *k)
{
	uint32_t n = 0;

	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		n += is_warm(vm);
	return n;
}

static struct vm *least_far(const struct keeper *k)
{
	struct vm *worst = NULL;

	for (struct vm *vm = k->vms; vm; vm = vm->next)
		if (is_warm(vm) && (!worst || is_further(worst, vm)))
			worst = vm;
	return worst;
}

bool pool_make_room(struct keeper *k, uint32_t memory_mib, uint32_t vcpus)
{
	struct admission all, now;
	struct vm *vm;
	struct err e;

	pool_offer(k, &all);
	if (admission_take(&all, memory_mib, vcpus, &e))
		return false;
	for (now = k->admission; admission_take(&now, memory_mib, vcpus, &e); now = k->admission) {
		vm = least_far(k);
		if (!vm)
			return false;
		admission_give_vm(&k->admission, vm->journal.memory_mib, vm->journal.vcpus);
		admission_give_slot(&k->admission);
		vm->unreserved = true;
		put_away(vm, STATS_WARM_EVICTED, "a run needs its room");
	}
	return true;
}

/* --- its own ------------------------------------------------------------------------------------------------------------------ */

static void make_one(struct keeper *k, const struct pool_size *size)
{
	struct journal j;
	struct vm *vm;
	struct err e;
	int rc;

	if (slots_free_count(k->slots) == 0 || room_on_disk(k->config->state_dir, 2 * SPOOL_BYTES, &e) ||
			!vm_fill_journal(k, JOURNAL_WARM, size->memory_mib, size->vcpus, &j))
		return;
	vm = vm_admit(k, &j, &e);
	if (!vm) {
		if (e.code == ERR_CONFLICT || e.code == ERR_LIMIT)
			return; /* no room: there is none of the pool's own */
		log_warn("a warm vm cannot be made error=\"%s\"", e.text);
		pool_boot(&k->pool, false, clock_boot_ms());
		return;
	}
	/* Now, because it takes longer than anything else at the hand-over. */
	rc = vm_open_spool(vm, &e);
	if (rc == 0) {
		errno = posix_fallocate(vm->spool_fd, 0, SPOOL_BYTES);
		if (errno != 0)
			rc = err_set_errno(&e, "allocate a spool");
	}
	if (rc != 0) {
		vm_fail_start(vm, e.text);
		return;
	}
	vm->seen.waiting = true;
}

static bool run_waits(const struct keeper *k)
{
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (vm->seen.waiting && !vm->want.end && vm->journal.kind == JOURNAL_RUN)
			return true;
	return false;
}

static uint32_t count_size(const struct keeper *k, const struct pool_size *size)
{
	uint32_t n = 0;

	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		n += is_warm(vm) && is_of_size(vm, size->memory_mib, size->vcpus);
	return n;
}

/* Of which size, as an index; POOL_SIZES when nobody asks for its size any more. */
static int size_of(const struct keeper *k, const struct vm *vm)
{
	int i = 0;

	while (i < POOL_SIZES && !is_of_size(vm, k->pool.size[i].memory_mib, k->pool.size[i].vcpus))
		i++;
	return i;
}

/* Those that are too old, of another image, or more than there ought to be; the oldest of them first. */
static void end_surplus(struct keeper *k, const uint32_t target[POOL_SIZES])
{
	int64_t old_ms = clock_boot_ms() - k->config->warm_ttl_seconds * 1000;
	uint32_t have[POOL_SIZES];
	struct vm *next;

	for (int i = 0; i < POOL_SIZES; i++)
		have[i] = count_size(k, &k->pool.size[i]);
	for (struct vm *vm = k->vms; vm; vm = next) {
		int size = size_of(k, vm);
		bool surplus = size == POOL_SIZES || have[size] > target[size];

		next = vm->next;
		if (!is_warm(vm))
			continue;
		if (k->draining)
			put_away(vm, STATS_WARM_EVICTED, "this host takes no runs");
		else if (!is_current(vm))
			put_away(vm, STATS_WARM_EXPIRED, "of another image or VMM");
		else if (surplus)
			put_away(vm, STATS_WARM_EVICTED, "more than are asked for");
		else if (vm->warm_since_ms > 0 && vm->warm_since_ms < old_ms)
			put_away(vm, STATS_WARM_EXPIRED, "too old");
		else
			continue;
		if (size < POOL_SIZES && have[size] > 0)
			have[size]--;
	}
}

/* From a snapshot it is there at once, so that is made first. */
static bool waits_for_golden(const struct keeper *k, int size)
{
	return golden_comes(k, k->pool.size[size].memory_mib, k->pool.size[size].vcpus);
}

static void count(struct keeper *k, const uint32_t target[POOL_SIZES])
{
	k->stats.pool_target = k->stats.pool_ready = k->stats.pool_making = 0;
	for (int i = 0; i < POOL_SIZES; i++)
		k->stats.pool_target += target[i];
	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		if (is_warm(vm)) {
			k->stats.pool_ready += vm->warm_ready;
			k->stats.pool_making += !vm->warm_ready;
		}
}

/* What is taken from the pool is replaced when the run that took it has started. */
static bool deferred(struct keeper *k, int64_t now_ms)
{
	int ms = pool_defer_ms(&k->pool, now_ms);
	const struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };

	return ms > 0 && event_add(k->turn, &tv) == 0;
}

void pool_turn(struct keeper *k)
{
	uint32_t target[POOL_SIZES];
	int64_t now = clock_boot_ms();

	if (k->stopping)
		return; /* what lives on without us is not put away; on_signal ends the others */
	/* Also where there is to be no pool: an earlier noded may have left us one. */
	pool_targets(&k->pool, now, target);
	end_surplus(k, target);
	if (k->pool.max > 0 && !k->draining && k->host.image_name[0] && pool_may_boot(&k->pool, now) && !run_waits(k) &&
			!deferred(k, now))
		for (int i = 0; i < POOL_SIZES; i++)
			for (uint32_t have = count_size(k, &k->pool.size[i]); have < target[i] && !waits_for_golden(k, i); have++)
				make_one(k, &k->pool.size[i]);
	count(k, target);
}

void pool_ready(struct vm *vm)
{
	vm->warm_ready = true;
	vm->warm_since_ms = clock_boot_ms();
	pool_boot(&vm->keeper->pool, true, vm->warm_since_ms);
	log_info("vm=%s warm and ready boot_ms=%lld", vm->journal.vm, (long long)((clock_boot_ns() - vm->boot_began_ns) / 1000000));
	keeper_changed(vm->keeper);
}

void pool_lost(struct vm *vm)
{
	if (vm->journal.kind != JOURNAL_WARM || vm->keeper->stopping)
		return;
	vm->keeper->stats.warm[STATS_WARM_DIED]++;
	pool_boot(&vm->keeper->pool, false, clock_boot_ms());
}

void pool_image_changed(struct keeper *k)
{
	keeper_changed(k); /* the turn ends those that are not current */
}
