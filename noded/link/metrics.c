/*
 * What a scrape of this host sees: keeper's figures as it told them last (keeper/stats.h), and link's own. One table of families
 * and one function that writes them in its order. On link's loop, from memory; the listener's socket is keeper's, so that its
 * address outlives a link.
 */
#include "link_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/metrics_http.h"

#include <string.h>
#include <unistd.h>

enum family {
	BUILD,
	HOST,
	VMS,
	VM_MEMORY,
	VM_MEMORY_LARGEST,
	VM_CPU,
	STARTS,
	START_SECONDS,
	DESTROY_SECONDS,
	BOOTS,
	BOOT_PLACES,
	BOOTS_AGAIN,
	REFUSALS,
	ROOM_MEMORY,
	ROOM_VCPUS,
	ROOM_SLOTS,
	DISK,
	DRAINING,
	STOPPING,
	POOL,
	WARM,
	GOLDENS,
	ADOPTIONS,
	LEFTOVERS,
	VMM_ENDED,
	OOM_KILLS,
	SECCOMP_KILLS,
	LEASE_OVERDUE,
	CALLS,
	DENIALS,
	MODEL_AGAIN,
	UNMETERED,
	OVER_HOLD,
	OVERRUN,
	SPOOL,
	SPOOL_FULLEST,
	SPOOL_FULL,
	UNACKNOWLEDGED,
	RUNS,
	CONTROLDS,
	RECONNECTS,
	REQUESTS,
	POLL_AGE,
	LEASE_LEFT,
	CLOCK_OFFSET,
	LINK_RESTARTS,
	FAMILIES
};

