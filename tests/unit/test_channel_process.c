/* link: noded_core */
/* The channel process itself, over its real descriptors, with broker, guest, monitor and console played: what a guest does that
 * sends and never reads, a console that never ends, halves of frames; its memory and its end. */
#include "unit.h"

#include "noded/roles.h"
#include "noded/vmm/plan.h"

#include "common/clock.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/guest.h"
#include "proto/role.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAIT_MS 30000
/* What the process may grow by: its buffers are below 20 MiB together, a sanitizer doubles that and keeps what was freed. */
#define GROWTH_MAX_KIB (300 * 1024)

struct rig {
	int broker, guest, qmp, console;
	pid_t pid;
	long start_kib;
	struct buf in; /* from the channel to the broker, not taken yet */
};

#define FDS 5

static void channel_child(const int theirs[FDS])
{
	int fds[FDS];

	for (int i = 0; i < FDS; i++)
		fds[i] = fcntl(theirs[i], F_DUPFD, 100);
	for (int i = 0; i < FDS; i++)
		dup2(fds[i], 3 + i);
	for (int i = 3 + FDS; i < 200; i++)
		close(i);
	_exit(channel_main());
}

static long memory_kib(const struct rig *r)
{
	char path[64], line[256];
	long kib = 0;
	FILE *f;

	assert_true(text_fmt(path, sizeof(path), "/proc/%d/status", (int)r->pid));
	f = fopen(path, "r");
	assert_non_null(f);
	while (fgets(line, sizeof(line), f) != NULL)
		if (strncmp(line, "VmRSS:", 6) == 0)
			kib = strtol(line + 6, NULL, 10);
	fclose(f);
	return kib;
}

static void start_as(struct rig *r, enum vmm_start kind)
{
	const struct vmm_plan how = { .kind = VMM_QEMU, .start = (uint8_t)kind, .ram_fd = -1, .state_fd = -1 };
	int pairs[3][2], console[2], plan;
	struct err e;

	*r = (struct rig){ .pid = -1 };
	buf_init(&r->in, 4 << 20);
	for (int i = 0; i < 3; i++)
		assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pairs[i]), 0);
	assert_int_equal(pipe2(console, O_CLOEXEC), 0);
	plan = vmm_plan_write(&how, &e);
	assert_true(plan >= 0);
	r->pid = fork();
	assert_true(r->pid >= 0);
	if (r->pid == 0)
		channel_child((const int[FDS]){ pairs[0][1], pairs[1][1], pairs[2][1], console[0], plan });
	for (int i = 0; i < 3; i++)
		close(pairs[i][1]);
	close(console[0]);
	close(plan);
	r->broker = pairs[0][0];
	r->guest = pairs[1][0];
	r->qmp = pairs[2][0];
	r->console = console[1];
	assert_int_equal(fcntl(r->guest, F_SETFL, O_NONBLOCK), 0);
	assert_int_equal(fcntl(r->console, F_SETFL, O_NONBLOCK), 0);
	r->start_kib = memory_kib(r);
}

static void start(struct rig *r)
{
	start_as(r, VMM_COLD);
}

/* The broker goes: so must the channel, with this status. */
static void finish(struct rig *r, int want)
{
	int status;

	close(r->qmp);
	close(r->broker);
	assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), want);
	close(r->guest);
	close(r->console);
	buf_free(&r->in);
}

static void to_channel(struct rig *r, uint8_t type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX + 16);

	wire_put_u32(&b, (uint32_t)n + 1);
	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	assert_int_equal(send(r->broker, b.data, b.len, MSG_NOSIGNAL), (ssize_t)b.len);
	buf_free(&b);
}

static bool readable(int fd, int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, ms) > 0;
}

/* Takes what the channel says to the broker without waiting; true when a frame of this type is among it. Its body goes to `body`.
 */
static bool said(struct rig *r, uint8_t type, struct buf *body)
{
	bool found = false;

	while (readable(r->broker, 0)) {
		uint8_t bytes[65536];
		ssize_t n = read(r->broker, bytes, sizeof(bytes));

		assert_true(n > 0);
		assert_true(buf_add(&r->in, bytes, (size_t)n));
		while (r->in.len >= 5) {
			const uint8_t *p = r->in.data;
			size_t len = (size_t)p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16;

			if (r->in.len < 4 + len)
				break;
			if (p[4] == type) {
				found = true;
				buf_reset(body);
				assert_true(buf_add(body, p + 5, len - 1));
			}
			buf_consume(&r->in, 4 + len);
		}
	}
	return found;
}

