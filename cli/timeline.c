/*
 * Rendering of a timeline. Pure; one function for each kind of event, chosen by a table. An event of a type that is not in the
 * table (from a newer service) is shown by its name. Called by watch.c and cmd_events.c.
 */
#include "timeline.h"

#include "common/text.h"
#include "term.h"

#define LABEL_WIDTH 11
#define HEAD_WIDTH (6 + 2 + LABEL_WIDTH + 2) /* columns before the text */
#define DETAIL_MAX ((size_t)256 * 1024)
#define END_WIDTH 4096 /* why a run ended is never cut to the terminal */

struct row {
	const struct timeline *t;
	const struct json *event, *data;
	struct buf *out;
};

struct kind {
	const char *type;
	const char *label;
	enum term_style style;
	bool only_full;
	enum timeline_kind kind;
	const char *doing; /* what goes on after it */
	void (*text)(const struct row *r, struct buf *text);
	void (*below)(const struct row *r); /* lines under the row, or NULL */
};

static void dollars(struct buf *b, int64_t micros)
{
	char text[32];

	text_dollars(micros, text);
	buf_add_str(b, text);
}

void timeline_number(int64_t n, char out[32])
{
	char digits[32];
	size_t len, at = 0;

	if (n < 0 || !text_fmt(digits, sizeof digits, "%lld", (long long)n)) {
		out[0] = '0';
		out[1] = '\0';
		return;
	}
	len = strlen(digits);
	for (size_t i = 0; i < len; i++) {
		if (i > 0 && (len - i) % 3 == 0)
			out[at++] = ',';
		out[at++] = digits[i];
	}
	out[at] = '\0';
}

static void add_text(struct buf *b, const struct json *data, const char *key)
{
	const struct json *v = json_get(data, key);

	if (v != NULL && (json_type(v) == JSON_STRING || json_type(v) == JSON_INT || json_type(v) == JSON_DECIMAL))
		buf_add_str(b, json_as_text(v));
}

static void add_seconds(struct buf *b, const struct json *data, const char *key)
{
	int64_t ms = json_get_int(data, key, -1);

	if (ms >= 0)
		buf_printf(b, " in %lld.%02lld s", (long long)(ms / 1000), (long long)(ms % 1000 / 10));
}

/* --- texts ---------------------------------------------------------------------------------------------------------------- */

static void text_queued(const struct row *r, struct buf *b)
{
	buf_add_str(b, "budget ");
	dollars(b, json_get_int(r->data, "reserved_micros", 0));
	buf_add_str(b, " reserved");
	if (r->t->full && json_get_text(r->data, "model") != NULL) {
		buf_add_str(b, " · ");
		add_text(b, r->data, "model");
	}
}

static void text_claimed(const struct row *r, struct buf *b)
{
	buf_add_str(b, "claimed by ");
	if (json_get_text(r->data, "node") != NULL)
		add_text(b, r->data, "node");
	else
		buf_add_str(b, "a host");
	if (json_get_int(r->data, "attempt", 1) > 1)
		buf_printf(b, " · attempt %lld", (long long)json_get_int(r->data, "attempt", 1));
}

static void text_requeued(const struct row *r, struct buf *b)
{
	buf_printf(b, "attempt %lld did not start: ", (long long)json_get_int(r->data, "attempt", 1));
	add_text(b, r->data, "reason");
}

static void text_cancel_requested(const struct row *r, struct buf *b)
{
	(void)r;
	buf_add_str(b, "cancel requested");
}

