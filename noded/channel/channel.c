/*
 * The channel role: `noded --role channel`, one per VM, own uid, empty network, no secret. It is where every byte of the guest and
 * of the VMM is parsed (guest.c, control.h); the broker gets only what was decoded and written again. Owns the guest's stream, the
 * VMM's control, the console pipe and the socket to the broker; lives as long as the broker does. (A golden VM has no broker:
 * keeper has its end of the socket.)
 *
 * One libevent loop, one thread, nothing blocks. Back-pressure: the guest has credit for events only as the broker takes them, and
 * its stream is not read while much waits for the broker.
 */
#include "channel/console.h"
#include "channel/control.h"
#include "channel/guest.h"
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
#define GUEST_READ_MAX (GUEST_FRAME_MAX + 4 + 65536)
/* Above it the guest does not read: a setup and what credit allows are less than half of it. */
#define GUEST_OUT_MAX (1024 * 1024)
#define SNAPSHOT_FDS_MAX 4

struct channel {
	struct event_base *base;
	struct framed *broker;
	struct guest_peer *guest;
	struct vmm_plan plan;
	struct control *control;
	struct console *console;
	struct bufferevent *guest_stream; /* NULL while the guest has not connected */
	struct bufferevent *control_stream;
	struct evbuffer *early; /* for the guest, until it has connected */
	struct event *answer;   /* deadline of what the VMM was asked last */
	const char *asked;      /* what that is */
	int snapshot_fds[SNAPSHOT_FDS_MAX];
	size_t snapshot_fd_count;
	bool guest_paused;
	bool guest_over; /* broke the protocol: its stream is not read any more */
	bool guest_deaf; /* takes nothing of what it was sent, and it is too much to keep */
	bool control_over;
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

static void on_console(void *arg, const char *bytes, size_t n)
{
	to_broker(arg, RF_CB_CONSOLE, bytes, n);
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

	log_debug("stream over which=%s what=%d", bev == c->control_stream ? "control" : "guest", what);
	bufferevent_disable(bev, EV_READ | EV_WRITE);
}

/* --- control of the VMM ------------------------------------------------------------------------------------------------------- */

/* It cannot be controlled any more, which ends the VM: the broker says so to keeper. */
static void control_broke(struct channel *c, const char *why)
{
	char text[ERR_TEXT_MAX + 8];

	if (c->control_over)
		return;
	c->control_over = true;
	event_del(c->answer);
	bufferevent_disable(c->control_stream, EV_READ);
	log_warn("control of the VMM is over how=%s what=\"%s\"", control_name(c->control), why);
	console_send(c->console);
	if (text_fmt(text, sizeof(text), "%s: %s", control_name(c->control), why))
		to_broker_text(c, RF_CB_VMM_EVENT, text);
}

static void control_send(void *arg, const void *bytes, size_t n)
{
	struct channel *c = arg;

	if (bufferevent_write(c->control_stream, bytes, n) != 0)
		stop(c, 1);
}

/* Past the buffer: a descriptor goes with the very write that it belongs to. */
static int control_send_fd(void *arg, const void *bytes, size_t n, int fd, struct err *e)
{
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { .space = { 0 } };
	struct channel *c = arg;
	struct iovec part = { .iov_base = (void *)bytes, .iov_len = n };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&m);

	if (evbuffer_get_length(bufferevent_get_output(c->control_stream)) > 0)
		return err_set(e, ERR_UNAVAILABLE, "the VMM does not read");
	*head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(head), &fd, sizeof(fd));
	if (sendmsg(CHANNEL_FD_CONTROL, &m, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)n)
		return err_set_errno(e, "send a descriptor to the VMM");
	return 0;
}

static void control_known(void *arg)
{
	(void)arg;
}

static void control_up(void *arg)
{
	to_broker(arg, RF_CB_VMM_UP, NULL, 0);
}

static void control_event(void *arg, const char *name)
{
	struct channel *c = arg;

	console_send(c->console);
	to_broker_text(c, RF_CB_VMM_EVENT, name);
}

static void control_guest_open(void *arg)
{
	to_broker(arg, RF_CB_GUEST_OPEN, NULL, 0);
}

static void close_snapshot_fds(struct channel *c)
{
	for (size_t i = 0; i < c->snapshot_fd_count; i++)
		close(c->snapshot_fds[i]);
	c->snapshot_fd_count = 0;
}

