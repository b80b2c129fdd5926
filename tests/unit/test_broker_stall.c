/* link: noded_broker */
/* sources: tests/unit/broker_rig.c */
/* A broker that stood still: what had come before a deadline is taken, though it is read after it. */
#include "broker_rig.h"

/* The broker stands still beyond a deadline, while what the deadline waits for comes. */
static void stand_still(struct rig *r, uint8_t type, const void *body, size_t n, int fd, int ms)
{
	siginfo_t info;

	kill(r->pid, SIGSTOP);
	assert_int_equal(waitid(P_PID, (id_t)r->pid, &info, WSTOPPED), 0);
	put(fd, type, body, n);
	(void)poll(NULL, 0, ms);
	kill(r->pid, SIGCONT);
}

static void test_hello_while_it_stands_still(void **state)
{
	struct guest_hello h = { .protocol = GUEST_PROTOCOL, .kernel = "6.1.0-test", .agent = "0", .memory_mib = 512 };
	struct buf b = BUF_INIT(4096);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.boot_ms = 2000;
	rig_start(&r, NULL);
	to_probe(&r, h.nonce);
	guest_hello_encode(&h, &b);
	stand_still(&r, RF_CB_HELLO, b.data, b.len, r.channel, 3000);
	buf_free(&b);
	wait_frame(&r, RF_KEEPER_TO_LINK, RF_BL_START);
	rig_stop(&r);
}

static void test_signature_while_it_stands_still(void **state)
{
	uint8_t gone[8] = { 12 }, fence = FENCE_APPLIED, signature[64];
	struct rig r;

	(void)state;
	memset(signature, 0x5a, sizeof(signature));
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	wait_frame(&r, RF_KEEPER_DESTROY, 0);
	put(r.keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(&r, RF_KEEPER_SIGN_DIGEST, 0);
	stand_still(&r, RF_BROKER_SIGNATURE, signature, sizeof(signature), r.keeper, 5600);
	wait_frame(&r, RF_KEEPER_TO_LINK, RF_BL_FINISH);
	to_link_side(&r, RF_LB_FINISHED, &fence, 1);
	wait_frame(&r, RF_KEEPER_END, 0);
	assert_memory_equal(r.end.receipt_signature, signature, sizeof(signature));
	rig_stop(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_hello_while_it_stands_still),
		cmocka_unit_test(test_signature_while_it_stands_still),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
