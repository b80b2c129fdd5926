/*
 * Where brokers may connect to: the programs run in an interpreter of the few instructions that they use, held against
 * common/netaddr.h, and loaded into the kernel where the test may.
 */
/* link: noded_core */
#include "unit.h"

#include "jail/egress.h"

#include <arpa/inet.h>
#include <linux/bpf.h>
#include <unistd.h>

static struct bpf_insn insns[EGRESS_INSNS_MAX];

static uint32_t alu(const struct bpf_insn *in, uint32_t dst, uint32_t src)
{
	uint32_t value = in->code & BPF_X ? src : (uint32_t)in->imm;

	switch (in->code & 0xf0) {
	case BPF_MOV: return value;
	case BPF_AND: return dst & value;
	case BPF_END: return in->imm == 16 ? htons((uint16_t)dst) : htonl(dst);
	default: fail_msg("instruction %x", in->code); return 0;
	}
}

static bool run(size_t n, const struct bpf_sock_addr *ctx)
{
	uint64_t r[11] = { 0 };
	size_t steps = 0;

	for (size_t pc = 0; pc < n; pc++) {
		const struct bpf_insn *in = &insns[pc];

		assert_true(++steps <= n && in->dst_reg < 11 && in->src_reg < 11);
		switch (in->code & 0x07) {
		case BPF_LDX: {
			uint32_t word;

			assert_true(in->src_reg == 1 && in->off >= 0 && (size_t)in->off + 4 <= sizeof(*ctx));
			memcpy(&word, (const uint8_t *)ctx + in->off, sizeof(word));
			r[in->dst_reg] = word;
			break;
		}
		case BPF_ALU: r[in->dst_reg] = alu(in, (uint32_t)r[in->dst_reg], (uint32_t)r[in->src_reg]); break;
		case BPF_ALU64: r[in->dst_reg] = (uint64_t)(int64_t)in->imm; break;
		case BPF_JMP32:
			assert_int_equal(in->code & 0xf8, BPF_JNE);
			assert_true(in->off >= 0);
			if ((uint32_t)r[in->dst_reg] != (uint32_t)in->imm)
				pc += (size_t)in->off;
			break;
		case BPF_JMP:
			if (in->code == (BPF_JMP | BPF_EXIT))
				return r[0] == 1;
			assert_int_equal(in->code, BPF_JMP | BPF_JA);
			assert_true(in->off >= 0);
			pc += (size_t)in->off;
			break;
		default: fail_msg("instruction %x", in->code);
		}
	}
	fail_msg("the program runs out of its end");
	return false;
}

static bool may(const struct egress_rules *r, const char *address, uint16_t port)
{
	struct bpf_sock_addr ctx = { .user_port = htons(port) };
	uint8_t v6[16];
	size_t n4, n6;
	bool send, connect;

	if (inet_pton(AF_INET, address, &ctx.user_ip4) == 1) {
		n4 = egress_program(r, EGRESS_CONNECT4, -1, insns, EGRESS_INSNS_MAX);
		assert_true(n4 > 0);
		connect = run(n4, &ctx);
		n4 = egress_program(r, EGRESS_SEND4, -1, insns, EGRESS_INSNS_MAX);
		send = run(n4, &ctx);
	} else {
		assert_int_equal(inet_pton(AF_INET6, address, v6), 1);
		memcpy(ctx.user_ip6, v6, sizeof(v6));
		n6 = egress_program(r, EGRESS_CONNECT6, -1, insns, EGRESS_INSNS_MAX);
		assert_true(n6 > 0);
		connect = run(n6, &ctx);
		n6 = egress_program(r, EGRESS_SEND6, -1, insns, EGRESS_INSNS_MAX);
		send = run(n6, &ctx);
	}
	assert_int_equal(send, connect);
	return connect;
}

static const char *const never[] = { "0.0.0.0", "127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255",
	"192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200", "224.0.0.1", "255.255.255.255", "192.0.2.1",
	"198.18.0.1", "240.0.0.1", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "fe80::1",
	"fc00::1", "fd00:ec2::254", "ff02::1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1", "2001:db8::1", "3fff::1", "::7f00:1",
	"fec0::1" };
static const char *const good[] = { "8.8.8.8", "1.1.1.1", "9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0",
	"223.255.255.255", "169.253.255.255", "126.255.255.255", "128.0.0.0", "2606:4700::1111", "2001:4860:4860::8888",
	"::ffff:8.8.8.8", "2003::1" };

