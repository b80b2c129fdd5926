/* link: noded_broker */
/* sources: tests/unit/broker_rig.c */
/* The broker process and its provider: answers, retries, cut streams, refusals, the cap; what each costs. */
#include "broker_rig.h"

#include <sys/resource.h>

static void test_success(void **state)
{
	const char *answers[] = { HELLO_REPLY, HELLO_REPLY, NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "the answer");
	assert_int_equal(r.end.code, ERRCODE_NONE);
	assert_int_equal(r.end.output_len, 10);
	assert_int_equal(r.end.usage.model_calls, 2);
	assert_int_equal(r.end.usage.input_tokens, 40);
	assert_int_equal(r.end.usage.cached_input_tokens, 10);
	assert_int_equal(r.end.usage.output_tokens, 6);
	assert_int_equal(r.end.cost.model, (30 * 3000000 + 10 * 300000 + 6 * 15000000) / 1000000);
	assert_int_equal(r.end.cost.run_fee, 10);
	assert_true(r.end.worker_started_t_ms >= 700);
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_string_equal(types, "microvm.ready worker.started model.call model.call microvm.destroyed");
	assert_int_equal(data_int(call, "call"), 2);
	assert_int_equal(data_int(call, "attempts"), 1);
	assert_int_equal(data_int(call, "cost_micros"), 92); /* 15*3 + 5*.3 + 3*15, rounded up */
	/* The hold was on the host when the provider had the request, and the second one knew the tokens of the first. */
	assert_true(r.provider.shared->held[0] > 15000);
	assert_true(r.provider.shared->held[1] < r.provider.shared->held[0]);
	assert_non_null(strstr(r.provider.shared->request[0], "Authorization: Bearer sk-canary-7f3a\r\n"));
	assert_non_null(strstr(r.provider.shared->request[0], "X-Request-Id: " RUN "-1-1\r\n"));
	assert_non_null(strstr(r.provider.shared->request[1], "X-Request-Id: " RUN "-2-1\r\n"));
	assert_non_null(strstr(r.provider.shared->request[0], "\"max_completion_tokens\":1000}"));
	rig_stop(&r);
}

static void test_retries(void **state)
{
	const char *answers[] = { "HTTP/1.1 429 Too Many\r\nRetry-After: 0\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
		"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", HELLO_REPLY, NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_int_equal(data_int(call, "attempts"), 3);
	assert_int_equal(data_int(call, "cost_micros"), 92); /* no 2xx head costs nothing */
	assert_non_null(strstr(r.provider.shared->request[2], "X-Request-Id: " RUN "-1-3\r\n"));
	assert_int_equal(r.tally.model_attempts_again, 2);
	rig_stop(&r);
}

static void test_cut_stream(void **state)
{
	const char *answers[] = { SSE_HEAD CHUNK("hal"), HELLO_REPLY, NULL };
	char types[4096], call[65536];
	int64_t hold;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_int_equal(data_int(call, "attempts"), 2);
	hold = r.end.usage.unmetered_model_micros;
	assert_true(hold > 15000); /* 1000 output tokens at 15 and the request at 3 */
	assert_int_equal(data_int(call, "cost_micros"), hold + 92);
	assert_int_equal(r.end.usage.model_calls, 1);
	rig_stop(&r);
}

/* What the provider counted before it broke off is what is charged. */
static void test_cut_after_usage(void **state)
{
	const char *answers[] = { SSE_HEAD CHUNK("hal") USAGE(20, 5, 3), HELLO_REPLY, NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_int_equal(data_int(call, "cost_micros"), 2 * 92);
	assert_int_equal(r.end.usage.unmetered_model_micros, 0);
	assert_int_equal(r.end.usage.input_tokens, 40);
	rig_stop(&r);
}

/* A run that is cancelled while an answer comes is charged for it: its hold. */
static void test_cancelled_in_an_answer(void **state)
{
	const char *answers[] = { "hang after " SSE_HEAD CHUNK("hal"), NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	wait_until_answering(&r);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_CANCELLED);
	assert_true(r.end.usage.unmetered_model_micros > 15000);
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_string_equal(types, "microvm.ready worker.started model.call microvm.destroyed");
	assert_int_equal(data_int(call, "cost_micros"), r.end.usage.unmetered_model_micros);
	assert_int_equal(r.end.usage.model_calls, 1);
	assert_int_equal(r.tally.calls[STATS_CALL_MODEL][STATS_CALL_CUT], 1);
	assert_int_equal(r.tally.unmetered, 1);
	rig_stop(&r);
}

/* A provider that counts on in every chunk: what it had counted when the answer was cut off is not the price. */
static void test_cancelled_with_a_count_so_far(void **state)
{
	const char *answers[] = { "hang after " SSE_HEAD "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hal\"},"
				  "\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":1}}\n\n",
		NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	wait_until_answering(&r);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	to_the_end(&r);
	assert_int_equal(r.end.usage.output_tokens, 0);
	assert_true(r.end.usage.unmetered_model_micros > 15000);
	rig_stop(&r);
}

/* Without shell in the request the guest may ask for the tool as it likes: the model is not told of it. */
static void test_shell_is_denied(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	char types[4096], denied[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.shell = false;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	read_events(&r, types, EV_DENIED, denied, NULL);
	assert_string_equal(types, "microvm.ready worker.started denied model.call microvm.destroyed");
	assert_true(data_text_is(denied, "what", "shell"));
	assert_null(strstr(r.provider.shared->request[0], "\"tools\""));
	assert_int_equal(r.tally.denials[STATS_DENIED_TOOL], 1);
	assert_int_equal(r.tally.calls[STATS_CALL_MODEL][STATS_CALL_OK], 1);
	rig_stop(&r);
}

static void test_cut_twice(void **state)
{
	const char *answers[] = { SSE_HEAD CHUNK("hal"), SSE_HEAD CHUNK("hal"), HELLO_REPLY, NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.cap_micros = 100000;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_ERROR);
	assert_int_equal(r.provider.shared->requests, 2);
	rig_stop(&r);
}

static void test_provider_refuses(void **state)
{
	const char *answers[] = { "HTTP/1.1 401 No\r\nConnection: close\r\n\r\n{\"error\":{\"message\":\"bad \\u001b[31mkey\"}}",
		NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_ERROR);
	assert_non_null(strstr(r.end.detail, "401"));
	assert_non_null(strstr(r.end.detail, "bad \\x1b[31mkey"));
	assert_non_null(strstr(r.end.detail, "provider's key"));
	assert_int_equal(r.end.cost.model, 0);
	rig_stop(&r);
}

static void test_limit_param_learned(void **state)
{
	const char *answers[] = {
		"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n"
		"{\"error\":{\"message\":\"Unsupported parameter: use 'max_tokens' instead\",\"param\":\"max_completion_tokens\"}}",
		HELLO_REPLY, HELLO_REPLY, NULL
	};
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	call_model(&r, "ho");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	assert_non_null(strstr(r.provider.shared->request[1], "\"max_tokens\":1000}"));
	assert_non_null(strstr(r.provider.shared->request[2], "\"max_tokens\":1000}"));
	rig_stop(&r);
}

static void test_budget_in_a_call(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.cap_micros = 1000; /* the request alone is dearer */
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_BUDGET_EXCEEDED);
	assert_non_null(strstr(r.end.detail, "$0.001"));
	assert_int_equal(r.provider.shared->requests, 0); /* not a byte left */
	assert_int_equal(r.tally.calls[STATS_CALL_MODEL][STATS_CALL_BUDGET], 1);
	rig_stop(&r);
}

static void test_budget_by_compute(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.price.compute = 100000000; /* 100 micros a millisecond: 40000 is 0.4 s */
	rig_start(&r, NULL);
	to_work(&r);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_BUDGET_EXCEEDED);
	assert_true(r.end.cost.compute > 35000);
	assert_true(r.end.usage.compute_ms <= 400);
	rig_stop(&r);
}

