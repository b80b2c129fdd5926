/* A host that was enrolled and lies, over real nng and TLS: each of its lies is refused before the store hears of it, each counts
 * against its connection, and a host that does its work beside it is served all the time. */
/* link: controld_dispatch controld_base ephproto_link ephproto ephloop_event EPH::nng EPH::sodium EPH::crypto */
/* sources: tests/unit/dispatch_rig.c tests/unit/dispatch_store.c */
#include "dispatch_rig.h"

#include "common/price.h"
#include "proto/errcode.h"

#include <nng/protocol/reqrep0/req.h>
#include <nng/supplemental/tls/tls.h>
#include <sodium.h>

#define OTHER_RUN "run_ffffffffffffffffffffffffffffffff"

/* --- lies --------------------------------------------------------------------------------------------------------------------- */

struct lie {
	const char *name;
	enum link_type type;
	void (*put)(struct buf *b);
};

static void put_record(
		struct buf *b, uint64_t first, enum event_source source, enum event_type type, const char *data, const char *run)
{
	struct buf ev = BUF_INIT(EVENT_BYTES_MAX);
	struct event_head h = {
		.run_id = run, .seq = first, .queued_at_ms = 1700000000000, .t_ms = 5, .source = source, .type = type
	};
	struct link_record r;
	struct link_events m = { .first_seq = first, .records = &r, .record_count = 1 };

	assert_true(text_copy(m.run_id, sizeof(m.run_id), RUN));
	assert_true(event_make(&ev, &h, data, strlen(data)));
	r = (struct link_record){ .type = (uint16_t)type, .bytes = ev.data, .len = (uint32_t)ev.len };
	link_events_encode(&m, b);
	buf_free(&ev);
}

static void put_raw(struct buf *b, const char *bytes, size_t n)
{
	struct link_record r = { .type = EV_MICROVM_READY, .bytes = (const uint8_t *)bytes, .len = (uint32_t)n };
	struct link_events m = { .first_seq = 3, .records = &r, .record_count = 1 };

	assert_true(text_copy(m.run_id, sizeof(m.run_id), RUN));
	link_events_encode(&m, b);
}

static void control_source(struct buf *b)
{
	put_record(b, 3, EVENT_CONTROL, EV_RUN_SUCCEEDED, "{}", RUN);
}
static void end_by_host(struct buf *b)
{
	put_record(b, 3, EVENT_HOST, EV_RUN_SETTLED, "{}", RUN);
}
static void host_says_for_guest(struct buf *b)
{
	put_record(b, 3, EVENT_GUEST, EV_MICROVM_DESTROYED, "{}", RUN);
}
static void foreign_run(struct buf *b)
{
	put_record(b, 3, EVENT_HOST, EV_MICROVM_READY, "{}", OTHER_RUN);
}
static void seq_zero(struct buf *b)
{
	put_record(b, 0, EVENT_HOST, EV_MICROVM_READY, "{}", RUN);
}
static void seq_huge(struct buf *b)
{
	put_record(b, UINT64_C(1) << 40, EVENT_HOST, EV_MICROVM_READY, "{}", RUN);
}
static void no_json(struct buf *b)
{
	put_raw(b, "not json at all", 15);
}
static void empty_record(struct buf *b)
{
	put_raw(b, "", 0);
}

static void no_utf8(struct buf *b)
{
	struct buf ev = BUF_INIT(EVENT_BYTES_MAX);
	struct event_head h = {
		.run_id = RUN, .seq = 3, .queued_at_ms = 1700000000000, .t_ms = 5, .source = EVENT_HOST, .type = EV_MICROVM_READY
	};

	assert_true(event_make(&ev, &h, "{\"vmm\":\"xy\"}", 12));
	ev.data[ev.len - 5] = 0xc0; /* an overlong form of a slash */
	ev.data[ev.len - 4] = 0xaf;
	put_raw(b, (const char *)ev.data, ev.len);
	buf_free(&ev);
}

static void too_large(struct buf *b)
{
	static char data[EVENT_BYTES_MAX + 1000];

	memset(data, ' ', sizeof(data));
	put_raw(b, data, sizeof(data));
}

