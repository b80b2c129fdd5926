/*
 * Connections of httpd: what evhttp does not watch. Every byte goes through the strict scanner and the memory account before
 * evhttp sees it; the time of a request is bounded; what breaks a rule is answered here and closed. Loop thread, never blocks.
 *
 * evhttp owns its connection object and frees it when it likes. So we hold a reference of our own to the bufferevent: it stays
 * valid, and its missing callbacks tell that evhttp let go of it (the close callback tells sooner, once there was a request).
 */
#include "httpd_internal.h"

#include "clock.h"
#include "log.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define LINGER_MS 2000   /* after our last answer, for the client to read it */
#define REPLY_MS 300000  /* the longest that sending one reply may take */
#define READ_SLACK 65536 /* above the largest request: one read */

static int64_t now_ms(void)
{
	return clock_mono_ns() / 1000000;
}

static void account(struct http_conn *c, size_t held)
{
	c->h->held += held - c->held; /* unsigned on purpose: the difference may be negative */
	c->held = held;
}

void http_conn_todo(struct http_conn *c)
{
	if (c->todo)
		return;
	c->todo = true;
	c->next_todo = c->h->todo;
	c->h->todo = c;
	event_active(c->h->later, EV_TIMEOUT, 0);
}

static void set_timeouts(struct http_conn *c, int read_ms, int write_ms)
{
	struct timeval rd = { .tv_sec = read_ms / 1000, .tv_usec = (read_ms % 1000) * 1000 };
	struct timeval wr = { .tv_sec = write_ms / 1000, .tv_usec = (write_ms % 1000) * 1000 };

	bufferevent_set_timeouts(c->bev, read_ms > 0 ? &rd : NULL, write_ms > 0 ? &wr : NULL);
}

/* --- condemned connections ---------------------------------------------------------------------------------------------- */

static void discard(struct bufferevent *bev, void *arg)
{
	(void)arg;
	evbuffer_drain(bufferevent_get_input(bev), evbuffer_get_length(bufferevent_get_input(bev)));
}

static void condemned_event(struct bufferevent *bev, short what, void *arg);

/*
 * True while the connection is ours. A read that evhttp had put off before may still run, and then evhttp answers in its own
 * words and takes the callbacks back: the connection is left to it, with its timeouts.
 */
static bool still_ours(struct http_conn *c)
{
	bufferevent_data_cb rd, wr;
	bufferevent_event_cb event;
	void *arg;

	bufferevent_getcb(c->bev, &rd, &wr, &event, &arg);
	if (event == condemned_event)
		return true;
	c->state = event ? CONN_LAST : CONN_GONE;
	set_timeouts(c, c->h->opt.idle_timeout_ms, c->h->opt.idle_timeout_ms);
	if (!event)
		http_conn_todo(c);
	return false;
}

/* Gives evhttp its callbacks back and tells it of an error, so that it frees its side. */
static void end_condemned(struct http_conn *c)
{
	bufferevent_data_cb rd, wr;
	bufferevent_event_cb event;
	void *arg;

	if (c->state != CONN_CONDEMNED || !still_ours(c))
		return;
	c->state = CONN_GONE;
	bufferevent_setcb(c->bev, c->evhttp.read, c->evhttp.write, c->evhttp.event, c->evhttp.arg);
	c->evhttp.event(c->bev, BEV_EVENT_READING | BEV_EVENT_ERROR, c->evhttp.arg);
	bufferevent_getcb(c->bev, &rd, &wr, &event, &arg);
	check_warn(event == NULL);
	http_conn_todo(c);
}

static void condemned_written(struct bufferevent *bev, void *arg)
{
	struct http_conn *c = arg;

	if (evbuffer_get_length(bufferevent_get_output(bev)) == 0 && c->condemned_ms != 0)
		shutdown(bufferevent_getfd(bev), SHUT_WR); /* what the client still sends is read and dropped for a moment */
}

static void condemned_event(struct bufferevent *bev, short what, void *arg)
{
	(void)bev;
	(void)what;
	end_condemned(arg);
}

/* Takes the connection away from evhttp. May be called below evhttp's own read: so it only changes callbacks here. */
static void condemn(struct http_conn *c, int status, const char *detail)
{
	c->state = CONN_CONDEMNED;
	c->scan.status = status;
	c->scan.detail = detail;
	bufferevent_getcb(c->bev, &c->evhttp.read, &c->evhttp.write, &c->evhttp.event, &c->evhttp.arg);
	bufferevent_setcb(c->bev, discard, condemned_written, condemned_event, c);
	http_conn_todo(c);
}

/* From the loop: our answer, then a short wait for the client to read it. */
static void answer_condemned(struct http_conn *c)
{
	struct http_req *r;

	if (!still_ours(c))
		return;
	r = calloc(1, sizeof(*r));
	account(c, 0);
	c->condemned_ms = now_ms();
	set_timeouts(c, 0, 0);
	discard(c->bev, NULL);
	if (!r) {
		end_condemned(c);
		return;
	}
	r->conn = c;
	r->raw = true;
	c->req = r;
	bufferevent_enable(c->bev, EV_READ | EV_WRITE);
	http_req_refuse(c->h, r, c->scan.status, c->scan.detail);
}

