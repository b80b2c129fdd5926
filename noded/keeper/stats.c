/* Names, histogram and wire form of what a host counts (stats.h). Pure. */
#include "keeper/stats.h"

#include "common/metrics.h"
#include "common/wire.h"

#include <string.h>

#define BROKER_ADD_MAX (UINT64_C(1) << 40) /* no broker counts, or loses, as much between two frames */

const uint32_t stats_bounds_ms[STATS_BUCKETS] = { 5, 10, 25, 50, 75, 100, 150, 250, 500, 1000, 2500, 5000, 10000, 30000 };

const char *const stats_mode_names[STATS_MODES] = { "cold", "clone", "warm" };
const char *const stats_start_names[STATS_STARTS] = { "ok", "failed", "ended" };
const char *const stats_refusal_names[STATS_REFUSALS] = { "memory", "vcpus", "slots", "disk", "pids", "draining", "stopping",
	"image", "size", "other" };
const char *const stats_adoption_names[STATS_ADOPTIONS] = { "adopted", "journal", "host_booted", "process_gone", "broker_refused",
	"unfit" };
const char *const stats_leftover_names[STATS_LEFTOVERS] = { "process", "cgroup", "directory", "socket", "journal", "slot", "disk",
	"lease" };
const char *const stats_golden_names[STATS_GOLDENS] = { "made", "failed", "discarded" };
const char *const stats_warm_names[STATS_WARMS] = { "taken", "evicted", "expired", "died" };
const char *const stats_role_names[STATS_ROLES] = { "broker", "channel", "vmm", "link" };
const char *const stats_vm_names[STATS_VMS] = { "starting", "running", "ending", "warm", "golden" };
const char *const stats_call_names[STATS_CALLS] = { "model" };
const char *const stats_call_result_names[STATS_CALL_RESULTS] = { "ok", "budget", "failed", "cut" };

const char *const stats_denial_names[STATS_DENIALS] = { "tool" };

_Static_assert(sizeof(struct keeper_stats) % sizeof(uint64_t) == 0, "nothing but u64");
_Static_assert(sizeof(struct stats_broker) % sizeof(uint64_t) == 0, "nothing but u64");

void stats_took(struct stats_times *t, int64_t ms)
{
	metrics_took(stats_bounds_ms, STATS_BUCKETS, t->bucket, &t->sum_ms, ms);
}

static void put(struct buf *out, const void *p, size_t bytes)
{
	const uint64_t *v = p;

	for (size_t i = 0; i < bytes / sizeof(*v); i++)
		wire_put_u64(out, v[i]);
}

static int get(const void *p, size_t n, void *out, size_t bytes, const char *what, struct err *e)
{
	struct wire_reader r;
	uint64_t *v = out;

	wire_read_init(&r, p, n);
	for (size_t i = 0; i < bytes / sizeof(*v); i++)
		v[i] = wire_u64(&r);
	return wire_end(&r, what, e);
}

void keeper_stats_encode(const struct keeper_stats *s, struct buf *out)
{
	put(out, s, sizeof(*s));
}

int keeper_stats_decode(const void *p, size_t n, struct keeper_stats *out, struct err *e)
{
	return get(p, n, out, sizeof(*out), "stats", e);
}

void stats_broker_encode(const struct stats_broker *s, struct buf *out)
{
	put(out, s, sizeof(*s));
}

int stats_broker_add(const void *p, size_t n, struct stats_broker *sum, struct err *e)
{
	uint64_t v[sizeof(struct stats_broker) / sizeof(uint64_t)], all[sizeof(v) / sizeof(v[0])];

	if (get(p, n, v, sizeof(v), "stats of a broker", e))
		return -1;
	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		if (v[i] > BROKER_ADD_MAX)
			return err_set(e, ERR_PROTOCOL, "stats of a broker: a count of %llu", (unsigned long long)v[i]);
	memcpy(all, sum, sizeof(all));
	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		all[i] += v[i];
	memcpy(sum, all, sizeof(all));
	return 0;
}
