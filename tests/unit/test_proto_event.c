/* link: ephproto ephproto_link EPH::sodium */
/* The exact bytes of an event, the hash chain, and what controld refuses of an event from a node. */
#include "common/text.h"
#include "proto/errcode.h"
#include "proto/event.h"
#include "proto/tools.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define RUN "run_0123456789abcdef0123456789abcdef"

static void make(struct buf *b, enum event_source source, enum event_type type, uint64_t seq, const char *data)
{
	struct event_head h = {
		.run_id = RUN, .seq = seq, .queued_at_ms = 1700000000000, .t_ms = 2421, .source = source, .type = type
	};

	assert_true(event_make(b, &h, data, strlen(data)));
}

static void test_bytes(void **state)
{
	struct buf b = BUF_INIT(1 << 20);
	enum event_type type;
	int64_t t;
	struct err e;

	(void)state;
	make(&b, EVENT_HOST, EV_MICROVM_READY, 3, "{\"boot_ms\":1}");
	assert_string_equal(buf_cstr(&b), "{\"run_id\":\"" RUN "\",\"seq\":3,\"at\":\"2023-11-14T22:13:22.421Z\",\"t\":2.421,"
					  "\"source\":\"host\",\"type\":\"microvm.ready\",\"data\":{\"boot_ms\":1}}");
	assert_int_equal(event_check(b.data, b.len, RUN, 3, &type, &t, &e), 0);
	assert_int_equal(type, EV_MICROVM_READY);
	assert_int_equal(t, 2421);
	buf_free(&b);
}

static void test_chain(void **state)
{
	uint8_t zero[EVENT_HASH_LEN] = { 0 }, one[EVENT_HASH_LEN], two[EVENT_HASH_LEN];
	char hex[2 * EVENT_HASH_LEN + 1];

	(void)state;
	event_hash(zero, "abc", 3, one);
	text_hex(one, sizeof(one), hex);
	/* (head -c 32 /dev/zero; printf abc) | sha256sum */
	assert_string_equal(hex, "365aa7d8f7f9402c4b9434502b4cc89ddb09fe50d7cd95b493b834c62d5a5370");
	event_hash(one, "abc", 3, two);
	assert_memory_not_equal(one, two, EVENT_HASH_LEN);
}

static void test_refused(void **state)
{
	static const struct {
		const char *what, *from, *to;
	} cases[] = {
		{ "another run", "\"run_id\":\"run_0", "\"run_id\":\"run_1" },
		{ "another seq", "\"seq\":3", "\"seq\":4" },
		{ "seq as text", "\"seq\":3", "\"seq\":\"3\"" },
		{ "control source", "\"source\":\"host\"", "\"source\":\"control\"" },
		{ "guest may not say ready", "\"source\":\"host\"", "\"source\":\"guest\"" },
		{ "control's type", "microvm.ready", "run.settled" },
		{ "unknown type", "microvm.ready", "microvm.rested" },
		{ "t without decimals", "\"t\":2.421", "\"t\":2" },
		{ "t with two decimals", "\"t\":2.421", "\"t\":2.42" },
		{ "negative t", "\"t\":2.421", "\"t\":-2.421" },
		{ "data is no object", "\"data\":{\"boot_ms\":1}", "\"data\":[1]" },
		{ "member twice", "\"data\":", "\"seq\":3,\"data\":" },
		{ "member missing", "\"t\":2.421,", "" },
		{ "member moved", "\"seq\":3,\"at\":\"2023-11-14T22:13:22.421Z\"",
				"\"at\":\"2023-11-14T22:13:22.421Z\",\"seq\":3" },
		{ "at is no time", "2023-11-14T22:13:22.421Z", "yesterday" },
		{ "line break", "{\"boot_ms\":1}", "{\n\"boot_ms\":1}" },
		{ "trailing bytes", "}}", "}}x" },
		{ "not UTF-8", "boot_ms", "boot_\xff" },
		/* The same as JSON, but a reader that looks for ,"type":" in the bytes would find it in the data. */
		{ "space before the type, another in data", ",\"type\":\"microvm.ready\",\"data\":{\"boot_ms\":1}",
				", \"type\":\"microvm.ready\",\"data\":{\"a\":1,\"type\":\"run.succeeded\"}" },
		{ "key with an escape", "\"type\":", "\"t\\u0079pe\":" },
		{ "value with an escape", "\"host\"", "\"h\\u006fst\"" },
		{ "space in front", "{\"run_id\"", " {\"run_id\"" },
		{ "space before the data", "\"data\":{", "\"data\": {" },
		{ "space at the end", "}}", "} }" },
		{ "t with a zero in front", "\"t\":2.421", "\"t\":02.421" },
		{ "at with another spelling", "22.421Z", "22.421+00:00" },
	};
	struct buf b = BUF_INIT(1 << 20);
	enum event_type type;
	int64_t t;
	struct err e;

	(void)state;
	make(&b, EVENT_HOST, EV_MICROVM_READY, 3, "{\"boot_ms\":1}");
	const char *good = buf_cstr(&b);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct buf m = BUF_INIT(1 << 20);
		const char *at = strstr(good, cases[i].from);

		assert_non_null(at);
		assert_true(buf_add(&m, good, (size_t)(at - good)));
		assert_true(buf_add_str(&m, cases[i].to));
		assert_true(buf_add_str(&m, at + strlen(cases[i].from)));
		if (event_check(m.data, m.len, RUN, 3, &type, &t, &e) == 0)
			fail_msg("accepted: %s", cases[i].what);
		buf_free(&m);
	}
	buf_free(&b);
}

