/*
 * A prompt with a ```turns block: a JSON array, one object for each reply, that says all of what the provider does. For tests; the
 * format is in README.md. Pure. A mistake in the block is answered with 400 and its place.
 */
#include "plan.h"

#include "common/text.h"

#include <inttypes.h>

/* Appends s with every {{tool:N}} replaced by the N-th tool output since the prompt. */
static bool put_filled(const struct chat *c, struct buf *b, const char *s, size_t n)
{
	static const char open[] = "{{tool:";
	const char *end = s + n;

	while (s < end) {
		const char *at = memmem(s, (size_t)(end - s), open, sizeof(open) - 1), *digits;
		size_t len;

		if (!at)
			return buf_add(b, s, (size_t)(end - s));
		digits = at + sizeof(open) - 1;
		len = strspn(digits, "0123456789");
		if (!buf_add(b, s, (size_t)(at - s)))
			return false;
		if (len == 0 || len > 6 || strncmp(digits + len, "}}", 2) != 0) {
			s = at + 1;
			if (!buf_add(b, at, 1))
				return false;
			continue;
		}
		size_t number = strtoul(digits, NULL, 10);

		if (number >= 1 && number <= c->output_count ? !buf_add_str(b, c->outputs[number - 1])
							     : !buf_printf(b, "[there is no tool output %zu]", number))
			return false;
		s = digits + len + 2;
	}
	return true;
}

static int filled(const struct chat *c, const struct json *v, char **out, struct err *e)
{
	struct buf b = BUF_INIT(PLAN_TEXT_MAX);

	if (!put_filled(c, &b, json_as_text(v), json_len(v)) || !buf_cstr(&b)) {
		buf_free(&b);
		return err_set(e, ERR_LIMIT, "the text is over %d bytes", PLAN_TEXT_MAX);
	}
	*out = buf_steal(&b, NULL);
	return 0;
}

/* JSON with the strings in it filled. Depth is bounded by the writer (32). */
static void put_json(const struct chat *c, struct jw *w, const struct json *v)
{
	char *text = NULL;
	struct err e;

	switch (json_type(v)) {
	case JSON_STRING:
		if (filled(c, v, &text, &e) != 0)
			w->failed = true;
		else
			jw_strn(w, text, strlen(text));
		free(text);
		break;
	case JSON_OBJECT:
	case JSON_ARRAY:
		if (json_type(v) == JSON_OBJECT)
			jw_object(w);
		else
			jw_array(w);
		for (size_t i = 0; i < json_len(v) && !w->failed; i++) {
			if (json_type(v) == JSON_OBJECT)
				jw_key(w, json_key(v, i));
			put_json(c, w, json_at(v, i));
		}
		jw_close(w);
		break;
	default: jw_json(w, v);
	}
}

static int json_filled(const struct chat *c, const struct json *v, char **out, struct err *e)
{
	struct buf b = BUF_INIT(PLAN_TEXT_MAX);
	struct jw w;

	jw_init(&w, &b);
	put_json(c, &w, v);
	if (!jw_end(&w) || !buf_cstr(&b)) {
		buf_free(&b);
		return err_set(e, ERR_INVALID, "the JSON is too deep (32) or too large");
	}
	*out = buf_steal(&b, NULL);
	return 0;
}

/* --- one turn ---------------------------------------------------------------------------------------------------------------- */

static int number(const struct json *v, int64_t min, int64_t max, int64_t *out, struct err *e)
{
	if (json_type(v) != JSON_INT || json_as_int(v) < min || json_as_int(v) > max)
		return err_set(e, ERR_INVALID, "an integer from %" PRId64 " to %" PRId64 " is needed", min, max);
	*out = json_as_int(v);
	return 0;
}

static int want(const struct json *v, enum json_type type, struct err *e)
{
	if (json_type(v) != type)
		return err_set(e, ERR_INVALID, "a value of type %s is needed", json_type_name(type));
	return 0;
}

static int read_call(const struct chat *c, const struct json *v, struct plan *out, struct err *e)
{
	const struct json *arguments = json_get(v, "arguments");
	const char *name = json_get_text(v, "name"), *id = json_get_text(v, "id");
	char made[64], *text = NULL;
	int rc = 0;

	if (!name)
		return err_set(e, ERR_INVALID, "name: a string is needed");
	if (!text_fmt(made, sizeof(made), "call_%zu_%zu", c->turn + 1, out->call_count + 1))
		return err_set(e, ERR_INTERNAL, "id");
	if (!arguments)
		text = strdup("{}");
	else if (json_type(arguments) == JSON_STRING)
		rc = filled(c, arguments, &text, e);
	else
		rc = json_filled(c, arguments, &text, e);
	if (rc != 0)
		return err_wrap(e, "arguments");
	if (!text)
		return err_set(e, ERR_NOMEM, "no memory");
	rc = plan_add_call(out, id ? id : made, name, text, e);
	free(text);
	return rc;
}

static int read_calls(const struct chat *c, const struct json *v, struct plan *out, struct err *e)
{
	if (want(v, JSON_ARRAY, e) != 0)
		return -1;
	for (size_t i = 0; i < json_len(v); i++) {
		if (read_call(c, json_at(v, i), out, e) != 0)
			return err_wrap(e, "[%zu]", i);
	}
	return 0;
}

