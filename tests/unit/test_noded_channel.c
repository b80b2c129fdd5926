/* channel's state machines: the guest's frames (order, sizes, credit) and the monitor's lines. */
/* link: noded_core */
#include "unit.h"

#include "channel/control.h"
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

/* --- monitor ------------------------------------------------------------------------------------------------------------------ */

struct monitor {
	char sent[256];
	unsigned int up, events, known, opened;
	bool refused;
	const char *asked;
	char event[64];
	int fd;
};

static void monitor_send(void *arg, const void *line, size_t n)
{
	struct monitor *m = arg;

	assert_true(text_fmt(m->sent, sizeof(m->sent), "%.*s", (int)n, (const char *)line));
}

static void monitor_up(void *arg)
{
	((struct monitor *)arg)->up++;
}

static void monitor_event(void *arg, const char *name)
{
	struct monitor *m = arg;

	m->events++;
	assert_true(text_copy(m->event, sizeof(m->event), name));
}

static void monitor_known(void *arg)
{
	((struct monitor *)arg)->known++;
}

static void monitor_open(void *arg)
{
	((struct monitor *)arg)->opened++;
}

static void monitor_snapshot(void *arg, const char *why)
{
	((struct monitor *)arg)->refused = why != NULL;
}

static void monitor_wait(void *arg, const char *what)
{
	((struct monitor *)arg)->asked = what;
}

static int monitor_send_fd(void *arg, const void *bytes, size_t n, int fd, struct err *e)
{
	(void)e;
	monitor_send(arg, bytes, n);
	((struct monitor *)arg)->fd = fd;
	return 0;
}

static struct control *monitor_of(struct monitor *m, enum vmm_start start)
{
	static struct vmm_plan plan;
	struct control_ops ops = { .send = monitor_send,
		.send_fd = monitor_send_fd,
		.on_known = monitor_known,
		.on_up = monitor_up,
		.on_event = monitor_event,
		.on_guest_open = monitor_open,
		.on_snapshot = monitor_snapshot,
		.on_wait = monitor_wait,
		.arg = m };
	struct control *q;
	struct err e;

	plan = (struct vmm_plan){
		.kind = VMM_QEMU, .start = (uint8_t)start, .ram_fd = -1, .state_fd = start == VMM_CLONE ? 10 : -1
	};
	memset(m, 0, sizeof(*m));
	q = control_new(&plan, &ops);
	assert_non_null(q);
	assert_int_equal(control_start(q, &e), 0);
	return q;
}

static struct control *monitor(struct monitor *m)
{
	return monitor_of(m, VMM_COLD);
}

/* The monitor says `text`; what it is told then holds `want`, when that is not NULL, and nothing else is said. */
static void exchange(struct control *q, struct monitor *m, const char *text, const char *want)
{
	struct err e;

	memset(m->sent, 0, sizeof(m->sent));
	assert_int_equal(control_feed(q, text, strlen(text), &e), 0);
	if (want)
		assert_non_null(strstr(m->sent, want));
	else
		assert_string_equal(m->sent, "");
}

#define MOVED(status) "{\"event\":\"MIGRATION\",\"data\":{\"status\":\"" status "\"}}\n"

/* A golden VM is up like another, and makes its snapshot when it is asked to; the event may come before the answer. */
static void qmp_makes_a_snapshot(void **state)
{
	static const int fd = 77;
	struct monitor m;

	(void)state;
	for (int early = 0; early < 3; early++) {
		struct control *q = monitor_of(&m, VMM_GOLDEN);

		exchange(q, &m, "{\"QMP\":{}}\n", "qmp_capabilities");
		exchange(q, &m, "{\"return\":{},\"id\":1}\n", NULL);
		assert_int_equal(m.up, 1);
		control_snapshot(q, &fd, 1);
		assert_non_null(strstr(m.sent, "\"stop\""));
		exchange(q, &m, "{\"event\":\"STOP\"}\n{\"return\":{},\"id\":7}\n", "x-ignore-shared");
		exchange(q, &m, "{\"return\":{},\"id\":8}\n", "getfd");
		assert_int_equal(m.fd, fd);
		exchange(q, &m, "{\"return\":{},\"id\":9}\n", "\"fd:state\"");
		exchange(q, &m, MOVED("setup") MOVED("active"), NULL);
		m.refused = true;
		if (early == 0)
			exchange(q, &m, "{\"return\":{},\"id\":10}\n" MOVED("completed"), NULL);
		else if (early == 1)
			exchange(q, &m, MOVED("completed") "{\"return\":{},\"id\":10}\n", NULL);
		if (early < 2) {
			assert_false(m.refused);
		} else {
			m.refused = false;
			exchange(q, &m, "{\"return\":{},\"id\":10}\n" MOVED("failed"), NULL);
			assert_true(m.refused);
		}
		control_free(q);
	}
}

