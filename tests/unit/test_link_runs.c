/* link: ephproto ephproto_link EPH::sodium */
/* sources: noded/link/runs.c */
/* What link asks for a run, in which order, and what each answer changes: by table, then by random play against a true controld. */
#include "noded/link/runs.h"

#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static const uint8_t token[TOKEN_LEN] = { 1, 2, 3 };

static void init(struct link_run *r)
{
	link_run_init(r, "run_0123456789abcdef0123456789abcdef", token);
	r->has_spool = true;
	r->first_seq = r->next_send = 3;
	r->last_seq = 2;
}

static enum link_type ask(struct link_run *r, int64_t now)
{
	enum link_type type = link_run_want(r, now);

	r->under_way = (uint8_t)type;
	return type;
}

static void test_order(void **state)
{
	struct link_effect f;
	struct link_run r;

	(void)state;
	init(&r);
	assert_int_equal(ask(&r, 0), 0);
	r.last_seq = 5;
	assert_int_equal(ask(&r, 0), 0); /* no events before START is granted */
	r.grant = GRANT_WANTED;
	r.finish_due = true;
	r.finish_seq = 5;
	assert_int_equal(ask(&r, 0), LINK_START);
	assert_int_equal(link_run_want(&r, 0), 0); /* one at a time */
	link_run_answered(&r, FENCE_DUPLICATE, 0, 0, &f);
	assert_true(f.started);
	assert_int_equal(ask(&r, 0), LINK_EVENTS);
	r.blob_due = true;
	link_run_answered(&r, FENCE_APPLIED, 5, 0, &f);
	assert_int_equal(f.acked, 4);
	assert_int_equal(ask(&r, 0), LINK_BLOB);
	link_run_blob_answered(&r);
	assert_int_equal(ask(&r, 0), LINK_EVENTS);
	link_run_answered(&r, FENCE_APPLIED, 6, 0, &f);
	assert_int_equal(ask(&r, 0), LINK_FINISH);
	link_run_answered(&r, FENCE_APPLIED, 0, 0, &f);
	assert_true(f.finished && f.done && !f.kill);
	assert_int_equal(ask(&r, 0), 0);
	link_run_free(&r);
}

static void test_fences(void **state)
{
	static const struct {
		uint8_t type, fence;
		bool started, finished, kill, done;
	} rows[] = {
		{ LINK_START, FENCE_APPLIED, true, false, false, false },
		{ LINK_START, FENCE_STALE, true, false, true, true },
		{ LINK_START, FENCE_UNKNOWN, true, false, true, true },
		{ LINK_START, FENCE_GAP, true, false, true, true },
		{ LINK_EVENTS, FENCE_STALE, false, false, true, true },
		{ LINK_EVENTS, FENCE_UNKNOWN, false, false, true, true },
		{ LINK_EVENTS, 0, false, false, true, true },
		{ LINK_EVENTS, 99, false, false, true, true },
		{ LINK_FINISH, FENCE_DUPLICATE, false, true, false, true },
		{ LINK_FINISH, FENCE_STALE, false, true, false, true },
		{ LINK_FINISH, FENCE_UNKNOWN, false, true, false, true },
		{ LINK_REFUSE, FENCE_APPLIED, false, false, false, true },
		{ LINK_REFUSE, FENCE_STALE, false, false, false, true },
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct link_effect f;
		struct link_run r;

		init(&r);
		r.under_way = rows[i].type;
		link_run_answered(&r, rows[i].fence, 3, 0, &f);
		if (f.started != rows[i].started || f.finished != rows[i].finished || f.kill != rows[i].kill ||
				f.done != rows[i].done)
			fail_msg("row %zu", i);
		assert_int_equal(r.over, rows[i].done);
		link_run_free(&r);
	}
}

static void test_pauses(void **state)
{
	struct link_effect f;
	struct link_run r;

	(void)state;
	assert_int_equal(link_pause_ms(0), 0);
	assert_int_equal(link_pause_ms(1), 100);
	assert_int_equal(link_pause_ms(3), 400);
	assert_int_equal(link_pause_ms(4000000000u), 5000);
	init(&r);
	r.grant = GRANT_WANTED;
	assert_int_equal(ask(&r, 1000), LINK_START);
	link_run_failed(&r, 1000);
	assert_int_equal(ask(&r, 1099), 0);
	assert_int_equal(ask(&r, 1100), LINK_START);
	link_run_failed(&r, 1100);
	assert_int_equal(ask(&r, 1299), 0);
	assert_int_equal(ask(&r, 1300), LINK_START);
	link_run_rejected(&r, &f);
	assert_true(f.kill && f.done && r.over);
	link_run_free(&r);
}

