/* The long poll of a node over real nng and TLS: parked, woken, replaced, shed when contexts run out. */
/* link: controld_dispatch controld_base ephproto_link ephproto ephloop_event EPH::nng EPH::sodium EPH::crypto */
/* sources: tests/unit/dispatch_rig.c tests/unit/dispatch_store.c */
#include "dispatch_rig.h"

static void test_poll_parks_and_wakes(void **state)
{
	struct node n;
	struct call c;

	(void)state;
	node_ready(&n);
	begin_next(&n, &c, 10000);
	wait_parked(&c, 1);
	rig.waiting_assigns = 2;
	dispatch_wake_queued(rig.d, 4096, 1, true, 1); /* does not fit */
	dispatch_wake_queued(rig.d, 512, 1, false, 1); /* not for an emulated node */
	assert_false(loop_until(rig.base, call_over, &c, 50));
	dispatch_wake_queued(rig.d, 512, 1, true, 1);
	wait_next(&c, 2);
	begin_next(&n, &c, 100); /* nothing comes: answered by itself */
	wait_next(&c, 0);
	rig.waiting_assigns = 1; /* there is work already: at once */
	begin_next(&n, &c, 10000);
	wait_next(&c, 1);
	start_ok(&n); /* other requests pass while a poll is parked */
	begin_next(&n, &c, 10000);
	wait_parked(&c, rig.next_calls + 1);
	start_ok(&n);
	dispatch_wake_node(rig.d, NODE);
	call_over(&c);
	dispatch_drain(rig.d);
	wait_next(&c, 0);
	node_close(&n);
}

/* The provider's key is sealed for another keyring: the node is not answered again and again for a run that it cannot get. */
static void test_what_cannot_be_made_is_not_asked_for_at_once(void **state)
{
	struct node n;
	struct call c;

	(void)state;
	node_ready(&n);
	rig.sealed_key[rig.sealed_len - 1] ^= 1;
	rig.waiting_assigns = 1;
	begin_next(&n, &c, 10000);
	wait_parked(&c, 1);
	rig.sealed_key[rig.sealed_len - 1] ^= 1;
	rig.waiting_assigns = 1;
	dispatch_wake_queued(rig.d, 512, 1, true, 1);
	wait_next(&c, 1);
	node_close(&n);
}

/* A wake while the store is being asked must not be lost. */
static void test_wake_is_not_lost(void **state)
{
	struct node n;
	struct call c;
	int once = 1;

	(void)state;
	node_ready(&n);
	rig.hold_next = true;
	begin_next(&n, &c, 10000);
	while (c.sending)
		loop_until(rig.base, call_over, &c, 5);
	assert_true(loop_until(rig.base, next_called, &once, WAIT_MS));
	dispatch_wake_queued(rig.d, 512, 1, true, 1);
	rig.hold_next = false;
	answer_next(rig.held_cb, rig.held_arg); /* saw nothing */
	rig.waiting_assigns = 1;
	wait_next(&c, 1);
	assert_int_equal(rig.next_calls, 2);
	node_close(&n);
}

static void test_second_poll_replaces_the_first(void **state)
{
	struct node n;
	struct call first, second;

	(void)state;
	node_ready(&n);
	begin_next(&n, &first, 10000);
	wait_parked(&first, 1);
	begin_next(&n, &second, 10000);
	wait_next(&first, 0);
	wait_parked(&second, 2);
	rig.waiting_assigns = 1;
	dispatch_wake_queued(rig.d, 1, 1, true, 1);
	wait_next(&second, 1);
	node_close(&n);
}

static bool all_over(void *arg)
{
	struct call *c = arg;
	bool over = true;

	for (size_t i = 0; i < 3 * CONTEXTS; i++)
		over = call_over(&c[i]) && over;
	return over;
}

/* More requests than contexts: parked polls make room. Then all connections go at once, and the contexts come back. */
static void test_contexts_run_out(void **state)
{
	struct node n[CONTEXTS * 2], last;
	struct call c[CONTEXTS * 2], many[3 * CONTEXTS];
	struct buf b = BUF_INIT(1024);

	(void)state;
	for (size_t i = 0; i < COUNT(n); i++) {
		node_ready(&n[i]);
		begin_next(&n[i], &c[i], 10000);
		while (c[i].sending)
			loop_until(rig.base, call_over, &c[i], 5);
	}
	start_ok(&n[0]);
	for (size_t i = 0; i < COUNT(n); i++) {
		call_over(&c[i]);
		call_free(&c[i]);
		node_close(&n[i]);
	}
	node_ready(&last);
	put_start(&b);
	for (size_t i = 0; i < COUNT(many); i++)
		begin(&last, &many[i], LINK_START, &b, true);
	assert_true(loop_until(rig.base, all_over, many, WAIT_MS));
	for (size_t i = 0; i < COUNT(many); i++) {
		assert_int_equal(many[i].rv, 0);
		call_free(&many[i]);
	}
	buf_free(&b);
	node_close(&last);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_poll_parks_and_wakes, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_what_cannot_be_made_is_not_asked_for_at_once, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_wake_is_not_lost, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_second_poll_replaces_the_first, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_contexts_run_out, set_up, tear_down),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
