/* Verbs over a run's events: events (pages or the live stream), replay. */
#include "cli.h"

#include "api.h"
#include "common/text.h"
#include "interrupt.h"
#include "raw.h"
#include "term.h"
#include "watch.h"

#define PAGE_LIMIT 100
#define PAGES_MAX 1000
#define EVENTS_BYTES_MAX ((size_t)64 * 1024 * 1024)
#define PAUSE_MAX_S 600.0

typedef bool on_event_fn(void *arg, const char *bytes, size_t n);

static int after_arg(const struct args *a, int64_t *after)
{
	const char *text = args_value(a, "after");
	struct err e;

	*after = 0;
	if (text == NULL || text_i64(text, 0, INT32_MAX, after, &e) == 0)
		return CLI_OK;
	term_complain("--after: %s", e.text);
	return CLI_USE;
}

struct page {
	on_event_fn *fn;
	void *arg;
	size_t count;
	bool stopped;
};

static bool on_element(void *arg, const char *bytes, size_t n)
{
	struct page *p = arg;

	p->count++;
	if (p->fn(p->arg, bytes, n))
		return true;
	p->stopped = true;
	return false;
}

/* Every event after `after` that there is now, with the exact bytes of its writer. */
static int each_event(struct api *api, const char *id, int64_t after, on_event_fn *fn, void *arg)
{
	for (int page_number = 0; page_number < PAGES_MAX; page_number++) {
		char path[160];
		struct api_call call = { .method = "GET", .path = path };
		struct answer answer;
		struct page page = { .fn = fn, .arg = arg };
		const struct json *data, *next;
		int64_t last;
		int rc;

		if (!text_fmt(path, sizeof path, "/v1/runs/%s/events?after=%lld&limit=%d", id, (long long)after, PAGE_LIMIT))
			return CLI_USE;
		rc = api_ask(api, &call, &answer);
		data = json_get(answer.json, "data");
		next = json_get(answer.json, "next_cursor");
		last = data != NULL && json_type(data) == JSON_ARRAY && json_len(data) > 0
				       ? json_get_int(json_at(data, json_len(data) - 1), "seq", after)
				       : after;
		if (rc == CLI_OK)
			(void)raw_member_array((const char *)answer.raw.body.data, answer.raw.body.len, "data", on_element, &page);
		if (rc == CLI_OK && (page.stopped || page.count == 0 || last <= after || next == NULL ||
						    json_type(next) == JSON_NULL)) {
			answer_free(&answer);
			return CLI_OK;
		}
		answer_free(&answer);
		if (rc != CLI_OK)
			return rc;
		after = last;
	}
	return CLI_OK;
}

/* --- events ------------------------------------------------------------------------------------------------------------------- */

struct printer {
	bool ndjson;
	struct timeline form;
};

static bool print_event(void *arg, const char *bytes, size_t n)
{
	struct printer *p = arg;
	struct json *event = NULL;
	struct buf b = BUF_INIT((size_t)1024 * 1024);
	struct err e;

	if (p->ndjson) {
		fwrite(bytes, 1, n, stdout);
		fputc('\n', stdout);
		return !ferror(stdout);
	}
	if (json_parse(bytes, n, &event, &e) == 0)
		timeline_event(&p->form, event, &b);
	(void)term_buf(stdout, &b);
	buf_free(&b);
	json_free(event);
	return !ferror(stdout);
}

int cmd_events(const struct args *a)
{
	struct api api;
	struct printer p = { .form = { .width = term_width(stdout), .colour = term_colour(stdout), .full = true } };
	const char *id;
	int64_t after;
	int rc = run_id_arg(a, &id);

	if (rc == CLI_OK)
		rc = after_arg(a, &after);
	if (rc != CLI_OK)
		return rc;
	rc = api_open(&api, a);
	p.ndjson = api.json;
	if (rc == CLI_OK && args_flag(a, "follow")) {
		struct watch w = { .api = &api, .run = id, .after = (uint64_t)after, .ndjson = api.json, .form = p.form };

		rc = watch_run(&w);
	} else if (rc == CLI_OK) {
		rc = each_event(&api, id, after, print_event, &p);
	}
	api_close(&api);
	return rc;
}

/* --- replay ------------------------------------------------------------------------------------------------------------------- */

