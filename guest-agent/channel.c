/*
 * The agent's end of the guest channel. Owns the port's descriptor, the input and output buffers and the credit of each stream.
 * Called on the only thread. The port is non-blocking: a host that does not read makes the output wait here, bounded by credit.
 */
#include "channel.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "transport.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Until the first byte came the port may report a host that is not there yet; later that is the end of the channel. */
#define HOST_WAIT_MS 10000
#define IN_MAX (2 * GUEST_FRAME_MAX)
/* Frames ready to leave. More is only made when this much has left, so the bound is this, a frame and a fatal. */
#define OUT_LOW (128 * 1024)
#define OUT_MAX (1024 * 1024)
#define CREDIT_STEP (GUEST_CREDIT / 4)
#define CREDIT_MAX (64 * 1024 * 1024)
#define FATAL_WAIT_MS 2000

/* Credit of one stream: ours to send, and what we owe the host. */
struct lane {
	uint32_t stream;
	uint32_t may_send;
	uint32_t owed;
};

enum lane_name { LANE_EVENTS, LANE_RESULT, LANE_CALL, LANE_COUNT };

struct channel {
	int fd;
	struct transport transport;
	bool met;             /* the host has sent something */
	int64_t hup_since_ms; /* 0: the host is connected */
	struct buf in, out;
	struct buf events;   /* bodies of waiting events, each after its u32 length */
	size_t events_taken; /* bytes of `events` that have left */
	struct lane lanes[LANE_COUNT];
	channel_frame_fn *fn;
	void *ctx;
};

/* --- opening ----------------------------------------------------------------------------------------------------------------- */

int channel_open(const char *transport, struct channel **out, struct err *e)
{
	struct transport t;
	struct channel *ch;
	int fd;

	*out = NULL;
	if (transport_parse(transport, &t, e) < 0)
		return -1;
	fd = transport_open(&t, e);
	if (fd < 0)
		return -1;
	ch = calloc(1, sizeof *ch);
	if (ch == NULL) {
		close(fd);
		return err_set(e, ERR_NOMEM, "no memory for the channel");
	}
	ch->fd = fd;
	ch->transport = t;
	buf_init(&ch->in, IN_MAX);
	buf_init(&ch->out, OUT_MAX);
	buf_init(&ch->events, CHANNEL_EVENTS_MAX);
	ch->lanes[LANE_EVENTS] = (struct lane){ .stream = 0, .may_send = GUEST_CREDIT };
	ch->lanes[LANE_RESULT] = (struct lane){ .stream = 2, .may_send = GUEST_CREDIT };
	*out = ch;
	return 0;
}

void channel_set_handler(struct channel *ch, channel_frame_fn *fn, void *ctx)
{
	ch->fn = fn;
	ch->ctx = ctx;
}

/* --- credit ------------------------------------------------------------------------------------------------------------------ */

static struct lane *lane_of(struct channel *ch, uint32_t stream)
{
	for (size_t i = 0; i < LANE_COUNT; i++)
		if (ch->lanes[i].stream == stream && (i != LANE_CALL || stream != 0))
			return &ch->lanes[i];
	return NULL;
}

void channel_open_stream(struct channel *ch, uint32_t stream)
{
	ch->lanes[LANE_CALL] = (struct lane){ .stream = stream, .may_send = GUEST_CREDIT };
}

static int take_credit(struct channel *ch, const struct guest_frame_view *f, struct err *e)
{
	struct wire_reader r;
	struct lane *lane = lane_of(ch, f->stream);
	uint32_t bytes;

	wire_read_init(&r, f->body, f->n);
	bytes = wire_u32(&r);
	if (wire_end(&r, "credit", e) < 0)
		return -1;
	if (lane == NULL)
		return 0; /* of a call that is over: credit and reply crossed */
	if (bytes > CREDIT_MAX - lane->may_send)
		return err_set(e, ERR_PROTOCOL, "credit of stream %u is over %d bytes", f->stream, CREDIT_MAX);
	lane->may_send += bytes;
	return 0;
}

void channel_consumed(struct channel *ch, uint32_t stream, size_t n)
{
	struct lane *lane = lane_of(ch, stream);
	uint8_t body[4];

	if (lane == NULL)
		return;
	lane->owed += (uint32_t)n;
	if (lane->owed < CREDIT_STEP)
		return;
	for (size_t i = 0; i < 4; i++)
		body[i] = (uint8_t)(lane->owed >> (8 * i));
	lane->owed = 0;
	channel_put(ch, GF_CREDIT, stream, body, sizeof body);
}

