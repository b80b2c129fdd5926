/*
 * Writing JSON: the streaming writer, values of a tree, and the canonical form that is hashed. Appends to the caller's bounded
 * buffer; a mistake or a full buffer is sticky and shows in jw_end. Pure, any thread.
 */
#include "json_internal.h"

#include "text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define JW_DEPTH_MAX 32

/* Length of the run at s that stands in a JSON string as it is. */
static size_t plain_run(const char *s, size_t n)
{
	size_t i = 0;

	while (i < n && (unsigned char)s[i] >= 0x20 && s[i] != '"' && s[i] != '\\')
		i++;
	return i;
}

static bool put_escape(struct buf *out, char c)
{
	static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
	const char *at = strchr(from, c);

	if (c != '\0' && at)
		return buf_add_char(out, '\\') && buf_add_char(out, to[at - from]);
	return buf_printf(out, "\\u%04x", (unsigned)(unsigned char)c);
}

bool json_put_string(struct buf *out, const char *s, size_t n)
{
	if (!text_utf8_clean(s, n) || !buf_add_char(out, '"'))
		return false;
	while (n > 0) {
		size_t run = plain_run(s, n);

		if (run > 0) {
			if (!buf_add(out, s, run))
				return false;
			s += run;
			n -= run;
			continue;
		}
		if (!put_escape(out, *s))
			return false;
		s++;
		n--;
	}
	return buf_add_char(out, '"');
}

/* One value and all below it; recursion is bounded by JSON_DEPTH_MAX, which the parser enforced. */
static bool put_value(const struct json *v, struct buf *out, bool canonical)
{
	uint32_t *order = NULL;
	bool ok;

	switch (json_type(v)) {
	case JSON_NULL: return buf_add_str(out, "null");
	case JSON_BOOL: return buf_add_str(out, v->boolean ? "true" : "false");
	case JSON_INT: return canonical ? buf_printf(out, "%" PRId64, v->integer) : buf_add(out, v->text, v->len);
	case JSON_DECIMAL: return buf_add(out, v->text, v->len);
	case JSON_STRING: return json_put_string(out, v->text, v->len);
	case JSON_ARRAY:
	case JSON_OBJECT: break;
	}
	if (canonical && v->type == JSON_OBJECT) {
		order = json_sorted(v);
		if (!order)
			return false;
	}
	ok = buf_add_char(out, v->type == JSON_OBJECT ? '{' : '[');
	for (uint32_t i = 0; ok && i < v->len; i++) {
		const struct json *m = &v->items[order ? order[i] : i];

		if (i > 0)
			ok = buf_add_char(out, ',');
		if (ok && v->type == JSON_OBJECT)
			ok = json_put_string(out, m->key, strlen(m->key)) && buf_add_char(out, ':');
		ok = ok && put_value(m, out, canonical);
	}
	free(order);
	return ok && buf_add_char(out, v->type == JSON_OBJECT ? '}' : ']');
}

bool json_canonical(const struct json *v, struct buf *out)
{
	return put_value(v, out, true);
}

void jw_init(struct jw *w, struct buf *b)
{
	*w = (struct jw){ .b = b };
	w->first[0] = true;
}

/* Before a value: the comma, or the mistake of a second top-level value or a member without key. */
static bool begin(struct jw *w)
{
	bool in_object = w->is_object[w->depth];

	if (w->failed)
		return false;
	if (in_object ? !w->after_key : (w->depth == 0 && !w->first[0])) {
		w->failed = true;
		return false;
	}
	if (!in_object && !w->first[w->depth] && !buf_add_char(w->b, ','))
		w->failed = true;
	if (!in_object)
		w->first[w->depth] = false;
	w->after_key = false;
	return !w->failed;
}

static void open_level(struct jw *w, bool is_object)
{
	if (!begin(w))
		return;
	if (w->depth == JW_DEPTH_MAX || !buf_add_char(w->b, is_object ? '{' : '[')) {
		w->failed = true;
		return;
	}
	w->depth++;
	w->first[w->depth] = true;
	w->is_object[w->depth] = is_object;
}

void jw_object(struct jw *w)
{
	open_level(w, true);
}

void jw_array(struct jw *w)
{
	open_level(w, false);
}

void jw_close(struct jw *w)
{
	if (w->failed || w->depth == 0 || w->after_key || !buf_add_char(w->b, w->is_object[w->depth] ? '}' : ']')) {
		w->failed = true;
		return;
	}
	w->depth--;
}

void jw_key(struct jw *w, const char *key)
{
	if (w->failed || !w->is_object[w->depth] || w->after_key || (!w->first[w->depth] && !buf_add_char(w->b, ',')) ||
			!json_put_string(w->b, key, strlen(key)) || !buf_add_char(w->b, ':')) {
		w->failed = true;
		return;
	}
	w->first[w->depth] = false;
	w->after_key = true;
}

void jw_strn(struct jw *w, const char *s, size_t n)
{
	if (begin(w) && !json_put_string(w->b, s, n))
		w->failed = true;
}

void jw_str(struct jw *w, const char *s)
{
	if (s)
		jw_strn(w, s, strlen(s));
	else
		jw_null(w);
}

void jw_int(struct jw *w, int64_t v)
{
	if (begin(w) && !buf_printf(w->b, "%" PRId64, v))
		w->failed = true;
}

void jw_raw(struct jw *w, const char *json, size_t n)
{
	if (begin(w) && (n == 0 || !buf_add(w->b, json, n)))
		w->failed = true;
}

void jw_bool(struct jw *w, bool v)
{
	jw_raw(w, v ? "true" : "false", v ? 4 : 5);
}

void jw_null(struct jw *w)
{
	jw_raw(w, "null", 4);
}

void jw_json(struct jw *w, const struct json *v)
{
	if (begin(w) && !put_value(v, w->b, false))
		w->failed = true;
}

void jw_kstr(struct jw *w, const char *key, const char *s)
{
	jw_key(w, key);
	jw_str(w, s);
}

void jw_kstrn(struct jw *w, const char *key, const char *s, size_t n)
{
	jw_key(w, key);
	jw_strn(w, s, n);
}

void jw_kint(struct jw *w, const char *key, int64_t v)
{
	jw_key(w, key);
	jw_int(w, v);
}

void jw_kbool(struct jw *w, const char *key, bool v)
{
	jw_key(w, key);
	jw_bool(w, v);
}

void jw_knull(struct jw *w, const char *key)
{
	jw_key(w, key);
	jw_null(w);
}

void jw_kobject(struct jw *w, const char *key)
{
	jw_key(w, key);
	jw_object(w);
}

void jw_karray(struct jw *w, const char *key)
{
	jw_key(w, key);
	jw_array(w);
}

bool jw_end(struct jw *w)
{
	if (w->depth != 0 || w->first[0] || w->after_key || w->b->failed)
		w->failed = true;
	return !w->failed;
}
