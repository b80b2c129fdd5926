/* link: ephproto ephproto_link EPH::sodium */
/* sources: noded/spool.c noded/broker/events.c noded/broker/guest_json.c */
/* The timeline's writer on a host: what guests say becomes JSON whatever its bytes are; rate and bounds; the end always fits. */
#include "noded/broker/events.h"
#include "noded/broker/guest_json.h"

#include "common/clock.h"
#include "common/json.h"
#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>

#include <cmocka.h>

#define NS_PER_S INT64_C(1000000000)

static struct guest_event output_of(const char *bytes, size_t n, uint8_t stream)
{
	return (struct guest_event){ .kind = GE_SHELL_OUTPUT,
		.call_id = "c",
		.text = (const uint8_t *)bytes,
		.text_len = n,
		.stream = stream,
		.bytes = -1 };
}

/* Feeds a text in pieces of each size and puts what came out together again: nothing is lost, and text stays text. */
static void test_text_in_pieces(void **state)
{
	static const char text[] = "a\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80z";
	const size_t n = sizeof(text) - 1;

	(void)state;
	for (size_t piece = 1; piece <= n; piece++) {
		struct guest_tails t = { .call_id = "" };
		struct buf all = BUF_INIT(4096), data = BUF_INIT(4096);

		for (size_t at = 0; at < n; at += piece) {
			struct guest_event g = output_of(text + at, n - at < piece ? n - at : piece, 1);
			enum event_type type;
			struct json *v;
			struct err e;

			buf_reset(&data);
			if (guest_json(&t, &g, &type, &data) == GUEST_JSON_NOTHING)
				continue;
			assert_int_equal(type, EV_SHELL_OUTPUT);
			assert_int_equal(json_parse((char *)data.data, data.len, &v, &e), 0);
			assert_null(json_get(v, "base64"));
			assert_true(buf_add_str(&all, json_get_text(v, "text")));
			json_free(v);
		}
		assert_string_equal(buf_cstr(&all), text);
		assert_int_equal(t.len[1], 0);
		buf_free(&all);
		buf_free(&data);
	}
}

static void expect_data(struct guest_tails *t, const struct guest_event *g, enum event_type want, const char *json)
{
	struct buf data = BUF_INIT(EVENT_BYTES_MAX);
	enum event_type type;

	assert_int_equal(guest_json(t, g, &type, &data), GUEST_JSON_EVENT);
	assert_int_equal(type, want);
	assert_string_equal(buf_cstr(&data), json);
	buf_free(&data);
}

static void test_kinds(void **state)
{
	struct guest_tails t = { .call_id = "" };
	struct guest_event g = output_of("\xff\xfe", 2, 2);

	(void)state;
	expect_data(&t, &g, EV_SHELL_OUTPUT, "{\"call_id\":\"c\",\"stream\":\"stderr\",\"base64\":\"//4=\"}");
	g = output_of("a\0b", 3, 1);
	expect_data(&t, &g, EV_SHELL_OUTPUT, "{\"call_id\":\"c\",\"stream\":\"stdout\",\"base64\":\"YQBi\"}");
	g = (struct guest_event){
		.kind = GE_SHELL_STARTED, .call_id = "c\x1b", .text = (const uint8_t *)"ls \"x\"", .text_len = 6
	};
	expect_data(&t, &g, EV_SHELL_STARTED, "{\"call_id\":\"c\\\\x1b\",\"command\":\"ls \\\"x\\\"\"}");
	g = (struct guest_event){ .kind = GE_SHELL_EXITED, .call_id = "c", .code = 3, .duration_ms = 12, .cut_bytes = UINT64_MAX };
	expect_data(&t, &g, EV_SHELL_EXITED,
			"{\"call_id\":\"c\",\"exit_code\":3,\"duration_ms\":12,\"cut_bytes\":9223372036854775807}");
	g = (struct guest_event){ .kind = GE_SHELL_EXITED, .call_id = "c", .code = 9, .has_signal = true, .timed_out = true };
	expect_data(&t, &g, EV_SHELL_EXITED,
			"{\"call_id\":\"c\",\"signal\":9,\"duration_ms\":0,\"cut_bytes\":0,\"timed_out\":true}");
	g = (struct guest_event){ .kind = GE_TOOL_CALLED, .call_id = "c", .name = "read_file", .path = "a/b", .bytes = 7 };
	expect_data(&t, &g, EV_TOOL_CALLED, "{\"call_id\":\"c\",\"tool\":\"read_file\",\"path\":\"a/b\",\"bytes\":7}");
	g = (struct guest_event){ .kind = GE_NOTE, .text = (const uint8_t *)"n", .text_len = 1 };
	expect_data(&t, &g, EV_WORKER_NOTE, "{\"text\":\"n\"}");
}

