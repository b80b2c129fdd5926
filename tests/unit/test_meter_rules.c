/* link: ephbase */
/* sources: noded/broker/meter.c */
/*
 * The meter: rules by table, and the property that matters by random play: whatever holds, charges, lies and compute come in
 * whatever order, the sum of what is charged never passes the cap, and what a hold promised was enough.
 */
#include "noded/broker/meter.h"

#include "common/text.h"
#include "dice.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static const struct price sample_price = {
	.run_fee = 0, .compute = 200000000, .input = 3000000, .cached_input = 300000, .output = 15000000
};
static const struct model_spec sample_spec = { .max_output_tokens = 4096,
	.min_output_tokens = 64,
	.tokens_per_byte_milli = 1000,
	.overhead_tokens = 50,
	.call_timeout_ms = 60000 };

static void test_input_bound(void **state)
{
	struct model_spec s = sample_spec;

	(void)state;
	assert_int_equal(meter_input_bound(&s, 1000, -1, 0), 1050);
	s.tokens_per_byte_milli = 333;
	assert_int_equal(meter_input_bound(&s, 1000, -1, 0), 383); /* rounded up */
	assert_int_equal(meter_input_bound(&s, 1000, 100, 30), 110);
	assert_int_equal(meter_input_bound(&s, 10, 100000, 30), 54); /* the tighter one */
	s.tokens_per_byte_milli = 0;
	assert_int_equal(meter_input_bound(&s, 10, -1, 0), 60); /* a row without a bound counts each byte */
	s.tokens_per_byte_milli = INT64_MAX;
	assert_int_equal(meter_input_bound(&s, UINT64_MAX, -1, 0), INT64_MAX);
}

static void test_plan_limits(void **state)
{
	struct price p = { .input = 1000000, .output = 1000000 }; /* a micro a token, compute free */
	struct meter m;
	struct meter_plan plan = { .time_left_ms = 5000, .input_tokens = 100 };

	(void)state;
	meter_init(&m, &p, 1000);
	meter_start(&m);
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.output_tokens, 900); /* what the rest pays for */
	assert_int_equal(plan.deadline_ms, 5000);
	assert_false(plan.deadline_by_money);
	plan.wish_tokens = 10; /* the guest may wish for less than the least */
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.output_tokens, 10);
	plan.wish_tokens = UINT32_MAX; /* and never for more than the model gives */
	meter_init(&m, &p, 1000000);
	meter_start(&m);
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.output_tokens, sample_spec.max_output_tokens);
	meter_init(&m, &p, 1000);
	meter_start(&m);
	plan.wish_tokens = 0;
	plan.input_tokens = 1000 - 63;
	assert_false(meter_plan(&m, &sample_spec, &plan)); /* 63 < 64 */
	assert_int_equal(plan.needed, 1000 - 63 + 64);
	plan.input_tokens = 1001;
	assert_false(meter_plan(&m, &sample_spec, &plan));
	plan.input_tokens = INT64_MAX;
	assert_false(meter_plan(&m, &sample_spec, &plan));
	meter_init(&m, &p, 1000000);
	meter_start(&m);
	plan.input_tokens = 100;
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.output_tokens, 4096);
}

static void test_plan_compute_quarter(void **state)
{
	struct price p = { .input = 1000000, .output = 1000000, .compute = 1000000 }; /* a micro a millisecond */
	struct meter m;
	struct meter_plan plan = { .now_ms = 10000, .time_left_ms = 60000, .input_tokens = 0 };

	(void)state;
	meter_init(&m, &p, 90000);
	meter_start(&m);
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.deadline_ms, 10000 + 20000); /* a quarter of 80000 */
	assert_true(plan.deadline_by_money);
	meter_init(&m, &p, 10000 + 3999); /* a quarter is under a second */
	meter_start(&m);
	assert_false(meter_plan(&m, &sample_spec, &plan));
	plan.time_left_ms = 500; /* the run's own time is shorter still: that is no matter of money */
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.deadline_ms, 10500);
	p.compute = 0;
	meter_init(&m, &p, 5000);
	meter_start(&m);
	plan.time_left_ms = 60000;
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.deadline_ms, 70000);
}

static void test_highest_input_rate(void **state)
{
	struct price p = { .input = 1000000, .cached_input = 3000000, .output = 1000000 }; /* a strange row: cached is dearer */
	struct meter m;
	struct meter_plan plan = { .time_left_ms = 1000, .input_tokens = 100 };
	struct meter_tokens t = { .input = 100, .cached = 100, .output = 0 };
	int64_t micros;

	(void)state;
	meter_init(&m, &p, 1000);
	meter_start(&m);
	assert_true(meter_plan(&m, &sample_spec, &plan));
	assert_int_equal(plan.output_tokens, 700);
	meter_hold(&m, &plan);
	assert_int_equal(meter_held(&m, 0), 1000);
	assert_int_equal(meter_settle(&m, &t, &micros), METER_CHARGED);
	assert_int_equal(micros, 300);
	assert_int_equal(meter_spent(&m, 0), 300);
}

