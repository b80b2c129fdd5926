/* link: noded_core */
/*
 * channel's state machines with everything between them and the broker: the first byte picks which machine and how far the guest
 * has come, the rest is what it says. Bytes in one piece and byte by byte must give the same frames for the broker and the same
 * end, and a guest that broke the protocol is never listened to again.
 */
/* reads: noded/channel/guest.c noded/channel/qmp.c */
/* reached: 90 % of lines, 72 % of branches; the rest is mistakes of the broker and memory */
#include "fuzz.h"

#include "channel/control.h"
#include "channel/guest.h"
#include "common/buf.h"
#include "proto/role.h"

struct outcome {
	struct buf emitted; /* types and bodies */
	size_t to_guest;    /* bytes */
	unsigned int frames;
	int rc;
	/* What the broker has still to answer. */
	uint32_t call_stream; /* 0 = no call */
	uint32_t event_bytes;
};

static void on_send(void *arg, const void *bytes, size_t n)
{
	struct outcome *o = arg;

	(void)bytes;
	o->to_guest += n;
}

static void on_emit(void *arg, uint8_t type, const void *body, size_t n)
{
	struct outcome *o = arg;

	must(type >= RF_CB_VMM_UP && type <= RF_CB_GUEST_OPEN);
	must(n <= ROLE_FRAME_MAX);
	o->frames++;
	if (type == RF_CB_CALL) {
		must(n > 5 && o->call_stream == 0);
		memcpy(&o->call_stream, body, 4);
	} else if (type == RF_CB_EVENT) {
		o->event_bytes += (uint32_t)n;
	}
	buf_add_char(&o->emitted, (char)type);
	buf_add(&o->emitted, body, n);
}

static const uint8_t nonce[GUEST_NONCE_LEN];

/* A peer whose guest has come as far as `stage` says, by its own frames. */
static struct guest_peer *prepare(unsigned int stage, const struct guest_peer_ops *ops)
{
	struct guest_peer *p = guest_peer_new(ops);
	struct guest_hello h = { .protocol = GUEST_PROTOCOL };
	struct guest_setup_ack a = { .reseeded = true, .clock_set = true, .workdir = "/w", .boot_id = "b" };
	struct buf body = BUF_INIT(1024), frame = BUF_INIT(2048);
	struct err e;
	size_t used;

	must(p != NULL);
	if (stage >= 1)
		must(guest_peer_probe(p, nonce, &e) == 0);
	if (stage >= 2) {
		guest_hello_encode(&h, &body);
		guest_frame_put(&frame, GF_HELLO, 0, body.data, body.len);
		must(guest_peer_feed(p, frame.data, frame.len, &used, &e) == 0);
		must(guest_peer_setup(p, (const uint8_t *)"setup", 5, &e) == 0);
		must(guest_peer_file(p, 0, (const uint8_t *)"file", 4, &e) == 0);
	}
	if (stage >= 3) {
		must(guest_peer_files_end(p, &e) == 0);
		buf_reset(&body);
		buf_reset(&frame);
		guest_setup_ack_encode(&a, &body);
		guest_frame_put(&frame, GF_SETUP_ACK, 0, body.data, body.len);
		must(guest_peer_feed(p, frame.data, frame.len, &used, &e) == 0);
	}
	buf_free(&body);
	buf_free(&frame);
	return p;
}

/* As a broker does after each frame: credit for events, a reply to a call. */
static void answer(struct guest_peer *p, struct outcome *o)
{
	static const uint8_t reply[5000] = { 1 };
	uint32_t stream = o->call_stream, events = o->event_bytes;
	struct err e;

	o->call_stream = o->event_bytes = 0;
	if (events % 3)
		guest_peer_event_credit(p, events);
	if (stream)
		must(guest_peer_reply(p, stream, 1, reply, sizeof(reply), &e) == 0);
	if (events % 5 == 1)
		guest_peer_stop(p, "enough");
	(void)guest_peer_booting(p);
	must(*guest_peer_state(p));
}

