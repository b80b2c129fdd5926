/*
 * What things cost. Pure integer arithmetic, shared by the broker (which holds and stops) and controld (which charges), so that
 * both get the same micros. Rounded up once per component and run; every step is overflow-checked.
 */
#include "price.h"

#define MILLION 1000000

/* a * b / 1e6 rounded up, with the product taken in 128 bits so that only the result can be too large. */
bool price_of(int64_t units, int64_t per_million, int64_t *micros)
{
	__int128 product;

	if (units < 0 || per_million < 0)
		return false;
	product = ((__int128)units * per_million + (MILLION - 1)) / MILLION;
	if (product > INT64_MAX)
		return false;
	*micros = (int64_t)product;
	return true;
}

/* Tokens at their rates and the surcharge on top, as one exact product in units of 1e-10 micros, rounded up once. */
bool price_model(const struct price *p, int64_t input, int64_t cached, int64_t output, int64_t *micros)
{
	const __int128 scale = (__int128)MILLION * 10000;
	__int128 sum, part;

	if (input < 0 || cached < 0 || cached > input || output < 0 || p->input < 0 || p->cached_input < 0 || p->output < 0 ||
			p->model_percent < 0)
		return false;
	sum = (__int128)(input - cached) * p->input;
	part = (__int128)cached * p->cached_input;
	if (__builtin_add_overflow(sum, part, &sum))
		return false;
	part = (__int128)output * p->output;
	if (__builtin_add_overflow(sum, part, &sum))
		return false;
	if (__builtin_mul_overflow(sum, (__int128)10000 + p->model_percent, &sum) || __builtin_add_overflow(sum, scale - 1, &sum))
		return false;
	sum /= scale;
	if (sum > INT64_MAX)
		return false;
	*micros = (int64_t)sum;
	return true;
}

bool price_cost(const struct price *p, const struct usage *u, struct cost *out)
{
	__int128 web;

	if (p->run_fee < 0 || u->model_calls < 0 || u->unmetered_model_micros < 0)
		return false;
	out->run_fee = p->run_fee;
	if (!price_of(u->compute_ms, p->compute, &out->compute) ||
			!price_model(p, u->input_tokens, u->cached_input_tokens, u->output_tokens, &out->model) ||
			__builtin_add_overflow(out->model, u->unmetered_model_micros, &out->model))
		return false;
	if (u->web_requests < 0 || u->web_searches < 0 || p->web_request < 0 || p->web_search < 0)
		return false;
	/* Two products below 2^126 each: the sum fits. */
	web = ((__int128)u->web_requests * p->web_request + (__int128)u->web_searches * p->web_search + (MILLION - 1)) / MILLION;
	if (web > INT64_MAX)
		return false;
	out->web = (int64_t)web;
	return !__builtin_add_overflow(out->run_fee, out->compute, &out->total) &&
	       !__builtin_add_overflow(out->total, out->model, &out->total) &&
	       !__builtin_add_overflow(out->total, out->web, &out->total);
}

void price_clamp(struct cost *c, int64_t cap)
{
	int64_t *parts[] = { &c->model, &c->web, &c->compute, &c->run_fee };
	int64_t over;

	if (cap < 0)
		cap = 0;
	if (c->total <= cap)
		return;
	over = c->total - cap;
	for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]) && over > 0; i++) {
		int64_t cut = *parts[i] < over ? *parts[i] : over;

		*parts[i] -= cut;
		over -= cut;
	}
	c->total = cap;
}

static __int128 lesser(__int128 a, __int128 b)
{
	return a < b ? a : b;
}

int64_t price_call_room(const struct price *p, int64_t tokens, int64_t call_ms)
{
	int64_t all, least;
	__int128 paid, open;

	if (tokens < 0 || call_ms < 0 || !price_of(call_ms, p->compute, &all) ||
			!price_of(call_ms < PRICE_MIN_CALL_MS ? call_ms : PRICE_MIN_CALL_MS, p->compute, &least))
		return INT64_MAX;
	/* Either the whole time is paid, or a quarter of what is left and at least PRICE_MIN_CALL_MS. */
	paid = lesser(((__int128)tokens * 4 + 2) / 3, (__int128)tokens + all);
	open = lesser((__int128)least * 4, (__int128)all * 4);
	if (paid < open)
		paid = open;
	return paid > INT64_MAX ? INT64_MAX : (int64_t)paid;
}

int64_t price_min_cap(const struct price *p, int64_t min_input_tokens, int64_t min_output_tokens, int64_t call_ms)
{
	int64_t tokens, second, sum;

	if (!price_model(p, min_input_tokens, 0, min_output_tokens, &tokens) || !price_of(1000, p->compute, &second) ||
			__builtin_add_overflow(p->run_fee, second, &sum) ||
			__builtin_add_overflow(sum, price_call_room(p, tokens, call_ms), &sum))
		return INT64_MAX; /* no cap is enough for such prices */
	return sum;
}