/* --- output ------------------------------------------------------------------------------------------------------------------ */

void channel_put(struct channel *ch, enum guest_frame type, uint32_t stream, const void *body, size_t n)
{
	guest_frame_put(&ch->out, type, stream, body, n);
}

size_t channel_events_waiting(const struct channel *ch)
{
	return ch->events.len - ch->events_taken;
}

/* Turns waiting events into frames as far as credit and the output buffer allow. */
static void move_events(struct channel *ch)
{
	struct lane *lane = &ch->lanes[LANE_EVENTS];

	while (channel_events_waiting(ch) > 0 && ch->out.len < OUT_LOW) {
		const uint8_t *p = ch->events.data + ch->events_taken;
		uint32_t n;

		memcpy(&n, p, sizeof n);
		if (n > lane->may_send)
			break;
		channel_put(ch, GF_EVENT, 0, p + sizeof n, n);
		lane->may_send -= n;
		ch->events_taken += sizeof n + n;
	}
	if (channel_events_waiting(ch) == 0) {
		buf_reset(&ch->events);
		ch->events_taken = 0;
	} else if (ch->events_taken > CHANNEL_EVENTS_MAX / 4) {
		buf_consume(&ch->events, ch->events_taken);
		ch->events_taken = 0;
	}
}

/* Writes what the port takes now. */
static int write_out(struct channel *ch, struct err *e)
{
	size_t done = 0;
	int rc = 0;

	move_events(ch);
	while (done < ch->out.len) {
		ssize_t n = write(ch->fd, ch->out.data + done, ch->out.len - done);

		if (n > 0) {
			done += (size_t)n;
			continue;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno != EAGAIN)
			rc = err_set(e, ERR_UNAVAILABLE, "the channel is gone: write errno=%d", errno);
		break;
	}
	buf_consume(&ch->out, done);
	if (rc == 0 && ch->out.failed)
		rc = err_set(e, ERR_INTERNAL, "output buffer of the channel is full");
	return rc;
}

bool channel_event(struct channel *ch, const struct guest_event *ev)
{
	struct buf body = BUF_INIT(GUEST_BODY_MAX);
	size_t max = CHANNEL_EVENTS_MAX - (ev->kind == GE_SHELL_OUTPUT ? CHANNEL_EVENTS_KEPT : 0);
	uint32_t n;
	bool ok = false;

	guest_event_encode(ev, &body);
	n = (uint32_t)body.len;
	if (!body.failed && ch->events.len + sizeof n + n <= max)
		ok = buf_add(&ch->events, &n, sizeof n) && buf_add(&ch->events, body.data, n);
	buf_free(&body);
	return ok;
}

int channel_flush_events(struct channel *ch, size_t left, struct err *e)
{
	while (channel_events_waiting(ch) > left)
		if (channel_wait(ch, -1, e) < 0)
			return -1;
	return 0;
}

int channel_send_message(struct channel *ch, uint32_t stream, enum guest_frame data, enum guest_frame end, const void *p, size_t n,
		struct err *e)
{
	struct lane *lane = lane_of(ch, stream);
	const uint8_t *bytes = p;

	if (lane == NULL)
		return err_set(e, ERR_INTERNAL, "stream %u is not open", stream);
	while (n > 0) {
		size_t part = n < GUEST_BODY_MAX ? n : GUEST_BODY_MAX;

		if (part > lane->may_send)
			part = lane->may_send;
		if (part == 0 || ch->out.len >= OUT_LOW) {
			if (channel_wait(ch, -1, e) < 0)
				return -1;
			continue;
		}
		channel_put(ch, data, stream, bytes, part);
		lane->may_send -= (uint32_t)part;
		bytes += part;
		n -= part;
	}
	channel_put(ch, end, stream, NULL, 0);
	return write_out(ch, e);
}

/* --- input ------------------------------------------------------------------------------------------------------------------- */

static int take_frame(struct channel *ch, const struct guest_frame_view *f, struct err *e)
{
	if (f->type == GF_CREDIT)
		return take_credit(ch, f, e);
	if (f->type == GF_STOP)
		return err_set(e, ERR_UNAVAILABLE, "the host asked to stop");
	if (ch->fn == NULL)
		return err_set(e, ERR_PROTOCOL, "frame of type %u is not expected now", f->type);
	return ch->fn(ch->ctx, f, e);
}

