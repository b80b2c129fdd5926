/*
 * The sealing keyring in memory. Loaded by main.c at start, used by api (key hashes), store callers (idempotency, provider keys)
 * and dispatch (join tokens, provider keys), all on the loop's thread; nothing here blocks after secrets_load. The keys lie in
 * guarded memory that is locked where the limit allows, and are zeroed by secrets_free.
 *
 * A sealed value: u8 version (1), u32 key id, 24 bytes nonce, ciphertext with its 16 bytes tag. Version and key id are part of the
 * associated data, so that neither can be changed.
 */
#include "secrets.h"

#include "files.h"

#include "../common/text.h"
#include "../common/wire.h"

#include <sodium.h>

#define KEYS_MAX 32
#define FILE_MAX 16384
#define SEAL_VERSION 1
#define HEAD 5 /* version and key id */
#define NONCE crypto_aead_xchacha20poly1305_ietf_NPUBBYTES
#define TAG crypto_aead_xchacha20poly1305_ietf_ABYTES
#define KEY 32

_Static_assert(HEAD + NONCE + TAG == SECRETS_SEAL_OVERHEAD, "secrets.h says what sealing adds");
_Static_assert(KEY == crypto_kdf_KEYBYTES && KEY == crypto_aead_xchacha20poly1305_ietf_KEYBYTES, "one key size");

struct seal_key {
	uint32_t id;
	uint8_t key[KEY];
};

struct secrets {
	uint8_t bearer_key[KEY]; /* derived from the hash key */
	uint8_t body_key[KEY];
	struct seal_key seal[KEYS_MAX];
	size_t seal_count;
	size_t newest; /* index of the highest id */
};

static int print_key(struct buf *out, const char *kind, struct err *e)
{
	uint8_t key[KEY];
	char text[64];
	bool ok;

	randombytes_buf(key, sizeof(key));
	text_b64url(key, sizeof(key), text);
	ok = buf_printf(out, "%s 1 %s\n", kind, text);
	sodium_memzero(key, sizeof(key));
	sodium_memzero(text, sizeof(text));
	return ok ? 0 : err_set(e, ERR_NOMEM, "no memory for the keyring");
}

int secrets_create(const char *path, bool *made, struct err *e)
{
	struct buf b = BUF_INIT(FILE_MAX);
	int rc = -1;

	*made = false;
	if (file_exists(path))
		return 0;
	if (sodium_init() < 0)
		return err_set(e, ERR_INTERNAL, "libsodium did not start");
	if (!buf_add_str(&b, "ephemeral keyring 1\n"))
		err_set(e, ERR_NOMEM, "no memory for the keyring");
	else if (print_key(&b, "hash", e) == 0 && print_key(&b, "seal", e) == 0)
		rc = file_write(path, b.data, b.len, 0400, false, e);
	secrets_wipe(&b);
	if (rc != 0 && e->code == ERR_CONFLICT)
		return 0; /* another bootstrap was faster; its file is whole */
	*made = rc == 0;
	return rc == 0 ? 0 : err_wrap(e, "keyring");
}

/* One line "kind id key". */
static int parse_line(struct secrets *s, char *line, bool *have_hash, uint8_t hash[KEY], struct err *e)
{
	char *rest = line, *kind = strsep(&rest, " "), *id_text = strsep(&rest, " "), *key_text = rest;
	uint8_t key[KEY];
	int64_t id;
	size_t n;
	int rc = 0;

	if (!id_text || !key_text)
		return err_set(e, ERR_INVALID, "expected \"hash ID KEY\" or \"seal ID KEY\"");
	if (text_i64(id_text, 1, UINT32_MAX, &id, e) != 0)
		return err_wrap(e, "key id");
	if (!text_unb64url(key_text, key, sizeof(key), &n) || n != KEY)
		return err_set(e, ERR_INVALID, "the key must be 32 bytes as base64url (43 characters)");
	if (strcmp(kind, "hash") == 0) {
		if (*have_hash)
			rc = err_set(e, ERR_INVALID, "a second hash key; exactly one is allowed");
		*have_hash = true;
		memcpy(hash, key, KEY);
	} else if (strcmp(kind, "seal") == 0) {
		for (size_t i = 0; i < s->seal_count; i++) {
			if (s->seal[i].id == (uint32_t)id)
				rc = err_set(e, ERR_INVALID, "seal key %u stands there twice", (unsigned)id);
		}
		if (s->seal_count == KEYS_MAX)
			rc = err_set(e, ERR_LIMIT, "more than %d seal keys", KEYS_MAX);
		if (rc == 0) {
			s->seal[s->seal_count].id = (uint32_t)id;
			memcpy(s->seal[s->seal_count].key, key, KEY);
			if (s->seal[s->newest].id < (uint32_t)id)
				s->newest = s->seal_count;
			s->seal_count++;
		}
	} else {
		rc = err_set(e, ERR_INVALID, "unknown kind \"%.16s\"; hash and seal are known", kind);
	}
	sodium_memzero(key, sizeof(key));
	return rc;
}

