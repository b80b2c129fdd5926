/* Small JSON bodies and query parameters: one reader for each kind of value, all faults kept. Used by keys and operator calls. */
#include "api_internal.h"

#include "common/clock.h"
#include "common/text.h"

#include <inttypes.h>

static bool word_in(const char *words, const char *name)
{
	size_t len = strlen(name);

	while (*words) {
		size_t n = strcspn(words, " ");

		if (n == len && memcmp(words, name, n) == 0)
			return true;
		words += n;
		words += strspn(words, " ");
	}
	return false;
}

void body_open(struct body *b, struct api_req *r, const char *known)
{
	size_t n, i;
	const uint8_t *p = http_body(r->http, &n);
	struct err e;

	b->doc = NULL;
	b->broken = false;
	field_errors_init(&b->errors);
	if (n == 0 && r->route->content == CONTENT_JSON)
		field_bad(&b->errors, NULL, "is empty, but must be a JSON object; its fields are: %s", known);
	else if (n > 0 && json_parse((const char *)p, n, &b->doc, &e) == -1)
		field_bad(&b->errors, NULL, "could not be read as JSON: %s", e.text);
	else if (b->doc && json_type(b->doc) != JSON_OBJECT)
		field_bad(&b->errors, NULL, "is of type %s, but must be an object", json_type_name(json_type(b->doc)));
	b->broken = field_errors_any(&b->errors);
	if (b->broken)
		return;
	for (i = 0; i < json_len(b->doc); i++) {
		struct pointer at = { .up = NULL, .key = json_key(b->doc, i) };

		if (!word_in(known, at.key))
			field_bad(&b->errors, &at, "is not a field here; the fields are: %s", *known ? known : "none");
	}
}

void body_free(struct body *b)
{
	json_free(b->doc);
	b->doc = NULL;
	field_errors_free(&b->errors);
}

bool body_ok(struct body *b, struct api_req *r)
{
	if (!field_errors_any(&b->errors))
		return true;
	json_free(b->doc);
	b->doc = NULL;
	api_problem_fields(r, &b->errors);
	return false;
}

bool body_has(const struct body *b, const char *name)
{
	const struct json *v = b->doc ? json_get(b->doc, name) : NULL;

	return v && json_type(v) != JSON_NULL;
}

/* The member, or NULL when it is absent (or null); says so when it must be there. */
static const struct json *member(struct body *b, const char *name, bool required)
{
	struct pointer at = { .up = NULL, .key = name };

	if (body_has(b, name))
		return json_get(b->doc, name);
	if (required && !b->broken)
		field_bad(&b->errors, &at, "is missing");
	return NULL;
}

const char *body_text(struct body *b, const char *name, size_t min, size_t max, bool required)
{
	const struct json *v = member(b, name, required);
	struct pointer at = { .up = NULL, .key = name };

	if (!v)
		return NULL;
	if (json_type(v) != JSON_STRING) {
		field_bad(&b->errors, &at, "is of type %s, but must be a string", json_type_name(json_type(v)));
		return NULL;
	}
	if (json_len(v) < min || json_len(v) > max) {
		field_bad(&b->errors, &at, "has %zu bytes, but must have %zu to %zu", json_len(v), min, max);
		return NULL;
	}
	return json_as_text(v);
}

int64_t body_int(struct body *b, const char *name, int64_t min, int64_t max, int64_t fallback, bool required)
{
	const struct json *v = member(b, name, required);
	struct pointer at = { .up = NULL, .key = name };

	if (!v)
		return fallback;
	field_int(&b->errors, &at, v, min, max, &fallback);
	return fallback;
}

int body_flag(struct body *b, const char *name)
{
	const struct json *v = member(b, name, false);
	struct pointer at = { .up = NULL, .key = name };

	if (!v)
		return -1;
	if (json_type(v) != JSON_BOOL) {
		field_bad(&b->errors, &at, "is of type %s, but must be true or false", json_type_name(json_type(v)));
		return -1;
	}
	return json_as_bool(v) ? 1 : 0;
}

int64_t body_future(struct body *b, const char *name)
{
	const char *s = body_text(b, name, 1, 64, false);
	struct pointer at = { .up = NULL, .key = name };
	int64_t ms;

	if (!s)
		return 0;
	if (!text_parse_time_ms(s, &ms)) {
		field_bad(&b->errors, &at, "must be an RFC 3339 time in UTC such as 2030-01-31T12:00:00Z");
		return 0;
	}
	if (ms <= clock_real_ms()) {
		field_bad(&b->errors, &at, "is in the past; leave it out for never");
		return 0;
	}
	return ms;
}

enum store_role body_role(struct body *b, const char *name)
{
	const char *s = body_text(b, name, 1, 32, true);
	struct pointer at = { .up = NULL, .key = name };
	enum store_role role = s ? store_role_parse(s) : STORE_ROLE_NONE;

	if (s && role == STORE_ROLE_NONE)
		field_bad(&b->errors, &at, "must be \"viewer\", \"member\" or \"admin\"");
	return role;
}

int api_query_int(struct api_req *r, const char *name, int64_t min, int64_t max, int64_t fallback, int64_t *out,
		struct field_errors *fe)
{
	const char *s = http_query(r->http, name, NULL);
	struct err e;

	*out = fallback;
	if (!s)
		return 0;
	if (text_i64(s, min, max, out, &e) == 0)
		return 0;
	*out = fallback;
	query_bad(fe, name, "must be a whole number from %" PRId64 " to %" PRId64, min, max);
	return -1;
}

/* True when a media range of `Accept` is text/event-stream; wildcards mean JSON. */
bool api_wants_sse(const struct api_req *r)
{
	const char *h = http_header(r->http, "Accept");

	while (h && *h) {
		size_t n;

		h += strspn(h, " \t,");
		n = strcspn(h, ",; \t");
		if (n == 17 && strncasecmp(h, "text/event-stream", 17) == 0)
			return true;
		h += strcspn(h, ",");
	}
	return false;
}
