/* link: noded_broker */
/* sources: tests/unit/broker_rig.c */
/* The broker process: each way a run can end, hand-over, files, the guest's events; what stands in the spool. */
#include "broker_rig.h"

#include <sys/syscall.h>

static void test_cancel(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_CANCELLED);
	rig_stop(&r);
}

static void assert_killed_by_broker(const struct rig *r)
{
	char c = 0;

	assert_int_equal(pread(r->kill_fd, &c, 1, 0), 1);
	assert_int_equal(c, '1');
}

static void test_lease_expires(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.lease_ms = 700;
	rig_start(&r, NULL);
	to_work(&r);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_LEASE_EXPIRED);
	assert_killed_by_broker(&r);
	rig_stop(&r);
}

/* A renewed lease moves the deadline: this run ends by its own timeout, after the first lease's end. */
static void test_lease_is_renewed(void **state)
{
	struct buf b = BUF_INIT(16);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.lease_ms = 800;
	r.a.timeout_s = 1;
	rig_start(&r, NULL);
	to_work(&r);
	wire_put_i64(&b, clock_boot_ns() + INT64_C(60000000000));
	put(r.keeper, RF_BROKER_LEASE, b.data, b.len);
	buf_free(&b);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_TIMED_OUT);
	rig_stop(&r);
}

/* A lease that says no time is none: the deadline that stands is kept. */
static void test_lease_without_a_time(void **state)
{
	static const uint8_t zero[8] = { 0 };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.lease_ms = 800;
	r.a.timeout_s = 4;
	rig_start(&r, NULL);
	to_work(&r);
	put(r.keeper, RF_BROKER_LEASE, zero, sizeof(zero));
	put(r.keeper, RF_BROKER_LEASE, zero, 3);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_LEASE_EXPIRED);
	rig_stop(&r);
}

/* Keeper destroyed the VM without being asked: the run ends, and nobody waits to hear it a second time. */
static void test_vm_is_gone_unasked(void **state)
{
	uint8_t gone[8] = { 12 };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	put(r.keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(&r, RF_KEEPER_DESTROY, 0);
	wait_frame(&r, RF_KEEPER_SIGN_DIGEST, 0);
	put(r.keeper, RF_BROKER_SIGNATURE, (uint8_t[64]){ 0 }, 64);
	wait_frame(&r, RF_KEEPER_TO_LINK, RF_BL_FINISH);
	assert_int_equal(r.end.code, ERRCODE_VM_CRASHED);
	rig_stop(&r);
}

/* A host that slept: the lease is counted on the clock that goes on meanwhile. */
static void test_lease_over_a_sleep(void **state)
{
#ifdef EPHEMERAL_TEST_CLOCK
	char path[] = "/tmp/eph-clock-XXXXXX", fresh[64];
	int fd = mkstemp(path), moved;
	struct rig r;

	(void)state;
	assert_true(fd >= 0 && text_fmt(fresh, sizeof(fresh), "%s.new", path));
	assert_int_equal(write(fd, "0 0\n", 4), 4);
	assert_int_equal(setenv("EPHEMERAL_CLOCK_FILE", path, 1), 0);
	rig_defaults(&r);
	r.a.timeout_s = 3600;
	rig_start(&r, NULL);
	assert_int_equal(unsetenv("EPHEMERAL_CLOCK_FILE"), 0); /* the broker's clock only */
	to_work(&r);
	moved = open(fresh, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(write(moved, "0 61000\n", 8), 8);
	close(moved);
	assert_int_equal(rename(fresh, path), 0);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_LEASE_EXPIRED);
	assert_killed_by_broker(&r);
	rig_stop(&r);
	close(fd);
	(void)remove(path);
#else
	(void)state;
	skip(); /* the clock of this build cannot be moved */
#endif
}

static void test_keeper_is_slow_to_kill(void **state)
{
	struct pollfd none = { .fd = -1 };
	char c = 0;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	for (int i = 0; i < WAIT_MS / 10 && pread(r.kill_fd, &c, 1, 0) != 1; i++)
		(void)poll(&none, 1, 10);
	assert_killed_by_broker(&r);
	to_the_end(&r);
	rig_stop(&r);
}

static void test_keeper_goes_away(void **state)
{
	struct pollfd ended = { .events = POLLIN };
	struct rig r;
	int status;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	close(r.keeper);
	r.keeper = -1;
	ended.fd = (int)syscall(SYS_pidfd_open, r.pid, 0);
	assert_int_equal(poll(&ended, 1, WAIT_MS), 1);
	close(ended.fd);
	assert_int_equal(waitpid(r.pid, &status, 0), r.pid);
	assert_true(WIFEXITED(status));
	r.pid = 0;
	assert_killed_by_broker(&r);
	rig_stop(&r);
}

static void test_vmm_exits(void **state)
{
	struct buf b = BUF_INIT(256);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	wire_put_u32(&b, 9);
	wire_put_str(&b, "The VMM was killed by signal 9 (out of memory).");
	put(r.keeper, RF_BROKER_VMM_EXITED, b.data, b.len);
	buf_free(&b);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_VM_CRASHED);
	assert_string_equal(r.end.detail, "The VMM was killed by signal 9 (out of memory).");
	rig_stop(&r);
}

