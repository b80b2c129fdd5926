/*
 * The shell tool: one command, its events as they happen, its result for the model. Owns the output of the running command.
 * Called by tools.c; blocks while the command runs, in exec.c's loop, where the channel is served.
 *
 * Result: the output of both streams in the order in which it was read, then one line in brackets that says how it ended.
 */
#include "cgroup.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "output.h"
#include "proto/event.h"
#include "tools.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Bytes of one command on the timeline. */
#define TIMELINE_MAX (1024 * 1024)
/* With so many bytes of events waiting for credit only full chunks are added: the host is behind anyway. */
#define BACKLOG 65536
#define BACKLOG_LOOK_MS 50
/* A line that is written in pieces (curl's messages are, byte by byte at first) waits this long for its end, to be one event. */
#define LINE_WAIT_MS 100

struct shell {
	const struct tools *tools;
	const char *call_id;
	struct keep keep;
	struct chunker chunks[2];
	struct pace pace[2];
	int64_t since_ms[2]; /* when the oldest byte held of each stream came */
	uint64_t budget, cut;
	int sending; /* stream of the chunk that is leaving: 1 or 2 */
};

static void fill_id(struct guest_event *ev, const char *call_id)
{
	size_t n = text_utf8_border(call_id, strnlen(call_id, sizeof ev->call_id - 1));

	memcpy(ev->call_id, call_id, n);
	ev->call_id[n] = '\0';
}

static bool send_chunk(void *ctx, const uint8_t *p, size_t n)
{
	struct shell *s = ctx;
	struct guest_event ev = { .kind = GE_SHELL_OUTPUT, .bytes = -1, .text = p, .text_len = n, .stream = (uint8_t)s->sending };

	fill_id(&ev, s->call_id);
	pace_take(&s->pace[s->sending - 1], clock_boot_ms());
	return channel_event(s->tools->ch, &ev);
}

static void on_output(void *ctx, int stream, const uint8_t *p, size_t n)
{
	struct shell *s = ctx;
	struct chunker *c = &s->chunks[stream - 1];

	keep_add(&s->keep, p, n);
	if (c->held.len == 0)
		s->since_ms[stream - 1] = clock_boot_ms();
	s->sending = stream;
	chunker_add(c, p, n, send_chunk, s);
}

/* When what a stream holds may leave: by its pace, half a line not before its wait is over. */
static int64_t due_ms(struct shell *s, int i, int64_t now_ms)
{
	const struct buf *held = &s->chunks[i].held;
	int64_t due = channel_events_waiting(s->tools->ch) > BACKLOG ? now_ms + BACKLOG_LOOK_MS : pace_due(&s->pace[i], now_ms);
	int64_t line = s->since_ms[i] + LINE_WAIT_MS;

	return held->data[held->len - 1] != '\n' && due < line ? line : due;
}

static int64_t on_tick(void *ctx, int64_t now_ms)
{
	struct shell *s = ctx;
	int64_t next = -1;

	for (int i = 0; i < 2; i++) {
		int64_t due;

		if (!chunker_ready(&s->chunks[i]))
			continue;
		due = due_ms(s, i, now_ms);
		if (due <= now_ms) {
			s->sending = i + 1;
			chunker_flush(&s->chunks[i], false, send_chunk, s);
		} else if (next < 0 || due < next) {
			next = due;
		}
	}
	return next;
}

static void started_event(const struct tools *t, const char *call_id, const char *command)
{
	struct guest_event ev = { .kind = GE_SHELL_STARTED, .bytes = -1, .text = (const uint8_t *)command };

	fill_id(&ev, call_id);
	ev.text_len = text_utf8_border(command, strnlen(command, GUEST_COMMAND_TEXT_MAX));
	if (!channel_event(t->ch, &ev))
		log_warn("event lost kind=shell.started");
}

static void exited_event(const struct shell *s, const struct job_end *end)
{
	struct guest_event ev = {
		.kind = GE_SHELL_EXITED,
		.bytes = -1,
		.has_signal = end->has_signal,
		.timed_out = end->timed_out,
		.code = end->code,
		.duration_ms = end->duration_ms,
		.cut_bytes = s->cut,
	};

	fill_id(&ev, s->call_id);
	if (!channel_event(s->tools->ch, &ev))
		log_warn("event lost kind=shell.exited");
}

static void describe_end(const struct job_end *end, int64_t limit_ms, struct buf *result)
{
	if (end->timed_out)
		buf_printf(result, "[stopped: the command was still running at its time limit of %" PRId64 " s, and was killed]",
				limit_ms / 1000);
	else if (end->has_signal)
		buf_printf(result, "[ended by signal %d (%s)]", end->code, strsignal(end->code));
	else
		buf_printf(result, "[exit code %d]", end->code);
	if (end->out_of_memory)
		buf_printf(result,
				"\n[a process was killed because commands may use at most %ld MiB of memory, files in /tmp "
				"included]",
				cgroup_memory_mib());
}

static void render(const struct shell *s, const struct job_end *end, int64_t limit_ms, struct buf *result)
{
	if (!keep_render(&s->keep, result))
		buf_add_str(result, "\n[the output could not be kept: out of memory]");
	if (result->len > 0 && result->data[result->len - 1] != '\n')
		buf_add_char(result, '\n');
	describe_end(end, limit_ms, result);
}

static void finish(struct shell *s, const struct job_end *end)
{
	for (int i = 0; i < 2; i++) {
		s->sending = i + 1;
		chunker_flush(&s->chunks[i], true, send_chunk, s);
	}
	exited_event(s, end);
}

static void shell_free(struct shell *s)
{
	keep_free(&s->keep);
	for (int i = 0; i < 2; i++)
		chunker_free(&s->chunks[i]);
}

int tool_shell(const struct tools *t, const char *call_id, const struct tool_args *a, struct buf *result, struct err *e)
{
	struct shell s = { .tools = t, .call_id = call_id, .budget = TIMELINE_MAX };
	int64_t limit_ms = a->timeout_seconds * 1000 < t->limit_ms ? a->timeout_seconds * 1000 : t->limit_ms;
	struct job job = {
		.command = a->command,
		.cwd = t->workdir,
		.limit_ms = limit_ms,
		.on_output = on_output,
		.on_tick = on_tick,
		.ctx = &s,
	};
	struct job_end end;
	int rc;

	keep_init(&s.keep);
	for (int i = 0; i < 2; i++)
		chunker_init(&s.chunks[i], EVENT_TEXT_MAX, &s.budget, &s.cut);
	started_event(t, call_id, a->command);
	rc = job_run(t->ch, t->sigchld_fd, &job, &end, e);
	if (rc == 0 && !end.started) {
		end.code = 126;
		buf_printf(result, "Not done: no process could be started: %s. Try again.", end.why.text);
		exited_event(&s, &end);
	} else if (rc == 0) {
		finish(&s, &end);
		render(&s, &end, limit_ms, result);
	}
	shell_free(&s);
	return rc;
}
