/* From the store's claim to what travels: the assignment encoded, and beside it the run's secrets sealed to the node. Pure. */
#ifndef CONTROLD_DISPATCH_ASSIGN_H
#define CONTROLD_DISPATCH_ASSIGN_H

#include "common/error.h"
#include "proto/link.h"
#include "store/store.h"

struct secrets;

/* `out` owns its bytes (assign_free). The sealed part is fresh at each call (an ephemeral key pair each time). */
int assign_make(const struct secrets *s, const struct store_assign *from, const uint8_t seal_key[32], struct link_assign *out,
		struct err *e) EPH_MUST_CHECK;
void assign_free(struct link_assign *a);

#endif