static int read_header(const char *name, const struct json *v, struct plan *out, struct err *e)
{
	struct plan_header *h = &out->headers[out->header_count];

	if (out->header_count == PLAN_HEADERS_MAX)
		return err_set(e, ERR_LIMIT, "more than %d headers", PLAN_HEADERS_MAX);
	if (json_type(v) != JSON_STRING || !text_copy(h->name, sizeof(h->name), name) ||
			!text_copy(h->value, sizeof(h->value), json_as_text(v)) || strpbrk(h->name, "\r\n: ") ||
			strpbrk(h->value, "\r\n"))
		return err_set(e, ERR_INVALID, "headers: names and values are strings of one line");
	out->header_count++;
	return 0;
}

static bool for_attempt(const struct json *attempts, int64_t attempt)
{
	if (!attempts || json_type(attempts) != JSON_ARRAY)
		return true;
	for (size_t i = 0; i < json_len(attempts); i++) {
		if (json_type(json_at(attempts, i)) == JSON_INT && json_as_int(json_at(attempts, i)) == attempt)
			return true;
	}
	return false;
}

static int read_http(const struct chat *c, const struct json *v, int64_t attempt, struct plan *out, struct err *e)
{
	const struct json *body = json_get(v, "body"), *headers = json_get(v, "headers"), *status = json_get(v, "status");
	int64_t n = 0;

	if (want(v, JSON_OBJECT, e) != 0)
		return -1;
	if (!for_attempt(json_get(v, "attempts"), attempt))
		return 0;
	if (!status || number(status, 200, 599, &n, e) != 0)
		return status ? err_wrap(e, "status") : err_set(e, ERR_INVALID, "status: an integer is needed");
	out->http_status = (int)n;
	for (size_t i = 0; headers && i < json_len(headers); i++) {
		if (read_header(json_key(headers, i), json_at(headers, i), out, e) != 0)
			return -1;
	}
	if (!body)
		return 0;
	out->http_json = json_type(body) != JSON_STRING;
	return out->http_json ? json_filled(c, body, &out->http_body, e) : filled(c, body, &out->http_body, e);
}

static int read_member(
		const struct chat *c, const char *key, const struct json *v, int64_t attempt, struct plan *out, struct err *e)
{
	if (strcmp(key, "text") == 0)
		return want(v, JSON_STRING, e) == 0 ? filled(c, v, &out->text, e) : -1;
	if (strcmp(key, "raw") == 0)
		return want(v, JSON_STRING, e) == 0 ? filled(c, v, &out->raw, e) : -1;
	if (strcmp(key, "tool_calls") == 0)
		return read_calls(c, v, out, e);
	if (strcmp(key, "usage") == 0) {
		out->no_usage = json_type(v) == JSON_NULL;
		return out->no_usage ? 0 : json_filled(c, v, &out->usage, e);
	}
	if (strcmp(key, "finish_reason") == 0) {
		if (json_type(v) != JSON_STRING || !text_copy(out->finish, sizeof(out->finish), json_as_text(v)))
			return err_set(e, ERR_INVALID, "a string of at most 32 bytes is needed");
		return 0;
	}
	if (strcmp(key, "delay_ms") == 0)
		return number(v, 0, PLAN_DELAY_MAX_MS, &out->delay_ms, e);
	if (strcmp(key, "chunk_delay_ms") == 0)
		return number(v, 0, PLAN_DELAY_MAX_MS, &out->chunk_delay_ms, e);
	if (strcmp(key, "cut_after_bytes") == 0)
		return number(v, 0, PLAN_TEXT_MAX, &out->cut_after, e);
	if (strcmp(key, "stream") == 0) {
		out->stream = json_type(v) == JSON_BOOL && json_as_bool(v);
		return want(v, JSON_BOOL, e);
	}
	if (strcmp(key, "http") == 0)
		return read_http(c, v, attempt, out, e);
	return err_set(e, ERR_INVALID,
			"unknown; known are text, tool_calls, usage, finish_reason, delay_ms, chunk_delay_ms, http, "
			"cut_after_bytes, stream, raw");
}

static int read_turn(const struct chat *c, const struct json *v, int64_t attempt, struct plan *out, struct err *e)
{
	if (want(v, JSON_OBJECT, e) != 0)
		return -1;
	for (size_t i = 0; i < json_len(v); i++) {
		if (read_member(c, json_key(v, i), json_at(v, i), attempt, out, e) != 0)
			return err_wrap(e, "%s", json_key(v, i));
	}
	return 0;
}

int plan_turns(const struct chat *c, int64_t attempt, const char *block, size_t n, struct plan *out, struct err *e)
{
	char text[120];
	struct json *turns;
	int rc;

	if (json_parse(block, n, &turns, e) != 0)
		return err_wrap(e, "turns");
	if (json_type(turns) != JSON_ARRAY) {
		rc = err_set(e, ERR_INVALID, "turns: an array is needed");
	} else if (c->turn >= json_len(turns)) {
		rc = text_fmt(text, sizeof(text), "This is a script, not a model. It has %zu turns, and this is turn %zu.",
				     json_len(turns), c->turn + 1) &&
						     (out->text = strdup(text))
				     ? 0
				     : err_set(e, ERR_NOMEM, "no memory");
	} else {
		rc = read_turn(c, json_at(turns, c->turn), attempt, out, e);
		if (rc != 0)
			err_wrap(e, "turns[%zu]", c->turn);
	}
	json_free(turns);
	return rc;
}
