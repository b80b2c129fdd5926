/*
 * The HTTP server: sets evhttp up with every bound it knows, binds the listener, and hands whole, sane requests to the handler.
 * The rest is in httpd_conn.c (connections), httpd_req.c (requests) and httpd_scan.c (framing). One loop, one thread. Binding
 * (netlisten.c) may look a host name up and so block; do it at start.
 */
#include "httpd.h"

#include "config.h"
#include "httpd_internal.h"
#include "log.h"
#include "netlisten.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG 1024
#define FDS_MAX 65536 /* connections above this descriptor number are not served */
#define SWEEP_MS 100

/* Every request that evhttp took for whole. */
static void on_request(struct evhttp_request *ev, void *arg)
{
	struct httpd *h = arg;
	struct http_conn *c = http_conn_find(h, evhttp_connection_get_bufferevent(evhttp_request_get_connection(ev)));
	const char *problem;
	struct http_req *r;

	if (!c) { /* no memory when it was accepted, or a descriptor beyond FDS_MAX: its bytes were not checked */
		evhttp_send_error(ev, 503, "Service Unavailable");
		return;
	}
	http_conn_attach(c, ev);
	if (http_req_make(c, ev, &r, &problem) != 0) {
		c->kill = true;
		http_conn_todo(c);
		return;
	}
	c->req = r;
	if (c->handled > c->scan.done) /* evhttp sees a request where the strict reading sees none */
		http_req_refuse(h, r, c->scan.status ? c->scan.status : 400, c->scan.detail ? c->scan.detail : "malformed request");
	else if (problem)
		http_req_refuse(h, r, 400, problem);
	else
		h->opt.handler(h->opt.arg, r);
}

static void on_sweep(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	http_conn_sweep(arg);
}

static void on_later(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	http_conn_work(arg);
}

/* The servers of this thread: all that an accept that fails tells is which evhttp it was for. */
static _Thread_local struct httpd *servers;

/* Out of descriptors: the listener would be called again at once, for ever. The sweep wakes it. */
static void on_accept_error(struct evconnlistener *listener, void *arg)
{
	int reason = errno;
	struct httpd *h;

	evconnlistener_disable(listener);
	for (h = servers; h && (void *)h->http != arg; h = h->next)
		continue;
	check_warn(h != NULL);
	if (!h)
		return;
	if (!h->full)
		log_warn("http accept failed connections=%d reason=%s", h->count, strerror(reason));
	h->full = true;
}

static struct timeval interval(int ms)
{
	return (struct timeval){ .tv_sec = ms / 1000, .tv_usec = (ms % 1000) * 1000 };
}

static int set_up(struct httpd *h, struct err *e)
{
	struct timeval idle = interval(h->opt.idle_timeout_ms), tick = interval(SWEEP_MS);
	struct rlimit limit = { .rlim_cur = 1024 };

	getrlimit(RLIMIT_NOFILE, &limit);
	h->by_fd_size = limit.rlim_cur < FDS_MAX ? (size_t)limit.rlim_cur : FDS_MAX;
	h->by_fd = calloc(h->by_fd_size, sizeof(*h->by_fd));
	h->http = evhttp_new(h->base);
	h->sweep = event_new(h->base, -1, EV_PERSIST, on_sweep, h);
	h->later = event_new(h->base, -1, 0, on_later, h);
	if (!h->by_fd || !h->http || !h->sweep || !h->later || event_add(h->sweep, &tick) != 0)
		return err_set(e, ERR_NOMEM, "http: no memory");
	evhttp_set_gencb(h->http, on_request, h);
	evhttp_set_bevcb(h->http, http_conn_make, h);
	evhttp_set_allowed_methods(h->http, EVHTTP_REQ_GET | EVHTTP_REQ_POST | EVHTTP_REQ_PUT | EVHTTP_REQ_PATCH |
							    EVHTTP_REQ_DELETE | EVHTTP_REQ_HEAD | EVHTTP_REQ_OPTIONS);
	evhttp_set_max_headers_size(h->http, (ev_ssize_t)h->opt.max_headers);
	evhttp_set_max_body_size(h->http, (ev_ssize_t)h->opt.max_body);
	evhttp_set_timeout_tv(h->http, &idle);
	evhttp_set_default_content_type(h->http, NULL);
	return 0;
}

static int listening(const struct httpd_options *opt, int *fd, uint16_t *port, struct err *e)
{
	if (opt->listen_fd <= 0)
		return net_listen(opt->listen, fd, port, e);
	*fd = opt->listen_fd;
	if (net_listen_port(*fd, port, e) == 0)
		return 0;
	close(*fd);
	return -1;
}

int httpd_new(struct event_base *base, const struct httpd_options *opt, struct httpd **out, struct err *e)
{
	struct httpd *h;
	uint16_t port;
	int fd = -1;

	*out = NULL;
	if (listening(opt, &fd, &port, e) != 0)
		return -1;
	h = calloc(1, sizeof(*h));
	if (!h) {
		close(fd);
		return err_set(e, ERR_NOMEM, "http: no memory");
	}
	h->port = port;
	h->next = servers;
	servers = h;
	h->base = base;
	h->opt = *opt;
	if (set_up(h, e) != 0) {
		close(fd);
		httpd_free(h);
		return -1;
	}
	h->listener = evconnlistener_new(base, NULL, NULL, LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC, BACKLOG, fd);
	if (h->listener)
		h->bound = evhttp_bind_listener(h->http, h->listener);
	if (!h->bound) {
		err_set_errno(e, "listen %s", opt->listen);
		if (h->listener)
			evconnlistener_free(h->listener);
		else
			close(fd);
		httpd_free(h);
		return -1;
	}
	evconnlistener_set_error_cb(h->listener, on_accept_error);
	*out = h;
	return 0;
}

uint16_t httpd_port(const struct httpd *h)
{
	return h->port;
}

int httpd_connections(const struct httpd *h)
{
	return h->count;
}

int httpd_sending(const struct httpd *h)
{
	const struct http_conn *c;
	int n = 0;

	for (c = h->conns; c; c = c->next)
		n += c->req != NULL || c->ev != NULL || evbuffer_get_length(bufferevent_get_output(c->bev)) > 0;
	return n;
}

size_t httpd_bytes_held(const struct httpd *h)
{
	return h->held;
}

void httpd_stop_accepting(struct httpd *h)
{
	if (h->bound)
		evhttp_del_accept_socket(h->http, h->bound);
	h->bound = NULL;
	h->listener = NULL;
}

void httpd_free(struct httpd *h)
{
	struct httpd **at;

	if (!h)
		return;
	for (at = &servers; *at && *at != h; at = &(*at)->next)
		continue;
	if (*at)
		*at = h->next;
	if (h->http)
		evhttp_free(h->http);
	h->http = NULL;
	h->bound = NULL;
	h->listener = NULL;
	while (h->conns)
		http_conn_release(h->conns);
	if (h->sweep)
		event_free(h->sweep);
	if (h->later)
		event_free(h->later);
	free(h->by_fd);
	free(h);
}
