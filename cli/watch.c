/*
 * The live timeline. A stream of events is read until an end, then the run is fetched for its output, then the stream goes on at
 * the next event until the run is settled. A broken stream is asked for again with Last-Event-ID. Blocks; hears Ctrl-C at once.
 */
#include "watch.h"

#include "cli.h"
#include "common/clock.h"
#include "common/sse.h"
#include "common/text.h"
#include "interrupt.h"
#include "term.h"

#define EVENT_MAX ((size_t)256 * 1024) /* one event's bytes; the service's bound is below */
#define IDLE_MS 45000                  /* the service sends a comment every 15 s */
#define OUTAGE_MS 120000               /* so long without any stream ends the watch; the run goes on */
#define BACKOFF_FIRST_MS 200
#define BACKOFF_MAX_MS 5000

struct state {
	struct watch *w;
	struct sse_reader reader;
	uint64_t last_seq;
	bool ended, settled; /* seen on the timeline */
	bool pause;          /* the stream was left to fetch the output */
	bool live_line;      /* a transient line stands on the terminal */
	bool outage_said;    /* "cannot be asked now" was said of the outage that lasts */
	bool terminal;       /* that may be moved on: never with NO_COLOR or TERM=dumb */
	double t;            /* of the last event */
	int64_t t_at_ns;     /* when it came */
	const char *doing;
	struct err error; /* of the stream's bytes */
	bool broken;
};

int watch_exit(const char *status)
{
	return status != NULL && strcmp(status, "succeeded") == 0 ? CLI_OK : CLI_ENDED;
}

static void erase_live(struct state *s)
{
	if (s->live_line)
		fputs("\r\033[K", stdout);
	s->live_line = false;
}

/* The transient line that shows that something goes on. */
static void on_tick(void *arg)
{
	struct state *s = arg;
	double t = s->t + (double)(clock_mono_ns() - s->t_at_ns) / 1e9;

	if (!s->terminal || s->w->ndjson || s->doing == NULL)
		return;
	printf("\r\033[K%s%6.1f   %s …%s", term_begin(TERM_DIM, s->w->form.colour), t, s->doing, term_end(s->w->form.colour));
	fflush(stdout);
	s->live_line = true;
}

static void show(struct state *s, const struct json *event, const char *data, size_t n)
{
	struct buf text = BUF_INIT(4 * EVENT_MAX);

	if (s->w->ndjson) {
		fwrite(data, 1, n, stdout);
		fputc('\n', stdout);
	} else {
		timeline_event(&s->w->form, event, &text);
		if (!term_buf(stdout, &text))
			fputs("        (an event that is too long to be shown; use --json)\n", stdout);
	}
	fflush(stdout);
	buf_free(&text);
}

static bool on_event(void *arg, const char *type, const char *id, const char *data, size_t n)
{
	struct state *s = arg;
	struct json *event = NULL;
	int64_t seq;

	(void)type;
	(void)id;
	if (n == 0)
		return true;
	if (json_parse(data, n, &event, &s->error) != 0 || (seq = json_get_int(event, "seq", -1)) < 1) {
		if (event != NULL)
			(void)err_set(&s->error, ERR_PROTOCOL, "seq: is missing or no number of an event");
		(void)err_wrap(&s->error, "an event that is none");
		json_free(event);
		s->broken = true;
		return false;
	}
	if ((uint64_t)seq > s->last_seq) { /* after a resume: what we have is skipped */
		const char *doing = timeline_doing(event);
		enum timeline_kind kind = timeline_kind(event);

		s->last_seq = (uint64_t)seq;
		s->t = timeline_t(event);
		s->t_at_ns = clock_mono_ns();
		s->doing = doing != NULL ? doing : s->doing;
		erase_live(s);
		if (kind == TIMELINE_SETTLED && s->w->output && !s->w->ndjson)
			fputc('\n', stdout); /* below the output */
		show(s, event, data, n);
		s->ended |= kind != TIMELINE_STEP;
		s->settled |= kind == TIMELINE_SETTLED;
		s->pause = kind == TIMELINE_END && s->w->output;
	}
	json_free(event);
	return !s->pause && !s->settled && !ferror(stdout);
}

