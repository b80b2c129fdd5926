/*
 * The hybrid vsock: `socket` for connections that the host begins, `<socket>_<port>` where the guest's connections go. The guest's
 * end is the byte stream that machine.h offers.
 */
#ifndef STANDIN_VSOCK_H
#define STANDIN_VSOCK_H

#include "machine.h"

/* Binds the socket; a file that is there already makes it fail. */
int vsock_open(const char *path, struct err *e) EPH_MUST_CHECK;
/* Ends every connection; removes the socket as well. */
void vsock_close(void);
void vsock_end_connections(void);

/* The guest connects to, or closes its connection to, a port of the host. */
void vsock_guest(struct machine *m, uint32_t port, bool open);

struct pollfd;
#define VSOCK_FDS 11
size_t vsock_poll(struct machine *m, struct pollfd *out);
void vsock_ready(struct machine *m, const struct pollfd *fds, size_t n);

#endif
