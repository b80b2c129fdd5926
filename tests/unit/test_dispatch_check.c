/* What controld refuses of a node's messages before the store sees them. */
/* link: controld_dispatch ephproto_link ephproto EPH::sodium */
#include "unit.h"

#include "common/text.h"
#include "controld/dispatch/check.h"
#include "proto/errcode.h"

#define RUN "run_0123456789abcdef0123456789abcdef"

static struct buf bytes[3];

static struct link_events batch(struct link_record records[3])
{
	struct link_events ev = { .first_seq = 3, .records = records, .record_count = 3 };
	static const struct {
		enum event_type type;
		enum event_source source;
		const char *data;
	} made[3] = {
		{ EV_MICROVM_READY, EVENT_HOST, "{\"boot_ms\":1}" },
		{ EV_SHELL_STARTED, EVENT_GUEST, "{\"call_id\":\"a\",\"command\":\"id\"}" },
		{ EV_MICROVM_DESTROYED, EVENT_HOST, "{\"reason\":\"done\"}" },
	};

	assert_true(text_copy(ev.run_id, sizeof(ev.run_id), RUN));
	for (size_t i = 0; i < 3; i++) {
		struct event_head h = { .run_id = RUN,
			.seq = 3 + i,
			.queued_at_ms = 1700000000000,
			.t_ms = 100 * (int64_t)(3 - i),
			.source = made[i].source,
			.type = made[i].type };

		buf_free(&bytes[i]);
		buf_init(&bytes[i], 1 << 20);
		assert_true(event_make(&bytes[i], &h, made[i].data, strlen(made[i].data)));
		records[i] = (struct link_record){
			.type = (uint16_t)made[i].type, .bytes = bytes[i].data, .len = (uint32_t)bytes[i].len
		};
	}
	return ev;
}

static void test_events(void **state)
{
	struct link_record records[3];
	struct link_events ev = batch(records);
	int64_t last;
	struct err e;

	(void)state;
	assert_ok(check_events(&ev, &last, &e));
	assert_int_equal(last, 300);
	ev.record_count = 0;
	assert_ok(check_events(&ev, &last, &e));
	assert_int_equal(last, 0);
}

static void test_events_refused(void **state)
{
	struct link_record records[3];
	struct link_events ev;
	int64_t last;
	struct err e;

	(void)state;
	ev = batch(records);
	ev.first_seq = 4;
	assert_int_equal(check_events(&ev, &last, &e), -1);
	ev = batch(records);
	ev.first_seq = 0;
	assert_int_equal(check_events(&ev, &last, &e), -1);
	ev = batch(records);
	records[1].type = EV_SHELL_OUTPUT;
	assert_int_equal(check_events(&ev, &last, &e), -1);
	assert_non_null(strstr(e.text, "record 1"));
	ev = batch(records);
	records[2] = records[0];
	assert_int_equal(check_events(&ev, &last, &e), -1);
	ev = batch(records);
	ev.run_id[10] = 'x';
	assert_int_equal(check_events(&ev, &last, &e), -1);
	ev = batch(records);
	ev.run_id[10] = ev.run_id[10] == '1' ? '2' : '1'; /* another run's events */
	assert_int_equal(check_events(&ev, &last, &e), -1);
	ev = batch(records);
	ev.spent_micros = -1;
	assert_int_equal(check_events(&ev, &last, &e), -1);
	ev = batch(records);
	records[0].len--;
	assert_int_equal(check_events(&ev, &last, &e), -1);
	for (size_t i = 0; i < 3; i++)
		buf_free(&bytes[i]);
}

/* No source but host and guest, and none for a type that it may not write. */
static void test_events_of_control(void **state)
{
	struct buf b = BUF_INIT(1 << 20);
	struct event_head h = {
		.run_id = RUN, .seq = 3, .queued_at_ms = 1700000000000, .t_ms = 1, .source = EVENT_CONTROL, .type = EV_RUN_SUCCEEDED
	};
	struct link_record r;
	struct link_events ev = { .first_seq = 3, .records = &r, .record_count = 1 };
	int64_t last;
	struct err e;

	(void)state;
	assert_true(text_copy(ev.run_id, sizeof(ev.run_id), RUN));
	assert_true(event_make(&b, &h, "{}", 2));
	r = (struct link_record){ .type = EV_RUN_SUCCEEDED, .bytes = b.data, .len = (uint32_t)b.len };
	assert_int_equal(check_events(&ev, &last, &e), -1);
	buf_free(&b);
}

static struct link_finish finish(const char *output, size_t n)
{
	struct link_finish f;