/* --- over a spool ------------------------------------------------------------------------------------------------------------ */

struct rig {
	struct spool *spool;
	struct events *ev;
	uint64_t last;
};

static void meter(void *arg, int64_t *spent, int64_t *held)
{
	(void)arg;
	*spent = 1;
	*held = 2;
}

static void appended(void *arg, uint64_t seq)
{
	struct rig *r = arg;
	struct spool_record rec;
	struct err e;

	assert_int_equal(seq, r->last + 1);
	assert_int_equal(spool_read(r->spool, seq, &rec, &e), 1); /* told when it is written, never before */
	r->last = seq;
}

static void rig_start(struct rig *r, uint64_t first_seq)
{
	struct spool_head head = {
		.run_id = "run_0123456789abcdef0123456789abcdef", .first_seq = first_seq, .queued_at_ms = 1700000000000
	};
	struct events_options opt = {
		.meter = meter, .appended = appended, .age_ms = 500, .received_boot_ns = clock_boot_ns(), .arg = r
	};
	int fd = memfd_create("spool", MFD_CLOEXEC);
	struct err e;

	assert_int_equal(spool_format(fd, &head, &e), 0);
	assert_int_equal(spool_open(fd, true, &r->spool, &e), 0);
	opt.spool = r->spool;
	r->last = first_seq - 1;
	r->ev = events_new(&opt);
	assert_non_null(r->ev);
}

static void rig_stop(struct rig *r)
{
	events_free(r->ev);
	spool_close(r->spool);
}

static void test_time(void **state)
{
	struct rig r;

	(void)state;
	rig_start(&r, 3);
	assert_true(events_t_ms(r.ev, clock_boot_ns()) >= 500);
	assert_int_equal(events_t_ms(r.ev, 0) >= 0, true); /* whatever the clock says */
	rig_stop(&r);
}

static void test_bucket(void **state)
{
	struct guest_event g = output_of("x", 1, 1);
	int64_t now = clock_boot_ns() + 10 * NS_PER_S, wait_ms = 0;
	struct spool_record rec;
	struct rig r;
	struct err e;
	int n = 0;

	(void)state;
	rig_start(&r, 3);
	while (n <= EVENT_RATE_PER_SECOND && events_ready(r.ev, now, &wait_ms)) {
		assert_int_equal(events_guest(r.ev, &g, now, &e), 0);
		n++;
	}
	assert_int_equal(n, EVENT_RATE_PER_SECOND);
	assert_true(wait_ms >= 1 && wait_ms <= 6);
	assert_true(events_ready(r.ev, now + wait_ms * 1000000, &wait_ms));
	now += 3600 * NS_PER_S; /* a long rest fills one second's worth, not more */
	for (n = 0; events_ready(r.ev, now, &wait_ms); n++)
		assert_int_equal(events_guest(r.ev, &g, now, &e), 0);
	assert_int_equal(n, EVENT_RATE_PER_SECOND);
	assert_int_equal(events_dropped(r.ev), 0);
	assert_int_equal(spool_read(r.spool, r.last, &rec, &e), 1);
	assert_non_null(memmem(rec.bytes, rec.len, "\"source\":\"guest\"", 16)); /* nothing that a guest says is the host's word */
	rig_stop(&r);
}

