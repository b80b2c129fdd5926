/* link: ephproto ephproto_link EPH::sodium */
/*
 * Every message of proto/: what was encoded decodes to the same bytes again, every cut and every trailing byte is refused, and
 * mutated bytes never do harm (run under ASan and UBSan).
 */
#include "common/ids.h"
#include "common/text.h"
#include "proto/assignment.h"
#include "proto/errcode.h"
#include "proto/guest.h"
#include "proto/link.h"
#include "proto/model.h"
#include "proto/role.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define RUN "run_0123456789abcdef0123456789abcdef"

/* Decodes p and encodes it again into out; 0 or -1 as the decoder said. */
typedef int (*again_fn)(const void *p, size_t n, struct buf *out, struct err *e);
struct message {
	const char *name;
	void (*sample)(struct buf *out);
	again_fn again;
};

#define NO_FREE(m) ((void)(m))
#define CASE(id, type, prefix, freeing, ...)                                                                                       \
	static void sample_##id(struct buf *out)                                                                                   \
	{                                                                                                                          \
		struct type m = __VA_ARGS__;                                                                                       \
		prefix##_encode(&m, out);                                                                                          \
	}                                                                                                                          \
	static int again_##id(const void *p, size_t n, struct buf *out, struct err *e)                                             \
	{                                                                                                                          \
		struct type m;                                                                                                     \
		memset(&m, 0, sizeof(m));                                                                                          \
		if (prefix##_decode(p, n, &m, e))                                                                                  \
			return -1;                                                                                                 \
		prefix##_encode(&m, out);                                                                                          \
		freeing(&m);                                                                                                       \
		return 0;                                                                                                          \
	}

static struct model_tool_call tool_calls[] = {
	{ .id = (char[]){ "c1" }, .name = (char[]){ "shell" }, .arguments = (char[]){ "{\"a\"" } }
};
static struct model_message messages[] = {
	{ .role = ROLE_USER, .content = (char[]){ "do it" } },
	{ .role = ROLE_ASSISTANT, .content = (char[]){ "" }, .calls = tool_calls, .call_count = 1 },
	{ .role = ROLE_TOOL, .content = (char[]){ "done" }, .tool_call_id = (char[]){ "c1" } },
};
static struct guest_file guest_files[] = { { .path = "a/b.txt", .size = 12 } };
static struct assign_file assign_files[] = { { .path = "notes.md", .size = 4, .sha256 = { 1, 2, 3 } } };
static struct link_held held[] = { { .run_id = RUN, .token = { 7 }, .spent_micros = 10, .held_micros = 20 } };
static struct link_assign assigns[] = {
	{ .assignment = (uint8_t *)"abc", .assignment_len = 3, .sealed = (uint8_t *)"d", .sealed_len = 1 }
};
static struct link_command commands[] = { { .id = 9, .kind = LINK_CMD_CANCEL, .run_id = RUN, .token = { 1 } } };
static struct link_record records[] = { { .type = 4, .bytes = (const uint8_t *)"{}", .len = 2 } };

CASE(model_call, model_call, model_call, model_call_free,
		{ .call = 3, .wish_tokens = 100, .tools = 1, .messages = messages, .message_count = 3 })
CASE(model_reply, model_reply, model_reply, model_reply_free,
		{ .call = 3,
				.status = MODEL_OK,
				.finish = FINISH_TOOL_CALLS,
				.content = (char[]){ "x" },
				.calls = tool_calls,
				.call_count = 1,
				.calls_left = 5 })
CASE(hello, guest_hello, guest_hello, NO_FREE,
		{ .nonce = { 1 }, .protocol = 1, .kernel = "6.1.0", .agent = "0.1", .memory_mib = 512 })
CASE(setup, guest_setup, guest_setup, guest_setup_free,
		{ .real_ns = 5,
				.entropy = { 3 },
				.shell = true,
				.max_model_calls = 9,
				.tool_timeout_ms = 120000,
				.prompt = (char[]){ "hi" },
				.files = guest_files,
				.file_count = 1 })
CASE(ack, guest_setup_ack, guest_setup_ack, NO_FREE, { .reseeded = true, .clock_set = true, .workdir = "/tmp/x", .boot_id = "b" })
CASE(gevent, guest_event, guest_event, NO_FREE,
		{ .kind = GE_SHELL_EXITED,
				.call_id = "c",
				.text = (const uint8_t *)"t\xff",
				.text_len = 2,
				.name = "n",
				.bytes = -1,
				.code = 137,
				.has_signal = true })
CASE(assignment, assignment, assignment, assignment_free,
		{ .run_id = RUN,
				.attempt = 1,
				.queued_at_ms = 1,
				.next_seq = 2,
				.timeout_s = 120,
				.max_model_calls = 100,
				.memory_mib = 512,
				.vcpus = 1,
				.shell = true,
				.cap_micros = 40000,
				.price = { .output = 400000 },
				.model = { .id = "scripted/auto",
						.upstream = "auto",
						.base_url = "http://127.0.0.1:1/v1",
						.limit_param = LIMIT_MAX_TOKENS },
				.prompt = (char[]){ "p" },
				.files = assign_files,
				.file_count = 1 })
CASE(secrets, run_secrets, run_secrets, NO_FREE, { .model_key = "k" })
CASE(run_end, run_end, run_end, run_end_free,
		{ .code = ERRCODE_TIMED_OUT,
				.detail = "d",
				.usage = { .model_calls = 3 },
				.cost = { .run_fee = 1, .model = 2, .total = 3 },
				.last_seq = 9,
				.worker_started_t_ms = -1,
				.isolation = "emulated",
				.output = (uint8_t *)"out",
				.output_len = 3 })
CASE(challenge, link_challenge_reply, link_challenge_reply, NO_FREE, { .challenge = { 1 }, .server_time_ms = 4 })
CASE(enrol, link_enrol, link_enrol, NO_FREE, { .secret = "ephnt_x", .name = "host", .isolation = "kvm", .labels = "a=b" })
CASE(enrol_reply, link_enrol_reply, link_enrol_reply, NO_FREE, { .node_id = "node_1" })
CASE(next, link_next, link_next, link_next_free,
		{ .epoch = 1, .free_memory_mib = 2, .isolation = "kvm", .wait_ms = 10000, .held = held, .held_count = 1 })
CASE(next_reply, link_next_reply, link_next_reply, link_next_reply_free,
		{ .lease_ms = 60000, .assigns = assigns, .assign_count = 1, .commands = commands, .command_count = 1 })
CASE(start, link_start, link_start, NO_FREE, { .run_id = RUN, .token = { 2 } })
CASE(start_reply, link_start_reply, link_start_reply, NO_FREE, { .fence = FENCE_STALE })
CASE(events, link_events, link_events, link_events_free, { .run_id = RUN, .first_seq = 3, .records = records, .record_count = 1 })
CASE(events_reply, link_events_reply, link_events_reply, NO_FREE, { .fence = FENCE_GAP, .expected_seq = 4 })
CASE(finish, link_finish, link_finish, link_finish_free, { .run_id = RUN, .end = { .output = (uint8_t *)"o", .output_len = 1 } })
CASE(finish_reply, link_finish_reply, link_finish_reply, NO_FREE, { .fence = FENCE_APPLIED })
CASE(refuse, link_refuse, link_refuse, NO_FREE, { .run_id = RUN, .failed = true, .code = 2, .reason = "no qemu" })
CASE(refuse_reply, link_refuse_reply, link_refuse_reply, NO_FREE, { .fence = FENCE_APPLIED })
CASE(blob, link_blob, link_blob, NO_FREE, { .run_id = RUN, .offset = 4 })
CASE(blob_reply, link_blob_reply, link_blob_reply, NO_FREE, { .total = 3, .bytes = (const uint8_t *)"abc", .len = 3 })
CASE(image, link_image, link_image, NO_FREE, { .current = "ab", .state = "fetching", .note = "12 of 150 MiB" })
CASE(image_reply, link_image_reply, link_image_reply, NO_FREE,
		{ .wanted = true, .sha256 = { { 1 } }, .size = { 1, 2, LINK_IMAGE_BYTES_MAX } })
CASE(image_blob, link_image_blob, link_image_blob, NO_FREE, { .sha256 = { 1 }, .offset = LINK_BLOB_MAX })
CASE(bye, link_bye, link_bye, NO_FREE, { .epoch = 7 })
CASE(link_init, role_link_init, role_link_init, NO_FREE,
		{ .node_id = "n", .addresses = "tls+tcp://h:1", .epoch = 3, .poll_ms = 10000 })
CASE(vm, role_vm, role_vm, NO_FREE, { .run_id = RUN, .state = VM_RUNNING, .first_seq = 3 })
CASE(broker_assign, role_broker_assign, role_broker_assign, role_broker_assign_free,
		{ .assignment = (uint8_t *)"a",
				.assignment_len = 1,
				.secrets = (uint8_t *)"s",
				.secrets_len = 1,
				.vmm = "qemu",
				.jail = "full",
				.start_mode = "cold" })

#define ROW(id)                                                                                                                    \
	{                                                                                                                          \
#id, sample_##id, again_##id                                                                                       \
	}
static const struct message all[] = {
	ROW(model_call),
	ROW(model_reply),
	ROW(hello),
	ROW(setup),
	ROW(ack),
	ROW(gevent),
	ROW(assignment),
	ROW(secrets),
	ROW(run_end),
	ROW(challenge),
	ROW(enrol),
	ROW(enrol_reply),
	ROW(next),
	ROW(next_reply),
	ROW(start),
	ROW(start_reply),
	ROW(events),
	ROW(events_reply),
	ROW(finish),
	ROW(finish_reply),
	ROW(refuse),
	ROW(refuse_reply),
	ROW(blob),
	ROW(blob_reply),
	ROW(image),
	ROW(image_reply),
	ROW(image_blob),
	ROW(bye),
	ROW(link_init),
	ROW(vm),
	ROW(broker_assign),
};
#define COUNT (sizeof(all) / sizeof(all[0]))

/* An exact-size heap copy, so that ASan sees any read past the end. */
static int decode_copy(const struct message *m, const uint8_t *p, size_t n, struct buf *out, struct err *e)
{
	uint8_t *copy = malloc(n > 0 ? n : 1);
	int rc;

	assert_non_null(copy);
	if (n > 0)
		memcpy(copy, p, n);
	rc = m->again(copy, n, out, e);
	free(copy);
	return rc;
}

static void test_round_trip(void **state)
{
	(void)state;
	for (size_t i = 0; i < COUNT; i++) {
		struct buf first = BUF_INIT(1 << 20), second = BUF_INIT(1 << 20);
		struct err e;

		all[i].sample(&first);
		assert_false(first.failed);
		if (decode_copy(&all[i], first.data, first.len, &second, &e))
			fail_msg("%s: %s", all[i].name, e.text);
		if (first.len != second.len || memcmp(first.data, second.data, first.len) != 0)
			fail_msg("%s: decodes to other bytes", all[i].name);
		buf_free(&first);
		buf_free(&second);
	}
}

static void test_cut_and_trailing(void **state)
{
	(void)state;
	for (size_t i = 0; i < COUNT; i++) {
		struct buf b = BUF_INIT(1 << 20), out = BUF_INIT(1 << 20);
		struct err e;

		all[i].sample(&b);
		for (size_t n = 0; n < b.len; n++)
			if (decode_copy(&all[i], b.data, n, &out, &e) == 0)
				fail_msg("%s: accepted when cut at %zu of %zu", all[i].name, n, b.len);
		assert_true(buf_add_char(&b, 'x'));
		if (decode_copy(&all[i], b.data, b.len, &out, &e) == 0)
			fail_msg("%s: accepted a trailing byte", all[i].name);
		assert_true(e.code == ERR_PROTOCOL);
		buf_free(&b);
		buf_free(&out);
	}
}

static void test_mutations(void **state)
{
	uint32_t seed = 12345;

	(void)state;
	for (size_t i = 0; i < COUNT; i++) {
		struct buf b = BUF_INIT(1 << 20);

		all[i].sample(&b);
		for (int round = 0; round < 3000; round++) {
			struct buf out = BUF_INIT(1 << 24);
			struct err e = { .code = ERR_NONE };
			uint8_t *copy = malloc(b.len);

			assert_non_null(copy);
			memcpy(copy, b.data, b.len);
			for (int k = 0; k < 3; k++) {
				seed = seed * 1664525 + 1013904223;
				copy[(seed >> 8) % b.len] = (uint8_t)(seed >> 24);
			}
			if (all[i].again(copy, b.len, &out, &e))
				assert_true(e.code != ERR_NONE && e.text[0] != '\0');
			free(copy);
			buf_free(&out);
		}
		buf_free(&b);
	}
}

static void test_frames(void **state)
{
	struct buf b = BUF_INIT(1 << 20);
	struct guest_frame_view v;
	struct err e;
	uint8_t big[GUEST_BODY_MAX + 1] = { 0 };

	(void)state;
	guest_frame_put(&b, GF_PROBE, 0, "0123456789abcdef", 16);
	for (size_t n = 0; n < b.len; n++)
		assert_int_equal(guest_frame_next(b.data, n, &v, &e), 0);
	assert_int_equal(guest_frame_next(b.data, b.len, &v, &e), 1);
	assert_int_equal(v.type, GF_PROBE);
	assert_int_equal(v.n, 16);
	assert_int_equal(v.total, b.len);
	assert_int_equal(guest_frame_next("\x04\0\0\0", 4, &v, &e), -1);
	assert_int_equal(guest_frame_next("\x01\0\x01\0", 4, &v, &e), -1);
	assert_int_equal(guest_frame_next("\xff\xff\xff\xff", 4, &v, &e), -1);
	buf_reset(&b);
	guest_frame_put(&b, GF_EVENT, 0, big, GUEST_BODY_MAX);
	assert_false(b.failed);
	guest_frame_put(&b, GF_EVENT, 0, big, GUEST_BODY_MAX + 1);
	assert_true(b.failed);
	buf_free(&b);
}

static void test_paths(void **state)
{
	static const char *const good[] = { "a", "a/b", ".hidden", "a..b", "a/...", "\xc3\xa9.txt", "a b" };
	static const char *const bad[] = { "", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\nb", "\xff", "\xc0\xaf",
		"a/\x7f" };
	char deep[GUEST_PATH_MAX + 2];

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		if (!guest_path_ok(good[i]))
			fail_msg("refused %s", good[i]);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		if (guest_path_ok(bad[i]))
			fail_msg("accepted %s", bad[i]);
	for (size_t i = 0; i < sizeof(deep) - 1; i++)
		deep[i] = i % 2 ? '/' : 'a';
	deep[sizeof(deep) - 1] = '\0';
	assert_false(guest_path_ok(deep));
}

/* What a guest says of itself stands on the timeline as the host's word, so it can be nothing but what our agent says. */
static void test_ack_texts(void **state)
{
	static const struct {
		const char *workdir, *boot_id;
		bool good;
	} cases[] = {
		{ "/tmp/a-b_c.d/scratch", "0123abcd-ef", true },
		{ "", "a", false },
		{ "tmp", "a", false },
		{ "/tmp/a b", "a", false },
		{ "/tmp/\"", "a", false },
		{ "/tmp/\x1b[2J", "a", false },
		{ "/tmp/\xc3\xa9", "a", false },
		{ "/tmp", "", false },
		{ "/tmp", "xyz", false },
		{ "/tmp", "a\n", false },
		{ "/tmp", "\xf0\x9f\x98\x80", false },
	};
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		struct guest_setup_ack a = { .reseeded = true }, out;
		struct buf b = BUF_INIT(1024);

		assert_true(text_copy(a.workdir, sizeof a.workdir, cases[i].workdir));
		assert_true(text_copy(a.boot_id, sizeof a.boot_id, cases[i].boot_id));
		guest_setup_ack_encode(&a, &b);
		assert_int_equal(guest_setup_ack_decode(b.data, b.len, &out, &e), cases[i].good ? 0 : -1);
		buf_free(&b);
	}
}

