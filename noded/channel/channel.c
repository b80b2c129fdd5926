/*
 * The channel role: `noded --role channel`, one per VM, own uid, empty network, no secret. It is where every byte of the guest and
 * of the VMM is parsed (guest.c, qmp.c); the broker gets only what was decoded and written again. Owns the serial stream, the
 * monitor, the console pipe and the socket to the broker; lives as long as the broker does.
 *
 * One libevent loop, one thread, nothing blocks. Back-pressure: the guest has credit for events only as the broker takes them, and
 * its stream is not read while much waits for the broker.
 */
#include "channel/guest.h"
#include "channel/qmp.h"
#include "roles.h"

#include "common/framed.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/role.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BROKER_QUEUE_MAX (16 * 1024 * 1024)
#define BROKER_QUEUE_PAUSE (1024 * 1024) /* above it the guest is not read */
#define GUEST_READ_MAX (GUEST_FRAME_MAX + 4 + 65536)
/* Above it the guest does not read: a setup and what credit allows are less than half of it. */
#define GUEST_OUT_MAX (1024 * 1024)
#define CONSOLE_KEEP (16 * 1024)
#define CONSOLE_SEND 2048
#define CONSOLE_LOG 512
#define CONSOLE_BOOT_MS 1000 /* while booting the console goes to the broker this often, if it said something */

struct channel {
	struct event_base *base;
	struct framed *broker;
	struct guest_peer *guest;
	struct qmp *qmp;
	struct bufferevent *guest_stream, *qmp_stream;
	struct event *console_event, *console_timer;
	char console[CONSOLE_KEEP]; /* ring */
	size_t console_len, console_next;
	bool console_new; /* bytes came since it was last sent */
	bool guest_paused;
	bool guest_over; /* broke the protocol: its stream is not read any more */
	bool guest_deaf; /* takes nothing of what it was sent, and it is too much to keep */
	int status;
};

static void stop(struct channel *c, int status)
{
	c->status = status;
	event_base_loopbreak(c->base);
}

static void to_broker(void *arg, uint8_t type, const void *body, size_t n)
{
	struct channel *c = arg;

	if (framed_send(c->broker, type, body, n))
		return;
	/* The broker is gone, or does not read for megabytes: it is what decides over this VM, so nothing is left to do. */
	log_error("broker does not take frames queued=%zu", framed_queued(c->broker));
	stop(c, 1);
}

static void to_broker_text(struct channel *c, uint8_t type, const char *text)
{
	struct buf b = BUF_INIT(ERR_TEXT_MAX + 64);

	wire_put_str(&b, text);
	to_broker(c, type, b.data, b.len);
	buf_free(&b);
}

/* --- console ------------------------------------------------------------------------------------------------------------------ */

static void console_add(struct channel *c, const char *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		c->console[c->console_next] = bytes[i];
		c->console_next = (c->console_next + 1) % CONSOLE_KEEP;
	}
	c->console_len = c->console_len + n < CONSOLE_KEEP ? c->console_len + n : CONSOLE_KEEP;
	c->console_new = c->console_new || n > 0;
}

/* The last bytes of it, `size` at most. */
static size_t console_tail(const struct channel *c, char *out, size_t size)
{
	size_t n = c->console_len < size ? c->console_len : size;

	for (size_t i = 0; i < n; i++)
		out[i] = c->console[(c->console_next + CONSOLE_KEEP - n + i) % CONSOLE_KEEP];
	return n;
}

/* Sends it, if there are bytes that the broker has not seen. */
static void console_send(struct channel *c)
{
	char tail[CONSOLE_SEND];
	size_t n;

	if (!c->console_new)
		return;
	c->console_new = false;
	n = console_tail(c, tail, sizeof(tail));
	to_broker(c, RF_CB_CONSOLE, tail, n);
}

/* For the operator: what the VMM or a dying kernel said last. Hostile text, so escaped. */
static void console_log(const struct channel *c)
{
	struct buf safe = BUF_INIT(8 * CONSOLE_SEND);
	char tail[CONSOLE_LOG];
	size_t n = console_tail(c, tail, sizeof(tail));

	if (n > 0 && text_safe(&safe, tail, n, false) && buf_cstr(&safe))
		log_info("the VM is gone console=\"%s\"", buf_cstr(&safe));
	buf_free(&safe);
}

