/* link: noded_broker EPH::test_tls */
/* sources: tests/unit/model_rig.c tests/unit/upstream.c */
/*
 * The cap, through the broker's real model path: a thousand runs with random prices, caps, request sizes and providers. The
 * provider keeps its own tally of what it worked, by its own count; tally x price + compute + fee never passes the cap, and in most
 * runs the cap is what ends or shortens them. With a provider that lies the charge still never passes the cap, and the loss is
 * counted.
 */
#include "model_rig.h"

#include "common/clock.h"
#include "dice.h"
#include "loop.h"

#define RUNS 1000
#define CALLS_MAX 12

static int64_t between(int64_t low, int64_t high)
{
	return low + (int64_t)(rng() % (uint64_t)(high - low + 1));
}

/* What one run's provider did, as it would bill it. */
struct tally {
	int64_t input, cached, output;
	int64_t clamped;  /* requests whose output limit was below the model's own */
	int64_t answered; /* 2xx heads */
};

struct play {
	struct model_rig r;
	struct tally tally;
	bool honest;
	int64_t rate_milli; /* tokens a byte of its tokenizer, at most what the model's row says */
	int64_t overhead;   /* tokens that it adds to each prompt, at most the row's */
	char answer[4096];
};

/* Its own count of a prompt: the bytes of the whole body, so that nothing of ours is believed. */
static int64_t count_prompt(const struct play *p, size_t bytes)
{
	return (int64_t)bytes * p->rate_milli / 1000 + p->overhead;
}

static int64_t limit_in(const char *body)
{
	const char *at = strstr(body, "\"max_completion_tokens\":");

	return at ? strtoll(at + 24, NULL, 10) : INT64_MAX;
}

static void lie(char usage[200], int64_t input, int64_t output)
{
	switch (rng() % 5) {
	case 0: snprintf(usage, 200, "null"); break;
	case 1: snprintf(usage, 200, "{\"prompt_tokens\":%lld,\"completion_tokens\":-1}", (long long)input); break;
	case 2:
		snprintf(usage, 200, "{\"prompt_tokens\":%lld,\"completion_tokens\":%lld}", (long long)input * 1000,
				(long long)output * 1000);
		break;
	case 3: snprintf(usage, 200, "{\"prompt_tokens\":%llu,\"completion_tokens\":1}", (unsigned long long)rng()); break;
	default: snprintf(usage, 200, "{\"prompt_tokens\":%lld.5,\"completion_tokens\":\"x\"}", (long long)input); break;
	}
}

static bool decide(void *arg, const struct asked *q, struct answer *out)
{
	struct play *p = arg;
	const char *tail = q->body_len > 200 ? q->body + q->body_len - 200 : q->body;
	int64_t limit = limit_in(tail), input = count_prompt(p, q->body_len), output, cached;
	char usage[200];
	uint64_t fate = rng() % 20;

	assert_true(limit >= 1 && limit <= p->r.a.model.max_output_tokens);
	if (fate == 0) { /* busy: nothing was worked */
		out->bytes = ERROR("429 No", "Retry-After: 0\r\n", "");
		return true;
	}
	if (fate == 1) {
		out->bytes = ERROR("503 No", "Retry-After: 0\r\n", "");
		return true;
	}
	if (fate == 2 && rng() % 20 == 0) /* rare: what follows is a pause of ours, in real time */
		return false;
	/* It works: from one token to all that it may. */
	output = rng() % 3 == 0 ? limit : between(1, limit);
	cached = rng() % 2 ? between(0, input) : 0;
	p->tally.input += input;
	p->tally.cached += cached;
	p->tally.output += output;
	p->tally.answered++;
	p->tally.clamped += limit < p->r.a.model.max_output_tokens;
	if (p->honest)
		snprintf(usage, sizeof(usage),
				"{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"prompt_tokens_details\":{\"cached_tokens\":%"
				"lld}}",
				(long long)input, (long long)output, (long long)cached);
	else
		lie(usage, input, output);
	snprintf(p->answer, sizeof(p->answer),
			"HTTP/1.1 200 OK\r\nRetry-After: 0\r\n\r\n" CHUNK("some words")
					FINISH("stop") "data: {\"choices\":[],\"usage\":%s}\n\n" DONE,
			usage);
	out->bytes = p->answer;
	if (fate == 3) /* it breaks off; it bills what it did all the same */
		out->n = (size_t)between(36, (int64_t)(strstr(p->answer, "stop") - p->answer));
	return true;
}

