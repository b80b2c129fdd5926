/*
 * Who asks: the bearer key of a request, looked up in the store by its keyed hash. A bounded cache of at most 2 s spares the
 * database most look-ups; a change made through this controld empties it, on another one it counts within those 2 s. Runs on the
 * loop, does not block.
 */
#ifndef CONTROLD_API_AUTH_H
#define CONTROLD_API_AUTH_H

#include "common/error.h"
#include "secrets.h"

#include <stdbool.h>

#define AUTH_CACHE_MS 2000
#define AUTH_CACHE_SIZE 1024

struct api;
struct api_req;
struct auth_cache;

struct auth_cache *auth_cache_new(void);
void auth_cache_free(struct auth_cache *c);
/* After a change to keys, organizations or roles. */
void auth_cache_clear(struct auth_cache *c);

/* True when a look-up of at most AUTH_CACHE_MS ago found this key good. */
bool auth_cached(const struct auth_cache *c, const uint8_t hash[SECRETS_HASH_LEN]);

/* Calls api_enter with r->who set when the key is good and its role enough; answers 401 or 403 when not. */
void auth_check(struct api_req *r);
/* The same for a request that was let in long ago: calls `then`, or answers 401 or 403. */
void auth_check_again(struct api_req *r, void (*then)(struct api_req *r));

#endif