static void t_of_a_year(struct buf *b)
{
	struct buf ev = BUF_INIT(EVENT_BYTES_MAX);
	struct event_head h = { .run_id = RUN,
		.seq = 3,
		.queued_at_ms = 1700000000000,
		.t_ms = INT64_C(401) * 86400 * 1000,
		.source = EVENT_HOST,
		.type = EV_MICROVM_READY };

	assert_true(event_make(&ev, &h, "{}", 2));
	put_raw(b, (const char *)ev.data, ev.len);
	buf_free(&ev);
}

static void meter(struct buf *b, int64_t spent, int64_t held)
{
	struct link_events m = { .first_seq = 3, .spent_micros = spent, .held_micros = held };

	assert_true(text_copy(m.run_id, sizeof(m.run_id), RUN));
	link_events_encode(&m, b);
}

static void meter_negative(struct buf *b)
{
	meter(b, -1, 0);
}
static void meter_overflows(struct buf *b)
{
	meter(b, INT64_MAX, INT64_MAX);
}

static void finish(struct buf *b, const struct run_end *end)
{
	struct link_finish m = { .end = *end };

	assert_true(text_copy(m.run_id, sizeof(m.run_id), RUN));
	assert_true(text_copy(m.end.isolation, sizeof(m.end.isolation), "kvm"));
	link_finish_encode(&m, b);
}

static void usage_negative(struct buf *b)
{
	finish(b, &(struct run_end){ .usage.input_tokens = -1 });
}
static void usage_overflows(struct buf *b)
{
	finish(b, &(struct run_end){ .usage.output_tokens = INT64_MAX });
}
static void usage_above(struct buf *b)
{
	finish(b, &(struct run_end){ .usage.compute_ms = PRICE_MICROS_MAX + 1 });
}
static void usage_cached(struct buf *b)
{
	finish(b, &(struct run_end){ .usage = { .input_tokens = 1, .cached_input_tokens = 2 } });
}
static void end_of_control(struct buf *b)
{
	finish(b, &(struct run_end){ .code = ERRCODE_NO_CAPACITY });
}
static void end_unknown(struct buf *b)
{
	finish(b, &(struct run_end){ .code = 60000 });
}

static void next(struct buf *b, struct link_next m)
{
	if (!m.isolation[0])
		assert_true(text_copy(m.isolation, sizeof(m.isolation), "kvm"));
	link_next_encode(&m, b);
}

static void more_free_than_there_is(struct buf *b)
{
	next(b, (struct link_next){ .free_slots = 2, .total_slots = 1 });
}
static void room_beyond_numbers(struct buf *b)
{
	next(b, (struct link_next){ .free_memory_mib = 1U << 31, .total_memory_mib = 1U << 31 });
}
static void room_of_minus_one(struct buf *b)
{
	next(b, (struct link_next){ .free_vcpus = UINT32_MAX, .total_vcpus = UINT32_MAX });
}
static void epoch_beyond(struct buf *b)
{
	next(b, (struct link_next){ .epoch = UINT64_MAX });
}
static void isolation_of_metal(struct buf *b)
{
	next(b, (struct link_next){ .isolation = "metal" });
}

static void holds_what_is_no_run(struct buf *b)
{
	struct link_held held = { .run_id = "run_" };

	next(b, (struct link_next){ .held = &held, .held_count = 1 });
}

static void holds_with_a_false_meter(struct buf *b)
{
	struct link_held held = { .run_id = RUN, .spent_micros = INT64_MIN };

	next(b, (struct link_next){ .held = &held, .held_count = 1 });
}

static void start_of_no_run(struct buf *b)
{
	struct link_start m = { .run_id = "run_'; DROP TABLE ledger; --" };

	link_start_encode(&m, b);
}

static void refuse_as_control(struct buf *b)
{
	struct link_refuse m = { .run_id = RUN, .failed = true, .code = ERRCODE_NODE_LOST };

	link_refuse_encode(&m, b);
}

static void blob_between_pieces(struct buf *b)
{
	struct link_blob m = { .run_id = RUN, .offset = 1 };

	link_blob_encode(&m, b);
}

