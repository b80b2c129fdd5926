/*
 * channel's side towards the VMM: what its control (control.h) wants done, its events, the one connection of a guest that comes by
 * a vsock, descriptors of a snapshot. Part of the channel role's loop; nothing blocks.
 */
#include "channel/channel_internal.h"
#include "roles.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/role.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/event.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define QUIT_WAIT_MS 3000 /* nobody is left who waits for us */

/* It cannot be controlled any more, which ends the VM: the broker says so to keeper. */
void vmm_side_broke(struct channel *c, const char *why)
{
	char text[ERR_TEXT_MAX + 8];

	if (c->control_over)
		return;
	c->control_over = true;
	event_del(c->answer);
	bufferevent_disable(c->control_stream, EV_READ);
	log_warn("control of the VMM is over how=%s what=\"%s\"", control_name(c->control), why);
	console_send(c->console);
	if (text_fmt(text, sizeof(text), "%s: %s", control_name(c->control), why))
		channel_to_broker_text(c, RF_CB_VMM_EVENT, text);
}

static void control_send(void *arg, const void *bytes, size_t n)
{
	struct channel *c = arg;

	if (bufferevent_write(c->control_stream, bytes, n) != 0)
		channel_stop(c, 1);
}

/* Past the buffer: a descriptor goes with the very write that it belongs to. */
static int control_send_fd(void *arg, const void *bytes, size_t n, int fd, struct err *e)
{
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { .space = { 0 } };
	struct channel *c = arg;
	struct iovec part = { .iov_base = (void *)bytes, .iov_len = n };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&m);

	if (evbuffer_get_length(bufferevent_get_output(c->control_stream)) > 0)
		return err_set(e, ERR_UNAVAILABLE, "the VMM does not read");
	*head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(head), &fd, sizeof(fd));
	if (sendmsg(CHANNEL_FD_CONTROL, &m, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)n)
		return err_set_errno(e, "send a descriptor to the VMM");
	return 0;
}

static void guest_open(struct channel *c)
{
	channel_to_broker(c, RF_CB_GUEST_OPEN, NULL, 0);
}

void vmm_side_close_listener(struct channel *c)
{
	if (!c->guest_listener)
		return;
	event_free(c->guest_listener);
	c->guest_listener = NULL;
	close(CHANNEL_FD_GUEST);
}

/* One connection, which is the agent's: it opens it before anything else runs in the guest. Whoever comes later is refused. */
void vmm_side_on_connect(evutil_socket_t fd, short what, void *arg)
{
	struct channel *c = arg;
	int guest = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	(void)what;
	if (guest < 0)
		return;
	vmm_side_close_listener(c);
	c->guest_stream = channel_stream(c, guest, channel_on_guest_read, GUEST_READ_MAX);
	if (!c->guest_stream || bufferevent_write_buffer(c->guest_stream, c->early) != 0) {
		channel_stop(c, 1);
		return;
	}
	guest_open(c);
}

/* The VMM answered, so the jail's stage is over, which made our socket one that listens. */
static void control_known(void *arg)
{
	struct channel *c = arg;

	if (c->guest_listener && event_add(c->guest_listener, NULL) != 0)
		channel_stop(c, 1);
}

static void control_up(void *arg)
{
	channel_to_broker(arg, RF_CB_VMM_UP, NULL, 0);
}

static void control_event(void *arg, const char *name)
{
	struct channel *c = arg;

	console_send(c->console);
	channel_to_broker_text(c, RF_CB_VMM_EVENT, name);
}

static void control_guest_open(void *arg)
{
	guest_open(arg);
}

static void on_events(evutil_socket_t fd, short what, void *arg)
{
	struct channel *c = arg;
	char bytes[4096];
	ssize_t n = read(fd, bytes, sizeof(bytes));

	(void)what;
	if (n > 0)
		control_events(c->control, bytes, (size_t)n);
	else if (n == 0 || (errno != EAGAIN && errno != EINTR))
		event_del(c->events);
}

void vmm_side_close_fds(struct channel *c)
{
	for (size_t i = 0; i < c->snapshot_fd_count; i++)
		close(c->snapshot_fds[i]);
	c->snapshot_fd_count = 0;
}

static void control_snapshot_over(void *arg, const char *why)
{
	struct buf b = BUF_INIT(ERR_TEXT_MAX + 64);
	struct channel *c = arg;

	wire_put_bool(&b, why == NULL);
	wire_put_str(&b, why);
	channel_to_broker(c, RF_CB_SNAPSHOT, b.data, b.len);
	buf_free(&b);
	vmm_side_close_fds(c);
}

