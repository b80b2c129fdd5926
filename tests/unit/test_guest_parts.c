/* Arguments of tool calls, the conversation, the seccomp program, the kernel command line: the agent's pure parts. */
/* link: guestparts */
#include "guest-agent/args.h"
#include "guest-agent/fsutil.h"
#include "guest-agent/history.h"
#include "guest-agent/seccomp.h"
#include "guest-agent/transport.h"
#include "unit.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <sys/socket.h>
#include <sys/syscall.h>

/* --- args */

static void args_that_are_wrong(void **state)
{
	static const struct {
		enum tool tool;
		const char *text, *said;
	} cases[] = {
		{ TOOL_SHELL, "", "command is missing" },
		{ TOOL_SHELL, "{", "not valid JSON" },
		{ TOOL_SHELL, "\"ls\"", "of type string" },
		{ TOOL_SHELL, "{\"command\":null}", "must be of type string, not null" },
		{ TOOL_SHELL, "{\"command\":\"\"}", "0 bytes; 1 to" },
		{ TOOL_SHELL, "{\"command\":\"a\\u0000b\"}", "not valid JSON" },
		{ TOOL_SHELL, "{\"command\":\"a\",\"command\":\"b\"}", "not valid JSON" },
		{ TOOL_SHELL, "{\"command\":\"a\",\"timeout_seconds\":0}", "1 to 120" },
		{ TOOL_SHELL, "{\"command\":\"a\",\"timeout_seconds\":1.5}", "must be of type integer" },
		{ TOOL_SHELL, "{\"command\":\"a\",\"timeout_seconds\":\"5\"}", "must be of type integer" },
		{ TOOL_SHELL, "{\"command\":\"a\",\"cwd\":\"/\"}", "no argument named cwd" },
		{ TOOL_READ_FILE, "{\"path\":\"x\",\"limit\":262145}", "1 to 262144" },
		{ TOOL_READ_FILE, "{\"path\":\"x\",\"offset\":-1}", "0 to" },
		{ TOOL_WRITE_FILE, "{\"path\":\"x\"}", "content is missing" },
		{ TOOL_LIST_FILES, "{\"path\":7}", "must be of type string" },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		struct buf why = BUF_INIT(4096);
		struct tool_args a;

		assert_false(args_parse(cases[i].tool, cases[i].text, &a, &why));
		assert_non_null(strstr(buf_cstr(&why), cases[i].said));
		assert_non_null(strstr(buf_cstr(&why), tool_info(cases[i].tool)->name));
		args_free(&a);
		buf_free(&why);
	}
}

static void args_that_are_right(void **state)
{
	struct buf why = BUF_INIT(4096);
	struct tool_args a;

	(void)state;
	assert_true(args_parse(TOOL_SHELL, "{\"command\":\"ls\"}", &a, &why));
	assert_string_equal(a.command, "ls");
	assert_int_equal(a.timeout_seconds, SHELL_LIMIT_SECONDS);
	args_free(&a);
	assert_true(args_parse(TOOL_READ_FILE, "{\"path\":\"p\",\"offset\":5,\"limit\":null}", &a, &why));
	assert_int_equal(a.offset, 5);
	assert_int_equal(a.limit, READ_LIMIT_MAX);
	args_free(&a);
	assert_true(args_parse(TOOL_WRITE_FILE, "{\"content\":\"\",\"path\":\"p\"}", &a, &why));
	assert_int_equal(a.content_len, 0);
	args_free(&a);
	assert_true(args_parse(TOOL_LIST_FILES, "", &a, &why));
	assert_string_equal(a.path, ".");
	args_free(&a);
	assert_int_equal(why.len, 0);
	buf_free(&why);
}

/* --- history */

static char *text_of(size_t n)
{
	char *s = malloc(n + 1);

	assert_non_null(s);
	memset(s, 't', n);
	s[n] = '\0';
	return s;
}

static void add_turn(struct history *h, uint32_t calls, size_t bytes, const char *arguments)
{
	struct model_reply r = {
		.status = MODEL_OK, .content = strdup(""), .calls = calloc(calls, sizeof *r.calls), .call_count = calls
	};
	struct err e;

	for (uint32_t i = 0; i < calls; i++)
		r.calls[i] = (struct model_tool_call){ strdup("id"), strdup("shell"), strdup(arguments) };
	assert_int_equal(history_add_reply(h, &r, &e), 0);
	assert_null(r.calls);
	for (uint32_t i = 0; i < calls; i++)
		assert_int_equal(history_add_result(h, "id", text_of(bytes), &e), 0);
}