static void control_snapshot_over(void *arg, const char *why)
{
	struct buf b = BUF_INIT(ERR_TEXT_MAX + 64);
	struct channel *c = arg;

	wire_put_bool(&b, why == NULL);
	wire_put_str(&b, why);
	to_broker(c, RF_CB_SNAPSHOT, b.data, b.len);
	buf_free(&b);
	close_snapshot_fds(c);
}

static void control_wait(void *arg, const char *what)
{
	struct channel *c = arg;
	struct timeval tv = { .tv_sec = c->plan.answer_ms / 1000, .tv_usec = c->plan.answer_ms % 1000 * 1000 };

	c->asked = what;
	if (!what)
		event_del(c->answer);
	else if (c->plan.answer_ms > 0 && event_add(c->answer, &tv) != 0)
		stop(c, 1);
}

static void on_answer_late(evutil_socket_t fd, short what, void *arg)
{
	struct channel *c = arg;
	char text[128];

	(void)fd;
	(void)what;
	if (text_fmt(text, sizeof(text), "no answer to %s within %u ms", c->asked, c->plan.answer_ms))
		control_broke(c, text);
}

static void on_control_read(struct bufferevent *bev, void *arg)
{
	struct channel *c = arg;
	struct evbuffer *in = bufferevent_get_input(bev);
	char bytes[4096];
	struct err e;
	int n;

	while (!c->control_over && (n = evbuffer_remove(in, bytes, sizeof(bytes))) > 0)
		if (control_feed(c->control, bytes, (size_t)n, &e))
			control_broke(c, e.text);
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

static int take_snapshot(struct channel *c, const int *fds, size_t fd_count, struct err *e)
{
	if (c->plan.start != VMM_GOLDEN || c->snapshot_fd_count > 0 || fd_count > SNAPSHOT_FDS_MAX)
		return err_set(e, ERR_PROTOCOL, "snapshot of a VM that none is made of");
	for (size_t i = 0; i < fd_count; i++) {
		c->snapshot_fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
		if (c->snapshot_fds[i] < 0)
			return err_set_errno(e, "descriptors of a snapshot");
		c->snapshot_fd_count++;
	}
	if (c->control_over)
		control_snapshot_over(c, "control of the VMM is over");
	else
		control_snapshot(c->control, c->snapshot_fds, c->snapshot_fd_count);
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

	rc = type == RF_CH_SNAPSHOT ? take_snapshot(c, fds, fd_count, &e) : take_frame(c, type, body, n, &e);
	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	if (rc == 0) {
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
	console_drain(c->console);
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
	struct guest_peer_ops ops = { .send = to_guest, .emit = to_broker, .arg = c };

	c->guest = guest_peer_new(&ops);
	c->early = evbuffer_new();
	if (!c->guest || !c->early)
		return err_set(e, ERR_NOMEM, "no memory");
	c->guest_stream = open_stream(c, CHANNEL_FD_GUEST, on_guest_read, GUEST_READ_MAX);
	if (!c->guest_stream)
		return err_set(e, ERR_IO, "descriptor %d (this role is started by noded itself)", CHANNEL_FD_GUEST);
	return 0;
}

static int open_control(struct channel *c, struct err *e)
{
	struct control_ops ops = {
		.send = control_send,
		.send_fd = control_send_fd,
		.on_known = control_known,
		.on_up = control_up,
		.on_event = control_event,
		.on_guest_open = control_guest_open,
		.on_snapshot = control_snapshot_over,
		.on_wait = control_wait,
		.arg = c,
	};

	c->answer = event_new(c->base, -1, 0, on_answer_late, c);
	c->control = control_new(&c->plan, &ops);
	if (!c->answer || !c->control)
		return err_set(e, ERR_NOMEM, "no memory");
	c->control_stream = open_stream(c, CHANNEL_FD_CONTROL, on_control_read, 65536);
	if (!c->control_stream)
		return err_set(e, ERR_IO, "descriptor %d (this role is started by noded itself)", CHANNEL_FD_CONTROL);
	return 0;
}

static int open_all(struct channel *c, struct err *e)
{
	struct console_ops console = { .send = on_console, .booting = console_booting, .arg = c };

	if (open_broker(c, e) || vmm_plan_read(CHANNEL_FD_PLAN, &c->plan, e) || open_guest(c, e) || open_control(c, e) ||
			console_new(c->base, CHANNEL_FD_CONSOLE, &console, &c->console, e))
		return -1;
	return 0;
}

static void close_all(struct channel *c)
{
	close_snapshot_fds(c);
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
		control_broke(c, e.text);
	if (event_base_dispatch(c->base) < 0)
		c->status = 1;
	framed_flush(c->broker, 1000);
	status = c->status;
	close_all(c);
	return status;
}
