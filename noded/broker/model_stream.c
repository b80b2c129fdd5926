/*
 * The one reader of model replies (model_stream.h). Called by model.c for every piece of body that curl gives, on the broker's one
 * thread; also by its fuzz target. Owns the texts it gathers until model_stream_take moves them out.
 */
#include "model_stream.h"

#include "common/json.h"
#include "common/sse.h"
#include "common/text.h"

#define CUT_NOTE "[The reply reached its token limit; a tool call that was not complete is left out.]"

enum stream_kind { KIND_UNKNOWN, KIND_EVENTS, KIND_WHOLE };

struct partial_call {
	bool used;
	char id[MODEL_ID_MAX + 1];
	char name[MODEL_ID_MAX + 1];
	struct buf arguments;
};

struct model_stream {
	enum stream_kind kind;
	struct sse_reader events;
	struct buf body; /* KIND_WHOLE only */
	struct buf content;
	struct partial_call calls[MODEL_TOOL_CALLS_MAX];
	size_t last_call;         /* index of the call that came last; MODEL_TOOL_CALLS_MAX = none */
	size_t text_bytes;        /* of all strings */
	enum model_finish finish; /* 0 = not said yet */
	bool done;
	bool any; /* at least one JSON object came */
	bool has_usage;
	struct meter_tokens usage;
	bool failed; /* `error` says why; sticky */
	struct err error;
};

static bool on_event(void *arg, const char *event, const char *id, const char *data, size_t n);

struct model_stream *model_stream_new(void)
{
	struct model_stream *s = calloc(1, sizeof(*s));

	if (s == NULL)
		return NULL;
	sse_reader_init(&s->events, MODEL_LINE_MAX, on_event, s);
	buf_init(&s->body, MODEL_BODY_MAX);
	buf_init(&s->content, MODEL_STR_MAX);
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++)
		buf_init(&s->calls[i].arguments, MODEL_STR_MAX);
	s->last_call = MODEL_TOOL_CALLS_MAX;
	return s;
}

void model_stream_free(struct model_stream *s)
{
	if (s == NULL)
		return;
	sse_reader_free(&s->events);
	buf_free(&s->body);
	buf_free(&s->content);
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++)
		buf_free(&s->calls[i].arguments);
	free(s);
}

static bool EPH_PRINTF(3, 4) fail(struct model_stream *s, enum err_code code, const char *fmt, ...)
{
	char text[ERR_TEXT_MAX];
	va_list ap;

	if (s->failed)
		return false;
	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	s->failed = true;
	(void)err_set(&s->error, code, "%s", text);
	return false;
}

/* --- pieces ------------------------------------------------------------------------------------------------------------------ */

static bool add_text(struct model_stream *s, struct buf *b, const struct json *v, const char *what)
{
	size_t n;

	if (v == NULL || json_type(v) == JSON_NULL)
		return true;
	if (json_type(v) != JSON_STRING)
		return fail(s, ERR_PROTOCOL, "%s is not a string", what);
	n = json_len(v);
	if (n > MODEL_REPLY_TEXT_MAX - s->text_bytes || !buf_add(b, json_as_text(v), n))
		return fail(s, ERR_LIMIT, "%s is over %d bytes, or all texts of the reply over %d", what, MODEL_STR_MAX,
				MODEL_REPLY_TEXT_MAX);
	s->text_bytes += n;
	return true;
}

static bool set_name(struct model_stream *s, char out[MODEL_ID_MAX + 1], const struct json *v, const char *what)
{
	if (v == NULL || json_type(v) == JSON_NULL || (json_type(v) == JSON_STRING && json_len(v) == 0))
		return true;
	if (json_type(v) != JSON_STRING || !text_copy(out, MODEL_ID_MAX + 1, json_as_text(v))) {
		out[0] = '\0';
		return fail(s, ERR_PROTOCOL, "%s is not a string of at most %d bytes", what, MODEL_ID_MAX);
	}
	return true;
}

/* Where a tool call's piece belongs: its index; without one, a piece with an id begins a new call, others go on with the last. */
static size_t call_slot(const struct model_stream *s, const struct json *v)
{
	const struct json *index = json_get(v, "index"), *id = json_get(v, "id");
	size_t i = 0;

	if (index != NULL && json_type(index) == JSON_INT)
		return json_as_int(index) >= 0 && json_as_int(index) < MODEL_TOOL_CALLS_MAX ? (size_t)json_as_int(index)
											    : MODEL_TOOL_CALLS_MAX;
	if (s->last_call < MODEL_TOOL_CALLS_MAX && (id == NULL || json_type(id) != JSON_STRING))
		return s->last_call;
	while (i < MODEL_TOOL_CALLS_MAX && s->calls[i].used)
		i++;
	return i;
}

