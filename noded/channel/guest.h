/*
 * The host's end of the guest channel as a state machine over bytes: every frame of the guest is checked against state, order,
 * sizes and credit, decoded, and encoded again for the broker. No descriptors, no time: channel.c feeds it, tests and the fuzzer
 * too.
 *
 * One per VM, on channel's only thread. Never blocks.
 */
#ifndef NODED_CHANNEL_GUEST_H
#define NODED_CHANNEL_GUEST_H

#include "proto/guest.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct guest_peer;

struct guest_peer_ops {
	/* Bytes for the guest: whole frames. */
	void (*send)(void *arg, const void *bytes, size_t n);
	/* A frame for the broker: enum role_frame RF_CB_* and its body, all of it made here from decoded values. */
	void (*emit)(void *arg, uint8_t type, const void *body, size_t n);
	void *arg;
};

/* NULL when memory ran out. */
struct guest_peer *guest_peer_new(const struct guest_peer_ops *ops);
void guest_peer_free(struct guest_peer *p);

/* Takes whole frames from the front of bytes[0..n): *used says how many bytes they were. -1: the guest broke the protocol (e says
 * how); from then on nothing it says is looked at. */
int guest_peer_feed(struct guest_peer *p, const uint8_t *bytes, size_t n, size_t *used, struct err *e) EPH_MUST_CHECK;

/* What the broker asks for. -1: not legal in this state, which is a mistake of ours. */
int guest_peer_probe(struct guest_peer *p, const uint8_t nonce[GUEST_NONCE_LEN], struct err *e) EPH_MUST_CHECK;
int guest_peer_setup(struct guest_peer *p, const uint8_t *setup, size_t n, struct err *e) EPH_MUST_CHECK;
/* Sent as the guest gives credit; RF_CB_FILE_CREDIT says how much content went. A piece is 1 to 32 KiB. */
int guest_peer_file(struct guest_peer *p, uint32_t index, const uint8_t *bytes, size_t n, struct err *e) EPH_MUST_CHECK;
int guest_peer_files_end(struct guest_peer *p, struct err *e) EPH_MUST_CHECK;
/* Kept and sent as the guest gives credit. A reply to a call that is not open is an error. */
int guest_peer_reply(
		struct guest_peer *p, uint32_t stream, uint8_t kind, const uint8_t *reply, size_t n, struct err *e) EPH_MUST_CHECK;
/* Bytes of events that the broker has taken: the guest may send as many more. */
void guest_peer_event_credit(struct guest_peer *p, uint32_t bytes);
void guest_peer_stop(struct guest_peer *p, const char *text);

/* The guest has not said hello yet. */
bool guest_peer_booting(const struct guest_peer *p);
const char *guest_peer_state(const struct guest_peer *p);

#endif