/* Never listened to again. */
static void broken(struct guest_peer *p, const uint8_t *data, size_t n, struct outcome *o)
{
	unsigned int frames = o->frames;
	struct err e;
	size_t used;

	o->rc = -1;
	must(guest_peer_feed(p, data, n, &used, &e) == 0 && used == n);
	must(o->frames == frames);
}

static void run_guest(unsigned int stage, const uint8_t *data, size_t n, size_t step, struct outcome *o)
{
	struct guest_peer_ops ops = { .send = on_send, .emit = on_emit, .arg = o };
	struct guest_peer *p = prepare(stage, &ops);
	size_t at = 0, have, used;
	struct err e;

	o->rc = 0;
	while (at < n && o->rc == 0) {
		struct guest_frame_view v;
		size_t whole = guest_frame_next(data + at, n - at, &v, &e) == 1 ? v.total : n - at;

		for (have = 0, used = 0; have < whole && used == 0 && o->rc == 0;) {
			have = whole - have > step ? have + step : whole;
			if (guest_peer_feed(p, data + at, have, &used, &e) != 0)
				broken(p, data, n, o);
		}
		if (o->rc || used == 0)
			break;
		must(used == whole);
		at += used;
		answer(p, o);
	}
	guest_peer_free(p);
}

static void on_line(void *arg, const void *line, size_t n)
{
	struct outcome *o = arg;

	must(n > 0 && ((const char *)line)[n - 1] == '\n');
	o->to_guest += n;
}

static void on_up(void *arg)
{
	struct outcome *o = arg;

	buf_add_char(&o->emitted, 'U');
}

static void on_event(void *arg, const char *name)
{
	struct outcome *o = arg;

	buf_add_str(&o->emitted, name);
}

static void on_word(void *arg)
{
	(void)arg;
}

static void on_open(void *arg)
{
	struct outcome *o = arg;

	buf_add_char(&o->emitted, 'O');
}

static void on_text(void *arg, const char *text)
{
	(void)arg;
	(void)text;
}

static void run_qmp(const uint8_t *data, size_t n, size_t step, struct outcome *o)
{
	static const struct vmm_plan plan = { .kind = VMM_QEMU, .start = VMM_COLD, .ram_fd = -1, .state_fd = -1 };
	struct control_ops ops = { .send = on_line,
		.on_known = on_word,
		.on_up = on_up,
		.on_event = on_event,
		.on_guest_open = on_open,
		.on_snapshot = on_text,
		.on_wait = on_text,
		.arg = o };
	struct control *q = control_new(&plan, &ops);
	struct err e;

	must(q != NULL);
	o->rc = control_start(q, &e);
	for (size_t at = 0; at < n && o->rc == 0; at += step)
		o->rc = control_feed(q, data + at, n - at < step ? n - at : step, &e);
	control_free(q);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct outcome whole = { .rc = 0 }, cut = { .rc = 0 };
	unsigned int stage;

	if (n < 1)
		return 0;
	stage = data[0] % 5;
	data++;
	n--;
	buf_init(&whole.emitted, 64 << 20);
	buf_init(&cut.emitted, 64 << 20);
	if (stage == 4) {
		run_qmp(data, n, n + 1, &whole);
		run_qmp(data, n, 1, &cut);
	} else {
		run_guest(stage, data, n, n + 1, &whole);
		run_guest(stage, data, n, 7, &cut);
	}
	must(whole.rc == cut.rc && whole.frames == cut.frames && whole.to_guest == cut.to_guest);
	must(whole.emitted.len == cut.emitted.len);
	must(whole.emitted.len == 0 || memcmp(whole.emitted.data, cut.emitted.data, whole.emitted.len) == 0);
	buf_free(&whole.emitted);
	buf_free(&cut.emitted);
	return 0;
}
