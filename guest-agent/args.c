/*
 * Reads the arguments of a tool call by a table of what each tool takes. Pure; called by tools.c with text from a model, which may
 * be anything. A mistake is explained to the model, which can then try again.
 */
#include "args.h"

#include "common/text.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>

/* One member of a tool's arguments and where it goes. For texts min and max are bounds of the length. */
static const struct arg_rule {
	enum tool tool;
	const char *name;
	enum json_type type;
	bool required;
	int64_t min, max;
	size_t offset;
} rules[] = {
	{ TOOL_SHELL, "command", JSON_STRING, true, 1, ARG_COMMAND_MAX, offsetof(struct tool_args, command) },
	{ TOOL_SHELL, "timeout_seconds", JSON_INT, false, 1, SHELL_LIMIT_SECONDS, offsetof(struct tool_args, timeout_seconds) },
	{ TOOL_READ_FILE, "path", JSON_STRING, true, 1, ARG_PATH_MAX, offsetof(struct tool_args, path) },
	{ TOOL_READ_FILE, "offset", JSON_INT, false, 0, INT64_C(1) << 50, offsetof(struct tool_args, offset) },
	{ TOOL_READ_FILE, "limit", JSON_INT, false, 1, READ_LIMIT_MAX, offsetof(struct tool_args, limit) },
	{ TOOL_WRITE_FILE, "path", JSON_STRING, true, 1, ARG_PATH_MAX, offsetof(struct tool_args, path) },
	{ TOOL_WRITE_FILE, "content", JSON_STRING, true, 0, INT64_MAX, offsetof(struct tool_args, content) },
	{ TOOL_LIST_FILES, "path", JSON_STRING, false, 1, ARG_PATH_MAX, offsetof(struct tool_args, path) },
};

#define RULE_COUNT (sizeof rules / sizeof rules[0])

/* Adds what this tool takes, so that the model need not guess. */
static void explain(enum tool t, struct buf *why)
{
	const char *sep = "";

	buf_printf(why, " The arguments of %s are a JSON object with: ", tool_info(t)->name);
	for (size_t i = 0; i < RULE_COUNT; i++) {
		if (rules[i].tool != t)
			continue;
		buf_printf(why, "%s%s (%s, %s)", sep, rules[i].name, json_type_name(rules[i].type),
				rules[i].required ? "required" : "optional");
		sep = ", ";
	}
	buf_add_str(why, ".");
}

static bool take_text(const struct arg_rule *r, const struct json *v, struct tool_args *out, struct buf *why)
{
	const char *text = json_as_text(v);
	int64_t len = (int64_t)json_len(v);

	if (len < r->min || len > r->max)
		return buf_printf(why, "%s has %" PRId64 " bytes; %" PRId64 " to %" PRId64 " are allowed.", r->name, len, r->min,
				       r->max) &&
		       false;
	memcpy((char *)out + r->offset, &text, sizeof text);
	if (r->tool == TOOL_WRITE_FILE && strcmp(r->name, "content") == 0)
		out->content_len = (size_t)len;
	return true;
}

static bool take_int(const struct arg_rule *r, const struct json *v, struct tool_args *out, struct buf *why)
{
	int64_t n = json_as_int(v);

	if (n < r->min || n > r->max)
		return buf_printf(why, "%s is %" PRId64 "; %" PRId64 " to %" PRId64 " are allowed.", r->name, n, r->min, r->max) &&
		       false;
	memcpy((char *)out + r->offset, &n, sizeof n);
	return true;
}

static bool take_member(const struct arg_rule *r, const struct json *v, struct tool_args *out, struct buf *why)
{
	/* A null stands for an optional member that is absent: models write that. */
	if (v == NULL || (!r->required && json_type(v) == JSON_NULL)) {
		if (!r->required)
			return true;
		return buf_printf(why, "%s is missing.", r->name) && false;
	}
	if (json_type(v) != r->type)
		return buf_printf(why, "%s must be of type %s, not %s.", r->name, json_type_name(r->type),
				       json_type_name(json_type(v))) &&
		       false;
	return r->type == JSON_STRING ? take_text(r, v, out, why) : take_int(r, v, out, why);
}

static const struct arg_rule *rule_of(enum tool t, const char *name)
{
	for (size_t i = 0; i < RULE_COUNT; i++)
		if (rules[i].tool == t && strcmp(rules[i].name, name) == 0)
			return &rules[i];
	return NULL;
}

static bool take_all(enum tool t, struct tool_args *out, struct buf *why)
{
	if (json_type(out->root) != JSON_OBJECT)
		return buf_printf(why, "the arguments are of type %s.", json_type_name(json_type(out->root))) && false;
	for (size_t i = 0; i < json_len(out->root); i++) {
		if (rule_of(t, json_key(out->root, i)) == NULL) {
			buf_add_str(why, "there is no argument named ");
			text_safe(why, json_key(out->root, i), strnlen(json_key(out->root, i), 64), false);
			return buf_add_str(why, ".") && false;
		}
	}
	for (size_t i = 0; i < RULE_COUNT; i++)
		if (rules[i].tool == t && !take_member(&rules[i], json_get(out->root, rules[i].name), out, why))
			return false;
	return true;
}

bool args_parse(enum tool t, const char *text, struct tool_args *out, struct buf *why)
{
	struct err e;
	bool ok;

	*out = (struct tool_args){ .path = ".", .content = "", .timeout_seconds = SHELL_LIMIT_SECONDS, .limit = READ_LIMIT_MAX };
	/* no text at all is how some models say: no arguments */
	text = text[0] == '\0' ? "{}" : text;
	buf_add_str(why, "Not done: ");
	if (json_parse(text, strlen(text), &out->root, &e) < 0) {
		buf_printf(why, "the arguments are not valid JSON: %s.", e.text);
		ok = false;
	} else {
		ok = take_all(t, out, why);
	}
	if (ok)
		buf_reset(why);
	else
		explain(t, why);
	return ok;
}

void args_free(struct tool_args *a)
{
	json_free(a->root);
	a->root = NULL;
}
