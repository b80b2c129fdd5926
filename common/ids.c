/* Ids, secrets and random bytes. Thread-safe, no state. getrandom(2) blocks only before the kernel's pool is seeded at boot. */
#include "ids.h"

#include "log.h"
#include "text.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#define ID_BYTES 16
#define SECRET_BYTES 32

void random_bytes(void *p, size_t n)
{
	uint8_t *at = p;

	while (n > 0) {
		ssize_t got = getrandom(at, n, 0);

		if (got < 0 && errno == EINTR)
			continue;
		check_abort(got > 0); /* a kernel without getrandom: nothing of ours may go on with guessable keys */
		at += got;
		n -= (size_t)got;
	}
}

static void spell(const char *prefix, const uint8_t raw[ID_BYTES], char out[ID_MAX])
{
	char hex[2 * ID_BYTES + 1];

	text_hex(raw, ID_BYTES, hex);
	check_abort(text_fmt(out, ID_MAX, "%s_%s", prefix, hex)); /* prefixes are ours and short */
}

void id_make(const char *prefix, char out[ID_MAX])
{
	uint8_t raw[ID_BYTES];

	random_bytes(raw, sizeof(raw));
	spell(prefix, raw, out);
}

void id_run_make(int64_t unix_ms, char out[ID_MAX])
{
	uint8_t raw[ID_BYTES];
	uint64_t ms = unix_ms < 0 ? 0 : (uint64_t)unix_ms;

	random_bytes(raw, sizeof(raw));
	for (int i = 0; i < 6; i++)
		raw[i] = (uint8_t)(ms >> (40 - 8 * i));
	spell("run", raw, out);
}

bool id_valid(const char *prefix, const char *s)
{
	size_t n = strlen(prefix);
	uint8_t raw[ID_BYTES];

	return strncmp(s, prefix, n) == 0 && s[n] == '_' && text_unhex(s + n + 1, raw, ID_BYTES);
}

void id_secret_make(const char *prefix, char out[64])
{
	uint8_t raw[SECRET_BYTES];
	char text[48]; /* 43 characters and the terminator */

	random_bytes(raw, sizeof(raw));
	text_b64url(raw, sizeof(raw), text);
	check_abort(text_fmt(out, 64, "%s%s", prefix, text));
	explicit_bzero(raw, sizeof(raw));
	explicit_bzero(text, sizeof(text));
}
