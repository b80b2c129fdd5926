/* channel's state machine of the guest's frames: order, sizes, credit. */
/* link: noded_core */
#include "unit.h"

#include "channel/guest.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/model.h"
#include "proto/role.h"

struct seen {
	struct buf to_guest; /* frames */
	uint8_t last_emit;
	unsigned int emits[256];
	struct buf last_body;
	uint32_t file_credit;
};

static void on_send(void *arg, const void *bytes, size_t n)
{
	struct seen *s = arg;

	assert_true(buf_add(&s->to_guest, bytes, n));
}

static void on_emit(void *arg, uint8_t type, const void *body, size_t n)
{
	struct seen *s = arg;
	struct wire_reader r;

	s->last_emit = type;
	s->emits[type]++;
	buf_reset(&s->last_body);
	assert_true(buf_add(&s->last_body, body, n));
	wire_read_init(&r, body, n);
	if (type == RF_CB_FILE_CREDIT)
		s->file_credit += wire_u32(&r);
}

static struct guest_peer *make(struct seen *s)
{
	struct guest_peer_ops ops = { .send = on_send, .emit = on_emit, .arg = s };
	struct guest_peer *p;

	memset(s, 0, sizeof(*s));
	buf_init(&s->to_guest, 64 << 20);
	buf_init(&s->last_body, 16 << 20);
	p = guest_peer_new(&ops);
	assert_non_null(p);
	return p;
}

static void drop(struct guest_peer *p, struct seen *s)
{
	guest_peer_free(p);
	buf_free(&s->to_guest);
	buf_free(&s->last_body);
}

static int feed(struct guest_peer *p, enum guest_frame type, uint32_t stream, const void *body, size_t n, struct err *e)
{
	struct buf b = BUF_INIT(GUEST_FRAME_MAX + 16);
	size_t used;
	int rc;

	guest_frame_put(&b, type, stream, body, n);
	assert_false(b.failed);
	rc = guest_peer_feed(p, b.data, b.len, &used, e);
	if (rc == 0)
		assert_int_equal(used, b.len);
	buf_free(&b);
	return rc;
}

static const uint8_t nonce[GUEST_NONCE_LEN] = { 1, 2, 3 };

static int hello(struct guest_peer *p, uint8_t first, uint32_t protocol, struct err *e)
{
	struct guest_hello h = { .protocol = protocol, .kernel = "6.1", .agent = "1", .memory_mib = 512 };
	struct buf b = BUF_INIT(1024);
	int rc;

	memcpy(h.nonce, nonce, sizeof(nonce));
	h.nonce[0] = first;
	guest_hello_encode(&h, &b);
	rc = feed(p, GF_HELLO, 0, b.data, b.len, e);
	buf_free(&b);
	return rc;
}

static int ack(struct guest_peer *p, struct err *e)
{
	struct guest_setup_ack a = { .reseeded = true, .clock_set = true, .workdir = "/tmp/x", .boot_id = "b" };
	struct buf b = BUF_INIT(1024);
	int rc;

	guest_setup_ack_encode(&a, &b);
	rc = feed(p, GF_SETUP_ACK, 0, b.data, b.len, e);
	buf_free(&b);
	return rc;
}

static struct guest_peer *working(struct seen *s)
{
	struct guest_peer *p = make(s);
	struct err e;

	assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
	assert_int_equal(hello(p, nonce[0], GUEST_PROTOCOL, &e), 0);
	assert_int_equal(guest_peer_setup(p, (const uint8_t *)"setup", 5, &e), 0);
	assert_int_equal(guest_peer_files_end(p, &e), 0);
	assert_int_equal(ack(p, &e), 0);
	assert_string_equal(guest_peer_state(p), "working");
	return p;
}

/* Counts frames of a type on their way to the guest, with their body bytes. */
static unsigned int sent(const struct seen *s, uint8_t type, size_t *bytes)
{
	unsigned int count = 0;
	struct guest_frame_view f;
	struct err e;

	*bytes = 0;
	for (size_t at = 0; at < s->to_guest.len; at += f.total) {
		assert_int_equal(guest_frame_next(s->to_guest.data + at, s->to_guest.len - at, &f, &e), 1);
		if (f.type != type)
			continue;
		count++;
		*bytes += f.n;
	}
	return count;
}

