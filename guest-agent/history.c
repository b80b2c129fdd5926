/*
 * The conversation. Owns every message; called by the agent loop. Pure but for memory.
 *
 * A turn is an assistant's message and the results of its tool calls. Turns are dropped whole, oldest first, because a result
 * without its call (or the other way round) is refused by providers.
 */
#include "history.h"

#include "common/json.h"
#include "common/text.h"

#include <stdlib.h>
#include <string.h>

#define CUT_NOTE "\n[... the rest was cut because the conversation is too long]"

void history_init(struct history *h)
{
	*h = (struct history){ .count = 0 };
}

static size_t message_bytes(const struct model_message *m)
{
	size_t n = strlen(m->content) + strlen(m->tool_call_id) + 32;

	for (uint32_t i = 0; i < m->call_count; i++)
		n += strlen(m->calls[i].id) + strlen(m->calls[i].name) + strlen(m->calls[i].arguments) + 16;
	return n;
}

static void message_free(struct model_message *m)
{
	for (uint32_t i = 0; i < m->call_count; i++) {
		free(m->calls[i].id);
		free(m->calls[i].name);
		free(m->calls[i].arguments);
	}
	free(m->calls);
	free(m->content);
	free(m->tool_call_id);
}

void history_free(struct history *h)
{
	for (uint32_t i = 0; i < h->count; i++)
		message_free(&h->messages[i]);
	free(h->messages);
	history_init(h);
}

/* Takes the message's memory in every case. */
static int add(struct history *h, struct model_message m, struct err *e)
{
	if (m.content != NULL && m.tool_call_id != NULL && h->count == h->cap) {
		uint32_t cap = h->cap == 0 ? 32 : h->cap * 2;
		struct model_message *grown = realloc(h->messages, cap * sizeof *grown);

		if (grown != NULL) {
			h->messages = grown;
			h->cap = cap;
		}
	}
	if (m.content == NULL || m.tool_call_id == NULL || h->count == h->cap) {
		message_free(&m);
		return err_set(e, ERR_NOMEM, "no memory for the conversation");
	}
	h->bytes += message_bytes(&m);
	h->messages[h->count++] = m;
	return 0;
}

int history_add_fixed(struct history *h, enum model_role role, const char *content, struct err *e)
{
	struct model_message m = { .role = role, .content = strdup(content), .tool_call_id = strdup("") };

	if (add(h, m, e) < 0)
		return -1;
	h->fixed = h->count;
	return 0;
}

int history_add_reply(struct history *h, struct model_reply *r, struct err *e)
{
	struct model_message m = {
		.role = ROLE_ASSISTANT,
		.content = r->content,
		.tool_call_id = strdup(""),
		.calls = r->calls,
		.call_count = r->call_count,
	};

	r->content = NULL;
	r->calls = NULL;
	r->call_count = 0;
	return add(h, m, e);
}

int history_add_result(struct history *h, const char *tool_call_id, char *content, struct err *e)
{
	struct model_message m = { .role = ROLE_TOOL, .content = content, .tool_call_id = strdup(tool_call_id) };

	return add(h, m, e);
}

/* Arguments must stay JSON: what cannot be kept is replaced by an empty object. */
static void empty_arguments(struct history *h, struct model_tool_call *call)
{
	char *empty = strdup("{}");

	if (empty == NULL)
		return; /* the call stays as it is: a provider may refuse it, which the host reports */
	h->bytes -= strlen(call->arguments);
	h->bytes += strlen(empty);
	free(call->arguments);
	call->arguments = empty;
}

void history_mend_arguments(struct history *h, uint32_t i)
{
	struct model_message *m = &h->messages[i];

	for (uint32_t k = 0; k < m->call_count; k++) {
		const char *text = m->calls[k].arguments;
		struct json *root = NULL;
		struct err e;

		if (json_parse(text, strlen(text), &root, &e) < 0)
			empty_arguments(h, &m->calls[k]);
		json_free(root);
	}
}

/* Index after the turn that begins at `from`. */
static uint32_t turn_end(const struct history *h, uint32_t from)
{
	uint32_t i = from + 1;

	while (i < h->count && h->messages[i].role == ROLE_TOOL)
		i++;
	return i;
}

static void drop_turn(struct history *h, uint32_t end)
{
	for (uint32_t i = h->fixed; i < end; i++) {
		h->bytes -= message_bytes(&h->messages[i]);
		message_free(&h->messages[i]);
	}
	memmove(h->messages + h->fixed, h->messages + end, (h->count - end) * sizeof *h->messages);
	h->count -= end - h->fixed;
	h->dropped++;
}

/* Cuts a long text at a character's border. */
static void shorten(struct history *h, char **text)
{
	size_t len = strlen(*text), keep;
	char *shorter;

	if (len <= HISTORY_SHORT_TEXT + sizeof CUT_NOTE)
		return;
	keep = text_utf8_border(*text, HISTORY_SHORT_TEXT);
	memcpy(*text + keep, CUT_NOTE, sizeof CUT_NOTE);
	h->bytes -= len - strlen(*text);
	shorter = realloc(*text, strlen(*text) + 1);
	if (shorter != NULL)
		*text = shorter;
}

static void shorten_arguments(struct history *h, struct model_message *m)
{
	for (uint32_t i = 0; i < m->call_count; i++)
		if (strlen(m->calls[i].arguments) > HISTORY_SHORT_TEXT)
			empty_arguments(h, &m->calls[i]);
}

static bool fits(const struct history *h)
{
	return h->bytes <= HISTORY_BYTES_MAX && h->count <= MODEL_MESSAGES_MAX;
}

int history_fit(struct history *h, struct err *e)
{
	while (!fits(h) && h->count > h->fixed) {
		uint32_t end = turn_end(h, h->fixed);

		if (end == h->count)
			break;
		drop_turn(h, end);
	}
	for (uint32_t i = h->fixed; i < h->count && !fits(h); i++) {
		shorten(h, &h->messages[i].content);
		shorten_arguments(h, &h->messages[i]);
	}
	if (!fits(h))
		return err_set(e, ERR_LIMIT, "the conversation has %zu bytes, the limit is %d", h->bytes, HISTORY_BYTES_MAX);
	return 0;
}
