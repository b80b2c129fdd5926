/*
 * The connections to the controlds: one REQ socket for each address, requests over contexts, a challenge for each pipe, and a
 * watchdog that replaces a socket whose dialer stopped. One controld is the active one; when it does not answer the next that does
 * takes over.
 *
 * Threads: nng's own threads run two kinds of callback here (pipe up or down, aio done); both only post to the inbox. Everything
 * else is on the loop's thread and never blocks. A socket that is given up is closed by a thread of its own, because nng_close may
 * hang.
 */
#ifndef LINK_PEER_H
#define LINK_PEER_H

#include "common/error.h"
#include "proto/link.h"

#include <stdbool.h>
#include <stdint.h>

#define PEER_ADDRESSES_MAX 16
#define PEER_SLOTS 12                                  /* requests under way at once, polls included */
#define PEER_SERVER_NAME "controld.ephemeral.internal" /* a SAN of every controld's certificate, whatever its address */

struct event_base;
struct peers;

struct peers_options {
	struct event_base *base;
	const char *addresses; /* "tls+tcp://host:port,..." */
	const char *ca_pem;
	const uint8_t *sign_secret; /* Ed25519; outlives the peers */
	const char *node_id;        /* outlives the peers; "" until enrolled */
	/* A controld can be asked now, or a slot came free. */
	void (*on_ready)(void *arg);
	void *arg;
};

/* An answer, on the loop. reply NULL: none came (connection lost, time over, malformed). Called once for each request. */
typedef void (*peer_answer)(void *arg, void *user, const struct link_reply *reply);

int peers_new(const struct peers_options *opt, peer_answer answer, struct peers **out, struct err *e) EPH_MUST_CHECK;
/* The challenge of the active controld's pipe; false while there is none. */
bool peers_challenge(const struct peers *p, uint8_t out[32]);
/* How long the node's lease is: a connection that does not answer is made anew in time to renew it. */
void peers_lease(struct peers *p, uint32_t lease_ms);
struct peers_state {
	uint32_t known, connected, ready; /* addresses */
	uint64_t made;                    /* connections so far */
	bool clock_compared;
	int64_t clock_offset_ms; /* a controld's wall clock before ours, when they were last compared */
};
void peers_look(const struct peers *p, struct peers_state *out); /* for metrics */
/* Slots that could be used right now at the active controld. */
uint32_t peers_free_slots(const struct peers *p);
/* Signs and sends to the active controld. False: not now (no connection, no slot, too long). user comes back with the answer.
 * sign = false for ENROL. */
bool peers_send(struct peers *p, uint8_t type, const void *body, size_t n, int timeout_ms, bool sign, void *user);

#endif
