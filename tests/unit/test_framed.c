/* Frames between processes: lies about length, cuts, descriptors, back-pressure, freeing inside callbacks. And the inbox. */
/* link: ephloop_event */
#include "unit.h"

#include "framed.h"
#include "inbox.h"
#include "loop.h"

#include <pthread.h>
#include <sys/stat.h>

struct side {
	struct framed *f;
	int frames, ends, drained;
	uint8_t type;
	char body[200];
	size_t n;
	size_t total;
	int fds[16];
	size_t fd_count;
	char said[ERR_TEXT_MAX]; /* of the end; "" when there was no error */
	bool free_on_frame, free_on_end, pause_on_frame;
};

static struct event_base *base;
static int raw; /* the other end, when a test speaks bytes */
static struct side a, b;

static void on_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct side *s = arg;

	s->frames++;
	s->type = type;
	s->n = n;
	s->total += n;
	memcpy(s->body, body, n < sizeof(s->body) ? n : sizeof(s->body));
	for (size_t i = 0; i < fd_count; i++) {
		if (s->fd_count < 16)
			s->fds[s->fd_count++] = fds[i];
		else
			close(fds[i]);
	}
	if (s->pause_on_frame)
		framed_pause(s->f, true);
	if (s->free_on_frame) {
		framed_free(s->f);
		s->f = NULL;
	}
}

static void on_end(void *arg, const struct err *e)
{
	struct side *s = arg;

	s->ends++;
	snprintf(s->said, sizeof(s->said), "%s", e ? e->text : "");
	if (s->free_on_end) {
		framed_free(s->f);
		s->f = NULL;
	}
}

static void on_drained(void *arg)
{
	((struct side *)arg)->drained++;
}

static void open_side(struct side *s, int fd, size_t max_frame, size_t max_queued)
{
	struct framed_options opt = { .fd = fd,
		.max_frame = max_frame,
		.max_queued = max_queued,
		.on_frame = on_frame,
		.on_end = on_end,
		.on_drained = on_drained,
		.arg = s };
	struct err e;

	memset(s, 0, sizeof(*s));
	assert_ok(framed_new(base, &opt, &s->f, &e));
}

static int setup(void **state)
{
	int pair[2];

	(void)state;
	base = event_base_new();
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	open_side(&a, pair[0], 1000, 100000);
	raw = pair[1];
	memset(&b, 0, sizeof(b));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	framed_free(a.f);
	framed_free(b.f);
	if (raw >= 0)
		close(raw);
	event_base_free(base);
	return 0;
}

/* The other end as a framed of its own. */
static void both(size_t max_frame, size_t max_queued)
{
	open_side(&b, raw, max_frame, max_queued);
	raw = -1;
}

static bool ended(void *arg)
{
	return ((struct side *)arg)->ends > 0;
}

static bool got_frame(void *arg)
{
	return ((struct side *)arg)->frames > 0;
}

