/*
 * The one reader of model replies (model_stream.h). Called by model.c for every piece of body that curl gives, on the broker's one
 * thread; also by its fuzz target. Owns the texts it gathers until model_stream_take moves them out.
 */
#include "model_stream.h"

#include "model_error.h"

#include "common/json.h"
#include "common/sse.h"
#include "common/text.h"

#define CUT_NOTE "[The reply reached its token limit; a tool call that was not complete is left out.]"
#define FILTER_NOTE "[The provider's filter ended the reply; a tool call that was not complete is left out.]"

enum stream_kind { KIND_UNKNOWN, KIND_EVENTS, KIND_WHOLE };

struct partial_call {
	bool used;
	char id[MODEL_ID_MAX + 1];
	char name[MODEL_ID_MAX + 1];
	struct buf arguments;
};

struct model_stream {
	enum stream_kind kind;
	const char *key; /* not ours */
	struct sse_reader events;
	struct buf body; /* KIND_WHOLE only */
	struct buf content;
	struct partial_call calls[MODEL_TOOL_CALLS_MAX];
	size_t last_call;         /* index of the call that came last; MODEL_TOOL_CALLS_MAX = none */
	size_t old_call;          /* where the one call of the old form is; MODEL_TOOL_CALLS_MAX = none */
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

struct model_stream *model_stream_new(const char *key)
{
	struct model_stream *s = calloc(1, sizeof(*s));