static void order_is_kept(void **state)
{
	static const uint8_t early[] = { GF_HELLO, GF_SETUP_ACK, GF_CALL_DATA, GF_CALL_END, GF_EVENT, GF_RESULT_DATA, GF_RESULT_END,
		GF_FATAL, GF_CREDIT, GF_PROBE, GF_REPLY_DATA, GF_STOP, 0, 255 };
	struct err e;

	(void)state;
	/* Before the probe nothing may come, whatever it is; afterwards it is never listened to again. */
	for (size_t i = 0; i < sizeof(early); i++) {
		struct seen s;
		struct guest_peer *p = make(&s);

		assert_int_equal(feed(p, (enum guest_frame)early[i], 0, "x", 1, &e), -1);
		assert_int_equal(e.code, ERR_PROTOCOL);
		assert_string_equal(guest_peer_state(p), "broken");
		assert_int_equal(feed(p, GF_HELLO, 0, "x", 1, &e), 0);
		assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
		assert_int_equal(s.last_emit, 0);
		drop(p, &s);
	}
}

static void hello_is_checked(void **state)
{
	struct seen s;
	struct guest_peer *p = make(&s);
	struct err e;

	(void)state;
	assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
	assert_int_equal(guest_peer_probe(p, nonce, &e), -1); /* ours, and once */
	assert_int_equal(hello(p, 9, GUEST_PROTOCOL, &e), -1);
	drop(p, &s);
	p = make(&s);
	assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
	assert_int_equal(hello(p, nonce[0], GUEST_PROTOCOL + 1, &e), -1);
	drop(p, &s);
	p = make(&s);
	assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
	assert_true(guest_peer_booting(p));
	assert_int_equal(hello(p, nonce[0], GUEST_PROTOCOL, &e), 0);
	assert_false(guest_peer_booting(p));
	assert_int_equal(hello(p, nonce[0], GUEST_PROTOCOL, &e), -1); /* a second one */
	drop(p, &s);
}

static void frames_in_any_cut(void **state)
{
	struct buf b = BUF_INIT(4096);
	struct guest_hello h = { .protocol = GUEST_PROTOCOL, .kernel = "k" };
	struct buf body = BUF_INIT(1024);
	struct seen s;
	struct guest_peer *p = make(&s);
	struct err e;
	size_t used;

	(void)state;
	assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
	memcpy(h.nonce, nonce, sizeof(nonce));
	guest_hello_encode(&h, &body);
	guest_frame_put(&b, GF_HELLO, 0, body.data, body.len);
	for (size_t n = 0; n < b.len; n++) {
		assert_int_equal(guest_peer_feed(p, b.data, n, &used, &e), 0);
		assert_int_equal(used, 0);
	}
	assert_int_equal(guest_peer_feed(p, b.data, b.len, &used, &e), 0);
	assert_int_equal(used, b.len);
	assert_int_equal(s.last_emit, RF_CB_HELLO);
	buf_free(&b);
	buf_free(&body);
	drop(p, &s);
}

static void length_lies(void **state)
{
	static const uint8_t frames[][9] = { { 0, 0, 0, 0 }, { 4, 0, 0, 0 }, { 1, 0, 1, 0 }, { 255, 255, 255, 255 } };
	struct err e;
	size_t used;

	(void)state;
	for (size_t i = 0; i < 4; i++) {
		struct seen s;
		struct guest_peer *p = working(&s);

		assert_int_equal(guest_peer_feed(p, frames[i], 9, &used, &e), -1);
		drop(p, &s);
	}
}

static int event(struct guest_peer *p, size_t text, struct err *e)
{
	static uint8_t bytes[EVENT_TEXT_MAX];
	struct guest_event ev = {
		.kind = GE_SHELL_OUTPUT, .call_id = "c", .text = bytes, .text_len = text, .stream = 1, .bytes = -1
	};
	struct buf b = BUF_INIT(GUEST_BODY_MAX);
	int rc;

	guest_event_encode(&ev, &b);
	rc = feed(p, GF_EVENT, 0, b.data, b.len, e);
	buf_free(&b);
	return rc;
}