static void say(const char *bytes, size_t n)
{
	assert_int_equal(send(raw, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
}

static void test_lies(void **state)
{
	static const struct {
		const char *bytes;
		size_t n;
		const char *says;
	} cases[] = {
		{ "\0\0\0\0", 4, "a frame of 0 bytes" },
		{ "\xea\x03\0\0\x01", 5, "a frame of 1002 bytes; its type and at most 1000 bytes" },
		{ "\xff\xff\xff\xff", 4, "a frame of 4294967295 bytes" },
		{ "\x05\0\0\0\x01zz", 7, "ended inside a frame" },
		{ "\x05\0", 2, "ended inside" },
		{ "", 0, "" },
	};

	for (size_t i = 0; i < COUNT(cases); i++) {
		if (i > 0)
			setup(state);
		say(cases[i].bytes, cases[i].n);
		shutdown(raw, SHUT_WR);
		assert_true(loop_until(base, ended, &a, 5000));
		if (strncmp(a.said, cases[i].says, strlen(cases[i].says)) != 0 && !strstr(a.said, cases[i].says))
			fail_msg("case %zu: %s", i, a.said);
		if (!*cases[i].says)
			assert_string_equal(a.said, "");
		assert_int_equal(a.frames, 0);
		assert_int_equal(a.ends, 1);
		assert_false(framed_send(a.f, 1, "x", 1));
		if (i + 1 < COUNT(cases))
			teardown(state);
	}
}

static void test_byte_by_byte(void **state)
{
	static const char bytes[] = "\x04\0\0\0\x07"
				    "abc"
				    "\x01\0\0\0\x08";

	(void)state;
	for (size_t i = 0; i < sizeof(bytes) - 1; i++) {
		say(bytes + i, 1);
		event_base_loop(base, EVLOOP_NONBLOCK);
		assert_int_equal(a.frames, i < 7 ? 0 : i < 12 ? 1 : 2);
		if (i == 7)
			assert_memory_equal(a.body, "abc", 3);
	}
	assert_int_equal(a.type, 8);
	assert_int_equal(a.n, 0);
}

static void test_many_small(void **state)
{
	(void)state;
	both(1000, 100000);
	for (int i = 0; i < 5000; i++)
		assert_true(framed_send(b.f, (uint8_t)i, "0123456789", 10));
	while (a.frames < 5000)
		event_base_loop(base, EVLOOP_ONCE);
	assert_int_equal(a.total, 50000);
	assert_int_equal(framed_queued(b.f), 0);
}

static void test_back_pressure(void **state)
{
	static char body[1000];
	int sent = 0;

	(void)state;
	both(1000, 20000);
	framed_pause(a.f, true);
	while (sent < 100000 && framed_send(b.f, 1, body, sizeof(body)))
		sent++;
	assert_true(sent < 100000);
	assert_true(framed_queued(b.f) <= 20000);
	assert_false(framed_send(b.f, 1, body, 1001)); /* larger than any frame may be */
	event_base_loop(base, EVLOOP_NONBLOCK);
	assert_int_equal(a.frames, 0);
	framed_pause(a.f, false);
	while (a.frames < sent)
		event_base_loop(base, EVLOOP_ONCE);
	while (framed_queued(b.f) > 0)
		event_base_loop(base, EVLOOP_ONCE);
	assert_int_equal(b.drained, 1);
}

/* Paused inside a callback, with more frames in memory already. */
static void test_pause_inside(void **state)
{
	(void)state;
	both(1000, 100000);
	a.pause_on_frame = true;
	for (int i = 0; i < 3; i++)
		assert_true(framed_send(b.f, 1, "x", 1));
	for (int i = 1; i <= 3; i++) {
		assert_true(loop_until(base, got_frame, &a, 5000));
		event_base_loop(base, EVLOOP_NONBLOCK);
		assert_int_equal(a.frames, 1);
		a.frames = 0;
		framed_pause(a.f, false);
	}
}

static void test_free_inside(void **state)
{
	(void)state;
	both(1000, 100000);
	a.free_on_frame = true;
	b.free_on_end = true;
	assert_true(framed_send(b.f, 1, "x", 1));
	assert_true(framed_send(b.f, 1, "y", 1));
	assert_true(loop_until(base, ended, &b, 5000));
	assert_int_equal(a.frames, 1);
	assert_null(a.f);
	assert_null(b.f);
}

static bool is_file(int fd, ino_t inode)
{
	struct stat st;

	return fstat(fd, &st) == 0 && st.st_ino == inode && (fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

/* Frames before, with and after descriptors, large ones too: each set comes with its own frame. */
static void test_descriptors(void **state)
{
	static char body[100000];
	FILE *one = tmpfile(), *two = tmpfile();
	int fds[2] = { fileno(one), fileno(two) };
	struct stat st[2];

	teardown(state);
	base = event_base_new();
	{
		int pair[2];

		assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
		open_side(&a, pair[0], sizeof(body), 10000000);
		open_side(&b, pair[1], sizeof(body), 10000000);
		raw = -1;
	}
	fstat(fds[0], &st[0]);
	fstat(fds[1], &st[1]);
	for (int round = 0; round < 20; round++) {
		assert_true(framed_send(b.f, 1, "plain", 5));
		assert_true(framed_send_fds(b.f, 2, body, sizeof(body), fds, 2));
		assert_true(framed_send_fds(b.f, 3, "next", 4, fds + 1, 1));
		assert_true(framed_send(b.f, 4, "plain", 5));
	}
	assert_false(framed_send_fds(b.f, 2, "", 0, fds, 17));
	for (int frame = 0; frame < 80; frame++) {
		size_t want = frame % 4 == 1 ? 2u : frame % 4 == 2 ? 1u : 0u;

		a.frames = 0;
		a.fd_count = 0;
		a.pause_on_frame = true;
		framed_pause(a.f, false);
		assert_true(loop_until(base, got_frame, &a, 5000));
		assert_int_equal(a.type, frame % 4 + 1);
		assert_int_equal(a.fd_count, want);
		if (want == 2)
			assert_true(is_file(a.fds[0], st[0].st_ino) && is_file(a.fds[1], st[1].st_ino));
		if (want == 1)
			assert_true(is_file(a.fds[0], st[1].st_ino));
		for (size_t i = 0; i < a.fd_count; i++)
			close(a.fds[i]);
	}
	fclose(one);
	fclose(two);
}

static int open_fds(void)
{
	int n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
	return n;
}

/* Descriptors that nobody takes, or in the middle of a frame, or too many, are closed. */
static void test_stray_descriptors(void **state)
{
	int before = open_fds();
	int many[20];
	char control[CMSG_SPACE(sizeof(many))] __attribute__((aligned(8))) = { 0 };
	struct iovec iov = { .iov_base = (char *)"yz", .iov_len = 2 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = CMSG_SPACE(sizeof(int)) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

	(void)state;
	for (int i = 0; i < 20; i++)
		many[i] = raw;
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), many, sizeof(int));
	say("\x0a\0\0\0\x01x", 6);
	event_base_loop(base, EVLOOP_NONBLOCK);
	assert_int_equal(sendmsg(raw, &msg, 0), 2); /* with the second piece of a frame */
	assert_true(loop_until(base, ended, &a, 5000));
	assert_non_null(strstr(a.said, "belong to no frame"));
	assert_int_equal(open_fds(), before);
	teardown(state);
	setup(state);
	msg.msg_controllen = CMSG_SPACE(sizeof(many));
	c->cmsg_len = CMSG_LEN(sizeof(many));
	for (int i = 0; i < 20; i++)
		many[i] = raw;
	memcpy(CMSG_DATA(c), many, sizeof(many));
	assert_int_equal(sendmsg(raw, &msg, 0), 2);
	assert_true(loop_until(base, ended, &a, 5000));
	assert_int_equal(open_fds(), before);
}

static void test_peer_gone_while_sending(void **state)
{
	static char body[1000];

	(void)state;
	say("\x02\0\0\0\x07z", 6); /* what it said before it went still counts */
	while (framed_send(a.f, 1, body, sizeof(body)) && framed_queued(a.f) == 0)
		;
	close(raw);
	raw = -1;
	framed_send(a.f, 1, body, sizeof(body));
	assert_true(loop_until(base, ended, &a, 5000));
	assert_int_equal(a.ends, 1);
}

static void test_flush(void **state)
{
	static char body[1000], sink[1 << 20];
	int64_t from = clock_mono_ns();
	size_t got = 0;

	(void)state;
	while (framed_queued(a.f) == 0)
		assert_true(framed_send(a.f, 1, body, sizeof(body)));
	framed_flush(a.f, 50); /* nobody reads */
	assert_true(framed_queued(a.f) > 0);
	assert_in_range((clock_mono_ns() - from) / 1000000, 45, 3000);
	while (recv(raw, sink, sizeof(sink), MSG_DONTWAIT) > 0)
		got++;
	assert_true(got > 0);
	framed_flush(a.f, 5000);
	assert_int_equal(framed_queued(a.f), 0);
}

/* --- inbox --- */

struct item {
	struct inbox_item link;
	int thread, number;
};

static struct inbox *inbox;
static int last[4], handled;

static void handle(void *arg, struct inbox_item *link)
{
	struct item *i = (struct item *)link;

	(void)arg;
	assert_int_equal(i->number, last[i->thread] + 1); /* in the order of each poster */
	last[i->thread] = i->number;
	handled++;
	free(i);
	if (handled == 40000)
		inbox_free(inbox); /* inside its own handler */
}

static void *poster(void *arg)
{
	for (int i = 1; i <= 10000; i++) {
		struct item *item = calloc(1, sizeof(*item));

		item->thread = (int)(intptr_t)arg;
		item->number = i;
		inbox_post(inbox, &item->link);
	}
	return NULL;
}

static bool all_handled(void *arg)
{
	(void)arg;
	return handled >= 40000;
}

static void test_inbox(void **state)
{
	pthread_t threads[4];
	struct err e;

	(void)state;
	assert_ok(inbox_new(base, handle, NULL, &inbox, &e));
	for (int i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, poster, (void *)(intptr_t)i), 0);
	while (handled < 39000)
		event_base_loop(base, EVLOOP_ONCE);
	for (int i = 0; i < 4; i++) /* freed only when nobody can post any more */
		pthread_join(threads[i], NULL);
	assert_true(loop_until(base, all_handled, NULL, 10000));
	assert_int_equal(handled, 40000);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_lies),
		T(test_byte_by_byte),
		T(test_many_small),
		T(test_back_pressure),
		T(test_pause_inside),
		T(test_free_inside),
		T(test_descriptors),
		T(test_stray_descriptors),
		T(test_peer_gone_while_sending),
		T(test_flush),
		T(test_inbox),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