static void wait_said(struct rig *r, uint8_t type, struct buf *body)
{
	int64_t until = clock_mono_ns() / 1000000 + WAIT_MS;

	while (!said(r, type, body)) {
		assert_true(clock_mono_ns() / 1000000 < until);
		(void)readable(r->broker, 100);
	}
}

static void from_guest(struct rig *r, enum guest_frame type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(GUEST_FRAME_MAX + 16);

	guest_frame_put(&b, type, 0, body, n);
	assert_int_equal(send(r->guest, b.data, b.len, MSG_NOSIGNAL), (ssize_t)b.len);
	buf_free(&b);
}

static void to_work(struct rig *r)
{
	struct guest_setup_ack a = { .reseeded = true, .clock_set = true, .workdir = "/tmp/x", .boot_id = "b" };
	struct guest_hello h = { .nonce = { 7 }, .protocol = GUEST_PROTOCOL, .kernel = "k", .agent = "a" };
	struct buf b = BUF_INIT(4096);

	to_channel(r, RF_CH_PROBE, h.nonce, sizeof(h.nonce));
	assert_true(readable(r->guest, WAIT_MS));
	guest_hello_encode(&h, &b);
	from_guest(r, GF_HELLO, b.data, b.len);
	wait_said(r, RF_CB_HELLO, &b);
	to_channel(r, RF_CH_SETUP, "setup", 5);
	to_channel(r, RF_CH_FILES_END, NULL, 0);
	for (bool last = false; !last;) { /* the end of the files is the last frame of the setup */
		uint8_t bytes[4096];
		ssize_t n;

		assert_true(readable(r->guest, WAIT_MS));
		n = read(r->guest, bytes, sizeof(bytes));
		last = n > 0 && bytes[n - 1] == 1;
	}
	buf_reset(&b);
	guest_setup_ack_encode(&a, &b);
	from_guest(r, GF_SETUP_ACK, b.data, b.len);
	wait_said(r, RF_CB_SETUP_ACK, &b);
	buf_free(&b);
}

static void assert_says(struct buf *body, const char *text)
{
	struct wire_reader r;
	char what[513];
	struct err e;

	wire_read_init(&r, body->data, body->len);
	wire_str_fixed(&r, what, sizeof(what));
	assert_int_equal(wire_end(&r, "text", &e), 0);
	if (strstr(what, text) == NULL)
		fail_msg("\"%s\" does not say \"%s\"", what, text);
}

/* Sends `unit` over and over until the channel says that the protocol is broken, or `limit` bytes went. */
static size_t flood(struct rig *r, int fd, const void *unit, size_t n, size_t limit, struct buf *body)
{
	int64_t until = clock_mono_ns() / 1000000 + WAIT_MS;
	size_t sent = 0, at = 0;

	while (sent < limit && !said(r, RF_CB_PROTOCOL, body)) {
		ssize_t w = write(fd, (const uint8_t *)unit + at, n - at);

		if (w > 0) {
			sent += (size_t)w;
			at = (at + (size_t)w) % n;
		} else {
			struct pollfd p = { .fd = fd, .events = POLLOUT };

			assert_int_equal(errno, EAGAIN);
			(void)poll(&p, 1, 50);
		}
		assert_true(clock_mono_ns() / 1000000 < until);
	}
	return sent;
}

/* Every byte of a call earns thirteen of credit; a guest that never takes them is ended, before they become many. */
static void test_guest_never_reads(void **state)
{
	static const uint8_t one[10] = { 6, 0, 0, 0, GF_CALL_DATA, 1, 0, 0, 0, 1 }; /* stream 1, one byte */
	static uint8_t frames[sizeof(one) * 4096];
	struct buf body = BUF_INIT(4096);
	struct rig r;

	(void)state;
	for (size_t at = 0; at < sizeof(frames); at += sizeof(one))
		memcpy(frames + at, one, sizeof(one));
	start(&r);
	to_work(&r);
	assert_true(flood(&r, r.guest, frames, sizeof(frames), 64 << 20, &body) < 64 << 20);
	assert_says(&body, "does not read");
	assert_true(memory_kib(&r) - r.start_kib < GROWTH_MAX_KIB);
	finish(&r, 0);
	buf_free(&body);
}

