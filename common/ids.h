/* Ids and keys: their one spelling. Random bytes from getrandom(2). Thread-safe. */
#ifndef EPH_IDS_H
#define EPH_IDS_H

#include "error.h"

#include <stdbool.h>
#include <stdint.h>

#define ID_RUN_LEN 36 /* "run_" + 32 hex */
#define ID_MAX 48     /* room for any id of ours with its terminator */

/* prefix ("org", "key", "node", "file", "whd", "vm") + "_" + 32 hex of random bits. out holds ID_MAX. */
void id_make(const char *prefix, char out[ID_MAX]);
/* run_ + 48 bits of unix_ms + 80 random bits. unix_ms should be Postgres' clock. */
void id_run_make(int64_t unix_ms, char out[ID_MAX]);
bool id_valid(const char *prefix, const char *s);
/* Bearer secrets: prefix "eph_", "ephop_", "ephnt_" + 43 characters of base64url (32 random bytes). out holds 64. */
void id_secret_make(const char *prefix, char out[64]);
void random_bytes(void *p, size_t n); /* aborts only if the kernel has no randomness at all */

#endif