static void global_only(void **state)
{
	const struct egress_rules open = { .global = true }, shut = { .global = false };

	(void)state;
	for (size_t i = 0; i < COUNT(never); i++)
		if (may(&open, never[i], 443))
			fail_msg("%s may be dialled", never[i]);
	for (size_t i = 0; i < COUNT(good); i++) {
		if (!may(&open, good[i], 443))
			fail_msg("%s may not be dialled", good[i]);
		assert_false(may(&shut, good[i], 443));
	}
}

/* The kernel's judge and the broker's own agree on what the tables say, at every edge and at random. */
static void as_netaddr(void **state)
{
	struct egress_rules rules = { .global = true };
	size_t n4 = egress_program(&rules, EGRESS_CONNECT4, -1, insns, EGRESS_INSNS_MAX);
	uint32_t seed = 7;

	(void)state;
	for (int i = 0; i < 200000; i++) {
		struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(443) };
		struct bpf_sock_addr ctx = { .user_port = htons(443) };
		uint32_t a;

		seed = seed * 1664525 + 1013904223;
		a = seed ^ seed >> 15;
		if (i < (int)net_special4_count * 4) {
			const struct net_range *r = &net_special4[i / 4];
			uint32_t last = r->net | ~(UINT32_MAX << (32 - r->bits));
			const uint32_t edges[4] = { r->net, last, r->net - 1, last + 1 };

			a = edges[i % 4];
		}
		in.sin_addr.s_addr = ctx.user_ip4 = htonl(a);
		assert_int_equal(run(n4, &ctx), net_is_global((const struct sockaddr *)&in));
	}
	n4 = egress_program(&rules, EGRESS_CONNECT6, -1, insns, EGRESS_INSNS_MAX);
	for (int i = 0; i < 200000; i++) {
		static const uint32_t heads[] = { 0x20010000, 0x200101ff, 0x20010200, 0x20010db8, 0x20010db9, 0x20020000,
			0x2002ffff, 0x20030000, 0x3fff0000, 0x3fff0fff, 0x3fff1000, 0x40000000, 0x1fffffff, 0xfe800000, 0xfc000000,
			0 };
		struct sockaddr_in6 in = { .sin6_family = AF_INET6, .sin6_port = htons(443) };
		struct bpf_sock_addr ctx = { .user_port = htons(443) };

		for (int w = 0; w < 4; w++) {
			seed = seed * 1664525 + 1013904223;
			ctx.user_ip6[w] = htonl(w == 0 && i % 2 ? heads[(unsigned int)i / 2 % COUNT(heads)] : seed ^ seed >> 15);
		}
		memcpy(&in.sin6_addr, ctx.user_ip6, 16);
		assert_int_equal(run(n4, &ctx), net_is_global((const struct sockaddr *)&in));
	}
}

static void own_addresses(void **state)
{
	struct egress_rules r = { .global = true };
	struct sockaddr_in in = { .sin_family = AF_INET };
	struct err e;

	(void)state;
	assert_int_equal(inet_pton(AF_INET6, "::ffff:8.8.8.8", r.own.addr[0]), 1);
	assert_int_equal(inet_pton(AF_INET6, "2606:4700::1111", r.own.addr[1]), 1);
	r.own.count = 2;
	assert_false(may(&r, "8.8.8.8", 443));
	assert_false(may(&r, "::ffff:8.8.8.8", 443));
	assert_false(may(&r, "2606:4700::1111", 443));
	assert_true(may(&r, "8.8.8.9", 443));
	assert_true(may(&r, "2606:4700::1112", 443));
	assert_true(may(&r, "2606:4701::1111", 443));
	assert_int_equal(inet_pton(AF_INET, "8.8.8.8", &in.sin_addr), 1);
	assert_true(net_own_has(&r.own, (const struct sockaddr *)&in));
	in.sin_addr.s_addr ^= htonl(1);
	assert_false(net_own_has(&r.own, (const struct sockaddr *)&in));
	/* As many as there may be still make a program. */
	r.own.count = NET_OWN_MAX;
	assert_false(may(&r, "8.8.8.8", 443));
	assert_ok(net_own_read(&r.own, &e));
	assert_true(r.own.count <= NET_OWN_MAX);
}

