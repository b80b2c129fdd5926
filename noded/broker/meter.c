/*
 * Holds and charges. Called by model.c around every attempt and by run.c for the meter that goes with events, the compute limit and
 * the end. Never blocks, owns nothing.
 *
 * Why the cap holds: a hold is opened only when run fee + charged tokens + compute up to the attempt's deadline + the attempt's
 * dearest outcome fit; a charge is never above its hold; and compute is ended at meter_compute_limit_ms. Rounding is on our side:
 * each hold is rounded up alone, the charge of all calls is rounded up once.
 */
#include "meter.h"

#include "common/log.h"

#include <string.h>

#define MILLION 1000000

void meter_init(struct meter *m, const struct price *price, int64_t cap)
{
	*m = (struct meter){ .price = *price, .cap = cap > 0 ? cap : 0 };
	m->highest_input = price->input > price->cached_input ? price->input : price->cached_input;
}

void meter_start(struct meter *m)
{
	m->started = true;
}

static int64_t add_or_max(int64_t a, int64_t b)
{
	int64_t sum;

	return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

/* Fee, tokens and web: all that is charged but compute. */
static int64_t charged(const struct meter *m)
{
	struct usage u = m->usage;
	struct cost c;

	u.compute_ms = 0;
	if (!m->started)
		return 0;
	return price_cost(&m->price, &u, &c) ? c.total : INT64_MAX;
}

static int64_t compute_cost(const struct meter *m, int64_t ms)
{
	int64_t micros;

	if (!m->started || ms <= 0)
		return 0;
	return price_of(ms, m->price.compute, &micros) ? micros : INT64_MAX;
}

/* Most milliseconds whose compute costs at most `micros`: rounding up a product to at most n means the product is at most n. */
static int64_t compute_ms_for(const struct meter *m, int64_t micros)
{
	__int128 ms;

	if (m->price.compute <= 0)
		return INT64_MAX;
	if (micros <= 0)
		return 0;
	ms = (__int128)micros * MILLION / m->price.compute;
	return ms > INT64_MAX ? INT64_MAX : (int64_t)ms;
}

int64_t meter_spent(const struct meter *m, int64_t compute_ms)
{
	int64_t sum = add_or_max(charged(m), compute_cost(m, compute_ms));

	return sum < m->cap ? sum : m->cap;
}

int64_t meter_held(const struct meter *m, int64_t compute_ms)
{
	int64_t spent = meter_spent(m, compute_ms), all;

	if (!m->open)
		return 0;
	all = add_or_max(add_or_max(charged(m), m->hold_model),
			compute_cost(m, compute_ms > m->hold_until_ms ? compute_ms : m->hold_until_ms));
	if (all > m->cap)
		all = m->cap;
	return all - spent;
}

int64_t meter_paid_ms(const struct meter *m, int64_t compute_ms)
{
	if (!m->started || compute_ms < 0)
		return 0;
	return m->open && m->hold_until_ms > compute_ms ? m->hold_until_ms : compute_ms;
}

int64_t meter_compute_limit_ms(const struct meter *m)
{
	int64_t used = charged(m);

	if (m->open)
		used = add_or_max(used, m->hold_model);
	return compute_ms_for(m, m->cap - (used < m->cap ? used : m->cap));
}

int64_t meter_input_bound(const struct model_spec *spec, uint64_t bytes, int64_t known_tokens, uint64_t bytes_since)
{
	__int128 per_byte = spec->tokens_per_byte_milli > 0 ? spec->tokens_per_byte_milli : 1000;
	__int128 whole = ((__int128)bytes * per_byte + 999) / 1000 + (spec->overhead_tokens > 0 ? spec->overhead_tokens : 0);
	__int128 since = ((__int128)bytes_since * per_byte + 999) / 1000 + known_tokens;

	if (known_tokens >= 0 && since < whole)
		whole = since;
	return whole > INT64_MAX ? INT64_MAX : (int64_t)whole;
}

/* Price of one attempt if every input token is billed at the dearest rate. */
static int64_t dearest(const struct meter *m, int64_t input, int64_t output)
{
	struct price p = m->price;
	int64_t micros;

	p.input = m->highest_input;
	return price_model(&p, input, 0, output, &micros) ? micros : INT64_MAX;
}

/* Most output tokens, up to `most`, with which the attempt costs at most `micros`; -1 when even none does not fit. */
static int64_t output_for(const struct meter *m, int64_t input, int64_t micros, int64_t most)
{
	int64_t low = 0, high = most;

	if (dearest(m, input, 0) > micros)
		return -1;
	while (low < high) {
		int64_t middle = low + (high - low + 1) / 2;

		if (dearest(m, input, middle) <= micros)
			low = middle;
		else
			high = middle - 1;
	}
	return low;
}

bool meter_plan(const struct meter *m, const struct model_spec *spec, struct meter_plan *p)
{
	int64_t spent = meter_spent(m, p->now_ms), left = m->cap - spent, rest, least, wanted, longest;
	int64_t money_ms = compute_ms_for(m, add_or_max(compute_cost(m, p->now_ms), left / 4));

	least = spec->min_output_tokens > 1 ? spec->min_output_tokens : 1;
	wanted = spec->max_output_tokens;
	if (p->wish_tokens > 0 && p->wish_tokens < wanted)
		wanted = p->wish_tokens;
	if (wanted < 1)
		wanted = 1;
	if (least > wanted)
		least = wanted;
	p->needed = price_call_room(&m->price, dearest(m, p->input_tokens, least), p->time_left_ms);

	longest = money_ms == INT64_MAX ? INT64_MAX : money_ms - p->now_ms;
	p->deadline_by_money = longest < p->time_left_ms;
	if (p->deadline_by_money && longest < PRICE_MIN_CALL_MS)
		return false;
	p->deadline_ms = add_or_max(p->now_ms, p->deadline_by_money ? longest : p->time_left_ms);
	rest = m->cap - meter_spent(m, p->deadline_ms);
	p->output_tokens = output_for(m, p->input_tokens, rest, wanted);
	return p->output_tokens >= least;
}

void meter_hold(struct meter *m, const struct meter_plan *p)
{
	check_abort(!m->open);
	m->open = true;
	m->hold_model = dearest(m, p->input_tokens, p->output_tokens);
	m->hold_until_ms = p->deadline_ms;
}

static void close_hold(struct meter *m)
{
	check_abort(m->open);
	m->open = false;
	m->hold_model = 0;
	m->hold_until_ms = 0;
}

void meter_release(struct meter *m)
{
	close_hold(m);
}

/* Adds the tokens to the run's usage if that costs at most the hold. */
static bool take_tokens(struct meter *m, const struct meter_tokens *t)
{
	struct usage u = m->usage;

	if (__builtin_add_overflow(u.input_tokens, t->input, &u.input_tokens) ||
			__builtin_add_overflow(u.cached_input_tokens, t->cached, &u.cached_input_tokens) ||
			__builtin_add_overflow(u.output_tokens, t->output, &u.output_tokens))
		return false;
	m->usage = u;
	return true;
}

enum meter_charge meter_settle(struct meter *m, const struct meter_tokens *t, int64_t *micros)
{
	enum meter_charge kind = METER_UNMETERED;
	int64_t cost, hold = m->hold_model;
	bool sane = t != NULL && t->input >= 0 && t->cached >= 0 && t->output >= 0 && t->cached <= t->input;

	check_abort(m->open);
	if (sane) {
		if (price_model(&m->price, t->input, t->cached, t->output, &cost) && cost <= hold && take_tokens(m, t))
			kind = METER_CHARGED;
		else
			kind = METER_OVER_HOLD;
	}
	if (kind != METER_CHARGED) {
		cost = hold;
		m->usage.unmetered_model_micros = add_or_max(m->usage.unmetered_model_micros, hold);
		if (kind == METER_UNMETERED)
			m->unmetered++;
		else
			m->over_hold++;
	}
	close_hold(m);
	if (micros != NULL)
		*micros = cost;
	return kind;
}

void meter_final(struct meter *m, int64_t compute_ms, struct usage *usage, struct cost *cost)
{
	if (m->open)
		(void)meter_settle(m, NULL, NULL);
	*usage = m->usage;
	usage->compute_ms = m->started && compute_ms > 0 ? compute_ms : 0;
	if (!m->started) {
		memset(cost, 0, sizeof(*cost));
		return;
	}
	if (!price_cost(&m->price, usage, cost)) {
		/* Only prices near the edge of 64 bits come here; what they ask is more than any cap. */
		memset(cost, 0, sizeof(*cost));
		cost->model = cost->total = m->cap;
	}
	price_clamp(cost, m->cap);
}