static bool on_bytes(void *arg, const void *p, size_t n)
{
	struct state *s = arg;
	struct err e;

	if (sse_reader_feed(&s->reader, p, n, &e) == 0)
		return true;
	if (!s->broken && e.code != ERR_CONFLICT) { /* else on_event said what is wrong with its data */
		s->error = e;
		s->broken = true;
	}
	return false;
}

/* One stream. 0 = it ended or was left on purpose; -1 = it broke (e says how). *status is the answer's. */
static int stream_once(struct state *s, struct http_response *r, struct err *e)
{
	struct api_headers h;
	struct buf url = BUF_INIT(2048);
	struct http_request req = { .method = "GET", .idle_ms = IDLE_MS, .on_bytes = on_bytes, .on_tick = on_tick, .arg = s };
	int rc = -1;

	http_response_init(r);
	s->pause = false;
	if (api_headers(s->w->api, &h, "Accept: text/event-stream", e) != 0)
		return -1;
	if (!text_fmt(h.more[0], sizeof h.more[0], "Last-Event-ID: %llu", (unsigned long long)s->last_seq))
		return err_set(e, ERR_INTERNAL, "header too long");
	h.list[2] = s->last_seq > 0 ? h.more[0] : NULL;
	h.list[3] = NULL;
	req.headers = h.list;
	sse_reader_init(&s->reader, EVENT_MAX, on_event, s);
	if (buf_printf(&url, "%s/v1/runs/%s/events", s->w->api->url, s->w->run) && (req.url = buf_cstr(&url)) != NULL)
		rc = http_send(s->w->api->http, &req, r, e);
	else
		(void)err_set(e, ERR_LIMIT, "the URL is too long");
	sse_reader_free(&s->reader);
	buf_free(&url);
	if (rc != 0 && e->code == ERR_CONFLICT && !interrupt_seen())
		rc = 0;
	if (s->broken)
		*e = s->error;
	return s->broken ? -1 : rc;
}

void watch_print_output(const struct json *run)
{
	const struct json *output = json_get(run, "output"), *error = json_get(run, "error");
	struct buf b = BUF_INIT((size_t)16 * 1024 * 1024);

	if (output != NULL && json_type(output) == JSON_STRING) {
		term_text(stdout, json_as_text(output), json_len(output));
	} else if (output != NULL && json_type(output) != JSON_NULL) {
		if (json_canonical(output, &b))
			term_text(stdout, (const char *)b.data, b.len);
	} else if (error != NULL && json_type(error) == JSON_OBJECT) {
		const char *message = json_get_text(error, "message");

		if (message != NULL)
			term_text(stdout, message, strlen(message));
	}
	buf_free(&b);
}

/* The run as it is now; *out is to be freed with answer_free. */
static int fetch(struct watch *w, struct answer *out)
{
	char path[128];
	struct api_call call = { .method = "GET", .path = path };

	memset(out, 0, sizeof *out);
	if (!text_fmt(path, sizeof path, "/v1/runs/%s", w->run))
		return CLI_USE;
	return api_ask(w->api, &call, out);
}

static int print_output(struct watch *w)
{
	struct answer a;
	int rc = fetch(w, &a);

	if (rc == CLI_OK) {
		const struct json *output = json_get(a.json, "output");

		if (output != NULL && json_type(output) != JSON_NULL) { /* an error stands on the timeline already */
			fputc('\n', stdout);
			watch_print_output(a.json);
		}
		fflush(stdout);
	}
	answer_free(&a);
	return rc;
}

