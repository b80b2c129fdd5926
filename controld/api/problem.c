/* The table of problem types and the rendering of one. Pure functions, no state. */
#include "problem.h"

#include "common/json.h"
#include "common/text.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>

#define POINTER_MAX 1024 /* a longer way is shown as the whole body */
#define DETAIL_MAX 600   /* bytes of one field's text; our own words plus at most a short piece of the input */

static const struct {
	const char *name;
	int status;
	const char *title, *help;
} problems[PROBLEM_COUNT] = {
#define X(name, text, status, title, help) [PROBLEM_##name] = { text, status, title, help },
	PROBLEM_TABLE(X)
#undef X
};

const char *problem_name(enum problem p)
{
	return p < PROBLEM_COUNT ? problems[p].name : problems[PROBLEM_INTERNAL].name;
}

int problem_status(enum problem p)
{
	return p < PROBLEM_COUNT ? problems[p].status : 500;
}

const char *problem_title(enum problem p)
{
	return p < PROBLEM_COUNT ? problems[p].title : problems[PROBLEM_INTERNAL].title;
}

const char *problem_help(enum problem p)
{
	return p < PROBLEM_COUNT ? problems[p].help : problems[PROBLEM_INTERNAL].help;
}

enum problem problem_parse(const char *name)
{
	size_t i;

	for (i = 0; i < PROBLEM_COUNT; i++)
		if (strcmp(problems[i].name, name) == 0)
			return (enum problem)i;
	return PROBLEM_COUNT;
}

enum problem problem_of_status(int status)
{
	switch (status) {
	case 401: return PROBLEM_UNAUTHORIZED;
	case 404: return PROBLEM_NOT_FOUND;
	case 405:
	case 501: return PROBLEM_METHOD_NOT_ALLOWED;
	case 413: return PROBLEM_TOO_LARGE;
	case 415: return PROBLEM_UNSUPPORTED_MEDIA_TYPE;
	case 429: return PROBLEM_RATE_LIMITED;
	case 503: return PROBLEM_UNAVAILABLE;
	case 505: return PROBLEM_INVALID_REQUEST;
	default: return status >= 400 && status < 500 ? PROBLEM_INVALID_REQUEST : PROBLEM_INTERNAL;
	}
}

enum problem problem_of_err(const struct err *e)
{
	switch (e->code) {
	case ERR_INVALID:
	case ERR_LIMIT: return PROBLEM_INVALID_REQUEST;
	case ERR_NOT_FOUND: return PROBLEM_NOT_FOUND;
	case ERR_CONFLICT: return PROBLEM_CONFLICT;
	case ERR_DENIED: return PROBLEM_FORBIDDEN;
	case ERR_TIMEOUT:
	case ERR_UNAVAILABLE: return PROBLEM_UNAVAILABLE;
	default: return PROBLEM_INTERNAL;
	}
}

/* --- field errors ------------------------------------------------------------------------------------------------------- */

void field_errors_init(struct field_errors *fe)
{
	fe->count = fe->more = fe->invalid = 0;
}

void field_errors_free(struct field_errors *fe)
{
	size_t i;

	for (i = 0; i < fe->count; i++) {
		free(fe->list[i].at);
		free(fe->list[i].detail);
	}
	field_errors_init(fe);
}

enum problem field_errors_problem(const struct field_errors *fe)
{
	return fe->invalid ? PROBLEM_INVALID_REQUEST : PROBLEM_NOT_AVAILABLE;
}

/* "timeout_seconds is 0, but must be ...": the text with what it is about in front, made printable. */
static char *detail_text(enum field_where where, const char *at, const char *fmt, va_list ap) __attribute__((format(printf, 3, 0)));

static char *detail_text(enum field_where where, const char *at, const char *fmt, va_list ap)
{
	char text[DETAIL_MAX];
	struct buf clean = BUF_INIT(4 * DETAIL_MAX + POINTER_MAX);
	int n = vsnprintf(text, sizeof(text), fmt, ap);
	size_t len = n < 0 ? 0 : (size_t)n < sizeof(text) ? (size_t)n : text_utf8_border(text, sizeof(text) - 1);

	if (!at)
		return NULL;
	if (where == FIELD_BODY)
		buf_printf(&clean, "%s ", strcmp(at, "#") == 0 ? "The body" : at + 2);
	else
		buf_printf(&clean, "%s %s ", where == FIELD_QUERY ? "Query parameter" : "Header", at);
	text_safe(&clean, text, len, false);
	return buf_steal(&clean, NULL);
}

static char *pointer_text(const struct pointer *at)
{
	struct buf out = BUF_INIT(POINTER_MAX);

	if (!pointer_print(at, &out)) {
		buf_free(&out);
		buf_init(&out, POINTER_MAX);
		buf_add_char(&out, '#');
	}
	return buf_steal(&out, NULL);
}

/* A name that came from outside, as it may stand in an answer. */
static char *name_text(const char *name)
{
	struct buf out = BUF_INIT(1024);
	size_t n = strlen(name);

	text_safe(&out, name, n < 128 ? n : text_utf8_border(name, 128), false);
	return buf_steal(&out, NULL);
}

/*
 * Adds one. A full list and short memory only count, so that a body full of faults stays cheap and a bad request never passes for a
 * good one.
 */
static void field_put(struct field_errors *fe, enum field_where where, bool later, const struct pointer *at, const char *name,
		const char *fmt, va_list ap) __attribute__((format(printf, 6, 0)));