/* A clone is up when it goes on, not before; a snapshot that does not load is the end of it. */
static void qmp_goes_on_from_a_snapshot(void **state)
{
	struct monitor m;
	struct err e;

	(void)state;
	for (int fails = 0; fails < 2; fails++) {
		struct control *q = monitor_of(&m, VMM_CLONE);

		exchange(q, &m, "{\"QMP\":{}}\n", "qmp_capabilities");
		exchange(q, &m, "{\"return\":{},\"id\":1}\n", "x-ignore-shared");
		exchange(q, &m, "{\"return\":{},\"id\":2}\n", "\"fd:10\"");
		if (fails) {
			assert_int_equal(control_feed(q, MOVED("failed"), strlen(MOVED("failed")), &e), -1);
		} else {
			exchange(q, &m, "{\"return\":{},\"id\":3}\n", NULL);
			assert_int_equal(m.up, 0);
			exchange(q, &m, MOVED("completed"), "\"cont\"");
			assert_int_equal(m.up, 0);
			exchange(q, &m, "{\"event\":\"RESUME\"}\n{\"return\":{},\"id\":5}\n", NULL);
			assert_int_equal(m.up, 1);
		}
		control_free(q);
	}
	{
		const int fd = 77;
		struct control *q = monitor_of(&m, VMM_GOLDEN);

		control_snapshot(q, &fd, 1); /* before it runs */
		assert_true(m.refused);
		control_free(q);
	}
}

static void qmp_talk(void **state)
{
	static const char greeting[] =
			"{\"QMP\":{\"version\":{\"qemu\":{\"micro\":22,\"minor\":2,\"major\":7}},\"capabilities\":[\"oob\"]}}\r\n";
	static const char rest[] = "{\"return\":{},\"id\":1}\r\n{\"timestamp\":{\"seconds\":1,\"microseconds\":2},\"event\":\"RTC_"
				   "CHANGE\",\"data\":{}}\r\n"
				   "{\"event\":\"VSERPORT_CHANGE\",\"data\":{\"open\":true,\"id\":\"port\"}}\r\n"
				   "{\"event\":\"VSERPORT_CHANGE\",\"data\":{\"open\":false,\"id\":\"port\"}}\r\n"
				   "{\"event\":\"VSERPORT_CHANGE\",\"data\":{\"open\":true,\"id\":\"port\"}}\r\n"
				   "{\"event\":\"SHUTDOWN\",\"data\":{\"guest\":true}}\r\n";
	struct monitor m;
	struct control *q = monitor(&m);
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(greeting) - 1; i++)
		assert_int_equal(control_feed(q, greeting + i, 1, &e), 0);
	assert_non_null(strstr(m.sent, "qmp_capabilities"));
	assert_int_equal(m.up, 0);
	assert_int_equal(control_feed(q, rest, sizeof(rest) - 1, &e), 0);
	assert_int_equal(m.up, 1);
	assert_int_equal(m.events, 1);
	assert_string_equal(m.event, "SHUTDOWN");
	assert_int_equal(m.known, 1);
	assert_int_equal(m.opened, 1); /* the first time counts */
	control_free(q);
}

static void qmp_refuses(void **state)
{
	static const char *const bad[] = {
		"{\"event\":\"SHUTDOWN\"}\n",
		"{}\n",
		"[]\n",
		"{\"QMP\":1}\n",
		"nonsense\n",
		"{\"QMP\":{}}\n{\"return\":{},\"id\":2}\n",
		"{\"QMP\":{}}\n{\"error\":{\"class\":\"x\"},\"id\":1}\n",
		"{\"QMP\":{}}\n{\"return\":{},\"id\":1}\n{\"return\":{},\"id\":1}\n",
	};
	static char line[70000];
	struct monitor m;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct control *q = monitor(&m);

		assert_int_equal(control_feed(q, bad[i], strlen(bad[i]), &e), -1);
		control_free(q);
	}
	memset(line, ' ', sizeof(line));
	{
		struct control *q = monitor(&m);

		assert_int_equal(control_feed(q, line, sizeof(line), &e), -1);
		control_free(q);
	}
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
		cmocka_unit_test(qmp_talk),
		cmocka_unit_test(qmp_makes_a_snapshot),
		cmocka_unit_test(qmp_goes_on_from_a_snapshot),
		cmocka_unit_test(qmp_refuses),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
