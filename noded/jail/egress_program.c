/*
 * Makes the programs of egress.h, instruction by instruction: there is no compiler for them on a host. Pure.
 *
 * Registers: r1 context, r2 IPv4 address or last word of an IPv6 one, r3 port, r4 scratch, r5, r7, r8 the first words of an IPv6
 * address; all in host order. Jumps go forward only, to the next rule or to one of two ends.
 */
#include "jail/egress.h"

#include <linux/bpf.h>
#include <string.h>

#define ENDS_MAX EGRESS_INSNS_MAX
#define ANY_FIELD(field) (int16_t) offsetof(struct bpf_sock_addr, field)

enum target { TO_ALLOW, TO_DENY };

struct maker {
	const struct egress_rules *rules;
	struct bpf_insn *at;
	size_t len, max;
	bool full;
	struct {
		uint16_t insn;
		uint8_t to;
	} ends[ENDS_MAX];
	size_t end_count;
};

static const struct net_range loopback4 = { 0x7f000000, 8 };
static const struct net_range private4[] = { { 0x7f000000, 8 }, { 0x0a000000, 8 }, { 0xac100000, 12 }, { 0xc0a80000, 16 },
	{ 0x64400000, 10 } };

static void put(struct maker *m, uint8_t code, uint8_t dst, uint8_t src, int16_t off, int32_t imm)
{
	if (m->len >= m->max) {
		m->full = true;
		return;
	}
	m->at[m->len++] = (struct bpf_insn){
		.code = code, .dst_reg = (uint8_t)(dst & 0xf), .src_reg = (uint8_t)(src & 0xf), .off = off, .imm = imm
	};
}

static void load(struct maker *m, uint8_t dst, int16_t field)
{
	put(m, BPF_LDX | BPF_MEM | BPF_W, dst, 1, field, 0);
}

static void to_host(struct maker *m, uint8_t reg, int32_t bits)
{
	put(m, BPF_ALU | BPF_END | BPF_TO_BE, reg, 0, 0, bits);
}

/* Skips `n` instructions unless reg holds the value. */
static void unless(struct maker *m, uint8_t reg, uint32_t value, int16_t n)
{
	put(m, BPF_JMP32 | BPF_JNE | BPF_K, reg, 0, n, (int32_t)value);
}

static void leave(struct maker *m, enum target to)
{
	if (m->len >= m->max || m->end_count >= ENDS_MAX) {
		m->full = true;
		return;
	}
	m->ends[m->end_count].insn = (uint16_t)m->len;
	m->ends[m->end_count++].to = (uint8_t)to;
	put(m, BPF_JMP | BPF_JA, 0, 0, 0, 0);
}

/* reg & mask == net -> leaves. */
static void in_range(struct maker *m, uint8_t reg, struct net_range r, enum target to)
{
	put(m, BPF_ALU | BPF_MOV | BPF_X, 4, reg, 0, 0);
	put(m, BPF_ALU | BPF_AND | BPF_K, 4, 0, 0, (int32_t)(UINT32_MAX << (32 - r.bits)));
	unless(m, 4, r.net, 1);
	leave(m, to);
}