struct replay {
	struct printer print;
	const struct json *run;
	double speed;
	double t; /* of the last event shown */
	bool first, stopped;
};

/* Waits as long as the recording did, then shows the event; the output stands where it came. */
static bool replay_event(void *arg, const char *bytes, size_t n)
{
	struct replay *r = arg;
	struct json *event = NULL;
	struct err e;
	double t, pause;

	if (json_parse(bytes, n, &event, &e) != 0)
		return true;
	t = timeline_t(event);
	pause = r->first ? 0 : (t - r->t) / r->speed;
	if (!r->print.ndjson && timeline_kind(event) == TIMELINE_SETTLED)
		fputc('\n', stdout);
	fflush(stdout);
	if (pause > 0 && !interrupt_sleep_ms((int64_t)((pause > PAUSE_MAX_S ? PAUSE_MAX_S : pause) * 1000)))
		r->stopped = true;
	if (!r->stopped) {
		(void)print_event(&r->print, bytes, n);
		if (!r->print.ndjson && timeline_kind(event) == TIMELINE_END && json_get(r->run, "output") != NULL &&
				json_type(json_get(r->run, "output")) != JSON_NULL) {
			fputc('\n', stdout);
			watch_print_output(r->run);
		}
		fflush(stdout);
	}
	r->t = t > r->t ? t : r->t;
	r->first = false;
	json_free(event);
	return !r->stopped;
}

/* The recording is fetched whole before the first line is shown, so that the network does not change its pace. */
static bool collect(void *arg, const char *bytes, size_t n)
{
	struct buf *b = arg;

	return buf_add(b, bytes, n) && buf_add_char(b, '\n');
}

static int play(struct replay *r, struct buf *recording)
{
	struct buf parts = BUF_INIT(1024);
	size_t at = 0;

	while (at < recording->len && !r->stopped) {
		const uint8_t *end = memchr(recording->data + at, '\n', recording->len - at);
		size_t n = end != NULL ? (size_t)(end - (recording->data + at)) : recording->len - at;

		if (!replay_event(r, (const char *)recording->data + at, n))
			break;
		at += n + 1;
	}
	if (r->stopped)
		return CLI_DETACHED;
	if (!r->print.ndjson && json_get(r->run, "cost") != NULL) {
		timeline_parts(json_get(r->run, "cost"), &parts);
		printf("\n%s\n", buf_cstr(&parts) != NULL ? buf_cstr(&parts) : "");
	}
	buf_free(&parts);
	return CLI_OK;
}

static int speed_arg(const struct args *a, double *speed)
{
	const char *text = args_value(a, "speed");
	char *end = NULL;

	*speed = 1;
	if (text == NULL)
		return CLI_OK;
	*speed = strtod(text, &end);
	if (end != text && *end == '\0' && *speed >= 0.1 && *speed <= 1000)
		return CLI_OK;
	term_complain("--speed: it must be a number from 0.1 to 1000");
	return CLI_USE;
}

int cmd_replay(const struct args *a)
{
	struct api api;
	char path[128];
	struct api_call call = { .method = "GET", .path = path };
	struct answer run = { .json = NULL };
	struct buf recording = BUF_INIT(EVENTS_BYTES_MAX);
	struct replay r = { .first = true, .print.form = { .width = term_width(stdout), .colour = term_colour(stdout) } };
	const char *id;
	int rc = run_id_arg(a, &id);

	if (rc == CLI_OK)
		rc = speed_arg(a, &r.speed);
	if (rc != CLI_OK || !text_fmt(path, sizeof path, "/v1/runs/%s", id))
		return rc;
	r.print.form.full = args_flag(a, "verbose");
	rc = api_open(&api, a);
	r.print.ndjson = api.json;
	if (rc == CLI_OK)
		rc = api_ask(&api, &call, &run);
	if (rc == CLI_OK)
		rc = each_event(&api, id, 0, collect, &recording);
	if (rc == CLI_OK && recording.failed) {
		term_complain("the recording is over %zu MiB; use `ephemeral events --json`", EVENTS_BYTES_MAX >> 20);
		rc = CLI_ASK;
	}
	if (rc == CLI_OK) {
		r.run = run.json;
		interrupt_install();
		rc = play(&r, &recording);
	}
	answer_free(&run);
	buf_free(&recording);
	api_close(&api);
	return rc;
}