static void control_wait(void *arg, const char *what)
{
	struct channel *c = arg;
	struct timeval tv = { .tv_sec = c->plan.answer_ms / 1000, .tv_usec = c->plan.answer_ms % 1000 * 1000 };

	c->asked = what;
	if (!what)
		event_del(c->answer);
	else if (c->plan.answer_ms > 0 && event_add(c->answer, &tv) != 0)
		channel_stop(c, 1);
}

static void on_answer_late(evutil_socket_t fd, short what, void *arg)
{
	struct channel *c = arg;
	char text[128];

	(void)fd;
	(void)what;
	if (text_fmt(text, sizeof(text), "no answer to %s within %u ms", c->asked, c->plan.answer_ms))
		vmm_side_broke(c, text);
}

static void on_control_read(struct bufferevent *bev, void *arg)
{
	struct channel *c = arg;
	struct evbuffer *in = bufferevent_get_input(bev);
	char bytes[4096];
	struct err e;
	int n;

	while (!c->control_over && (n = evbuffer_remove(in, bytes, sizeof(bytes))) > 0)
		if (control_feed(c->control, bytes, (size_t)n, &e))
			vmm_side_broke(c, e.text);
}

/* Waits until the VMM has heard it: one whose peer closes the connection drops what it has not carried out. */
void vmm_side_quit(struct channel *c)
{
	const char *text = control_quit(c->control);
	struct pollfd p = { .fd = CHANNEL_FD_CONTROL, .events = POLLIN };
	const int64_t until = clock_mono_ns() / 1000000 + QUIT_WAIT_MS;
	int64_t left = QUIT_WAIT_MS;
	char bytes[4096];

	if (send(CHANNEL_FD_CONTROL, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
		return;
	while (left > 0 && poll(&p, 1, (int)left) > 0 && recv(CHANNEL_FD_CONTROL, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
		left = until - clock_mono_ns() / 1000000;
}

int vmm_side_snapshot(struct channel *c, const int *fds, size_t fd_count, struct err *e)
{
	if (c->plan.start != VMM_GOLDEN || c->snapshot_fd_count > 0 || fd_count > SNAPSHOT_FDS_MAX)
		return err_set(e, ERR_PROTOCOL, "snapshot of a VM that none is made of");
	for (size_t i = 0; i < fd_count; i++) {
		c->snapshot_fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
		if (c->snapshot_fds[i] < 0)
			return err_set_errno(e, "descriptors of a snapshot");
		c->snapshot_fd_count++;
	}
	/* No connection is part of a snapshot: each clone's agent makes its own, as this one does until it is spoken to. */
	if (c->plan.kind == VMM_CLOUD_HYPERVISOR) {
		vmm_side_close_listener(c);
		if (c->guest_stream)
			bufferevent_free(c->guest_stream);
		c->guest_stream = NULL;
	}
	if (c->control_over)
		control_snapshot_over(c, "control of the VMM is over");
	else
		control_snapshot(c->control, c->snapshot_fds, c->snapshot_fd_count);
	return 0;
}

int vmm_side_open_control(struct channel *c, struct err *e)
{
	struct control_ops ops = {
		.send = control_send,
		.send_fd = control_send_fd,
		.on_known = control_known,
		.on_up = control_up,
		.on_event = control_event,
		.on_guest_open = control_guest_open,
		.on_snapshot = control_snapshot_over,
		.on_wait = control_wait,
		.arg = c,
	};

	c->answer = event_new(c->base, -1, 0, on_answer_late, c);
	c->control = control_new(&c->plan, &ops);
	if (!c->answer || !c->control)
		return err_set(e, ERR_NOMEM, "no memory");
	c->control_stream = channel_stream(c, CHANNEL_FD_CONTROL, on_control_read, 65536);
	if (!c->control_stream)
		return err_set(e, ERR_IO, "descriptor %d (this role is started by noded itself)", CHANNEL_FD_CONTROL);
	return 0;
}

int vmm_side_open_events(struct channel *c, struct err *e)
{
	if (c->plan.kind != VMM_CLOUD_HYPERVISOR)
		return 0;
	if (evutil_make_socket_nonblocking(CHANNEL_FD_EVENTS) != 0)
		return err_set(e, ERR_IO, "descriptor %d (this role is started by noded itself)", CHANNEL_FD_EVENTS);
	c->events = event_new(c->base, CHANNEL_FD_EVENTS, EV_READ | EV_PERSIST, on_events, c);
	return c->events && event_add(c->events, NULL) == 0 ? 0 : err_set(e, ERR_NOMEM, "no memory");
}