static void on_console(evutil_socket_t fd, short what, void *arg);

/* Before the end: what is still in the pipe, as much as a pipe holds. */
static void console_drain(struct channel *c)
{
	for (int i = 0; i < 32 && event_pending(c->console_event, EV_READ, NULL); i++)
		on_console(CHANNEL_FD_CONSOLE, EV_READ, c);
}

static void on_console(evutil_socket_t fd, short what, void *arg)
{
	struct channel *c = arg;
	char bytes[4096];
	ssize_t n = read(fd, bytes, sizeof(bytes));

	(void)what;
	if (n > 0) {
		console_add(c, bytes, (size_t)n);
		return;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	/* The VMM is gone; keeper says how. What it said last goes first. */
	event_del(c->console_event);
	console_log(c);
	console_send(c);
}

static void on_console_timer(evutil_socket_t fd, short what, void *arg)
{
	struct channel *c = arg;

	(void)fd;
	(void)what;
	if (guest_peer_booting(c->guest))
		console_send(c);
	else
		event_del(c->console_timer);
}

/* --- guest -------------------------------------------------------------------------------------------------------------------- */

/*
 * What a guest is sent is bounded by credit, but for the credit that it gets itself: a guest which sends and never reads would make
 * that grow. In the middle of the state machine's work, so that the end is left to whoever called it.
 */
static void to_guest(void *arg, const void *bytes, size_t n)
{
	struct channel *c = arg;
	struct evbuffer *out = bufferevent_get_output(c->guest_stream);

	if (c->guest_deaf || c->guest_over)
		return;
	if (evbuffer_get_length(out) + n > GUEST_OUT_MAX || bufferevent_write(c->guest_stream, bytes, n) != 0)
		c->guest_deaf = true;
}

/* The first breach counts; nothing after it is read, and nothing is sent any more. */
static void guest_broke(struct channel *c, const char *what)
{
	struct evbuffer *in = bufferevent_get_input(c->guest_stream);

	if (c->guest_over)
		return;
	c->guest_over = true;
	bufferevent_disable(c->guest_stream, EV_READ | EV_WRITE);
	evbuffer_drain(in, evbuffer_get_length(in));
	log_warn("guest broke the protocol what=\"%s\"", what);
	console_send(c);
	to_broker_text(c, RF_CB_PROTOCOL, what);
}

/* Feeds what has come, frame by frame, unless the broker has to catch up first. */
static void serve_guest(struct channel *c)
{
	struct evbuffer *in = bufferevent_get_input(c->guest_stream);
	size_t n = evbuffer_get_length(in), used;
	struct err e;

	if (n == 0 || c->guest_paused)
		return;
	if (guest_peer_feed(c->guest, evbuffer_pullup(in, -1), n, &used, &e)) {
		guest_broke(c, e.text);
		return;
	}
	if (c->guest_deaf) {
		guest_broke(c, "the guest does not read what it is sent");
		return;
	}
	evbuffer_drain(in, used);
	if (framed_queued(c->broker) > BROKER_QUEUE_PAUSE) {
		c->guest_paused = true;
		bufferevent_disable(c->guest_stream, EV_READ);
	}
}

static void on_guest_read(struct bufferevent *bev, void *arg)
{
	(void)bev;
	serve_guest(arg);
}

static void on_broker_drained(void *arg)
{
	struct channel *c = arg;

	if (!c->guest_paused || c->guest_over)
		return;
	c->guest_paused = false;
	bufferevent_enable(c->guest_stream, EV_READ);
	serve_guest(c);
}

/* EOF or an error: the VMM closed the stream, so it is ending, and keeper sees that by itself. */
static void on_stream_event(struct bufferevent *bev, short what, void *arg)
{
	struct channel *c = arg;

	log_debug("stream over which=%s what=%d", bev == c->qmp_stream ? "qmp" : "guest", what);
	bufferevent_disable(bev, EV_READ | EV_WRITE);
}

/* --- monitor ------------------------------------------------------------------------------------------------------------------ */

static void qmp_send(void *arg, const char *line, size_t n)
{
	struct channel *c = arg;

	if (bufferevent_write(c->qmp_stream, line, n) != 0)
		stop(c, 1);
}

static void qmp_up(void *arg)
{
	to_broker(arg, RF_CB_VMM_UP, NULL, 0);
}

static void qmp_event(void *arg, const char *name)
{
	struct channel *c = arg;

	console_send(c);
	to_broker_text(c, RF_CB_VMM_EVENT, name);
}

static void on_qmp_read(struct bufferevent *bev, void *arg)
{
	struct channel *c = arg;
	struct evbuffer *in = bufferevent_get_input(bev);
	char bytes[4096], text[ERR_TEXT_MAX + 8];
	struct err e;
	int n;

	while ((n = evbuffer_remove(in, bytes, sizeof(bytes))) > 0) {
		if (qmp_feed(c->qmp, bytes, (size_t)n, &e) == 0)
			continue;
		bufferevent_disable(bev, EV_READ);
		log_warn("monitor broke its protocol what=\"%s\"", e.text);
		if (text_fmt(text, sizeof(text), "qmp: %s", e.text))
			to_broker_text(c, RF_CB_VMM_EVENT, text);
		return;
	}
}

/* --- broker ------------------------------------------------------------------------------------------------------------------- */

static int take_file(struct channel *c, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	uint32_t index;

	wire_read_init(&r, body, n);
	index = wire_u32(&r);
	if (r.failed)
		return err_set(e, ERR_PROTOCOL, "file frame is too short");
	return guest_peer_file(c->guest, index, r.p, r.left, e);
}

static int take_reply(struct channel *c, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	uint32_t stream;
	uint8_t kind;

	wire_read_init(&r, body, n);
	stream = wire_u32(&r);
	kind = wire_u8(&r);
	if (r.failed)
		return err_set(e, ERR_PROTOCOL, "reply frame is too short");
	return guest_peer_reply(c->guest, stream, kind, r.p, r.left, e);
}

static int take_event_credit(struct channel *c, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	uint32_t bytes;

	wire_read_init(&r, body, n);
	bytes = wire_u32(&r);
	if (wire_end(&r, "event credit", e))
		return -1;
	guest_peer_event_credit(c->guest, bytes);
	return 0;
}

static int take_stop(struct channel *c, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	char *text;

	wire_read_init(&r, body, n);
	text = wire_str(&r, GUEST_FATAL_MAX);
	if (wire_end(&r, "stop", e)) {
		free(text);
		return -1;
	}
	guest_peer_stop(c->guest, text);
	free(text);
	return 0;
}

static int take_frame(struct channel *c, uint8_t type, const uint8_t *body, size_t n, struct err *e)
{
	switch (type) {
	case RF_CH_PROBE:
		if (n != GUEST_NONCE_LEN)
			return err_set(e, ERR_PROTOCOL, "probe of %zu bytes", n);
		return guest_peer_probe(c->guest, body, e);
	case RF_CH_SETUP: return guest_peer_setup(c->guest, body, n, e);
	case RF_CH_FILE: return take_file(c, body, n, e);
	case RF_CH_FILES_END: return guest_peer_files_end(c->guest, e);
	case RF_CH_REPLY: return take_reply(c, body, n, e);
	case RF_CH_EVENT_CREDIT: return take_event_credit(c, body, n, e);
	case RF_CH_STOP: return take_stop(c, body, n, e);
	default: return err_set(e, ERR_PROTOCOL, "frame of type %u", type);
	}
}

static void on_broker_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct channel *c = arg;
	struct err e;

	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	if (take_frame(c, type, body, n, &e) == 0) {
		if (c->guest_deaf)
			guest_broke(c, "the guest does not read what it is sent");
		return;
	}
	/* Our own broker: there is no way on that would not hide the mistake. */
	log_error("frame from the broker type=%u error=\"%s\"", type, e.text);
	stop(c, 1);
}

