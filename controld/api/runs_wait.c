/*
 * GET /v1/runs/{id}/wait and `Prefer: wait`: answers when the run has ended and is settled, or with what it is when the time is
 * over. Sleeps on the store's hub; each hint costs one small read, which waits and event streams of one run share. Owns struct
 * run_wait; runs on the loop.
 */
#include "api_internal.h"

#include <event2/event.h>
#include <stdlib.h>
#include <string.h>

#define AFTER_ALL INT64_C(1000000000) /* above any seq: the page is empty, but says whether the run is settled */

struct run_wait {
	struct api_req *r;
	char run_id[ID_MAX];
	int status;
	struct store_sub *sub;
	struct event *timer;
	bool reading;
	bool again;                    /* a hint came while reading */
	struct run_wait *next, **prev; /* in api->waits */
};

static void wait_drop(struct run_wait *w)
{
	struct api *a = w->r->api;

	w->r->wait = NULL;
	w->r->on_gone = NULL;
	*w->prev = w->next;
	if (w->next)
		w->next->prev = w->prev;
	a->stream_count--;
	store_hub_unsubscribe(w->sub);
	if (w->timer)
		event_free(w->timer);
	free(w);
}

static void answer(struct api_req *r)
{
	run_answer(r, r->waited_for, r->waited_status);
}

/* The key may have been taken away meanwhile: it is asked for again before anything is shown. */
static void wait_over(struct run_wait *w)
{
	struct api_req *r = w->r;

	memcpy(r->waited_for, w->run_id, sizeof(r->waited_for));
	r->waited_status = w->status;
	wait_drop(w);
	auth_check_again(r, answer);
}

static void wait_read(struct run_wait *w);

static void on_page(void *arg, const struct store_events *ev, const struct err *e)
{
	struct api_req *r = arg;
	struct run_wait *w = r->wait; /* NULL: the time was over meanwhile, or the client went */

	if (w)
		w->reading = false;
	if (w && e) {
		wait_drop(w);
		w = NULL;
	}
	r = api_back(arg, e);
	if (!r || !w)
		return;
	if (!ev->found || ev->complete) {
		wait_over(w);
	} else if (w->again) {
		w->again = false;
		wait_read(w);
	}
}

static void wait_read(struct run_wait *w)
{
	struct api_req *r = w->r;
	struct err e;
	int rc;

	w->reading = true;
	rc = store_events_page(r->api->opt.store, r->who.org_id, w->run_id, AFTER_ALL, 1, on_page, api_hold(r), &e);
	if (rc == -1)
		wait_drop(w);
	api_asked(rc, r, &e);
}

static void on_hint(void *arg)
{
	struct run_wait *w = arg;

	if (w->reading)
		w->again = true;
	else
		wait_read(w);
}

static void on_time(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	wait_over(arg);
}

static void on_gone(struct api_req *r)
{
	if (r->wait)
		wait_drop(r->wait);
}

void run_wait_answer(struct api_req *r, const char *run_id, int64_t seconds, int status)
{
	struct api *a = r->api;
	struct timeval tv = { .tv_sec = seconds };
	struct run_wait *w;

	if (a->draining) {
		run_answer(r, run_id, status);
		return;
	}
	w = a->stream_count < a->stream_max ? calloc(1, sizeof(*w)) : NULL;
	if (!w) {
		api_problem(r, PROBLEM_UNAVAILABLE,
				"This server has as many waiting clients as it takes (%zu). Try again, or ask without waiting.",
				a->stream_max);
		return;
	}
	w->r = r;
	memcpy(w->run_id, run_id, strlen(run_id) + 1);
	w->status = status;
	w->next = a->waits;
	w->prev = &a->waits;
	if (w->next)
		w->next->prev = &w->next;
	a->waits = w;
	a->stream_count++;
	r->wait = w;
	r->on_gone = on_gone;
	w->sub = store_hub_subscribe(a->opt.store, run_id, on_hint, w);
	w->timer = evtimer_new(a->opt.base, on_time, w);
	if (!w->sub || !w->timer || evtimer_add(w->timer, &tv) == -1) {
		wait_drop(w);
		api_problem(r, PROBLEM_UNAVAILABLE,
				"This server has as many waiting clients as it takes. Try again, or ask without waiting.");
		return;
	}
	wait_read(w);
}

void run_waits_end(struct api *a)
{
	struct run_wait *w, *next;

	for (w = a->waits; w; w = next) {
		next = w->next;
		wait_over(w);
	}
}
