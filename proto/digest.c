/* What is hashed: the event chain and the receipt (SHA-256 by libsodium). Pure. */
#include "assignment.h"
#include "event.h"

#include "common/wire.h"

#include <sodium.h>
#include <string.h>

void event_hash(const uint8_t prev[EVENT_HASH_LEN], const void *bytes, size_t n, uint8_t next[EVENT_HASH_LEN])
{
	crypto_hash_sha256_state st;

	crypto_hash_sha256_init(&st);
	crypto_hash_sha256_update(&st, prev, EVENT_HASH_LEN);
	crypto_hash_sha256_update(&st, bytes, n);
	crypto_hash_sha256_final(&st, next);
}

void receipt_digest(const char *run_id, uint32_t attempt, const uint8_t request_hash[SHA256_LEN], const struct run_end *r,
		uint8_t out[SHA256_LEN])
{
	struct buf b = BUF_INIT(1024);
	const struct usage *u = &r->usage;

	wire_put_str(&b, "ephemeral/receipt/1");
	wire_put_str(&b, run_id);
	wire_put_u32(&b, attempt);
	wire_put_raw(&b, request_hash, SHA256_LEN);
	wire_put_raw(&b, r->image_hash, SHA256_LEN);
	wire_put_str(&b, r->isolation);
	wire_put_u64(&b, r->last_seq);
	wire_put_raw(&b, r->last_hash, EVENT_HASH_LEN);
	wire_put_i64(&b, u->model_calls);
	wire_put_i64(&b, u->input_tokens);
	wire_put_i64(&b, u->cached_input_tokens);
	wire_put_i64(&b, u->output_tokens);
	wire_put_i64(&b, u->web_requests);
	wire_put_i64(&b, u->web_searches);
	wire_put_i64(&b, u->compute_ms);
	wire_put_i64(&b, u->unmetered_model_micros);
	memset(out, 0, SHA256_LEN);
	if (!b.failed)
		crypto_hash_sha256(out, b.data, b.len);
	buf_free(&b);
}