static void hold_of(struct meter *m, int64_t input, int64_t now)
{
	struct meter_plan plan = { .now_ms = now, .time_left_ms = 60000, .input_tokens = input };

	assert_true(meter_plan(m, &sample_spec, &plan));
	meter_hold(m, &plan);
}

static void test_ends_of_attempts(void **state)
{
	struct price p = { .run_fee = 5, .input = 1000000, .output = 1000000, .model_percent = 1000 };
	struct meter_tokens ok = { 100, 40, 10 }, over = { 100, 0, 10000 },
			    odd[] = { { 10, 11, 1 }, { -1, 0, 1 }, { 1, 0, -1 }, { 1, -1, 1 }, { INT64_MAX, 0, 0 } };
	struct meter m;
	int64_t micros, hold;

	(void)state;
	meter_init(&m, &p, 100000);
	assert_int_equal(meter_spent(&m, 0), 0);
	meter_start(&m);
	assert_int_equal(meter_spent(&m, 0), 5);
	hold_of(&m, 100, 0);
	assert_int_equal(meter_held(&m, 0), (100 + 4096) * 11 / 10 + 1); /* percent included, rounded up */
	meter_release(&m);
	assert_int_equal(meter_held(&m, 0), 0);
	assert_int_equal(meter_spent(&m, 0), 5); /* no head: nothing */

	hold_of(&m, 100, 0);
	assert_int_equal(meter_settle(&m, &ok, &micros), METER_CHARGED);
	assert_int_equal(micros, 77); /* (60 + 10) * 1.1 */
	assert_int_equal(m.usage.input_tokens, 100);

	hold_of(&m, 100, 0);
	hold = meter_held(&m, 0);
	assert_int_equal(meter_settle(&m, NULL, &micros), METER_UNMETERED);
	assert_int_equal(micros, hold);
	assert_int_equal(m.usage.unmetered_model_micros, hold);

	hold_of(&m, 100, 0);
	assert_int_equal(meter_settle(&m, &over, &micros), METER_OVER_HOLD);
	assert_int_equal(micros, hold);
	assert_int_equal(m.usage.input_tokens, 100); /* what was not believed is not counted */
	for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
		hold_of(&m, 10, 0);
		hold = meter_held(&m, 0);
		assert_int_not_equal(meter_settle(&m, &odd[i], &micros), METER_CHARGED);
		assert_int_equal(micros, hold);
	}
}

static void test_compute_limit(void **state)
{
	struct price p = { .run_fee = 100, .compute = 500000, .input = 1000000, .output = 1000000 };
	struct meter m;
	struct usage u;
	struct cost c;

	(void)state;
	meter_init(&m, &p, 1100);
	meter_start(&m);
	assert_int_equal(meter_compute_limit_ms(&m), 2000);
	assert_int_equal(meter_spent(&m, 2000), 1100);
	assert_int_equal(meter_spent(&m, 1999), 1100); /* started halves are rounded up */
	meter_final(&m, 2000, &u, &c);
	assert_int_equal(c.total, 1100);
	meter_final(&m, 900000, &u, &c); /* late by whatever: clamped, parts still add up */
	assert_int_equal(c.total, 1100);
	assert_int_equal(c.run_fee + c.compute + c.model + c.web, c.total);
	p.compute = 0;
	meter_init(&m, &p, 1100);
	meter_start(&m);
	assert_int_equal(meter_compute_limit_ms(&m), INT64_MAX);
}

static void test_never_started(void **state)
{
	struct meter m;
	struct usage u;
	struct cost c;

	(void)state;
	meter_init(&m, &sample_price, 40000);
	meter_final(&m, 12345, &u, &c);
	assert_int_equal(c.total, 0);
	assert_int_equal(u.compute_ms, 0);
}

static void test_open_hold_at_the_end(void **state)
{
	struct meter m;
	struct usage u;
	struct cost c;
	int64_t promised;

	(void)state;
	meter_init(&m, &sample_price, 40000000);
	meter_start(&m);
	hold_of(&m, 1000, 0);
	promised = m.hold_model;
	meter_final(&m, 0, &u, &c);
	assert_int_equal(c.model, promised);
	assert_int_equal(u.unmetered_model_micros, promised);
}

/* --- the property ------------------------------------------------------------------------------------------------------------ */

static int64_t upto(int64_t n)
{
	return n <= 0 ? 0 : (int64_t)(rng() % ((uint64_t)n + 1));
}