static void test_channel_goes_away(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	close(r.channel);
	r.channel = -1;
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_CHANNEL_LOST);
	rig_stop(&r);
}

static void test_protocol_errors(void **state)
{
	static const struct {
		uint8_t type;
		const char *body;
		size_t n;
	} bad[] = {
		{ RF_CB_CALL, "\1\0\0\0\7", 5 },
		{ RF_CB_CALL, "", 0 },
		{ RF_CB_EVENT, "xx", 2 },
		{ RF_CB_HELLO, "", 0 },
		{ RF_CB_SETUP_ACK, "", 0 },
	};
	struct rig r;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		rig_defaults(&r);
		rig_start(&r, NULL);
		to_work(&r);
		put(r.channel, bad[i].type, bad[i].body, bad[i].n);
		to_the_end(&r);
		assert_int_equal(r.end.code, ERRCODE_WORKER_PROTOCOL_ERROR);
		rig_stop(&r);
	}
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	r.next_call = 2; /* the first call must be number 1 */
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_WORKER_PROTOCOL_ERROR);
	rig_stop(&r);
}

static void test_output_too_large(void **state)
{
	char *big = malloc(GUEST_RESULT_MAX + 1);
	struct rig r;

	(void)state;
	memset(big, 'x', GUEST_RESULT_MAX + 1);
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	put(r.channel, RF_CB_RESULT, big, GUEST_RESULT_MAX + 1);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_OUTPUT_TOO_LARGE);
	assert_int_equal(r.end.output_len, 0);
	rig_stop(&r);
	free(big);
}

static void test_fatal(void **state)
{
	struct buf b = BUF_INIT(256);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	wire_put_str(&b, "no memory for \x1b]0;evil\x07 the loop");
	put(r.channel, RF_CB_FATAL, b.data, b.len);
	buf_free(&b);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_WORKER_FAILED);
	assert_null(strchr(r.end.detail, 0x1b));
	rig_stop(&r);
}

/* Last words of nothing but control characters, cut in the middle of one: shown, short, and never an endless loop. */
static void test_fatal_garbage(void **state)
{
	struct buf b = BUF_INIT(2048);
	char junk[GUEST_FATAL_MAX + 1];
	struct rig r;

	(void)state;
	for (int byte = 1; byte < 256; byte += 101) {
		memset(junk, byte, GUEST_FATAL_MAX);
		junk[GUEST_FATAL_MAX] = '\0';
		rig_defaults(&r);
		rig_start(&r, NULL);
		to_work(&r);
		buf_reset(&b);
		wire_put_str(&b, junk);
		put(r.channel, RF_CB_FATAL, b.data, b.len);
		to_the_end(&r);
		assert_int_equal(r.end.code, ERRCODE_WORKER_FAILED);
		rig_stop(&r);
	}
	buf_free(&b);
}