/* The longest text of a guest, every byte escaped, still fits an event. */
static void test_bound(void **state)
{
	struct buf data = BUF_INIT(1 << 20), b = BUF_INIT(1 << 20);
	struct event_head h = { .run_id = RUN,
		.seq = 20000,
		.queued_at_ms = 1700000000000,
		.t_ms = 3600000,
		.source = EVENT_GUEST,
		.type = EV_SHELL_OUTPUT };

	(void)state;
	assert_true(buf_add_str(&data, "{\"call_id\":\"\",\"stream\":\"stdout\",\"text\":\""));
	for (int i = 0; i < EVENT_TEXT_MAX; i++)
		assert_true(buf_add_str(&data, "\\u0001"));
	assert_true(buf_add_str(&data, "\"}"));
	assert_true(event_make(&b, &h, data.data, data.len));
	for (int i = 0; i < 1000; i++)
		assert_true(buf_add_str(&data, "\\u0001\\u0001"));
	size_t before = b.len;
	assert_false(event_make(&b, &h, data.data, data.len));
	assert_int_equal(b.len, before);
	buf_free(&b);
	buf_free(&data);
}

static void test_tables(void **state)
{
	(void)state;
	for (unsigned i = 0; i < EV_COUNT; i++)
		assert_int_equal(event_type_parse(event_type_text((enum event_type)i)), i);
	for (unsigned i = 0; i < ERRCODE_COUNT; i++) {
		assert_int_equal(errcode_parse(errcode_text((enum errcode)i)), i);
		assert_true(outcome_valid((int)errcode_outcome((enum errcode)i)));
		if (i != ERRCODE_NONE)
			assert_true(errcode_title((enum errcode)i)[0] != '\0' && errcode_remedy((enum errcode)i)[0] != '\0');
	}
	for (unsigned i = 0; i < TOOL_COUNT; i++)
		assert_int_equal(tool_parse(tool_info((enum tool)i)->name), i);
	assert_int_equal(tool_parse("sudo"), TOOL_COUNT);
	assert_false(event_type_allows(EV_RUN_SETTLED, EVENT_HOST));
	assert_false(event_type_allows(EV_SHELL_OUTPUT, EVENT_CONTROL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_bytes),
		cmocka_unit_test(test_chain),
		cmocka_unit_test(test_refused),
		cmocka_unit_test(test_bound),
		cmocka_unit_test(test_tables),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