static int64_t magnitude(int64_t most)
{
	int64_t n = upto(most);

	for (int64_t i = upto(6); i > 0; i--)
		n /= 10;
	return n;
}

/* Unclamped: the true sum of everything charged. */
static int64_t true_cost(const struct meter *m, int64_t compute_ms)
{
	struct usage u = m->usage;
	struct cost c;

	u.compute_ms = compute_ms;
	assert_true(price_cost(&m->price, &u, &c));
	return c.total;
}

static void one_attempt(struct meter *m, const struct model_spec *spec, int64_t *now)
{
	struct meter_plan plan = { .now_ms = *now,
		.time_left_ms = 1 + upto(60000),
		.input_tokens = magnitude(200000),
		.wish_tokens = (uint32_t)upto(100) };
	struct meter_tokens t;
	int64_t before = meter_spent(m, *now);

	if (!meter_plan(m, spec, &plan)) {
		struct meter richer = *m;

		/* What is said to be needed is more than there is, and enough. */
		assert_true(plan.needed > m->cap - before);
		if (!__builtin_add_overflow(before, plan.needed, &richer.cap))
			assert_true(meter_plan(&richer, spec, &plan));
		return;
	}
	assert_true(plan.output_tokens >= 1 && plan.output_tokens <= (spec->max_output_tokens > 1 ? spec->max_output_tokens : 1));
	assert_true(plan.deadline_ms > *now);
	meter_hold(m, &plan);
	assert_true(before + meter_held(m, *now) <= m->cap);
	/* The compute limit never falls before the deadline that was promised. */
	assert_true(meter_compute_limit_ms(m) >= plan.deadline_ms);
	*now += upto(plan.deadline_ms - *now);
	t.input = upto(plan.input_tokens);
	t.cached = upto(t.input);
	t.output = upto(plan.output_tokens);
	switch (rng() % 6) {
	case 0: meter_release(m); break;
	case 1: (void)meter_settle(m, NULL, NULL); break;
	case 2: /* a provider that counts nonsense */
		t.input = (int64_t)rng();
		t.cached = (int64_t)rng();
		t.output = (int64_t)(rng() >> (rng() % 60));
		(void)meter_settle(m, &t, NULL);
		break;
	default: /* honest: within what was bounded, so it must be believed */
		assert_int_equal(meter_settle(m, &t, NULL), METER_CHARGED);
		break;
	}
}

static void one_run(void)
{
	struct price p = { .run_fee = magnitude(1000),
		.compute = rng() % 4 ? magnitude(400000000) : 0,
		.input = magnitude(20000000),
		.cached_input = magnitude(20000000),
		.output = magnitude(80000000),
		.model_percent = rng() % 2 ? upto(5000) : 0 };
	struct model_spec spec = { .max_output_tokens = upto(10000),
		.min_output_tokens = upto(200),
		.tokens_per_byte_milli = upto(2000),
		.overhead_tokens = upto(500) };
	struct meter m;
	struct usage u;
	struct cost c;
	int64_t now = 0, limit;

	meter_init(&m, &p, p.run_fee + magnitude(100000000));
	meter_start(&m);
	for (int i = 0; i < 40; i++) {
		one_attempt(&m, &spec, &now);
		limit = meter_compute_limit_ms(&m);
		/* Between calls the run computes on, at most to its limit: then it is stopped. */
		if (rng() % 3 == 0)
			now += upto((limit == INT64_MAX ? now + 5000 : limit) - now < 5000
							? (limit == INT64_MAX ? 5000 : limit - now)
							: 5000);
		assert_true(limit >= now);
		assert_true(true_cost(&m, now) <= m.cap);
		assert_true(meter_spent(&m, now) + meter_held(&m, now) <= m.cap);
		assert_int_equal(meter_held(&m, now), 0);
		if (limit == now)
			break;
	}
	meter_final(&m, now, &u, &c);
	assert_true(c.total <= m.cap);
	assert_int_equal(c.total, true_cost(&m, now)); /* no clamp was needed */
	assert_int_equal(c.run_fee + c.compute + c.model + c.web, c.total);
}

static void test_cap_holds(void **state)
{
	(void)state;
	for (uint64_t seed = 1; seed <= 20000; seed++) {
		rng_seed(seed);
		one_run();
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_input_bound),
		cmocka_unit_test(test_plan_limits),
		cmocka_unit_test(test_plan_compute_quarter),
		cmocka_unit_test(test_highest_input_rate),
		cmocka_unit_test(test_ends_of_attempts),
		cmocka_unit_test(test_compute_limit),
		cmocka_unit_test(test_never_started),
		cmocka_unit_test(test_open_hold_at_the_end),
		cmocka_unit_test(test_cap_holds),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
