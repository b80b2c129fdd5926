/*
 * The node's keys and enrolment (identity.h). Keeper's thread; blocks on the disk at start and at the enrolment.
 *
 * identity.key: magic "EPHK", u16 version, 32 bytes seed of the Ed25519 signing key, 32 bytes X25519 secret, 32 bytes seed of the
 * Ed25519 receipt key. node: magic "EPHN", u16 version, node id, certificate, root key, addresses, CA.
 */
#include "keeper/identity.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "keeper/files.h"

#include <sodium.h>
#include <string.h>

#define KEY_MAGIC UINT32_C(0x4b485045)
#define NODE_MAGIC UINT32_C(0x4e485045)
#define VERSION 1
#define SEAL_CONTEXT "ephemeral/seal-key/1"
#define RECEIPT_CONTEXT "ephemeral/receipt-key/1"

struct identity {
	char dir[512];
	uint8_t sign_secret[crypto_sign_SECRETKEYBYTES], sign_public[crypto_sign_PUBLICKEYBYTES];
	uint8_t seal_secret[crypto_box_SECRETKEYBYTES], seal_public[crypto_box_PUBLICKEYBYTES];
	uint8_t receipt_secret[crypto_sign_SECRETKEYBYTES], receipt_public[crypto_sign_PUBLICKEYBYTES];
	uint8_t seal_sig[crypto_sign_BYTES], receipt_sig[crypto_sign_BYTES];
	struct link_enrol_reply reply; /* node_id "" = not enrolled */
	char addresses[513], ca_pem[4097];
};

struct seeds {
	uint8_t sign[32], seal[32], receipt[32];
};

static void sign_key(const struct identity *id, const char *context, const uint8_t key[32], uint8_t sig[64])
{
	struct buf message = BUF_INIT(64);

	check_abort(buf_add_str(&message, context) && buf_add(&message, key, 32));
	crypto_sign_detached(sig, NULL, message.data, message.len, id->sign_secret);
	buf_free(&message);
}

static void derive(struct identity *id, const struct seeds *s)
{
	crypto_sign_seed_keypair(id->sign_public, id->sign_secret, s->sign);
	memcpy(id->seal_secret, s->seal, sizeof(id->seal_secret));
	crypto_scalarmult_base(id->seal_public, id->seal_secret);
	crypto_sign_seed_keypair(id->receipt_public, id->receipt_secret, s->receipt);
	sign_key(id, SEAL_CONTEXT, id->seal_public, id->seal_sig);
	sign_key(id, RECEIPT_CONTEXT, id->receipt_public, id->receipt_sig);
}

static int make_keys(struct identity *id, struct seeds *s, struct err *e)
{
	struct buf b = BUF_INIT(256);
	int rc;

	random_bytes(s, sizeof(*s));
	wire_put_u32(&b, KEY_MAGIC);
	wire_put_u16(&b, VERSION);
	wire_put_raw(&b, s->sign, 32);
	wire_put_raw(&b, s->seal, 32);
	wire_put_raw(&b, s->receipt, 32);
	rc = b.failed ? err_set(e, ERR_NOMEM, "no memory") : files_store(id->dir, "identity.key", b.data, b.len, 0600, e);
	if (b.data)
		sodium_memzero(b.data, b.len);
	buf_free(&b);
	if (rc == 0)
		log_info("identity made path=%s/identity.key", id->dir);
	return rc;
}

static int load_keys(struct identity *id, struct seeds *s, struct err *e)
{
	struct buf b = BUF_INIT(256);
	struct wire_reader r;
	char path[600];
	int rc = -1;

	if (!text_fmt(path, sizeof(path), "%s/identity.key", id->dir))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	if (files_load(path, &b, e)) {
		buf_free(&b);
		return e->code == ERR_NOT_FOUND ? make_keys(id, s, e) : -1;
	}
	wire_read_init(&r, b.data, b.len);
	if (wire_u32(&r) != KEY_MAGIC || wire_u16(&r) != VERSION)
		wire_fail(&r, "magic or version");
	wire_raw(&r, s->sign, 32);
	wire_raw(&r, s->seal, 32);
	wire_raw(&r, s->receipt, 32);
	if (wire_end(&r, "identity.key", e))
		err_wrap(e, "%s is damaged; restore it, or remove it together with %s/node and enrol this host again", path,
				id->dir);
	else
		rc = 0;
	if (b.data)
		sodium_memzero(b.data, b.len);
	buf_free(&b);
	return rc;
}

static int load_node(struct identity *id, struct err *e)
{
	struct buf b = BUF_INIT(16384);
	struct wire_reader r;
	char path[600];
	int rc;

	if (!text_fmt(path, sizeof(path), "%s/node", id->dir))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	if (files_load(path, &b, e)) {
		buf_free(&b);
		return e->code == ERR_NOT_FOUND ? 0 : -1;
	}
	wire_read_init(&r, b.data, b.len);
	if (wire_u32(&r) != NODE_MAGIC || wire_u16(&r) != VERSION)
		wire_fail(&r, "magic or version");
	wire_str_fixed(&r, id->reply.node_id, sizeof(id->reply.node_id));
	wire_raw(&r, id->reply.certificate, sizeof(id->reply.certificate));
	wire_raw(&r, id->reply.root_key, sizeof(id->reply.root_key));
	wire_str_fixed(&r, id->addresses, sizeof(id->addresses));
	wire_str_fixed(&r, id->ca_pem, sizeof(id->ca_pem));
	if (!r.failed && !id_valid("node", id->reply.node_id))
		wire_fail(&r, "node id");
	rc = wire_end(&r, "node", e);
	if (rc)
		err_wrap(e, "%s is damaged; remove it and enrol this host again", path);
	buf_free(&b);
	return rc;
}

