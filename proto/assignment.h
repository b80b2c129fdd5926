/*
 * What a node needs to execute a run: made by controld at the claim, carried by link and keeper, used by the broker. Secrets are
 * not in it but beside it, sealed to the node's X25519 key (crypto_box_seal over an encoded `struct run_secrets`), afresh at each
 * delivery. Encoded size <= ASSIGNMENT_MAX; file contents are fetched by hash.
 */
#ifndef PROTO_ASSIGNMENT_H
#define PROTO_ASSIGNMENT_H

#include "common/buf.h"
#include "common/error.h"
#include "common/ids.h"
#include "common/price.h"
#include "event.h"
#include "guest.h"

#include <stdbool.h>
#include <stdint.h>

#define ASSIGNMENT_MAX (1536 * 1024)
#define TOKEN_LEN 16 /* claim token: random bytes, fresh at each claim */
#define SHA256_LEN 32

enum limit_param { LIMIT_MAX_COMPLETION_TOKENS = 1, LIMIT_MAX_TOKENS };

struct model_spec {
	char id[129];       /* "provider/model" as clients know it */
	char upstream[129]; /* model name in the provider's request */
	char base_url[513]; /* ends in /v1; /chat/completions is appended */
	bool any_address;   /* the operator listed this provider: private and loopback addresses may be dialled */
	enum limit_param limit_param;
	int64_t max_output_tokens;     /* of one call */
	int64_t min_output_tokens;     /* a call that cannot have this many is not made: budget_exceeded */
	int64_t tokens_per_byte_milli; /* bound on input tokens: bytes * this / 1000 + overhead; default 1000 */
	int64_t overhead_tokens;
	int64_t call_timeout_ms; /* default 60000 */
};

struct assign_file {
	char path[GUEST_PATH_MAX + 1];
	uint64_t size;
	uint8_t sha256[SHA256_LEN];
};

struct assignment {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	uint32_t attempt;     /* 1.. */
	int64_t queued_at_ms; /* Unix ms, Postgres' clock */
	int64_t age_ms;       /* of the run when this was made, Postgres' clock */
	uint64_t next_seq;    /* first seq that the node may write */
	uint8_t prev_hash[EVENT_HASH_LEN];
	uint8_t request_hash[SHA256_LEN]; /* of the canonical request */
	uint32_t timeout_s;               /* counted by the broker from worker.started */
	uint32_t max_model_calls;
	uint32_t memory_mib;
	uint32_t vcpus;
	bool shell;
	bool zero_data_retention;
	int64_t cap_micros;
	struct price price;
	struct model_spec model;
	char *prompt; /* <= GUEST_PROMPT_MAX */
	struct assign_file *files;
	uint32_t file_count; /* <= GUEST_FILES_MAX */
};

void assignment_encode(const struct assignment *a, struct buf *out);
int assignment_decode(const void *p, size_t n, struct assignment *out, struct err *e) EPH_MUST_CHECK;
void assignment_free(struct assignment *a);

struct run_secrets {
	char model_key[513]; /* bearer for the provider; "" = none */
};
void run_secrets_encode(const struct run_secrets *s, struct buf *out);
int run_secrets_decode(const void *p, size_t n, struct run_secrets *out, struct err *e) EPH_MUST_CHECK;

/* The end of a run as its host reports it. */
struct run_end {
	uint32_t code;     /* enum errcode; ERRCODE_NONE = succeeded */
	char detail[1025]; /* clean UTF-8; "" = the code's title */
	struct usage usage;
	struct cost cost;  /* clamped to the cap */
	uint64_t last_seq; /* microvm.destroyed */
	uint8_t last_hash[EVENT_HASH_LEN];
	int64_t worker_started_t_ms; /* -1 never */
	uint8_t image_hash[SHA256_LEN];
	char isolation[16];            /* "kvm" | "emulated" */
	uint8_t receipt_signature[64]; /* Ed25519 by the node's receipt key over receipt_digest; zero when there is none */
	uint8_t *output;               /* owned; clean UTF-8 not assumed */
	uint32_t output_len;           /* <= GUEST_RESULT_MAX */
};
void run_end_encode(const struct run_end *r, struct buf *out);
int run_end_decode(const void *p, size_t n, struct run_end *out, struct err *e) EPH_MUST_CHECK;
void run_end_free(struct run_end *r);
/* SHA-256 over "ephemeral/receipt/1", run id, attempt, request hash, image hash, isolation, last_seq, last_hash and usage. */
void receipt_digest(const char *run_id, uint32_t attempt, const uint8_t request_hash[SHA256_LEN], const struct run_end *r,
		uint8_t out[SHA256_LEN]);

#endif
