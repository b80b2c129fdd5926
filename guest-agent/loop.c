/*
 * The agent loop. Owns the conversation. Called once by main on the only thread; everything that waits in here serves the channel.
 *
 * A call uses a stream of its own: 1, 3, 5, ... The host counts calls too; the one beyond the run's limit is sent nevertheless,
 * since it tells the host that the model has no answer yet.
 */
#include "loop.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "confine.h"
#include "history.h"
#include "tools.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define SYSTEM_PROMPT_MAX (32 * 1024)
#define RESULT_STREAM 2
/* A tool call starts when at most this much of the events before it still waits for the host. */
#define BACKLOG_MAX (256 * 1024)
/* After the result the host ends the machine. If it does not, the machine ends itself. */
#define AFTER_RESULT_MS 60000

struct loop {
	struct channel *ch;
	const struct setup *setup;
	struct tools tools;
	struct history history;
	uint32_t call;    /* number of the model call that is under way or was last */
	struct buf reply; /* as it comes in */
	bool reply_whole;
};

/* --- what the model is told -------------------------------------------------------------------------------------------------- */

static void describe_files(const struct guest_setup *s, struct buf *out)
{
	if (s->file_count == 0)
		return;
	buf_add_str(out, "\nThese files were put into your working directory:\n");
	for (uint32_t i = 0; i < s->file_count; i++)
		buf_printf(out, "- %s (%" PRIu64 " bytes)\n", s->files[i].path, s->files[i].size);
}

static void system_prompt(const struct setup *s, struct buf *out)
{
	buf_printf(out,
			"You are an agent at work in a disposable Linux microVM that exists for this one task. You act as the "
			"unprivileged user " WORKER_NAME " in the working directory %s.\n"
			"This machine has no network: no name resolves and nothing outside can be reached. It holds no "
			"credentials.\n",
			s->workdir);
	if (s->request.shell)
		buf_add_str(out, "With the tool shell you can run commands; bash, coreutils, python3, git, jq and curl are there. "
				 "Each command "
				 "starts afresh in the working directory, has no input, and all its processes end with it. Long "
				 "output is cut in "
				 "the middle.\n");
	else
		buf_add_str(out, "You cannot run commands in this run; you can read, write and list files.\n");
	buf_add_str(out, "The machine and everything written in it are destroyed at the end. Only your last message, the one "
			 "without a tool "
			 "call, is kept: it is the result of the task, so put everything that matters into it. Report what you "
			 "really "
			 "saw, not what you expect.\n");
	describe_files(&s->request, out);
}

static int begin(struct loop *l, struct err *e)
{
	struct buf text = BUF_INIT(SYSTEM_PROMPT_MAX);
	const char *s;
	int rc;

	system_prompt(l->setup, &text);
	s = buf_cstr(&text);
	if (s == NULL || text.failed)
		rc = err_set(e, ERR_LIMIT, "the system prompt is over %d bytes", SYSTEM_PROMPT_MAX);
	else
		rc = history_add_fixed(&l->history, ROLE_SYSTEM, s, e);
	if (rc == 0)
		rc = history_add_fixed(&l->history, ROLE_USER, l->setup->request.prompt, e);
	buf_free(&text);
	return rc;
}

/* --- a model call ------------------------------------------------------------------------------------------------------------ */

static uint32_t call_stream(const struct loop *l)
{
	return 2 * l->call - 1;
}

static int on_frame(void *ctx, const struct guest_frame_view *f, struct err *e)
{
	struct loop *l = ctx;

	if ((f->type != GF_REPLY_DATA && f->type != GF_REPLY_END) || f->stream != call_stream(l) || l->reply_whole)
		return err_set(e, ERR_PROTOCOL, "frame of type %u on stream %u is not expected in a call", f->type, f->stream);
	if (f->type == GF_REPLY_END) {
		l->reply_whole = true;
		return 0;
	}
	if (!buf_add(&l->reply, f->body, f->n))
		return err_set(e, ERR_LIMIT, "a reply is over %zu bytes", l->reply.max);
	channel_consumed(l->ch, f->stream, f->n);
	return 0;
}

static int send_call(struct loop *l, struct err *e)
{
	struct model_call call = {
		.call = l->call,
		.tools = tools_offered(&l->tools),
		.messages = l->history.messages,
		.message_count = l->history.count,
	};
	struct buf body = BUF_INIT(MODEL_CALL_BYTES_MAX + 1);
	int rc;

	wire_put_u8(&body, CALL_MODEL);
	model_call_encode(&call, &body);
	if (body.failed)
		rc = err_set(e, ERR_LIMIT, "a model call is over %d bytes", MODEL_CALL_BYTES_MAX);
	else
		rc = channel_send_message(l->ch, call_stream(l), GF_CALL_DATA, GF_CALL_END, body.data, body.len, e);
	buf_free(&body);
	return rc;
}

static int decode_reply(struct loop *l, struct model_reply *out, struct err *e)
{
	if (l->reply.len < 1 || l->reply.data[0] != CALL_MODEL)
		return err_set(e, ERR_PROTOCOL, "a reply is not one to a model call");
	if (model_reply_decode(l->reply.data + 1, l->reply.len - 1, out, e) < 0)
		return -1;
	if (out->call == l->call)
		return 0;
	err_set(e, ERR_PROTOCOL, "reply to call %u came for call %u", out->call, l->call);
	model_reply_free(out);
	return -1;
}