#define N "ephemeral_node_"
static const struct metrics_family table[FAMILIES] = {
	[BUILD] = { N "build", METRICS_INFO, NULL, "The noded that answers." },
	[HOST] = { N "host", METRICS_INFO, NULL, "The host's VMM, the image of new VMs by its hash, isolation class and jail." },
	[VMS] = { N "vms", METRICS_GAUGE, NULL, "VMs on this host by state." },
	[VM_MEMORY] = { N "vm_memory_bytes", METRICS_GAUGE, "bytes",
			"Memory that all VMMs use, as their control groups count it." },
	[VM_MEMORY_LARGEST] = { N "vm_memory_largest_bytes", METRICS_GAUGE, "bytes", "Memory of the VMM that uses most." },
	[VM_CPU] = { N "vm_cpu_seconds", METRICS_COUNTER, "seconds", "CPU time of all VMMs, those that are gone included." },
	[STARTS] = { N "starts", METRICS_COUNTER, NULL,
			"Starts of runs by start mode and result: ok, failed (counts against this host), ended (before its worker "
			"started)." },
	[START_SECONDS] = { N "start_seconds", METRICS_HISTOGRAM, "seconds",
			"From the assignment's arrival to worker.started being asked for, by start mode." },
	[DESTROY_SECONDS] = { N "destroy_seconds", METRICS_HISTOGRAM, "seconds",
			"From the order to kill a VM, or its own end, until nothing of it is left." },
	[BOOTS] = { N "boots", METRICS_GAUGE, NULL, "VMs that boot now." },
	[BOOT_PLACES] = { N "boot_places", METRICS_GAUGE, NULL, "VMs that may boot at once." },
	[BOOTS_AGAIN] = { N "boots_again", METRICS_COUNTER, NULL, "Runs whose VM did not boot and was started once more." },
	[REFUSALS] = { N "refusals", METRICS_COUNTER, NULL, "Assignments that this host did not take, by reason." },
	[ROOM_MEMORY] = { N "memory_bytes", METRICS_GAUGE, "bytes", "Memory for VMs: reserved, and all there is to reserve." },
	[ROOM_VCPUS] = { N "vcpus", METRICS_GAUGE, NULL, "Virtual CPUs: reserved, and all there are to reserve." },
	[ROOM_SLOTS] = { N "slots", METRICS_GAUGE, NULL, "Places for VMs: taken, and all there are." },
	[DISK] = { N "disk_bytes", METRICS_GAUGE, "bytes", "The file system of state_dir: free, and its size." },
	[DRAINING] = { N "draining", METRICS_GAUGE, NULL, "1 while this host takes no new runs because an operator drains it." },
	[STOPPING] = { N "stopping", METRICS_GAUGE, NULL, "1 while noded ends." },
	[POOL] = { N "pool_vms", METRICS_GAUGE, NULL, "The warm pool: VMs wanted, ready and in the making." },
	[WARM] = { N "warm_vms", METRICS_COUNTER, NULL, "What became of warm VMs." },
	[GOLDENS] = { N "goldens", METRICS_COUNTER, NULL, "Golden snapshots by what became of them." },
	[ADOPTIONS] = { N "adoptions", METRICS_COUNTER, NULL,
			"VMs that an earlier noded left: adopted, or killed because of the reason named." },
	[LEFTOVERS] = { N "leftovers", METRICS_COUNTER, NULL,
			"Things of VMs that belong to no VM, by kind, as reconcile found and removed them." },
	[VMM_ENDED] = { N "vmm_ended", METRICS_COUNTER, NULL, "VMMs that ended by themselves." },
	[OOM_KILLS] = { N "oom_kills", METRICS_COUNTER, NULL, "Processes over their memory limit, by role." },
	[SECCOMP_KILLS] = { N "seccomp_kills", METRICS_COUNTER, NULL,
			"Processes killed for a system call that they may not make, by role." },
	[LEASE_OVERDUE] = { N "lease_overdue", METRICS_COUNTER, NULL,
			"VMs that keeper destroyed because their broker let the lease pass." },
	[CALLS] = { N "calls", METRICS_COUNTER, NULL, "Outward calls of runs by kind and result." },
	[DENIALS] = { N "denials", METRICS_COUNTER, NULL, "What runs asked for against their policy, by rule." },
	[MODEL_AGAIN] = { N "model_retries", METRICS_COUNTER, NULL, "Attempts of model calls beyond their first." },
	[UNMETERED] = { N "unmetered_replies", METRICS_COUNTER, NULL, "Model replies without usage: their hold was charged." },
	[OVER_HOLD] = { N "over_hold_replies", METRICS_COUNTER, NULL, "Model replies whose usage was above their hold." },
	[OVERRUN] = { N "overrun_micros", METRICS_COUNTER, "micros",
			"Millionths of a US dollar that such replies cost above their holds: the operator's loss, never a "
			"client's." },
	[SPOOL] = { N "spool_bytes", METRICS_GAUGE, "bytes", "Disk that the spools of runs on this host take." },
	[SPOOL_FULLEST] = { N "spool_fullest_ratio", METRICS_GAUGE, NULL,
			"How full the fullest spool is, of what a run may write." },
	[SPOOL_FULL] = { N "spool_full", METRICS_COUNTER, NULL, "Runs that ended because their spool could not be written." },
	[UNACKNOWLEDGED] = { N "events_unacknowledged", METRICS_GAUGE, NULL,
			"Events on this host that controld has not stored yet." },
	[RUNS] = { N "runs_held", METRICS_GAUGE, NULL, "Runs that link has something to say of." },
	[CONTROLDS] = { N "controlds", METRICS_GAUGE, NULL, "Addresses of controld: known, connected, and ready to be asked." },
	[RECONNECTS] = { N "reconnects", METRICS_COUNTER, NULL, "Connections to a controld that were made." },
	[REQUESTS] = { N "link_requests", METRICS_COUNTER, NULL, "Requests to controld by type and result; none: no answer came." },
	[POLL_AGE] = { N "poll_age_seconds", METRICS_GAUGE, "seconds", "Since a poll last was answered; -1 before the first." },
	[LEASE_LEFT] = { N "lease_left_seconds", METRICS_GAUGE, "seconds",
			"Until brokers here kill their VMs unless the lease is renewed; 0 without one." },
	[CLOCK_OFFSET] = { N "clock_offset_seconds", METRICS_GAUGE, "seconds",
			"How far controld's wall clock is before this host's, compared at each new connection." },
	[LINK_RESTARTS] = { N "link_restarts", METRICS_COUNTER, NULL, "Link processes that ended and were started anew." },
};

/* --- writing ------------------------------------------------------------------------------------------------------------------ */

static void begin(struct metrics *m, enum family f)
{
	metrics_begin(m, &table[f]);
}

static void one(struct metrics *m, enum family f, uint64_t value)
{
	begin(m, f);
	metrics_plain(m, (int64_t)value, 0);
}

static void each(struct metrics *m, enum family f, const char *label, const char *const *names, size_t n, const uint64_t *values)
{
	begin(m, f);
	metrics_each(m, label, names, n, values);
}

