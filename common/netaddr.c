/* Judges socket addresses. Thread-safe; asked before every outward connection, so anything unknown is refused. */
#include "netaddr.h"

#include "text.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <string.h>

/* What IANA lists as not globally reachable, and what only looks reachable (relay anycast). */
const struct net_range net_special4[] = {
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

const size_t net_special4_count = sizeof(net_special4) / sizeof(net_special4[0]);

/* Outside 2000::/3 there is loopback, link and site local, ULA, multicast, NAT64 (64:ff9b::/96 and 64:ff9b:1::/48). */
const struct net_range net_special6[] = {
	{ 0x20010000, 23 }, /* Teredo, ORCHID, benchmarks */
	{ 0x20010db8, 32 }, /* documentation */
	{ 0x20020000, 16 }, /* 6to4: an IPv4 address that a relay would dial for us */
	{ 0x3fff0000, 20 }, /* documentation */
};
const size_t net_special6_count = sizeof(net_special6) / sizeof(net_special6[0]);

static const uint8_t mapped[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff };

static bool is_special(uint32_t first, const struct net_range *list, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (first >> (32 - list[i].bits) == list[i].net >> (32 - list[i].bits))
			return true;
	return false;
}

static uint32_t word(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static bool global6(const uint8_t a[16])
{
	if (memcmp(a, mapped, sizeof(mapped)) == 0)
		return !is_special(word(a + 12), net_special4, net_special4_count);
	return (a[0] & 0xe0) == 0x20 && !is_special(word(a), net_special6, net_special6_count);
}

/* Copied out, because a caller's sockaddr need not be aligned for the larger type. */
bool net_addr_bytes(const struct sockaddr *sa, uint8_t out[16])
{
	struct sockaddr_in in;
	struct sockaddr_in6 in6;

	switch (sa->sa_family) {
	case AF_INET:
		memcpy(&in, sa, sizeof(in));
		memcpy(out, mapped, sizeof(mapped));
		memcpy(out + sizeof(mapped), &in.sin_addr, 4);
		return true;
	case AF_INET6:
		memcpy(&in6, sa, sizeof(in6));
		memcpy(out, &in6.sin6_addr, 16);
		return true;
	default: return false;
	}
}

bool net_is_global(const struct sockaddr *sa)
{
	uint8_t bytes[16];

	return net_addr_bytes(sa, bytes) && global6(bytes);
}

int net_own_read(struct net_own *out, struct err *e)
{
	struct ifaddrs *list;

	out->count = 0;
	if (getifaddrs(&list) != 0)
		return err_set_errno(e, "addresses of this host");
	for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
		if (!i->ifa_addr || !net_is_global(i->ifa_addr))
			continue;
		if (out->count >= NET_OWN_MAX) {
			freeifaddrs(list);
			return err_set(e, ERR_LIMIT, "this host has more than %d global addresses", NET_OWN_MAX);
		}
		if (net_addr_bytes(i->ifa_addr, out->addr[out->count]))
			out->count++;
	}
	freeifaddrs(list);
	return 0;
}

bool net_own_has(const struct net_own *own, const struct sockaddr *sa)
{
	uint8_t bytes[16];

	if (!net_addr_bytes(sa, bytes))
		return false;
	for (size_t i = 0; i < own->count; i++)
		if (memcmp(own->addr[i], bytes, sizeof(bytes)) == 0)
			return true;
	return false;
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
