/*
 * POST /v1/runs: the body and the Idempotency-Key header, checked field by field into a struct run_request. All faults are found in
 * one go, each naming the field, the limit and the fix. Pure: what needs the database (does the model exist, is the cap enough for
 * it) is asked by runs.c afterwards.
 */
#ifndef CONTROLD_API_RUN_REQUEST_H
#define CONTROLD_API_RUN_REQUEST_H

#include "api.h"
#include "common/json.h"
#include "problem.h"
#include "proto/guest.h"

#include <stdbool.h>
#include <stdint.h>

#define RUN_BODY_MAX (12 * 1024 * 1024)
#define RUN_PROMPT_MAX GUEST_PROMPT_MAX
#define RUN_FILES_MAX GUEST_FILES_MAX
#define RUN_INLINE_MAX (8 * 1024 * 1024) /* all inline files together */
#define RUN_MODEL_MAX 128
#define RUN_METADATA_MAX 16
#define RUN_METADATA_KEY_MAX 64    /* characters */
#define RUN_METADATA_VALUE_MAX 512 /* characters */
#define RUN_MODEL_CALLS_MAX 1000
#define RUN_MODEL_CALLS_DEFAULT 100
#define RUN_IDEMPOTENCY_MAX 255

/* What this deployment allows. */
struct run_limits {
	int64_t default_timeout_seconds, max_timeout_seconds;
	int64_t max_cost_micros;
};

struct run_file {
	char path[GUEST_PATH_MAX + 1];
	uint8_t *data; /* owned */
	size_t size;
	uint8_t sha256[32];
};

struct run_pair {
	const char *key, *value; /* views into the document */
};

struct run_request {
	struct json *doc; /* owned: the parsed body; the views below point into it */
	const char *prompt;
	size_t prompt_len;
	const char *model; /* NULL = the organization's default */
	bool shell;
	enum api_size size;
	int64_t timeout_seconds;
	int64_t max_cost_micros; /* 0 = the organization's default */
	int64_t max_model_calls;
	struct run_pair metadata[RUN_METADATA_MAX];
	size_t metadata_count;
	struct run_file files[RUN_FILES_MAX];
	size_t file_count;
	char idempotency_key[RUN_IDEMPOTENCY_MAX + 1]; /* "" = none; from header or body, without quotes */
};

/*
 * Reads the body and the header (NULL when absent). 0 and *out (run_request_free) when everything is fine; -1 and at least one
 * entry in `errors` when not. ERR_NOMEM faults are reported as such an entry as well.
 */
int run_request_parse(const void *body, size_t n, const char *key_header, const struct run_limits *limits, struct run_request **out,
		struct field_errors *errors) EPH_MUST_CHECK;
void run_request_free(struct run_request *rq);

/* The body in its one spelling (parsed, keys sorted, without idempotency_key): equal for equal requests. For the keyed hash. */
bool run_request_identity(const struct run_request *rq, struct buf *out);
/*
 * What was asked, as the run's `request` shows it: the body with files as {path, size, sha256} and without idempotency_key,
 * in canonical form. Its SHA-256 is the run's request hash, so a client can compute it from what it reads.
 */
bool run_request_echo(const struct run_request *rq, struct buf *out);

/* "abc" or abc -> abc. False: empty, too long, or not visible ASCII. */
bool idempotency_key_read(const char *s, char out[RUN_IDEMPOTENCY_MAX + 1]);
const char *api_size_name(enum api_size s);
/* API_SIZE_COUNT when unknown. */
enum api_size api_size_parse(const char *s);

/* run_files.c: the `files` member. */
void run_files_parse(struct run_request *rq, const struct json *v, const struct pointer *at, struct field_errors *errors);

#endif