static void text_ready(const struct row *r, struct buf *b)
{
	const char *isolation = json_get_text(r->data, "isolation");
	const struct json *jail = json_get(r->data, "jail");

	buf_add_str(b, "microVM ready");
	if (isolation != NULL && strcmp(isolation, "kvm") != 0) {
		buf_add_str(b, " · ");
		buf_add_str(b, isolation);
	}
	if (jail != NULL && ((json_type(jail) == JSON_BOOL && !json_as_bool(jail)) ||
					    (json_type(jail) == JSON_STRING &&
							    (strcmp(json_as_text(jail), "off") == 0 ||
									    strcmp(json_as_text(jail), "none") == 0))))
		buf_add_str(b, " · WITHOUT JAIL");
	if (r->t->full) {
		int64_t ms = json_get_int(r->data, "boot_ms", -1);

		if (ms >= 0)
			buf_printf(b, " · booted in %lld ms", (long long)ms);
		if (json_get_text(r->data, "vmm") != NULL) {
			buf_add_str(b, " · ");
			add_text(b, r->data, "vmm");
		}
	}
}

static bool on(const struct json *v)
{
	return v != NULL && (json_type(v) == JSON_BOOL ? json_as_bool(v) : json_type(v) != JSON_NULL);
}

void timeline_permissions(const struct json *v, struct buf *out)
{
	const struct json *web = json_get(v, "web");
	const struct json *domains = json_get(web, "allow_domains");

	buf_printf(out, "shell %s · web %s", on(json_get(v, "shell")) ? "on" : "off", on(web) ? "on" : "off");
	if (domains != NULL && json_type(domains) == JSON_ARRAY)
		buf_printf(out, " (%zu domain%s)", json_len(domains), json_len(domains) == 1 ? "" : "s");
}

static void text_started(const struct row *r, struct buf *b)
{
	const struct json *connections = json_get(r->data, "connections");

	buf_add_str(b, "worker started · ");
	timeline_permissions(r->data, b);
	if (connections != NULL && json_type(connections) == JSON_ARRAY && json_len(connections) > 0)
		buf_printf(b, " · %zu connections", json_len(connections));
	if (r->t->full && json_get_text(r->data, "workdir") != NULL) {
		buf_add_str(b, " · ");
		add_text(b, r->data, "workdir");
	}
}

static void text_model_call(const struct row *r, struct buf *b)
{
	char in[32], out[32];

	timeline_number(json_get_int(r->data, "input_tokens", 0), in);
	timeline_number(json_get_int(r->data, "output_tokens", 0), out);
	buf_printf(b, "call %lld · %s in, %s out · ", (long long)json_get_int(r->data, "call", 0), in, out);
	dollars(b, json_get_int(r->data, "cost_micros", 0));
	if (json_get_text(r->data, "finish") != NULL) {
		buf_add_str(b, " · ");
		add_text(b, r->data, "finish");
	}
	add_seconds(b, r->data, "duration_ms");
	if (json_get_text(r->data, "note") != NULL) {
		buf_add_str(b, " · ");
		add_text(b, r->data, "note");
	}
}

static void text_command(const struct row *r, struct buf *b)
{
	const char *command = json_get_text(r->data, "command");

	buf_add_str(b, "$ ");
	for (; command != NULL && *command != '\0'; command++) {
		if (*command == '\n')
			buf_add_str(b, command[1] == '\0' ? "" : " ↵ ");
		else
			buf_add(b, *command == '\t' ? " " : command, 1);
	}
}

static void text_exited(const struct row *r, struct buf *b)
{
	const struct json *code = json_get(r->data, "exit_code");

	if (json_get_bool(r->data, "timed_out", false))
		buf_add_str(b, "stopped at its time limit · ");
	buf_add_str(b, code != NULL ? "exit " : "ended by signal ");
	add_text(b, r->data, code != NULL ? "exit_code" : "signal");
	add_seconds(b, r->data, "duration_ms");
	if (json_get_int(r->data, "cut_bytes", 0) > 0)
		buf_printf(b, " · %lld bytes of output not kept", (long long)json_get_int(r->data, "cut_bytes", 0));
}

static void text_tool(const struct row *r, struct buf *b)
{
	add_text(b, r->data, "tool");
	if (json_get_text(r->data, "path") != NULL) {
		buf_add_char(b, ' ');
		add_text(b, r->data, "path");
	}
	if (json_get_int(r->data, "bytes", -1) >= 0)
		buf_printf(b, " · %lld bytes", (long long)json_get_int(r->data, "bytes", 0));
	if (json_get_text(r->data, "error") != NULL) {
		buf_add_str(b, " · ");
		add_text(b, r->data, "error");
	}
}