static void events_have_credit(void **state)
{
	struct seen s;
	struct guest_peer *p = working(&s);
	struct err e;
	size_t bytes;
	int count = 0;

	(void)state;
	while (event(p, EVENT_TEXT_MAX, &e) == 0)
		count++;
	assert_int_equal(count, GUEST_CREDIT / EVENT_TEXT_MAX - 1); /* heads count too */
	assert_int_equal(s.emits[RF_CB_EVENT], (unsigned int)count);
	drop(p, &s);
	p = working(&s);
	for (int i = 0; i < 100; i++) {
		assert_int_equal(event(p, EVENT_TEXT_MAX, &e), 0);
		guest_peer_event_credit(p, (uint32_t)s.last_body.len);
	}
	guest_peer_event_credit(p, 1000); /* nothing is owed: the guest must not get more than it started with */
	assert_int_equal(sent(&s, GF_CREDIT, &bytes), 100);
	drop(p, &s);
}

static void encode_call(struct buf *b, uint32_t number, size_t content)
{
	char *text = calloc(1, content + 1);
	struct model_message m = { .role = ROLE_USER, .content = text };
	struct model_call c = { .call = number, .messages = &m, .message_count = 1 };

	assert_non_null(text);
	memset(text, 'x', content);
	wire_put_u8(b, CALL_MODEL);
	model_call_encode(&c, b);
	assert_false(b->failed);
	free(text);
}

static void calls_and_replies(void **state)
{
	struct buf b = BUF_INIT(MODEL_CALL_BYTES_MAX), reply = BUF_INIT(MODEL_CALL_BYTES_MAX);
	struct seen s;
	struct guest_peer *p = working(&s);
	uint8_t give[4] = { 0, 0, 4, 0 }; /* 256 KiB */
	size_t bytes;
	struct err e;

	(void)state;
	encode_call(&b, 1, 100000);
	assert_int_equal(feed(p, GF_CALL_END, 1, NULL, 0, &e), -1); /* nothing is open */
	drop(p, &s);
	p = working(&s);
	assert_int_equal(feed(p, GF_CALL_DATA, 1, b.data, 60000, &e), 0);
	assert_int_equal(guest_peer_reply(p, 1, CALL_MODEL, (const uint8_t *)"r", 1, &e), -1); /* not whole yet */
	assert_int_equal(feed(p, GF_CALL_DATA, 1, b.data + 60000, b.len - 60000, &e), 0);
	assert_int_equal(feed(p, GF_CALL_END, 1, NULL, 0, &e), 0);
	assert_int_equal(s.last_emit, RF_CB_CALL);
	assert_int_equal(sent(&s, GF_CREDIT, &bytes), 2);
	/* A reply longer than its credit stops, and goes on when the guest takes some. */
	assert_non_null(buf_reserve(&reply, 600000));
	memset(reply.data, 7, 600000);
	buf_commit(&reply, 600000);
	assert_int_equal(guest_peer_reply(p, 1, CALL_MODEL, reply.data, reply.len, &e), 0);
	sent(&s, GF_REPLY_DATA, &bytes);
	assert_int_equal(bytes, GUEST_CREDIT);
	assert_int_equal(guest_peer_reply(p, 1, CALL_MODEL, reply.data, 1, &e), -1); /* answered once */
	assert_int_equal(feed(p, GF_CREDIT, 1, give, 4, &e), 0);
	assert_int_equal(sent(&s, GF_REPLY_END, &bytes), 0);
	assert_int_equal(feed(p, GF_CREDIT, 1, give, 4, &e), 0);
	assert_int_equal(sent(&s, GF_REPLY_END, &bytes), 1);
	sent(&s, GF_REPLY_DATA, &bytes);
	assert_int_equal(bytes, 600001);
	assert_int_equal(feed(p, GF_CREDIT, 1, give, 4, &e), 0); /* crossed with the end */
	/* Streams are used once, in order. */
	assert_int_equal(feed(p, GF_CALL_DATA, 3, b.data, 10, &e), 0);
	assert_int_equal(feed(p, GF_CALL_DATA, 5, b.data, 10, &e), -1);
	drop(p, &s);
	p = working(&s);
	assert_int_equal(feed(p, GF_CALL_DATA, 3, b.data, 10, &e), -1);
	drop(p, &s);
	p = working(&s);
	assert_int_equal(feed(p, GF_CREDIT, 1, give, 4, &e), -1); /* of a stream that never was */
	drop(p, &s);
	buf_free(&b);
	buf_free(&reply);
}

