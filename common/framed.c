/*
 * Frames over a socketpair. Owns the descriptor, at most one frame (and what came with it) of input, and a bounded list of
 * output. Runs on the loop's thread and never blocks, except framed_flush. The peer is another process of ours, but one that
 * the guest may have taken over: lengths are checked before they are used, descriptors nobody asked for are closed.
 *
 * Which frame do descriptors belong to? The kernel ends a read after the piece that carried them, and the sender puts nothing
 * else into that piece's call: so they belong to the last frame that begins in what one read returned.
 */
#include "framed.h"

#include "clock.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define HEAD 5     /* u32 length, u8 type */
#define FDS_MAX 16 /* with one frame */
#define READ_BYTES 65536
#define READS_PER_TURN 8 /* then others on the loop get their turn */
#define IOV_PER_WRITE 16

struct out_frame {
	struct out_frame *next;
	size_t len, sent;
	size_t fd_count; /* 0 once they are gone */
	int fds[FDS_MAX];
	uint8_t bytes[];
};

struct fd_group {
	int fds[FDS_MAX];
	size_t count; /* 0: the group is free */
	size_t at;    /* where in `in` their frame begins */
};

struct framed {
	struct framed_options opt;
	struct event *readable, *writable;
	struct buf in;
	struct fd_group groups[2]; /* of the frame that is not whole yet, and of the last one that began: never more */
	struct out_frame *head, **tail;
	size_t queued;
	int depth; /* of callbacks under way */
	bool paused, ended, broken, freed;
};

static void close_fds(int *fds, size_t *count)
{
	for (size_t i = 0; i < *count; i++)
		close(fds[i]);
	*count = 0;
}

static void drop_head(struct framed *f)
{
	struct out_frame *o = f->head;

	f->head = o->next;
	if (!f->head)
		f->tail = &f->head;
	f->queued -= o->len - o->sent;
	close_fds(o->fds, &o->fd_count);
	explicit_bzero(o->bytes, o->len); /* some frames carry secrets, and no frame is so large that it would matter */
	free(o);
}

static void destroy(struct framed *f)
{
	if (f->readable)
		event_free(f->readable);
	if (f->writable)
		event_free(f->writable);
	while (f->head)
		drop_head(f);
	for (int i = 0; i < 2; i++)
		close_fds(f->groups[i].fds, &f->groups[i].count);
	buf_free(&f->in);
	if (f->opt.fd >= 0)
		close(f->opt.fd);
	free(f);
}

static void leave(struct framed *f)
{
	if (--f->depth == 0 && f->freed)
		destroy(f);
}

/* Peer gone (e NULL) or wrong. Called inside enter/leave only. */
static void end(struct framed *f, const struct err *e)
{
	if (f->ended || f->freed)
		return;
	f->ended = true;
	event_del(f->readable);
	event_del(f->writable);
	f->opt.on_end(f->opt.arg, e);
}

static size_t frame_length(const uint8_t *p)
{
	return (size_t)p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16 | (size_t)p[3] << 24;
}

/* The descriptors of the frame that begins at `at`. */
static size_t pick_fds(struct framed *f, size_t at, int fds[FDS_MAX])
{
	for (int i = 0; i < 2; i++) {
		struct fd_group *g = &f->groups[i];
		size_t n = g->count;

		if (n > 0 && g->at == at) {
			memcpy(fds, g->fds, n * sizeof(fds[0]));
			g->count = 0;
			return n;
		}
	}
	return 0;
}

/* Hands over every whole frame, as long as the owner wants them. False when the framed ended or was freed. */
static bool deliver(struct framed *f)
{
	size_t at = 0;

	while (!f->paused && !f->ended && !f->freed && f->in.len - at >= 4) {
		const uint8_t *p = f->in.data + at;
		size_t n = frame_length(p), fd_count;
		int fds[FDS_MAX];
		struct err e;

		if (n < 1 || n - 1 > f->opt.max_frame) {
			err_set(&e, ERR_PROTOCOL, "a frame of %zu bytes; its type and at most %zu bytes are allowed", n,
					f->opt.max_frame);
			end(f, &e);
			break;
		}
		if (f->in.len - at - 4 < n)
			break;
		fd_count = pick_fds(f, at, fds);
		at += 4 + n;
		f->opt.on_frame(f->opt.arg, p[4], p + HEAD, n - 1, fds, fd_count);
	}
	buf_consume(&f->in, at);
	for (int i = 0; i < 2; i++)
		f->groups[i].at -= f->groups[i].count > 0 ? at : 0;
	return !f->ended && !f->freed;
}