static int parse_keyring(struct secrets *s, char *text, struct err *e)
{
	char *rest = text, *line = strsep(&rest, "\n");
	uint8_t hash[KEY] = { 0 };
	bool have_hash = false;
	int number = 1, rc = 0;

	if (strcmp(line, "ephemeral keyring 1") != 0)
		return err_set(e, ERR_INVALID, "line 1 must be \"ephemeral keyring 1\"");
	while (rc == 0 && (line = strsep(&rest, "\n")) != NULL) {
		number++;
		if (line[0] == '\0' || line[0] == '#')
			continue;
		rc = parse_line(s, line, &have_hash, hash, e);
	}
	if (rc != 0)
		err_wrap(e, "line %d", number);
	else if (!have_hash)
		rc = err_set(e, ERR_INVALID, "there is no hash key");
	else if (s->seal_count == 0)
		rc = err_set(e, ERR_INVALID, "there is no seal key");
	if (rc == 0) {
		crypto_kdf_derive_from_key(s->bearer_key, KEY, 1, "eph-keys", hash);
		crypto_kdf_derive_from_key(s->body_key, KEY, 2, "eph-body", hash);
	}
	sodium_memzero(hash, sizeof(hash));
	return rc;
}

int secrets_load(const char *path, struct secrets **out, struct err *e)
{
	struct buf b = BUF_INIT(FILE_MAX);
	struct secrets *s = NULL;
	int rc = -1;

	if (sodium_init() < 0)
		return err_set(e, ERR_INTERNAL, "libsodium did not start");
	if (file_read(path, true, &b, e) != 0)
		goto done;
	s = sodium_malloc(sizeof(*s));
	if (!s || !buf_cstr(&b)) {
		err_set(e, ERR_NOMEM, "no memory for the keyring");
		goto done;
	}
	memset(s, 0, sizeof(*s));
	if (!text_utf8_clean((const char *)b.data, b.len))
		err_set(e, ERR_INVALID, "%s is not a keyring (not text)", path);
	else if (parse_keyring(s, (char *)b.data, e) != 0)
		err_wrap(e, "%s", path);
	else
		rc = sodium_mprotect_readonly(s) == 0 ? 0 : err_set(e, ERR_NOMEM, "the keyring could not be protected");
done:
	secrets_wipe(&b);
	if (rc != 0) {
		if (s)
			sodium_free(s);
		return err_wrap(e, "keyring");
	}
	*out = s;
	return 0;
}

void secrets_free(struct secrets *s)
{
	if (s)
		sodium_free(s); /* zeroes */
}

void secrets_key_hash(const struct secrets *s, const char *key, uint8_t out[SECRETS_HASH_LEN])
{
	crypto_generichash(out, SECRETS_HASH_LEN, (const uint8_t *)key, strlen(key), s->bearer_key, KEY);
}

void secrets_body_hash(const struct secrets *s, const void *p, size_t n, uint8_t out[SECRETS_HASH_LEN])
{
	crypto_generichash(out, SECRETS_HASH_LEN, p, n, s->body_key, KEY);
}

bool secrets_equal(const void *a, const void *b, size_t n)
{
	return sodium_memcmp(a, b, n) == 0;
}

/* "ephemeral/seal/1" || head || aad */
static bool put_associated(struct buf *b, const uint8_t *head, const char *aad)
{
	return buf_add_str(b, "ephemeral/seal/1") && buf_add(b, head, HEAD) && buf_add_str(b, aad);
}

