/*
 * The monitor (monitor.h). What it says is QEMU's and trusted; bounds are there all the same.
 */
#include "monitor.h"

#include "common/clock.h"
#include "common/text.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#define ANSWER_MS 20000 /* a loaded host, an emulated start */
#define LINE_MAX_BYTES (1024 * 1024)

/* Takes bytes; waits at most until the deadline (0: not at all). 0 also when there are none. */
static int take_bytes(struct monitor *m, int64_t deadline, struct err *e)
{
	int64_t left = deadline > 0 ? deadline - clock_boot_ms() : 0;
	struct pollfd p = { .fd = m->fd, .events = POLLIN };
	int ready = poll(&p, 1, left > 0 ? (int)left : 0);
	uint8_t *room;
	ssize_t n;

	if (ready == 0 && deadline > 0 && left <= 0)
		return err_set(e, ERR_TIMEOUT, "the emulator did not answer within %d s", ANSWER_MS / 1000);
	if (ready <= 0)
		return 0;
	room = buf_reserve(&m->in, 4096);
	if (!room)
		return err_set(e, ERR_LIMIT, "the emulator says too much");
	n = read(m->fd, room, 4096);
	if (n <= 0)
		return n < 0 && errno == EINTR ? 0 : err_set(e, ERR_IO, "the emulator ended");
	buf_commit(&m->in, (size_t)n);
	return 0;
}

/* One line as JSON, or NULL when none is whole. */
static struct json *take_line(struct monitor *m, struct err *e)
{
	uint8_t *end = m->in.len > 0 ? memchr(m->in.data, '\n', m->in.len) : NULL;
	struct json *v = NULL;
	size_t n;

	if (!end)
		return NULL;
	n = (size_t)(end - m->in.data);
	if (json_parse((const char *)m->in.data, n > 0 && end[-1] == '\r' ? n - 1 : n, &v, e))
		v = NULL;
	buf_consume(&m->in, n + 1);
	return v;
}

static bool take_event(struct monitor *m, const struct json *v)
{
	const char *name = json_get_text(v, "event");

	if (name)
		m->on_event(m->arg, name, json_get(v, "data"));
	return name != NULL;
}

static int read_events(struct monitor *m, int64_t deadline, struct err *e)
{
	struct json *v;
	int rc = take_bytes(m, deadline, e);

	while ((v = take_line(m, &(struct err){ 0 }))) {
		take_event(m, v);
		json_free(v);
	}
	return rc;
}

int monitor_read(struct monitor *m, struct err *e)
{
	return read_events(m, 0, e);
}

int monitor_wait(struct monitor *m, struct err *e)
{
	return read_events(m, clock_boot_ms() + ANSWER_MS, e);
}

/* The next message that is no event. */
static int next(struct monitor *m, struct json **out, struct err *e)
{
	int64_t deadline = clock_boot_ms() + ANSWER_MS;

	for (;;) {
		*out = take_line(m, e);
		if (*out && !take_event(m, *out))
			return 0;
		if (*out)
			json_free(*out);
		else if (take_bytes(m, deadline, e))
			return -1;
	}
}

static int send_line(struct monitor *m, const struct buf *line, int fd, struct err *e)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec bytes = { .iov_base = line->data, .iov_len = line->len };
	struct msghdr msg = { .msg_iov = &bytes, .msg_iovlen = 1 };

	if (fd >= 0) {
		msg.msg_control = control.room;
		msg.msg_controllen = sizeof(control.room);
		control.head = (struct cmsghdr){
			.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS
		};
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	}
	if (sendmsg(m->fd, &msg, MSG_NOSIGNAL) != (ssize_t)line->len)
		return err_set_errno(e, "the emulator's monitor");
	return 0;
}

static int call(struct monitor *m, const char *command, const char *arguments, int fd, struct json **answer, struct err *e)
{
	struct buf line = BUF_INIT(16384);
	const char *desc;
	struct json *v;
	int rc;

	if (answer)
		*answer = NULL;
	buf_printf(&line, "{\"execute\":\"%s\"", command);
	if (arguments)
		buf_printf(&line, ",\"arguments\":%s", arguments);
	buf_add_str(&line, "}\n");
	rc = line.failed ? err_set(e, ERR_LIMIT, "%s is too long", command) : send_line(m, &line, fd, e);
	buf_free(&line);
	if (rc || next(m, &v, e))
		return -1;
	desc = json_get_text(json_get(v, "error"), "desc");
	if (desc || !json_get(v, "return"))
		rc = err_set(e, ERR_INTERNAL, "%s: %s", command, desc ? desc : "no answer");
	if (rc == 0 && answer)
		*answer = v;
	else
		json_free(v);
	return rc;
}

int monitor_call(struct monitor *m, const char *command, const char *arguments, struct json **answer, struct err *e)
{
	return call(m, command, arguments, -1, answer, e);
}

int monitor_give(struct monitor *m, const char *name, int fd, struct err *e)
{
	char arguments[128];

	if (!text_fmt(arguments, sizeof(arguments), "{\"fdname\":\"%s\"}", name))
		return err_set(e, ERR_INTERNAL, "name too long");
	return call(m, "getfd", arguments, fd, NULL, e);
}

int monitor_open(struct monitor *m, int fd, struct err *e)
{
	struct json *greeting;
	bool ok;

	m->fd = fd;
	buf_init(&m->in, LINE_MAX_BYTES);
	if (next(m, &greeting, e))
		return -1;
	ok = json_get(greeting, "QMP") != NULL;
	json_free(greeting);
	if (!ok)
		return err_set(e, ERR_PROTOCOL, "the emulator does not greet");
	return monitor_call(m, "qmp_capabilities", NULL, NULL, e);
}

void monitor_close(struct monitor *m)
{
	if (m->fd >= 0)
		close(m->fd);
	m->fd = -1;
	buf_free(&m->in);
}