/* A controld that lost what it had taken says what it wants next, and is sent that again. */
static void test_a_gap_is_sent_again(void **state)
{
	struct link_effect f;
	struct link_run r;

	(void)state;
	init(&r);
	r.grant = GRANT_GIVEN;
	r.last_seq = 10;
	assert_int_equal(ask(&r, 0), LINK_EVENTS);
	link_run_answered(&r, FENCE_APPLIED, 9, 0, &f);
	assert_int_equal(f.acked, 8);
	assert_int_equal(r.next_send, 9);
	assert_int_equal(ask(&r, 0), LINK_EVENTS);
	link_run_answered(&r, FENCE_GAP, 5, 0, &f);
	assert_false(f.kill);
	assert_int_equal(f.acked, 0);
	assert_int_equal(r.next_send, 5);
	assert_int_equal(ask(&r, 60000), LINK_EVENTS);
	link_run_free(&r);
}

/* A controld that asks for what is not there, or for the same again and again, does not keep us busy for ever. */
static void test_nonsense_from_controld(void **state)
{
	struct link_effect f;
	struct link_run r;
	int64_t now = 0;
	int n = 0;

	(void)state;
	init(&r);
	r.grant = GRANT_GIVEN;
	r.last_seq = 10;
	assert_int_equal(ask(&r, 0), LINK_EVENTS);
	link_run_answered(&r, FENCE_APPLIED, 12, 0, &f);
	assert_true(f.kill && r.over);
	link_run_free(&r);
	init(&r);
	r.grant = GRANT_GIVEN;
	r.last_seq = 10;
	while (!r.over) {
		assert_true(n++ < 100);
		now += 10000;
		assert_int_equal(ask(&r, now), LINK_EVENTS);
		link_run_answered(&r, FENCE_GAP, 3, now, &f);
	}
	assert_true(f.kill);
	link_run_free(&r);
}

static void test_lease(void **state)
{
	(void)state;
	assert_int_equal(link_lease_deadline_ns(1000, 60000), 1000 + INT64_C(55000000000));
	assert_int_equal(link_lease_deadline_ns(0, 6000), INT64_C(5500000000));
	assert_int_equal(link_lease_deadline_ns(0, UINT32_MAX) > 0, true);
	/* A controld that stands still costs at most half of a lease, whatever that is. */
	assert_int_equal(link_park_ms(10000, 0), 10000);
	assert_int_equal(link_park_ms(10000, 60000), 10000);
	assert_int_equal(link_patience_ms(10000, 60000), 20000);
	assert_int_equal(link_patience_ms(10000, 0), 20000);
	for (uint32_t lease = 3000; lease <= 3600000; lease += 997)
		assert_true(link_patience_ms(link_park_ms(10000, lease), lease) <= lease / 2);
}

/* Answers get lost, controld forgets a tail now and then: still every event arrives once and in order, and then the finish. */
static void test_random_play(void **state)
{
	(void)state;
	for (unsigned seed = 1; seed <= 3000; seed++) {
		struct link_effect f;
		struct link_run r;
		uint64_t stored = 3; /* next that controld wants */
		uint64_t sent_first = 0, sent_last = 0;
		unsigned x = seed * 2654435761u;
		int64_t now = 0;
		bool finished = false;
		int turns = 0;

		init(&r);
		r.grant = GRANT_WANTED;
		while (!r.over) {
			enum link_type type;

			assert_true(turns++ < 10000);
			x = x * 1664525u + 1013904223u;
			now += 6000;
			if (r.last_seq < 60)
				r.last_seq += x >> 30;
			if (r.last_seq >= 60 && !r.finish_due) {
				r.finish_due = true;
				r.finish_seq = r.last_seq;
			}
			type = ask(&r, now);
			if (type == 0)
				continue;
			if (type == LINK_EVENTS) {
				sent_first = r.next_send;
				sent_last = r.last_seq < sent_first + 4 ? r.last_seq : sent_first + 4;
			}
			if ((x >> 8) % 5 == 0) { /* the request is lost */
				link_run_failed(&r, now);
				continue;
			}
			if (type == LINK_EVENTS && sent_first <= stored && sent_last >= stored)
				stored = sent_last + 1;
			if (type == LINK_FINISH && stored == r.finish_seq + 1)
				finished = true;
			if ((x >> 12) % 5 == 0) { /* its answer is */
				link_run_failed(&r, now);
				continue;
			}
			if (type == LINK_EVENTS)
				link_run_answered(&r,
						sent_first > stored      ? FENCE_GAP
						: sent_last < stored - 1 ? FENCE_DUPLICATE
									 : FENCE_APPLIED,
						stored, now, &f);
			else if (type == LINK_FINISH)
				link_run_answered(&r, finished ? FENCE_APPLIED : FENCE_GAP, stored, now, &f);
			else
				link_run_answered(&r, FENCE_APPLIED, 0, now, &f);
			assert_false(f.kill);
		}
		assert_true(finished && f.finished);
		assert_int_equal(stored, r.finish_seq + 1);
		link_run_free(&r);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_order),
		cmocka_unit_test(test_fences),
		cmocka_unit_test(test_pauses),
		cmocka_unit_test(test_a_gap_is_sent_again),
		cmocka_unit_test(test_nonsense_from_controld),
		cmocka_unit_test(test_lease),
		cmocka_unit_test(test_random_play),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
