/* The node link's envelope and join tokens (link.h). Pure. */
#include "link.h"

#include "common/text.h"
#include "common/wire.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

const char *const link_type_names[LINK_TYPES] = { "", "challenge", "enrol", "next", "start", "events", "finish", "refuse", "blob",
	"image", "image_blob", "bye" };
const char *const link_result_names[LINK_RESULTS + 1] = { "ok", "bad", "unauthentic", "revoked", "busy", "none" };

size_t link_signed_message(const struct link_request *r, const uint8_t challenge[32], uint8_t out[256])
{
	struct buf b = BUF_INIT(256);
	uint8_t digest[SHA256_LEN];
	size_t n;

	crypto_hash_sha256(digest, r->body, r->body_len);
	wire_put_raw(&b, "ephemeral/link/1", 16);
	wire_put_raw(&b, challenge, 32);
	wire_put_str(&b, r->node_id);
	wire_put_u32(&b, r->context);
	wire_put_u64(&b, r->counter);
	wire_put_u8(&b, r->type);
	wire_put_raw(&b, digest, sizeof(digest));
	n = b.failed ? 0 : b.len;
	if (n > 0)
		memcpy(out, b.data, n);
	buf_free(&b);
	return n;
}

void link_request_encode(const struct link_request *r, struct buf *out)
{
	wire_put_u8(out, LINK_VERSION);
	wire_put_u8(out, r->type);
	wire_put_u64(out, r->request_id);
	wire_put_str(out, r->node_id);
	wire_put_u32(out, r->context);
	wire_put_u64(out, r->counter);
	wire_put_bytes(out, r->body, r->body_len);
	wire_put_raw(out, r->signature, sizeof(r->signature));
}

int link_request_decode(const void *p, size_t n, struct link_request *out, struct err *e)
{
	struct wire_reader r;

	if (n > LINK_MESSAGE_MAX)
		return err_set(e, ERR_LIMIT, "link request: %zu bytes, the limit is %d", n, LINK_MESSAGE_MAX);
	wire_read_init(&r, p, n);
	if (wire_u8(&r) != LINK_VERSION)
		wire_fail(&r, "version");
	out->type = wire_u8(&r);
	if (out->type < LINK_CHALLENGE || out->type >= LINK_TYPES)
		wire_fail(&r, "type");
	out->request_id = wire_u64(&r);
	wire_str_fixed(&r, out->node_id, sizeof(out->node_id));
	out->context = wire_u32(&r);
	out->counter = wire_u64(&r);
	out->body = wire_bytes(&r, LINK_MESSAGE_MAX, &out->body_len);
	wire_raw(&r, out->signature, sizeof(out->signature));
	return wire_end(&r, "link request", e);
}

void link_reply_encode(const struct link_reply *r, struct buf *out)
{
	wire_put_u8(out, LINK_VERSION);
	wire_put_u8(out, r->type);
	wire_put_u64(out, r->request_id);
	wire_put_u8(out, r->result);
	wire_put_bytes(out, r->body, r->body_len);
}

int link_reply_decode(const void *p, size_t n, struct link_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	if (wire_u8(&r) != LINK_VERSION)
		wire_fail(&r, "version");
	out->type = wire_u8(&r);
	out->request_id = wire_u64(&r);
	out->result = wire_u8(&r);
	if (out->result > LINK_BUSY)
		wire_fail(&r, "result");
	out->body = wire_bytes(&r, LINK_MESSAGE_MAX, &out->body_len);
	return wire_end(&r, "link reply", e);
}

#define TOKEN_SECRET_LEN 49 /* "ephnt_" + 43 */

bool join_token_print(const struct join_token *t, struct buf *out)
{
	struct buf rest = BUF_INIT(8192);
	bool ok = false;

	wire_put_u8(&rest, 1);
	wire_put_str(&rest, t->addresses);
	wire_put_str(&rest, t->ca_pem);
	wire_put_i64(&rest, t->expires_ms);
	if (!rest.failed && strlen(t->secret) == TOKEN_SECRET_LEN) {
		char *text = malloc(4 * ((rest.len + 2) / 3) + 1);

		if (text) {
			text_b64url(rest.data, rest.len, text);
			ok = buf_add_str(out, t->secret) && buf_add_char(out, '.') && buf_add_str(out, text);
			free(text);
		}
	}
	buf_free(&rest);
	return ok;
}

int join_token_parse(const char *s, struct join_token *out, struct err *e)
{
	uint8_t rest[6144];
	struct wire_reader r;
	size_t n;

	memset(out, 0, sizeof(*out));
	if (strncmp(s, "ephnt_", 6) != 0 || strlen(s) <= TOKEN_SECRET_LEN + 1 || s[TOKEN_SECRET_LEN] != '.')
		return err_set(e, ERR_INVALID, "join token: must be ephnt_ + 43 characters + '.' + the rest; copy the whole token");
	memcpy(out->secret, s, TOKEN_SECRET_LEN);
	out->secret[TOKEN_SECRET_LEN] = '\0';
	if (!text_unb64url(s + TOKEN_SECRET_LEN + 1, rest, sizeof(rest), &n))
		return err_set(e, ERR_INVALID, "join token: the part after '.' is damaged; copy the whole token");
	wire_read_init(&r, rest, n);
	if (wire_u8(&r) != 1)
		wire_fail(&r, "version");
	wire_str_fixed(&r, out->addresses, sizeof(out->addresses));
	wire_str_fixed(&r, out->ca_pem, sizeof(out->ca_pem));
	out->expires_ms = wire_i64(&r);
	return wire_end(&r, "join token", e);
}