	memset(&f, 0, sizeof(f));
	assert_true(text_copy(f.run_id, sizeof(f.run_id), RUN));
	assert_true(text_copy(f.end.isolation, sizeof(f.end.isolation), "kvm"));
	f.end.output = malloc(n + 1);
	assert_non_null(f.end.output);
	memcpy(f.end.output, output, n);
	f.end.output_len = (uint32_t)n;
	return f;
}

static void test_finish(void **state)
{
	struct link_finish f = finish("caf\xc3\xa9", 5);
	struct err e;

	(void)state;
	assert_ok(check_finish(&f, &e));
	assert_int_equal(f.end.output_len, 5);
	f.end.code = ERRCODE_NODE_LOST;
	assert_int_equal(check_finish(&f, &e), -1);
	f.end.code = ERRCODE_COUNT;
	assert_int_equal(check_finish(&f, &e), -1);
	f.end.code = UINT32_MAX;
	assert_int_equal(check_finish(&f, &e), -1);
	f.end.code = ERRCODE_TIMED_OUT;
	assert_ok(check_finish(&f, &e));
	f.end.usage.output_tokens = -1;
	assert_int_equal(check_finish(&f, &e), -1);
	f.end.usage.output_tokens = INT64_MAX;
	assert_int_equal(check_finish(&f, &e), -1);
	f.end.usage.output_tokens = 0;
	f.end.usage.cached_input_tokens = 1;
	assert_int_equal(check_finish(&f, &e), -1);
	run_end_free(&f.end);
}

static void test_output_is_made_clean(void **state)
{
	static const char dirty[] = "a\0b\xff\xe2\x82\xac\xc0\x80\xed\xa0\x80\xf0\x9f\x98\x80\xe2\x82";
	struct link_finish f = finish(dirty, sizeof(dirty) - 1);
	char *big = malloc(GUEST_RESULT_MAX);
	struct err e;

	(void)state;
	assert_ok(check_finish(&f, &e));
	assert_true(text_utf8_clean((const char *)f.end.output, f.end.output_len));
	assert_memory_equal(f.end.output,
			"a\xef\xbf\xbd"
			"b\xef\xbf\xbd\xe2\x82\xac",
			11);
	run_end_free(&f.end);
	/* Grown over the bound: one byte over says so. */
	memset(big, 0xff, GUEST_RESULT_MAX);
	f = finish(big, GUEST_RESULT_MAX);
	assert_ok(check_finish(&f, &e));
	assert_true(f.end.output_len > GUEST_RESULT_MAX && f.end.output_len <= GUEST_RESULT_MAX + 4);
	run_end_free(&f.end);
	free(big);
}

static void test_next(void **state)
{
	struct link_held held = { .spent_micros = 1 };
	struct link_next n = { .epoch = 1, .free_slots = 1, .total_slots = 2, .isolation = "kvm", .held = &held, .held_count = 1 };
	struct err e;

	(void)state;
	assert_true(text_copy(held.run_id, sizeof(held.run_id), RUN));
	assert_ok(check_next(&n, &e));
	n.free_slots = 3;
	assert_int_equal(check_next(&n, &e), -1);
	n.free_slots = 0;
	held.held_micros = -5;
	assert_int_equal(check_next(&n, &e), -1);
	held.held_micros = 0;
	n.isolation[0] = 'x';
	assert_int_equal(check_next(&n, &e), -1);
}

static void test_blob_and_refuse(void **state)
{
	struct link_blob b = { .offset = LINK_BLOB_MAX };
	struct link_refuse r = { .failed = true, .code = ERRCODE_VM_START_FAILED };
	struct err e;

	(void)state;
	assert_true(text_copy(b.run_id, sizeof(b.run_id), RUN));
	assert_true(text_copy(r.run_id, sizeof(r.run_id), RUN));
	assert_ok(check_blob(&b, &e));
	b.offset++;
	assert_int_equal(check_blob(&b, &e), -1);
	b.offset = UINT64_C(1) << 62;
	assert_int_equal(check_blob(&b, &e), -1);
	assert_ok(check_refuse(&r, &e));
	r.code = ERRCODE_NO_CAPACITY;
	assert_int_equal(check_refuse(&r, &e), -1);
	r.failed = false; /* what a host without room says */
	assert_ok(check_refuse(&r, &e));
	r.code = ERRCODE_NODE_LOST;
	assert_int_equal(check_refuse(&r, &e), -1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_events),
		cmocka_unit_test(test_events_refused),
		cmocka_unit_test(test_events_of_control),
		cmocka_unit_test(test_finish),
		cmocka_unit_test(test_output_is_made_clean),
		cmocka_unit_test(test_next),
		cmocka_unit_test(test_blob_and_refuse),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
