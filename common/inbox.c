/*
 * From foreign threads into the loop. Owns an eventfd, its event and the list of posted items. inbox_post takes a lock for a few
 * instructions and may be called from any thread (nng's callbacks); everything else runs on the loop's thread. Never blocks.
 */
#include "inbox.h"

#include "log.h"

#include <errno.h>
#include <event2/event.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct inbox {
	pthread_mutex_t lock; /* guards head and tail */
	struct inbox_item *head, **tail;
	int fd;
	struct event *wake;
	void (*handle)(void *arg, struct inbox_item *item);
	void *arg;
	bool running; /* in a handler: inbox_free waits for its end */
	bool freed;
};

/* Takes what is there once; what is posted meanwhile wakes the loop again, so that nobody keeps it here. */
static void drain(struct inbox *in)
{
	struct inbox_item *item, *next;

	pthread_mutex_lock(&in->lock);
	item = in->head;
	in->head = NULL;
	in->tail = &in->head;
	pthread_mutex_unlock(&in->lock);
	for (; item; item = next) {
		next = item->next;
		in->handle(in->arg, item);
	}
}

static void destroy(struct inbox *in)
{
	drain(in); /* items belong to the handler: none is lost */
	event_free(in->wake);
	close(in->fd);
	pthread_mutex_destroy(&in->lock);
	free(in);
}

static void on_wake(evutil_socket_t fd, short what, void *arg)
{
	struct inbox *in = arg;
	uint64_t count;

	(void)what;
	while (read(fd, &count, sizeof(count)) < 0 && errno == EINTR)
		;
	in->running = true;
	drain(in);
	in->running = false;
	if (in->freed)
		destroy(in);
}

int inbox_new(struct event_base *base, void (*handle)(void *arg, struct inbox_item *item), void *arg, struct inbox **out,
		struct err *e)
{
	struct inbox *in = calloc(1, sizeof(*in));

	*out = NULL;
	if (!in)
		return err_set(e, ERR_NOMEM, "inbox: no memory");
	pthread_mutex_init(&in->lock, NULL);
	in->tail = &in->head;
	in->handle = handle;
	in->arg = arg;
	in->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (in->fd < 0) {
		err_set_errno(e, "inbox: eventfd");
		goto fail;
	}
	in->wake = event_new(base, in->fd, EV_READ | EV_PERSIST, on_wake, in);
	if (!in->wake || event_add(in->wake, NULL) != 0) {
		err_set(e, ERR_NOMEM, "inbox: no memory for its event");
		goto fail;
	}
	*out = in;
	return 0;
fail:
	if (in->wake)
		event_free(in->wake);
	if (in->fd >= 0)
		close(in->fd);
	pthread_mutex_destroy(&in->lock);
	free(in);
	return -1;
}

void inbox_post(struct inbox *in, struct inbox_item *item)
{
	uint64_t one = 1;
	bool was_empty;

	item->next = NULL;
	pthread_mutex_lock(&in->lock);
	was_empty = in->head == NULL;
	*in->tail = item;
	in->tail = &item->next;
	/* Under the lock, so that inbox_free after the last post never meets a write to a closed descriptor. */
	if (was_empty) {
		while (write(in->fd, &one, sizeof(one)) < 0 && errno == EINTR)
			;
	}
	pthread_mutex_unlock(&in->lock);
}

void inbox_free(struct inbox *in)
{
	if (!in)
		return;
	if (in->running)
		in->freed = true;
	else
		destroy(in);
}