	if (s == NULL)
		return NULL;
	sse_reader_init(&s->events, MODEL_LINE_MAX, on_event, s);
	buf_init(&s->body, MODEL_BODY_MAX);
	buf_init(&s->content, MODEL_STR_MAX);
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++)
		buf_init(&s->calls[i].arguments, MODEL_STR_MAX);
	s->key = key;
	s->last_call = s->old_call = MODEL_TOOL_CALLS_MAX;
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

static size_t free_slot(const struct model_stream *s)
{
	size_t i = 0;

	while (i < MODEL_TOOL_CALLS_MAX && s->calls[i].used)
		i++;
	return i;
}

/* Does a piece without an index begin a call? With an id it does when the id is another one, without when it has a name. */
static bool begins_call(const struct model_stream *s, const struct json *v)
{
	const char *id = json_get_text(v, "id"), *name = json_get_text(json_get(v, "function"), "name");

	if (s->last_call >= MODEL_TOOL_CALLS_MAX)
		return true;
	if (id != NULL && *id != '\0')
		return strcmp(id, s->calls[s->last_call].id) != 0;
	return name != NULL && *name != '\0';
}

/* Where a tool call's piece belongs. In a whole answer there are no pieces: each is a call. */
static size_t call_slot(const struct model_stream *s, const struct json *v)
{
	const struct json *index = json_get(v, "index");

	if (s->kind == KIND_WHOLE)
		return free_slot(s);
	if (index != NULL && json_type(index) == JSON_INT)
		return json_as_int(index) >= 0 && json_as_int(index) < MODEL_TOOL_CALLS_MAX ? (size_t)json_as_int(index)
											    : MODEL_TOOL_CALLS_MAX;
	return begins_call(s, v) ? free_slot(s) : s->last_call;
}

static bool take_piece(struct model_stream *s, size_t slot, const struct json *id, const struct json *function)
{
	struct partial_call *c;

	if (slot >= MODEL_TOOL_CALLS_MAX)
		return fail(s, ERR_LIMIT, "the reply has more than %d tool calls", MODEL_TOOL_CALLS_MAX);
	c = &s->calls[slot];
	c->used = true;
	s->last_call = slot;
	return set_name(s, c->id, id, "a tool call's id") &&
	       set_name(s, c->name, json_get(function, "name"), "a tool call's name") &&
	       add_text(s, &c->arguments, json_get(function, "arguments"), "a tool call's arguments");
}

/* `function_call`, what `tool_calls` was called once: one call, without an id. */
static bool take_old_call(struct model_stream *s, const struct json *function)
{
	if (function == NULL || json_type(function) != JSON_OBJECT)
		return true;
	if (s->old_call >= MODEL_TOOL_CALLS_MAX)
		s->old_call = free_slot(s);
	return take_piece(s, s->old_call, NULL, function);
}

/* A text, or a list of parts of which each is one. */
static bool take_content(struct model_stream *s, const struct json *content)
{
	if (content == NULL || json_type(content) != JSON_ARRAY)
		return add_text(s, &s->content, content, "content");
	for (size_t i = 0; i < json_len(content); i++) {
		const struct json *part = json_at(content, i);
		const char *type = json_get_text(part, "type");

		if (type == NULL || strcmp(type, "text") != 0)
			return fail(s, ERR_PROTOCOL, "content has a part that is not text");
		if (!add_text(s, &s->content, json_get(part, "text"), "content"))
			return false;
	}
	return true;
}

/* `delta` of a chunk, or `message` of a whole answer. */
static bool take_message(struct model_stream *s, const struct json *m)
{
	const struct json *calls = json_get(m, "tool_calls");

	if (m == NULL || json_type(m) != JSON_OBJECT)
		return true;
	if (!take_content(s, json_get(m, "content")) || !add_text(s, &s->content, json_get(m, "refusal"), "refusal") ||
			!take_old_call(s, json_get(m, "function_call")))
		return false;
	if (calls == NULL || json_type(calls) != JSON_ARRAY)
		return true;
	for (size_t i = 0; i < json_len(calls); i++) {
		const struct json *v = json_at(calls, i);

		if (!take_piece(s, call_slot(s, v), json_get(v, "id"), json_get(v, "function")))
			return false;
	}
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
static bool usage_is_final(const struct model_stream *s, size_t choices, const struct json *ours)
{
	return s->kind == KIND_WHOLE || s->finish != 0 || choices == 0 || json_get_text(ours, "finish_reason") != NULL;
}

/* We ask for one choice; of more, the one with index 0 is meant. */
static const struct json *our_choice(const struct json *choices, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		const struct json *index = json_get(json_at(choices, i), "index");

		if (index == NULL || json_type(index) != JSON_INT || json_as_int(index) == 0)
			return json_at(choices, i);
	}
	return NULL;
}

static bool fail_with_error(struct model_stream *s, const struct json *v)
{
	const char *text = model_error_message(v);
	char shown[321];

	model_error_show(text != NULL ? text : "", text != NULL ? strlen(text) : 0, s->key, shown);
	return fail(s, ERR_UNAVAILABLE, "the provider broke its answer off with an error: %s", shown);
}

/* One chunk, or the whole answer: they differ in the name of the message only. */
static bool take_object(struct model_stream *s, const struct json *v)
{
	const struct json *choices = json_get(v, "choices"), *choice;
	size_t count = choices != NULL && json_type(choices) == JSON_ARRAY ? json_len(choices) : 0;
	const char *finish;

	choice = our_choice(choices, count);
	if (usage_is_final(s, count, choice))
		take_usage(s, json_get(v, "usage"));
	if (json_get(v, "error") != NULL && json_type(json_get(v, "error")) != JSON_NULL)
		return fail_with_error(s, v);
	if (choice == NULL)
		return true;
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
	struct json *v = NULL;
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

static bool reply_has(const struct model_reply *out, const char *id)
{
	for (uint32_t i = 0; i < out->call_count; i++)
		if (strcmp(out->calls[i].id, id) == 0)
			return true;
	return false;
}

static bool id_is_taken(const struct model_stream *s, const char *id, const struct model_reply *out)
{
	if (reply_has(out, id))
		return true;
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++)
		if (s->calls[i].used && strcmp(s->calls[i].id, id) == 0)
			return true;
	return false;
}

/* The provider's id, unless there is none or an earlier call has it: answers are told apart by it. */
static char *id_for(const struct model_stream *s, const struct partial_call *from, const struct model_reply *out)
{
	char made[MODEL_ID_MAX + 1];

	if (from->id[0] != '\0' && !reply_has(out, from->id))
		return strdup(from->id);
	for (uint32_t n = out->call_count + 1; text_fmt(made, sizeof(made), "call_%u_%u", out->call, n); n++)
		if (!id_is_taken(s, made, out))
			return strdup(made);
	return NULL;
}

/* Appends a call to the reply, whose list has room. */
static bool move_call(const struct model_stream *s, struct partial_call *from, struct model_reply *out)
{
	struct model_tool_call *to = &out->calls[out->call_count];

	to->id = id_for(s, from, out);
	to->name = strdup(from->name);
	to->arguments = buf_steal(&from->arguments, NULL);
	if (to->arguments == NULL)
		to->arguments = strdup("");
	out->call_count++;
	return to->id != NULL && to->name != NULL && to->arguments != NULL;
}

/* A reply that its limit or a filter cut may be cut in the call that came last: it is left out. */
static void drop_cut_call(struct model_stream *s)
{
	const char *text = s->finish == FINISH_LENGTH ? CUT_NOTE : FILTER_NOTE;

	if ((s->finish != FINISH_LENGTH && s->finish != FINISH_FILTER) || s->last_call >= MODEL_TOOL_CALLS_MAX)
		return;
	s->calls[s->last_call].used = false;
	if (s->content.len + strlen(text) + 1 >= s->content.max)
		return;
	if (s->content.len > 0)
		(void)buf_add_char(&s->content, '\n');
	(void)buf_add_str(&s->content, text);
}

int model_stream_take(struct model_stream *s, uint32_t call, struct model_reply *out, struct err *e)
{
	uint32_t count = 0;

	*out = (struct model_reply){ .call = call, .status = MODEL_OK, .finish = s->finish };
	drop_cut_call(s);
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++)
		count += s->calls[i].used;
	if (count > 0) {
		out->calls = calloc(count, sizeof(*out->calls));
		if (out->calls == NULL)
			return err_set(e, ERR_NOMEM, "no memory for a model's reply");
	}
	for (size_t i = 0; i < MODEL_TOOL_CALLS_MAX; i++) {
		if (s->calls[i].used && !move_call(s, &s->calls[i], out))
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