static void text_note(const struct row *r, struct buf *b)
{
	add_text(b, r->data, "text");
}

static void text_call(const struct row *r, struct buf *b)
{
	bool web = json_get(r->data, "host") != NULL;

	add_text(b, r->data, web ? "method" : "connection");
	buf_add_char(b, ' ');
	add_text(b, r->data, web ? "host" : "method");
	if (!web) {
		buf_add_char(b, ' ');
		add_text(b, r->data, "path");
	}
	buf_add_str(b, " · ");
	add_text(b, r->data, "status");
	add_seconds(b, r->data, "duration_ms");
}

static void text_denied(const struct row *r, struct buf *b)
{
	add_text(b, r->data, "what");
	buf_add_str(b, " · rule ");
	add_text(b, r->data, "rule");
}

static void text_truncated(const struct row *r, struct buf *b)
{
	buf_printf(b, "%lld events (%lld bytes) were counted, not kept", (long long)json_get_int(r->data, "dropped_events", 0),
			(long long)json_get_int(r->data, "dropped_bytes", 0));
}

static void text_destroyed(const struct row *r, struct buf *b)
{
	buf_add_str(b, "microVM destroyed");
	if (r->t->full && json_get_text(r->data, "reason") != NULL) {
		buf_add_str(b, " · ");
		add_text(b, r->data, "reason");
	}
}

static void add_usage(const struct json *usage, struct buf *b)
{
	int64_t calls = json_get_int(usage, "model_calls", 0);
	int64_t tokens = json_get_int(
			usage, "total_tokens", json_get_int(usage, "input_tokens", 0) + json_get_int(usage, "output_tokens", 0));
	char a[32], t[32];

	timeline_number(calls, a);
	timeline_number(tokens, t);
	buf_printf(b, "%s model call%s, %s tokens", a, calls == 1 ? "" : "s", t);
}

static void text_succeeded(const struct row *r, struct buf *b)
{
	add_usage(json_get(r->data, "usage"), b);
}

/* The code, but where the label says the same, and the message. */
static void text_end(const struct row *r, struct buf *b)
{
	const struct json *error = json_get(r->data, "error");
	const char *code = json_get_text(error, "code"), *message = json_get_text(error, "message");
	const char *type = json_get_text(r->event, "type");
	bool same = code != NULL && type != NULL && strncmp(type, "run.", 4) == 0 && strcmp(type + 4, code) == 0;

	if (code != NULL && (!same || message == NULL))
		buf_add_str(b, code);
	if (message != NULL) {
		buf_add_str(b, b->len > 0 ? ": " : "");
		buf_add_str(b, message);
	}
}

static void text_settled(const struct row *r, struct buf *b)
{
	dollars(b, json_get_int(r->data, "charged_micros", 0));
	buf_add_str(b, " charged, ");
	dollars(b, json_get_int(r->data, "released_micros", 0));
	buf_add_str(b, " released");
}

/* --- lines below a row ------------------------------------------------------------------------------------------------------- */

static void indent(struct buf *out)
{
	for (int i = 0; i < HEAD_WIDTH; i++)
		buf_add_char(out, ' ');
}

