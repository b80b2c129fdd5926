/* Judges socket addresses. Pure and thread-safe; asked before every outward connection, so anything unknown is refused. */
#include "netaddr.h"

#include "text.h"

#include <arpa/inet.h>
#include <netinet/in.h>

struct range4 {
	uint32_t net;
	int bits;
};

/* What IANA lists as not globally reachable, and what only looks reachable (relay anycast). */
static const struct range4 special4[] = {
	{ 0x00000000, 8 },  /* this network */
	{ 0x0a000000, 8 },  /* private */
	{ 0x64400000, 10 }, /* carrier NAT; also metadata services */
	{ 0x7f000000, 8 },  /* loopback */
	{ 0xa9fe0000, 16 }, /* link local; metadata services */
	{ 0xac100000, 12 }, /* private */
	{ 0xc0000000, 24 }, /* protocol assignments */
	{ 0xc0000200, 24 }, /* documentation */
	{ 0xc0586300, 24 }, /* 6to4 relays */
	{ 0xc0a80000, 16 }, /* private */
	{ 0xc6120000, 15 }, /* benchmarks */
	{ 0xc6336400, 24 }, /* documentation */
	{ 0xcb007100, 24 }, /* documentation */
	{ 0xe0000000, 4 },  /* multicast */
	{ 0xf0000000, 4 },  /* reserved, broadcast */
};

static bool global4(uint32_t host_order)
{
	for (size_t i = 0; i < sizeof(special4) / sizeof(special4[0]); i++) {
		if (host_order >> (32 - special4[i].bits) == special4[i].net >> (32 - special4[i].bits))
			return false;
	}
	return true;
}

static bool global6(const uint8_t a[16])
{
	static const uint8_t mapped[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff };

	if (memcmp(a, mapped, sizeof(mapped)) == 0)
		return global4((uint32_t)a[12] << 24 | (uint32_t)a[13] << 16 | (uint32_t)a[14] << 8 | a[15]);
	/* Outside 2000::/3 there is loopback, link and site local, ULA, multicast, NAT64 (64:ff9b::/96 and 64:ff9b:1::/48). */
	if ((a[0] & 0xe0) != 0x20)
		return false;
	if (a[0] == 0x20 && a[1] == 0x01 && a[2] < 0x02) /* 2001::/23: Teredo, ORCHID, benchmarks */
		return false;
	if (a[0] == 0x20 && a[1] == 0x01 && a[2] == 0x0d && a[3] == 0xb8) /* documentation */
		return false;
	if (a[0] == 0x20 && a[1] == 0x02) /* 6to4: an IPv4 address that a relay would dial for us */
		return false;
	if (a[0] == 0x3f && a[1] == 0xff && a[2] < 0x10) /* 3fff::/20: documentation */
		return false;
	return true;
}

/* Copied out, because a caller's sockaddr need not be aligned for the larger type. */
bool net_is_global(const struct sockaddr *sa)
{
	struct sockaddr_in in;
	struct sockaddr_in6 in6;

	switch (sa->sa_family) {
	case AF_INET: memcpy(&in, sa, sizeof(in)); return global4(ntohl(in.sin_addr.s_addr));
	case AF_INET6: memcpy(&in6, sa, sizeof(in6)); return global6(in6.sin6_addr.s6_addr);
	default: return false;
	}
}

uint16_t net_addr_port(const struct sockaddr *sa)
{
	struct sockaddr_in in;
	struct sockaddr_in6 in6;

	switch (sa->sa_family) {
	case AF_INET: memcpy(&in, sa, sizeof(in)); return ntohs(in.sin_port);
	case AF_INET6: memcpy(&in6, sa, sizeof(in6)); return ntohs(in6.sin6_port);
	default: return 0;
	}
}

void net_addr_text(const struct sockaddr *sa, char out[64])
{
	char host[INET6_ADDRSTRLEN] = "?";
	struct sockaddr_in in;
	struct sockaddr_in6 in6;
	bool ok;

	switch (sa->sa_family) {
	case AF_INET:
		memcpy(&in, sa, sizeof(in));
		inet_ntop(AF_INET, &in.sin_addr, host, sizeof(host));
		ok = text_fmt(out, 64, "%s:%u", host, (unsigned)net_addr_port(sa));
		break;
	case AF_INET6:
		memcpy(&in6, sa, sizeof(in6));
		inet_ntop(AF_INET6, &in6.sin6_addr, host, sizeof(host));
		ok = text_fmt(out, 64, "[%s]:%u", host, (unsigned)net_addr_port(sa));
		break;
	default: ok = text_fmt(out, 64, "family-%d", (int)sa->sa_family); break;
	}
	if (!ok)
		out[0] = '\0';
}