static void set_up(struct play *p, uint64_t seed)
{
	struct model_rig *r = &p->r;
	struct model_spec *spec = &r->a.model;
	int64_t one, tpb = between(250, 1500);

	rng_seed(seed);
	memset(p, 0, sizeof(*p));
	rig_init(r);
	r->price = (struct price){ .run_fee = between(0, 500),
		.compute = rng() % 4 ? between(0, 3000000) : 0,
		.input = between(10000, 15000000),
		.cached_input = between(0, 15000000),
		.output = between(10000, 60000000),
		.model_percent = rng() % 2 ? between(0, 3000) : 0 };
	spec->tokens_per_byte_milli = tpb;
	spec->overhead_tokens = between(0, 300);
	spec->max_output_tokens = between(16, 4000);
	spec->min_output_tokens = between(1, 64);
	p->rate_milli = between(tpb / 4, tpb);
	p->overhead = between(0, spec->overhead_tokens);
	/* A cap of some calls' worth. */
	assert_true(price_model(&r->price, 2000, 0, spec->max_output_tokens, &one));
	r->a.cap_micros = r->price.run_fee + one * between(5, 100) / 10 + between(1, 2000);
}

static void open_play(struct play *p)
{
	rig_open_with(&p->r, decide, p);
}

/* Compute goes on between calls; the run is stopped where the meter says. False: that was the end. */
static bool compute_on(struct play *p)
{
	int64_t limit = meter_compute_limit_ms(&p->r.meter), left = limit == INT64_MAX ? 5000 : limit - rig_now_ms(&p->r);

	if (left <= 0)
		return false;
	p->r.jump_ms += between(0, left < 5000 ? left : 5000);
	return limit == INT64_MAX || rig_now_ms(&p->r) < limit;
}

/* How the cap bound: it ended the run, or it made an output limit smaller. */
static void talk(struct play *p, bool *ended, bool *bound)
{
	char *text = calloc(1, 40000);
	size_t n = 0;

	*ended = false;
	for (int i = 0; i < CALLS_MAX; i++) {
		size_t more = (size_t)between(1, 2500);

		memset(text + n, 'w', more);
		n += more;
		rig_call(&p->r, text);
		if (!p->r.replied && p->r.code == ERRCODE_BUDGET_EXCEEDED) {
			*ended = true;
			break;
		}
		if (!p->r.replied && p->r.code != ERRCODE_MODEL_ERROR)
			fail_msg("%s: %s", errcode_text(p->r.code), p->r.text);
		if (!compute_on(p)) {
			*ended = true;
			break;
		}
	}
	*bound = *ended || p->tally.clamped > 0;
	free(text);
}

static int64_t bill(const struct play *p, int64_t compute_ms)
{
	int64_t tokens, compute;

	assert_true(price_model(&p->r.price, p->tally.input, p->tally.cached, p->tally.output, &tokens));
	assert_true(price_of(compute_ms, p->r.price.compute, &compute));
	return p->r.price.run_fee + tokens + compute;
}

static void one_play(uint64_t seed, bool honest, int *ended_runs, int *bound_runs, int64_t *losses)
{
	struct play p;
	struct usage u;
	struct cost c;
	int64_t limit, now;
	bool ended, bound;

	set_up(&p, seed);
	p.honest = honest;
	open_play(&p);
	talk(&p, &ended, &bound);
	*ended_runs += ended;
	*bound_runs += bound;
	/* The kill: not later than the meter allows. */
	limit = meter_compute_limit_ms(&p.r.meter);
	now = rig_now_ms(&p.r) < limit ? rig_now_ms(&p.r) : limit;
	meter_final(&p.r.meter, now, &u, &c);
	assert_true(c.total <= p.r.a.cap_micros);
	assert_int_equal(c.run_fee + c.compute + c.model + c.web, c.total);
	if (honest) {
		if (bill(&p, now) > p.r.a.cap_micros)
			fail_msg("seed %llu: the provider bills %lld of %lld micros", (unsigned long long)seed,
					(long long)bill(&p, now), (long long)p.r.a.cap_micros);
		assert_true(bill(&p, now) <= c.total);
		assert_int_equal(p.r.meter.over_hold, 0);
		if (u.unmetered_model_micros == 0) /* nothing broke off: to the micro what the provider says */
			assert_int_equal(bill(&p, now), c.total);
	} else {
		assert_int_equal(p.r.meter.unmetered + p.r.meter.over_hold, p.tally.answered);
		assert_int_equal(u.input_tokens + u.output_tokens, 0);
		assert_int_equal(u.unmetered_model_micros, c.model);
		*losses += c.model;
	}
	rig_close(&p.r);
}

static void play_all(int runs, bool honest, uint64_t first)
{
	int bound = 0, ended = 0;
	int64_t losses = 0;

	for (int i = 0; i < runs; i++)
		one_play(first + (uint64_t)i, honest, &ended, &bound, &losses);
	printf("%d runs (%s): the cap bound in %d (%d %%) and ended %d of them; unmetered %lld micros\n", runs,
			honest ? "honest" : "lying", bound, bound * 100 / runs, ended, (long long)losses);
	assert_true(bound * 100 >= runs * 80);
}

static void test_honest_providers(void **state)
{
	(void)state;
	play_all(RUNS, true, 1);
}

static void test_lying_providers(void **state)
{
	(void)state;
	play_all(RUNS / 4, false, 100001);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_honest_providers),
		cmocka_unit_test(test_lying_providers),
	};

	rig_log_start();
	return rig_log_end(cmocka_run_group_tests(tests, NULL, NULL));
}