static int64_t data_int(struct spool *s, uint64_t seq, const char *key)
{
	struct spool_record rec;
	struct json *v;
	struct err e;
	int64_t n;

	assert_int_equal(spool_read(s, seq, &rec, &e), 1);
	assert_int_equal(json_parse((const char *)rec.bytes, rec.len, &v, &e), 0);
	n = json_get_int(json_get(v, "data"), key, -1);
	json_free(v);
	return n;
}

/* Above the run's count what the guest says is counted, said once at the beginning and once with the sums; host and end still fit.
 */
static void test_count_bound(void **state)
{
	struct guest_event g = output_of("x", 1, 1);
	struct buf data = BUF_INIT(64);
	struct spool_record rec;
	uint64_t kept;
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, EVENT_RUN_COUNT_MAX - 1500);
	for (int i = 0; i < 2000; i++)
		assert_int_equal(events_guest(r.ev, &g, clock_boot_ns(), &e), 0);
	assert_true(events_dropped(r.ev) > 1000);
	kept = 2000 - events_dropped(r.ev);
	assert_int_equal(r.last, EVENT_RUN_COUNT_MAX - 1500 + kept); /* and one that says it */
	assert_int_equal(data_int(r.spool, r.last, "dropped_events"), 1);
	assert_true(buf_add_str(&data, "{}"));
	for (int i = 0; i < 500; i++)
		assert_int_equal(events_host(r.ev, EV_MODEL_CALL, &data, &e), 0);
	while (events_host(r.ev, EV_MODEL_CALL, &data, &e) == 0)
		;
	assert_int_equal(e.code, ERR_LIMIT);
	assert_int_equal(events_last(r.ev, &data, &e), 0);
	assert_true(r.last <= EVENT_RUN_COUNT_MAX);
	assert_int_equal(data_int(r.spool, r.last - 1, "dropped_events"), (int64_t)events_dropped(r.ev));
	assert_int_equal(spool_read(r.spool, r.last, &rec, &e), 1);
	assert_int_equal(rec.type, EV_MICROVM_DESTROYED);
	buf_free(&data);
	rig_stop(&r);
}

static void test_bytes_bound(void **state)
{
	char *text = malloc(EVENT_TEXT_MAX);
	struct guest_event g;
	struct buf data = BUF_INIT(64);
	struct spool_tail t;
	struct rig r;
	struct err e;

	(void)state;
	memset(text, 'x', EVENT_TEXT_MAX);
	g = output_of(text, EVENT_TEXT_MAX, 1);
	rig_start(&r, 3);
	for (int i = 0; i < 1200; i++)
		assert_int_equal(events_guest(r.ev, &g, clock_boot_ns(), &e), 0);
	assert_true(events_dropped(r.ev) > 100);
	assert_true(buf_add_str(&data, "{}"));
	assert_int_equal(events_last(r.ev, &data, &e), 0);
	spool_tail(r.spool, &t);
	assert_true(t.bytes <= EVENT_RUN_BYTES_MAX);
	assert_true(t.bytes > EVENT_RUN_BYTES_MAX - 2 * 1024 * 1024);
	buf_free(&data);
	rig_stop(&r);
	free(text);
}

/* The worst text there is: every byte grows in JSON. */
static void test_worst_text(void **state)
{
	char *text = malloc(EVENT_TEXT_MAX);
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, 3);
	for (int byte = 0; byte < 256; byte++) {
		struct guest_event g = output_of(text, EVENT_TEXT_MAX, 1);

		memset(text, byte, EVENT_TEXT_MAX);
		assert_int_equal(events_guest(r.ev, &g, clock_boot_ns(), &e), 0);
		g.kind = GE_SHELL_STARTED;
		assert_int_equal(events_guest(r.ev, &g, clock_boot_ns(), &e), 0);
	}
	assert_int_equal(events_dropped(r.ev), 0);
	rig_stop(&r);
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_text_in_pieces),
		cmocka_unit_test(test_kinds),
		cmocka_unit_test(test_time),
		cmocka_unit_test(test_bucket),
		cmocka_unit_test(test_count_bound),
		cmocka_unit_test(test_bytes_bound),
		cmocka_unit_test(test_worst_text),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
