/*
 * How many warm VMs there ought to be, and of which size: pure. The demand is how many runs of a size came within a window of 30 s;
 * it is kept for one more window and then falls by half with each. Keeper's; no locking.
 */
#ifndef NODED_KEEPER_POOL_H
#define NODED_KEEPER_POOL_H

#include <stdbool.h>
#include <stdint.h>

#define POOL_SIZES 4 /* kinds of guests that are kept: the configured one, and the three that are asked for most */
#define POOL_WINDOW_MS 30000
#define POOL_QUIET_MS 400        /* after a run came nothing is booted for the pool: the run's own start has the machine ... */
#define POOL_DEFER_MS 2000       /* ... but not for longer than this, or runs that come all the time would empty it */
#define POOL_PAUSE_FIRST_MS 1000 /* after a warm VM that did not boot; doubles */
#define POOL_PAUSE_MAX_MS 60000

struct pool_size {
	uint32_t memory_mib, vcpus; /* 0 = this place is free */
	uint32_t came, before;      /* runs: in this window; what is remembered of those before */
};

struct pool {
	uint32_t min, max; /* of all sizes together; max 0 = there is no pool */
	struct pool_size size[POOL_SIZES];
	int64_t window_ms; /* when this window began */
	uint32_t failures; /* boots in a row that came to nothing */
	int64_t pause_until_ms;
	int64_t came_ms, deferred_ms; /* when the last run came; since when boots wait for that, 0 = none does */
};

void pool_init(struct pool *p, uint32_t min, uint32_t max, uint32_t memory_mib, uint32_t vcpus, int64_t now_ms);
/* A run of this size came. */
void pool_demand(struct pool *p, uint32_t memory_mib, uint32_t vcpus, int64_t now_ms);
/* How many of each size there ought to be now. */
void pool_targets(struct pool *p, int64_t now_ms, uint32_t target[POOL_SIZES]);
/* A warm VM came up, or did not: then no other is tried for a while. */
void pool_boot(struct pool *p, bool worked, int64_t now_ms);
bool pool_may_boot(const struct pool *p, int64_t now_ms);
/* How long boots wait for the start of the runs that came just now; 0: no longer. */
int pool_defer_ms(struct pool *p, int64_t now_ms);

#endif