static bool take_call(struct model_stream *s, const struct json *v)
{
	const struct json *function = json_get(v, "function");
	size_t slot = call_slot(s, v);
	struct partial_call *c;

	if (slot >= MODEL_TOOL_CALLS_MAX)
		return fail(s, ERR_LIMIT, "the reply has more than 64 tool calls");
	c = &s->calls[slot];
	c->used = true;
	s->last_call = slot;
	return set_name(s, c->id, json_get(v, "id"), "a tool call's id") &&
	       set_name(s, c->name, json_get(function, "name"), "a tool call's name") &&
	       add_text(s, &c->arguments, json_get(function, "arguments"), "a tool call's arguments");
}

/* `delta` of a chunk, or `message` of a whole answer. */
static bool take_message(struct model_stream *s, const struct json *m)
{
	const struct json *calls = json_get(m, "tool_calls");

	if (m == NULL || json_type(m) != JSON_OBJECT)
		return true;
	if (!add_text(s, &s->content, json_get(m, "content"), "content") ||
			!add_text(s, &s->content, json_get(m, "refusal"), "refusal"))
		return false;
	if (calls == NULL || json_type(calls) != JSON_ARRAY)
		return true;
	for (size_t i = 0; i < json_len(calls); i++)
		if (!take_call(s, json_at(calls, i)))
			return false;
	return true;
}

static enum model_finish finish_parse(const char *text)
{
	static const struct {
		const char *text;
		enum model_finish finish;
	} known[] = {
		{ "stop", FINISH_STOP },
		{ "tool_calls", FINISH_TOOL_CALLS },
		{ "function_call", FINISH_TOOL_CALLS },
		{ "length", FINISH_LENGTH },
		{ "content_filter", FINISH_FILTER },
	};

	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (strcmp(known[i].text, text) == 0)
			return known[i].finish;
	return FINISH_OTHER;
}

/* A count, or -1 where it is absent or no whole number: the meter charges the hold for what makes no sense. */
static int64_t count_of(const struct json *v)
{
	return v != NULL && json_type(v) == JSON_INT ? json_as_int(v) : -1;
}

static void take_usage(struct model_stream *s, const struct json *u)
{
	const struct json *cached;

	if (u == NULL || json_type(u) != JSON_OBJECT)
		return;
	cached = json_get(json_get(u, "prompt_tokens_details"), "cached_tokens");
	s->has_usage = true;
	s->usage.input = count_of(json_get(u, "prompt_tokens"));
	s->usage.output = count_of(json_get(u, "completion_tokens"));
	s->usage.cached = cached == NULL || json_type(cached) == JSON_NULL ? 0 : count_of(cached);
}

/*
 * Some providers count on in every chunk. Such a count is not what the call costs: only one that comes with or after the finish
 * reason, in a chunk of its own, or in a whole answer is. An answer that breaks off before has no usage.
 */
static bool usage_is_final(const struct model_stream *s, const struct json *choices)
{
	if (s->kind == KIND_WHOLE || s->finish != 0 || choices == NULL || json_type(choices) != JSON_ARRAY ||
			json_len(choices) == 0)
		return true;
	return json_get_text(json_at(choices, 0), "finish_reason") != NULL;
}

/* One chunk, or the whole answer: they differ in the name of the message only. */
static bool take_object(struct model_stream *s, const struct json *v)
{
	const struct json *choices = json_get(v, "choices"), *choice;
	const char *finish;

	if (usage_is_final(s, choices))
		take_usage(s, json_get(v, "usage"));
	if (json_get(v, "error") != NULL && json_type(json_get(v, "error")) != JSON_NULL)
		return fail(s, ERR_UNAVAILABLE, "the provider broke its answer off with an error");
	if (choices == NULL || json_type(choices) != JSON_ARRAY || json_len(choices) == 0)
		return true;
	choice = json_at(choices, 0);
	if (!take_message(s, json_get(choice, s->kind == KIND_WHOLE ? "message" : "delta")))
		return false;
	finish = json_get_text(choice, "finish_reason");
	if (finish != NULL)
		s->finish = finish_parse(finish);
	return true;
}

#define NUL_ESCAPE "\\u0000"
#define REPLACEMENT_ESCAPE "\\ufffd"

/* Strict JSON, but for one thing: a model may say NUL, which our texts cannot hold. It becomes U+FFFD instead of ending the run. */
static int parse_answer(const char *p, size_t n, struct json **v, struct err *e)
{
	const size_t len = sizeof(NUL_ESCAPE) - 1;
	char *copy;
	int rc;

	if (memmem(p, n, NUL_ESCAPE, len) == NULL)
		return json_parse(p, n, v, e);
	copy = malloc(n);
	if (copy == NULL)
		return err_set(e, ERR_NOMEM, "no memory for %zu bytes", n);
	memcpy(copy, p, n);
	for (size_t i = 0; i + 1 < n; i++) {
		if (copy[i] != '\\')
			continue;
		if (n - i >= len && memcmp(copy + i, NUL_ESCAPE, len) == 0)
			memcpy(copy + i, REPLACEMENT_ESCAPE, len);
		i++; /* an escaped backslash is no beginning of an escape */
	}
	rc = json_parse(copy, n, v, e);
	free(copy);
	return rc;
}