static void results(void **state)
{
	static uint8_t block[32768];
	struct seen s;
	struct guest_peer *p = working(&s);
	struct err e;

	(void)state;
	for (int i = 0; i < GUEST_RESULT_MAX / 32768; i++)
		assert_int_equal(feed(p, GF_RESULT_DATA, 2, block, sizeof(block), &e), 0);
	assert_int_equal(feed(p, GF_RESULT_DATA, 2, block, 1, &e), 0); /* the byte that says: too large */
	assert_int_equal(feed(p, GF_RESULT_END, 2, NULL, 0, &e), 0);
	assert_int_equal(s.last_emit, RF_CB_RESULT);
	assert_int_equal(s.last_body.len, GUEST_RESULT_MAX + 1);
	assert_int_equal(event(p, 1, &e), -1); /* nothing after it */
	drop(p, &s);
	p = working(&s);
	for (int i = 0; i < GUEST_RESULT_MAX / 32768; i++)
		assert_int_equal(feed(p, GF_RESULT_DATA, 2, block, sizeof(block), &e), 0);
	assert_int_equal(feed(p, GF_RESULT_DATA, 2, block, 2, &e), -1);
	drop(p, &s);
}

/* Content beyond the guest's credit waits; the end goes after the last piece. */
static void files_wait_for_credit(void **state)
{
	static uint8_t piece[32768];
	struct seen s;
	struct guest_peer *p = make(&s);
	uint8_t give[4] = { 0, 0, 2, 0 }; /* 128 KiB */
	size_t bytes;
	struct err e;

	(void)state;
	assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
	assert_int_equal(hello(p, nonce[0], GUEST_PROTOCOL, &e), 0);
	assert_int_equal(guest_peer_setup(p, (const uint8_t *)"s", 1, &e), 0);
	for (int i = 0; i < 8; i++)
		assert_int_equal(guest_peer_file(p, 0, piece, sizeof(piece), &e), 0);
	assert_int_equal(sent(&s, GF_SETUP_FILE, &bytes), 7); /* the eighth with its index is over the credit */
	assert_int_equal(s.file_credit, 7 * 32768);
	assert_int_equal(guest_peer_files_end(p, &e), 0);
	assert_int_equal(ack(p, &e), -1); /* before the end was sent */
	drop(p, &s);
	p = make(&s);
	assert_int_equal(guest_peer_probe(p, nonce, &e), 0);
	assert_int_equal(hello(p, nonce[0], GUEST_PROTOCOL, &e), 0);
	assert_int_equal(guest_peer_setup(p, (const uint8_t *)"s", 1, &e), 0);
	for (int i = 0; i < 8; i++)
		assert_int_equal(guest_peer_file(p, 0, piece, sizeof(piece), &e), 0);
	assert_int_equal(guest_peer_files_end(p, &e), 0);
	assert_int_equal(sent(&s, GF_SETUP_END, &bytes), 1);
	assert_int_equal(feed(p, GF_CREDIT, 0, give, 4, &e), 0);
	assert_int_equal(sent(&s, GF_SETUP_FILE, &bytes), 8);
	assert_int_equal(sent(&s, GF_SETUP_END, &bytes), 2);
	assert_int_equal(s.file_credit, 8 * 32768);
	assert_int_equal(feed(p, GF_CREDIT, 0, give, 4, &e), 0);
	assert_int_equal(feed(p, GF_CREDIT, 0, give, 4, &e), -1); /* more than was sent */
	drop(p, &s);
}

static void fatal_text(void **state)
{
	struct seen s;
	struct guest_peer *p = working(&s);
	struct err e;

	(void)state;
	assert_int_equal(feed(p, GF_FATAL, 0, "bad\xff", 4, &e), -1);
	drop(p, &s);
	p = working(&s);
	assert_int_equal(feed(p, GF_FATAL, 0, "no disk", 7, &e), 0);
	assert_int_equal(s.last_emit, RF_CB_FATAL);
	assert_int_equal(event(p, 1, &e), -1);
	drop(p, &s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(order_is_kept),
		cmocka_unit_test(hello_is_checked),
		cmocka_unit_test(frames_in_any_cut),
		cmocka_unit_test(length_lies),
		cmocka_unit_test(events_have_credit),
		cmocka_unit_test(calls_and_replies),
		cmocka_unit_test(results),
		cmocka_unit_test(files_wait_for_credit),
		cmocka_unit_test(fatal_text),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
