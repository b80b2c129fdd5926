/* A ring of what the console said last, fed by the pipe (console.h). Owns its events. */
#include "channel/console.h"

#include "common/buf.h"
#include "common/log.h"
#include "common/text.h"

#include <errno.h>
#include <event2/event.h>
#include <stdlib.h>
#include <unistd.h>

#define KEEP (16 * 1024)
#define SEND 2048
#define LOG 512
#define BOOT_MS 1000 /* while booting the console goes to the broker this often, if it said something */

struct console {
	struct console_ops ops;
	int fd;
	struct event *readable, *timer;
	char ring[KEEP];
	size_t len, next;
	bool fresh; /* bytes came since it was last sent */
};

static void add(struct console *c, const char *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		c->ring[c->next] = bytes[i];
		c->next = (c->next + 1) % KEEP;
	}
	c->len = c->len + n < KEEP ? c->len + n : KEEP;
	c->fresh = c->fresh || n > 0;
}

/* The last bytes of it, `size` at most. */
static size_t tail(const struct console *c, char *out, size_t size)
{
	size_t n = c->len < size ? c->len : size;

	for (size_t i = 0; i < n; i++)
		out[i] = c->ring[(c->next + KEEP - n + i) % KEEP];
	return n;
}

void console_send(struct console *c)
{
	char bytes[SEND];
	size_t n;

	if (!c->fresh)
		return;
	c->fresh = false;
	n = tail(c, bytes, sizeof(bytes));
	c->ops.send(c->ops.arg, bytes, n);
}

/* For the operator: what the VMM or a dying kernel said last. Hostile text, so escaped. */
static void log_tail(const struct console *c)
{
	struct buf safe = BUF_INIT(8 * SEND);
	char bytes[LOG];
	size_t n = tail(c, bytes, sizeof(bytes));

	if (n > 0 && text_safe(&safe, bytes, n, false) && buf_cstr(&safe))
		log_info("the VM is gone console=\"%s\"", buf_cstr(&safe));
	buf_free(&safe);
}

static void on_readable(evutil_socket_t fd, short what, void *arg)
{
	struct console *c = arg;
	char bytes[4096];
	ssize_t n = read(fd, bytes, sizeof(bytes));

	(void)what;
	if (n > 0) {
		add(c, bytes, (size_t)n);
		return;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	/* The VMM is gone; keeper says how. What it said last goes first. */
	event_del(c->readable);
	log_tail(c);
	console_send(c);
}

/* As much as a pipe holds. */
void console_drain(struct console *c)
{
	for (int i = 0; i < 32 && event_pending(c->readable, EV_READ, NULL); i++)
		on_readable(c->fd, EV_READ, c);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct console *c = arg;

	(void)fd;
	(void)what;
	if (c->ops.booting(c->ops.arg))
		console_send(c);
	else
		event_del(c->timer);
}

int console_new(struct event_base *base, int fd, const struct console_ops *ops, struct console **out, struct err *e)
{
	const struct timeval boot = { .tv_sec = BOOT_MS / 1000, .tv_usec = BOOT_MS % 1000 * 1000 };
	struct console *c;

	*out = NULL;
	if (evutil_make_socket_nonblocking(fd) != 0)
		return err_set(e, ERR_IO, "descriptor %d is no console", fd);
	c = calloc(1, sizeof(*c));
	if (!c)
		return err_set(e, ERR_NOMEM, "no memory");
	c->ops = *ops;
	c->fd = fd;
	c->readable = event_new(base, fd, EV_READ | EV_PERSIST, on_readable, c);
	c->timer = event_new(base, -1, EV_PERSIST, on_timer, c);
	if (!c->readable || !c->timer || event_add(c->readable, NULL) != 0 || event_add(c->timer, &boot) != 0) {
		console_free(c);
		return err_set(e, ERR_NOMEM, "no memory");
	}
	*out = c;
	return 0;
}

void console_free(struct console *c)
{
	if (!c)
		return;
	if (c->readable)
		event_free(c->readable);
	if (c->timer)
		event_free(c->timer);
	free(c);
}
