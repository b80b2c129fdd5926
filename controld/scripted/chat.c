/* Reads a chat completion request (chat.h). Called by plan.c for each request; pure, bounded by the body. */
#include "chat.h"

#include "common/text.h"

/* A content is a string, null, or an array of text parts. The copy is the caller's. */
static char *content_text(const struct json *content)
{
	struct buf b = BUF_INIT(64 * 1024 * 1024);
	size_t parts = content && json_type(content) == JSON_ARRAY ? json_len(content) : 0;
	bool ok = true;

	if (content && json_type(content) == JSON_STRING)
		ok = buf_add(&b, json_as_text(content), json_len(content));
	for (size_t i = 0; ok && i < parts; i++) {
		const struct json *text = json_get(json_at(content, i), "text");

		if (text && json_type(text) == JSON_STRING)
			ok = buf_add(&b, json_as_text(text), json_len(text));
	}
	if (!ok || !buf_cstr(&b)) {
		buf_free(&b);
		return NULL;
	}
	return buf_steal(&b, NULL);
}

static bool role_is(const struct json *message, const char *role)
{
	const char *s = json_get_text(message, "role");

	return s && strcmp(s, role) == 0;
}

static bool offers_shell(const struct json *tools)
{
	size_t n = tools && json_type(tools) == JSON_ARRAY ? json_len(tools) : 0;

	for (size_t i = 0; i < n; i++) {
		const char *name = json_get_text(json_get(json_at(tools, i), "function"), "name");

		if (name && strcmp(name, "shell") == 0)
			return true;
	}
	return false;
}

static int read_since(struct chat *c, const struct json *messages, size_t from, struct err *e)
{
	size_t n = json_len(messages);

	c->outputs = calloc(n - from + 1, sizeof(*c->outputs));
	if (!c->outputs)
		return err_set(e, ERR_NOMEM, "no memory");
	for (size_t i = from; i < n; i++) {
		const struct json *m = json_at(messages, i);

		if (role_is(m, "assistant"))
			c->turn++;
		if (!role_is(m, "tool"))
			continue;
		if (c->output_count == CHAT_OUTPUTS_MAX)
			return err_set(e, ERR_LIMIT, "messages: more than %d tool outputs", CHAT_OUTPUTS_MAX);
		c->outputs[c->output_count] = content_text(json_get(m, "content"));
		if (!c->outputs[c->output_count])
			return err_set(e, ERR_NOMEM, "no memory");
		c->output_count++;
	}
	return 0;
}

static int read_messages(struct chat *c, struct err *e)
{
	const struct json *messages = json_get(c->root, "messages");
	size_t last = SIZE_MAX;

	if (!messages || json_type(messages) != JSON_ARRAY || json_len(messages) == 0)
		return err_set(e, ERR_INVALID, "messages: an array with at least one message is needed");
	for (size_t i = 0; i < json_len(messages); i++) {
		if (json_type(json_at(messages, i)) != JSON_OBJECT || !json_get_text(json_at(messages, i), "role"))
			return err_set(e, ERR_INVALID, "messages[%zu]: an object with a role is needed", i);
		if (role_is(json_at(messages, i), "user"))
			last = i;
	}
	if (last == SIZE_MAX)
		return err_set(e, ERR_INVALID, "messages: a message with role user is needed");
	c->prompt = content_text(json_get(json_at(messages, last), "content"));
	if (!c->prompt)
		return err_set(e, ERR_NOMEM, "no memory");
	return read_since(c, messages, last + 1, e);
}

static int read_head(struct chat *c, struct err *e)
{
	const char *model = json_get_text(c->root, "model");
	const char *const limits[] = { "max_completion_tokens", "max_tokens" };

	if (json_type(c->root) != JSON_OBJECT)
		return err_set(e, ERR_INVALID, "the body must be a JSON object");
	if (!model)
		return err_set(e, ERR_INVALID, "model: a string is needed");
	if ((strcmp(model, "auto") != 0 && strcmp(model, "shell") != 0) || !text_copy(c->model, sizeof(c->model), model))
		return err_set(e, ERR_NOT_FOUND, "model: there are \"auto\" and \"shell\" here");
	c->stream = json_get_bool(c->root, "stream", false);
	c->include_usage = json_get_bool(json_get(c->root, "stream_options"), "include_usage", false);
	for (size_t i = 0; i < 2; i++) {
		const struct json *v = json_get(c->root, limits[i]);

		if (!v)
			continue;
		if (json_type(v) != JSON_INT || json_as_int(v) < 1)
			return err_set(e, ERR_INVALID, "%s: a positive integer is needed", limits[i]);
		c->limit = json_as_int(v);
	}
	c->shell = offers_shell(json_get(c->root, "tools"));
	return 0;
}

int chat_parse(const void *body, size_t n, struct chat *out, struct err *e)
{
	memset(out, 0, sizeof(*out));
	if (json_parse(body, n, &out->root, e) != 0)
		return -1;
	out->prompt_tokens = (int64_t)(n / 4 + (n % 4 != 0));
	if (read_head(out, e) == 0 && read_messages(out, e) == 0)
		return 0;
	chat_free(out);
	return -1;
}

void chat_free(struct chat *c)
{
	for (size_t i = 0; i < c->output_count; i++)
		free(c->outputs[i]);
	free(c->outputs);
	free(c->prompt);
	json_free(c->root);
	memset(c, 0, sizeof(*c));
}
