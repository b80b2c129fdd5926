/*
 * Outward HTTP on the loop. Owns the multi handle, its sockets' events and every call until its on_done. Runs on one loop's
 * thread and never blocks (names are resolved on curl's own threads). Replies are foreign bytes: heads and bodies are bounded.
 *
 * curl may not be entered again from its own callbacks. So while `depth` is above zero, starting, cancelling and freeing are only
 * noted, and done in settle() when curl has returned. on_done is called from there, outside of curl.
 */
#include "curlev.h"

#include "curlev_internal.h"
#include "log.h"
#include "text.h"

#include <event2/event.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

struct curlev {
	struct event_base *base;
	CURLM *multi;
	struct event *timer; /* curl's */
	struct event *kick;  /* ours: work noted while curl was busy, and resumed transfers */
	struct curl_call *calls;
	int depth;
	bool noted; /* some call may have work for settle() */
	bool settling, freed;
};

struct watch {
	struct curlev *c;
	struct event *event;
};

static void settle(struct curlev *c);

/* --- curl's memory: it holds copies of what is sent, keys too, so that nothing is given up unwiped -------------------------------
 */

static void wipe_free(void *p)
{
	if (p)
		explicit_bzero(p, malloc_usable_size(p));
	free(p);
}

static void *wipe_realloc(void *p, size_t n)
{
	size_t had = p ? malloc_usable_size(p) : 0;
	void *moved = malloc(n);

	if (!moved)
		return NULL;
	if (p)
		memcpy(moved, p, had < n ? had : n);
	wipe_free(p);
	return moved;
}

/* --- the loop ------------------------------------------------------------------------------------------------------------------
 */

static void kick(struct curlev *c)
{
	c->noted = true;
	event_active(c->kick, EV_TIMEOUT, 0);
}

static void unlink_call(struct curl_call *call)
{
	if (call->prev)
		call->prev->next = call->next;
	else
		call->c->calls = call->next;
	if (call->next)
		call->next->prev = call->prev;
}

/* Out of curl and out of memory. Only outside of curl. */
static void destroy_call(struct curl_call *call)
{
	unlink_call(call);
	if (call->added)
		curl_multi_remove_handle(call->c->multi, call->easy);
	curl_call_dispose(call);
}

static void act(struct curlev *c, curl_socket_t fd, int mask)
{
	int running;

	c->depth++;
	curl_multi_socket_action(c->multi, fd, mask, &running);
	c->depth--;
	settle(c);
}

static void on_socket(evutil_socket_t fd, short what, void *arg)
{
	struct watch *w = arg;

	act(w->c, fd, ((what & EV_READ) ? CURL_CSELECT_IN : 0) | ((what & EV_WRITE) ? CURL_CSELECT_OUT : 0));
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	act(arg, CURL_SOCKET_TIMEOUT, 0);
}

/* curl tells which sockets it waits for. */
static int watch_socket(CURL *easy, curl_socket_t fd, int what, void *arg, void *socket_arg)
{
	struct curlev *c = arg;
	struct watch *w = socket_arg;
	char *call = NULL;
	short mask = (short)(EV_PERSIST | ((what & CURL_POLL_IN) ? EV_READ : 0) | ((what & CURL_POLL_OUT) ? EV_WRITE : 0));

	if (what != CURL_POLL_REMOVE && curl_easy_getinfo(easy, CURLINFO_PRIVATE, &call) == CURLE_OK && call)
		((struct curl_call *)(void *)call)->fd = fd;
	if (w && w->event)
		event_free(w->event);
	if (what == CURL_POLL_REMOVE) {
		curl_multi_assign(c->multi, fd, NULL);
		free(w);
		return 0;
	}
	if (!w) {
		w = calloc(1, sizeof(*w));
		if (!w)
			return -1;
		w->c = c;
		curl_multi_assign(c->multi, fd, w);
	}
	w->event = event_new(c->base, fd, mask, on_socket, w);
	if (!w->event || event_add(w->event, NULL) != 0)
		return -1;
	return 0;
}

static int set_timer(CURLM *multi, long ms, void *arg)
{
	struct curlev *c = arg;
	struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = (ms % 1000) * 1000 };

	(void)multi;
	if (ms < 0)
		event_del(c->timer);
	else
		event_add(c->timer, &tv);
	return 0;
}

/* The end of one transfer: the handle leaves curl first, so that on_done may do anything. */
static void finish(struct curl_call *call, CURLcode result)
{
	struct curlev *c = call->c;
	struct err e = { .code = ERR_NONE };
	bool failed = curl_call_outcome(call, result, &e);

	unlink_call(call);
	curl_multi_remove_handle(c->multi, call->easy);
	call->added = false;
	if (!call->cancelled)
		call->req.on_done(call->req.arg, call->status, failed ? &e : NULL);
	curl_call_dispose(call);
}

