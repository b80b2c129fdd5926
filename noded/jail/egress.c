/* Rules, loading and attaching of the connect filter (egress.h). Keeper's, root, one thread. */
#include "jail/egress.h"

#include "common/text.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/bpf.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DNS_PORT 53
#define RESOLVERS_MAX 8 /* more than any resolver reads */

struct egress {
	int counter; /* array map of one u64 */
	struct bpf_insn *insns;
};

static const uint32_t attach_types[EGRESS_HOOKS] = { BPF_CGROUP_INET4_CONNECT, BPF_CGROUP_INET6_CONNECT, BPF_CGROUP_UDP4_SENDMSG,
	BPF_CGROUP_UDP6_SENDMSG };

static long bpf(int command, union bpf_attr *attr)
{
	return syscall(SYS_bpf, command, attr, sizeof(*attr));
}

/* --- rules -------------------------------------------------------------------------------------------------------------------- */

static int add(struct egress_rules *r, const struct egress_rule *rule, struct err *e)
{
	if (r->count >= EGRESS_RULES_MAX)
		return err_set(e, ERR_LIMIT, "more than %d exceptions of the connect filter", EGRESS_RULES_MAX);
	r->rule[r->count++] = *rule;
	return 0;
}

/* A literal address without brackets; an IPv6 zone is left out. */
static bool parse_literal(const char *text, uint8_t out[16])
{
	static const uint8_t mapped[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff };
	char copy[INET6_ADDRSTRLEN + 1];

	if (!text_fmt(copy, sizeof(copy), "%.*s", (int)strcspn(text, "%"), text))
		return false;
	memcpy(out, mapped, sizeof(mapped));
	return inet_pton(AF_INET, copy, out + sizeof(mapped)) == 1 || inet_pton(AF_INET6, copy, out) == 1;
}

static int add_resolver(struct egress_rules *r, const char *address, struct err *e)
{
	struct egress_rule rule = { .kind = EGRESS_EXACT, .port = DNS_PORT };

	return parse_literal(address, rule.addr) ? add(r, &rule, e) : 0;
}

int egress_add_resolvers(struct egress_rules *r, const char *resolv_conf, struct err *e)
{
	static const char key[] = "nameserver";
	size_t found = 0;

	for (const char *line = resolv_conf; *line && found < RESOLVERS_MAX; line += *line == '\n') {
		char address[64];
		size_t n = strcspn(line, "\n"), at = strspn(line, " \t");

		if (strncmp(line + at, key, sizeof(key) - 1) == 0 &&
				(line[at + sizeof(key) - 1] == ' ' || line[at + sizeof(key) - 1] == '\t')) {
			at += sizeof(key) - 1;
			at += strspn(line + at, " \t");
			if (text_fmt(address, sizeof(address), "%.*s", (int)strcspn(line + at, " \t\r\n;#"), line + at)) {
				if (add_resolver(r, address, e))
					return -1;
				found++;
			}
		}
		line += n;
	}
	/* What the resolver asks when it is told of none. */
	if (found == 0)
		return add_resolver(r, "127.0.0.1", e) || add_resolver(r, "::1", e) ? -1 : 0;
	return 0;
}

/* scheme://[user@]host[:port]/... */
static int parse_url(const char *url, char *host, size_t size, uint16_t *port, struct err *e)
{
	const char *at = strstr(url, "://"), *end, *user;
	size_t n;
	unsigned long number = 0;

	if (!at)
		return err_set(e, ERR_INVALID, "the provider's URL has no scheme");
	*port = strncmp(url, "http:", 5) == 0 ? 80 : 443;
	at += 3;
	end = at + strcspn(at, "/?#");
	user = memchr(at, '@', (size_t)(end - at));
	at = user ? user + 1 : at;
	if (*at == '[') {
		at++;
		n = strcspn(at, "]");
		if (at + n >= end)
			return err_set(e, ERR_INVALID, "the provider's URL has no host");
	} else {
		n = strcspn(at, ":/?#");
	}
	if (n == 0 || !text_fmt(host, size, "%.*s", (int)n, at))
		return err_set(e, ERR_INVALID, "the provider's URL has no host");
	at += n;
	at += *at == ']';
	if (*at != ':' || at + 1 >= end)
		return 0;
	for (at++; at < end && number <= UINT16_MAX; at++) {
		if (*at < '0' || *at > '9')
			return err_set(e, ERR_INVALID, "the provider's URL has no port that is a number");
		number = 10 * number + (unsigned long)(*at - '0');
	}
	if (number == 0 || number > UINT16_MAX)
		return err_set(e, ERR_INVALID, "the provider's URL has no port from 1 to 65535");
	*port = (uint16_t)number;
	return 0;
}