/* Offset of the last frame that begins in `in`; a length that lies is caught by deliver. */
static size_t last_start(const struct framed *f)
{
	size_t at = 0;

	while (f->in.len - at >= 4) {
		size_t n = frame_length(f->in.data + at);

		if (n >= f->in.len - at - 4)
			break;
		at += 4 + n;
	}
	return at;
}

/* Descriptors that one recvmsg returned. False when there are too many or they belong to no frame. */
static bool take_fds(struct framed *f, struct msghdr *msg, size_t before)
{
	bool good = (msg->msg_flags & MSG_CTRUNC) == 0;
	struct fd_group got = { .count = 0 }, *free_group = f->groups[0].count == 0 ? &f->groups[0] : &f->groups[1];

	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			if (got.count < FDS_MAX) {
				got.fds[got.count++] = fd;
			} else {
				close(fd);
				good = false;
			}
		}
	}
	got.at = last_start(f);
	if (!good || (got.count > 0 && (got.at < before || free_group->count > 0))) {
		close_fds(got.fds, &got.count);
		return false;
	}
	if (got.count > 0)
		*free_group = got;
	return true;
}

/* One recvmsg. 1: bytes came, 0: nothing now, -1: over. */
static int read_once(struct framed *f)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
	} control;
	struct iovec iov = { .iov_base = buf_reserve(&f->in, READ_BYTES), .iov_len = READ_BYTES };
	struct msghdr msg = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)
	};
	size_t before = f->in.len;
	struct err e;
	ssize_t n;

	if (!iov.iov_base) {
		err_set(&e, ERR_NOMEM, "frame: no memory");
		end(f, &e);
		return -1;
	}
	n = recvmsg(f->opt.fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n < 0 && errno != ECONNRESET) {
		err_set_errno(&e, "frame: read");
		end(f, &e);
		return -1;
	}
	if (n <= 0) {
		err_set(&e, ERR_PROTOCOL, "the stream ended inside a frame");
		end(f, f->in.len > 0 ? &e : NULL);
		return -1;
	}
	buf_commit(&f->in, (size_t)n);
	if ((msg.msg_controllen > 0 || (msg.msg_flags & MSG_CTRUNC)) && !take_fds(f, &msg, before)) {
		err_set(&e, ERR_PROTOCOL, "descriptors that belong to no frame, or more than %d with one", FDS_MAX);
		end(f, &e);
		return -1;
	}
	return 1;
}

static void on_readable(evutil_socket_t fd, short what, void *arg)
{
	struct framed *f = arg;
	struct err e;

	(void)fd;
	(void)what;
	f->depth++;
	for (int i = 0; i < READS_PER_TURN && deliver(f) && !f->paused && read_once(f) > 0; i++)
		;
	/* A write failed earlier: what the peer said before it went was read first, above. */
	if (deliver(f) && f->broken && !f->paused) {
		err_set(&e, ERR_IO, "the peer does not take frames any more");
		end(f, &e);
	}
	leave(f);
}

/* One sendmsg of as many frames as may share it. False when the socket takes no more now or is broken. */
static bool write_once(struct framed *f)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
	} control;
	struct iovec iov[IOV_PER_WRITE];
	struct msghdr msg = { .msg_iov = iov };
	ssize_t n;

	for (struct out_frame *o = f->head; o && msg.msg_iovlen < IOV_PER_WRITE; o = o->next) {
		if (o->fd_count > 0 && o != f->head)
			break;
		iov[msg.msg_iovlen++] = (struct iovec){ o->bytes + o->sent, o->len - o->sent };
		if (o->fd_count > 0) {
			memset(&control, 0, sizeof(control));
			msg.msg_control = control.bytes;
			msg.msg_controllen = CMSG_SPACE(sizeof(int) * o->fd_count);
			control.align.cmsg_level = SOL_SOCKET;
			control.align.cmsg_type = SCM_RIGHTS;
			control.align.cmsg_len = CMSG_LEN(sizeof(int) * o->fd_count);
			memcpy(CMSG_DATA(&control.align), o->fds, sizeof(int) * o->fd_count);
			break;
		}
	}
	n = sendmsg(f->opt.fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
	if (n < 0) {
		if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS) {
			f->broken = true;
			event_active(f->readable, EV_READ,
					0); /* the owner hears of it from the loop, not from inside its own call */
		}
		return false;
	}
	close_fds(f->head->fds, &f->head->fd_count);
	for (size_t left = (size_t)n; left > 0;) {
		size_t take = f->head->len - f->head->sent;

		if (take > left)
			take = left;
		f->head->sent += take;
		f->queued -= take;
		left -= take;
		if (f->head->sent == f->head->len)
			drop_head(f);
	}
	return true;
}

