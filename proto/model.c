/* Codec of model calls and replies (model.h). Every count and string is bounded before memory is taken. Pure. */
#include "model.h"

#include "common/wire.h"

#include <stdlib.h>

static const char *const finish_names[] = {
	[FINISH_STOP] = "stop",
	[FINISH_TOOL_CALLS] = "tool_calls",
	[FINISH_LENGTH] = "length",
	[FINISH_FILTER] = "content_filter",
	[FINISH_OTHER] = "other",
};

const char *model_finish_text(enum model_finish f)
{
	return f >= FINISH_STOP && f <= FINISH_OTHER ? finish_names[f] : "other";
}

static void calls_encode(const struct model_tool_call *calls, uint32_t count, struct buf *out)
{
	wire_put_u32(out, count);
	for (uint32_t i = 0; i < count; i++) {
		wire_put_str(out, calls[i].id);
		wire_put_str(out, calls[i].name);
		wire_put_str(out, calls[i].arguments);
	}
}

static void calls_free(struct model_tool_call *calls, uint32_t count)
{
	for (uint32_t i = 0; calls && i < count; i++) {
		free(calls[i].id);
		free(calls[i].name);
		free(calls[i].arguments);
	}
	free(calls);
}

/* *count is set to what was allocated, so that a failed decode can be freed. */
static struct model_tool_call *calls_decode(struct wire_reader *r, uint32_t *count)
{
	uint32_t n = wire_count(r, MODEL_TOOL_CALLS_MAX);
	struct model_tool_call *calls = NULL;

	*count = 0;
	if (n == 0 || r->failed)
		return NULL;
	calls = calloc(n, sizeof(*calls));
	if (!calls) {
		wire_fail(r, "memory");
		return NULL;
	}
	*count = n;
	for (uint32_t i = 0; i < n && !r->failed; i++) {
		calls[i].id = wire_str(r, MODEL_ID_MAX);
		calls[i].name = wire_str(r, MODEL_ID_MAX);
		calls[i].arguments = wire_str(r, MODEL_STR_MAX);
	}
	return calls;
}

void model_call_encode(const struct model_call *c, struct buf *out)
{
	wire_put_u32(out, c->call);
	wire_put_u32(out, c->wish_tokens);
	wire_put_u32(out, c->tools);
	wire_put_u32(out, c->message_count);
	for (uint32_t i = 0; i < c->message_count; i++) {
		const struct model_message *m = &c->messages[i];

		wire_put_u8(out, (uint8_t)m->role);
		wire_put_str(out, m->content);
		wire_put_str(out, m->tool_call_id);
		calls_encode(m->calls, m->call_count, out);
	}
}

static void message_decode(struct wire_reader *r, struct model_message *m)
{
	uint8_t role = wire_u8(r);

	if (role < ROLE_SYSTEM || role > ROLE_TOOL) {
		wire_fail(r, "role");
		return;
	}
	m->role = (enum model_role)role;
	m->content = wire_str(r, MODEL_STR_MAX);
	m->tool_call_id = wire_str(r, MODEL_ID_MAX);
	m->calls = calls_decode(r, &m->call_count);
	if (m->call_count > 0 && m->role != ROLE_ASSISTANT)
		wire_fail(r, "tool calls outside an assistant message");
}

static void messages_decode(struct wire_reader *r, struct model_call *out)
{
	uint32_t count = wire_count(r, MODEL_MESSAGES_MAX);
	struct model_message *list;

	if (r->failed || count == 0)
		return;
	list = calloc(count, sizeof(*list));
	if (!list) {
		wire_fail(r, "memory");
		return;
	}
	out->messages = list;
	out->message_count = count;
	for (uint32_t i = 0; i < count && !r->failed; i++)
		message_decode(r, &list[i]);
}

int model_call_decode(const void *p, size_t n, struct model_call *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct model_call){ .call = 0 };
	if (n > MODEL_CALL_BYTES_MAX)
		return err_set(e, ERR_LIMIT, "model call: %zu bytes, the limit is %d", n, MODEL_CALL_BYTES_MAX);
	wire_read_init(&r, p, n);
	out->call = wire_u32(&r);
	out->wish_tokens = wire_u32(&r);
	out->tools = wire_u32(&r);
	messages_decode(&r, out);
	if (wire_end(&r, "model call", e)) {
		model_call_free(out);
		return -1;
	}
	return 0;
}

void model_call_free(struct model_call *c)
{
	for (uint32_t i = 0; i < c->message_count; i++) {
		free(c->messages[i].content);
		free(c->messages[i].tool_call_id);
		calls_free(c->messages[i].calls, c->messages[i].call_count);
	}
	free(c->messages);
	*c = (struct model_call){ .call = 0 };
}

void model_reply_encode(const struct model_reply *m, struct buf *out)
{
	wire_put_u32(out, m->call);
	wire_put_u8(out, (uint8_t)m->status);
	wire_put_str(out, m->error_text);
	wire_put_u8(out, (uint8_t)m->finish);
	wire_put_str(out, m->content);
	calls_encode(m->calls, m->call_count, out);
	wire_put_u32(out, m->calls_left);
}

int model_reply_decode(const void *p, size_t n, struct model_reply *out, struct err *e)
{
	struct wire_reader r;
	uint8_t v;

	*out = (struct model_reply){ .call = 0 };
	if (n > MODEL_CALL_BYTES_MAX)
		return err_set(e, ERR_LIMIT, "model reply: %zu bytes, the limit is %d", n, MODEL_CALL_BYTES_MAX);
	wire_read_init(&r, p, n);
	out->call = wire_u32(&r);
	v = wire_u8(&r);
	if (v < MODEL_OK || v > MODEL_FAILED)
		wire_fail(&r, "status");
	out->status = (enum model_status)v;
	out->error_text = wire_str(&r, 4096);
	v = wire_u8(&r);
	if (v < FINISH_STOP || v > FINISH_OTHER)
		wire_fail(&r, "finish");
	out->finish = (enum model_finish)v;
	out->content = wire_str(&r, MODEL_STR_MAX);
	out->calls = calls_decode(&r, &out->call_count);
	out->calls_left = wire_u32(&r);
	if (wire_end(&r, "model reply", e)) {
		model_reply_free(out);
		return -1;
	}
	return 0;
}

void model_reply_free(struct model_reply *m)
{
	free(m->error_text);
	free(m->content);
	calls_free(m->calls, m->call_count);
	*m = (struct model_reply){ .call = 0 };
}
