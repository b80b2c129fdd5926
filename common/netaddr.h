/*
 * Which addresses may be dialled: global unicast only, with IPv4 embedded in IPv6 (mapped, NAT64, 6to4, Teredo) judged or refused.
 * Pure functions, but for net_own_read.
 */
#ifndef EPH_NETADDR_H
#define EPH_NETADDR_H

#include "error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

/* What is not global, for those who judge by other means as well: of IPv4 all of it; of IPv6 what lies in 2000::/3 (all else is not
 * global), by the first 32 bits. Host byte order. */
struct net_range {
	uint32_t net;
	int bits;
};
extern const struct net_range net_special4[], net_special6[];
extern const size_t net_special4_count, net_special6_count;

bool net_is_global(const struct sockaddr *sa);
/* An IPv6 address, or IPv4 as ::ffff:a.b.c.d, in out; false for other families. */
bool net_addr_bytes(const struct sockaddr *sa, uint8_t out[16]);

#define NET_OWN_MAX 256
/* The global addresses of this host's interfaces: dialling them would be dialling ourselves. What a NAT before the host translates
 * to it is not among them. */
struct net_own {
	uint8_t addr[NET_OWN_MAX][16];
	size_t count;
};
/* Asks the kernel; does not block on the network. More than NET_OWN_MAX is an error. */
int net_own_read(struct net_own *out, struct err *e) EPH_MUST_CHECK;
bool net_own_has(const struct net_own *own, const struct sockaddr *sa);
/* "1.2.3.4:443" or "[::1]:8080" for logs; out holds 64. */
void net_addr_text(const struct sockaddr *sa, char out[64]);
uint16_t net_addr_port(const struct sockaddr *sa);

#endif
