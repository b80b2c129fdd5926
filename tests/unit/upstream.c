/* The provider of upstream.h. Owns its listener and its connections; all on the loop, nothing blocks. */
#include "upstream.h"

#include <arpa/inet.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/bufferevent_ssl.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>

#define FLOOD_STEP (256 * 1024)

struct conn {
	struct upstream *u;
	struct bufferevent *bev;
	struct answer answer;
	bool answering, dropping; /* dropping: what still comes of the request does not matter */
	size_t sent;              /* of a trickle */
	size_t flooded;
	int requests;
	struct event *timer;
	LIST_ENTRY(conn) entry;
};

struct upstream {
	struct upstream_options opt;
	struct evconnlistener *listener;
	struct upstream_counts counts;
	LIST_HEAD(, conn) conns;
};

static void conn_free(struct conn *c)
{
	LIST_REMOVE(c, entry);
	c->u->counts.open--;
	event_free(c->timer);
	bufferevent_free(c->bev);
	free(c);
}

static void conn_reset(struct conn *c)
{
	struct linger none = { .l_onoff = 1, .l_linger = 0 };

	(void)setsockopt(bufferevent_getfd(c->bev), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
	conn_free(c);
}

static void on_read(struct bufferevent *bev, void *arg);

static void wait_ms(struct conn *c, int ms)
{
	struct timeval tv = { ms / 1000, ms % 1000 * 1000 };

	event_add(c->timer, &tv);
}

/* Everything that was to be said is in the output buffer and that is empty. */
static void answered(struct conn *c)
{
	switch (c->answer.after) {
	case AFTER_CLOSE: conn_free(c); return;
	case AFTER_RESET: conn_reset(c); return;
	case AFTER_HANG: return;
	case AFTER_KEEP: break;
	}
	c->answering = false;
	on_read(c->bev, c);
}

static void go_on(struct conn *c)
{
	size_t n = c->answer.n;

	if (c->sent < n && c->answer.trickle_ms > 0) {
		bufferevent_write(c->bev, c->answer.bytes + c->sent++, 1);
		wait_ms(c, c->answer.trickle_ms);
		return;
	}
	if (c->sent < n) {
		bufferevent_write(c->bev, c->answer.bytes, n);
		c->sent = n;
		return; /* on_written comes back here */
	}
	if (c->flooded < c->answer.flood_total) {
		size_t unit = strlen(c->answer.flood);

		for (size_t step = 0; step < FLOOD_STEP && c->flooded < c->answer.flood_total; step += unit) {
			bufferevent_write(c->bev, c->answer.flood, unit);
			c->flooded += unit;
		}
		c->u->counts.flooded = c->flooded;
		return;
	}
	answered(c);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	go_on(arg);
}

static void on_written(struct bufferevent *bev, void *arg)
{
	struct conn *c = arg;

	if (c->answering && evbuffer_get_length(bufferevent_get_output(bev)) == 0 && !event_pending(c->timer, EV_TIMEOUT, NULL))
		go_on(c);
}

static void note_auth(struct upstream *u, const char *head)
{
	const char *auth = strcasestr(head, "\r\nAuthorization: ");
	const char *end = auth ? strstr(auth + 2, "\r\n") : NULL;

	u->counts.last_auth[0] = '\0';
	if (end)
		snprintf(u->counts.last_auth, sizeof(u->counts.last_auth), "%.*s", (int)(end - auth - 2), auth + 2);
}

static void decide(struct conn *c, const char *head, const char *body, size_t body_len)
{
	struct upstream *u = c->u;
	struct asked q = { head, body, body_len, ++u->counts.requests, ++c->requests };

	note_auth(u, head);
	c->answer = (struct answer){ .after = AFTER_CLOSE };
	if (!u->opt.decide(u->opt.arg, &q, &c->answer)) {
		conn_free(c);
		return;
	}
	if (c->answer.n == 0 && c->answer.bytes)
		c->answer.n = strlen(c->answer.bytes);
	c->answering = true;
	c->sent = c->flooded = 0;
	go_on(c);
}

static void on_read(struct bufferevent *bev, void *arg)
{
	struct conn *c = arg;
	struct evbuffer *in = bufferevent_get_input(bev);
	struct evbuffer_ptr end;
	size_t head_len, want = 0, have = evbuffer_get_length(in);
	char *head, *body;
	const char *length;

	if (c->dropping || c->answering) {
		if (c->dropping) {
			c->u->counts.read += have;
			evbuffer_drain(in, have);
		}
		return;
	}
	end = evbuffer_search(in, "\r\n\r\n", 4, NULL);
	if (end.pos < 0)
		return;
	head_len = (size_t)end.pos + 4;
	head = calloc(1, head_len + 1);
	evbuffer_copyout(in, head, head_len);
	length = strcasestr(head, "\r\nContent-Length: ");
	want = length ? strtoul(length + 18, NULL, 10) : 0;
	if (c->u->opt.at_head && have < head_len + want) {
		c->dropping = true;
		decide(c, head, "", 0);
	} else if (have >= head_len + want) {
		body = calloc(1, want + 1);
		evbuffer_drain(in, head_len);
		evbuffer_remove(in, body, want);
		c->u->counts.read += head_len + want;
		c->u->counts.bodies++;
		decide(c, head, body, want);
		free(body);
	}
	free(head);
}

static void on_event(struct bufferevent *bev, short what, void *arg)
{
	(void)bev;
	if (what & (BEV_EVENT_EOF | BEV_EVENT_ERROR))
		conn_free(arg);
}

static void on_accept(struct evconnlistener *l, evutil_socket_t fd, struct sockaddr *sa, int n, void *arg)
{
	struct upstream *u = arg;
	struct conn *c = calloc(1, sizeof(*c));

	(void)l;
	(void)sa;
	(void)n;
	c->u = u;
	c->timer = evtimer_new(u->opt.base, on_timer, c);
	if (u->opt.tls)
		c->bev = bufferevent_openssl_socket_new(
				u->opt.base, fd, SSL_new(u->opt.tls), BUFFEREVENT_SSL_ACCEPTING, BEV_OPT_CLOSE_ON_FREE);
	else
		c->bev = bufferevent_socket_new(u->opt.base, fd, BEV_OPT_CLOSE_ON_FREE);
	u->counts.connections++;
	u->counts.open++;
	LIST_INSERT_HEAD(&u->conns, c, entry);
	bufferevent_setcb(c->bev, on_read, on_written, on_event, c);
	bufferevent_enable(c->bev, EV_READ | EV_WRITE);
}

struct upstream *upstream_new(const struct upstream_options *opt)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct upstream *u = calloc(1, sizeof(*u));

	u->opt = *opt;
	LIST_INIT(&u->conns);
	u->listener = evconnlistener_new_bind(opt->base, on_accept, u, LEV_OPT_CLOSE_ON_FREE, 64, (struct sockaddr *)&a, sizeof(a));
	if (!u->listener)
		abort();
	return u;
}

