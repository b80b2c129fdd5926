/*
 * TCP sockets for listeners: bound here, listened on by whoever gets them (httpd.c, or another process that is given the
 * descriptor). Called at start; a host name is looked up and may block.
 */
#ifndef EPH_NETLISTEN_H
#define EPH_NETLISTEN_H

#include "error.h"

#include <stddef.h>
#include <stdint.h>

/* "127.0.0.1:8080", "[::1]:80", ":80" (all addresses), port 0 allowed. *fd: bound, not blocking, close-on-exec. */
int net_listen(const char *listen, int *fd, uint16_t *port, struct err *e) EPH_MUST_CHECK;
/* How a listener's address is told: its host as given and the bound port, "[::1]:80" for IPv6. */
int net_listen_text(const char *listen, uint16_t port, char *out, size_t size, struct err *e) EPH_MUST_CHECK;
int net_listen_port(int fd, uint16_t *port, struct err *e) EPH_MUST_CHECK; /* the bound one */

#endif
