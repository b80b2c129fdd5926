/*
 * The timers of controld. Owns one timer a sweep and nothing else; a sweep is never under way twice here, and comes again at once
 * when it says that there was more than it took. On the loop's thread; never blocks.
 */
#include "jobs/jobs.h"

#include "common/log.h"
#include "common/text.h"
#include "store/store.h"

#include <event2/event.h>

#define FULL 500 /* rows of a sweep that took all it may */

struct job {
	struct jobs *jobs;
	enum store_sweep sweep;
	struct event *timer;
	int period_ms;
	bool under_way;
};

struct jobs {
	struct store *store;
	struct job job[STORE_SWEEP_COUNT];
	int under_way; /* answers that will still come; freed with the last of them */
	bool freed;
};

static const struct {
	enum store_sweep sweep;
	int period_ms;
} table[] = {
	{ STORE_SWEEP_CLOCK, 1000 },
	{ STORE_SWEEP_QUEUE, 1000 },
	{ STORE_SWEEP_CLAIMED, 1000 },
	{ STORE_SWEEP_LOST, 1000 },
	{ STORE_SWEEP_ENDING, 2000 },
	{ STORE_SWEEP_SETTLE, 1000 },
	{ STORE_SWEEP_PARTITIONS, 600000 },
	{ STORE_SWEEP_EXPIRE, 60000 },
};
_Static_assert(sizeof(table) / sizeof(table[0]) == STORE_SWEEP_COUNT, "every sweep has a period");

/* A tenth more or less, so that controlds that started together do not sweep together. */
static void again_in(struct job *j, int ms)
{
	uint16_t random;
	struct timeval tv;

	random_bytes(&random, sizeof(random));
	ms += (int)(random % 201) * ms / 1000 - ms / 10;
	tv.tv_sec = ms / 1000;
	tv.tv_usec = (ms % 1000) * 1000;
	event_add(j->timer, &tv);
}

static void on_swept(void *arg, const struct store_swept *r, const struct err *e)
{
	struct job *j = arg;
	struct jobs *jobs = j->jobs;

	j->under_way = false;
	jobs->under_way--;
	if (jobs->freed) {
		if (jobs->under_way == 0)
			free(jobs);
		return;
	}
	/* Partitions go one at a time: the next as soon as the last is gone. */
	if (!e && (r->changed >= FULL || (j->sweep == STORE_SWEEP_PARTITIONS && r->changed > 0)))
		again_in(j, 0);
	else
		again_in(j, e && j->period_ms > 5000 ? 5000 : j->period_ms);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct job *j = arg;
	struct err e;

	(void)fd;
	(void)what;
	if (store_sweep(j->jobs->store, j->sweep, on_swept, j, &e) == 0) {
		j->under_way = true;
		j->jobs->under_way++;
		return;
	}
	log_warn("sweep: %s", e.text);
	again_in(j, 1000);
}

int jobs_new(struct event_base *base, struct store *store, struct jobs **out, struct err *e)
{
	struct jobs *jobs = calloc(1, sizeof(*jobs));

	if (!jobs)
		return err_set(e, ERR_NOMEM, "no memory for jobs");
	jobs->store = store;
	for (size_t i = 0; i < STORE_SWEEP_COUNT; i++) {
		struct job *j = &jobs->job[i];

		j->jobs = jobs;
		j->sweep = table[i].sweep;
		j->period_ms = table[i].period_ms;
		j->timer = evtimer_new(base, on_timer, j);
		if (!j->timer) {
			jobs_free(jobs);
			return err_set(e, ERR_NOMEM, "no memory for jobs");
		}
		again_in(j, i == 0 ? 0 : 100); /* the clock first: without it nothing counts as run out */
	}
	*out = jobs;
	return 0;
}

void jobs_free(struct jobs *jobs)
{
	if (!jobs)
		return;
	for (size_t i = 0; i < STORE_SWEEP_COUNT; i++) {
		if (jobs->job[i].timer)
			event_free(jobs->job[i].timer);
		jobs->job[i].timer = NULL;
	}
	jobs->freed = true;
	if (jobs->under_way == 0)
		free(jobs);
}