/* Calls that curl refused to take: they end like any other, but from the loop. */
static void add_to_curl(struct curl_call *call)
{
	CURLMcode rc;

	call->c->depth++;
	rc = curl_multi_add_handle(call->c->multi, call->easy);
	call->c->depth--;
	call->waiting = false;
	if (rc == CURLM_OK) {
		call->added = true;
		return;
	}
	err_set(&call->error, ERR_INTERNAL, "http: %s", curl_multi_strerror(rc));
	unlink_call(call);
	call->req.on_done(call->req.arg, 0, &call->error);
	curl_call_dispose(call);
}

/* One pass over noted work. True when something was done, so that the list may have changed. */
static bool settle_one(struct curlev *c)
{
	CURLMsg *m;
	int left;

	for (struct curl_call *call = c->noted ? c->calls : NULL; call; call = call->next) {
		if (call->cancelled) {
			destroy_call(call);
			return true;
		}
		if (call->waiting) {
			add_to_curl(call);
			return true;
		}
		if (call->resume) {
			call->resume = false;
			c->depth++;
			curl_easy_pause(call->easy, CURLPAUSE_CONT); /* may call on_data at once */
			c->depth--;
			return true;
		}
	}
	c->noted = false;
	m = curl_multi_info_read(c->multi, &left);
	while (m && m->msg != CURLMSG_DONE)
		m = curl_multi_info_read(c->multi, &left);
	if (m) {
		char *call = NULL;

		curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &call);
		finish((struct curl_call *)(void *)call, m->data.result);
	}
	return m != NULL;
}

static void destroy(struct curlev *c)
{
	while (c->calls)
		destroy_call(c->calls);
	curl_multi_cleanup(c->multi); /* still tells watch_socket about the pooled connections that it closes */
	event_free(c->timer);
	event_free(c->kick);
	curl_global_cleanup();
	free(c);
}

static void settle(struct curlev *c)
{
	if (c->depth > 0 || c->settling)
		return;
	c->settling = true;
	while (!c->freed && settle_one(c))
		;
	c->settling = false;
	if (c->freed)
		destroy(c);
}

static void on_kick(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	settle(arg);
}

int curlev_new(struct event_base *base, int max_connections, struct curlev **out, struct err *e)
{
	struct curlev *c;

	*out = NULL;
	if (curl_global_init_mem(CURL_GLOBAL_DEFAULT, malloc, wipe_free, wipe_realloc, strdup, calloc) != CURLE_OK)
		return err_set(e, ERR_INTERNAL, "http: libcurl cannot be initialised");
	c = calloc(1, sizeof(*c));
	if (!c)
		goto no_memory;
	c->base = base;
	c->multi = curl_multi_init();
	c->timer = event_new(base, -1, 0, on_timer, c);
	c->kick = event_new(base, -1, 0, on_kick, c);
	if (!c->multi || !c->timer || !c->kick)
		goto no_memory;
	curl_multi_setopt(c->multi, CURLMOPT_SOCKETFUNCTION, watch_socket);
	curl_multi_setopt(c->multi, CURLMOPT_SOCKETDATA, c);
	curl_multi_setopt(c->multi, CURLMOPT_TIMERFUNCTION, set_timer);
	curl_multi_setopt(c->multi, CURLMOPT_TIMERDATA, c);
	curl_multi_setopt(c->multi, CURLMOPT_PIPELINING, (long)CURLPIPE_NOTHING);
	curl_multi_setopt(c->multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long)max_connections);
	curl_multi_setopt(c->multi, CURLMOPT_MAXCONNECTS, (long)max_connections);
	*out = c;
	return 0;
no_memory:
	if (c) {
		if (c->kick)
			event_free(c->kick);
		if (c->timer)
			event_free(c->timer);
		if (c->multi)
			curl_multi_cleanup(c->multi);
	}
	free(c);
	curl_global_cleanup();
	return err_set(e, ERR_NOMEM, "http: no memory");
}

void curlev_free(struct curlev *c)
{
	if (!c || c->freed)
		return;
	c->freed = true;
	for (struct curl_call *call = c->calls; call; call = call->next)
		call->cancelled = true;
	if (c->depth == 0 && !c->settling)
		destroy(c);
	/* else settle() does it when curl and the callback have returned */
}

int curlev_start(struct curlev *c, const struct curl_request *req, struct curl_call **out, struct err *e)
{
	struct curl_call *call;

	*out = NULL;
	if (c->freed)
		return err_set(e, ERR_UNAVAILABLE, "http: shutting down");
	if (curl_call_make(req, &call, e) != 0)
		return -1;
	call->c = c;
	call->waiting = true; /* added from the loop, so that no callback comes before the caller knows its handle */
	call->next = c->calls;
	if (c->calls)
		c->calls->prev = call;
	c->calls = call;
	kick(c);
	*out = call;
	return 0;
}

void curl_call_cancel(struct curl_call *call)
{
	if (!call || call->cancelled)
		return;
	call->cancelled = true;
	if (call->c->depth == 0 && !call->c->settling)
		destroy_call(call);
	else
		kick(call->c);
}

void curl_call_pause(struct curl_call *call, bool paused)
{
	call->want_paused = paused;
	if (paused || !call->is_paused)
		return;
	call->is_paused = false;
	call->resume = true;
	kick(call->c);
}
