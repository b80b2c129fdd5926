/* Event streams: any cut gives the same events; bounds; what a writer refuses. */
#include "unit.h"

#include "sse.h"
#include "text.h"

struct log {
	char text[2000];
	int stop_after; /* events; 0: never */
	int events;
};

static bool on_event(void *arg, const char *event, const char *id, const char *data, size_t n)
{
	struct log *l = arg;
	size_t at = strlen(l->text);

	assert_true(text_fmt(l->text + at, sizeof(l->text) - at, "(%s|%s|%s|%zu)", event, id, data, n));
	l->events++;
	return l->stop_after == 0 || l->events < l->stop_after;
}

/* Feeds `in` in pieces of `step` bytes. */
static int feed(const char *in, size_t n, size_t step, size_t max, struct log *l, struct err *e)
{
	struct sse_reader r;
	int rc = 0;

	sse_reader_init(&r, max, on_event, l);
	for (size_t at = 0; at < n && rc == 0; at += step)
		rc = sse_reader_feed(&r, in + at, step < n - at ? step : n - at, e);
	sse_reader_free(&r);
	return rc;
}

static void test_streams(void **state)
{
	static const struct {
		const char *in, *out;
	} cases[] = {
		{ "", "" },
		{ "data: a\n", "" },
		{ "data: a\n\n", "(||a|1)" },
		{ "data:a\r\n\r\n", "(||a|1)" },
		{ "data: a\r\r", "(||a|1)" },
		{ "data:  a \n\n", "(|| a |3)" },
		{ "data: a\ndata: b\ndata\n\n", "(||a\nb\n|4)" },
		{ "data\n\n", "(|||0)" },
		{ "\n\n\n", "" },
		{ ": comment\n\nevent: x\n\ndata: 1\n\n", "(||1|1)" },
		{ "event: x\ndata: 1\n\ndata: 2\n\n", "(x||1|1)(||2|1)" },
		{ "id: 7\ndata: 1\n\ndata: 2\n\nid\ndata: 3\n\n", "(|7|1|1)(|7|2|1)(||3|1)" },
		{ "retry: 10\nfoo: bar\ndata: 1\n\n", "(||1|1)" },
		{ "\xef\xbb\xbf"
		  "data: 1\n\n",
				"(||1|1)" },
		{ "\xef\xbb"
		  "data: 1\n\ndata: 2\n\n",
				"(||2|1)" },
		{ "data: \xc3\xa4\r\ndata: b\r\n\r\n\r\ndata: c\n\n", "(||\xc3\xa4\nb|4)(||c|1)" },
		{ "data: a:b: c\n\n", "(||a:b: c|6)" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		size_t n = strlen(cases[i].in);

		for (size_t step = 1; step <= n; step++) {
			struct log l = { 0 };
			struct err e;

			assert_ok(feed(cases[i].in, n, step, 100, &l, &e));
			if (strcmp(l.text, cases[i].out) != 0)
				fail_msg("case %zu in pieces of %zu: %s", i, step, l.text);
		}
	}
}

static void test_bounds(void **state)
{
	static const char *const cases[] = { "data: 12345678901\n\n", ": comment that is too long", "data: 12345\ndata: 678901\n\n",
		"12345678901234567890" };

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		for (size_t step = 1; step < 30; step++) {
			struct log l = { 0 };
			struct err e;

			assert_int_equal(feed(cases[i], strlen(cases[i]), step, i == 2 ? 11 : 16, &l, &e), -1);
			assert_int_equal(e.code, ERR_LIMIT);
			assert_int_equal(l.events, 0);
		}
	}
}

static void test_nul_and_stop(void **state)
{
	struct log l = { 0 }, two = { .stop_after = 2 };
	struct err e;

	(void)state;
	assert_ok(feed("id: a\0b\ndata: 1\n\n", 17, 3, 100, &l, &e)); /* such an id is ignored */
	assert_string_equal(l.text, "(||1|1)");
	assert_int_equal(feed("data: 1\n\ndata: 2\n\ndata: 3\n\n", 27, 27, 100, &two, &e), -1);
	assert_int_equal(e.code, ERR_CONFLICT);
	assert_int_equal(two.events, 2);
}

static void test_writer(void **state)
{
	struct buf b = BUF_INIT(40);

	(void)state;
	assert_true(sse_write(&b, "x", "7", "{}", 2));
	assert_string_equal(buf_cstr(&b), "id: 7\nevent: x\ndata: {}\n\n");
	assert_false(sse_write(&b, NULL, NULL, "a\nb", 3));
	assert_false(sse_write(&b, "a\r", NULL, "a", 1));
	assert_false(sse_write(&b, NULL, "1\n", "a", 1));
	assert_false(sse_write(&b, NULL, NULL, "12345678901234567890", 20)); /* full: nothing of it stays */
	assert_string_equal(buf_cstr(&b), "id: 7\nevent: x\ndata: {}\n\n");
	assert_true(sse_write(&b, NULL, NULL, "", 0));
	buf_free(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_streams), cmocka_unit_test(test_bounds),
		cmocka_unit_test(test_nul_and_stop), cmocka_unit_test(test_writer) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
