/*
 * GET /v1/runs/{id}/events: a JSON page, or a stream (SSE). Both serve the exact bytes that the events' writers made. A stream owns
 * its connection from its first byte on; it reads a page, writes it, and sleeps on the store's hub until something changed. What it
 * does next is decided by stream_step.c. Runs on the loop, does not block.
 */
#include "api_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/sse.h"
#include "common/text.h"
#include "stream_step.h"

#include <event2/event.h>
#include <inttypes.h>
#include <stdlib.h>

#define PAGE_DEFAULT 100
#define FIRST_BYTES "retry: 1000\n\n"
#define HEARTBEAT_BYTES ": still here\n\n"

struct event_stream {
	struct api *api;
	struct http_req *http; /* NULL once closed; then it is freed as soon as nothing is asked of the store */
	char run_id[ID_MAX], org_id[ID_MAX];
	uint8_t key_hash[SECRETS_HASH_LEN];
	struct store_sub *sub;
	struct event *timer;
	struct stream_seen seen;
	struct event_stream *next, **prev; /* in api->streams */
};

/* --- reading the request ------------------------------------------------------------------------------------------------ */

struct events_ask {
	struct api_req *r;
	int64_t after;
	bool sse;
};

/* Last-Event-ID wins over ?after=: a browser that comes back keeps the address of its first request. */
static int64_t read_after(struct api_req *r, bool sse, struct field_errors *fe)
{
	const char *after = http_query(r->http, "after", NULL), *cursor = http_query(r->http, "cursor", NULL);
	const char *last = sse ? http_header(r->http, "Last-Event-ID") : NULL;
	int64_t seq = 0;

	if (after && cursor)
		query_bad(fe, "cursor", "means the same as after; send one of them");
	if (after && *after && !stream_seq_read(after, &seq))
		query_bad(fe, "after", "must be the seq of an event, a whole number from 0 on");
	if (cursor && *cursor && !stream_seq_read(cursor, &seq))
		query_bad(fe, "cursor", "must be the next_cursor of the page before, unchanged");
	if (last && *last && !stream_seq_read(last, &seq))
		header_bad(fe, "Last-Event-ID", "must be the id of an event of this stream, a whole number from 0 on");
	return seq;
}

/* --- JSON --------------------------------------------------------------------------------------------------------------- */

/* Null only when nothing can come any more: a client that follows next_cursor until null has the whole timeline. */
static void answer_page(struct api_req *r, int64_t after, const struct store_events *ev)
{
	struct buf out = BUF_INIT(API_REPLY_MAX);
	char cursor[24] = "";
	int64_t last = after;
	struct jw w;
	size_t i;
	bool whole;

	list_begin(&w, &out);
	for (i = 0; i < ev->count; i++) {
		jw_raw(&w, (const char *)ev->events[i].bytes, ev->events[i].len);
		last = ev->events[i].seq;
	}
	whole = ev->complete && last >= ev->head_seq;
	list_end(&w, !whole && text_fmt(cursor, sizeof(cursor), "%" PRId64, last) ? cursor : NULL);
	api_reply(r, 200, &out);
}

/* --- the stream --------------------------------------------------------------------------------------------------------- */

static void stream_go_on(struct event_stream *s);

static void stream_free_if_done(struct event_stream *s)
{
	if (!s->http && !s->seen.reading && !s->seen.checking)
		free(s);
}

/* Leaves everything; the connection is given back to be ended by the caller, or is gone already. */
static struct http_req *stream_detach(struct event_stream *s)
{
	struct http_req *http = s->http;

	s->http = NULL;
	*s->prev = s->next;
	if (s->next)
		s->next->prev = s->prev;
	s->api->stream_count--;
	store_hub_unsubscribe(s->sub);
	s->sub = NULL;
	if (s->timer)
		event_free(s->timer);
	s->timer = NULL;
	return http;
}

static void stream_end(struct event_stream *s)
{
	struct http_req *http = stream_detach(s);

	http_on_close(http, NULL, NULL);
	http_stream_end(http);
	stream_free_if_done(s);
}

static void stream_cut(struct event_stream *s, const char *why)
{
	struct http_req *http = stream_detach(s);

	log_info("event stream cut run=%s after=%" PRId64 " reason=%s", s->run_id, s->seen.cursor, why);
	http_on_close(http, NULL, NULL);
	http_stream_abort(http);
	stream_free_if_done(s);
}

