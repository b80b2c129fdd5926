/* What a host counts: its wire form, what a broker may say, the buckets, the names. */
/* link: noded_core */
#include "unit.h"

#include "keeper/stats.h"

#include "common/wire.h"

static void test_round_trip(void **state)
{
	struct keeper_stats in = { 0 }, out;
	struct buf b = BUF_INIT(65536);
	struct err e;

	(void)state;
	in.starts[STATS_CLONE][STATS_START_FAILED] = 7;
	in.leftovers[STATS_LEFTOVERS - 1] = UINT64_MAX;
	in.stopping = 1;
	stats_took(&in.destroy, 80);
	keeper_stats_encode(&in, &b);
	assert_int_equal(b.len, sizeof(in));
	assert_ok(keeper_stats_decode(b.data, b.len, &out, &e));
	assert_memory_equal(&in, &out, sizeof(in));
	assert_int_equal(keeper_stats_decode(b.data, b.len - 1, &out, &e), -1);
	assert_true(buf_add_char(&b, 'x'));
	assert_int_equal(keeper_stats_decode(b.data, b.len, &out, &e), -1);
	buf_free(&b);
}

/* A broker is not believed: one word that makes no sense, and nothing of its frame counts. */
static void test_of_brokers(void **state)
{
	struct stats_broker said = { .over_hold = 2, .over_hold_micros = 500 }, sum = { .over_hold = 1 }, before;
	struct buf b = BUF_INIT(65536);
	struct err e;

	(void)state;
	said.calls[STATS_CALL_MODEL][STATS_CALL_OK] = 3;
	stats_broker_encode(&said, &b);
	assert_ok(stats_broker_add(b.data, b.len, &sum, &e));
	assert_ok(stats_broker_add(b.data, b.len, &sum, &e));
	assert_int_equal(sum.over_hold, 5);
	assert_int_equal(sum.over_hold_micros, 1000);
	assert_int_equal(sum.calls[STATS_CALL_MODEL][STATS_CALL_OK], 6);
	before = sum;
	said.spool_full = UINT64_MAX;
	buf_reset(&b);
	stats_broker_encode(&said, &b);
	assert_int_equal(stats_broker_add(b.data, b.len, &sum, &e), -1);
	assert_int_equal(stats_broker_add(b.data, b.len - 8, &sum, &e), -1);
	assert_int_equal(stats_broker_add(NULL, 0, &sum, &e), -1);
	assert_memory_equal(&sum, &before, sizeof(sum));
	buf_free(&b);
}

static void test_buckets(void **state)
{
	struct stats_times t = { .sum_ms = 0 };

	(void)state;
	stats_took(&t, -1);
	stats_took(&t, 5);
	stats_took(&t, 6);
	stats_took(&t, 30000);
	stats_took(&t, INT32_MAX);
	assert_int_equal(t.bucket[0], 2);
	assert_int_equal(t.bucket[1], 1);
	assert_int_equal(t.bucket[STATS_BUCKETS - 1], 1);
	assert_int_equal(t.bucket[STATS_BUCKETS], 1);
	assert_int_equal(t.sum_ms, 5 + 6 + 30000 + (uint64_t)INT32_MAX);
	for (size_t i = 1; i < STATS_BUCKETS; i++)
		assert_true(stats_bounds_ms[i] > stats_bounds_ms[i - 1]);
}

/* A name for each value, and no two alike: a sample would stand there twice. */
static void test_names(void **state)
{
	static const struct {
		const char *const *names;
		size_t n;
	} all[] = {
		{ stats_mode_names, STATS_MODES },
		{ stats_start_names, STATS_STARTS },
		{ stats_refusal_names, STATS_REFUSALS },
		{ stats_adoption_names, STATS_ADOPTIONS },
		{ stats_leftover_names, STATS_LEFTOVERS },
		{ stats_golden_names, STATS_GOLDENS },
		{ stats_warm_names, STATS_WARMS },
		{ stats_role_names, STATS_ROLES },
		{ stats_vm_names, STATS_VMS },
		{ stats_call_names, STATS_CALLS },
		{ stats_call_result_names, STATS_CALL_RESULTS },
		{ stats_denial_names, STATS_DENIALS },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(all); i++)
		for (size_t j = 0; j < all[i].n; j++) {
			assert_non_null(all[i].names[j]);
			assert_true(all[i].names[j][0] >= 'a' &&
					strspn(all[i].names[j], "abcdefghijklmnopqrstuvwxyz_") == strlen(all[i].names[j]));
			for (size_t k = 0; k < j; k++)
				assert_string_not_equal(all[i].names[j], all[i].names[k]);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_round_trip),
		cmocka_unit_test(test_of_brokers),
		cmocka_unit_test(test_buckets),
		cmocka_unit_test(test_names),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