static void begin(struct history *h)
{
	struct err e;

	history_init(h);
	assert_int_equal(history_add_fixed(h, ROLE_SYSTEM, "system", &e), 0);
	assert_int_equal(history_add_fixed(h, ROLE_USER, "user", &e), 0);
}

/* Each tool message follows an assistant's with as many calls, and the byte count is right. */
static void check_history(const struct history *h)
{
	size_t bytes = 0;
	uint32_t open = 0;

	assert_int_equal(h->messages[0].role, ROLE_SYSTEM);
	assert_int_equal(h->messages[1].role, ROLE_USER);
	for (uint32_t i = 0; i < h->count; i++) {
		const struct model_message *m = &h->messages[i];

		bytes += strlen(m->content) + strlen(m->tool_call_id) + 32;
		for (uint32_t k = 0; k < m->call_count; k++)
			bytes += strlen(m->calls[k].id) + strlen(m->calls[k].name) + strlen(m->calls[k].arguments) + 16;
		if (m->role == ROLE_TOOL) {
			assert_true(open > 0);
			open--;
		} else {
			assert_int_equal(open, 0);
			open = m->call_count;
		}
	}
	assert_int_equal(open, 0);
	assert_int_equal(bytes, h->bytes);
}

static void old_turns_are_dropped(void **state)
{
	struct history h;
	struct err e;

	(void)state;
	begin(&h);
	for (int i = 0; i < 40; i++) {
		add_turn(&h, 2, 150000, "{}");
		assert_int_equal(history_fit(&h, &e), 0);
		check_history(&h);
		assert_true(h.bytes <= HISTORY_BYTES_MAX);
	}
	assert_true(h.dropped > 25 && h.dropped < 35);
	history_free(&h);
}

static void too_many_messages(void **state)
{
	struct history h;
	struct err e;

	(void)state;
	begin(&h);
	for (int i = 0; i < 200; i++) {
		add_turn(&h, 64, 1, "{}");
		assert_int_equal(history_fit(&h, &e), 0);
		assert_true(h.count <= MODEL_MESSAGES_MAX);
	}
	check_history(&h);
	history_free(&h);
}

static void one_turn_alone_is_too_long(void **state)
{
	char *arguments = text_of(200000);
	struct history h;
	struct err e;

	(void)state;
	begin(&h);
	add_turn(&h, 1, 10, "{}");
	add_turn(&h, 20, 250000, arguments);
	assert_int_equal(history_fit(&h, &e), 0);
	check_history(&h);
	assert_int_equal(h.dropped, 1);
	assert_true(h.bytes <= HISTORY_BYTES_MAX);
	history_free(&h);
	free(arguments);
}

static void arguments_are_mended(void **state)
{
	static const char *const texts[] = { "", "x", "{\"a\":", "nothing like JSON" };

	(void)state;
	for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
		struct history h;

		begin(&h);
		add_turn(&h, 1, 1, texts[i]);
		history_mend_arguments(&h, 2);
		assert_string_equal(h.messages[2].calls[0].arguments, "{}");
		check_history(&h);
		history_free(&h);
	}
}

/* --- seccomp: a small interpreter of the instructions that the program uses */

static uint32_t filter(const struct seccomp_data *data)
{
	unsigned short n;
	const struct sock_filter *p = seccomp_program(&n);
	uint32_t a = 0;

	for (unsigned int at = 0; at < n; at++) {
		switch (p[at].code) {
		case BPF_LD | BPF_W | BPF_ABS: memcpy(&a, (const char *)data + p[at].k, sizeof a); break;
		case BPF_JMP | BPF_JEQ | BPF_K: at += a == p[at].k ? p[at].jt : p[at].jf; break;
		case BPF_JMP | BPF_JGE | BPF_K: at += a >= p[at].k ? p[at].jt : p[at].jf; break;
		case BPF_RET | BPF_K: return p[at].k;
		default: fail_msg("instruction %u", p[at].code);
		}
	}
	fail_msg("the program ends without a verdict");
	return 0;
}

