/*
 * QEMU's monitor (QMP), as much of it as starting and watching a VM takes (control.h). Owns one line of input at most.
 *
 *   greeting -> capabilities -> up
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

enum state { Q_GREETING, Q_CAPABILITIES, Q_UP };

struct qmp {
	const struct vmm_plan *plan;
	struct control_ops ops;
	enum state state;
	unsigned int events;
	bool guest_opened;
	struct buf line;
};

static void *qmp_make(const struct vmm_plan *plan, const struct control_ops *ops)
{
	struct qmp *q = calloc(1, sizeof(*q));

	if (!q)
		return NULL;
	q->plan = plan;
	q->ops = *ops;
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
	struct qmp *q = state;

	if (q->plan->start == VMM_CLONE)
		return err_set(e, ERR_INVALID, "QEMU starts no clones here");
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
	return 0;
}

static int take_greeting(struct qmp *q, const struct json *v, struct err *e)
{
	static const char capabilities[] = "{\"execute\":\"qmp_capabilities\",\"id\":1}\n";
	const struct json *greeting = json_get(v, "QMP");

	if (!greeting || json_type(greeting) != JSON_OBJECT)
		return err_set(e, ERR_PROTOCOL, "the first message is no greeting");
	q->state = Q_CAPABILITIES;
	q->ops.on_known(q->ops.arg);
	q->ops.send(q->ops.arg, capabilities, sizeof(capabilities) - 1);
	return 0;
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
	if (q->state == Q_CAPABILITIES && json_get(v, "return") && json_get_int(v, "id", 0) == 1) {
		q->state = Q_UP;
		q->ops.on_up(q->ops.arg);
		return 0;
	}
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

static void qmp_snapshot(void *state, const int *fds, size_t fd_count)
{
	struct qmp *q = state;

	(void)fds;
	(void)fd_count;
	q->ops.on_snapshot(q->ops.arg, "QEMU makes no snapshots here");
}

const struct control_driver control_qmp = {
	.name = "qmp",
	.make = qmp_make,
	.free = qmp_free,
	.start = qmp_start,
	.feed = qmp_feed,
	.snapshot = qmp_snapshot,
};
