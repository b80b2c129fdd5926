/*
 * From a model's tool call to the function that runs it. Owns nothing; called by the agent loop, one call at a time.
 */
#include "tools.h"

#include "common/log.h"
#include "common/text.h"

#include <string.h>

#define WHY_MAX 4096
#define PROBLEM_MAX 512 /* of an event's text */

uint32_t tools_offered(const struct tools *t)
{
	uint32_t files = TOOL_BIT(TOOL_READ_FILE) | TOOL_BIT(TOOL_WRITE_FILE) | TOOL_BIT(TOOL_LIST_FILES);

	return files | (t->shell ? TOOL_BIT(TOOL_SHELL) : 0);
}

/* As much of s as fits, ending on a character: for names and paths from a model, which are shown but not used. */
static void copy_cut(char *out, size_t size, const char *s)
{
	size_t n = strnlen(s, size - 1);

	n = text_utf8_border(s, n);
	memcpy(out, s, n);
	out[n] = '\0';
}

void tools_event(const struct tools *t, const char *call_id, const char *name, const char *path, int64_t bytes, const char *problem)
{
	struct guest_event ev = { .kind = GE_TOOL_CALLED, .bytes = bytes };
	size_t n = strnlen(problem, PROBLEM_MAX);

	copy_cut(ev.call_id, sizeof ev.call_id, call_id);
	copy_cut(ev.name, sizeof ev.name, name);
	if (path != NULL)
		copy_cut(ev.path, sizeof ev.path, path);
	ev.text = (const uint8_t *)problem;
	ev.text_len = text_utf8_border(problem, n);
	if (!channel_event(t->ch, &ev))
		log_warn("event lost tool=%s", tool_info(tool_parse(name)) != NULL ? name : "unknown");
}

static void list_tools(const struct tools *t, struct buf *out)
{
	uint32_t offered = tools_offered(t);

	buf_add_str(out, " The tools of this run are:");
	for (unsigned int i = 0; i < TOOL_COUNT; i++)
		if (offered & TOOL_BIT(i))
			buf_printf(out, " %s", tool_info((enum tool)i)->name);
	buf_add_str(out, ".");
}

/* False: the call cannot be run, and `why` says so. */
static bool check(const struct tools *t, const struct model_tool_call *call, bool was_cut, struct tool_args *args, struct buf *why)
{
	enum tool which = tool_parse(call->name);

	if (which == TOOL_COUNT || !(tools_offered(t) & TOOL_BIT(which))) {
		buf_add_str(why, "Not done: there is no tool named ");
		text_safe(why, call->name, strnlen(call->name, 64), false);
		buf_add_str(why, " in this run.");
		list_tools(t, why);
		return false;
	}
	if (args_parse(which, call->arguments, args, why))
		return true;
	if (was_cut)
		buf_add_str(why, " Your reply was cut at its token limit, and this call with it: do the work in smaller steps.");
	return false;
}

int tools_call(const struct tools *t, const struct model_tool_call *call, bool was_cut, struct buf *result, struct err *e)
{
	struct tool_args args = { .root = NULL };
	struct buf why = BUF_INIT(WHY_MAX);
	int rc = 0;

	if (!check(t, call, was_cut, &args, &why)) {
		const char *text = buf_cstr(&why);

		text = text == NULL ? "Not done: out of memory." : text;
		tools_event(t, call->id, call->name, NULL, -1, text);
		buf_add_str(result, text);
	} else if (tool_parse(call->name) == TOOL_SHELL) {
		rc = tool_shell(t, call->id, &args, result, e);
	} else {
		rc = tool_files(t, tool_parse(call->name), call->id, &args, result, e);
	}
	args_free(&args);
	buf_free(&why);
	return rc;
}