/* Output of a command: each line behind a bar, escaped, uncut. */
static void below_output(const struct row *r)
{
	const struct json *text = json_get(r->data, "text"), *base64 = json_get(r->data, "base64");
	struct buf bytes = BUF_INIT(DETAIL_MAX);
	bool err = json_get_text(r->data, "stream") != NULL && strcmp(json_get_text(r->data, "stream"), "stderr") == 0;
	size_t at = 0;

	if (base64 != NULL && json_type(base64) == JSON_STRING) {
		if (!text_unb64(json_as_text(base64), json_len(base64), &bytes))
			buf_add_str(&bytes, "(output that is no base64)");
	} else if (text != NULL && json_type(text) == JSON_STRING) {
		buf_add(&bytes, json_as_text(text), json_len(text));
	}
	while (at < bytes.len) {
		const uint8_t *end = memchr(bytes.data + at, '\n', bytes.len - at);
		size_t n = end != NULL ? (size_t)(end - (bytes.data + at)) : bytes.len - at;

		indent(r->out);
		buf_add_str(r->out, term_begin(err ? TERM_YELLOW : TERM_DIM, r->t->colour));
		buf_add_str(r->out, "│ ");
		(void)text_safe(r->out, (const char *)bytes.data + at, n, false);
		buf_add_str(r->out, term_end(r->t->colour));
		buf_add_char(r->out, '\n');
		at += n + 1;
	}
	buf_free(&bytes);
}

static void below_end(const struct row *r)
{
	const struct json *error = json_get(r->data, "error"), *usage = json_get(r->data, "usage");

	if (json_get_text(error, "remedy") != NULL) {
		indent(r->out);
		(void)text_safe(r->out, json_get_text(error, "remedy"), strlen(json_get_text(error, "remedy")), false);
		buf_add_char(r->out, '\n');
	}
	if (usage != NULL && json_get_int(usage, "model_calls", 0) > 0) {
		indent(r->out);
		add_usage(usage, r->out);
		buf_add_char(r->out, '\n');
	}
}

/* --- the table -----------------------------------------------------------------------------------------------------------------
 */

static const struct kind KINDS[] = {
	{ "run.queued", "Queued", TERM_PLAIN, false, TIMELINE_STEP, "waiting for a host", text_queued, NULL },
	{ "run.claimed", "Queued", TERM_PLAIN, true, TIMELINE_STEP, "starting the microVM", text_claimed, NULL },
	{ "run.requeued", "Queued", TERM_YELLOW, false, TIMELINE_STEP, "waiting for a host", text_requeued, NULL },
	{ "run.cancel_requested", "Cancel", TERM_YELLOW, false, TIMELINE_STEP, "ending", text_cancel_requested, NULL },
	{ "microvm.ready", "MicroVM", TERM_CYAN, false, TIMELINE_STEP, "starting the worker", text_ready, NULL },
	{ "worker.started", "MicroVM", TERM_CYAN, false, TIMELINE_STEP, "the model thinks", text_started, NULL },
	{ "model.call", "Model", TERM_PLAIN, true, TIMELINE_STEP, "the worker works", text_model_call, NULL },
	{ "shell.started", "Shell", TERM_BOLD, false, TIMELINE_STEP, "a command runs", text_command, NULL },
	{ "shell.output", NULL, TERM_PLAIN, true, TIMELINE_STEP, NULL, NULL, below_output },
	{ "shell.exited", "Shell", TERM_DIM, true, TIMELINE_STEP, "the model thinks", text_exited, NULL },
	{ "tool.called", "Files", TERM_BOLD, false, TIMELINE_STEP, "the model thinks", text_tool, NULL },
	{ "worker.note", "Worker", TERM_PLAIN, true, TIMELINE_STEP, NULL, text_note, NULL },
	{ "connection.call", "Call", TERM_BOLD, false, TIMELINE_STEP, "the model thinks", text_call, NULL },
	{ "web.request", "Web", TERM_BOLD, false, TIMELINE_STEP, "the model thinks", text_call, NULL },
	{ "denied", "Denied", TERM_YELLOW, false, TIMELINE_STEP, NULL, text_denied, NULL },
	{ "events.truncated", "Record", TERM_YELLOW, false, TIMELINE_STEP, NULL, text_truncated, NULL },
	{ "microvm.destroyed", "MicroVM", TERM_CYAN, false, TIMELINE_STEP, "finishing", text_destroyed, NULL },
	{ "run.succeeded", "Succeeded", TERM_GREEN, false, TIMELINE_END, "settling", text_succeeded, NULL },
	{ "run.failed", "Failed", TERM_RED, false, TIMELINE_END, "settling", text_end, below_end },
	{ "run.cancelled", "Cancelled", TERM_YELLOW, false, TIMELINE_END, "settling", text_end, below_end },
	{ "run.timed_out", "Timed out", TERM_RED, false, TIMELINE_END, "settling", text_end, below_end },
	{ "run.interrupted", "Interrupted", TERM_RED, false, TIMELINE_END, "settling", text_end, below_end },
	{ "run.settled", "Worker destroyed", TERM_BOLD, false, TIMELINE_SETTLED, NULL, text_settled, NULL },
};

