/*
 * Who is at the other end of a pipe. One `struct peer` for each nng pipe: its challenge, the node that proved itself on it, and the
 * last counter of each of the node's contexts. Pure: no socket, no store; dispatch keeps the table, tests call it directly.
 */
#ifndef CONTROLD_DISPATCH_PEER_H
#define CONTROLD_DISPATCH_PEER_H

#include "proto/link.h"

#include <stdbool.h>
#include <stdint.h>

#define PEER_CONTEXTS_MAX 64 /* contexts of one node on one pipe */

enum peer_result {
	PEER_OK,
	PEER_NEED_NODE,    /* peer_set_node first: the node's key is not known here yet, or is to be read again */
	PEER_NO_CHALLENGE, /* the pipe was not asked for one */
	PEER_OTHER_NODE,   /* the pipe belongs to another node */
	PEER_SIGNATURE,
	PEER_REPLAY,   /* the counter did not grow */
	PEER_CONTEXTS, /* too many contexts */
	PEER_REVOKED,
};
const char *peer_text(enum peer_result r); /* for the node and the log */

struct peer {
	uint32_t id; /* nng's */
	bool challenged;
	uint8_t challenge[32];
	bool known; /* node_id and sign_key are set */
	bool stale; /* known, but something about the node changed: read it again */
	bool revoked;
	bool proven; /* at least one good signature */
	char node_id[ID_MAX];
	uint8_t sign_key[32], seal_key[32];
	struct {
		uint32_t context;
		uint64_t counter;
	} seen[PEER_CONTEXTS_MAX];
	uint32_t seen_count;
};

void peer_init(struct peer *p, uint32_t id);
/* The pipe's challenge; the same each time. */
const uint8_t *peer_challenge(struct peer *p);
void peer_set_node(struct peer *p, const char *node_id, const uint8_t sign_key[32], const uint8_t seal_key[32], bool revoked);
/* Checks a signed request and, when it is good, remembers its counter. */
enum peer_result peer_check(struct peer *p, const struct link_request *r);
/* Checks what a node says of its own keys when it enrols: NULL, or what is wrong. */
const char *peer_enrol_fault(struct peer *p, const struct link_enrol *n);

#endif
