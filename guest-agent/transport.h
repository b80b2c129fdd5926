/*
 * What the channel runs over: a port of virtio-serial, found by its name, or a connection to the host by vsock. Opening may wait a
 * bounded time for a driver or for the host.
 */
#ifndef GUEST_TRANSPORT_H
#define GUEST_TRANSPORT_H

#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

struct transport {
	bool is_vsock;
	char name[64];      /* of the port */
	uint32_t cid, port; /* of the vsock */
};

/* "virtio:NAME", "vsock:PORT" (of the host, CID 2) or "vsock:CID:PORT". */
int transport_parse(const char *text, struct transport *out, struct err *e) EPH_MUST_CHECK;
/* A non-blocking descriptor, closed on exec; -1: nothing came up in the time that there is. */
int transport_open(const struct transport *t, struct err *e) EPH_MUST_CHECK;
/* Once. For a vsock the host answers or refuses at once, or is given up after a short time. */
int transport_try(const struct transport *t, struct err *e) EPH_MUST_CHECK;

#endif