int identity_open(const char *state_dir, struct identity **out, struct err *e)
{
	struct identity *id = calloc(1, sizeof(*id));
	struct seeds seeds = { .sign = { 0 } };
	int rc;

	*out = NULL;
	if (!id)
		return err_set(e, ERR_NOMEM, "no memory");
	if (!text_copy(id->dir, sizeof(id->dir), state_dir)) {
		free(id);
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	}
	rc = load_keys(id, &seeds, e);
	if (rc == 0)
		derive(id, &seeds);
	sodium_memzero(&seeds, sizeof(seeds));
	if (rc || load_node(id, e)) {
		identity_free(id);
		return -1;
	}
	*out = id;
	return 0;
}

void identity_free(struct identity *id)
{
	if (!id)
		return;
	sodium_memzero(id, sizeof(*id));
	free(id);
}

int identity_read_token(const char *path, char **text, struct join_token *out, struct err *e)
{
	struct buf b = BUF_INIT(16384);

	*text = NULL;
	if (files_load(path, &b, e)) {
		buf_free(&b);
		return err_wrap(e, "join_token_file");
	}
	while (b.len > 0 && (b.data[b.len - 1] == '\n' || b.data[b.len - 1] == ' ' || b.data[b.len - 1] == '\r'))
		b.len--;
	*text = buf_steal(&b, NULL);
	if (!*text)
		return err_set(e, ERR_NOMEM, "no memory");
	if (join_token_parse(*text, out, e))
		return err_wrap(e, "join_token_file %s", path);
	if (out->expires_ms > 0 && out->expires_ms < clock_real_ms())
		return err_set(e, ERR_DENIED, "the join token in %s has expired: make a new one with `ephemeral admin node token`",
				path);
	return 0;
}

bool identity_enrolled(const struct identity *id)
{
	return id->reply.node_id[0] != '\0';
}

const char *identity_node_id(const struct identity *id)
{
	return id->reply.node_id;
}

bool identity_image_signed(const struct identity *id, const uint8_t hash[SHA256_LEN], const uint8_t signature[64])
{
	uint8_t message[128];
	size_t n = link_image_message(id->reply.node_id, hash, message);

	return identity_enrolled(id) && n > 0 && crypto_sign_verify_detached(signature, message, n, id->reply.root_key) == 0;
}

int identity_enrol(struct identity *id, const struct link_enrol_reply *reply, const struct join_token *token, struct err *e)
{
	struct buf b = BUF_INIT(16384);
	int rc;

	if (!id_valid("node", reply->node_id))
		return err_set(e, ERR_INVALID, "controld gave no node id");
	wire_put_u32(&b, NODE_MAGIC);
	wire_put_u16(&b, VERSION);
	wire_put_str(&b, reply->node_id);
	wire_put_raw(&b, reply->certificate, sizeof(reply->certificate));
	wire_put_raw(&b, reply->root_key, sizeof(reply->root_key));
	wire_put_str(&b, token->addresses);
	wire_put_str(&b, token->ca_pem);
	rc = b.failed ? err_set(e, ERR_NOMEM, "no memory") : files_store(id->dir, "node", b.data, b.len, 0600, e);
	buf_free(&b);
	if (rc)
		return -1;
	id->reply = *reply;
	if (!text_copy(id->addresses, sizeof(id->addresses), token->addresses) ||
			!text_copy(id->ca_pem, sizeof(id->ca_pem), token->ca_pem))
		return err_set(e, ERR_LIMIT, "addresses or CA of the join token are too long");
	return 0;
}

void identity_fill(const struct identity *id, struct role_link_init *out)
{
	memcpy(out->node_id, id->reply.node_id, sizeof(out->node_id));
	memcpy(out->addresses, id->addresses, sizeof(out->addresses));
	memcpy(out->ca_pem, id->ca_pem, sizeof(out->ca_pem));
	memcpy(out->sign_secret, id->sign_secret, sizeof(out->sign_secret));
	memcpy(out->seal_public, id->seal_public, sizeof(out->seal_public));
	memcpy(out->receipt_public, id->receipt_public, sizeof(out->receipt_public));
	memcpy(out->seal_sig, id->seal_sig, sizeof(out->seal_sig));
	memcpy(out->receipt_sig, id->receipt_sig, sizeof(out->receipt_sig));
}

int identity_unseal(const struct identity *id, const uint8_t *sealed, size_t n, struct buf *out, struct err *e)
{
	uint8_t *p;

	if (n < crypto_box_SEALBYTES)
		return err_set(e, ERR_INVALID, "sealed secrets are too short");
	p = buf_reserve(out, n - crypto_box_SEALBYTES);
	if (!p)
		return err_set(e, ERR_LIMIT, "sealed secrets are too long");
	if (crypto_box_seal_open(p, sealed, n, id->seal_public, id->seal_secret) != 0)
		return err_set(e, ERR_DENIED, "secrets were not sealed to this node's key");
	buf_commit(out, n - crypto_box_SEALBYTES);
	return 0;
}

void identity_sign_receipt(const struct identity *id, const uint8_t digest[SHA256_LEN], uint8_t signature[64])
{
	crypto_sign_detached(signature, NULL, digest, SHA256_LEN, id->receipt_secret);
}
