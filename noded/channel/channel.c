/*
 * The channel role: `noded --role channel`, one per VM, own uid, empty network, no secret. It is where every byte of the guest and
 * of the VMM is parsed (guest.c, control.h); the broker gets only what was decoded and written again. Owns the guest's stream, the
 * VMM's control, the console pipe and the socket to the broker; lives as long as the broker does. (A golden VM has no broker:
 * keeper has its end of the socket.)
 *
 * One libevent loop, one thread, nothing blocks. Back-pressure: the guest has credit for events only as the broker takes them, and
 * its stream is not read while much waits for the broker.
 */
#include "channel/channel_internal.h"
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
#include <sys/socket.h>
#include <unistd.h>

#define BROKER_QUEUE_MAX (16 * 1024 * 1024)
#define BROKER_QUEUE_PAUSE (1024 * 1024) /* above it the guest is not read */
/* Above it the guest does not read: a setup and what credit allows are less than half of it. */
#define GUEST_OUT_MAX (1024 * 1024)

void channel_stop(struct channel *c, int status)
{
	c->status = status;
	event_base_loopbreak(c->base);
}

void channel_to_broker(void *arg, uint8_t type, const void *body, size_t n)
{
	struct channel *c = arg;

	if (framed_send(c->broker, type, body, n))
		return;
	/* The broker is gone, or does not read for megabytes: it is what decides over this VM, so nothing is left to do. */
	log_error("broker does not take frames queued=%zu", framed_queued(c->broker));
	channel_stop(c, 1);
}

void channel_to_broker_text(struct channel *c, uint8_t type, const char *text)
{
	struct buf b = BUF_INIT(ERR_TEXT_MAX + 64);

	wire_put_str(&b, text);
	channel_to_broker(c, type, b.data, b.len);
	buf_free(&b);
}

static void on_console(void *arg, const char *bytes, size_t n)
{
	channel_to_broker(arg, RF_CB_CONSOLE, bytes, n);
}

static bool console_booting(void *arg)
{
	return guest_peer_booting(((struct channel *)arg)->guest);
}

/* --- guest -------------------------------------------------------------------------------------------------------------------- */

/*
 * What a guest is sent is bounded by credit, but for the credit that it gets itself: a guest which sends and never reads would make
 * that grow. In the middle of the state machine's work, so that the end is left to whoever called it.
 */
static void to_guest(void *arg, const void *bytes, size_t n)
{
	struct channel *c = arg;
	struct evbuffer *out = c->guest_stream ? bufferevent_get_output(c->guest_stream) : c->early;

	if (c->guest_deaf || c->guest_over)
		return;
	if (evbuffer_get_length(out) + n > GUEST_OUT_MAX || evbuffer_add(out, bytes, n) != 0)
		c->guest_deaf = true;
}

/* The first breach counts; nothing after it is read, and nothing is sent any more. */
static void guest_broke(struct channel *c, const char *what)
{
	if (c->guest_over)
		return;
	c->guest_over = true;
	if (c->guest_stream) {
		struct evbuffer *in = bufferevent_get_input(c->guest_stream);

		bufferevent_disable(c->guest_stream, EV_READ | EV_WRITE);
		evbuffer_drain(in, evbuffer_get_length(in));
	}
	log_warn("guest broke the protocol what=\"%s\"", what);
	console_send(c->console);
	channel_to_broker_text(c, RF_CB_PROTOCOL, what);
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

void channel_on_guest_read(struct bufferevent *bev, void *arg)
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

/* EOF or an error: the VMM closed the stream, so it is ending, and keeper sees that by itself. QEMU does that only when it ends. */
static void on_stream_event(struct bufferevent *bev, short what, void *arg)
{
	struct channel *c = arg;

	log_debug("stream over which=%s what=%d", bev == c->control_stream ? "control" : "guest", what);
	bufferevent_disable(bev, EV_READ | EV_WRITE);
	/* This VMM restarts a guest in place, and the event that says so may get lost. A guest has one connection in its life. */
	if (bev == c->guest_stream && c->plan.kind == VMM_CLOUD_HYPERVISOR) {
		console_send(c->console);
		channel_to_broker_text(c, RF_CB_VMM_EVENT, "GUEST_CLOSED");
	}
}

struct bufferevent *channel_stream(struct channel *c, int fd, bufferevent_data_cb on_read, size_t read_max)
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
	int rc;

	rc = type == RF_CH_SNAPSHOT ? vmm_side_snapshot(c, fds, fd_count, &e) : take_frame(c, type, body, n, &e);
	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	if (rc == 0) {
		if (c->guest_deaf)
			guest_broke(c, "the guest does not read what it is sent");
		return;
	}
	/* Our own broker: there is no way on that would not hide the mistake. */
	log_error("frame from the broker type=%u error=\"%s\"", type, e.text);
	channel_stop(c, 1);
}

