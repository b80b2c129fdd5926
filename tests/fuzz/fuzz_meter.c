/*
 * The meter under any provider: prices and a cap, then a script of calls whose usage is any number at all. At no time is more spent
 * and held than the cap; what is spent never goes down; the end adds up, is within the cap and is no less than what was spent.
 */
/* link: ephproto */
/* sources: noded/broker/meter.c */
/* reads: noded/broker/meter.c common/price.c */
/* reached: 81 % of lines, 62 % of branches; the rest is sums over a billion dollars and the least cap of a create */
#include "noded/broker/meter.h"

#include "fuzz.h"

struct bytes {
	const uint8_t *p;
	size_t n;
};

static uint64_t take(struct bytes *b, size_t n)
{
	uint64_t v = 0;

	for (; n > 0; n--) {
		v = v << 8 | (b->n > 0 ? *b->p : 0);
		b->p += b->n > 0;
		b->n -= b->n > 0;
	}
	return v;
}

/* Of any size, also negative and huge. */
static int64_t any(struct bytes *b)
{
	uint64_t kind = take(b, 1);

	switch (kind % 4) {
	case 0: return (int64_t)(kind / 4);
	case 1: return (int64_t)take(b, 2);
	case 2: return (int64_t)take(b, 4);
	default: return (int64_t)take(b, 8);
	}
}

static int64_t at_least(int64_t v, int64_t least, int64_t most)
{
	return v < least ? least : v > most ? most : v;
}

static void read_price(struct bytes *b, struct price *p)
{
	const int64_t most = INT64_C(1000000000000);

	p->run_fee = at_least(any(b), 0, PRICE_MICROS_MAX);
	p->compute = at_least(any(b), 0, most);
	p->input = at_least(any(b), 0, most);
	p->cached_input = at_least(any(b), 0, most);
	p->output = at_least(any(b), 0, most);
	p->model_percent = at_least(any(b), 0, 100000);
}

static int64_t within_cap(const struct meter *m, int64_t ms, int64_t least)
{
	int64_t spent = meter_spent(m, ms), held = meter_held(m, ms);

	must(spent >= 0 && held >= 0 && spent <= m->cap && held <= m->cap - spent);
	must(spent >= least);
	return spent;
}

static void one_call(struct meter *m, const struct model_spec *spec, struct bytes *b, int64_t *ms)
{
	struct meter_plan plan = { .now_ms = *ms, .time_left_ms = at_least(any(b), 0, 3600000), .wish_tokens = (uint32_t)any(b) };
	struct meter_tokens t;
	int64_t limit, took, cost;

	plan.input_tokens = meter_input_bound(spec, take(b, 3), (int64_t)take(b, 1) % 2 ? any(b) : -1, take(b, 2));
	if (!meter_plan(m, spec, &plan))
		return;
	must(plan.output_tokens >= 1 && plan.deadline_ms >= *ms);
	meter_hold(m, &plan);
	within_cap(m, *ms, 0);
	limit = meter_compute_limit_ms(m);
	must(limit >= plan.deadline_ms);
	took = at_least((int64_t)take(b, 4), 0, plan.deadline_ms - *ms);
	*ms += took;
	within_cap(m, *ms, 0);
	t = (struct meter_tokens){ any(b), any(b), any(b) };
	switch (take(b, 1) % 3) {
	case 0: meter_release(m); break;
	case 1: must(meter_settle(m, NULL, &cost) == METER_UNMETERED && cost >= 0); break;
	default: (void)!meter_settle(m, &t, &cost); must(cost >= 0 && cost <= m->cap);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	struct bytes b = { p, n };
	struct model_spec spec = { .max_output_tokens = 16384,
		.min_output_tokens = 16,
		.tokens_per_byte_milli = 1000,
		.overhead_tokens = 512,
		.call_timeout_ms = 60000 };
	int64_t cap, ms = 0, spent = 0;
	struct price price = { 0 };
	struct usage usage;
	struct cost cost;
	struct meter m;

	read_price(&b, &price);
	cap = at_least(any(&b), 1, PRICE_MICROS_MAX);
	spec.min_output_tokens = at_least(any(&b), 1, 10000000);
	spec.max_output_tokens = at_least(any(&b), spec.min_output_tokens, 10000000);
	meter_init(&m, &price, cap);
	if (price.run_fee > cap)
		return 0; /* no such run is made: price_min_cap */
	meter_start(&m);
	while (b.n > 0) {
		int64_t pause = (int64_t)take(&b, 2), limit = meter_compute_limit_ms(&m);

		ms = pause > limit - ms ? limit : ms + pause;
		if (ms > 3600000 || limit < 0)
			break;
		spent = within_cap(&m, ms, spent);
		one_call(&m, &spec, &b, &ms);
		if (ms > meter_compute_limit_ms(&m))
			break; /* the run is stopped there */
		spent = within_cap(&m, ms, spent);
	}
	meter_final(&m, ms, &usage, &cost);
	must(cost.total == cost.run_fee + cost.compute + cost.model + cost.web);
	must(cost.total >= 0 && cost.total <= cap && cost.total >= spent);
	must(usage.input_tokens >= 0 && usage.output_tokens >= 0 && usage.cached_input_tokens <= usage.input_tokens);
	return 0;
}
