/*
 * The link's listener and the watchdog that proves that it takes connections. nng 1.5.2's accept loop can stop for good after a
 * broken connection (its TLS transport survived all that was tried, but the price of looking is small): every ten seconds the
 * watchdog connects, sends bytes that are no TLS, and waits to be refused. Two probes without an answer in a row and the listener
 * is replaced; its pipes end with it, and the nodes dial again. On the loop's thread; the one getaddrinfo is at start.
 */
#include "internal.h"

#include "common/clock.h"
#include "common/config.h"
#include "common/log.h"
#include "common/text.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <netdb.h>
#include <nng/supplemental/tls/tls.h>
#include <nng/transport/tls/tls.h>
#include <sys/socket.h>
#include <unistd.h>

#define PROBE_WAIT_S 5
#define PROBE_FAILURES 2

struct watchdog {
	struct dispatch *d;
	struct event *timer; /* next probe, or the end of this one */
	struct event *io;    /* NULL between probes */
	int fd;              /* -1 between probes */
	bool sent;
	int failures;
};

static int nng_err(struct err *e, const char *what, int rv)
{
	if (rv == NNG_EADDRINUSE)
		return err_set(e, ERR_CONFLICT, "the address is in use: another controld, or another program, listens there");
	if (rv == NNG_EADDRINVAL)
		return err_set(e, ERR_INVALID, "this machine has no such address");
	return err_set(e, ERR_INTERNAL, "%s: %s", what, nng_strerror(rv));
}

static int set_tls(struct dispatch *d, nng_listener l, struct err *e)
{
	nng_tls_config *tls;
	int rv = nng_tls_config_alloc(&tls, NNG_TLS_MODE_SERVER);

	if (rv != 0)
		return nng_err(e, "TLS", rv);
	rv = nng_tls_config_own_cert(tls, pki_server_pem(d->pki), pki_server_key(d->pki), NULL);
	if (rv == 0)
		rv = nng_listener_set_ptr(l, NNG_OPT_TLS_CONFIG, tls);
	nng_tls_config_free(tls); /* the listener holds its own reference */
	return rv == 0 ? 0 : nng_err(e, "TLS certificate", rv);
}

static int open_listener(struct dispatch *d, const char *url, struct err *e)
{
	nng_listener l;
	int rv = nng_listener_create(&l, d->socket, url);

	if (rv != 0)
		return nng_err(e, "listen", rv);
	if (set_tls(d, l, e) != 0) {
		nng_listener_close(l);
		return -1;
	}
	/* Room for nng's own header; what is longer closes its connection. */
	rv = nng_listener_set_size(l, NNG_OPT_RECVMAXSZ, LINK_MESSAGE_MAX + 64);
	if (rv == 0)
		rv = nng_listener_set_bool(l, NNG_OPT_TCP_KEEPALIVE, true);
	if (rv == 0)
		rv = nng_listener_start(l, 0);
	if (rv != 0) {
		nng_listener_close(l);
		return nng_err(e, "listen", rv);
	}
	d->listener = l;
	return 0;
}

static bool make_url(char out[400], const char *host, uint16_t port)
{
	bool v6 = strchr(host, ':') != NULL;

	return text_fmt(out, 400, "tls+tcp://%s%s%s:%u", v6 ? "[" : "", host[0] ? host : "*", v6 ? "]" : "", (unsigned)port);
}

int listener_start(struct dispatch *d, struct err *e)
{
	char host[256], url[400];
	int port = 0;

	if (config_addr(d->listen, host, sizeof(host), &d->port, e) != 0)
		return -1;
	if (!make_url(url, host, d->port))
		return err_set(e, ERR_LIMIT, "the address is too long");
	if (nng_socket_set_size(d->socket, NNG_OPT_RECVMAXSZ, LINK_MESSAGE_MAX + 64) != 0)
		return err_set(e, ERR_INTERNAL, "the bound of a message could not be set");
	if (open_listener(d, url, e) != 0)
		return -1;
	if (nng_listener_get_int(d->listener, NNG_OPT_TCP_BOUND_PORT, &port) == 0 && port > 0 && port <= UINT16_MAX)
		d->port = (uint16_t)port;
	if (d->port == 0)
		return err_set(e, ERR_INTERNAL, "the port that was bound is not known; name one");
	if (!text_fmt(d->address, sizeof(d->address), strchr(host, ':') ? "[%s]:%u" : "%s:%u", host[0] ? host : "0.0.0.0",
			    (unsigned)d->port))
		return err_set(e, ERR_LIMIT, "the address is too long");
	return 0;
}

/* --- the watchdog ---------------------------------------------------------------------------------------------------------- */

static void relisten(struct dispatch *d)
{
	char host[256], url[400];
	uint16_t ignored;
	struct err e;

	d->listener_down = true;
	nng_listener_close(d->listener);
	if (config_addr(d->listen, host, sizeof(host), &ignored, &e) != 0 || !make_url(url, host, d->port))
		return;
	if (open_listener(d, url, &e) != 0) {
		log_error("node link could not listen again address=%s reason=\"%s\"", d->address, e.text);
		return;
	}
	log_warn("node link listens again: it had stopped taking connections address=%s", d->address);
}