static void on_broker_end(void *arg, const struct err *e)
{
	struct channel *c = arg;

	if (e)
		log_error("broker socket error=\"%s\"", e->text);
	console_drain(c);
	stop(c, e ? 1 : 0);
}

/* --- start -------------------------------------------------------------------------------------------------------------------- */

static struct bufferevent *open_stream(struct channel *c, int fd, bufferevent_data_cb on_read, size_t read_max)
{
	struct bufferevent *bev;

	if (evutil_make_socket_nonblocking(fd) != 0)
		return NULL;
	bev = bufferevent_socket_new(c->base, fd, BEV_OPT_CLOSE_ON_FREE);
	if (!bev)
		return NULL;
	bufferevent_setcb(bev, on_read, NULL, on_stream_event, c);
	bufferevent_setwatermark(bev, EV_READ, 0, read_max);
	if (bufferevent_enable(bev, EV_READ | EV_WRITE) == 0)
		return bev;
	bufferevent_free(bev);
	return NULL;
}

static int open_all(struct channel *c, struct err *e)
{
	const struct timeval boot = { .tv_sec = CONSOLE_BOOT_MS / 1000, .tv_usec = CONSOLE_BOOT_MS % 1000 * 1000 };
	struct framed_options opt = {
		.fd = CHANNEL_FD_BROKER,
		.max_frame = ROLE_FRAME_MAX,
		.max_queued = BROKER_QUEUE_MAX,
		.on_frame = on_broker_frame,
		.on_end = on_broker_end,
		.on_drained = on_broker_drained,
		.arg = c,
	};
	struct guest_peer_ops guest_ops = { .send = to_guest, .emit = to_broker, .arg = c };
	struct qmp_ops qmp_ops = { .send = qmp_send, .on_up = qmp_up, .on_event = qmp_event, .arg = c };

	if (framed_new(c->base, &opt, &c->broker, e))
		return err_wrap(e, "descriptor %d", CHANNEL_FD_BROKER);
	c->guest = guest_peer_new(&guest_ops);
	c->qmp = qmp_new(&qmp_ops);
	if (!c->guest || !c->qmp)
		return err_set(e, ERR_NOMEM, "no memory");
	c->guest_stream = open_stream(c, CHANNEL_FD_GUEST, on_guest_read, GUEST_READ_MAX);
	c->qmp_stream = open_stream(c, CHANNEL_FD_QMP, on_qmp_read, 65536);
	if (!c->guest_stream || !c->qmp_stream || evutil_make_socket_nonblocking(CHANNEL_FD_CONSOLE) != 0)
		return err_set(e, ERR_IO, "descriptors %d to %d (this role is started by noded itself)", CHANNEL_FD_GUEST,
				CHANNEL_FD_CONSOLE);
	c->console_event = event_new(c->base, CHANNEL_FD_CONSOLE, EV_READ | EV_PERSIST, on_console, c);
	c->console_timer = event_new(c->base, -1, EV_PERSIST, on_console_timer, c);
	if (!c->console_event || !c->console_timer || event_add(c->console_event, NULL) != 0 ||
			event_add(c->console_timer, &boot) != 0)
		return err_set(e, ERR_NOMEM, "no memory");
	return 0;
}

static void close_all(struct channel *c)
{
	if (c->console_event)
		event_free(c->console_event);
	if (c->console_timer)
		event_free(c->console_timer);
	if (c->guest_stream)
		bufferevent_free(c->guest_stream);
	if (c->qmp_stream)
		bufferevent_free(c->qmp_stream);
	if (c->broker)
		framed_free(c->broker);
	guest_peer_free(c->guest);
	qmp_free(c->qmp);
	event_base_free(c->base);
	free(c);
}

int channel_main(void)
{
	struct channel *c = calloc(1, sizeof(*c));
	struct err e;
	int status;

	if (!c)
		return 1;
	signal(SIGPIPE, SIG_IGN);
	c->base = event_base_new();
	if (!c->base) {
		free(c);
		return 1;
	}
	if (open_all(c, &e)) {
		log_error("channel cannot start error=\"%s\"", e.text);
		close_all(c);
		return 1;
	}
	if (event_base_dispatch(c->base) < 0)
		c->status = 1;
	framed_flush(c->broker, 1000);
	status = c->status;
	close_all(c);
	return status;
}
