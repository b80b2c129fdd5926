/*
 * Which addresses may be dialled, against a list that is written and read in another way: as text, by inet_pton, bit by bit. An
 * address of IPv6 that carries one of IPv4 is never better than that one. Text of an address is read back as the same address.
 */
/* reads: common/netaddr.c */
/* reached: 93 % of lines, 92 % of branches; the rest is families that are neither */
#include "fuzz.h"

#include "config.h"
#include "netaddr.h"

#include <arpa/inet.h>
#include <netinet/in.h>

static bool inside(const uint8_t *a, int family, const char *net, int bits)
{
	uint8_t n[16];

	must(inet_pton(family, net, n) == 1);
	for (int i = 0; i < bits; i++)
		if (((a[i / 8] ^ n[i / 8]) >> (7 - i % 8)) & 1)
			return false;
	return true;
}

static bool global4(const uint8_t a[4])
{
	static const struct {
		const char *net;
		int bits;
	} no[] = { { "0.0.0.0", 8 }, { "10.0.0.0", 8 }, { "100.64.0.0", 10 }, { "127.0.0.0", 8 }, { "169.254.0.0", 16 },
		{ "172.16.0.0", 12 }, { "192.0.0.0", 24 }, { "192.0.2.0", 24 }, { "192.88.99.0", 24 }, { "192.168.0.0", 16 },
		{ "198.18.0.0", 15 }, { "198.51.100.0", 24 }, { "203.0.113.0", 24 }, { "224.0.0.0", 3 } };

	for (size_t i = 0; i < sizeof(no) / sizeof(no[0]); i++)
		if (inside(a, AF_INET, no[i].net, no[i].bits))
			return false;
	return true;
}

static bool global6(const uint8_t a[16])
{
	if (inside(a, AF_INET6, "::ffff:0:0", 96))
		return global4(a + 12);
	return inside(a, AF_INET6, "2000::", 3) && !inside(a, AF_INET6, "2001::", 23) && !inside(a, AF_INET6, "2001:db8::", 32) &&
	       !inside(a, AF_INET6, "2002::", 16) && !inside(a, AF_INET6, "3fff::", 20);
}

static void check(const struct sockaddr *sa, const char *host, uint16_t port)
{
	char text[64], back[128];
	uint16_t read;
	struct err e;

	must(net_addr_port(sa) == port);
	net_addr_text(sa, text);
	must(config_addr(text, back, sizeof(back), &read, &e) == 0);
	must(read == port && strcmp(back, host) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	char host[INET6_ADDRSTRLEN];
	uint16_t port;

	if (n < 6)
		return 0;
	port = (uint16_t)(p[0] << 8 | p[1]);
	p += 2;
	if (n >= 18) {
		struct sockaddr_in6 in6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };

		memcpy(&in6.sin6_addr, p, 16);
		must(inet_ntop(AF_INET6, &in6.sin6_addr, host, sizeof(host)));
		must(net_is_global((struct sockaddr *)&in6) == global6(p));
		check((struct sockaddr *)&in6, host, port);
	} else {
		struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(port) };
		struct sockaddr_in6 mapped = { .sin6_family = AF_INET6, .sin6_addr.s6_addr = { [10] = 0xff, [11] = 0xff } };

		memcpy(&in.sin_addr, p, 4);
		memcpy(mapped.sin6_addr.s6_addr + 12, p, 4);
		must(inet_ntop(AF_INET, &in.sin_addr, host, sizeof(host)));
		must(net_is_global((struct sockaddr *)&in) == global4(p));
		must(net_is_global((struct sockaddr *)&mapped) == global4(p));
		check((struct sockaddr *)&in, host, port);
	}
	return 0;
}
