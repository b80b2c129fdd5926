/* Money: overflow, rounding once, parts that add up, the cap. */
#include "unit.h"

#include "price.h"

static void test_price_of(void **state)
{
	static const struct {
		int64_t units, per_million, micros;
		bool ok;
	} cases[] = {
		{ -1, 1, 0, false },
		{ 1, -1, 0, false },
		{ INT64_MAX, INT64_MAX, 0, false },
		{ INT64_MAX, 1000001, 0, false },
		{ INT64_MAX, 1000000, INT64_MAX, true },
		{ 0, 0, 0, true },
		{ 1, 1, 1, true },
		{ 1000000, 3, 3, true },
		{ 1000001, 3, 4, true },
		{ 333333, 3, 1, true },
		{ 333334, 3, 2, true },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		int64_t micros = 0;

		assert_int_equal(price_of(cases[i].units, cases[i].per_million, &micros), cases[i].ok);
		assert_true(micros == cases[i].micros);
	}
}

static void test_cost(void **state)
{
	struct price p = { .run_fee = 100,
		.compute = 200000,
		.input = 3000000,
		.cached_input = 300000,
		.output = 15000000,
		.model_percent = 500,
		.web_request = 1,
		.web_search = 1 };
	struct usage u = { .model_calls = 1,
		.input_tokens = 1000,
		.cached_input_tokens = 400,
		.output_tokens = 10,
		.web_requests = 1,
		.web_searches = 1,
		.compute_ms = 1501,
		.unmetered_model_micros = 7 };
	struct cost c;

	(void)state;
	assert_true(price_cost(&p, &u, &c));
	assert_int_equal(c.run_fee, 100);
	assert_int_equal(c.compute, 301); /* 300.2 */
	assert_int_equal(c.model, 2181);  /* (600*3 + 400*0.3 + 10*15) * 1.05 = 2173.5, rounded up, and 7 */
	assert_int_equal(c.web, 1);       /* two millionths, rounded up once */
	assert_int_equal(c.total, c.run_fee + c.compute + c.model + c.web);
}

static void test_nonsense(void **state)
{
	struct price p = { .input = INT64_MAX, .output = INT64_MAX, .run_fee = 1 };
	struct usage bad[] = {
		{ .input_tokens = 5, .cached_input_tokens = 6 },
		{ .input_tokens = -1 },
		{ .output_tokens = -1 },
		{ .cached_input_tokens = -1 },
		{ .compute_ms = -1 },
		{ .web_requests = -1 },
		{ .web_searches = -1 },
		{ .model_calls = -1 },
		{ .unmetered_model_micros = -1 },
		{ .input_tokens = INT64_MAX },
		{ .unmetered_model_micros = INT64_MAX, .output_tokens = 1 },
		{ .input_tokens = INT64_MAX, .output_tokens = INT64_MAX },
		{ .unmetered_model_micros = INT64_MAX },
	};
	struct cost c;

	(void)state;
	for (size_t i = 0; i < COUNT(bad); i++)
		assert_false(price_cost(&p, &bad[i], &c));
	assert_int_equal(price_min_cap(&p, INT64_MAX, 1, 1000), INT64_MAX);
}

static void test_clamp(void **state)
{
	static const struct {
		int64_t cap;
		struct cost want;
	} cases[] = {
		{ 1000, { 10, 20, 30, 40, 100 } },
		{ 100, { 10, 20, 30, 40, 100 } },
		{ 90, { 10, 20, 20, 40, 90 } },
		{ 60, { 10, 20, 0, 30, 60 } },
		{ 25, { 10, 15, 0, 0, 25 } },
		{ 5, { 5, 0, 0, 0, 5 } },
		{ 0, { 0, 0, 0, 0, 0 } },
		{ -5, { 0, 0, 0, 0, 0 } },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct cost c = { .run_fee = 10, .compute = 20, .model = 30, .web = 40, .total = 100 };

		price_clamp(&c, cases[i].cap);
		assert_memory_equal(&c, &cases[i].want, sizeof(c));
	}
}

static void test_min_cap(void **state)
{
	struct price p = { .run_fee = 1000, .compute = 200000, .input = 3000000, .output = 15000000 };

	(void)state;
	/* 540 of tokens; a minute of compute would be 12,000, so a quarter (at least 200) has to do: 4 * 200 is more than 4/3 *
	 * 540. */
	assert_int_equal(price_min_cap(&p, 100, 16, 60000), 1000 + 200 + 800);
	assert_int_equal(price_min_cap(&p, 1000, 16, 60000), 1000 + 200 + 4320);
	assert_int_equal(price_min_cap(&p, 1000, 16, 500), 1000 + 200 + 3240 + 100);
	p.compute = 0;
	assert_int_equal(price_min_cap(&p, 100, 16, 60000), 1000 + 540);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_price_of), cmocka_unit_test(test_cost),
		cmocka_unit_test(test_nonsense), cmocka_unit_test(test_clamp), cmocka_unit_test(test_min_cap) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