static void test_usage_over_hold(void **state)
{
	const char *answers[] = { SSE_HEAD CHUNK("a") STOP USAGE(999999999, 0, 5) DONE, NULL };
	char types[4096], call[65536];
	int64_t real;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "a");
	finish_with(&r, "x");
	assert_int_equal(r.end.usage.input_tokens, 0);
	assert_true(r.end.usage.unmetered_model_micros > 15000);
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_int_equal(data_int(call, "cost_micros"), r.end.usage.unmetered_model_micros);
	/* What the operator pays beyond what the run does. */
	assert_true(price_model(&r.a.price, 999999999, 0, 5, &real));
	assert_int_equal(r.tally.over_hold, 1);
	assert_int_equal(r.tally.over_hold_micros, real - r.end.usage.unmetered_model_micros);
	assert_int_equal(r.tally.calls[STATS_CALL_MODEL][STATS_CALL_OK], 1);
	rig_stop(&r);
}

static void test_call_timeout(void **state)
{
	const char *answers[] = { "hang", NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.model.call_timeout_ms = 400;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_ERROR);
	assert_non_null(strstr(r.end.detail, "400 ms"));
	assert_int_equal(r.tally.calls[STATS_CALL_MODEL][STATS_CALL_FAILED], 1);
	rig_stop(&r);
}

/* The disk fails between hold and charge: the run ends, with the charge, and the call that was whole is not answered. */
static void test_meter_cannot_be_written(void **state)
{
	const char *answers[] = { "hang after " SSE_HEAD CHUNK("a") STOP USAGE(20, 5, 3), NULL };
	const struct rlimit nothing = { 0, 0 };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.model.call_timeout_ms = 1500;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	wait_until_answering(&r);
	assert_int_equal(prlimit(r.pid, RLIMIT_FSIZE, &nothing, NULL), 0);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_INTERNAL);
	assert_int_equal(r.end.usage.input_tokens, 20);
	assert_true(r.end.cost.model > 0);
	rig_stop(&r);
}

static void test_timeout_in_a_call(void **state)
{
	const char *answers[] = { "hang", NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.timeout_s = 1;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_TIMED_OUT);
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_string_equal(types, "microvm.ready worker.started model.call microvm.destroyed");
	assert_int_equal(data_int(call, "cost_micros"), 0);
	rig_stop(&r);
}

