/*
 * The sealing keyring: a file of keys with ids, mode 0400, equal on every controld of a deployment, never in Postgres. It hashes
 * bearer keys and request bodies and seals provider keys at rest. Loaded once at start; all functions but the first two are pure,
 * never block, and may be called from any thread.
 *
 *   ephemeral keyring 1
 *   hash 1 <43 characters of base64url>      exactly one: replacing it voids every key and join token
 *   seal 1 <43 characters of base64url>      one or more: the highest id seals, every id opens
 */
#ifndef CONTROLD_SECRETS_H
#define CONTROLD_SECRETS_H

#include "../common/buf.h"
#include "../common/error.h"

#include <stdbool.h>
#include <stdint.h>

#define SECRETS_HASH_LEN 32
#define SECRETS_SEAL_OVERHEAD 45 /* version, key id, nonce, tag */
#define SECRETS_PLAIN_MAX 65536

struct secrets;

/* Makes the file with fresh keys where it is missing. *made says whether it did; one that exists is left alone. */
int secrets_create(const char *path, bool *made, struct err *e) EPH_MUST_CHECK;
/* Refuses a file that others may read or write. */
int secrets_load(const char *path, struct secrets **out, struct err *e) EPH_MUST_CHECK;
void secrets_free(struct secrets *s); /* zeroes the keys; NULL is fine */

/* Keyed BLAKE2b-256 of a bearer secret ("eph_...", "ephop_...", "ephnt_..." as a client sends it): what Postgres holds. */
void secrets_key_hash(const struct secrets *s, const char *key, uint8_t out[SECRETS_HASH_LEN]);
/* Keyed BLAKE2b-256 of a canonical body: idempotency. Another key than secrets_key_hash, so that the two never meet. */
void secrets_body_hash(const struct secrets *s, const void *p, size_t n, uint8_t out[SECRETS_HASH_LEN]);
/* Constant time. */
bool secrets_equal(const void *a, const void *b, size_t n);

/*
 * XChaCha20-Poly1305 with a random nonce. `aad` is text that says what this is and whose ("provider-key|openai|1"): opening needs
 * the same. seal appends n + SECRETS_SEAL_OVERHEAD bytes to out; open appends the plain bytes (the caller zeroes them).
 */
int secrets_seal(const struct secrets *s, const void *plain, size_t n, const char *aad, struct buf *out,
		struct err *e) EPH_MUST_CHECK;
/* ERR_DENIED when the bytes or the aad are not what was sealed; ERR_NOT_FOUND when the key's id is not in this keyring. */
int secrets_open(const struct secrets *s, const void *sealed, size_t n, const char *aad, struct buf *out,
		struct err *e) EPH_MUST_CHECK;
/* Id of the key that seals now. */
uint32_t secrets_seal_id(const struct secrets *s);

/* A model provider's key as Postgres holds it, bound to the provider's name: the one associated text that api (which seals) and
 * dispatch (which opens) share. key_text is terminated. */
int secrets_seal_provider_key(
		const struct secrets *s, const char *provider, const char *key_text, struct buf *out, struct err *e) EPH_MUST_CHECK;
int secrets_open_provider_key(const struct secrets *s, const char *provider, const void *sealed, size_t n, struct buf *out,
		struct err *e) EPH_MUST_CHECK;

/* sodium_memzero then buf_free: for buffers that held a secret. */
void secrets_wipe(struct buf *b);

#endif
