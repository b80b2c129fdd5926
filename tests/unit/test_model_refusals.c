/* link: noded_broker EPH::test_tls */
/* sources: tests/unit/model_rig.c tests/unit/upstream.c */
/*
 * A provider that says no: every status, how often it is asked again and when, what the client is told, what it costs (nothing:
 * no 2xx head came), the output limit's other name. The key is in none of it.
 */
#include "model_rig.h"

#include "common/clock.h"
#include "loop.h"

#include <time.h>

#define SAID "{\"error\":{\"message\":\"it says why\",\"type\":\"x\"}}"

static void costs_nothing(const struct model_rig *r)
{
	assert_int_equal(r->report.cost_micros, 0);
	assert_int_equal(meter_spent(&r->meter, 0), r->price.run_fee);
	assert_int_equal(r->meter.usage.unmetered_model_micros, 0);
	assert_int_equal(r->meter.usage.model_calls, 0);
	assert_true(r->hold > 15000); /* but it was held */
}

static void test_final_refusals(void **state)
{
	static const struct {
		const char *status, *number, *hint;
	} rows[] = {
		{ "400 Bad Request", "400", "model's settings" },
		{ "401 Unauthorized", "401", "provider's key" },
		{ "402 Payment Required", "402", "account" },
		{ "403 Forbidden", "403", "provider's key" },
		{ "404 Not Found", "404", "base URL and the model's upstream name" },
		{ "405 Method Not Allowed", "405", "base URL" },
		{ "413 Too Large", "413", "too long" },
		{ "418 I'm a teapot", "418", "model's settings" },
		{ "422 Unprocessable", "422", "model's settings" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[256];
		struct answer a = { .bytes = text };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), "HTTP/1.1 %s\r\nConnection: close\r\n\r\n" SAID, rows[i].status));
		rig_init(&r);
		rig_one(&r, &a, 1);
		FAILED(&r, ERRCODE_MODEL_ERROR, 1, rows[i].number, "it says why", rows[i].hint, "after 1 attempt:");
		costs_nothing(&r);
		rig_close(&r);
	}
}

static void test_trouble_is_tried_four_times(void **state)
{
	static const char *const rows[] = { "408 Timeout", "429 Too Many Requests", "500 Oops", "502 Bad Gateway", "503 Busy",
		"504 Late", "529 Overloaded", "599 What" };

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[256], number[4] = { rows[i][0], rows[i][1], rows[i][2], 0 };
		struct answer a[5];
		struct model_rig r;

		assert_true(text_fmt(
				text, sizeof(text), "HTTP/1.1 %s\r\nRetry-After: 0\r\nConnection: close\r\n\r\n" SAID, rows[i]));
		for (size_t k = 0; k < COUNT(a); k++)
			a[k] = (struct answer){ .bytes = text };
		rig_init(&r);
		rig_one(&r, a, COUNT(a));
		FAILED(&r, ERRCODE_MODEL_ERROR, 4, number, "it says why", "after 4 attempts:", "try again later");
		assert_int_equal(r.report.attempts, 4);
		assert_string_equal(r.request_id[3], RIG_RUN "-1-4");
		costs_nothing(&r);
		rig_close(&r);
	}
}

/* --- when to ask again ------------------------------------------------------------------------------------------------------- */

static int64_t gap_after(const char *retry_after)
{
	char text[400];
	struct answer a[] = { { .bytes = text }, { .bytes = GOOD } };
	struct model_rig r;
	int64_t gap;

	assert_true(text_fmt(text, sizeof(text), "HTTP/1.1 429 No\r\n%s%s\r\nConnection: close\r\n\r\n",
			retry_after ? "Retry-After: " : "X: ", retry_after ? retry_after : "y"));
	rig_init(&r);
	rig_one(&r, a, 2);
	if (!r.replied)
		fail_msg("Retry-After %s: %s", retry_after, r.text);
	gap = r.asked_ms[1] - r.asked_ms[0];
	assert_int_equal(r.report.cost_micros, GOOD_MICROS);
	rig_close(&r);
	return gap;
}

static const char *http_date(int64_t from_now_ms)
{
	static char text[64];
	time_t at = (time_t)((clock_real_ms() + from_now_ms) / 1000);
	struct tm tm;

	gmtime_r(&at, &tm);
	strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &tm);
	return text;
}

static void test_retry_after(void **state)
{
	static const char *const odd[] = { NULL, "-5", "+3", "soon", "1e3", "0x1", "1.5", "3 apples", "Mon, 99 Foo 2026" };

	(void)state;
	assert_true(gap_after("1") >= 990);
	assert_true(gap_after(http_date(3000)) >= 1900); /* a date has whole seconds */
	assert_true(gap_after(http_date(-86400000)) < 5000);
	/* What is no time at all: our own pause, at least a quarter of a second. */
	for (size_t i = 0; i < COUNT(odd); i++)
		assert_true(gap_after(odd[i]) >= 250);
}