static void write_out(struct framed *f)
{
	while (f->head && !f->broken && write_once(f))
		;
	if (f->head && !f->broken && !f->ended)
		event_add(f->writable, NULL);
	else
		event_del(f->writable);
}

static void on_writable(evutil_socket_t fd, short what, void *arg)
{
	struct framed *f = arg;

	(void)fd;
	(void)what;
	f->depth++;
	write_out(f);
	if (!f->head && !f->ended && !f->freed && f->opt.on_drained)
		f->opt.on_drained(f->opt.arg);
	leave(f);
}

int framed_new(struct event_base *base, const struct framed_options *opt, struct framed **out, struct err *e)
{
	struct framed *f = calloc(1, sizeof(*f));
	int flags = fcntl(opt->fd, F_GETFL);

	*out = NULL;
	if (!f) {
		close(opt->fd);
		return err_set(e, ERR_NOMEM, "frame: no memory");
	}
	f->opt = *opt;
	f->tail = &f->head;
	/* A whole frame plus one read: a frame is delivered as soon as it is whole. */
	buf_init(&f->in, opt->max_frame + HEAD + 2 * READ_BYTES);
	f->in.wipe = true;
	if (flags < 0 || fcntl(opt->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
		err_set_errno(e, "frame: set descriptor %d non-blocking", opt->fd);
		destroy(f);
		return -1;
	}
	f->readable = event_new(base, opt->fd, EV_READ | EV_PERSIST, on_readable, f);
	f->writable = event_new(base, opt->fd, EV_WRITE | EV_PERSIST, on_writable, f);
	if (!f->readable || !f->writable || event_add(f->readable, NULL) != 0) {
		err_set(e, ERR_NOMEM, "frame: no memory for its events");
		destroy(f);
		return -1;
	}
	*out = f;
	return 0;
}

bool framed_send_fds(struct framed *f, uint8_t type, const void *body, size_t n, const int *fds, size_t fd_count)
{
	struct out_frame *o;

	if (f->ended || f->broken || f->freed || n > f->opt.max_frame || n > UINT32_MAX - 1 || fd_count > FDS_MAX ||
			f->queued > f->opt.max_queued || n + HEAD > f->opt.max_queued - f->queued)
		return false;
	o = malloc(sizeof(*o) + HEAD + n);
	if (!o)
		return false;
	*o = (struct out_frame){ .len = HEAD + n };
	for (size_t i = 0; i < fd_count; i++) {
		int copy = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);

		if (copy < 0) {
			close_fds(o->fds, &o->fd_count);
			free(o);
			return false;
		}
		o->fds[o->fd_count++] = copy;
	}
	for (int i = 0; i < 4; i++)
		o->bytes[i] = (uint8_t)((n + 1) >> (8 * i));
	o->bytes[4] = type;
	if (n > 0)
		memcpy(o->bytes + HEAD, body, n);
	*f->tail = o;
	f->tail = &o->next;
	f->queued += o->len;
	if (f->head == o)
		write_out(f);
	return true;
}

bool framed_send(struct framed *f, uint8_t type, const void *body, size_t n)
{
	return framed_send_fds(f, type, body, n, NULL, 0);
}

size_t framed_queued(const struct framed *f)
{
	return f->queued;
}

void framed_pause(struct framed *f, bool paused)
{
	if (f->paused == paused || f->ended || f->freed)
		return;
	f->paused = paused;
	if (paused) {
		event_del(f->readable);
		return;
	}
	event_add(f->readable, NULL);
	if (f->in.len > 0 || f->broken)
		event_active(f->readable, EV_READ,
				0); /* whole frames may be waiting in memory, where the kernel does not see them */
}

void framed_flush(struct framed *f, int ms)
{
	int64_t until = clock_mono_ns() / 1000000 + ms;

	while (f->head && !f->broken && !f->ended) {
		struct pollfd p = { .fd = f->opt.fd, .events = POLLOUT };
		int64_t left = until - clock_mono_ns() / 1000000;

		write_out(f);
		if (!f->head || f->broken || left <= 0)
			return;
		if (poll(&p, 1, (int)left) < 0 && errno != EINTR)
			return;
	}
}

void framed_free(struct framed *f)
{
	if (!f || f->freed)
		return;
	f->freed = true;
	event_del(f->readable);
	event_del(f->writable);
	if (f->depth == 0)
		destroy(f);
}