static void blob_beyond(struct buf *b)
{
	struct link_blob m = { .run_id = RUN, .offset = UINT64_MAX - UINT64_MAX % LINK_BLOB_MAX };

	link_blob_encode(&m, b);
}

static void nothing(struct buf *b)
{
	buf_add(b, "", 0);
}

static const struct lie lies[] = {
	{ "control's source", LINK_EVENTS, control_source },
	{ "an end", LINK_EVENTS, end_by_host },
	{ "the host's word as the guest's", LINK_EVENTS, host_says_for_guest },
	{ "another run's event", LINK_EVENTS, foreign_run },
	{ "seq 0", LINK_EVENTS, seq_zero },
	{ "seq 2^40", LINK_EVENTS, seq_huge },
	{ "no JSON", LINK_EVENTS, no_json },
	{ "an empty record", LINK_EVENTS, empty_record },
	{ "no UTF-8", LINK_EVENTS, no_utf8 },
	{ "too large", LINK_EVENTS, too_large },
	{ "401 days", LINK_EVENTS, t_of_a_year },
	{ "a negative meter", LINK_EVENTS, meter_negative },
	{ "a meter that overflows", LINK_EVENTS, meter_overflows },
	{ "an empty body", LINK_EVENTS, nothing },
	{ "negative usage", LINK_FINISH, usage_negative },
	{ "usage that overflows", LINK_FINISH, usage_overflows },
	{ "usage above all bounds", LINK_FINISH, usage_above },
	{ "more cached than input", LINK_FINISH, usage_cached },
	{ "an end that is control's", LINK_FINISH, end_of_control },
	{ "an end that does not exist", LINK_FINISH, end_unknown },
	{ "more free than there is", LINK_NEXT, more_free_than_there_is },
	{ "2^31 MiB", LINK_NEXT, room_beyond_numbers },
	{ "-1 vcpus", LINK_NEXT, room_of_minus_one },
	{ "an epoch of 2^64 - 1", LINK_NEXT, epoch_beyond },
	{ "isolation metal", LINK_NEXT, isolation_of_metal },
	{ "a held thing that is no run", LINK_NEXT, holds_what_is_no_run },
	{ "a held run with a false meter", LINK_NEXT, holds_with_a_false_meter },
	{ "a start of no run", LINK_START, start_of_no_run },
	{ "a refusal as control's", LINK_REFUSE, refuse_as_control },
	{ "a blob between pieces", LINK_BLOB, blob_between_pieces },
	{ "a blob beyond all files", LINK_BLOB, blob_beyond },
	{ "a start without a body", LINK_START, nothing },
	{ "a type that does not exist", (enum link_type)99, nothing },
};

/* Seven lies a connection: the eighth would cut it. */
static void test_lies(void **state)
{
	struct node liar, good;

	(void)state;
	node_ready(&good);
	for (size_t i = 0; i < COUNT(lies); i++) {
		struct buf b = BUF_INIT(LINK_MESSAGE_MAX);

		if (i % 7 == 0)
			node_ready(&liar);
		lies[i].put(&b);
		print_message("%s\n", lies[i].name);
		ask(&liar, lies[i].type, &b, true, LINK_BAD);
		buf_free(&b);
		if (i % 7 == 6 || i + 1 == COUNT(lies))
			node_close(&liar);
	}
	assert_int_equal(rig.events_calls, 0);
	assert_int_equal(rig.next_calls, 0);
	assert_int_equal(rig.start_calls, 0);
	start_ok(&good);
	node_close(&good);
}

/* Each kind of lie: the same one again and again. */
static void test_eight_lies_cut_the_connection(void **state)
{
	static const size_t kinds[] = { 0, 14, 20, COUNT(lies) - 1 };
	struct node liar, good;

	(void)state;
	node_ready(&good);
	for (size_t k = 0; k < COUNT(kinds); k++) {
		struct buf b = BUF_INIT(4096);

		node_ready(&liar);
		lies[kinds[k]].put(&b);
		for (int i = 0; i < 8; i++)
			ask(&liar, lies[kinds[k]].type, &b, true, LINK_BAD);
		assert_true(loop_until(rig.base, has_no_pipe, &liar, WAIT_MS));
		start_ok(&good);
		buf_free(&b);
		node_close(&liar);
	}
	node_close(&good);
}

