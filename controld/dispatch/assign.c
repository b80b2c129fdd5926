/*
 * Makes one assignment ready for the wire (assign.h). The provider's key is in clear only here and only for the time of this call:
 * it is opened with the keyring, put into a run_secrets, sealed to the node's X25519 key, and wiped. Called by next.c at each
 * delivery.
 */
#include "assign.h"

#include "secrets.h"

#include "common/text.h"

#include <sodium.h>

#define SECRETS_ENCODED_MAX 1024

static int open_key(const struct secrets *s, const struct store_assign *from, struct run_secrets *out, struct err *e)
{
	struct buf plain = BUF_INIT(sizeof(out->model_key));
	int rc = 0;

	memset(out, 0, sizeof(*out));
	if (from->sealed_key_len == 0)
		return 0;
	if (secrets_open_provider_key(s, from->provider, from->sealed_key, from->sealed_key_len, &plain, e) != 0)
		rc = err_wrap(e, "key of provider %s", from->provider);
	else if (plain.len >= sizeof(out->model_key))
		rc = err_set(e, ERR_LIMIT, "the key of provider %s is over %zu bytes", from->provider, sizeof(out->model_key) - 1);
	else if (plain.len > 0)
		memcpy(out->model_key, plain.data, plain.len);
	secrets_wipe(&plain);
	return rc;
}

static int seal(const struct run_secrets *secrets, const uint8_t seal_key[32], struct link_assign *out, struct err *e)
{
	struct buf plain = BUF_INIT(SECRETS_ENCODED_MAX), sealed = BUF_INIT(SECRETS_ENCODED_MAX + crypto_box_SEALBYTES);
	uint8_t *to = NULL;
	size_t n;
	int rc = -1;

	run_secrets_encode(secrets, &plain);
	if (!plain.failed)
		to = buf_reserve(&sealed, plain.len + crypto_box_SEALBYTES);
	if (!to)
		err_set(e, ERR_NOMEM, "no memory for a run's secrets");
	else if (crypto_box_seal(to, plain.data, plain.len, seal_key) != 0)
		err_set(e, ERR_INVALID, "the node's sealing key is not usable: enrol it again");
	else {
		buf_commit(&sealed, plain.len + crypto_box_SEALBYTES);
		out->sealed = (uint8_t *)buf_steal(&sealed, &n);
		out->sealed_len = (uint32_t)n;
		rc = out->sealed ? 0 : err_set(e, ERR_NOMEM, "no memory for a run's secrets");
	}
	secrets_wipe(&plain);
	buf_free(&sealed);
	return rc;
}

int assign_make(const struct secrets *s, const struct store_assign *from, const uint8_t seal_key[32], struct link_assign *out,
		struct err *e)
{
	struct buf b = BUF_INIT(ASSIGNMENT_MAX);
	struct run_secrets secrets;
	size_t n;
	int rc;

	memset(out, 0, sizeof(*out));
	assignment_encode(&from->a, &b);
	if (b.failed) {
		buf_free(&b);
		return err_set(e, ERR_LIMIT, "the assignment is over %d bytes", ASSIGNMENT_MAX);
	}
	rc = open_key(s, from, &secrets, e);
	if (rc == 0)
		rc = seal(&secrets, seal_key, out, e);
	sodium_memzero(&secrets, sizeof(secrets));
	if (rc == 0) {
		out->assignment = (uint8_t *)buf_steal(&b, &n);
		out->assignment_len = (uint32_t)n;
		rc = out->assignment ? 0 : err_set(e, ERR_NOMEM, "no memory for an assignment");
	}
	buf_free(&b);
	if (rc != 0)
		assign_free(out);
	return rc;
}

void assign_free(struct link_assign *a)
{
	free(a->assignment);
	free(a->sealed);
	memset(a, 0, sizeof(*a));
}
