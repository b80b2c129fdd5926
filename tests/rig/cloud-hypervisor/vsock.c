/*
 * The hybrid vsock (vsock.h). Owns its listener, what has connected there, and the one connection of the guest with what is under
 * way in it. Nothing blocks: a full backlog at the host's end is a refused connection here (the real one stalls).
 */
#include "vsock.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CLIENTS_MAX 8
#define LINE_MAX_BYTES 32 /* CONNECT and its newline */
#define FLOW_BYTES 65536

/* Bytes that go one way. */
struct flow {
	uint8_t bytes[FLOW_BYTES];
	size_t len;
	bool ended; /* no more come */
};

static struct {
	char path[108];
	int listener, host; /* host: the far end of the guest's connection */
	struct {
		int fd;
		char line[LINE_MAX_BYTES];
		size_t len;
	} clients[CLIENTS_MAX];
	struct flow up, down; /* guest to host, host to guest */
} v = { .listener = -1, .host = -1 };

int vsock_open(const char *path, struct err *e)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };

	for (size_t i = 0; i < CLIENTS_MAX; i++)
		v.clients[i].fd = -1;
	if (!text_copy(v.path, sizeof(v.path), path) || !text_copy(at.sun_path, sizeof(at.sun_path), path))
		return err_set(e, ERR_INVALID, "%s is too long for a socket", path);
	v.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (v.listener >= 0 && bind(v.listener, (struct sockaddr *)&at, sizeof(at)) == 0 && listen(v.listener, 128) == 0)
		return 0;
	err_set_errno(e, "vsock %s", path);
	if (v.listener >= 0)
		close(v.listener);
	v.listener = -1;
	return -1;
}

static void close_one(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

void vsock_end_connections(void)
{
	close_one(&v.host);
	v.up.len = v.down.len = 0;
	v.up.ended = v.down.ended = false;
}

void vsock_close(void)
{
	vsock_end_connections();
	if (v.listener < 0)
		return;
	for (size_t i = 0; i < CLIENTS_MAX; i++)
		close_one(&v.clients[i].fd);
	close_one(&v.listener);
	unlink(v.path);
}

/* Takes what there is, if there is room for it. */
static void fill(struct flow *f, int fd)
{
	ssize_t n;

	if (f->len == FLOW_BYTES)
		return;
	n = read(fd, f->bytes + f->len, FLOW_BYTES - f->len);
	if (n > 0)
		f->len += (size_t)n;
	else if (n == 0 || (errno != EAGAIN && errno != EINTR))
		f->ended = true;
}

/* -1: the far end is gone. */
static int drain(struct flow *f, int fd)
{
	ssize_t n = f->len > 0 ? send(fd, f->bytes, f->len, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;

	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	f->len -= (size_t)n;
	memmove(f->bytes, f->bytes + n, f->len);
	return 0;
}

/* --- from the guest ------------------------------------------------------------------------------------------------------------
 */

void vsock_guest(struct machine *m, uint32_t port, bool open)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };

	if (!open) {
		/* What it wrote before comes first. */
		if (v.host >= 0 && machine_guest_fd(m) >= 0)
			fill(&v.up, machine_guest_fd(m));
		v.up.ended = true;
		return;
	}
	vsock_end_connections();
	if (port > 0 && text_fmt(to.sun_path, sizeof(to.sun_path), "%s_%u", v.path, port)) {
		v.host = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		if (v.host >= 0 && connect(v.host, (struct sockaddr *)&to, sizeof(to)) == 0)
			return;
		fprintf(stderr, "stand-in: vsock %s: %s\n", to.sun_path, strerror(errno));
	}
	/* Nobody listens: the guest sees its connection end. */
	close_one(&v.host);
	machine_guest_close(m);
}

static void pump(struct machine *m)
{
	int guest = machine_guest_fd(m);

	if (v.host < 0 || guest < 0)
		return;
	fill(&v.up, guest);
	fill(&v.down, v.host);
	if (drain(&v.up, v.host))
		v.down.ended = true;
	if (drain(&v.down, guest))
		v.up.ended = true;
	if (v.down.ended && v.down.len == 0) {
		/* The host hung up: the guest's process sees the end of its port. */
		machine_guest_close(m);
		vsock_end_connections();
	} else if (v.up.ended && v.up.len == 0) {
		vsock_end_connections();
	}
}

/* --- from the host -------------------------------------------------------------------------------------------------------------
 */

static void on_client(void)
{
	int fd = accept4(v.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	for (size_t i = 0; fd >= 0 && i < CLIENTS_MAX; i++)
		if (v.clients[i].fd < 0) {
			v.clients[i].fd = fd;
			v.clients[i].len = 0;
			return;
		}
	if (fd >= 0)
		close(fd);
}

/* `CONNECT <port>`, byte by byte. Nothing in these guests listens, so that a good line and a bad one have the same answer: the end.
 */
static void on_line(size_t i)
{
	char c;
	ssize_t n = read(v.clients[i].fd, &c, 1);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n == 1 && c != '\n' && v.clients[i].len + 1 < LINE_MAX_BYTES) {
		v.clients[i].line[v.clients[i].len++] = c;
		return;
	}
	close_one(&v.clients[i].fd);
}

/* --- loop ----------------------------------------------------------------------------------------------------------------------
 */

size_t vsock_poll(struct machine *m, struct pollfd *out)
{
	int guest = m ? machine_guest_fd(m) : -1;
	size_t n = 0;

	if (v.listener < 0)
		return 0;
	out[n++] = (struct pollfd){ .fd = v.listener, .events = POLLIN };
	for (size_t i = 0; i < CLIENTS_MAX; i++)
		if (v.clients[i].fd >= 0)
			out[n++] = (struct pollfd){ .fd = v.clients[i].fd, .events = POLLIN };
	if (v.host >= 0 && guest >= 0) {
		short host = (short)((v.down.len < FLOW_BYTES && !v.down.ended ? POLLIN : 0) | (v.up.len > 0 ? POLLOUT : 0));
		short near = (short)((v.up.len < FLOW_BYTES && !v.up.ended ? POLLIN : 0) | (v.down.len > 0 ? POLLOUT : 0));

		/* A hang-up shows without being asked for: who waits for nothing is not looked at. */
		out[n++] = (struct pollfd){ .fd = host ? v.host : -1, .events = host };
		out[n++] = (struct pollfd){ .fd = near ? guest : -1, .events = near };
	}
	return n;
}

void vsock_ready(struct machine *m, const struct pollfd *fds, size_t n)
{
	bool flows = v.up.ended;

	for (size_t i = 0; i < n; i++) {
		if (fds[i].fd < 0 || fds[i].revents == 0)
			continue;
		if (fds[i].fd == v.listener) {
			on_client();
			continue;
		}
		flows = flows || fds[i].fd == v.host || (m && fds[i].fd == machine_guest_fd(m));
		for (size_t k = 0; k < CLIENTS_MAX; k++)
			if (v.clients[k].fd >= 0 && v.clients[k].fd == fds[i].fd)
				on_line(k);
	}
	if (flows && m)
		pump(m);
}
