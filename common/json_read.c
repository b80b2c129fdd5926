/* Looking at a JSON tree. Pure; every call is safe on a value of another type and on NULL, so that readers need no cascades. */
#include "json_internal.h"

#include <stdlib.h>
#include <string.h>

enum json_type json_type(const struct json *v)
{
	return v ? (enum json_type)v->type : JSON_NULL;
}

const char *json_type_name(enum json_type t)
{
	static const char *const names[] = {
		[JSON_NULL] = "null",
		[JSON_BOOL] = "boolean",
		[JSON_INT] = "integer",
		[JSON_DECIMAL] = "number",
		[JSON_STRING] = "string",
		[JSON_ARRAY] = "array",
		[JSON_OBJECT] = "object",
	};

	return (unsigned)t < sizeof(names) / sizeof(names[0]) ? names[t] : "unknown";
}

static bool is(const struct json *v, enum json_type t)
{
	return v && v->type == (uint8_t)t;
}

bool json_as_bool(const struct json *v)
{
	return is(v, JSON_BOOL) && v->boolean;
}

int64_t json_as_int(const struct json *v)
{
	return is(v, JSON_INT) ? v->integer : 0;
}

const char *json_as_text(const struct json *v)
{
	return is(v, JSON_STRING) || is(v, JSON_INT) || is(v, JSON_DECIMAL) ? v->text : NULL;
}

size_t json_len(const struct json *v)
{
	return is(v, JSON_STRING) || is(v, JSON_ARRAY) || is(v, JSON_OBJECT) ? v->len : 0;
}

const struct json *json_at(const struct json *v, size_t i)
{
	return (is(v, JSON_ARRAY) || is(v, JSON_OBJECT)) && i < v->len ? &v->items[i] : NULL;
}

const char *json_key(const struct json *v, size_t i)
{
	return is(v, JSON_OBJECT) && i < v->len ? v->items[i].key : NULL;
}

const struct json *json_get(const struct json *v, const char *key)
{
	if (!is(v, JSON_OBJECT))
		return NULL;
	for (uint32_t i = 0; i < v->len; i++) {
		if (strcmp(v->items[i].key, key) == 0)
			return &v->items[i];
	}
	return NULL;
}

const char *json_get_text(const struct json *v, const char *key)
{
	const struct json *m = json_get(v, key);

	return is(m, JSON_STRING) ? m->text : NULL;
}

int64_t json_get_int(const struct json *v, const char *key, int64_t fallback)
{
	const struct json *m = json_get(v, key);

	return is(m, JSON_INT) ? m->integer : fallback;
}

bool json_get_bool(const struct json *v, const char *key, bool fallback)
{
	const struct json *m = json_get(v, key);

	return is(m, JSON_BOOL) ? m->boolean : fallback;
}

static int by_key(const void *a, const void *b, void *items)
{
	const struct json *v = items;

	/* strcmp compares as unsigned char, which for UTF-8 is the order of code points. */
	return strcmp(v[*(const uint32_t *)a].key, v[*(const uint32_t *)b].key);
}

uint32_t *json_sorted(const struct json *v)
{
	uint32_t *order = malloc((v->len ? v->len : 1) * sizeof(*order));

	if (!order)
		return NULL;
	for (uint32_t i = 0; i < v->len; i++)
		order[i] = i;
	if (v->len > 1)
		qsort_r(order, v->len, sizeof(*order), by_key, (void *)(uintptr_t)v->items);
	return order;
}