static const struct kind *kind_of(const struct json *event)
{
	const char *type = json_get_text(event, "type");

	for (size_t i = 0; type != NULL && i < sizeof KINDS / sizeof KINDS[0]; i++)
		if (strcmp(KINDS[i].type, type) == 0)
			return &KINDS[i];
	return NULL;
}

enum timeline_kind timeline_kind(const struct json *event)
{
	const struct kind *k = kind_of(event);

	return k != NULL ? k->kind : TIMELINE_STEP;
}

const char *timeline_doing(const struct json *event)
{
	const struct kind *k = kind_of(event);

	return k != NULL ? k->doing : NULL;
}

double timeline_t(const struct json *event)
{
	const struct json *v = json_get(event, "t");
	double t = 0;

	if (v != NULL && (json_type(v) == JSON_DECIMAL || json_type(v) == JSON_INT))
		t = strtod(json_as_text(v), NULL);
	return t >= 0 && t < 1e7 ? t : 0;
}

static void row(const struct row *r, const char *label, enum term_style style, size_t width, const struct buf *text)
{
	size_t head = HEAD_WIDTH, label_width = LABEL_WIDTH;
	bool colour = r->t->colour;

	if (strlen(label) > LABEL_WIDTH) { /* "Worker destroyed" stands out of its column, as on the page */
		head += strlen(label) - LABEL_WIDTH;
		label_width = strlen(label);
	}
	buf_printf(r->out, "%s%6.2f%s  ", term_begin(TERM_DIM, colour), timeline_t(r->event), term_end(colour));
	buf_add_str(r->out, term_begin(style, colour));
	term_cell(r->out, label, strlen(label), label_width, true);
	buf_add_str(r->out, term_end(colour));
	buf_add_str(r->out, "  ");
	term_cell(r->out, text->len > 0 ? (const char *)text->data : "", text->len, width > head + 8 ? width - head : 8, false);
	buf_add_char(r->out, '\n');
}

void timeline_event(const struct timeline *t, const struct json *event, struct buf *out)
{
	const struct kind *k = kind_of(event);
	struct row r = { .t = t, .event = event, .data = json_get(event, "data"), .out = out };
	struct buf text = BUF_INIT(DETAIL_MAX);

	if (k != NULL && k->only_full && !t->full)
		return;
	if (k == NULL) {
		const char *type = json_get_text(event, "type");

		buf_add_str(&text, type != NULL ? type : "an event without a type");
		row(&r, "Event", TERM_DIM, t->width, &text);
	} else {
		if (k->text != NULL) {
			k->text(&r, &text);
			row(&r, k->label, k->style, k->kind == TIMELINE_END ? END_WIDTH : t->width, &text);
		}
		if (k->below != NULL)
			k->below(&r);
	}
	buf_free(&text);
}

void timeline_parts(const struct json *parts, struct buf *out)
{
	int64_t fee = json_get_int(parts, "run_fee_micros", 0);

	buf_add_str(out, "Model ");
	dollars(out, json_get_int(parts, "model_micros", 0));
	buf_add_str(out, " · Web ");
	dollars(out, json_get_int(parts, "web_micros", 0));
	buf_add_str(out, " · Compute ");
	dollars(out, json_get_int(parts, "compute_micros", 0));
	if (fee > 0) {
		buf_add_str(out, " · Run fee ");
		dollars(out, fee);
	}
}
