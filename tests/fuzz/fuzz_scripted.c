/*
 * A chat completion request as the scripted provider reads it, planned and rendered. First byte: the attempt. The same request
 * gives the same bytes again. An answer that is a completion, and that its script does not falsify, is one for the broker's own
 * reader: whole, with the text and the calls of the plan and its usage.
 */
/* link: controld_scripted ephproto */
/* sources: noded/broker/model_stream.c noded/broker/model_error.c noded/broker/model_request.c */
/* reads: controld/scripted/auto.c controld/scripted/chat.c controld/scripted/plan.c */
/* reads: controld/scripted/render.c controld/scripted/turns.c */
/* reached: 91 % of lines, 77 % of branches; the rest is memory */
#include "controld/scripted/plan.h"

#include "common/text.h"
#include "fuzz.h"
#include "noded/broker/model_stream.h"

static void join(const struct render *r, struct buf *out)
{
	for (size_t i = 0; i < r->count; i++)
		must(buf_add(out, r->chunks[i].data, r->chunks[i].len));
}

static bool honest(const struct plan *p)
{
	size_t bytes = p->text ? strlen(p->text) : 0;

	for (size_t i = 0; i < p->call_count; i++) {
		const struct plan_call *c = &p->calls[i];

		bytes += strlen(c->id) + strlen(c->name) + strlen(c->arguments);
		if (strlen(c->id) > MODEL_ID_MAX || strlen(c->name) > MODEL_ID_MAX || !*c->id || !*c->name)
			return false;
	}
	return !p->http_status && !p->raw && !p->usage && p->cut_after < 0 && p->call_count <= MODEL_TOOL_CALLS_MAX &&
	       bytes < 1 << 20;
}

static void read_back(const struct chat *chat, const struct plan *plan, const struct buf *bytes)
{
	struct model_stream *s = model_stream_new(NULL);
	struct meter_tokens t;
	struct model_reply reply;
	bool usage;
	struct err e;

	must(s && model_stream_feed(s, bytes->data, bytes->len, &e) == 0);
	must(model_stream_end(s, &e) == 0);
	usage = model_stream_usage(s, &t);
	must(usage == (!plan->no_usage && (chat->include_usage || !plan->stream)));
	must(!usage || (t.input == chat->prompt_tokens && t.output == plan->completion_tokens));
	must(model_stream_take(s, 1, &reply, &e) == 0);
	if (reply.finish != FINISH_LENGTH) {
		must(strcmp(reply.content, plan->text ? plan->text : "") == 0);
		must(reply.call_count == plan->call_count);
		for (uint32_t i = 0; i < reply.call_count; i++)
			must(strcmp(reply.calls[i].name, plan->calls[i].name) == 0 &&
					strcmp(reply.calls[i].arguments, plan->calls[i].arguments) == 0);
	}
	model_reply_free(&reply);
	model_stream_free(s);
}

static void answer(const struct chat *chat, const struct plan *plan)
{
	struct buf once = BUF_INIT(64 << 20), twice = BUF_INIT(64 << 20);
	struct render a, b;
	struct err e;

	if (render_reply(chat, plan, "run-1-1", 1, &a, &e) != 0)
		return;
	must(render_reply(chat, plan, "run-1-1", 1, &b, &e) == 0);
	join(&a, &once);
	join(&b, &twice);
	must(once.len == twice.len && (once.len == 0 || memcmp(once.data, twice.data, once.len) == 0));
	if (honest(plan))
		read_back(chat, plan, &once);
	render_free(&a);
	render_free(&b);
	buf_free(&once);
	buf_free(&twice);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct chat chat;
	struct plan plan;
	struct err e;

	if (size < 1 || chat_parse(data + 1, size - 1, &chat, &e) != 0)
		return 0;
	if (plan_make(&chat, data[0] % 8, &plan, &e) == 0) {
		if (!plan.http_status)
			answer(&chat, &plan);
		plan_free(&plan);
	} else {
		must(text_utf8_valid(e.text, strlen(e.text)) && *e.text);
	}
	chat_free(&chat);
	return 0;
}