static void test_retry_after_is_too_far(void **state)
{
	char date[64];
	const char *rows[] = { "9", "3600", "99999999", "99999999999999999999999999", date, "Fri, 31 Dec 2199 23:59:59 GMT" };

	(void)state;
	snprintf(date, sizeof(date), "%s", http_date(60000));
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[256];
		struct answer a = { .bytes = text };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), "HTTP/1.1 429 No\r\nRetry-After: %s\r\nConnection: close\r\n\r\n" SAID,
				rows[i]));
		rig_init(&r); /* a call may take 8 s */
		rig_one(&r, &a, 1);
		FAILED(&r, ERRCODE_MODEL_ERROR, 1, "429", "asks to wait", "longer than this call may take");
		assert_true(r.report.duration_ms < 5000); /* it ends at once */
		costs_nothing(&r);
		rig_close(&r);
	}
}

/* The run's own time is over sooner than the pause: no attempt is made after it. */
static void test_retry_beyond_the_run(void **state)
{
	struct answer a[] = { { .bytes = ERROR("429 No", "Retry-After: 3\r\n", SAID) }, { .bytes = GOOD } };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	r.time_left_ms = 2000;
	rig_one(&r, a, 2);
	FAILED(&r, ERRCODE_MODEL_ERROR, 1, "429");
	rig_close(&r);
}

/* --- redirects --------------------------------------------------------------------------------------------------------------- */

static void test_redirects_are_not_followed(void **state)
{
	static const char *const rows[] = { "300 Multiple", "301 Moved", "302 Found", "303 See Other", "307 Temporary",
		"308 Permanent", "304 Same" };

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[300], number[4] = { rows[i][0], rows[i][1], rows[i][2], 0 };
		struct answer first = { .bytes = text }, never = { .bytes = GOOD };
		struct model_rig r, other;

		/* The place that it points to is a provider too: it must not be called, least of all with the key. */
		rig_init(&other);
		rig_open(&other, &never, 1, NULL, false);
		rig_init(&r);
		assert_true(text_fmt(text, sizeof(text),
				"HTTP/1.1 %s\r\nLocation: http://127.0.0.1:%d/v1/chat/completions\r\nConnection: close\r\n\r\n",
				rows[i], upstream_port(other.up)));
		rig_one(&r, &first, 1);
		FAILED(&r, ERRCODE_MODEL_ERROR, 1, number, "Redirects are not followed", "base URL");
		costs_nothing(&r);
		event_base_loop(other.base, EVLOOP_NONBLOCK);
		assert_int_equal(upstream_counts(other.up)->connections, 0);
		rig_close(&r);
		rig_close(&other);
	}
}

/* --- the output limit's other name ---------------------------------------------------------------------------------------------
 */

#define WANTS(param, other)                                                                                                        \
	ERROR("400 Bad", "",                                                                                                       \
			"{\"error\":{\"message\":\"Unsupported parameter: '" param "'. Use '" other                                \
			"' instead.\",\"param\":\"" param "\",\"code\":\"unsupported_parameter\"}}")
#define WANTS_IN_WORDS(other) ERROR("400 Bad", "", "{\"detail\":\"this model takes " other "\"}")

static void limit_is_learned(enum limit_param first, const char *refusal, const char *old, const char *new)
{
	struct answer a[] = { { .bytes = refusal }, { .bytes = GOOD }, { .bytes = GOOD } };
	struct model_rig r;

	rig_init(&r);
	r.a.model.limit_param = first;
	rig_open(&r, a, 3, NULL, false);
	rig_call(&r, "hi");
	assert_true(r.replied);
	assert_non_null(strstr(r.body[0], old));
	assert_non_null(strstr(r.body[1], new));
	assert_null(strstr(r.body[1], old));
	assert_int_equal(r.report.cost_micros, GOOD_MICROS);
	assert_int_equal(r.report.attempts, 2);
	rig_call(&r, "ho"); /* the next call uses it directly */
	assert_true(r.replied);
	assert_int_equal(upstream_counts(r.up)->requests, 3);
	assert_non_null(strstr(r.body[2], new));
	rig_close(&r);
}

static void test_the_other_limit(void **state)
{
	static const char old[] = "\"max_tokens\":", new[] = "\"max_completion_tokens\":";

	(void)state;
	limit_is_learned(LIMIT_MAX_COMPLETION_TOKENS, WANTS("max_completion_tokens", "max_tokens"), new, old);
	limit_is_learned(LIMIT_MAX_TOKENS, WANTS("max_tokens", "max_completion_tokens"), old, new);
	limit_is_learned(LIMIT_MAX_COMPLETION_TOKENS, WANTS_IN_WORDS("max_tokens"), new, old);
	limit_is_learned(LIMIT_MAX_TOKENS, WANTS_IN_WORDS("max_completion_tokens"), old, new);
}