static int take_frames(struct channel *ch, struct err *e)
{
	size_t used = 0;
	int rc;

	for (;;) {
		struct guest_frame_view f;

		rc = guest_frame_next(ch->in.data + used, ch->in.len - used, &f, e);
		if (rc <= 0)
			break;
		rc = take_frame(ch, &f, e);
		if (rc < 0)
			break;
		used += f.total;
	}
	buf_consume(&ch->in, used);
	return rc < 0 ? -1 : 0;
}

/*
 * The host's side is closed. Before it ever spoke that is waited for: a port becomes ready by itself, a connection is made anew. (A
 * machine that is a clone of one that was stopped here has lost its connection.)
 */
static int host_absent(struct channel *ch, struct err *e)
{
	const struct timespec pause_5ms = { .tv_sec = 0, .tv_nsec = 5000000 };
	int64_t now = clock_boot_ms();
	int fd;

	if (ch->met)
		return err_set(e, ERR_UNAVAILABLE, "the host closed the channel");
	if (ch->hup_since_ms == 0)
		ch->hup_since_ms = now;
	if (now - ch->hup_since_ms > HOST_WAIT_MS)
		return err_set(e, ERR_UNAVAILABLE, "no host on the channel for %d ms", HOST_WAIT_MS);
	nanosleep(&pause_5ms, NULL); /* a closed port is always ready: poll would spin */
	if (!ch->transport.is_vsock)
		return 0;
	fd = transport_try(&ch->transport, e);
	if (fd >= 0 && dup3(fd, ch->fd, O_CLOEXEC) < 0)
		log_warn("the new connection is not used errno=%d", errno);
	if (fd >= 0) {
		close(fd);
		ch->hup_since_ms = 0;
	}
	return 0;
}

static int read_in(struct channel *ch, struct err *e)
{
	for (;;) {
		size_t room = ch->in.max - ch->in.len;
		uint8_t *p = buf_reserve(&ch->in, room);
		ssize_t n;

		if (p == NULL)
			return err_set(e, ERR_NOMEM, "no memory for the channel's input");
		n = read(ch->fd, p, room);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return 0;
		if (n <= 0)
			return host_absent(ch, e); /* of a connection that was refused or reset reading fails */
		ch->met = true;
		ch->hup_since_ms = 0;
		buf_commit(&ch->in, (size_t)n);
		if (take_frames(ch, e) < 0)
			return -1;
		if ((size_t)n < room)
			return 0;
	}
}

struct pollfd channel_pollfd(const struct channel *ch)
{
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };
	bool event_ready = false;

	if (channel_events_waiting(ch) > 0) {
		uint32_t n;

		memcpy(&n, ch->events.data + ch->events_taken, sizeof n);
		event_ready = n <= ch->lanes[LANE_EVENTS].may_send;
	}
	if (ch->out.len > 0 || event_ready)
		p.events = (short)(POLLIN | POLLOUT);
	return p;
}

int channel_serve(struct channel *ch, short revents, struct err *e)
{
	if ((revents & (POLLIN | POLLHUP | POLLERR)) && read_in(ch, e) < 0)
		return -1;
	return write_out(ch, e);
}

int channel_wait(struct channel *ch, int timeout_ms, struct err *e)
{
	struct pollfd p;
	int n;

	if (write_out(ch, e) < 0)
		return -1;
	p = channel_pollfd(ch);
	n = poll(&p, 1, timeout_ms);
	if (n < 0 && errno != EINTR)
		return err_set_errno(e, "poll");
	return channel_serve(ch, n > 0 ? p.revents : 0, e);
}

void channel_wait_end(struct channel *ch, int64_t timeout_ms)
{
	int64_t deadline = clock_boot_ms() + timeout_ms, left;
	struct err e;

	while ((left = deadline - clock_boot_ms()) > 0)
		if (channel_wait(ch, (int)(left < 1000 ? left : 1000), &e) < 0)
			return;
}

void channel_fatal(struct channel *ch, const char *text)
{
	int64_t deadline = clock_boot_ms() + FATAL_WAIT_MS;
	size_t n = strlen(text);
	struct err e;

	if (!ch->met)
		return; /* the host asks first */
	n = text_utf8_border(text, n < GUEST_FATAL_MAX ? n : GUEST_FATAL_MAX);
	channel_put(ch, GF_FATAL, 0, text, n);
	while (ch->out.len > 0 && clock_boot_ms() < deadline) {
		struct pollfd p = { .fd = ch->fd, .events = POLLOUT };

		if (poll(&p, 1, 100) < 0 || write_out(ch, &e) < 0)
			break;
	}
}
