/*
 * A model call as a guest sends it, made into a provider's request. What decodes has one encoding; the request is strict JSON with
 * the members that the broker chose and no other, and says exactly what the call said. The scripted provider, which reads requests
 * with code of its own, finds the same last question. First byte: shell or not, and the limit's name.
 */
/* link: controld_scripted ephproto */
/* sources: noded/broker/model_request.c */
/* reads: noded/broker/model_request.c proto/model.c */
/* reached: 76 % of lines, 73 % of branches; the rest is replies, which fuzz_guest reads, and memory */
#include "noded/broker/model_request.h"

#include "common/json.h"
#include "common/text.h"
#include "controld/scripted/chat.h"
#include "fuzz.h"
#include "proto/tools.h"

static void same_text(const struct json *v, const char *want)
{
	must(v && json_type(v) == JSON_STRING && strcmp(json_as_text(v), want) == 0 && json_len(v) == strlen(want));
}

static void check_message(const struct json *v, const struct model_message *m)
{
	static const char *const roles[] = { "", "system", "user", "assistant", "tool" };
	const struct json *calls = json_get(v, "tool_calls");

	same_text(json_get(v, "role"), roles[m->role]);
	if (m->role == ROLE_ASSISTANT && m->call_count > 0 && m->content[0] == '\0')
		must(json_type(json_get(v, "content")) == JSON_NULL);
	else
		same_text(json_get(v, "content"), m->content);
	if (m->role == ROLE_TOOL)
		same_text(json_get(v, "tool_call_id"), m->tool_call_id);
	must((calls != NULL) == (m->role == ROLE_ASSISTANT && m->call_count > 0));
	for (uint32_t i = 0; calls && i < m->call_count; i++) {
		const struct json *c = json_at(calls, i), *f = json_get(c, "function");

		must(json_len(calls) == m->call_count && json_len(c) == 3 && json_len(f) == 2);
		same_text(json_get(c, "id"), m->calls[i].id);
		same_text(json_get(c, "type"), "function");
		same_text(json_get(f, "name"), m->calls[i].name);
		same_text(json_get(f, "arguments"), m->calls[i].arguments);
	}
	must(json_len(v) == 2u + (m->role == ROLE_TOOL) + (calls != NULL));
}

static void check_tools(const struct json *tools, uint32_t allowed)
{
	must((tools != NULL) == (allowed != 0));
	must(!tools || json_len(tools) == (size_t)__builtin_popcount(allowed));
	for (size_t i = 0; tools && i < json_len(tools); i++) {
		const char *name = json_get_text(json_get(json_at(tools, i), "function"), "name");

		must(name && (strcmp(name, tool_info(TOOL_SHELL)->name) != 0 || allowed & TOOL_BIT(TOOL_SHELL)));
	}
}

static void check_request(const struct buf *body, const struct model_call *call, uint32_t tools, enum limit_param limit)
{
	const struct json *messages;
	struct json *doc;
	struct chat chat;
	const char *last = NULL;
	struct err e;

	must(json_parse((const char *)body->data, body->len, &doc, &e) == 0);
	same_text(json_get(doc, "model"), "auto");
	must(json_get_bool(doc, "stream", false) && !json_get_bool(doc, "store", true));
	must(json_get_int(doc, model_limit_name(limit), 0) == 77);
	must(json_len(doc) == 6u + (tools != 0));
	check_tools(json_get(doc, "tools"), tools);
	messages = json_get(doc, "messages");
	must(json_type(messages) == JSON_ARRAY && json_len(messages) == call->message_count);
	for (uint32_t i = 0; i < call->message_count; i++) {
		check_message(json_at(messages, i), &call->messages[i]);
		if (call->messages[i].role == ROLE_USER)
			last = call->messages[i].content;
	}
	json_free(doc);
	must((chat_parse(body->data, body->len, &chat, &e) == 0) == (last != NULL));
	if (last) {
		must(strcmp(chat.prompt, last) == 0 && chat.stream && chat.include_usage && chat.limit == 77);
		must(chat.shell == ((tools & TOOL_BIT(TOOL_SHELL)) != 0));
		chat_free(&chat);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	struct model_spec spec = { .id = "p/m", .upstream = "auto", .limit_param = LIMIT_MAX_TOKENS };
	struct assignment a = { .shell = n > 0 && p[0] & 1 };
	struct buf again = BUF_INIT(MODEL_CALL_BYTES_MAX), body = BUF_INIT(MODEL_REQUEST_MAX);
	struct model_call call;
	uint32_t tools;
	struct err e;

	if (n < 1)
		return 0;
	if (p[0] & 2)
		spec.limit_param = LIMIT_MAX_COMPLETION_TOKENS;
	p++;
	n--;
	if (model_call_decode(p, n, &call, &e) != 0)
		return 0;
	model_call_encode(&call, &again);
	must(again.len == n && memcmp(again.data, p, n) == 0);
	tools = call.tools & model_tools_allowed(&a);
	must(a.shell || !(tools & TOOL_BIT(TOOL_SHELL)));
	if (model_request_prefix(&spec, tools, &call, &body, &e) == 0) {
		must(model_request_tail(spec.limit_param, 77, &body));
		check_request(&body, &call, tools, spec.limit_param);
	}
	model_call_free(&call);
	buf_free(&again);
	buf_free(&body);
	return 0;
}