static void note(struct loop *l, const char *text)
{
	struct guest_event ev = { .kind = GE_NOTE, .bytes = -1, .text = (const uint8_t *)text, .text_len = strlen(text) };

	if (!channel_event(l->ch, &ev))
		log_warn("event lost kind=worker.note");
}

/* Makes the conversation fit, and says so on the timeline when that cost something. */
static int fit(struct loop *l, struct err *e)
{
	uint32_t before = l->history.dropped;
	char text[128];

	if (history_fit(&l->history, e) < 0)
		return -1;
	if (l->history.dropped > before &&
			text_fmt(text, sizeof text,
					"The conversation grew too long: its oldest %u turns are no longer sent to the model.",
					l->history.dropped))
		note(l, text);
	return 0;
}

/* Asks the model; *out is the caller's to free when 0 is returned. */
static int ask(struct loop *l, struct model_reply *out, struct err *e)
{
	int rc = fit(l, e);

	/* What happened before the call must stand before it on the timeline. */
	if (rc == 0)
		rc = channel_flush_events(l->ch, 0, e);
	if (rc < 0)
		return -1;
	l->call++;
	l->reply_whole = false;
	buf_init(&l->reply, MODEL_CALL_BYTES_MAX + 1);
	channel_open_stream(l->ch, call_stream(l));
	channel_set_handler(l->ch, on_frame, l);
	rc = send_call(l, e);
	while (rc == 0 && !l->reply_whole)
		rc = channel_wait(l->ch, -1, e);
	channel_set_handler(l->ch, NULL, NULL);
	if (rc == 0)
		rc = decode_reply(l, out, e);
	buf_free(&l->reply);
	return rc;
}

/* --- tool calls -------------------------------------------------------------------------------------------------------------- */

static int run_call(struct loop *l, uint32_t message, uint32_t i, bool was_cut, struct err *e)
{
	const struct model_tool_call *call = &l->history.messages[message].calls[i];
	struct buf result = BUF_INIT(TOOL_RESULT_MAX);
	char *text;

	if (channel_flush_events(l->ch, BACKLOG_MAX, e) < 0 || tools_call(&l->tools, call, was_cut, &result, e) < 0) {
		buf_free(&result);
		return -1;
	}
	text = buf_steal(&result, NULL);
	if (text == NULL)
		text = strdup("");
	return history_add_result(&l->history, call->id, text, e);
}

/* Runs all calls of a reply in their order. Only the last one can have been cut by the token limit. */
static int run_calls(struct loop *l, struct model_reply *r, struct err *e)
{
	uint32_t message = l->history.count, count = r->call_count;
	bool was_cut = r->finish == FINISH_LENGTH;

	if (history_add_reply(&l->history, r, e) < 0)
		return -1;
	for (uint32_t i = 0; i < count; i++)
		if (run_call(l, message, i, was_cut && i == count - 1, e) < 0)
			return -1;
	history_mend_arguments(&l->history, message);
	return 0;
}

/* --- the end ----------------------------------------------------------------------------------------------------------------- */

static void wait_for_end(struct loop *l, const char *what)
{
	log_info("waiting for the host to end the machine after=\"%s\"", what);
	channel_wait_end(l->ch, AFTER_RESULT_MS);
}

/* One byte over the limit goes too, so that the host can tell that it was too long. */
static int send_result(struct loop *l, const char *text, enum model_finish finish, struct err *e)
{
	size_t n = strlen(text);

	if (finish == FINISH_LENGTH)
		note(l, "The answer was cut at the model's token limit.");
	if (finish == FINISH_FILTER)
		note(l, "The answer was cut by the provider's content filter.");
	if (n > GUEST_RESULT_MAX + 1)
		n = GUEST_RESULT_MAX + 1;
	if (channel_flush_events(l->ch, 0, e) < 0 ||
			channel_send_message(l->ch, RESULT_STREAM, GF_RESULT_DATA, GF_RESULT_END, text, n, e) < 0)
		return -1;
	wait_for_end(l, "result");
	return 0;
}

/* 0: go on; 1: the run is over; -1 error. */
static int step(struct loop *l, struct err *e)
{
	struct model_reply reply = { .call = 0 };
	int rc;

	if (ask(l, &reply, e) < 0)
		return -1;
	if (reply.status == MODEL_OK && reply.call_count > 0) {
		rc = run_calls(l, &reply, e);
	} else {
		rc = 1;
		if (reply.status == MODEL_FAILED)
			wait_for_end(l, "the model gave no answer");
		else if (send_result(l, reply.content == NULL ? "" : reply.content, reply.finish, e) < 0)
			rc = -1;
	}
	model_reply_free(&reply);
	return rc;
}

int loop_run(struct channel *ch, int sigchld_fd, const struct setup *s, struct err *e)
{
	struct loop l = {
		.ch = ch,
		.setup = s,
		.tools = { .ch = ch,
				.sigchld_fd = sigchld_fd,
				.workdir = s->workdir,
				.shell = s->request.shell,
				.limit_ms = s->request.tool_timeout_ms },
	};
	int rc;

	history_init(&l.history);
	rc = begin(&l, e);
	while (rc == 0)
		rc = step(&l, e);
	history_free(&l.history);
	return rc < 0 ? -1 : 0;
}