static bool take_json(struct model_stream *s, const char *p, size_t n)
{
	struct json *v;
	struct err e;
	bool ok;

	if (parse_answer(p, n, &v, &e) < 0) {
		(void)err_wrap(&e, "the provider's answer is not strict JSON");
		e.code = ERR_PROTOCOL;
		s->error = e;
		s->failed = true;
		return false;
	}
	s->any = true;
	ok = json_type(v) == JSON_OBJECT ? take_object(s, v) : fail(s, ERR_PROTOCOL, "the provider's answer is not a JSON object");
	json_free(v);
	return ok;
}

static bool on_event(void *arg, const char *event, const char *id, const char *data, size_t n)
{
	struct model_stream *s = arg;

	(void)event;
	(void)id;
	if (s->done || n == 0)
		return true;
	if (n == 6 && memcmp(data, "[DONE]", 6) == 0) {
		s->done = true;
		return true;
	}
	return take_json(s, data, n);
}

/* --- the stream -------------------------------------------------------------------------------------------------------------- */

int model_stream_feed(struct model_stream *s, const void *p, size_t n, struct err *e)
{
	const uint8_t *bytes = p;

	while (s->kind == KIND_UNKNOWN && n > 0) {
		if (*bytes == ' ' || *bytes == '\t' || *bytes == '\r' || *bytes == '\n') {
			bytes++; /* blank lines before the first event mean nothing either */
			n--;
			continue;
		}
		s->kind = *bytes == '{' ? KIND_WHOLE : KIND_EVENTS;
	}
	if (s->failed) {
		*e = s->error;
		return -1;
	}
	if (n == 0 || s->done)
		return 0;
	if (s->kind == KIND_WHOLE) {
		if (buf_add(&s->body, bytes, n))
			return 0;
		(void)fail(s, ERR_LIMIT, "the provider's answer is over 8 MiB");
	} else {
		if (sse_reader_feed(&s->events, bytes, n, e) == 0)
			return 0;
		(void)fail(s, e->code, "%s", e->text);
	}
	*e = s->error;
	return -1;
}

int model_stream_end(struct model_stream *s, struct err *e)
{
	if (!s->failed && s->kind == KIND_WHOLE)
		(void)take_json(s, (const char *)s->body.data, s->body.len);
	buf_free(&s->body);
	if (s->failed) {
		*e = s->error;
		return -1;
	}
	if (s->finish == 0)
		return err_set(e, ERR_PROTOCOL, "%s",
				s->kind == KIND_UNKNOWN ? "the provider's answer is empty"
				: s->any                ? "the provider's answer was cut off before its finish reason"
							: "the provider's answer is no chat completion");
	return 0;
}

bool model_stream_done(const struct model_stream *s)
{
	return s->done;
}

bool model_stream_usage(const struct model_stream *s, struct meter_tokens *out)
{
	if (s->has_usage)
		*out = s->usage;
	return s->has_usage;
}

static bool move_call(struct partial_call *from, uint32_t call, uint32_t number, struct model_tool_call *to)
{
	char made[MODEL_ID_MAX + 1];

	if (from->id[0] == '\0') {
		if (!text_fmt(made, sizeof(made), "call_%u_%u", call, number))
			return false;
		to->id = strdup(made);
	} else {
		to->id = strdup(from->id);
	}
	to->name = strdup(from->name);
	to->arguments = buf_steal(&from->arguments, NULL);
	if (to->arguments == NULL)
		to->arguments = strdup("");
	return to->id != NULL && to->name != NULL && to->arguments != NULL;
}

int model_stream_take(struct model_stream *s, uint32_t call, struct model_reply *out, struct err *e)
{
	uint32_t count = 0;

	*out = (struct model_reply){ .call = call, .status = MODEL_OK, .finish = s->finish };
	if (s->finish == FINISH_LENGTH && s->last_call < MODEL_TOOL_CALLS_MAX) {
		s->calls[s->last_call].used = false;
		if (s->content.len + sizeof(CUT_NOTE) < s->content.max) {
			if (s->content.len > 0)
				(void)buf_add_char(&s->content, '\n');
			(void)buf_add_str(&s->content, CUT_NOTE);
		}
	}
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++)
		count += s->calls[i].used;
	if (count > 0) {
		out->calls = calloc(count, sizeof(*out->calls));
		if (out->calls == NULL)
			return err_set(e, ERR_NOMEM, "no memory for a model's reply");
	}
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++) {
		if (!s->calls[i].used)
			continue;
		out->call_count++;
		if (!move_call(&s->calls[i], call, out->call_count, &out->calls[out->call_count - 1]))
			goto nomem;
	}
	out->content = buf_steal(&s->content, NULL);
	if (out->content == NULL)
		out->content = strdup("");
	out->error_text = strdup("");
	if (out->content != NULL && out->error_text != NULL)
		return 0;
nomem:
	model_reply_free(out);
	return err_set(e, ERR_NOMEM, "no memory for a model's reply");
}