static void filter_refuses(void **state)
{
	static const struct {
		int nr;
		uint32_t arch;
		uint64_t arg;
		uint32_t verdict;
	} cases[] = {
		{ SYS_socket, AUDIT_ARCH_X86_64, AF_VSOCK, SECCOMP_RET_ERRNO | EAFNOSUPPORT },
		{ SYS_socket, AUDIT_ARCH_X86_64, UINT64_C(0x100000000) + AF_VSOCK, SECCOMP_RET_ERRNO | EAFNOSUPPORT },
		{ SYS_socketpair, AUDIT_ARCH_X86_64, AF_VSOCK, SECCOMP_RET_ERRNO | EAFNOSUPPORT },
		{ SYS_socket, AUDIT_ARCH_X86_64, AF_PACKET, SECCOMP_RET_ERRNO | EPERM },
		{ SYS_socket, AUDIT_ARCH_X86_64, AF_UNIX, SECCOMP_RET_ALLOW },
		{ SYS_socket, AUDIT_ARCH_X86_64, AF_INET, SECCOMP_RET_ALLOW },
		{ SYS_socketpair, AUDIT_ARCH_X86_64, AF_UNIX, SECCOMP_RET_ALLOW },
		{ SYS_io_uring_setup, AUDIT_ARCH_X86_64, 0, SECCOMP_RET_ERRNO | ENOSYS },
		{ SYS_io_uring_enter, AUDIT_ARCH_X86_64, 0, SECCOMP_RET_ERRNO | ENOSYS },
		{ SYS_io_uring_register, AUDIT_ARCH_X86_64, 0, SECCOMP_RET_ERRNO | ENOSYS },
		{ SYS_bpf, AUDIT_ARCH_X86_64, 0, SECCOMP_RET_ERRNO | EPERM },
		{ SYS_socket + 0x40000000, AUDIT_ARCH_X86_64, AF_VSOCK, SECCOMP_RET_ERRNO | ENOSYS },
		{ 359, AUDIT_ARCH_I386, AF_VSOCK, SECCOMP_RET_ERRNO | ENOSYS },
		{ SYS_read, AUDIT_ARCH_I386, 0, SECCOMP_RET_ERRNO | ENOSYS },
		{ -1, AUDIT_ARCH_X86_64, 0, SECCOMP_RET_ERRNO | ENOSYS },
		{ SYS_execve, AUDIT_ARCH_X86_64, 0, SECCOMP_RET_ALLOW },
		{ SYS_clone3, AUDIT_ARCH_X86_64, 0, SECCOMP_RET_ALLOW },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		struct seccomp_data data = { .nr = cases[i].nr, .arch = cases[i].arch, .args = { cases[i].arg } };

		assert_int_equal(filter(&data), cases[i].verdict);
	}
}

/* --- kernel command line */

static void boot_options(void **state)
{
	char v[16];

	(void)state;
	assert_true(fs_boot_option("quiet eph.channel=virtio:a eph.bus=pci\n", "eph.channel", v, sizeof v));
	assert_string_equal(v, "virtio:a");
	assert_true(fs_boot_option("eph.bus=pci\n", "eph.bus", v, sizeof v));
	assert_string_equal(v, "pci");
	assert_true(fs_boot_option("x=1 x=2", "x", v, sizeof v));
	assert_string_equal(v, "2");
	assert_true(fs_boot_option("x=", "x", v, sizeof v));
	assert_string_equal(v, "");
	assert_false(fs_boot_option("xeph.bus=pci eph.busy=1 eph.bus", "eph.bus", v, sizeof v));
	assert_false(fs_boot_option("x=0123456789abcdef", "x", v, sizeof v));
	assert_false(fs_boot_option("", "x", v, sizeof v));
}

static void transports(void **state)
{
	static const char *const bad[] = { "", "virtio:", "virtio", "vsock:", "vsock:0", "vsock:x", "vsock:1:", "vsock:0:1",
		"vsock:1:2:3", "vsock:4294967295", "vsock:-1", "tcp:1", "vsock:1 2",
		"virtio:a-name-that-is-longer-than-any-port-of-virtio-serial-may-ever-have-one" };
	struct transport t;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		assert_int_equal(transport_parse(bad[i], &t, &e), -1);
		assert_non_null(strstr(e.text, "eph.channel="));
	}
	assert_int_equal(transport_parse("virtio:ephemeral.0", &t, &e), 0);
	assert_false(t.is_vsock);
	assert_string_equal(t.name, "ephemeral.0");
	assert_int_equal(transport_parse("vsock:1024", &t, &e), 0);
	assert_true(t.is_vsock && t.cid == 2 && t.port == 1024);
	assert_int_equal(transport_parse("vsock:1:4294967294", &t, &e), 0);
	assert_true(t.is_vsock && t.cid == 1 && t.port == 4294967294);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(args_that_are_wrong),
		cmocka_unit_test(args_that_are_right),
		cmocka_unit_test(old_turns_are_dropped),
		cmocka_unit_test(too_many_messages),
		cmocka_unit_test(one_turn_alone_is_too_long),
		cmocka_unit_test(arguments_are_mended),
		cmocka_unit_test(filter_refuses),
		cmocka_unit_test(boot_options),
		cmocka_unit_test(transports),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