static void pair(struct metrics *m, enum family f, const char *a, uint64_t a_value, const char *b, uint64_t b_value)
{
	const char *const names[] = { a, b };
	const uint64_t values[] = { a_value, b_value };

	each(m, f, "state", names, 2, values);
}

static void write_host(const struct link *l, struct metrics *m)
{
	const struct metrics_label build = { .name = "version", .value = EPHEMERAL_VERSION };
	const struct metrics_label host[] = {
		{ .name = "vmm", .value = l->host.vmm },
		{ .name = "image", .value = l->host.image },
		{ .name = "isolation", .value = l->host.isolation },
		{ .name = "jail", .value = l->host.jail },
	};

	begin(m, BUILD);
	metrics_value(m, &build, 1, 1, 0);
	begin(m, HOST);
	metrics_value(m, host, sizeof(host) / sizeof(host[0]), 1, 0);
}

static void write_vms(const struct keeper_stats *s, struct metrics *m)
{
	each(m, VMS, "state", stats_vm_names, STATS_VMS, s->vms);
	one(m, VM_MEMORY, s->vm_memory_bytes);
	one(m, VM_MEMORY_LARGEST, s->vm_memory_max_bytes);
	begin(m, VM_CPU);
	metrics_plain(m, (int64_t)s->vm_cpu_us, 6);
	begin(m, STARTS);
	metrics_each2(m, "mode", stats_mode_names, STATS_MODES, "result", stats_start_names, STATS_STARTS, s->starts[0]);
	begin(m, START_SECONDS);
	for (size_t i = 0; i < STATS_MODES; i++) {
		const struct metrics_label mode = { .name = "mode", .value = stats_mode_names[i] };

		metrics_times(m, &mode, 1, stats_bounds_ms, STATS_BUCKETS, s->start[i].bucket, s->start[i].sum_ms);
	}
	begin(m, DESTROY_SECONDS);
	metrics_times(m, NULL, 0, stats_bounds_ms, STATS_BUCKETS, s->destroy.bucket, s->destroy.sum_ms);
	one(m, BOOTS, s->booting);
	one(m, BOOT_PLACES, s->max_booting);
	one(m, BOOTS_AGAIN, s->boots_again);
}

static void write_room(const struct keeper_stats *s, struct metrics *m)
{
	each(m, REFUSALS, "reason", stats_refusal_names, STATS_REFUSALS, s->refusals);
	pair(m, ROOM_MEMORY, "reserved", s->used_memory_mib << 20, "total", s->total_memory_mib << 20);
	pair(m, ROOM_VCPUS, "reserved", s->used_vcpus, "total", s->total_vcpus);
	pair(m, ROOM_SLOTS, "taken", s->used_slots, "total", s->total_slots);
	pair(m, DISK, "free", s->disk_free_bytes, "size", s->disk_total_bytes);
	one(m, DRAINING, s->draining);
	one(m, STOPPING, s->stopping);
	begin(m, POOL);
	metrics_each(m, "state", (const char *const[]){ "target", "ready", "making" }, 3,
			(const uint64_t[]){ s->pool_target, s->pool_ready, s->pool_making });
	each(m, WARM, "end", stats_warm_names, STATS_WARMS, s->warm);
	each(m, GOLDENS, "result", stats_golden_names, STATS_GOLDENS, s->goldens);
}

static void write_ends(const struct keeper_stats *s, struct metrics *m)
{
	each(m, ADOPTIONS, "result", stats_adoption_names, STATS_ADOPTIONS, s->adoptions);
	each(m, LEFTOVERS, "kind", stats_leftover_names, STATS_LEFTOVERS, s->leftovers);
	one(m, VMM_ENDED, s->vmm_ended);
	each(m, OOM_KILLS, "role", stats_role_names, STATS_ROLES, s->oom_kills);
	each(m, SECCOMP_KILLS, "role", stats_role_names, STATS_ROLES, s->seccomp_kills);
	one(m, LEASE_OVERDUE, s->lease_overdue);
}

static void write_calls(const struct stats_broker *b, struct metrics *m)
{
	begin(m, CALLS);
	metrics_each2(m, "kind", stats_call_names, STATS_CALLS, "result", stats_call_result_names, STATS_CALL_RESULTS, b->calls[0]);
	each(m, DENIALS, "rule", stats_denial_names, STATS_DENIALS, b->denials);
	one(m, MODEL_AGAIN, b->model_attempts_again);
	one(m, UNMETERED, b->unmetered);
	one(m, OVER_HOLD, b->over_hold);
	one(m, OVERRUN, b->over_hold_micros);
}