static void on_broker_end(void *arg, const struct err *e)
{
	struct channel *c = arg;

	if (e)
		log_error("broker socket error=\"%s\"", e->text);
	console_drain(c->console);
	vmm_side_quit(c);
	channel_stop(c, e ? 1 : 0);
}

/* --- start -------------------------------------------------------------------------------------------------------------------- */

static int open_broker(struct channel *c, struct err *e)
{
	struct framed_options opt = {
		.fd = CHANNEL_FD_BROKER,
		.max_frame = ROLE_FRAME_MAX,
		.max_queued = BROKER_QUEUE_MAX,
		.on_frame = on_broker_frame,
		.on_end = on_broker_end,
		.on_drained = on_broker_drained,
		.arg = c,
	};

	if (framed_new(c->base, &opt, &c->broker, e))
		return err_wrap(e, "descriptor %d", CHANNEL_FD_BROKER);
	return 0;
}

static int open_guest(struct channel *c, struct err *e)
{
	struct guest_peer_ops ops = { .send = to_guest, .emit = channel_to_broker, .arg = c };

	c->guest = guest_peer_new(&ops);
	c->early = evbuffer_new();
	if (!c->guest || !c->early)
		return err_set(e, ERR_NOMEM, "no memory");
	if (c->plan.kind == VMM_CLOUD_HYPERVISOR && evutil_make_socket_nonblocking(CHANNEL_FD_GUEST) == 0)
		c->guest_listener = event_new(c->base, CHANNEL_FD_GUEST, EV_READ | EV_PERSIST, vmm_side_on_connect, c);
	else if (c->plan.kind == VMM_QEMU)
		c->guest_stream = channel_stream(c, CHANNEL_FD_GUEST, channel_on_guest_read, GUEST_READ_MAX);
	if (!c->guest_stream && !c->guest_listener)
		return err_set(e, ERR_IO, "descriptor %d (this role is started by noded itself)", CHANNEL_FD_GUEST);
	return 0;
}

static int open_all(struct channel *c, struct err *e)
{
	struct console_ops console = { .send = on_console, .booting = console_booting, .arg = c };

	if (open_broker(c, e) || vmm_plan_read(CHANNEL_FD_PLAN, &c->plan, e) || open_guest(c, e) || vmm_side_open_control(c, e) ||
			console_new(c->base, CHANNEL_FD_CONSOLE, &console, &c->console, e) || vmm_side_open_events(c, e))
		return -1;
	return 0;
}

static void close_all(struct channel *c)
{
	vmm_side_close_fds(c);
	vmm_side_close_listener(c);
	if (c->events)
		event_free(c->events);
	console_free(c->console);
	if (c->answer)
		event_free(c->answer);
	if (c->guest_stream)
		bufferevent_free(c->guest_stream);
	if (c->control_stream)
		bufferevent_free(c->control_stream);
	if (c->early)
		evbuffer_free(c->early);
	if (c->broker)
		framed_free(c->broker);
	guest_peer_free(c->guest);
	control_free(c->control);
	vmm_plan_free(&c->plan);
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
	if (control_start(c->control, &e))
		vmm_side_broke(c, e.text);
	if (event_base_dispatch(c->base) < 0)
		c->status = 1;
	framed_flush(c->broker, 1000);
	status = c->status;
	close_all(c);
	return status;
}