static int finish(struct watch *w)
{
	struct answer a;
	struct buf b = BUF_INIT(1024);
	int rc = fetch(w, &a);

	if (rc == CLI_OK) {
		rc = watch_exit(json_get_text(a.json, "status"));
		if (w->output && !w->ndjson && json_get(a.json, "cost") != NULL) {
			timeline_parts(json_get(a.json, "cost"), &b);
			printf("\n%s\n", buf_cstr(&b) != NULL ? buf_cstr(&b) : "");
		}
	}
	buf_free(&b);
	answer_free(&a);
	return rc;
}

static int detached(struct state *s)
{
	erase_live(s);
	fflush(stdout);
	if (s->ended)
		term_note("\nDetached: the run has ended, its settlement goes on. See it: ephemeral get %s", s->w->run);
	else
		term_note("\nDetached: the run goes on.\n  watch it:  ephemeral events %s --follow\n  cancel it: ephemeral cancel "
			  "%s",
				s->w->run, s->w->run);
	return CLI_DETACHED;
}

static int gave_up(struct state *s, const struct err *e)
{
	erase_live(s);
	term_complain("%s", e->text);
	term_note("The run is not affected. Watch it again: ephemeral events %s --follow", s->w->run);
	return CLI_ASK;
}

/* Once an outage, so that silence is not taken for a run that hangs. */
static void say_outage(struct state *s, bool out)
{
	if (out && !s->outage_said) {
		erase_live(s);
		term_note("%s cannot be asked now. The run is not affected; trying again for %d s.", s->w->api->url,
				OUTAGE_MS / 1000);
	}
	s->outage_said = out;
}

/* After a stream: CLI_OK = ask again (at once or after a while), anything else = that is the exit status. */
static int after_stream(
		struct state *s, int rc, struct http_response *r, const struct err *e, int64_t *lost_at_ns, int64_t *wait_ms)
{
	int64_t now = clock_mono_ns();

	if (interrupt_seen())
		return detached(s);
	if (ferror(stdout)) /* nobody reads on (| head); main.c says so */
		return CLI_ASK;
	if (s->broken)
		return gave_up(s, e);
	if (rc == 0 && r->status == 200) {
		*lost_at_ns = now;
		*wait_ms = BACKOFF_FIRST_MS;
		if (s->pause)
			return print_output(s->w); /* and on with the stream */
	} else if (rc == 0 && r->status != 429 && r->status < 500) {
		erase_live(s);
		return api_problem(s->w->api, r);
	} else if (r->status == 200) { /* it did run, then broke */
		*lost_at_ns = now;
	}
	if (now - *lost_at_ns > OUTAGE_MS * INT64_C(1000000)) {
		struct err over = *e;

		if (rc == 0)
			(void)err_set(&over, ERR_UNAVAILABLE, "%s answers %ld", s->w->api->url, r->status);
		return gave_up(s, &over);
	}
	say_outage(s, r->status != 200);
	if (!interrupt_sleep_ms(*wait_ms))
		return detached(s);
	*wait_ms = *wait_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : *wait_ms * 2;
	return CLI_OK;
}

int watch_run(struct watch *w)
{
	struct state s = { .w = w, .last_seq = w->after, .t_at_ns = clock_mono_ns(), .terminal = term_colour(stdout) };
	int64_t lost_at_ns = clock_mono_ns(), wait_ms = BACKOFF_FIRST_MS;

	interrupt_install();
	while (!s.settled) {
		struct http_response r;
		struct err e = { .code = ERR_NONE };
		int rc = stream_once(&s, &r, &e), status;

		erase_live(&s);
		if (s.settled || (rc == 0 && r.status == 204)) { /* 204: there is nothing after what we have */
			http_response_free(&r);
			break;
		}
		status = after_stream(&s, rc, &r, &e, &lost_at_ns, &wait_ms);
		http_response_free(&r);
		if (status != CLI_OK)
			return status;
	}
	return finish(w);
}