/* A provider that wants neither is asked once more, not for ever; one that complains of something else is not asked again. */
static void test_the_other_limit_once(void **state)
{
	struct answer a[] = { { .bytes = WANTS("max_completion_tokens", "max_tokens") },
		{ .bytes = WANTS("max_tokens", "max_completion_tokens") }, { .bytes = GOOD } };
	struct answer b[] = { { .bytes = ERROR("400 Bad", "", "{\"error\":{\"message\":\"no such model\",\"param\":\"model\"}}") },
		{ .bytes = GOOD } };
	struct answer c[] = { { .bytes = ERROR("422 Bad", "", "use max_tokens") }, { .bytes = GOOD } };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	rig_one(&r, a, 3);
	FAILED(&r, ERRCODE_MODEL_ERROR, 2, "400", "max_tokens");
	costs_nothing(&r);
	rig_close(&r);
	rig_init(&r);
	rig_one(&r, b, 2);
	FAILED(&r, ERRCODE_MODEL_ERROR, 1, "400", "no such model");
	rig_close(&r);
	rig_init(&r);
	rig_one(&r, c, 2);
	FAILED(&r, ERRCODE_MODEL_ERROR, 1, "422");
	rig_close(&r);
}

/* --- what is shown of an error ---------------------------------------------------------------------------------------------------
 */

static void test_error_bodies(void **state)
{
	static const struct {
		const char *body, *shown;
	} rows[] = {
		{ "{\"error\":{\"message\":\"plain\"}}", "401 after 1 attempt: plain." },
		{ "{\"error\":{\"message\":5}}", "{\"error\":{\"message\":5}}" },
		{ "{\"error\":null}", "{\"error\":null}" },
		{ "[]", "[]" },
		{ "<html>\x1b[2Jgone</html>", "<html>\\x1b[2Jgone</html>" },
		{ "\xff\xfe\xed\xa0\x80\xc0\xaf", "\\xff\\xfe" },
		{ "", "no message" },
		{ "{\"error\":{\"message\":\"a\\u0000b\"}}", "401" },
		{ "{\"error\":{\"message\":\"first\\nsecond\"}}", "first" },
		{ "{\"error\":{\"message\":\"key " RIG_KEY " is wrong\"}}", "key ********************* is wrong" },
		{ "{\"error\":{\"message\":\"" RIG_KEY RIG_KEY "\"}}", "******************************************" },
		{ "Authorization: Bearer " RIG_KEY, "Bearer *********************" },
		{ "{\"error\":{\"message\":\"sk-\\u0063anary-5d1e-88f2c0\"}}", "*********************" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[512];
		struct answer a = { .bytes = text };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), "HTTP/1.1 401 No\r\nConnection: close\r\n\r\n%s", rows[i].body));
		rig_init(&r);
		rig_one(&r, &a, 1);
		FAILED(&r, ERRCODE_MODEL_ERROR, 1, rows[i].shown);
		assert_true(text_utf8_clean(r.text, strlen(r.text)));
		assert_null(strpbrk(r.text, "\x1b\n\r"));
		rig_close(&r);
	}
}

/* The text is cut where the key stands: no half of it is shown. */
static void test_error_cut_in_the_key(void **state)
{
	(void)state;
	for (size_t before = 270; before < 305; before += 3) {
		char text[1024];
		struct answer a = { .bytes = text };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), "HTTP/1.1 401 No\r\nConnection: close\r\n\r\n%0*d" RIG_KEY " tail",
				(int)before, 0));
		rig_init(&r);
		rig_one(&r, &a, 1);
		FAILED(&r, ERRCODE_MODEL_ERROR, 1, "401");
		assert_null(strstr(r.text, "sk-can"));
		rig_close(&r);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_final_refusals),
		cmocka_unit_test(test_trouble_is_tried_four_times),
		cmocka_unit_test(test_retry_after),
		cmocka_unit_test(test_retry_after_is_too_far),
		cmocka_unit_test(test_retry_beyond_the_run),
		cmocka_unit_test(test_redirects_are_not_followed),
		cmocka_unit_test(test_the_other_limit),
		cmocka_unit_test(test_the_other_limit_once),
		cmocka_unit_test(test_error_bodies),
		cmocka_unit_test(test_error_cut_in_the_key),
	};

	rig_log_start();
	return rig_log_end(cmocka_run_group_tests(tests, NULL, NULL));
}