static void on_stream_close(void *arg)
{
	struct event_stream *s = arg;

	stream_detach(s);
	stream_free_if_done(s);
}

/* False when an event could not be written: the client is cut and asks again. */
static bool stream_write(struct event_stream *s, const struct store_events *ev)
{
	struct buf out = BUF_INIT(8 * 1024 * 1024);
	char type[64], id[24];
	bool ok = true;
	size_t i;

	for (i = 0; i < ev->count && ok; i++) {
		const struct store_event *one = &ev->events[i];

		if (one->seq <= s->seen.cursor)
			continue;
		ok = stream_event_type(one->bytes, one->len, type, sizeof(type)) &&
		     text_fmt(id, sizeof(id), "%" PRId64, one->seq) &&
		     sse_write(&out, type, id, (const char *)one->bytes, one->len);
		if (ok)
			s->seen.cursor = one->seq;
	}
	if (out.len > 0) {
		http_stream_write(s->http, out.data, out.len);
		s->seen.last_write_ms = s->seen.now_ms;
	}
	buf_free(&out);
	return ok;
}

static void stream_take(struct event_stream *s, const struct store_events *ev)
{
	s->seen.now_ms = clock_boot_ms();
	s->seen.head = ev->head_seq;
	s->seen.complete = ev->complete;
	if (!stream_write(s, ev)) {
		log_error("event bytes that are not ours run=%s after=%" PRId64, s->run_id, s->seen.cursor);
		stream_cut(s, "event");
		return;
	}
	/* A head above what the page gave without a full page would be read for ever. */
	if (ev->count == 0 && s->seen.cursor < s->seen.head)
		s->seen.head = s->seen.cursor;
	stream_go_on(s);
}

static void on_page(void *arg, const struct store_events *ev, const struct err *e)
{
	struct event_stream *s = arg;

	s->seen.reading = false;
	if (!s->http) {
		stream_free_if_done(s);
	} else if (e) {
		stream_cut(s, "store");
	} else if (!ev->found) {
		stream_end(s);
	} else {
		stream_take(s, ev);
	}
}

static void stream_read(struct event_stream *s)
{
	struct err e;

	s->seen.hint = false;
	s->seen.reading = true;
	if (store_events_page(s->api->opt.store, s->org_id, s->run_id, s->seen.cursor, STREAM_PAGE, on_page, s, &e) == 0)
		return;
	s->seen.reading = false;
	stream_cut(s, "store");
}

/* A key that was revoked, ran out, or whose organization was disabled: the stream ends, and its client is told when it comes back.
 */
static void on_checked(void *arg, const struct store_principal *p, const struct err *e)
{
	struct event_stream *s = arg;

	s->seen.checking = false;
	if (!s->http) {
		stream_free_if_done(s);
	} else if (!e && p->result != STORE_AUTH_OK) {
		log_info("event stream ended run=%s after=%" PRId64 " reason=key", s->run_id, s->seen.cursor);
		stream_end(s);
	}
}

static void stream_check(struct event_stream *s)
{
	struct err e;

	s->seen.checked_ms = s->seen.now_ms;
	if (auth_cached(s->api->auth, s->key_hash))
		return;
	s->seen.checking = store_auth(s->api->opt.store, s->key_hash, on_checked, s, &e) == 0;
}

static void stream_sleep(struct event_stream *s, enum stream_step step)
{
	int64_t ms = stream_sleep_ms(&s->seen, step);
	struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = (suseconds_t)(ms % 1000 * 1000) };

	if (evtimer_add(s->timer, &tv) == -1)
		stream_cut(s, "timer");
}

static void stream_go_on(struct event_stream *s)
{
	struct stream_seen *seen = &s->seen;
	enum stream_step step;

	seen->now_ms = clock_boot_ms();
	if (stream_check_due(seen))
		stream_check(s);
	seen->queued = http_stream_queued(s->http);
	if (seen->queued <= STREAM_LOW_BYTES)
		seen->backlog_since_ms = 0;
	else if (!seen->backlog_since_ms)
		seen->backlog_since_ms = seen->now_ms;
	step = stream_next(seen);
	switch (step) {
	case STREAM_END: stream_end(s); return;
	case STREAM_CUT: stream_cut(s, "slow"); return;
	case STREAM_READ: stream_read(s); return;
	case STREAM_HEARTBEAT:
		http_stream_write(s->http, HEARTBEAT_BYTES, sizeof(HEARTBEAT_BYTES) - 1);
		seen->last_write_ms = seen->now_ms;
		stream_sleep(s, STREAM_WAIT);
		return;
	case STREAM_WAIT:
	case STREAM_BACK_OFF: stream_sleep(s, step); return;
	}
}