static void field_put(struct field_errors *fe, enum field_where where, bool later, const struct pointer *at, const char *name,
		const char *fmt, va_list ap)
{
	char *place, *detail;

	if (!later)
		fe->invalid++;
	if (fe->count == FIELD_ERRORS_MAX) {
		fe->more++;
		return;
	}
	place = where == FIELD_BODY ? pointer_text(at) : name_text(name);
	detail = detail_text(where, place, fmt, ap);
	if (!place || !detail) {
		fe->more++;
		free(place);
		free(detail);
		return;
	}
	fe->list[fe->count++] = (struct field_error){ .where = where, .not_available = later, .at = place, .detail = detail };
}

void field_bad(struct field_errors *fe, const struct pointer *at, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	field_put(fe, FIELD_BODY, false, at, NULL, fmt, ap);
	va_end(ap);
}

void field_later(struct field_errors *fe, const struct pointer *at, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	field_put(fe, FIELD_BODY, true, at, NULL, fmt, ap);
	va_end(ap);
}

void query_bad(struct field_errors *fe, const char *name, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	field_put(fe, FIELD_QUERY, false, NULL, name, fmt, ap);
	va_end(ap);
}

void header_bad(struct field_errors *fe, const char *name, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	field_put(fe, FIELD_HEADER, false, NULL, name, fmt, ap);
	va_end(ap);
}

bool field_int(struct field_errors *fe, const struct pointer *at, const struct json *v, int64_t min, int64_t max, int64_t *out)
{
	const char *shown;

	if (json_type(v) == JSON_DECIMAL) {
		shown = json_as_text(v);
		field_bad(fe, at,
				"is %.32s%s, but must be a whole number from %" PRId64 " to %" PRId64
				", written without a fraction or exponent",
				shown, strlen(shown) > 32 ? "..." : "", min, max);
		return false;
	}
	if (json_type(v) != JSON_INT) {
		field_bad(fe, at, "is of type %s, but must be a whole number from %" PRId64 " to %" PRId64,
				json_type_name(json_type(v)), min, max);
		return false;
	}
	if (json_as_int(v) < min || json_as_int(v) > max) {
		field_bad(fe, at, "is %" PRId64 ", but must be from %" PRId64 " to %" PRId64, json_as_int(v), min, max);
		return false;
	}
	*out = json_as_int(v);
	return true;
}

/* One step of a JSON pointer in a URI fragment: ~ and / escaped, then what a fragment may not hold as %XX. */
static void step_print(struct buf *out, const char *key)
{
	const unsigned char *p;

	for (p = (const unsigned char *)key; *p; p++) {
		if (*p == '~')
			buf_add_str(out, "~0");
		else if (*p == '/')
			buf_add_str(out, "~1");
		else if ((*p < 0x80 && isalnum(*p)) || strchr("-._!$&'()*+,;=:@?", *p))
			buf_add_char(out, (char)*p);
		else
			buf_printf(out, "%%%02X", *p);
	}
}

bool pointer_print(const struct pointer *at, struct buf *out)
{
	const struct pointer *way[JSON_DEPTH_MAX];
	size_t n = 0;

	for (; at && n < JSON_DEPTH_MAX; at = at->up)
		way[n++] = at;
	buf_add_char(out, '#');
	while (n > 0) {
		at = way[--n];
		buf_add_char(out, '/');
		if (at->key)
			step_print(out, at->key);
		else
			buf_printf(out, "%zu", at->index);
	}
	return !out->failed;
}

/* --- the answer --------------------------------------------------------------------------------------------------------- */

static void errors_render(struct jw *w, const struct field_errors *fe)
{
	static const char *const where[] = { [FIELD_BODY] = "pointer", [FIELD_QUERY] = "parameter", [FIELD_HEADER] = "header" };
	size_t i;

	jw_karray(w, "errors");
	for (i = 0; i < fe->count; i++) {
		jw_object(w);
		jw_kstr(w, "detail", fe->list[i].detail);
		jw_kstr(w, where[fe->list[i].where], fe->list[i].at);
		jw_close(w);
	}
	jw_close(w);
	if (fe->more)
		jw_kint(w, "more_errors", (int64_t)fe->more);
}

bool problem_render(struct buf *out, const char *public_url, enum problem p, const char *detail, const char *request_id,
		const struct field_errors *fe)
{
	return problem_render_as(out, public_url, p, problem_status(p), detail, request_id, fe);
}

bool problem_render_as(struct buf *out, const char *public_url, enum problem p, int status, const char *detail,
		const char *request_id, const struct field_errors *fe)
{
	char type[1200];
	struct buf clean = BUF_INIT(4096);
	struct jw w;
	bool ok;

	if (!text_fmt(type, sizeof(type), "%s/problems/%s", public_url, problem_name(p)) &&
			!text_fmt(type, sizeof(type), "/problems/%s", problem_name(p)))
		return false;
	text_safe(&clean, detail, strlen(detail), false);
	jw_init(&w, out);
	jw_object(&w);
	jw_kstr(&w, "type", type);
	jw_kstr(&w, "title", problem_title(p));
	jw_kint(&w, "status", status);
	jw_kstrn(&w, "detail", clean.data ? (const char *)clean.data : "", clean.len);
	if (request_id && *request_id)
		jw_kstr(&w, "request_id", request_id);
	if (fe && field_errors_any(fe))
		errors_render(&w, fe);
	jw_close(&w);
	ok = jw_end(&w);
	buf_free(&clean);
	return ok;
}
