/*
 * Who this node is: its keys (state_dir/identity.key, 0600, made at the first start) and, once enrolled, its id and how it reaches
 * controld (state_dir/node). Only keeper reads them; link gets the request signing key and public parts, no other role gets any.
 */
#ifndef NODED_KEEPER_IDENTITY_H
#define NODED_KEEPER_IDENTITY_H

#include "common/buf.h"
#include "common/error.h"
#include "proto/link.h"
#include "proto/role.h"

struct identity;

/* Loads both files; makes the keys where there are none. */
int identity_open(const char *state_dir, struct identity **out, struct err *e) EPH_MUST_CHECK;
void identity_free(struct identity *id); /* wipes */

/* Reads a join token: text (the caller frees it) and what it says. An expired one is refused. */
int identity_read_token(const char *path, char **text, struct join_token *out, struct err *e) EPH_MUST_CHECK;

bool identity_enrolled(const struct identity *id);
/* The deployment's root key says that this node shall start VMs from this image. */
bool identity_image_signed(const struct identity *id, const uint8_t hash[SHA256_LEN], const uint8_t signature[64]);
const char *identity_node_id(const struct identity *id);
/* Keeps what controld answered to the enrolment, and the addresses and CA of the token that was used. */
int identity_enrol(struct identity *id, const struct link_enrol_reply *reply, const struct join_token *token,
		struct err *e) EPH_MUST_CHECK;
/* Fills keys, signatures and, when enrolled, id, addresses and CA. */
void identity_fill(const struct identity *id, struct role_link_init *out);

/* Opens what controld sealed to this node; appends the plain bytes. */
int identity_unseal(const struct identity *id, const uint8_t *sealed, size_t n, struct buf *out, struct err *e) EPH_MUST_CHECK;
void identity_sign_receipt(const struct identity *id, const uint8_t digest[SHA256_LEN], uint8_t signature[64]);

#endif
