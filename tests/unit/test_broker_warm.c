/* link: noded_broker */
/* sources: tests/unit/broker_rig.c */
/* The broker process of a warm VM: it boots before any run is known, says when a run may come, and leaves no word behind without
 * one. */
#include "broker_rig.h"
#include "fd_frame.h"

static void prepare(struct rig *r, int64_t boot_ms)
{
	struct buf b = BUF_INIT(16);

	wire_put_i64(&b, boot_ms);
	put(r->keeper, RF_BROKER_PREPARE, b.data, b.len);
	buf_free(&b);
}

static void probe(struct rig *r, uint8_t nonce[GUEST_NONCE_LEN])
{
	struct frame f;

	put(r->channel, RF_CB_VMM_UP, NULL, 0);
	f = from_channel_side(r, RF_CH_PROBE);
	assert_int_equal(f.n, GUEST_NONCE_LEN);
	memcpy(nonce, f.body, GUEST_NONCE_LEN);
	free(f.body);
}

static void to_ready(struct rig *r)
{
	uint8_t nonce[GUEST_NONCE_LEN];

	prepare(r, 60000);
	probe(r, nonce);
	hello(r, nonce);
	wait_frame(r, RF_KEEPER_READY, 0);
}

static void work_and_finish(struct rig *r)
{
	char types[4096], data[65536];
	uint8_t fence = FENCE_APPLIED;
	int count;

	wait_frame(r, RF_KEEPER_TO_LINK, RF_BL_START);
	to_link_side(r, RF_LB_STARTED, &fence, 1);
	wait_channel(r, RF_CH_SETUP);
	wait_channel(r, RF_CH_FILES_END);
	ack(r);
	finish_with(r, "done");
	assert_int_equal(r->end.code, ERRCODE_NONE);
	read_events(r, types, EV_MICROVM_DESTROYED, data, &count);
	assert_string_equal(types, "microvm.ready worker.started microvm.destroyed");
	assert_int_equal(count, 1);
}

static void test_a_run_comes_later(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_ready(&r);
	give_assignment(&r);
	work_and_finish(&r);
	rig_stop(&r);
}

/* READY is not said then: who assigned knows. */
static void test_a_run_comes_while_it_boots(void **state)
{
	uint8_t nonce[GUEST_NONCE_LEN];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.boot_ms = 1; /* of no account: the boot's limit came with the prepare */
	rig_start(&r, NULL);
	prepare(&r, 60000);
	give_assignment(&r);
	probe(&r, nonce);
	hello(&r, nonce);
	work_and_finish(&r);
	rig_stop(&r);
}

static void leaves_without_a_word(struct rig *r)
{
	uint8_t gone[8] = { 7 };
	int status;

	wait_frame(r, RF_KEEPER_DESTROY, 0);
	put(r->keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(r, RF_KEEPER_END, 0);
	assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	r->pid = 0;
	assert_int_equal(r->refuse_reason[0], '\0');
	assert_false(r->ended);
}

static void test_it_dies_without_a_run(void **state)
{
	static const char panicked[] = "GUEST_PANICKED";
	struct buf b = BUF_INIT(64);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_ready(&r);
	wire_put_str(&b, panicked);
	put(r.channel, RF_CB_VMM_EVENT, b.data, b.len);
	buf_free(&b);
	leaves_without_a_word(&r);
	rig_stop(&r);
}

static void test_it_never_says_hello(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	prepare(&r, 200);
	leaves_without_a_word(&r);
	rig_stop(&r);
}

/* It is asked for nothing yet: a guest that works before there is a run, or greets twice, is ended. */
static void test_it_works_without_a_run(void **state)
{
	uint8_t nonce[GUEST_NONCE_LEN];
	struct rig r;

	(void)state;
	for (int second_hello = 0; second_hello < 2; second_hello++) {
		rig_defaults(&r);
		rig_start(&r, NULL);
		prepare(&r, 60000);
		probe(&r, nonce);
		hello(&r, nonce);
		wait_frame(&r, RF_KEEPER_READY, 0);
		if (second_hello)
			hello(&r, nonce);
		else
			put(r.channel, RF_CB_RESULT, "early", 5);
		leaves_without_a_word(&r);
		rig_stop(&r);
	}
}

static void ends_by_itself(struct rig *r)
{
	int status;

	assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
	assert_true(WIFEXITED(status));
	r->pid = 0;
}

static void test_what_keeper_may_not_say(void **state)
{
	static const uint8_t bytes[8] = { 1 };
	struct rig r;

	(void)state;
	for (int i = 0; i < 4; i++) {
		rig_defaults(&r);
		rig_start(&r, NULL);
		switch (i) {
		case 0: put(r.keeper, RF_BROKER_ASSIGN, bytes, sizeof(bytes)); break;
		case 1: assert_true(put_fd_frame(r.keeper, RF_BROKER_ASSIGN, bytes, 8, r.spool_fd, ROLE_FRAME_MAX)); break;
		case 2: put(r.keeper, RF_BROKER_PREPARE, bytes, 3); break;
		default:
			prepare(&r, 60000);
			prepare(&r, 60000);
			break;
		}
		ends_by_itself(&r);
		rig_stop(&r);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_a_run_comes_later),
		cmocka_unit_test(test_a_run_comes_while_it_boots),
		cmocka_unit_test(test_it_dies_without_a_run),
		cmocka_unit_test(test_it_never_says_hello),
		cmocka_unit_test(test_it_works_without_a_run),
		cmocka_unit_test(test_what_keeper_may_not_say),
	};

	(void)signal(SIGPIPE, SIG_IGN);
	if (sodium_init() < 0)
		return 1;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
