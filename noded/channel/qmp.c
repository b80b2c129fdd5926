/*
 * QEMU's monitor (QMP), as much of it as starting and watching a VM takes (control.h). Owns one line of input at most.
 *
 *   cold:    greeting -> capabilities -> up
 *   golden:  ... up, then stop -> what migration may do -> the file's descriptor -> migrate -> its event -> snapshot made
 *   clone:   greeting -> capabilities -> what migration may do -> incoming -> its event -> cont -> up
 *
 * "What migration may do" is to leave out memory, which is a file already, and to say by event when it is over.
 */
#include "channel/control.h"

#include "common/buf.h"
#include "common/json.h"
#include "common/log.h"
#include "common/text.h"

#include <stdlib.h>
#include <string.h>

#define LINE_MAX_BYTES 65536
#define EVENTS_MAX 1000 /* of all kinds, in one VM's life: far above what a quiet machine says */

enum state {
	Q_GREETING,
	Q_CAPABILITIES,
	Q_C_ALLOW,
	Q_C_INCOMING,
	Q_C_LOADING,
	Q_C_CONT,
	Q_UP,
	Q_G_STOP,
	Q_G_ALLOW,
	Q_G_FILE,
	Q_G_MIGRATE,
	Q_G_WRITING,
	Q_DONE
};

/* RAM is not in the stream: it is a file of its own. Migration says its state by events. */
static const char allow_shared[] = "\"migrate-set-capabilities\",\"arguments\":{\"capabilities\":["
				   "{\"capability\":\"x-ignore-shared\",\"state\":true},"
				   "{\"capability\":\"events\",\"state\":true}]}";

/* What is said on the way into a state; its answer has the state's number as id. */
static const char *const said[] = {
	[Q_CAPABILITIES] = "\"qmp_capabilities\"",
	[Q_C_ALLOW] = allow_shared,
	[Q_C_CONT] = "\"cont\"",
	[Q_G_STOP] = "\"stop\"",
	[Q_G_FILE] = "\"getfd\",\"arguments\":{\"fdname\":\"state\"}",
	[Q_G_MIGRATE] = "\"migrate\",\"arguments\":{\"uri\":\"fd:state\"}",
};

struct qmp {
	const struct vmm_plan *plan;
	struct control_ops ops;
	enum state state;
	unsigned int events;
	bool guest_opened;
	bool moved;   /* the migration is over; its event may come before the command's answer */
	int state_fd; /* the caller's; -1 unless a snapshot is written */
	struct buf line;
};

static void *qmp_make(const struct vmm_plan *plan, const struct control_ops *ops)
{
	struct qmp *q = calloc(1, sizeof(*q));

	if (!q)
		return NULL;
	q->plan = plan;
	q->ops = *ops;
	q->state_fd = -1;
	buf_init(&q->line, LINE_MAX_BYTES);
	return q;
}

static void qmp_free(void *state)
{
	struct qmp *q = state;

	buf_free(&q->line);
	free(q);
}

/* QEMU speaks first. */
static int qmp_start(void *state, struct err *e)
{
	(void)state;
	(void)e;
	return 0;
}

/* --- steps -------------------------------------------------------------------------------------------------------------------- */

/* What is said on the way into it. */
static int go_to(struct qmp *q, enum state next, struct err *e)
{
	char text[400], with[64];
	const char *what = next == Q_G_ALLOW ? said[Q_C_ALLOW] : said[next];

	if (next == Q_C_INCOMING) {
		if (!text_fmt(with, sizeof(with), "\"migrate-incoming\",\"arguments\":{\"uri\":\"fd:%d\"}", (int)q->plan->state_fd))
			return err_set(e, ERR_INTERNAL, "number of a descriptor");
		what = with;
	}
	if (!text_fmt(text, sizeof(text), "{\"execute\":%s,\"id\":%d}\n", what, (int)next))
		return err_set(e, ERR_INTERNAL, "a command is too long");
	q->state = next;
	q->ops.on_wait(q->ops.arg, next == Q_CAPABILITIES ? NULL : "the monitor's command");
	if (next == Q_G_FILE)
		return q->ops.send_fd(q->ops.arg, text, strlen(text), q->state_fd, e);
	q->ops.send(q->ops.arg, text, strlen(text));
	return 0;
}

static void be_up(struct qmp *q)
{
	q->state = Q_UP;
	q->ops.on_wait(q->ops.arg, NULL);
	q->ops.on_up(q->ops.arg);
}

static void be_done(struct qmp *q, const char *why)
{
	q->state = Q_DONE;
	q->ops.on_wait(q->ops.arg, NULL);
	q->ops.on_snapshot(q->ops.arg, why);
}

/* The command of this state was done. */
static int answered(struct qmp *q, struct err *e)
{
	switch (q->state) {
	case Q_CAPABILITIES:
		if (q->plan->start == VMM_CLONE)
			return go_to(q, Q_C_ALLOW, e);
		be_up(q);
		return 0;
	case Q_C_ALLOW: return go_to(q, Q_C_INCOMING, e);
	case Q_C_INCOMING: q->state = Q_C_LOADING; return q->moved ? go_to(q, Q_C_CONT, e) : 0;
	case Q_C_CONT: be_up(q); return 0;
	case Q_G_STOP: return go_to(q, Q_G_ALLOW, e);
	case Q_G_ALLOW: return go_to(q, Q_G_FILE, e);
	case Q_G_FILE: return go_to(q, Q_G_MIGRATE, e);
	case Q_G_MIGRATE:
		q->state = Q_G_WRITING;
		if (q->moved)
			be_done(q, NULL);
		return 0;
	default: return err_set(e, ERR_PROTOCOL, "an answer to nothing");
	}
}