int egress_add_listed(struct egress_rules *r, const char *base_url, struct err *e)
{
	struct egress_rule rule = { .kind = EGRESS_PRIVATE };
	char host[256];

	if (parse_url(base_url, host, sizeof(host), &rule.port, e))
		return -1;
	if (parse_literal(host, rule.addr))
		rule.kind = EGRESS_EXACT;
	else if (strcasecmp(host, "localhost") == 0)
		rule.kind = EGRESS_LOOPBACK;
	return add(r, &rule, e);
}

/* --- the kernel --------------------------------------------------------------------------------------------------------------- */

int egress_open(struct egress **out, struct err *e)
{
	union bpf_attr attr = { .map_type = BPF_MAP_TYPE_ARRAY, .key_size = 4, .value_size = 8, .max_entries = 1 };
	struct egress *x = calloc(1, sizeof(*x));

	*out = NULL;
	if (!x)
		return err_set(e, ERR_NOMEM, "no memory");
	x->insns = calloc(EGRESS_INSNS_MAX, sizeof(*x->insns));
	x->counter = x->insns ? (int)bpf(BPF_MAP_CREATE, &attr) : -1;
	if (x->counter < 0) {
		if (x->insns)
			err_set_errno(e, "this kernel gives noded no BPF map for the connect filter (CONFIG_BPF_SYSCALL, CAP_BPF)");
		else
			err_set(e, ERR_NOMEM, "no memory");
		egress_free(x);
		return -1;
	}
	*out = x;
	return 0;
}

void egress_free(struct egress *x)
{
	if (!x)
		return;
	if (x->counter >= 0)
		close(x->counter);
	free(x->insns);
	free(x);
}

uint64_t egress_refused(const struct egress *x)
{
	uint32_t key = 0;
	uint64_t value = 0;
	union bpf_attr attr = { .map_fd = 0 };

	attr.map_fd = (uint32_t)x->counter;
	attr.key = (uintptr_t)&key;
	attr.value = (uintptr_t)&value;
	return bpf(BPF_MAP_LOOKUP_ELEM, &attr) == 0 ? value : 0;
}

static int load_program(struct egress *x, const struct egress_rules *r, enum egress_hook hook, struct err *e)
{
	static const char license[] = "GPL";
	size_t n = egress_program(r, hook, x->counter, x->insns, EGRESS_INSNS_MAX);
	union bpf_attr attr = { .prog_type = BPF_PROG_TYPE_CGROUP_SOCK_ADDR };
	int fd;

	if (n == 0)
		return err_set(e, ERR_LIMIT, "the connect filter is too long");
	attr.insn_cnt = (uint32_t)n;
	attr.insns = (uintptr_t)x->insns;
	attr.license = (uintptr_t)license;
	attr.expected_attach_type = attach_types[hook];
	fd = (int)bpf(BPF_PROG_LOAD, &attr);
	return fd < 0 ? err_set_errno(e, "load the connect filter (CONFIG_CGROUP_BPF, Linux 5.7 or newer)") : fd;
}

int egress_attach(struct egress *x, int cgroup_fd, const struct egress_rules *r, struct err *e)
{
	for (int hook = 0; hook < EGRESS_HOOKS; hook++) {
		union bpf_attr attr = { .target_fd = 0 };
		int fd = load_program(x, r, (enum egress_hook)hook, e);

		if (fd < 0)
			return -1;
		attr.target_fd = (uint32_t)cgroup_fd;
		attr.attach_bpf_fd = (uint32_t)fd;
		attr.attach_type = attach_types[hook];
		if (bpf(BPF_PROG_ATTACH, &attr) != 0) {
			err_set_errno(e, "attach the connect filter to the broker's cgroup");
			close(fd);
			return -1;
		}
		close(fd);
	}
	return 0;
}