static void leaves_without_finish(struct rig *r)
{
	uint8_t gone[8] = { 1 };
	int status;

	wait_frame(r, RF_KEEPER_DESTROY, 0);
	put(r->keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(r, RF_KEEPER_END, 0);
	assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
	r->pid = 0;
	assert_false(r->ended);
}

static void test_start_is_stale(void **state)
{
	uint8_t fence = FENCE_STALE;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_start(&r);
	to_link_side(&r, RF_LB_STARTED, &fence, 1);
	leaves_without_finish(&r);
	assert_int_equal(r.refuse_code, 0);
	rig_stop(&r);
}

/* The run was taken away while it went on: the VM is destroyed and nothing is reported. */
static void test_fenced_at_work(void **state)
{
	uint8_t fence = FENCE_STALE;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	to_link_side(&r, RF_LB_FINISHED, &fence, 1);
	leaves_without_finish(&r);
	rig_stop(&r);
}

static void test_boot_deadline(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.boot_ms = 300;
	rig_start(&r, NULL);
	give_assignment(&r);
	leaves_without_finish(&r);
	assert_int_equal(r.refuse_code, ERRCODE_VM_START_FAILED);
	assert_true(r.refuse_failed);
	assert_non_null(strstr(r.refuse_reason, "300 ms"));
	rig_stop(&r);
}

/* The VM dies while START is asked: destroyed at once, and the answer decides what is reported. */
static void test_end_while_start_is_asked(void **state)
{
	uint8_t gone[8] = { 1 }, fence = FENCE_APPLIED;
	struct buf b = BUF_INIT(64);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_start(&r);
	wire_put_u32(&b, 0);
	wire_put_str(&b, "gone");
	put(r.keeper, RF_BROKER_VMM_EXITED, b.data, b.len);
	buf_free(&b);
	wait_frame(&r, RF_KEEPER_DESTROY, 0);
	put(r.keeper, RF_BROKER_GONE, gone, sizeof(gone));
	to_link_side(&r, RF_LB_STARTED, &fence, 1);
	wait_frame(&r, RF_KEEPER_SIGN_DIGEST, 0);
	put(r.keeper, RF_BROKER_SIGNATURE, (uint8_t[64]){ 0 }, 64);
	wait_frame(&r, RF_KEEPER_TO_LINK, RF_BL_FINISH);
	assert_int_equal(r.end.code, ERRCODE_VM_CRASHED);
	assert_int_equal(r.end.cost.total, 0);
	assert_int_equal(r.end.worker_started_t_ms, -1);
	rig_stop(&r);
}

static void output_event(struct rig *r, const char *bytes, size_t n)
{
	struct guest_event g = {
		.kind = GE_SHELL_OUTPUT, .call_id = "c1", .text = (const uint8_t *)bytes, .text_len = n, .stream = 1, .bytes = -1
	};
	struct buf b = BUF_INIT(65536);

	guest_event_encode(&g, &b);
	put(r->channel, RF_CB_EVENT, b.data, b.len);
	r->credit -= (int64_t)b.len;
	buf_free(&b);
}

static void exit_event(struct rig *r)
{
	struct guest_event g = { .kind = GE_SHELL_EXITED, .call_id = "c1", .bytes = -1 };
	struct buf b = BUF_INIT(65536);

	guest_event_encode(&g, &b);
	put(r->channel, RF_CB_EVENT, b.data, b.len);
	r->credit -= (int64_t)b.len;
	buf_free(&b);
}

/* More than the rate allows waits, in order, and nothing is lost; a call behind it waits too. */
static void test_event_rate(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	static char types[4096], out[65536];
	int64_t began = clock_mono_ns();
	struct rig r;
	int count;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	for (int i = 0; i < 400; i++)
		output_event(&r, "line\n", 5);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	assert_true(clock_mono_ns() - began > INT64_C(900000000));
	assert_int_equal(r.credit, 0); /* all of it was given back before the reply came */
	finish_with(&r, "x");
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_int_equal(count, 400);
	rig_stop(&r);
}

/* An end writes what waits at once: nothing that the guest said before is lost. */
static void test_end_flushes(void **state)
{
	static char types[4096], out[65536];
	struct rig r;
	int count;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	for (int i = 0; i < 600; i++)
		output_event(&r, "line\n", 5);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	to_the_end(&r);
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_true(count >= 200);
	rig_stop(&r);
}

static void test_split_characters(void **state)
{
	static char types[4096], out[65536];
	int count;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	output_event(&r, "a\xe2\x82", 3);
	output_event(&r, "\xac", 1);
	exit_event(&r);
	finish_with(&r, "x");
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_int_equal(count, 2);
	assert_true(data_text_is(out, "text", "\xe2\x82\xac"));
	rig_stop(&r);

	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	output_event(&r, "a\xe2\x82", 3);
	exit_event(&r);
	finish_with(&r, "x");
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_int_equal(count, 2);
	assert_true(data_text_is(out, "base64", "4oI="));
	assert_string_equal(types, "microvm.ready worker.started shell.output shell.output shell.exited microvm.destroyed");
	rig_stop(&r);
}

static void blob_answer(struct rig *r, const uint8_t *file, size_t size)
{
	struct frame f = from_keeper_side(r, RF_KEEPER_TO_LINK, RF_BL_BLOB);
	struct buf b = BUF_INIT(LINK_BLOB_MAX + 64);
	struct wire_reader rd;
	uint8_t sha[32];
	uint64_t offset;
	size_t n;

	wire_read_init(&rd, f.body + 1, f.n - 1);
	wire_raw(&rd, sha, 32);
	offset = wire_u64(&rd);
	assert_false(rd.failed);
	n = size - (size_t)offset < LINK_BLOB_MAX ? size - (size_t)offset : LINK_BLOB_MAX;
	wire_put_u64(&b, size);
	wire_put_bytes(&b, file + offset, n);
	to_link_side(r, RF_LB_BLOB, b.data, b.len);
	buf_free(&b);
	free(f.body);
}

static void test_files(void **state)
{
	const size_t size = 300000;
	uint8_t *file = malloc(size), *got = malloc(size), fence = FENCE_APPLIED, credit[4] = { 0, 0, 2, 0 };
	size_t have = 0;
	struct rig r;

	(void)state;
	for (size_t i = 0; i < size; i++)
		file[i] = (uint8_t)(i * 7);
	rig_defaults(&r);
	assert_true(text_copy(r.files[0].path, sizeof(r.files[0].path), "empty") &&
			text_copy(r.files[1].path, sizeof(r.files[1].path), "a/b"));
	crypto_hash_sha256(r.files[0].sha256, NULL, 0);
	r.files[1].size = size;
	crypto_hash_sha256(r.files[1].sha256, file, size);
	r.a.files = r.files;
	r.a.file_count = 2;
	rig_start(&r, NULL);
	to_start(&r);
	to_link_side(&r, RF_LB_STARTED, &fence, 1);
	blob_answer(&r, file, size);
	while (have < size) {
		struct frame f = from_channel_side(&r, RF_CH_FILE);

		assert_int_equal(f.body[0], 1);
		memcpy(got + have, f.body + 4, f.n - 4);
		have += f.n - 4;
		free(f.body);
		if (have == GUEST_CREDIT) {
			put(r.channel, RF_CB_FILE_CREDIT, credit, 4); /* 128 KiB more */
			blob_answer(&r, file, size);
		}
	}
	assert_memory_equal(got, file, size);
	wait_channel(&r, RF_CH_FILES_END);
	ack(&r);
	finish_with(&r, "x");
	rig_stop(&r);
	free(file);
	free(got);
}

/* The provider's key is nowhere but in the request. */
/* The key is in no event, and nothing of key, prompt, answer or output is in the log. */
static void test_key_stays(void **state)
{
	static const char *const secret[] = { "sk-canary", "prompt-canary", "hello", "output-canary" };
	const char *answers[] = { HELLO_REPLY, NULL };
	uint8_t *all = malloc((size_t)SPOOL_BYTES);
	int log = memfd_create("log", MFD_CLOEXEC), own = dup(2);
	struct rig r;
	ssize_t n;

	(void)state;
	assert_true(log >= 0 && own >= 0 && dup2(log, 2) == 2);
	rig_defaults(&r);
	rig_start(&r, answers);
	assert_int_equal(dup2(own, 2), 2); /* the broker's words only */
	to_work(&r);
	call_model(&r, "prompt-canary");
	reply_is(&r, "hello");
	finish_with(&r, "output-canary");
	n = pread(r.spool_fd, all, (size_t)SPOOL_BYTES, 0);
	assert_true(n > 1000);
	assert_null(memmem(all, (size_t)n, "sk-canary", 9));
	n = pread(log, all, (size_t)SPOOL_BYTES - 1, 0);
	assert_true(n > 100);
	all[n] = '\0';
	for (size_t i = 0; i < sizeof(secret) / sizeof(secret[0]); i++)
		if (strstr((const char *)all, secret[i]) != NULL)
			fail_msg("%s is in the log: %s", secret[i], (const char *)all);
	rig_stop(&r);
	close(log);
	close(own);
	free(all);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_cancel),
		cmocka_unit_test(test_lease_expires),
		cmocka_unit_test(test_lease_is_renewed),
		cmocka_unit_test(test_lease_without_a_time),
		cmocka_unit_test(test_vm_is_gone_unasked),
		cmocka_unit_test(test_lease_over_a_sleep),
		cmocka_unit_test(test_keeper_is_slow_to_kill),
		cmocka_unit_test(test_keeper_goes_away),
		cmocka_unit_test(test_vmm_exits),
		cmocka_unit_test(test_channel_goes_away),
		cmocka_unit_test(test_protocol_errors),
		cmocka_unit_test(test_output_too_large),
		cmocka_unit_test(test_fatal),
		cmocka_unit_test(test_fatal_garbage),
		cmocka_unit_test(test_start_is_stale),
		cmocka_unit_test(test_fenced_at_work),
		cmocka_unit_test(test_boot_deadline),
		cmocka_unit_test(test_end_while_start_is_asked),
		cmocka_unit_test(test_event_rate),
		cmocka_unit_test(test_end_flushes),
		cmocka_unit_test(test_split_characters),
		cmocka_unit_test(test_files),
		cmocka_unit_test(test_key_stays),
	};

	(void)signal(SIGPIPE, SIG_IGN);
	if (sodium_init() < 0)
		return 1;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
