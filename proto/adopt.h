/*
 * What a keeper and a broker of an earlier one say to each other when they meet (RF_BROKER_IDENTITY, RF_BROKER_ADOPT,
 * RF_KEEPER_ADOPTED of role.h). The two may be of different versions of noded: each message begins with the version, and nothing
 * behind it is read when that is another one.
 */
#ifndef PROTO_ADOPT_H
#define PROTO_ADOPT_H

#include "assignment.h"

/* Of all frames between keeper and broker. Raised whenever one of them, or what it means, changes. */
#define ADOPT_VERSION 1
#define ADOPT_NONCE_LEN 16

/* keeper -> broker, its first frame: who it is, and by what it knows a keeper that comes later. */
struct role_identity {
	char vm[ID_MAX];
	uint8_t nonce[ADOPT_NONCE_LEN];
};
void role_identity_encode(const struct role_identity *m, struct buf *out);
int role_identity_decode(const void *p, size_t n, struct role_identity *out, struct err *e) EPH_MUST_CHECK;

/* keeper -> broker, the first frame on its listening socket. */
struct role_adopt {
	uint16_t version;
	uint8_t nonce[ADOPT_NONCE_LEN];
	int64_t lease_deadline_boot_ns; /* 0: the new keeper has none yet; the broker keeps the one that it has */
};
void role_adopt_encode(const struct role_adopt *m, struct buf *out);
int role_adopt_decode(const void *p, size_t n, struct role_adopt *out, struct err *e) EPH_MUST_CHECK;

enum role_adopted_state {
	ADOPTED_ASSIGNED = 1, /* it has a run; else the VM is warm */
	ADOPTED_READY = 2,    /* the guest of a warm VM said hello */
	ADOPTED_ASKED = 4,    /* START was asked for */
	ADOPTED_ENDING = 8,   /* the VM is to be destroyed, or is */
	ADOPTED_ALL = 15,
};

/* broker -> keeper: the answer, with the spool's descriptor when it has a run. What waits for an answer of keeper or link follows.
 */
struct role_adopted {
	uint16_t version;
	char vm[ID_MAX];
	uint8_t token[TOKEN_LEN]; /* zeros: it has no run */
	uint32_t state;           /* enum role_adopted_state */
	int64_t boot_ns;          /* CLOCK_BOOTTIME; when the VM's boot began; 0 = not yet */
	int64_t lease_deadline_boot_ns;
};
void role_adopted_encode(const struct role_adopted *m, struct buf *out);
int role_adopted_decode(const void *p, size_t n, struct role_adopted *out, struct err *e) EPH_MUST_CHECK;

#endif
