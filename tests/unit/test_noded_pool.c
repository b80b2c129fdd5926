/* The warm pool's target: follows demand between its bounds, forgets it slowly, and does not boot in a circle. */
/* link: noded_core */
#include "unit.h"

#include "keeper/pool.h"

#include <stdlib.h>

static uint32_t first_target(struct pool *p, int64_t now_ms)
{
	uint32_t t[POOL_SIZES];

	pool_targets(p, now_ms, t);
	return t[0];
}

static void target_follows_demand(void **state)
{
	struct pool p;

	(void)state;
	pool_init(&p, 2, 10, 512, 1, 0);
	assert_int_equal(first_target(&p, 0), 2);
	for (int i = 0; i < 6; i++)
		pool_demand(&p, 512, 1, 1000 + i);
	assert_int_equal(first_target(&p, 2000), 6);
	for (int i = 0; i < 30; i++)
		pool_demand(&p, 512, 1, 3000 + i);
	assert_int_equal(first_target(&p, 4000), 10); /* never above max */
	assert_int_equal(first_target(&p, POOL_WINDOW_MS + 10), 10);
	assert_int_equal(first_target(&p, 2 * POOL_WINDOW_MS + 10), 10); /* 18 */
	assert_int_equal(first_target(&p, 3 * POOL_WINDOW_MS + 10), 9);
	assert_int_equal(first_target(&p, 4 * POOL_WINDOW_MS + 10), 4);
	assert_int_equal(first_target(&p, 5 * POOL_WINDOW_MS + 10), 2);
	assert_int_equal(first_target(&p, INT64_C(1) << 50), 2); /* years later: no loop over them */
}

static void other_sizes_get_what_is_left(void **state)
{
	uint32_t t[POOL_SIZES];
	struct pool p;

	(void)state;
	pool_init(&p, 1, 6, 512, 1, 0);
	for (int i = 0; i < 4; i++)
		pool_demand(&p, 1024, 2, 10);
	pool_demand(&p, 256, 1, 10);
	pool_demand(&p, 256, 1, 10);
	pool_demand(&p, 2048, 1, 10);
	pool_demand(&p, 4096, 1, 10); /* there is no place for a fifth size */
	pool_targets(&p, 20, t);
	assert_int_equal(t[0], 1);
	assert_int_equal(t[1], 4);
	assert_int_equal(t[2], 1);
	assert_int_equal(t[3], 0);
	/* When nobody asks for them any more, their places are free again. */
	pool_targets(&p, 5 * POOL_WINDOW_MS, t);
	assert_int_equal(t[1] + t[2] + t[3], 0);
	pool_demand(&p, 4096, 1, 5 * POOL_WINDOW_MS + 1);
	pool_targets(&p, 5 * POOL_WINDOW_MS + 2, t);
	assert_int_equal(t[1], 1);
	assert_int_equal(p.size[1].memory_mib, 4096);
}

static void no_pool(void **state)
{
	uint32_t t[POOL_SIZES];
	struct pool p;

	(void)state;
	pool_init(&p, 0, 0, 512, 1, 0);
	for (int i = 0; i < 9; i++)
		pool_demand(&p, 512, 1, i);
	pool_targets(&p, 10, t);
	for (int i = 0; i < POOL_SIZES; i++)
		assert_int_equal(t[i], 0);
	pool_init(&p, 5, 0, 512, 1, 0); /* max 0 with a min: as min */
	assert_int_equal(first_target(&p, 0), 5);
}

static void failures_pause(void **state)
{
	int64_t now = 1000, pause = POOL_PAUSE_FIRST_MS;
	struct pool p;

	(void)state;
	pool_init(&p, 1, 1, 512, 1, 0);
	assert_true(pool_may_boot(&p, now));
	for (int i = 0; i < 40; i++) {
		pool_boot(&p, false, now);
		assert_false(pool_may_boot(&p, now + pause - 1));
		now += pause;
		assert_true(pool_may_boot(&p, now));
		pause = pause * 2 < POOL_PAUSE_MAX_MS ? pause * 2 : POOL_PAUSE_MAX_MS;
	}
	pool_boot(&p, true, now);
	pool_boot(&p, false, now);
	assert_true(pool_may_boot(&p, now + POOL_PAUSE_FIRST_MS));
}

/* A run's own start comes first, but runs that come all the time do not keep the pool empty. */
static void boots_wait_for_starts(void **state)
{
	struct pool p;

	(void)state;
	pool_init(&p, 1, 4, 512, 1, 0);
	assert_int_equal(pool_defer_ms(&p, 10), 0);
	pool_demand(&p, 512, 1, 1000);
	assert_int_equal(pool_defer_ms(&p, 1000), POOL_QUIET_MS);
	assert_int_equal(pool_defer_ms(&p, 1000 + POOL_QUIET_MS - 1), 1);
	assert_int_equal(pool_defer_ms(&p, 1000 + POOL_QUIET_MS), 0);
	for (int64_t now = 5000; now < 20000; now += 100) {
		pool_demand(&p, 512, 1, now);
		assert_int_equal(pool_defer_ms(&p, now) > 0, now < 5000 + POOL_DEFER_MS);
	}
	assert_int_equal(pool_defer_ms(&p, 30000), 0);
	pool_demand(&p, 512, 1, 30001);
	assert_true(pool_defer_ms(&p, 30001) > 0);
}

/* Whatever comes: the sum is never above max, and the first size has its min. */
static void bounds_hold(void **state)
{
	uint32_t t[POOL_SIZES], sum;
	struct pool p;
	int64_t now = 0;

	(void)state;
	srand(7);
	pool_init(&p, 3, 12, 512, 1, now);
	for (int i = 0; i < 20000; i++) {
		now += rand() % 3000;
		if (rand() % 3)
			pool_demand(&p, (uint32_t)(rand() % 6 + 1) * 256, 1, now);
		pool_targets(&p, now, t);
		sum = 0;
		for (int s = 0; s < POOL_SIZES; s++)
			sum += t[s];
		assert_true(sum <= 12 && t[0] >= 3);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(target_follows_demand),
		cmocka_unit_test(other_sizes_get_what_is_left),
		cmocka_unit_test(no_pool),
		cmocka_unit_test(failures_pause),
		cmocka_unit_test(boots_wait_for_starts),
		cmocka_unit_test(bounds_hold),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
