/* link: noded_broker */
/* sources: tests/unit/broker_rig.c */
/* What the broker process takes of a guest that lies about who it is: one hello, the answer to this run's own probe. */
#include "broker_rig.h"

static void test_hello_of_another(void **state)
{
	uint8_t nonce[GUEST_NONCE_LEN], gone[8] = { 12 };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_probe(&r, nonce);
	nonce[GUEST_NONCE_LEN - 1] ^= 1;
	hello(&r, nonce);
	wait_frame(&r, RF_KEEPER_DESTROY, 0);
	put(r.keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(&r, RF_KEEPER_TO_LINK, RF_BL_REFUSE);
	assert_true(r.refuse_failed);
	assert_non_null(strstr(r.refuse_reason, "does not answer this probe"));
	rig_stop(&r);
}

/* As good as the first one, and it comes while the run works: who says it again is not the agent that was started. */
static void test_second_hello(void **state)
{
	uint8_t nonce[GUEST_NONCE_LEN], fence = FENCE_APPLIED;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_probe(&r, nonce);
	hello(&r, nonce);
	wait_frame(&r, RF_KEEPER_TO_LINK, RF_BL_START);
	to_link_side(&r, RF_LB_STARTED, &fence, 1);
	wait_channel(&r, RF_CH_SETUP);
	wait_channel(&r, RF_CH_FILES_END);
	ack(&r);
	hello(&r, nonce);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_WORKER_PROTOCOL_ERROR);
	assert_non_null(strstr(r.end.detail, "second hello"));
	rig_stop(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_hello_of_another),
		cmocka_unit_test(test_second_hello),
	};

	(void)signal(SIGPIPE, SIG_IGN);
	if (sodium_init() < 0)
		return 1;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