/* A migration in either direction came to its end. */
static int moved(struct qmp *q, const char *status, struct err *e)
{
	if (!status || (strcmp(status, "completed") != 0 && strcmp(status, "failed") != 0))
		return 0; /* on its way */
	if (strcmp(status, "failed") == 0) {
		if (q->state >= Q_G_STOP && q->state < Q_DONE) {
			be_done(q, "the snapshot could not be written");
			return 0;
		}
		return err_set(e, ERR_INVALID, "the snapshot could not be loaded");
	}
	q->moved = true;
	if (q->state == Q_C_LOADING)
		return go_to(q, Q_C_CONT, e);
	if (q->state == Q_G_WRITING)
		be_done(q, NULL);
	return 0;
}

/* --- what it says ------------------------------------------------------------------------------------------------------------- */

/* The guest's port was opened from inside. The agent opens it once; that it closes it shows on the stream. */
static void take_port(struct qmp *q, const struct json *data)
{
	if (q->guest_opened || !data || !json_get_bool(data, "open", false))
		return;
	q->guest_opened = true;
	q->ops.on_guest_open(q->ops.arg);
}

static int take_event(struct qmp *q, const struct json *v, const char *name, struct err *e)
{
	static const char *const watched[] = { "RESET", "SHUTDOWN", "GUEST_PANICKED" };

	if (++q->events > EVENTS_MAX)
		return err_set(e, ERR_PROTOCOL, "more than %d events", EVENTS_MAX);
	for (size_t i = 0; i < sizeof(watched) / sizeof(watched[0]); i++)
		if (strcmp(name, watched[i]) == 0)
			q->ops.on_event(q->ops.arg, watched[i]);
	if (strcmp(name, "VSERPORT_CHANGE") == 0)
		take_port(q, json_get(v, "data"));
	if (strcmp(name, "MIGRATION") == 0 && json_get(v, "data"))
		return moved(q, json_get_text(json_get(v, "data"), "status"), e);
	return 0;
}

static int take_greeting(struct qmp *q, const struct json *v, struct err *e)
{
	const struct json *greeting = json_get(v, "QMP");

	if (!greeting || json_type(greeting) != JSON_OBJECT)
		return err_set(e, ERR_PROTOCOL, "the first message is no greeting");
	q->ops.on_known(q->ops.arg);
	return go_to(q, Q_CAPABILITIES, e);
}

static int take_message(struct qmp *q, const struct json *v, struct err *e)
{
	const char *event = json_get_text(v, "event");

	if (json_type(v) != JSON_OBJECT)
		return err_set(e, ERR_PROTOCOL, "a message is no object");
	if (q->state == Q_GREETING)
		return take_greeting(q, v, e);
	if (event)
		return take_event(q, v, event, e);
	if (json_get(v, "return") && json_get_int(v, "id", 0) == (int64_t)q->state)
		return answered(q, e);
	return err_set(e, ERR_PROTOCOL, "%s", json_get(v, "error") ? "the monitor refused a command" : "an answer to nothing");
}

static int take_line(struct qmp *q, struct err *e)
{
	struct json *v;
	size_t n = q->line.len;
	int rc;

	while (n > 0 && (q->line.data[n - 1] == '\r' || q->line.data[n - 1] == ' '))
		n--;
	if (n == 0)
		return 0;
	if (json_parse((const char *)q->line.data, n, &v, e))
		return -1;
	rc = take_message(q, v, e);
	json_free(v);
	return rc;
}

static int qmp_feed(void *state, const char *bytes, size_t n, struct err *e)
{
	struct qmp *q = state;

	while (n > 0) {
		const char *end = memchr(bytes, '\n', n);
		size_t part = end ? (size_t)(end - bytes) : n;

		if (!buf_add(&q->line, bytes, part))
			return err_set(e, ERR_PROTOCOL, "a line is longer than %d bytes", LINE_MAX_BYTES);
		if (!end)
			return 0;
		bytes += part + 1;
		n -= part + 1;
		if (take_line(q, e))
			return -1;
		buf_reset(&q->line);
	}
	return 0;
}

/* --- what it is asked --------------------------------------------------------------------------------------------------------- */

/* One descriptor: the file that the state of the devices is written to. */
static void qmp_snapshot(void *state, const int *fds, size_t fd_count)
{
	struct qmp *q = state;
	struct err e;

	if (q->state != Q_UP || fd_count != 1) {
		q->ops.on_snapshot(q->ops.arg, "the VM does not run, or there is no file to write to");
		return;
	}
	q->state_fd = fds[0];
	if (go_to(q, Q_G_STOP, &e))
		be_done(q, e.text);
}

const struct control_driver control_qmp = {
	.name = "qmp",
	.quit = "{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\"}\n", /* the first may have been said, and is an error
										   then */
	.make = qmp_make,
	.free = qmp_free,
	.start = qmp_start,
	.feed = qmp_feed,
	.snapshot = qmp_snapshot,
};