/* --- bytes --------------------------------------------------------------------------------------------------------------- */

static bool scan_added(struct http_conn *c, struct evbuffer *in, size_t from, size_t n)
{
	struct evbuffer_iovec parts[32];
	struct evbuffer_ptr at;
	int count;

	if (evbuffer_ptr_set(in, &at, from, EVBUFFER_PTR_SET) != 0)
		return false;
	count = evbuffer_peek(in, (ev_ssize_t)n, &at, parts, 32);
	if (count < 0 || count > 32) /* one read comes in a few pieces */
		return false;
	for (int i = 0; i < count && n > 0; i++) {
		size_t take = parts[i].iov_len < n ? parts[i].iov_len : n;

		if (!http_scan_feed(&c->scan, parts[i].iov_base, take))
			return false;
		n -= take;
	}
	return true;
}

static void learn_fd(struct http_conn *c)
{
	evutil_socket_t fd = bufferevent_getfd(c->bev);

	if (fd >= 0 && (size_t)fd < c->h->by_fd_size)
		c->h->by_fd[fd] = c;
}

static void on_input(struct evbuffer *in, const struct evbuffer_cb_info *info, void *arg)
{
	struct http_conn *c = arg;
	bool good;

	if (info->n_added == 0 || c->state != CONN_OPEN)
		return;
	learn_fd(c);
	account(c, c->held + info->n_added);
	good = scan_added(c, in, info->orig_size, info->n_added);
	if (!good && c->scan.state != SCAN_BAD) {
		c->scan.status = 500;
		c->scan.detail = "the request could not be read";
	}
	if (!http_scan_at_rest(&c->scan) && c->started_ms == 0)
		c->started_ms = now_ms();
	if (http_scan_at_rest(&c->scan))
		c->started_ms = 0;
	if (!good && (c->ev || c->scan.done > c->handled))
		c->state = CONN_LAST; /* good requests stand before it */
	else if (!good)
		condemn(c, c->scan.status, c->scan.detail);
	else if (c->h->held > c->h->opt.body_budget && c->held > c->h->opt.max_headers && !c->ev)
		condemn(c, 503, "the server holds as many request bodies as it may; try again in a moment");
}

/* --- life ---------------------------------------------------------------------------------------------------------------- */

struct bufferevent *http_conn_make(struct event_base *base, void *arg)
{
	struct httpd *h = arg;
	struct http_conn *c = calloc(1, sizeof(*c));
	struct bufferevent *bev = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);

	if (!c || !bev || !evbuffer_add_cb(bufferevent_get_input(bev), on_input, c)) {
		free(c);
		if (bev)
			bufferevent_free(bev);
		return NULL; /* evhttp makes a plain one; its request finds no connection of ours and is dropped */
	}
	bufferevent_incref(bev);
	c->h = h;
	c->bev = bev;
	http_scan_init(&c->scan, h->opt.max_headers, h->opt.max_body);
	bufferevent_setwatermark(bev, EV_READ, 0, h->opt.max_body + h->opt.max_headers + READ_SLACK);
	c->next = h->conns;
	if (h->conns)
		h->conns->prev = c;
	h->conns = c;
	if (++h->count >= h->opt.max_connections && h->bound && !h->full) {
		h->full = true;
		evconnlistener_disable(h->listener); /* the others wait in the kernel's queue */
	}
	return bev;
}

struct http_conn *http_conn_find(struct httpd *h, struct bufferevent *bev)
{
	evutil_socket_t fd = bufferevent_getfd(bev);
	struct http_conn *c = fd >= 0 && (size_t)fd < h->by_fd_size ? h->by_fd[fd] : NULL;

	return c && c->bev == bev ? c : NULL;
}

/* With some room, so that it does not go on and off with each connection. */
static void wake_listener(struct httpd *h)
{
	if (!h->full || !h->bound || h->count >= h->opt.max_connections - h->opt.max_connections / 16)
		return;
	h->full = false;
	evconnlistener_enable(h->listener);
}

/* evhttp has let go (or is about to): drop our reference, which closes the socket. */
void http_conn_release(struct http_conn *c)
{
	struct httpd *h = c->h;
	evutil_socket_t fd = bufferevent_getfd(c->bev);

	if (c->req) /* an answer of our own that its maker still holds */
		http_req_gone(c->req, NULL);
	account(c, 0);
	evbuffer_remove_cb(bufferevent_get_input(c->bev), on_input, c);
	if (fd >= 0 && (size_t)fd < h->by_fd_size && h->by_fd[fd] == c)
		h->by_fd[fd] = NULL;
	if (c->prev)
		c->prev->next = c->next;
	else
		h->conns = c->next;
	if (c->next)
		c->next->prev = c->prev;
	bufferevent_disable(c->bev, EV_READ | EV_WRITE);
	bufferevent_decref(c->bev);
	http_scan_free(&c->scan);
	free(c);
	h->count--;
	wake_listener(h);
}