static void on_hint(void *arg)
{
	struct event_stream *s = arg;

	s->seen.hint = true;
	if (!s->seen.reading)
		stream_go_on(s);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	stream_go_on(arg);
}

/* From the first page on. r is gone afterwards, answered or streaming. */
static void stream_start(struct api_req *r, int64_t after, const struct store_events *ev)
{
	struct api *a = r->api;
	struct event_stream *s = a->stream_count < a->stream_max && !a->draining ? calloc(1, sizeof(*s)) : NULL;

	if (s) {
		s->sub = store_hub_subscribe(a->opt.store, api_param(r, 0), on_hint, s);
		s->timer = evtimer_new(a->opt.base, on_timer, s);
	}
	if (!s || !s->sub || !s->timer) {
		if (s) {
			store_hub_unsubscribe(s->sub);
			if (s->timer)
				event_free(s->timer);
			free(s);
		}
		api_problem(r, PROBLEM_UNAVAILABLE,
				"This server has as many event streams as it takes (%zu). Try again, or read pages.",
				a->stream_max);
		return;
	}
	s->api = a;
	memcpy(s->run_id, api_param(r, 0), strlen(api_param(r, 0)) + 1);
	memcpy(s->org_id, r->who.org_id, sizeof(s->org_id));
	memcpy(s->key_hash, r->key_hash, sizeof(s->key_hash));
	s->next = a->streams;
	s->prev = &a->streams;
	if (s->next)
		s->next->prev = &s->next;
	a->streams = s;
	a->stream_count++;
	s->seen.cursor = after;
	api_common_headers(a, r->http, r->id);
	http_reply_header(r->http, "X-Accel-Buffering", "no");
	s->http = api_take_http(r);
	http_on_close(s->http, on_stream_close, s);
	http_stream_start(s->http, 200, "text/event-stream");
	http_stream_write(s->http, FIRST_BYTES, sizeof(FIRST_BYTES) - 1);
	s->seen.last_write_ms = s->seen.checked_ms = clock_boot_ms();
	/* Events that came between the first read and the subscription had no hint. */
	s->seen.hint = true;
	stream_take(s, ev);
}

void event_streams_end(struct api *a)
{
	struct event_stream *s, *next;

	for (s = a->streams; s; s = next) {
		next = s->next;
		stream_end(s);
	}
}

/* --- both --------------------------------------------------------------------------------------------------------------- */

static void on_first(void *arg, const struct store_events *ev, const struct err *e)
{
	struct events_ask ask = *(struct events_ask *)arg;
	struct api_req *r = api_back(ask.r, e);

	free(arg);
	if (!r)
		return;
	if (!ev->found)
		api_problem(r, PROBLEM_NOT_FOUND,
				"There is no such run in your organization; records are kept for the retention period.");
	else if (!ask.sse)
		answer_page(r, ask.after, ev);
	else if (ev->complete && ask.after >= ev->head_seq)
		api_reply_empty(r, 204);
	else
		stream_start(r, ask.after, ev);
}

void runs_events(struct api_req *r)
{
	bool sse = api_wants_sse(r) && http_method(r->http) != HTTP_HEAD;
	struct events_ask *ask;
	struct field_errors fe;
	int64_t limit, after;
	struct err e;
	int rc;

	field_errors_init(&fe);
	after = read_after(r, sse, &fe);
	api_query_int(r, "limit", 1, STORE_EVENTS_PAGE_MAX, PAGE_DEFAULT, &limit, &fe);
	if (field_errors_any(&fe)) {
		api_problem_fields(r, &fe);
		return;
	}
	if (!id_valid("run", api_param(r, 0))) {
		api_problem(r, PROBLEM_NOT_FOUND,
				"There is no such run in your organization; records are kept for the retention period.");
		return;
	}
	ask = malloc(sizeof(*ask));
	if (!ask) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
		return;
	}
	*ask = (struct events_ask){ .r = api_hold(r), .after = after, .sse = sse };
	rc = store_events_page(r->api->opt.store, r->who.org_id, api_param(r, 0), after, sse ? STREAM_PAGE : (int)limit, on_first,
			ask, &e);
	if (rc == -1)
		free(ask);
	api_asked(rc, r, &e);
}