static struct timeval probe_pause(const struct dispatch *d)
{
	return (struct timeval){ .tv_sec = d->probe_ms / 1000, .tv_usec = d->probe_ms % 1000 * 1000 };
}

static void probe_over(struct watchdog *w, bool alive)
{
	struct timeval pause = probe_pause(w->d);

	if (w->io)
		event_free(w->io);
	w->io = NULL;
	if (w->fd >= 0)
		close(w->fd);
	w->fd = -1;
	if (alive) {
		w->failures = 0;
		w->d->listener_down = false;
	} else if (++w->failures >= PROBE_FAILURES) {
		w->failures = 0;
		relisten(w->d);
	}
	event_add(w->timer, &pause);
}

/* Writable first, then readable: an alert, an end or a reset all mean that somebody took the connection and looked at the bytes. */
static void on_probe_io(evutil_socket_t fd, short what, void *arg)
{
	static const char junk[] = "not TLS: is anybody there?\r\n\r\n";
	struct watchdog *w = arg;
	char answer[64];
	int fault = 0;
	socklen_t len = sizeof(fault);

	(void)what;
	if (w->sent) {
		ssize_t n = recv(fd, answer, sizeof(answer), MSG_DONTWAIT);

		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		probe_over(w, true);
		return;
	}
	if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &fault, &len) != 0 || fault != 0 ||
			send(fd, junk, sizeof(junk) - 1, MSG_NOSIGNAL) < 0) {
		probe_over(w, false);
		return;
	}
	w->sent = true;
	event_del(w->io);
	event_assign(w->io, w->d->base, fd, EV_READ | EV_PERSIST, on_probe_io, w);
	event_add(w->io, NULL);
}

static void on_watchdog_timer(evutil_socket_t fd, short what, void *arg)
{
	struct watchdog *w = arg;
	struct timeval limit = { .tv_sec = PROBE_WAIT_S };

	(void)fd;
	(void)what;
	if (w->fd >= 0) {
		log_warn("node link did not answer a probe address=%s", w->d->address);
		probe_over(w, false);
		return;
	}
	w->sent = false;
	w->fd = socket(w->d->bound.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (w->fd < 0 || (connect(w->fd, (struct sockaddr *)&w->d->bound, w->d->bound_len) != 0 && errno != EINPROGRESS)) {
		/* Out of descriptors is not the listener's fault. */
		probe_over(w, w->fd < 0);
		return;
	}
	w->io = event_new(w->d->base, w->fd, EV_WRITE, on_probe_io, w);
	if (!w->io || event_add(w->io, NULL) != 0 || event_add(w->timer, &limit) != 0)
		probe_over(w, true);
}

/* Where to knock: the bound address, or loopback when all are bound. */
static int resolve(struct watchdog *w, struct err *e)
{
	struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM }, *found = NULL;
	char host[256], port[8];
	uint16_t ignored;
	int rv;

	if (config_addr(w->d->listen, host, sizeof(host), &ignored, e) != 0)
		return -1;
	if (!text_fmt(port, sizeof(port), "%u", (unsigned)w->d->port))
		return err_set(e, ERR_INTERNAL, "port");
	w->d->bound_any = host[0] == '\0' || strcmp(host, "*") == 0 || strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0;
	if (w->d->bound_any)
		(void)!text_copy(host, sizeof(host), strcmp(host, "::") == 0 ? "::1" : "127.0.0.1");
	rv = getaddrinfo(host, port, &hints, &found);
	if (rv != 0)
		return err_set(e, ERR_INVALID, "%s: %s", host, gai_strerror(rv));
	memcpy(&w->d->bound, found->ai_addr, found->ai_addrlen);
	w->d->bound_len = found->ai_addrlen;
	freeaddrinfo(found);
	return 0;
}

int watchdog_start(struct dispatch *d, struct err *e)
{
	struct watchdog *w = calloc(1, sizeof(*w));
	struct timeval first = probe_pause(d);

	if (!w)
		return err_set(e, ERR_NOMEM, "no memory for the link's watchdog");
	w->d = d;
	w->fd = -1;
	d->watchdog = w;
	if (resolve(w, e) != 0)
		return -1;
	w->timer = evtimer_new(d->base, on_watchdog_timer, w);
	if (!w->timer || event_add(w->timer, &first) != 0)
		return err_set(e, ERR_NOMEM, "no memory for the link's watchdog");
	return 0;
}

void watchdog_stop(struct dispatch *d)
{
	struct watchdog *w = d->watchdog;

	if (!w)
		return;
	if (w->timer)
		event_free(w->timer);
	if (w->io)
		event_free(w->io);
	if (w->fd >= 0)
		close(w->fd);
	free(w);
	d->watchdog = NULL;
}