int upstream_port(const struct upstream *u)
{
	struct sockaddr_in a;
	socklen_t len = sizeof(a);

	getsockname(evconnlistener_get_fd(u->listener), (struct sockaddr *)&a, &len);
	return ntohs(a.sin_port);
}

struct upstream_counts *upstream_counts(struct upstream *u)
{
	return &u->counts;
}

void upstream_close_idle(struct upstream *u, bool reset)
{
	struct conn *next;

	for (struct conn *c = LIST_FIRST(&u->conns); c; c = next) {
		next = LIST_NEXT(c, entry);
		if (c->answering)
			continue;
		if (reset)
			conn_reset(c);
		else
			conn_free(c);
	}
}

void upstream_free(struct upstream *u)
{
	if (!u)
		return;
	while (!LIST_EMPTY(&u->conns))
		conn_free(LIST_FIRST(&u->conns));
	evconnlistener_free(u->listener);
	free(u);
}

struct ssl_ctx_st *upstream_self_signed(void)
{
	SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
	EVP_PKEY *key = EVP_EC_gen("P-256");
	X509 *x = X509_new();

	X509_gmtime_adj(X509_getm_notBefore(x), -86400);
	X509_gmtime_adj(X509_getm_notAfter(x), 86400);
	X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC, (const unsigned char *)"127.0.0.1", -1, -1, 0);
	X509_set_issuer_name(x, X509_get_subject_name(x));
	X509_set_pubkey(x, key);
	if (X509_sign(x, key, EVP_sha256()) <= 0 || SSL_CTX_use_certificate(ctx, x) != 1 || SSL_CTX_use_PrivateKey(ctx, key) != 1)
		abort();
	X509_free(x);
	EVP_PKEY_free(key);
	return ctx;
}