/* --- connections without end ------------------------------------------------------------------------------------------------ */

struct crowd {
	nng_socket socket;
	atomic_int pipes, seen;
};

/* nng thread */
static void on_crowd_pipe(nng_pipe p, nng_pipe_ev ev, void *arg)
{
	struct crowd *c = arg;

	(void)p;
	atomic_fetch_add(&c->pipes, ev == NNG_PIPE_EV_ADD_POST ? 1 : -1);
	if (ev == NNG_PIPE_EV_ADD_POST)
		atomic_fetch_add(&c->seen, 1);
}

static bool crowd_is_full(void *arg)
{
	const struct crowd *c = arg;

	return atomic_load(&c->seen) >= CONTEXTS * 4 && rig.d->pipe_count >= CONTEXTS * 4 - 1;
}

/* More pipes than there may be, over whole TLS handshakes: the table stays at its bound and who was there before is served. */
static void test_pipes_are_bounded(void **state)
{
	static struct crowd crowd;
	struct node good;
	nng_tls_config *tls;
	nng_dialer dialer;
	char url[400];

	(void)state;
	node_ready(&good);
	assert_int_equal(nng_req0_open(&crowd.socket), 0);
	nng_pipe_notify(crowd.socket, NNG_PIPE_EV_ADD_POST, on_crowd_pipe, &crowd);
	nng_pipe_notify(crowd.socket, NNG_PIPE_EV_REM_POST, on_crowd_pipe, &crowd);
	assert_true(text_fmt(url, sizeof(url), "tls+tcp://%s", dispatch_address(rig.d)));
	for (int i = 0; i < CONTEXTS * 4 + 8; i++) {
		assert_int_equal(nng_dialer_create(&dialer, crowd.socket, url), 0);
		assert_int_equal(nng_tls_config_alloc(&tls, NNG_TLS_MODE_CLIENT), 0);
		assert_int_equal(nng_tls_config_ca_chain(tls, pki_ca_pem(rig.pki), NULL), 0);
		assert_int_equal(nng_tls_config_server_name(tls, "controld.ephemeral.internal"), 0);
		assert_int_equal(nng_dialer_set_ptr(dialer, NNG_OPT_TLS_CONFIG, tls), 0);
		nng_tls_config_free(tls);
		nng_dialer_set_ms(dialer, NNG_OPT_RECONNMINT, 1000);
		assert_int_equal(nng_dialer_start(dialer, NNG_FLAG_NONBLOCK), 0);
	}
	assert_true(loop_until(rig.base, crowd_is_full, &crowd, 6 * WAIT_MS));
	assert_true(rig.d->pipe_count <= CONTEXTS * 4);
	start_ok(&good);
	node_close(&good);
	node_close(&(struct node){ .socket = crowd.socket, .dialer = dialer });
}

#define RAW 300

/* Half-open: connected, and no TLS. */
static void test_a_crowd_without_tls(void **state)
{
	static struct raw_client raw[RAW];
	struct node good;
	int ended = 0;

	(void)state;
	node_ready(&good);
	for (int i = 0; i < RAW; i++) {
		raw_open(&raw[i], rig.d->port);
		if (i % 3 == 0) {
			raw[i].send = "\x16\x03\x01\x02";
			raw[i].left = 4;
		} else if (i % 3 == 1) {
			raw[i].send = "GET / HTTP/1.1\r\n\r\n";
			raw[i].left = 18;
		}
	}
	start_ok(&good);
	for (int i = 0; i < RAW; i++) {
		assert_true(loop_until(rig.base, raw_step, &raw[i], 3 * WAIT_MS));
		ended += raw[i].ended;
		close(raw[i].fd);
	}
	assert_int_equal(ended, RAW);
	start_ok(&good);
	assert_true(rig.d->pipe_count <= 2);
	node_close(&good);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_lies, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_eight_lies_cut_the_connection, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_pipes_are_bounded, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_a_crowd_without_tls, set_up_fast, tear_down),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
