/* Waiting on an event loop, and a client that sends raw bytes to a server on the same loop. Include after unit.h. */
#ifndef EPH_UNIT_LOOP_H
#define EPH_UNIT_LOOP_H

#include "clock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

static inline void loop_tick(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	(void)arg;
}

/* Runs the loop until cond(arg), at most ms. False when the time is up. */
static inline bool loop_until(struct event_base *base, bool (*cond)(void *), void *arg, int ms)
{
	int64_t until = clock_mono_ns() / 1000000 + ms;
	struct event *tick = event_new(base, -1, EV_PERSIST, loop_tick, NULL);
	struct timeval tv = { 0, 2000 };
	bool met;

	event_add(tick, &tv); /* so that a turn ends although nothing else happens */
	while (!(met = cond(arg)) && clock_mono_ns() / 1000000 < until)
		event_base_loop(base, EVLOOP_ONCE);
	event_free(tick);
	return met;
}

struct raw_client {
	int fd;
	const char *send; /* left to send */
	size_t left;
	char got[1 << 20];
	size_t n;
	bool ended;       /* the server closed */
	const char *want; /* stop when this stands in got */
	bool half_close;  /* shut the sending side when all is sent */
};

static inline void raw_open(struct raw_client *c, uint16_t port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	memset(c, 0, sizeof(*c));
	c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_true(c->fd >= 0);
	assert_int_equal(connect(c->fd, (struct sockaddr *)&a, sizeof(a)), 0);
	assert_int_equal(fcntl(c->fd, F_SETFL, O_NONBLOCK), 0);
}

/* One step: sends and receives what can be had at once. True when the wished end is there. */
static inline bool raw_step(void *arg)
{
	struct raw_client *c = arg;
	ssize_t n;

	if (c->left > 0) {
		n = send(c->fd, c->send, c->left, MSG_NOSIGNAL);
		if (n > 0) {
			c->send += n;
			c->left -= (size_t)n;
			if (c->left == 0 && c->half_close)
				shutdown(c->fd, SHUT_WR);
		} else if (errno != EAGAIN) {
			c->left = 0;
		}
	}
	while (!c->ended && c->n < sizeof(c->got) - 1) {
		n = recv(c->fd, c->got + c->n, sizeof(c->got) - 1 - c->n, 0);
		if (n < 0 && errno == EAGAIN)
			break;
		if (n <= 0)
			c->ended = true;
		else
			c->n += (size_t)n;
	}
	c->got[c->n] = '\0';
	return c->ended || (c->want && strstr(c->got, c->want) != NULL);
}

/* Sends n bytes and waits until `want` came (NULL: until the server closed). */
static inline bool raw_talk(struct event_base *base, struct raw_client *c, const char *bytes, size_t n, const char *want, int ms)
{
	c->send = bytes;
	c->left = n;
	c->want = want;
	return loop_until(base, raw_step, c, ms);
}

#endif
