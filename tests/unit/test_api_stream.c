/* sources: controld/api/stream_step.c */
/* What an event stream does next, by table; where a client resumes; the type of an event out of its bytes. */
#include "controld/api/stream_step.h"

#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void test_next(void **state)
{
	static const struct {
		const char *name;
		struct stream_seen seen;
		enum stream_step want;
	} cases[] = {
		{ "fresh, behind", { .head = 5, .now_ms = 100, .last_write_ms = 100 }, STREAM_READ },
		{ "up to date", { .cursor = 5, .head = 5, .now_ms = 100, .last_write_ms = 100 }, STREAM_WAIT },
		{ "up to date, hint", { .cursor = 5, .head = 5, .hint = true, .now_ms = 100, .last_write_ms = 100 }, STREAM_READ },
		{ "hint while reading",
				{ .cursor = 5, .head = 5, .hint = true, .reading = true, .now_ms = 100, .last_write_ms = 100 },
				STREAM_WAIT },
		{ "settled, all sent", { .cursor = 9, .head = 9, .complete = true }, STREAM_END },
		{ "settled, all sent, client is slow", { .cursor = 9, .head = 9, .complete = true, .queued = 1000000 },
				STREAM_END },
		{ "settled, not all sent", { .cursor = 8, .head = 9, .complete = true }, STREAM_READ },
		{ "settled, resumed beyond", { .cursor = 20, .head = 9, .complete = true }, STREAM_END },
		{ "resumed beyond, not settled", { .cursor = 20, .head = 9, .now_ms = 100, .last_write_ms = 100 }, STREAM_WAIT },
		{ "quiet for long", { .cursor = 5, .head = 5, .now_ms = 20000, .last_write_ms = 5000 }, STREAM_HEARTBEAT },
		{ "quiet, not long", { .cursor = 5, .head = 5, .now_ms = 19999, .last_write_ms = 5000 }, STREAM_WAIT },
		{ "full", { .head = 5, .queued = STREAM_LOW_BYTES + 1, .now_ms = 1000, .backlog_since_ms = 1000 },
				STREAM_BACK_OFF },
		{ "full for long", { .head = 5, .queued = STREAM_LOW_BYTES + 1, .now_ms = 11000, .backlog_since_ms = 1000 },
				STREAM_CUT },
		{ "full and quiet",
				{ .cursor = 5,
						.head = 5,
						.queued = STREAM_LOW_BYTES + 1,
						.now_ms = 9000,
						.backlog_since_ms = 1000 },
				STREAM_BACK_OFF },
		{ "at the mark", { .head = 5, .queued = STREAM_LOW_BYTES, .now_ms = 1000 }, STREAM_READ },
	};
	size_t i;

	(void)state;
	for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (stream_next(&cases[i].seen) != cases[i].want)
			fail_msg("%s: %d", cases[i].name, (int)stream_next(&cases[i].seen));
}

static void test_sleep(void **state)
{
	struct stream_seen s = { .now_ms = 6000, .last_write_ms = 1000, .checked_ms = 1000 };

	(void)state;
	assert_int_equal(stream_sleep_ms(&s, STREAM_WAIT), 10000);
	assert_int_equal(stream_sleep_ms(&s, STREAM_BACK_OFF), STREAM_POLL_MS);
	s.now_ms = 60000;
	assert_int_equal(stream_sleep_ms(&s, STREAM_WAIT), 1);
}

/* However busy or quiet a stream is, its key is looked up every 15 s, and not twice at once. */
static void test_key(void **state)
{
	struct stream_seen s = { .now_ms = 20000, .last_write_ms = 20000, .checked_ms = 10000 };

	(void)state;
	assert_false(stream_check_due(&s));
	assert_int_equal(stream_sleep_ms(&s, STREAM_WAIT), 5000); /* sooner than the heartbeat */
	s.now_ms = 25000;
	assert_true(stream_check_due(&s));
	s.checking = true;
	assert_false(stream_check_due(&s));
	assert_int_equal(stream_sleep_ms(&s, STREAM_WAIT), 10000);
}

static void test_seq(void **state)
{
	int64_t seq;

	(void)state;
	assert_true(stream_seq_read("0", &seq));
	assert_true(stream_seq_read("17", &seq));
	assert_int_equal(seq, 17);
	assert_false(stream_seq_read("", &seq));
	assert_false(stream_seq_read("-1", &seq));
	assert_false(stream_seq_read("+1", &seq));
	assert_false(stream_seq_read(" 1", &seq));
	assert_false(stream_seq_read("1 ", &seq));
	assert_false(stream_seq_read("1.0", &seq));
	assert_false(stream_seq_read("99999999999999999999", &seq));
	assert_false(stream_seq_read("abc", &seq));
}

static void test_type(void **state)
{
	static const char good[] = "{\"run_id\":\"run_1\",\"seq\":1,\"at\":\"x\",\"t\":0.000,\"source\":\"guest\",\"type\":\"shell."
				   "output\",\"data\":"
				   "{\"text\":\",\\\"type\\\":\\\"run.settled\\\"\"}}";
	char type[64];

	(void)state;
	assert_true(stream_event_type((const uint8_t *)good, sizeof(good) - 1, type, sizeof(type)));
	assert_string_equal(type, "shell.output");
	assert_false(stream_event_type((const uint8_t *)good, 20, type, sizeof(type)));
	assert_false(stream_event_type((const uint8_t *)"{,\"type\":\"", 10, type, sizeof(type)));
	assert_false(stream_event_type((const uint8_t *)"{,\"type\":\"\"", 11, type, sizeof(type)));
	assert_false(stream_event_type((const uint8_t *)good, sizeof(good) - 1, type, 5));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_next),
		cmocka_unit_test(test_sleep),
		cmocka_unit_test(test_key),
		cmocka_unit_test(test_seq),
		cmocka_unit_test(test_type),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
