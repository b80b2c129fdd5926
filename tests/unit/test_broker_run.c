/* link: ephproto */
/* sources: noded/broker/run.c */
/* The run's state machine: each decision by table, and that no order of facts leads anywhere but to the end, VM destroyed first. */
#include "noded/broker/run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SEEN(...)                                                                                                                  \
	{                                                                                                                          \
		.assigned = true, __VA_ARGS__                                                                                      \
	}

static void test_decisions(void **state)
{
	static const struct {
		enum run_state from;
		struct run_seen seen;
		enum run_step want;
	} rows[] = {
		{ RUN_NEW, { .assigned = false }, STEP_WAIT },
		{ RUN_NEW, { .assigned = false, .ending = true }, STEP_WAIT },
		{ RUN_NEW, SEEN(.ending = false), STEP_BOOT },
		{ RUN_NEW, { .prepared = true }, STEP_BOOT },
		{ RUN_PROBE, { .prepared = true, .hello = true }, STEP_READY },
		{ RUN_PROBE, { .prepared = true, .assigned = true, .hello = true }, STEP_START }, /* taken while it booted */
		{ RUN_READY, { .prepared = true, .hello = true }, STEP_WAIT },
		{ RUN_READY, { .prepared = true, .hello = true, .ending = true }, STEP_DESTROY },
		{ RUN_READY, { .prepared = true, .assigned = true, .hello = true }, STEP_START },
		{ RUN_DESTROY, { .prepared = true, .ending = true }, STEP_WAIT },
		{ RUN_DESTROY, { .prepared = true, .ending = true, .gone = true }, STEP_LEAVE }, /* there is no run to refuse */
		{ RUN_BOOT, SEEN(.ending = false), STEP_WAIT },
		{ RUN_BOOT, SEEN(.vmm_up = true), STEP_PROBE },
		{ RUN_BOOT, SEEN(.vmm_up = true, .ending = true), STEP_DESTROY },
		{ RUN_PROBE, SEEN(.vmm_up = true), STEP_WAIT },
		{ RUN_PROBE, SEEN(.hello = true), STEP_START },
		{ RUN_PROBE, SEEN(.hello = true, .ending = true), STEP_DESTROY },
		{ RUN_START, SEEN(.start_asked = true), STEP_WAIT },
		{ RUN_START, SEEN(.start_asked = true, .fence = FENCE_APPLIED), STEP_SETUP },
		{ RUN_START, SEEN(.start_asked = true, .fence = FENCE_DUPLICATE), STEP_SETUP },
		{ RUN_START, SEEN(.start_asked = true, .fence = FENCE_STALE), STEP_DESTROY },
		{ RUN_START, SEEN(.start_asked = true, .fence = FENCE_UNKNOWN), STEP_DESTROY },
		{ RUN_START, SEEN(.start_asked = true, .fence = FENCE_GAP), STEP_DESTROY },
		{ RUN_START, SEEN(.start_asked = true, .ending = true), STEP_DESTROY },
		{ RUN_SETUP, SEEN(.fence = FENCE_APPLIED), STEP_WAIT },
		{ RUN_SETUP, SEEN(.fence = FENCE_APPLIED, .setup_acked = true), STEP_WORK },
		{ RUN_SETUP, SEEN(.fence = FENCE_APPLIED, .setup_acked = true, .ending = true), STEP_DESTROY },
		{ RUN_WORK, SEEN(.fence = FENCE_APPLIED), STEP_WAIT },
		{ RUN_WORK, SEEN(.fence = FENCE_APPLIED, .ending = true), STEP_DESTROY },
		{ RUN_WORK, SEEN(.fence = FENCE_APPLIED, .fenced = true), STEP_DESTROY },
		{ RUN_DESTROY, SEEN(.start_asked = true, .fence = FENCE_APPLIED, .ending = true), STEP_WAIT },
		{ RUN_DESTROY, SEEN(.ending = true, .gone = true), STEP_REFUSE },
		{ RUN_DESTROY, SEEN(.ending = true, .gone = true, .start_asked = true), STEP_WAIT }, /* its answer decides */
		{ RUN_DESTROY, SEEN(.ending = true, .gone = true, .start_asked = true, .fence = FENCE_APPLIED), STEP_SIGN },
		{ RUN_DESTROY, SEEN(.gone = true, .start_asked = true, .fence = FENCE_STALE), STEP_LEAVE },
		{ RUN_DESTROY, SEEN(.gone = true, .start_asked = true, .fence = FENCE_APPLIED, .fenced = true), STEP_LEAVE },
		{ RUN_SIGN, SEEN(.gone = true, .fence = FENCE_APPLIED), STEP_WAIT },
		{ RUN_SIGN, SEEN(.gone = true, .fence = FENCE_APPLIED, .is_signed = true), STEP_FINISH },
		{ RUN_FINISH, SEEN(.gone = true, .fence = FENCE_APPLIED), STEP_WAIT },
		{ RUN_FINISH, SEEN(.gone = true, .fence = FENCE_APPLIED, .finished = true), STEP_LEAVE },
		{ RUN_OVER, SEEN(.ending = true, .gone = true), STEP_WAIT },
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		if (run_next(rows[i].from, &rows[i].seen) != rows[i].want)
			fail_msg("row %zu: %s gives %s, not %s", i, run_state_name(rows[i].from),
					run_step_name(run_next(rows[i].from, &rows[i].seen)), run_step_name(rows[i].want));
}

/* Every set of facts in every state: the step is legal, hand-over needs a grant, and nothing is reported before the VM is gone. */
static void test_all_facts(void **state)
{
	(void)state;
	for (int s = 0; s < RUN_STATES; s++) {
		for (unsigned bits = 0; bits < 2048; bits++) {
			for (uint8_t fence = 0; fence <= FENCE_GAP; fence++) {
				struct run_seen seen = { .assigned = bits & 1,
					.vmm_up = bits & 2,
					.hello = bits & 4,
					.setup_acked = bits & 8,
					.ending = bits & 16,
					.fenced = bits & 32,
					.gone = bits & 64,
					.is_signed = bits & 128,
					.finished = bits & 256,
					.start_asked = bits & 512,
					.prepared = bits & 1024,
					.fence = fence };
				enum run_step step = run_next((enum run_state)s, &seen);
				enum run_state to = run_step_state((enum run_state)s, step);

				if (step == STEP_WAIT)
					continue;
				assert_true(run_move_legal((enum run_state)s, to));
				if (step == STEP_SETUP || step == STEP_SIGN)
					assert_true(run_granted(fence));
				if (step == STEP_SIGN || step == STEP_REFUSE || (s == RUN_DESTROY && step == STEP_LEAVE))
					assert_true(seen.gone);
				if (step == STEP_REFUSE)
					assert_false(seen.start_asked);
				if (step == STEP_START || step == STEP_REFUSE || step == STEP_SIGN)
					assert_true(seen.assigned);
			}
		}
	}
}

static void test_tables(void **state)
{
	(void)state;
	assert_false(run_move_legal(RUN_WORK, RUN_SETUP));
	assert_false(run_move_legal(RUN_WORK, RUN_OVER)); /* never without destroying */
	assert_false(run_move_legal(RUN_OVER, RUN_NEW));
	assert_string_equal(run_state_name(RUN_DESTROY), "destroy");
	assert_string_equal(run_state_name(RUN_STATES), "unknown");
	assert_int_equal(run_code_before_start(ERRCODE_VM_CRASHED), ERRCODE_VM_START_FAILED);
	assert_int_equal(run_code_before_start(ERRCODE_CANCELLED), ERRCODE_CANCELLED);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_decisions), cmocka_unit_test(test_all_facts),
		cmocka_unit_test(test_tables) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
