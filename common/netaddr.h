/*
 * Which addresses may be dialled: global unicast only, with IPv4 embedded in IPv6 (mapped, NAT64, 6to4, Teredo) judged or refused.
 * Pure functions.
 */
#ifndef EPH_NETADDR_H
#define EPH_NETADDR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

bool net_is_global(const struct sockaddr *sa);
/* "1.2.3.4:443" or "[::1]:8080" for logs; out holds 64. */
void net_addr_text(const struct sockaddr *sa, char out[64]);
uint16_t net_addr_port(const struct sockaddr *sa);

#endif