static void test_join_token(void **state)
{
	struct join_token t = { .addresses = "tls+tcp://10.0.0.1:7443", .ca_pem = "-----BEGIN", .expires_ms = 77 }, back;
	struct buf b = BUF_INIT(8192);
	struct err e;

	(void)state;
	id_secret_make("ephnt_", t.secret);
	assert_true(join_token_print(&t, &b));
	assert_int_equal(join_token_parse(buf_cstr(&b), &back, &e), 0);
	assert_string_equal(back.secret, t.secret);
	assert_string_equal(back.addresses, t.addresses);
	assert_string_equal(back.ca_pem, t.ca_pem);
	assert_int_equal(back.expires_ms, 77);
	b.data[b.len - 1] = '!';
	assert_int_equal(join_token_parse(buf_cstr(&b), &back, &e), -1);
	assert_int_equal(e.code, ERR_INVALID);
	assert_int_equal(join_token_parse("ephnt_short.x", &back, &e), -1);
	assert_int_equal(join_token_parse("", &back, &e), -1);
	buf_free(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_round_trip),
		cmocka_unit_test(test_cut_and_trailing),
		cmocka_unit_test(test_mutations),
		cmocka_unit_test(test_frames),
		cmocka_unit_test(test_paths),
		cmocka_unit_test(test_ack_texts),
		cmocka_unit_test(test_join_token),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
