/* The one place that writes a provider's request (model_request.h). Called by model.c on the broker's thread; owns nothing. */
#include "model_request.h"

#include "common/json.h"
#include "common/text.h"
#include "proto/tools.h"

uint32_t model_tools_allowed(const struct assignment *a)
{
	uint32_t all = (UINT32_C(1) << TOOL_COUNT) - 1;

	return a->shell ? all : all & ~TOOL_BIT(TOOL_SHELL);
}

const char *model_limit_name(enum limit_param param)
{
	return param == LIMIT_MAX_TOKENS ? "max_tokens" : "max_completion_tokens";
}

static void put_tools(struct jw *w, uint32_t tools)
{
	jw_karray(w, "tools");
	for (unsigned i = 0; i < TOOL_COUNT; i++) {
		const struct tool_info *info = tool_info((enum tool)i);

		if ((tools & TOOL_BIT(i)) == 0)
			continue;
		jw_object(w);
		jw_kstr(w, "type", "function");
		jw_kobject(w, "function");
		jw_kstr(w, "name", info->name);
		jw_kstr(w, "description", info->description);
		jw_key(w, "parameters");
		jw_raw(w, info->parameters, strlen(info->parameters));
		jw_close(w);
		jw_close(w);
	}
	jw_close(w);
}

static void put_calls(struct jw *w, const struct model_message *m)
{
	jw_karray(w, "tool_calls");
	for (uint32_t i = 0; i < m->call_count; i++) {
		jw_object(w);
		jw_kstr(w, "id", m->calls[i].id);
		jw_kstr(w, "type", "function");
		jw_kobject(w, "function");
		jw_kstr(w, "name", m->calls[i].name);
		jw_kstr(w, "arguments", m->calls[i].arguments);
		jw_close(w);
		jw_close(w);
	}
	jw_close(w);
}

static int put_message(struct jw *w, const struct model_message *m, struct err *e)
{
	static const char *const roles[] = {
		[ROLE_SYSTEM] = "system", [ROLE_USER] = "user", [ROLE_ASSISTANT] = "assistant", [ROLE_TOOL] = "tool"
	};

	if (m->role < ROLE_SYSTEM || m->role > ROLE_TOOL)
		return err_set(e, ERR_INVALID, "a message has no known role");
	if (m->role == ROLE_TOOL && m->tool_call_id[0] == '\0')
		return err_set(e, ERR_INVALID, "a tool's answer does not say which call it answers");
	jw_object(w);
	jw_kstr(w, "role", roles[m->role]);
	if (m->role == ROLE_TOOL)
		jw_kstr(w, "tool_call_id", m->tool_call_id);
	if (m->role == ROLE_ASSISTANT && m->call_count > 0 && m->content[0] == '\0')
		jw_knull(w, "content");
	else
		jw_kstr(w, "content", m->content);
	if (m->role == ROLE_ASSISTANT && m->call_count > 0)
		put_calls(w, m);
	jw_close(w);
	return 0;
}

/* The tail's bracket and what follows it are not the writer's business: it is given the object up to the last message. */
int model_request_prefix(
		const struct model_spec *spec, uint32_t tools, const struct model_call *call, struct buf *out, struct err *e)
{
	struct jw w;

	if (call->message_count == 0)
		return err_set(e, ERR_INVALID, "a model call without any message");
	jw_init(&w, out);
	jw_object(&w);
	jw_kstr(&w, "model", spec->upstream);
	jw_kbool(&w, "stream", true);
	jw_kobject(&w, "stream_options");
	jw_kbool(&w, "include_usage", true);
	jw_close(&w);
	jw_kbool(&w, "store", false);
	if (tools != 0)
		put_tools(&w, tools);
	jw_karray(&w, "messages");
	for (uint32_t i = 0; i < call->message_count; i++)
		if (put_message(&w, &call->messages[i], e) < 0)
			return -1;
	if (w.failed || out->failed || out->len > MODEL_REQUEST_MAX - MODEL_TAIL_MAX)
		return err_set(e, ERR_LIMIT, "the conversation is over %d bytes as a request", MODEL_REQUEST_MAX);
	return 0;
}

bool model_request_tail(enum limit_param param, int64_t limit_tokens, struct buf *out)
{
	return buf_printf(out, "],\"%s\":%lld}", model_limit_name(param), (long long)limit_tokens);
}
