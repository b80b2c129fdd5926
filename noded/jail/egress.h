/*
 * Where a broker may connect to, held by the kernel: BPF programs on its v2 cgroup that judge every connect(2), and every datagram
 * with an address of its own, whatever the process has become. Allowed are global addresses (as common/netaddr.h has them) that are
 * not this host's own; besides, what the rules name.
 *
 * Keeper's, on its one thread; system calls of a few microseconds. The programs stay with the cgroup and go with it, whether or not
 * noded lives; attaching again replaces them without a gap.
 */
#ifndef NODED_JAIL_EGRESS_H
#define NODED_JAIL_EGRESS_H

#include "common/error.h"
#include "common/netaddr.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EGRESS_RULES_MAX 16

enum egress_kind {
	EGRESS_EXACT,    /* this address */
	EGRESS_LOOPBACK, /* 127.0.0.0/8 and ::1 */
	EGRESS_PRIVATE,  /* loopback, private networks, carrier NAT, unique local addresses, and this host's own; never link-local
			    (metadata services), multicast or broadcast */
};

struct egress_rule {
	enum egress_kind kind;
	uint8_t addr[16]; /* EGRESS_EXACT: as net_addr_bytes */
	uint16_t port;
};

struct egress_rules {
	bool global; /* false: nothing but what the rules name */
	struct net_own own;
	struct egress_rule rule[EGRESS_RULES_MAX];
	size_t count;
};

/* The host's resolvers, port 53, from the text of resolv.conf. */
int egress_add_resolvers(struct egress_rules *r, const char *resolv_conf, struct err *e) EPH_MUST_CHECK;
/* A provider that the operator listed: with an address in its URL that address and port; with a name, which the broker looks up,
 * its port on private addresses (localhost: on loopback). */
int egress_add_listed(struct egress_rules *r, const char *base_url, struct err *e) EPH_MUST_CHECK;

/* One program as the kernel takes it. Pure. */
struct bpf_insn;
enum egress_hook { EGRESS_CONNECT4, EGRESS_CONNECT6, EGRESS_SEND4, EGRESS_SEND6, EGRESS_HOOKS };
#define EGRESS_INSNS_MAX 8192
/* counter: descriptor of the map, -1 = does not count. Returns the number of instructions, 0 when they are too many. */
size_t egress_program(const struct egress_rules *r, enum egress_hook hook, int counter, struct bpf_insn *out, size_t max);

/* The counter of refused connects, shared by all. */
struct egress;
int egress_open(struct egress **out, struct err *e) EPH_MUST_CHECK;
void egress_free(struct egress *x);
uint64_t egress_refused(const struct egress *x);
int egress_attach(struct egress *x, int cgroup_fd, const struct egress_rules *r, struct err *e) EPH_MUST_CHECK;

#endif