int secrets_seal(const struct secrets *s, const void *plain, size_t n, const char *aad, struct buf *out, struct err *e)
{
	const struct seal_key *k = &s->seal[s->newest];
	struct buf head = BUF_INIT(HEAD), associated = BUF_INIT(4096);
	uint8_t *to = n <= SECRETS_PLAIN_MAX ? buf_reserve(out, n + SECRETS_SEAL_OVERHEAD) : NULL;
	unsigned long long length = 0;
	int rc = -1;

	if (!to)
		return err_set(e, ERR_LIMIT, "a secret of %zu bytes does not fit (at most %d)", n, SECRETS_PLAIN_MAX);
	wire_put_u8(&head, SEAL_VERSION);
	wire_put_u32(&head, k->id);
	/* wire.h's little endian: one format on every machine. */
	if (head.failed || !put_associated(&associated, head.data, aad)) {
		err_set(e, ERR_LIMIT, "the associated text of a secret is too long");
		goto done;
	}
	memcpy(to, head.data, HEAD);
	randombytes_buf(to + HEAD, NONCE);
	crypto_aead_xchacha20poly1305_ietf_encrypt(
			to + HEAD + NONCE, &length, plain, n, associated.data, associated.len, NULL, to + HEAD, k->key);
	buf_commit(out, HEAD + NONCE + (size_t)length);
	rc = 0;
done:
	buf_free(&head);
	buf_free(&associated);
	return rc;
}

static const struct seal_key *find_key(const struct secrets *s, uint32_t id)
{
	for (size_t i = 0; i < s->seal_count; i++) {
		if (s->seal[i].id == id)
			return &s->seal[i];
	}
	return NULL;
}

int secrets_open(const struct secrets *s, const void *sealed, size_t n, const char *aad, struct buf *out, struct err *e)
{
	const uint8_t *from = sealed;
	struct buf associated = BUF_INIT(4096);
	const struct seal_key *k;
	struct wire_reader r;
	unsigned long long length = 0;
	uint8_t *to;
	int rc = -1;

	if (n < SECRETS_SEAL_OVERHEAD || n > SECRETS_PLAIN_MAX + SECRETS_SEAL_OVERHEAD || from[0] != SEAL_VERSION)
		return err_set(e, ERR_DENIED, "these are not the bytes of a sealed secret");
	wire_read_init(&r, from + 1, HEAD - 1);
	k = find_key(s, wire_u32(&r));
	if (!k)
		return err_set(e, ERR_NOT_FOUND,
				"the secret is sealed with a key that is not in this keyring: use the same keyring on every "
				"controld");
	to = buf_reserve(out, n - SECRETS_SEAL_OVERHEAD + 1); /* + 1: a secret may be empty */
	if (!to || !put_associated(&associated, from, aad))
		err_set(e, ERR_LIMIT, "the secret does not fit");
	else if (crypto_aead_xchacha20poly1305_ietf_decrypt(to, &length, NULL, from + HEAD + NONCE, n - HEAD - NONCE,
				 associated.data, associated.len, from + HEAD, k->key) != 0)
		err_set(e, ERR_DENIED, "a sealed secret was changed, or belongs to something else");
	else {
		buf_commit(out, (size_t)length);
		rc = 0;
	}
	buf_free(&associated);
	return rc;
}

static bool provider_aad(const char *provider, char out[256])
{
	return text_fmt(out, 256, "provider-key|%s", provider);
}

int secrets_seal_provider_key(const struct secrets *s, const char *provider, const char *key_text, struct buf *out, struct err *e)
{
	char aad[256];

	if (!provider_aad(provider, aad))
		return err_set(e, ERR_LIMIT, "the provider's name is too long");
	return secrets_seal(s, key_text, strlen(key_text), aad, out, e);
}

int secrets_open_provider_key(
		const struct secrets *s, const char *provider, const void *sealed, size_t n, struct buf *out, struct err *e)
{
	char aad[256];

	if (!provider_aad(provider, aad))
		return err_set(e, ERR_LIMIT, "the provider's name is too long");
	return secrets_open(s, sealed, n, aad, out, e);
}

uint32_t secrets_seal_id(const struct secrets *s)
{
	return s->seal[s->newest].id;
}

void secrets_wipe(struct buf *b)
{
	if (b->data)
		sodium_memzero(b->data, b->cap);
	buf_free(b);
}