/* A console without end costs its last bytes and nothing else; the channel goes on serving. */
static void test_console_without_end(void **state)
{
	static uint8_t text[65536];
	struct buf body = BUF_INIT(8192);
	struct rig r;

	(void)state;
	memset(text, 0x1b, sizeof(text));
	start(&r);
	assert_int_equal(flood(&r, r.console, text, sizeof(text), 64 << 20, &body), 64 << 20);
	assert_true(memory_kib(&r) - r.start_kib < GROWTH_MAX_KIB);
	to_work(&r);
	finish(&r, 0);
	buf_free(&body);
}

/* The first half of a frame is kept and waited for: it is the run's timeout that ends such a guest. What follows a breach is not
 * read. */
static void test_half_a_frame(void **state)
{
	static const uint8_t head[] = { 0xff, 0xff, 0, 0, GF_EVENT, 0, 0, 0, 0 };
	static uint8_t rest[65536];
	struct buf body = BUF_INIT(4096);
	struct rig r;

	(void)state;
	start(&r);
	to_work(&r);
	assert_int_equal(write(r.guest, head, sizeof(head)), sizeof(head));
	for (int i = 0; i < 100; i++)
		assert_int_equal(write(r.guest, "x", 1), 1);
	assert_false(readable(r.broker, 100));
	assert_true(flood(&r, r.guest, rest, sizeof(rest), 8 << 20, &body) < 8 << 20);
	assert_says(&body, "event");
	(void)flood(&r, r.guest, rest, sizeof(rest), 65536, &body);
	assert_false(said(&r, RF_CB_PROTOCOL, &body));
	finish(&r, 0);
	buf_free(&body);
}

/* Guests of noise: each ends with one word to the broker, never with a crash. */
static void test_noise(void **state)
{
	struct buf body = BUF_INIT(4096);
	static const uint8_t legal[4] = { 0x40, 0, 0, 0 };
	unsigned int seed = 7;

	(void)state;
	for (int i = 0; i < 40; i++) {
		uint8_t noise[512];
		struct rig r;

		start(&r);
		if (i % 2 == 0)
			to_work(&r);
		for (size_t n = 0; n < sizeof(noise); n++) {
			seed = seed * 1103515245U + 12345U;
			noise[n] = (uint8_t)(seed >> 16);
		}
		if (i % 4 < 2) /* a length that is legal, so that what is in the frame is looked at */
			memcpy(noise, legal, sizeof(legal));
		assert_int_equal(write(r.guest, noise, sizeof(noise)), sizeof(noise));
		wait_said(&r, RF_CB_PROTOCOL, &body);
		finish(&r, 0);
	}
	buf_free(&body);
}

/* A golden VM has keeper in its broker's place and nobody else, and a broker may die when keeper is gone: the channel ends the VM.
 */
static void test_whom_the_end_of_keeper_ends(void **state)
{
	static const enum vmm_start kinds[] = { VMM_COLD, VMM_GOLDEN };

	(void)state;
	for (size_t i = 0; i < COUNT(kinds); i++) {
		struct buf heard = BUF_INIT(4096);
		char bytes[512];
		struct rig r;
		int status;
		ssize_t n = 0;

		start_as(&r, kinds[i]);
		close(r.broker);
		while (!(heard.len > 0 && strstr(buf_cstr(&heard), "\"quit\"")) && (n = read(r.qmp, bytes, sizeof(bytes))) > 0)
			assert_true(buf_add(&heard, bytes, (size_t)n));
		assert_true(n > 0);
		close(r.qmp);
		assert_int_equal(waitpid(r.pid, &status, 0), r.pid);
		assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
		close(r.guest);
		close(r.console);
		buf_free(&r.in);
		buf_free(&heard);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_guest_never_reads),
		cmocka_unit_test(test_console_without_end),
		cmocka_unit_test(test_half_a_frame),
		cmocka_unit_test(test_noise),
		cmocka_unit_test(test_whom_the_end_of_keeper_ends),
	};

	(void)signal(SIGPIPE, SIG_IGN);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
