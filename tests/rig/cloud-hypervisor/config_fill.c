/*
 * Filling a configuration by a table (config.h): one walk checks it and writes it with its defaults. Unknown fields are refused,
 * which the real program does not do: it ignores them, and a typo of ours would go unseen. Pure.
 */
#include "config.h"

#include "common/text.h"

#include <inttypes.h>

#define PATH_MAX_ 256

static int fill(const struct field *fields, const struct json *in, const char *path, struct jw *w, struct err *e);

static bool is_null(const struct json *v)
{
	return !v || json_type(v) == JSON_NULL;
}

static int wrong_type(const struct json *v, const char *wanted, const char *path, struct err *e)
{
	return err_set(e, ERR_INVALID, "invalid type: %s, expected %s at %s", json_type_name(json_type(v)), wanted, path);
}

static int fill_int(const struct field *f, const struct json *v, const char *path, struct jw *w, struct err *e)
{
	if (json_type(v) != JSON_INT)
		return wrong_type(v, "an integer", path, e);
	if (json_as_int(v) < f->min || json_as_int(v) > f->max)
		return err_set(e, ERR_INVALID, "invalid value: integer `%" PRId64 "`, expected %" PRId64 " to %" PRId64 " at %s",
				json_as_int(v), f->min, f->max, path);
	jw_int(w, json_as_int(v));
	return 0;
}

static int fill_word(const struct field *f, const struct json *v, const char *path, struct jw *w, struct err *e)
{
	if (json_type(v) != JSON_STRING)
		return wrong_type(v, "a string", path, e);
	for (size_t i = 0; f->kind == FIELD_ENUM; i++) {
		if (!f->words[i])
			return err_set(e, ERR_INVALID, "unknown variant `%.64s` at %s", json_as_text(v), path);
		if (strcmp(f->words[i], json_as_text(v)) == 0)
			break;
	}
	jw_str(w, json_as_text(v));
	return 0;
}

static int fill_list(const struct field *f, const struct json *v, const char *path, struct jw *w, struct err *e)
{
	if (json_type(v) != JSON_ARRAY)
		return wrong_type(v, "a sequence", path, e);
	jw_array(w);
	for (size_t i = 0; i < json_len(v); i++)
		if (fill(f->sub, json_at(v, i), path, w, e))
			return -1;
	jw_close(w);
	return 0;
}

static int fill_value(const struct field *f, const struct json *v, const char *path, struct jw *w, struct err *e)
{
	switch (f->kind) {
	case FIELD_BOOL:
		if (json_type(v) != JSON_BOOL)
			return wrong_type(v, "a boolean", path, e);
		jw_bool(w, json_as_bool(v));
		return 0;
	case FIELD_INT: return fill_int(f, v, path, w, e);
	case FIELD_TEXT:
	case FIELD_ENUM: return fill_word(f, v, path, w, e);
	case FIELD_LIST: return fill_list(f, v, path, w, e);
	case FIELD_OBJECT: return fill(f->sub, v, path, w, e);
	case FIELD_REFUSED: return err_set(e, ERR_INVALID, "nothing may send %s to this stand-in", path);
	case FIELD_END: break;
	}
	return err_set(e, ERR_INTERNAL, "no such kind of field: %s", path);
}

/* The default, by the same walk, so that the defaults inside it are filled in too. */
static int fill_absent(const struct field *f, const char *path, struct jw *w, struct err *e)
{
	struct json *v;
	int rc;

	if (json_parse(f->absent, strlen(f->absent), &v, e))
		return -1;
	if (is_null(v)) {
		jw_null(w);
		rc = 0;
	} else {
		rc = fill_value(f, v, path, w, e);
	}
	json_free(v);
	return rc;
}

static int fill_field(const struct field *f, const struct json *v, const char *path, struct jw *w, struct err *e)
{
	bool may_be_null = f->absent && strcmp(f->absent, "null") == 0;

	if (!v && !f->absent)
		return err_set(e, ERR_INVALID, "missing field `%s`", path);
	jw_key(w, f->name);
	if (!v || (may_be_null && is_null(v)))
		return fill_absent(f, path, w, e);
	return fill_value(f, v, path, w, e);
}

static int known(const struct field *fields, const struct json *in, const char *path, struct err *e)
{
	for (size_t i = 0; i < json_len(in); i++) {
		const struct field *f = fields;

		while (f->kind != FIELD_END && strcmp(f->name, json_key(in, i)) != 0)
			f++;
		if (f->kind == FIELD_END)
			return err_set(e, ERR_INVALID, "unknown field `%s/%.64s`", path, json_key(in, i));
	}
	return 0;
}

static int fill(const struct field *fields, const struct json *in, const char *path, struct jw *w, struct err *e)
{
	if (json_type(in) != JSON_OBJECT)
		return wrong_type(in, "a map", path, e);
	if (known(fields, in, path, e))
		return -1;
	jw_object(w);
	for (const struct field *f = fields; f->kind != FIELD_END; f++) {
		char inner[PATH_MAX_];

		if (!text_fmt(inner, sizeof(inner), "%s/%s", path, f->name))
			return err_set(e, ERR_LIMIT, "nested too deep");
		if (fill_field(f, json_get(in, f->name), inner, w, e))
			return -1;
	}
	jw_close(w);
	return 0;
}

int config_fill(const struct field *fields, const struct json *in, struct buf *out, struct err *e)
{
	struct jw w;

	jw_init(&w, out);
	if (fill(fields, in, "", &w, e))
		return -1;
	return jw_end(&w) ? 0 : err_set(e, ERR_LIMIT, "the configuration is too large");
}

const char *config_text(const struct json *config, const char *section, const char *name)
{
	return json_get_text(json_get(config, section), name);
}

int64_t config_int(const struct json *config, const char *section, const char *name)
{
	return json_get_int(json_get(config, section), name, 0);
}

bool config_bool(const struct json *config, const char *section, const char *name)
{
	return json_get_bool(json_get(config, section), name, false);
}

const struct json *config_entry(const struct json *config, const char *list, size_t i)
{
	const struct json *v = json_get(config, list);

	return v && json_type(v) == JSON_ARRAY && i < json_len(v) ? json_at(v, i) : NULL;
}
