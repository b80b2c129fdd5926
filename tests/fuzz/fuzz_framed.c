/*
 * Frames between processes, over a real socketpair: a first byte says how the rest is cut into writes. The frames that come out,
 * and whether the end is an error, must be what a straight reading of the bytes says; what is sent back byte for byte arrives
 * again.
 */
/* link: ephloop_event EPH::event */
/* reads: common/framed.c */
/* reached: 75 % of lines, 54 % of branches; the rest is too many descriptors, a peer that does not read, memory */
#include "fuzz.h"

#include "framed.h"

#include <event2/event.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_FRAME 300

struct end {
	struct framed *framed;
	struct buf got; /* type, length, body of each frame */
	struct framed *echo;
	bool over, bad;
	size_t fds, nines;
};

static struct event_base *base;

static void note(struct buf *b, uint8_t type, const uint8_t *body, size_t n)
{
	must(buf_printf(b, "%u:%zu:", type, n) && buf_add(b, body, n));
}

static void on_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct end *o = arg;

	must(!o->over && n <= MAX_FRAME && fd_count <= 1);
	/* A descriptor belongs to a frame of type 9, and is the one that was sent. */
	for (size_t i = 0; i < fd_count; i++) {
		must(type == 9 && write(fds[i], "", 0) == 0);
		close(fds[i]);
		o->fds++;
	}
	note(&o->got, type, body, n);
	o->nines += type == 9;
	if (o->echo && type == 9)
		must(framed_send_fds(o->echo, type, body, n, (int[]){ STDERR_FILENO }, 1));
	else if (o->echo)
		must(framed_send(o->echo, type, body, n));
}

static void on_end(void *arg, const struct err *e)
{
	struct end *o = arg;

	must(!o->over);
	o->over = true;
	o->bad = e != NULL;
}

static void open_end(struct end *o, int fd)
{
	struct framed_options opt = {
		.fd = fd, .max_frame = MAX_FRAME, .max_queued = 1 << 20, .on_frame = on_frame, .on_end = on_end, .arg = o
	};
	struct err e;

	*o = (struct end){ .over = false };
	buf_init(&o->got, 1 << 20);
	must(framed_new(base, &opt, &o->framed, &e) == 0);
}

/* What the bytes say. True: they end in the middle of a frame, or in one that is not allowed. */
static bool straight(const uint8_t *p, size_t n, struct buf *out)
{
	while (n >= 4) {
		size_t len = (size_t)p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16 | (size_t)p[3] << 24;

		if (len < 1 || len > MAX_FRAME + 1 || len > n - 4)
			return true;
		note(out, p[4], p + 5, len - 1);
		p += 4 + len;
		n -= 4 + len;
	}
	return n > 0;
}

static void turn(void)
{
	for (int i = 0; i < 3; i++)
		event_base_loop(base, EVLOOP_NONBLOCK);
}

static bool same(const struct buf *a, const struct buf *b)
{
	return a->len == b->len && (a->len == 0 || memcmp(a->data, b->data, a->len) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	struct buf want = BUF_INIT(1 << 20);
	struct end in, out, back;
	int raw[2], pair[2];
	size_t step, at = 0;
	bool bad;

	if (n < 1 || n > 8192)
		return 0;
	if (!base)
		base = event_base_new();
	must(base && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, raw) == 0);
	must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	step = p[0] ? p[0] : n;
	p++;
	n--;
	bad = straight(p, n, &want);
	open_end(&in, raw[1]);
	open_end(&out, pair[0]);
	open_end(&back, pair[1]);
	in.echo = out.framed;
	for (; at < n && !in.over; at += step) {
		size_t part = n - at < step ? n - at : step;

		must(send(raw[0], p + at, part, MSG_NOSIGNAL) == (ssize_t)part);
		framed_pause(in.framed, step % 2);
		event_base_loop(base, EVLOOP_NONBLOCK);
		framed_pause(in.framed, false);
		event_base_loop(base, EVLOOP_NONBLOCK);
	}
	close(raw[0]);
	turn();
	must(in.over && in.bad == bad && same(&in.got, &want));
	turn();
	must(same(&back.got, &want) && !back.over);
	must(back.fds == in.nines);
	framed_free(in.framed);
	framed_free(out.framed);
	turn();
	must(back.over && !back.bad);
	framed_free(back.framed);
	turn();
	buf_free(&in.got);
	buf_free(&out.got);
	buf_free(&back.got);
	buf_free(&want);
	return 0;
}
