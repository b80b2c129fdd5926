/*
 * JSON text: what is taken is JSON by the grammar of RFC 8259, read here once more in the plainest way; it has a canonical form
 * that is taken again and is its own canonical form, and valid UTF-8.
 */
/* reads: common/json.c common/json_read.c common/json_scan.c */
/* reached: 91 % of lines, 86 % of branches; the rest is memory and documents of a million values */
#include "fuzz.h"

#include "json.h"
#include "text.h"

/* --- the grammar: each function returns the place behind what it read, NULL when it is not there
 * ---------------------------------- */

static const char *grammar_value(const char *s, const char *end);

static const char *white(const char *s, const char *end)
{
	while (s < end && (*s == ' ' || *s == '\t' || *s == '\n' || *s == '\r'))
		s++;
	return s;
}

static const char *digits(const char *s, const char *end)
{
	const char *from = s;

	while (s < end && *s >= '0' && *s <= '9')
		s++;
	return s > from ? s : NULL;
}

static const char *number(const char *s, const char *end)
{
	if (s < end && *s == '-')
		s++;
	if (s < end && *s == '0')
		s++;
	else
		s = digits(s, end);
	if (s && s < end && *s == '.')
		s = digits(s + 1, end);
	if (s && s < end && (*s == 'e' || *s == 'E')) {
		s++;
		if (s < end && (*s == '+' || *s == '-'))
			s++;
		s = digits(s, end);
	}
	return s;
}

static const char *string(const char *s, const char *end)
{
	if (s >= end || *s != '"')
		return NULL;
	for (s++; s < end && *s != '"'; s++) {
		if ((unsigned char)*s < 0x20)
			return NULL;
		if (*s != '\\')
			continue;
		s++;
		if (s >= end || !strchr("\"\\/bfnrtu", *s) || *s == '\0')
			return NULL;
		for (int i = 0; *s == 'u' && i < 4; i++)
			if (end - s < 6 || !strchr("0123456789abcdefABCDEF", s[i + 1]) || s[i + 1] == '\0')
				return NULL;
	}
	return s < end ? s + 1 : NULL;
}

/* Members or elements up to the closing bracket. */
static const char *list(const char *s, const char *end, char close, bool keys)
{
	s = white(s + 1, end);
	if (s < end && *s == close)
		return s + 1;
	for (;;) {
		if (keys) {
			s = string(s, end);
			s = s ? white(s, end) : NULL;
			if (!s || s >= end || *s != ':')
				return NULL;
			s = white(s + 1, end);
		}
		s = grammar_value(s, end);
		s = s ? white(s, end) : NULL;
		if (!s || s >= end || (*s != ',' && *s != close))
			return NULL;
		if (*s == close)
			return s + 1;
		s = white(s + 1, end);
	}
}

static const char *grammar_value(const char *s, const char *end)
{
	static const char *const words[] = { "true", "false", "null" };

	if (s >= end)
		return NULL;
	if (*s == '{' || *s == '[')
		return list(s, end, *s == '{' ? '}' : ']', *s == '{');
	if (*s == '"')
		return string(s, end);
	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
		if ((size_t)(end - s) >= strlen(words[i]) && memcmp(s, words[i], strlen(words[i])) == 0)
			return s + strlen(words[i]);
	return number(s, end);
}

static bool is_json(const char *s, size_t n)
{
	const char *end = s + n, *after = grammar_value(white(s, end), end);

	return after && white(after, end) == end;
}

/* Every accessor on every value. */
static void walk(const struct json *v, int depth)
{
	must(v && depth <= JSON_DEPTH_MAX);
	must(json_type_name(json_type(v)));
	if (json_as_text(v))
		must(text_utf8_clean(json_as_text(v), json_len(v)) && strlen(json_as_text(v)) >= json_len(v));
	(void)json_as_int(v);
	(void)json_as_bool(v);
	if (json_type(v) != JSON_ARRAY && json_type(v) != JSON_OBJECT)
		return;
	for (size_t i = 0; i < json_len(v); i++) {
		if (json_type(v) == JSON_OBJECT)
			must(json_get(v, json_key(v, i)) == json_at(v, i)); /* keys are unique */
		walk(json_at(v, i), depth + 1);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct buf first = BUF_INIT(8 << 20), second = BUF_INIT(8 << 20), whole = BUF_INIT(8 << 20);
	struct json *v, *w;
	struct jw writer;
	struct err e = { .code = ERR_NONE };

	if (json_parse((const char *)data, n, &v, &e) != 0) {
		must(e.code != ERR_NONE && strlen(e.text) > 0 && text_utf8_valid(e.text, strlen(e.text)));
		return 0;
	}
	must(is_json((const char *)data, n));
	walk(v, 0);
	must(json_canonical(v, &first));
	must(text_utf8_clean((const char *)first.data, first.len));
	must(json_parse((const char *)first.data, first.len, &w, &e) == 0);
	must(json_canonical(w, &second));
	must(first.len == second.len && memcmp(first.data, second.data, first.len) == 0);
	json_free(w);
	jw_init(&writer, &whole);
	jw_json(&writer, v);
	must(jw_end(&writer));
	must(json_parse((const char *)whole.data, whole.len, &w, &e) == 0);
	json_free(w);
	json_free(v);
	buf_free(&first);
	buf_free(&second);
	buf_free(&whole);
	return 0;
}