static void on_close(struct evhttp_connection *evcon, void *arg)
{
	struct http_conn *c = arg;
	struct evhttp_request *ev = c->ev;
	struct http_req *r = c->req;
	/* Cut off while we held it: then evhttp leaves the request to us. Otherwise it frees it right after this call. */
	bool ours = ev && !evhttp_request_get_connection(ev);

	(void)evcon;
	c->evcon = NULL;
	c->ev = NULL;
	c->req = NULL;
	c->state = CONN_GONE;
	http_conn_todo(c);
	if (r)
		http_req_gone(r, ours ? ev : NULL);
	else if (ours)
		evhttp_request_free(ev);
}

/* The reply has left; evhttp goes on to the next request, or closes. */
static void on_complete(struct evhttp_request *ev, void *arg)
{
	struct http_conn *c = arg;

	(void)ev;
	c->ev = NULL;
	c->reply_ms = 0;
	account(c, evbuffer_get_length(bufferevent_get_input(c->bev)));
	c->started_ms = c->state == CONN_OPEN && !http_scan_at_rest(&c->scan) ? now_ms() : 0;
	set_timeouts(c, c->h->opt.idle_timeout_ms, c->h->opt.idle_timeout_ms);
	bufferevent_setwatermark(c->bev, EV_READ, 0, c->h->opt.max_body + c->h->opt.max_headers + READ_SLACK);
	if (c->state == CONN_LAST && c->handled >= c->scan.done) {
		c->kill = true; /* the bytes after it broke a rule while it was being sent */
		http_conn_todo(c);
	}
}

void http_conn_attach(struct http_conn *c, struct evhttp_request *ev)
{
	c->evcon = evhttp_request_get_connection(ev);
	c->ev = ev;
	c->handled++;
	evhttp_connection_set_closecb(c->evcon, on_close, c);
	evhttp_request_set_on_complete_cb(ev, on_complete, c);
}

bool http_conn_closing(const struct http_conn *c)
{
	return !c->h->bound || (c->state == CONN_LAST && c->handled >= c->scan.done);
}

/* evhttp's read callback must not run while it is not reading: it ends the process then. */
void http_conn_watch(struct http_conn *c)
{
	bufferevent_data_cb rd, wr;
	bufferevent_event_cb event;
	void *arg;

	bufferevent_getcb(c->bev, &rd, &wr, &event, &arg);
	bufferevent_setcb(c->bev, NULL, wr, event, arg);
	set_timeouts(c, 0, c->h->opt.idle_timeout_ms);
	bufferevent_enable(c->bev, EV_READ);
}

void http_conn_replying(struct http_conn *c, bool streaming)
{
	set_timeouts(c, 0, c->h->opt.idle_timeout_ms);
	if (streaming) {
		bufferevent_setwatermark(c->bev, EV_READ, 0, 4096);
		return;
	}
	c->reply_ms = now_ms();
	bufferevent_disable(c->bev, EV_READ); /* a client that closed its sending side still gets the answer */
}

/* --- the turn's end, and ten times a second ---------------------------------------------------------------------------- */

static void work_on(struct http_conn *c)
{
	if (c->state == CONN_GONE) {
		http_conn_release(c);
	} else if (c->kill && c->evcon) {
		evhttp_connection_free(c->evcon); /* on_close puts it on the list again */
	} else if (c->state == CONN_CONDEMNED && c->condemned_ms == 0) {
		answer_condemned(c);
	}
}

void http_conn_work(struct httpd *h)
{
	while (h->todo) {
		struct http_conn *c = h->todo;

		h->todo = c->next_todo;
		c->todo = false;
		work_on(c);
	}
}

void http_conn_sweep(struct httpd *h)
{
	int64_t now = now_ms();

	wake_listener(h); /* also after accept(2) failed */
	for (struct http_conn *c = h->conns; c; c = c->next) {
		bufferevent_data_cb rd, wr;
		bufferevent_event_cb event;
		void *arg;

		bufferevent_getcb(c->bev, &rd, &wr, &event, &arg);
		if (!event && c->state != CONN_CONDEMNED) { /* evhttp freed it before a request was whole */
			c->state = CONN_GONE;
			http_conn_todo(c);
		} else if (c->state == CONN_CONDEMNED) {
			if (c->condemned_ms != 0 && now - c->condemned_ms > LINGER_MS)
				end_condemned(c);
		} else if (c->state == CONN_OPEN && !c->ev && c->started_ms != 0 &&
				now - c->started_ms > h->opt.request_deadline_ms) {
			condemn(c, 408, "the request took too long to arrive");
		} else if (c->reply_ms != 0 && now - c->reply_ms > REPLY_MS) {
			c->kill = true;
			http_conn_todo(c);
		}
	}
}