/* Thousandths of what a run may write. */
static int64_t fullness(const struct run_entry *r)
{
	struct spool_tail tail;
	int64_t by_bytes, by_count;

	if (!r->spool)
		return 0;
	spool_tail(r->spool, &tail);
	by_bytes = (int64_t)(tail.bytes * 1000 / EVENT_RUN_BYTES_MAX);
	by_count = (int64_t)((r->run.last_seq - r->run.first_seq + 1) * 1000 / EVENT_RUN_COUNT_MAX);
	return by_bytes > by_count ? by_bytes : by_count;
}

static void write_spools(const struct link *l, struct metrics *m)
{
	int64_t fullest = 0;
	uint64_t waiting = 0;

	for (const struct run_entry *r = l->runs; r != NULL; r = r->next) {
		int64_t full = fullness(r);

		if (r->run.over)
			continue;
		if (full > fullest)
			fullest = full;
		if (r->run.has_spool && r->run.last_seq >= r->run.next_send)
			waiting += r->run.last_seq - r->run.next_send + 1;
	}
	one(m, SPOOL, l->stats.spool_bytes);
	begin(m, SPOOL_FULLEST);
	metrics_plain(m, fullest < 1000 ? fullest : 1000, 3);
	one(m, SPOOL_FULL, l->stats.broker.spool_full);
	one(m, UNACKNOWLEDGED, waiting);
	one(m, RUNS, l->run_count);
}

static void write_link(const struct link *l, struct metrics *m)
{
	struct peers_state p = { .known = 0 };
	int64_t now = clock_boot_ns(), left = l->lease_deadline_boot_ns - now;

	if (l->peers)
		peers_look(l->peers, &p);
	begin(m, CONTROLDS);
	metrics_each(m, "state", (const char *const[]){ "known", "connected", "ready" }, 3,
			(const uint64_t[]){ p.known, p.connected, p.ready });
	one(m, RECONNECTS, p.made);
	begin(m, REQUESTS);
	metrics_each2(m, "type", link_type_names + LINK_ENROL, LINK_TYPES - LINK_ENROL, "result", link_result_names,
			LINK_RESULTS + 1, l->requests[LINK_ENROL]);
	begin(m, POLL_AGE);
	metrics_plain(m, l->polled_boot_ns > 0 ? (now - l->polled_boot_ns) / 1000000 : -1000, 3);
	begin(m, LEASE_LEFT);
	metrics_plain(m, left > 0 ? left / 1000000 : 0, 3);
	begin(m, CLOCK_OFFSET);
	if (p.clock_compared)
		metrics_plain(m, p.clock_offset_ms, 3);
	one(m, LINK_RESTARTS, l->stats.link_restarts);
}

static void write_all(void *arg, struct metrics *m)
{
	const struct link *l = arg;

	write_host(l, m);
	write_vms(&l->stats, m);
	write_room(&l->stats, m);
	write_ends(&l->stats, m);
	write_calls(&l->stats.broker, m);
	write_spools(l, m);
	write_link(l, m);
}

/* --- from keeper -------------------------------------------------------------------------------------------------------------- */

void link_metrics_host(struct link *l, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	const struct metrics_http_options opt = { .listen_fd = fd_count == 1 ? fds[0] : -1, .write = write_all, .arg = l };
	struct err e;

	if (role_host_decode(body, n, &l->host, &e) < 0)
		log_error("frame about this host malformed error=%s", e.text);
	if (fd_count == 1 && l->metrics == NULL) {
		if (metrics_http_new(l->base, &opt, &l->metrics, &e) < 0)
			log_error("no metrics error=%s", e.text);
		return;
	}
	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
}

void link_metrics_stats(struct link *l, const uint8_t *body, size_t n)
{
	struct keeper_stats s;
	struct err e;

	if (keeper_stats_decode(body, n, &s, &e) < 0)
		log_error("frame of figures malformed error=%s", e.text);
	else
		l->stats = s;
}

void link_metrics_answer(struct link *l, uint8_t type, const struct link_reply *reply)
{
	size_t result = reply == NULL ? LINK_RESULTS : reply->result;

	if (type < LINK_TYPES && result <= LINK_RESULTS)
		l->requests[type][result]++;
}
