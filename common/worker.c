/*
 * The thread of worker.h. Owns it, the list of what waits and an inbox for the way back. Everything but `thread_main` runs on the
 * loop's thread; the lock is held for a few instructions.
 */
#include "worker.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct worker {
	pthread_mutex_t lock; /* guards head, tail and ending */
	pthread_cond_t more;
	struct worker_item *head, **tail;
	bool ending;
	pthread_t thread;
	struct inbox *back;
	size_t weight, max_weight; /* the loop's thread only */
};

static struct worker_item *take(struct worker *w)
{
	struct worker_item *it;

	pthread_mutex_lock(&w->lock);
	while (!w->head && !w->ending)
		pthread_cond_wait(&w->more, &w->lock);
	it = w->ending ? NULL : w->head;
	if (it) {
		w->head = it->next;
		if (!w->head)
			w->tail = &w->head;
	}
	pthread_mutex_unlock(&w->lock);
	return it;
}

static void *thread_main(void *arg)
{
	struct worker *w = arg;
	struct worker_item *it;

	while ((it = take(w)) != NULL) {
		it->run(it);
		inbox_post(w->back, &it->item);
	}
	return NULL;
}

static void give_back(struct worker *w, struct worker_item *it, bool ran)
{
	w->weight -= it->weight;
	it->done(it, ran);
}

/* `item` stands first in struct worker_item. */
static void on_back(void *arg, struct inbox_item *item)
{
	give_back(arg, (struct worker_item *)(void *)item, true);
}

/* No signal of the program's ends up on this thread. */
static int start(struct worker *w)
{
	sigset_t all, before;
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = pthread_create(&w->thread, NULL, thread_main, w);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return rc;
}

int worker_new(struct event_base *base, size_t max_weight, struct worker **out, struct err *e)
{
	struct worker *w = calloc(1, sizeof(*w));
	int rc;

	*out = NULL;
	if (!w)
		return err_set(e, ERR_NOMEM, "worker: no memory");
	w->tail = &w->head;
	w->max_weight = max_weight;
	if (inbox_new(base, on_back, w, &w->back, e) != 0) {
		free(w);
		return -1;
	}
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->more, NULL);
	rc = start(w);
	if (rc != 0) {
		err_set(e, ERR_UNAVAILABLE, "worker: no thread: %s", strerror(rc));
		inbox_free(w->back);
		pthread_cond_destroy(&w->more);
		pthread_mutex_destroy(&w->lock);
		free(w);
		return -1;
	}
	*out = w;
	return 0;
}

bool worker_post(struct worker *w, struct worker_item *it)
{
	if (it->weight > w->max_weight - w->weight)
		return false;
	w->weight += it->weight;
	it->next = NULL;
	pthread_mutex_lock(&w->lock);
	*w->tail = it;
	w->tail = &it->next;
	pthread_cond_signal(&w->more);
	pthread_mutex_unlock(&w->lock);
	return true;
}

void worker_free(struct worker *w)
{
	struct worker_item *it;

	if (!w)
		return;
	pthread_mutex_lock(&w->lock);
	w->ending = true;
	pthread_cond_signal(&w->more);
	pthread_mutex_unlock(&w->lock);
	pthread_join(w->thread, NULL);
	inbox_free(w->back); /* hands back what was done */
	while ((it = w->head) != NULL) {
		w->head = it->next;
		give_back(w, it, false);
	}
	pthread_cond_destroy(&w->more);
	pthread_mutex_destroy(&w->lock);
	free(w);
}