static void test_model_calls_exceeded(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.max_model_calls = 1;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_CALLS_EXCEEDED);
	rig_stop(&r);
}

/* The broker dies in a call: what it left is the hold, in full, within the cap, and how much of it is compute. */
static void test_killed_in_a_call(void **state)
{
	const char *answers[] = { "hang after " SSE_HEAD CHUNK("hal"), NULL };
	struct spool_tail t;
	struct spool *s;
	struct err e;
	int64_t compute;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.price.compute = 2000000; /* 2 micros a millisecond: the call's 5 s are 10000 */
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	wait_until_answering(&r);
	assert_int_equal(kill(r.pid, SIGKILL), 0);
	assert_int_equal(waitpid(r.pid, NULL, 0), r.pid);
	r.pid = 0;
	assert_int_equal(spool_open(dup(r.spool_fd), false, &s, &e), 0);
	spool_tail(s, &t);
	spool_close(s);
	assert_true(t.spent + t.held <= r.a.cap_micros);
	assert_true(t.compute_ms >= 4000 && t.compute_ms <= 60000); /* to the attempt's deadline */
	assert_true(price_of(t.compute_ms, r.a.price.compute, &compute));
	/* Fee and compute taken away, the dearest outcome of the attempt is left. */
	assert_true(t.spent + t.held - compute - r.a.price.run_fee > 15000);
	rig_stop(&r);
}

/* Copies of a text in the private memory of a process that may be written; -1: it may not be looked at. */
static int copies_in(pid_t pid, const char *text)
{
	char path[64], line[512], *bytes;
	unsigned long from, to;
	int copies = 0, mem;
	FILE *maps;

	assert_true(text_fmt(path, sizeof(path), "/proc/%d/maps", (int)pid));
	maps = fopen(path, "r");
	assert_true(text_fmt(path, sizeof(path), "/proc/%d/mem", (int)pid));
	mem = open(path, O_RDONLY | O_CLOEXEC);
	while (maps && mem >= 0 && fgets(line, sizeof(line), maps)) {
		/* The sanitizer's shadow is terabytes of nothing. */
		if (sscanf(line, "%lx-%lx", &from, &to) != 2 || !strstr(line, " rw-p ") || to - from > 64 * 1024 * 1024)
			continue;
		bytes = malloc(to - from);
		if (pread(mem, bytes, to - from, (off_t)from) == (ssize_t)(to - from))
			for (char *at = bytes; (at = memmem(at, to - from - (size_t)(at - bytes), text, strlen(text))) != NULL;
					at++)
				copies++;
		free(bytes);
	}
	if (maps)
		fclose(maps);
	if (mem >= 0)
		close(mem);
	return maps && mem >= 0 ? copies : -1;
}

/* The key came in a frame, was decoded, and went out in two requests: what is left of all that is the one copy that is needed. */
static void test_one_copy_of_the_key(void **state)
{
	const char *answers[] = { "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 0\r\nConnection: close\r\n\r\n",
		HELLO_REPLY, NULL };
	struct pollfd none = { .fd = -1 };
	int64_t until;
	int copies;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	/* Made up after the fork: what the broker has of it came to it as a key does. */
	assert_true(text_fmt(r.key, sizeof(r.key), "sk-%d-%lld", (int)r.pid, (long long)clock_mono_ns()));
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	assert_non_null(strstr(r.provider.shared->request[1], r.key));
	copies = copies_in(r.pid, r.key);
	/* The reply may be here before the broker has let go of the request. */
	until = clock_mono_ns() + INT64_C(1000000) * WAIT_MS;
	while (copies > 1 && clock_mono_ns() < until) {
		(void)poll(&none, 1, 10);
		copies = copies_in(r.pid, r.key);
	}
	finish_with(&r, "x");
	rig_stop(&r);
	if (copies < 0)
		skip();
	assert_int_equal(copies, 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_success),
		cmocka_unit_test(test_retries),
		cmocka_unit_test(test_cut_stream),
		cmocka_unit_test(test_cut_after_usage),
		cmocka_unit_test(test_cancelled_in_an_answer),
		cmocka_unit_test(test_cancelled_with_a_count_so_far),
		cmocka_unit_test(test_shell_is_denied),
		cmocka_unit_test(test_cut_twice),
		cmocka_unit_test(test_provider_refuses),
		cmocka_unit_test(test_limit_param_learned),
		cmocka_unit_test(test_budget_in_a_call),
		cmocka_unit_test(test_budget_by_compute),
		cmocka_unit_test(test_usage_over_hold),
		cmocka_unit_test(test_call_timeout),
		cmocka_unit_test(test_meter_cannot_be_written),
		cmocka_unit_test(test_timeout_in_a_call),
		cmocka_unit_test(test_model_calls_exceeded),
		cmocka_unit_test(test_one_copy_of_the_key),
		cmocka_unit_test(test_killed_in_a_call),
	};

	(void)signal(SIGPIPE, SIG_IGN);
	if (sodium_init() < 0)
		return 1;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
