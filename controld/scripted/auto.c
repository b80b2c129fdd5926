/*
 * A prompt with ```sh blocks: each is one shell call, all in one reply; then a report with their outputs as they are. A prompt
 * without: how to use this. Pure.
 */
#include "plan.h"

#include "common/text.h"

#include <inttypes.h>

#define COMMANDS_MAX 64 /* what a broker takes in one reply */

static const char usage_text[] =
		"This is a script, not a model: it does not read prompts. It runs each fenced block marked `sh` "
		"of the prompt as one shell command, in "
		"order, and reports what they print:\n\n"
		"    ```sh\n"
		"    uname -a\n"
		"    ```\n\n"
		"The run needs `\"shell\": true` (CLI: `--shell`). For an agent that thinks, have the operator add a model "
		"provider and name its model in the run.";

static int say(struct plan *out, const char *text, struct err *e)
{
	out->text = strdup(text);
	return out->text ? 0 : err_set(e, ERR_NOMEM, "no memory");
}

static bool next_command(const char *prompt, size_t *at, struct fence *f)
{
	while (fence_next(prompt, at, f)) {
		if ((fence_is(f, "sh") || fence_is(f, "bash")) && f->body_len > 0)
			return true;
	}
	return false;
}

static size_t count_commands(const char *prompt)
{
	struct fence f;
	size_t at = 0, n = 0;

	while (next_command(prompt, &at, &f))
		n++;
	return n;
}

static int make_calls(const struct chat *c, struct plan *out, struct err *e)
{
	struct fence f;
	size_t at = 0;

	while (next_command(c->prompt, &at, &f)) {
		if (plan_add_shell(out, 0, f.body, f.body_len, e) != 0)
			return -1;
	}
	return 0;
}

/* --- the report -------------------------------------------------------------------------------------------------------------- */

/* A fence longer than any run of backticks in the text, so that the text cannot close it. */
static void put_fence(struct buf *b, const char *s, size_t n)
{
	size_t longest = 2, run = 0;

	for (size_t i = 0; i < n; i++) {
		run = s[i] == '`' ? run + 1 : 0;
		if (run > longest)
			longest = run;
	}
	for (size_t i = 0; i <= longest; i++)
		buf_add_char(b, '`');
}

static void put_output(struct buf *b, const char *s, size_t room)
{
	size_t n = strlen(s), head, tail;

	put_fence(b, s, n);
	buf_add_char(b, '\n');
	if (n <= room) {
		buf_add(b, s, n);
	} else {
		head = text_utf8_border(s, room / 2);
		tail = n - room / 2;
		while (tail < n && ((unsigned char)s[tail] & 0xc0) == 0x80)
			tail++;
		buf_add(b, s, head);
		buf_printf(b, "\n[%zu bytes are left out here: the reply may have so many tokens only]\n", tail - head);
		buf_add(b, s + tail, n - tail);
	}
	if (n > 0 && s[n - 1] != '\n')
		buf_add_char(b, '\n');
	put_fence(b, s, n);
	buf_add_char(b, '\n');
}

/* Bytes of each output that may be shown: an even share of what the token limit leaves. */
static size_t share(const struct chat *c, size_t commands, size_t overhead)
{
	size_t room = c->limit > 0 && c->limit < PLAN_TEXT_MAX / 8 ? (size_t)c->limit * 4 : PLAN_TEXT_MAX / 2;

	overhead += commands * 160; /* headings, fences, the remark about what is left out */
	return room > overhead ? (room - overhead) / commands : 0;
}

static void put_heading(struct buf *b, size_t number, const struct fence *f)
{
	size_t n = strcspn(f->body, "\n");

	if (n > f->body_len)
		n = f->body_len;
	buf_printf(b, "\n%zu. `", number);
	buf_add(b, f->body, n > 80 ? text_utf8_border(f->body, 80) : n);
	buf_add_str(b, n > 80 || n < f->body_len ? " ...`\n" : "`\n");
}

static int report(const struct chat *c, size_t commands, struct plan *out, struct err *e)
{
	struct buf b = BUF_INIT(PLAN_TEXT_MAX);
	struct fence f;
	size_t at = 0, number = 0, room = share(c, commands, 200 + commands * 90);

	buf_printf(&b, "This is a script, not a model. It ran the %zu command%s of the prompt; they printed:\n", commands,
			commands == 1 ? "" : "s");
	while (next_command(c->prompt, &at, &f)) {
		put_heading(&b, ++number, &f);
		if (number <= c->output_count)
			put_output(&b, c->outputs[number - 1], room);
		else
			buf_add_str(&b, "There is no output of this command.\n");
	}
	if (b.failed || !buf_cstr(&b)) {
		buf_free(&b);
		return err_set(e, ERR_NOMEM, "no memory");
	}
	out->text = buf_steal(&b, NULL);
	return 0;
}

int plan_auto(const struct chat *c, struct plan *out, struct err *e)
{
	size_t commands = count_commands(c->prompt);

	if (commands == 0)
		return say(out, usage_text, e);
	if (commands > COMMANDS_MAX)
		return say(out, "This is a script, not a model. The prompt has more than 64 sh blocks; it runs at most 64.", e);
	if (!c->shell)
		return say(out,
				"This is a script, not a model. The prompt has commands, but this run has no shell: set \"shell\" "
				"to true.",
				e);
	return c->turn == 0 ? make_calls(c, out, e) : report(c, commands, out, e);
}