static void listed_providers(void **state)
{
	struct egress_rules r = { .global = true };
	struct err e;

	(void)state;
	assert_ok(egress_add_listed(&r, "http://127.0.0.1:8090/v1", &e));
	assert_true(may(&r, "127.0.0.1", 8090));
	assert_true(may(&r, "::ffff:127.0.0.1", 8090));
	assert_false(may(&r, "127.0.0.1", 8091));
	assert_false(may(&r, "127.0.0.2", 8090));
	assert_false(may(&r, "::1", 8090));
	r.count = 0;
	assert_ok(egress_add_listed(&r, "https://user@[fd00::7]:8443/v1", &e));
	assert_true(may(&r, "fd00::7", 8443));
	assert_false(may(&r, "fd00::8", 8443));
	assert_false(may(&r, "fd00::7", 443));
	r.count = 0;
	assert_ok(egress_add_listed(&r, "https://models.internal/v1", &e));
	assert_true(may(&r, "10.1.2.3", 443) && may(&r, "fd12::1", 443) && may(&r, "127.0.0.1", 443) && may(&r, "::1", 443));
	assert_false(may(&r, "10.1.2.3", 80));
	assert_false(may(&r, "169.254.169.254", 443) || may(&r, "fe80::1", 443) || may(&r, "224.0.0.1", 443) ||
			may(&r, "0.0.0.0", 443));
	r.count = 0;
	assert_ok(egress_add_listed(&r, "http://LOCALHOST:81", &e));
	assert_true(may(&r, "127.0.0.1", 81) && may(&r, "::1", 81));
	assert_false(may(&r, "10.0.0.1", 81) || may(&r, "fd00::1", 81));
	r.count = 0;
	assert_ok(egress_add_listed(&r, "http://plain", &e));
	assert_true(may(&r, "10.0.0.1", 80));
	/* Even before there is anything global. */
	r.global = false;
	assert_true(may(&r, "10.0.0.1", 80));
	assert_false(may(&r, "8.8.8.8", 80));
}

static void listed_refused(void **state)
{
	static const char *const bad[] = { "", "127.0.0.1:80", "http://", "http:///v1", "http://a:0/", "http://a:65536/",
		"http://a:9x/", "http://[::1", "http://a:99999999999999999999/" };
	struct egress_rules r = { .global = true };
	struct err e;

	(void)state;
	for (size_t i = 0; i < COUNT(bad); i++) {
		assert_int_equal(egress_add_listed(&r, bad[i], &e), -1);
		assert_int_equal(r.count, 0);
	}
	for (size_t i = 0; i < EGRESS_RULES_MAX; i++)
		assert_ok(egress_add_listed(&r, "http://10.0.0.1:80/", &e));
	assert_int_equal(egress_add_listed(&r, "http://10.0.0.1:80/", &e), -1);
	/* Rules can be as many as they may and the program still fits. */
	for (size_t i = 0; i < EGRESS_RULES_MAX; i++)
		r.rule[i].kind = EGRESS_PRIVATE;
	r.own.count = NET_OWN_MAX;
	assert_false(may(&r, "10.0.0.1", 81));
}

static void resolvers(void **state)
{
	struct egress_rules r = { .global = false };
	struct err e;

	(void)state;
	assert_ok(egress_add_resolvers(&r,
			"# nameserver 9.9.9.9\nsearch x\nnameserver 127.0.0.53\n nameserver\t10.0.0.2 # us\nnameserver "
			"fe80::1%eth0\nnameserverx 1.2.3.4\nnameserver nonsense",
			&e));
	assert_int_equal(r.count, 3);
	assert_true(may(&r, "127.0.0.53", 53) && may(&r, "10.0.0.2", 53) && may(&r, "fe80::1", 53));
	assert_false(may(&r, "127.0.0.53", 80) || may(&r, "9.9.9.9", 53) || may(&r, "1.2.3.4", 53));
	r.count = 0;
	assert_ok(egress_add_resolvers(&r, "", &e));
	assert_true(may(&r, "127.0.0.1", 53) && may(&r, "::1", 53));
	r.count = 0;
	assert_ok(egress_add_resolvers(&r,
			"nameserver 10.0.0.1\nnameserver 10.0.0.2\nnameserver 10.0.0.3\nnameserver 10.0.0.4\nnameserver 10.0.0.5\n"
			"nameserver 10.0.0.6\nnameserver 10.0.0.7\nnameserver 10.0.0.8\nnameserver 10.0.0.9\n",
			&e));
	assert_int_equal(r.count, 8);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(global_only),
		cmocka_unit_test(as_netaddr),
		cmocka_unit_test(own_addresses),
		cmocka_unit_test(listed_providers),
		cmocka_unit_test(listed_refused),
		cmocka_unit_test(resolvers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
