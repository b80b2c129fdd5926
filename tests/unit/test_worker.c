/* link: ephloop_event EPH::event */
/* The thread beside a loop: items are run there and come back in order; the queue is bounded by weight; the end waits for what is
 * worked on. */
#include "unit.h"

#include "loop.h"
#include "worker.h"

#include <pthread.h>
#include <stdatomic.h>

struct job {
	struct worker_item item;
	pthread_t thread;
	bool done, ran;
	int order;
};

static struct event_base *base;
static struct worker *worker;
static int done_count;
static atomic_bool hold, holding;

static void run(struct worker_item *it)
{
	((struct job *)(void *)it)->thread = pthread_self();
	atomic_store(&holding, true);
	while (atomic_load(&hold))
		sched_yield();
}

static void done(struct worker_item *it, bool ran)
{
	struct job *j = (struct job *)(void *)it;

	j->done = true;
	j->ran = ran;
	j->order = ++done_count;
}

static struct job job(size_t weight)
{
	return (struct job){ .item = { .weight = weight, .run = run, .done = done } };
}

static int set_up(void **state)
{
	struct err e;

	(void)state;
	base = event_base_new();
	done_count = 0;
	atomic_store(&hold, false);
	atomic_store(&holding, false);
	return worker_new(base, 100, &worker, &e);
}

static int tear_down(void **state)
{
	(void)state;
	atomic_store(&hold, false);
	worker_free(worker);
	event_base_free(base);
	return 0;
}

static bool all_done(void *arg)
{
	return done_count == *(int *)arg;
}

static bool is_holding(void *arg)
{
	(void)arg;
	return atomic_load(&holding);
}

static void test_in_order_elsewhere(void **state)
{
	struct job jobs[20];
	int want = 20;

	(void)state;
	for (int i = 0; i < want; i++) {
		jobs[i] = job(5);
		assert_true(worker_post(worker, &jobs[i].item));
	}
	assert_true(loop_until(base, all_done, &want, 10000));
	for (int i = 0; i < want; i++) {
		assert_int_equal(jobs[i].order, i + 1);
		assert_true(jobs[i].ran);
		assert_false(pthread_equal(jobs[i].thread, pthread_self()));
	}
}

static void test_full(void **state)
{
	struct job a = job(60), b = job(40), c = job(1), huge = job(SIZE_MAX);
	int two = 2, three = 3;

	(void)state;
	assert_false(worker_post(worker, &huge.item));
	atomic_store(&hold, true);
	assert_true(worker_post(worker, &a.item));
	assert_true(loop_until(base, is_holding, NULL, 10000));
	assert_true(worker_post(worker, &b.item));
	assert_false(worker_post(worker, &c.item)); /* the one that is worked on counts as well */
	atomic_store(&hold, false);
	assert_true(loop_until(base, all_done, &two, 10000));
	assert_true(worker_post(worker, &c.item));
	assert_true(loop_until(base, all_done, &three, 10000));
	assert_true(c.ran);
}

static void *let_go(void *arg)
{
	(void)arg;
	atomic_store(&hold, false);
	return NULL;
}

/* The end in the middle of work: what is worked on ends, what waits is handed back unrun, none is lost. */
static void test_end(void **state)
{
	struct job a = job(1), b = job(1), c = job(1);
	pthread_t other;

	(void)state;
	atomic_store(&hold, true);
	assert_true(worker_post(worker, &a.item));
	assert_true(loop_until(base, is_holding, NULL, 10000));
	assert_true(worker_post(worker, &b.item));
	assert_true(worker_post(worker, &c.item));
	assert_int_equal(pthread_create(&other, NULL, let_go, NULL), 0);
	worker_free(worker);
	worker = NULL;
	pthread_join(other, NULL);
	assert_true(a.done && a.ran);
	assert_true(b.done && c.done);
	assert_int_equal(done_count, 3);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_in_order_elsewhere, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_full, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_end, set_up, tear_down),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