static uint32_t word(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static bool is_4(const uint8_t a[16])
{
	return word(a) == 0 && word(a + 4) == 0 && word(a + 8) == 0xffff;
}

/* The address in the registers is this one -> leaves. */
static void equals(struct maker *m, const uint8_t a[16], bool v4, enum target to)
{
	if (v4) {
		unless(m, 2, word(a + 12), 1);
	} else {
		unless(m, 5, word(a), 4);
		unless(m, 7, word(a + 4), 3);
		unless(m, 8, word(a + 8), 2);
		unless(m, 2, word(a + 12), 1);
	}
	leave(m, to);
}

static void own(struct maker *m, bool v4, enum target to)
{
	for (size_t i = 0; i < m->rules->own.count; i++)
		if (is_4(m->rules->own.addr[i]) == v4)
			equals(m, m->rules->own.addr[i], v4, to);
}

static void class_rule(struct maker *m, enum egress_kind kind, bool v4)
{
	static const uint8_t loopback6[16] = { [15] = 1 };
	static const struct net_range unique_local6 = { 0xfc000000, 7 };

	if (!v4)
		equals(m, loopback6, false, TO_ALLOW);
	if (kind == EGRESS_LOOPBACK) {
		if (v4)
			in_range(m, 2, loopback4, TO_ALLOW);
		return;
	}
	if (v4)
		for (size_t i = 0; i < sizeof(private4) / sizeof(private4[0]); i++)
			in_range(m, 2, private4[i], TO_ALLOW);
	else
		in_range(m, 5, unique_local6, TO_ALLOW);
	own(m, v4, TO_ALLOW);
}

static void rules_of(struct maker *m, bool v4)
{
	for (size_t i = 0; i < m->rules->count; i++) {
		const struct egress_rule *r = &m->rules->rule[i];
		size_t skip = m->len;

		if (r->kind == EGRESS_EXACT && is_4(r->addr) != v4)
			continue;
		unless(m, 3, r->port, 0);
		if (r->kind == EGRESS_EXACT)
			equals(m, r->addr, v4, TO_ALLOW);
		else
			class_rule(m, r->kind, v4);
		if (!m->full)
			m->at[skip].off = (int16_t)(m->len - skip - 1);
	}
}

/* r2: the address. */
static void judge4(struct maker *m)
{
	rules_of(m, true);
	if (!m->rules->global) {
		leave(m, TO_DENY);
		return;
	}
	own(m, true, TO_DENY);
	for (size_t i = 0; i < net_special4_count; i++)
		in_range(m, 2, net_special4[i], TO_DENY);
	leave(m, TO_ALLOW);
}

/* r5 r7 r8 r2: the address. */
static void judge6(struct maker *m)
{
	static const struct net_range global6 = { 0x20000000, 3 };

	rules_of(m, false);
	if (!m->rules->global) {
		leave(m, TO_DENY);
		return;
	}
	own(m, false, TO_DENY);
	for (size_t i = 0; i < net_special6_count; i++)
		in_range(m, 5, net_special6[i], TO_DENY);
	in_range(m, 5, global6, TO_ALLOW);
	leave(m, TO_DENY);
}

static void load6(struct maker *m)
{
	static const uint8_t regs[4] = { 5, 7, 8, 2 };

	for (size_t i = 0; i < 4; i++) {
		load(m, regs[i], (int16_t)(ANY_FIELD(user_ip6) + 4 * (int16_t)i));
		to_host(m, regs[i], 32);
	}
}

static void say(struct maker *m, int32_t verdict)
{
	put(m, BPF_ALU64 | BPF_MOV | BPF_K, 0, 0, 0, verdict);
	put(m, BPF_JMP | BPF_EXIT, 0, 0, 0, 0);
}

/* Sends the jumps to this end here; false when there are none: the kernel takes no code that is never reached. */
static bool arrive(struct maker *m, enum target to)
{
	bool any = false;

	for (size_t i = 0; i < m->end_count && !m->full; i++)
		if (m->ends[i].to == to) {
			m->at[m->ends[i].insn].off = (int16_t)(m->len - m->ends[i].insn - 1);
			any = true;
		}
	return any;
}

static void finish(struct maker *m, int counter)
{
	if (arrive(m, TO_ALLOW))
		say(m, 1);
	if (!arrive(m, TO_DENY))
		return;
	if (counter >= 0) {
		put(m, BPF_LD | BPF_IMM | BPF_DW, 1, BPF_PSEUDO_MAP_VALUE, 0, counter);
		put(m, 0, 0, 0, 0, 0);
		put(m, BPF_ALU64 | BPF_MOV | BPF_K, 2, 0, 0, 1);
		put(m, BPF_STX | BPF_ATOMIC | BPF_DW, 1, 2, 0, BPF_ADD);
	}
	say(m, 0);
}

size_t egress_program(const struct egress_rules *r, enum egress_hook hook, int counter, struct bpf_insn *out, size_t max)
{
	static struct maker m; /* keeper has one thread, and this is long */

	memset(&m, 0, sizeof(m));
	m.rules = r;
	m.at = out;
	m.max = max;
	load(&m, 3, ANY_FIELD(user_port));
	to_host(&m, 3, 16);
	if (hook == EGRESS_CONNECT4 || hook == EGRESS_SEND4) {
		load(&m, 2, ANY_FIELD(user_ip4));
		to_host(&m, 2, 32);
		judge4(&m);
	} else {
		size_t first;

		load6(&m);
		/* IPv4 in IPv6's clothes is judged as IPv4. */
		unless(&m, 5, 0, 3);
		unless(&m, 7, 0, 2);
		unless(&m, 8, 0xffff, 1);
		first = m.len;
		put(&m, BPF_JMP | BPF_JA, 0, 0, 0, 0);
		judge6(&m);
		if (!m.full)
			m.at[first].off = (int16_t)(m.len - first - 1);
		judge4(&m);
	}
	finish(&m, counter);
	return m.full || m.len > INT16_MAX ? 0 : m.len;
}
