/*
 * A POST /v1/runs on its way: what was read of its body, and what the database said about it so far. runs.c goes through the steps;
 * creation_read (create.c) is the costly one and pure, so that large bodies are read on the worker's thread.
 */
#ifndef CONTROLD_API_CREATE_H
#define CONTROLD_API_CREATE_H

#include "api_internal.h"
#include "common/worker.h"
#include "secrets.h"

#include <stdbool.h>
#include <stdint.h>

struct evbuffer;

struct creation {
	struct worker_item item; /* first: `done` gets it */
	struct api_req *r;
	struct evbuffer *body; /* owned, until it was read */
	char *key_header;      /* owned; the Idempotency-Key header, NULL = none */

	/* What was read. */
	struct field_errors errors;
	struct run_request *rq;             /* owned; NULL: errors say why */
	struct buf echo;                    /* the run's `request` */
	uint8_t identity[SECRETS_HASH_LEN]; /* of the body, when there is an idempotency key */
	uint8_t request_hash[32];
	bool no_memory;

	/* What was decided. */
	int64_t wait_seconds; /* Prefer: wait=N; 0 = none */
	int64_t cap_micros;
	char model[RUN_MODEL_MAX + 1];
	struct price price;
	bool refused; /* by what `errors` says, unless the key has an answer already */

	/* In api's list of large ones until it is freed, also when its client is gone; prev NULL: not in it. */
	size_t large; /* bytes of its body */
	struct creation *next, **prev;
};

/* Takes the body over. NULL: no memory. Freed with the request. */
struct creation *creation_new(struct api_req *r);
/* From the body to everything that needs no database. Any thread. */
void creation_read(struct creation *cr);
/* Into the list of large ones: `bytes` of a body, and as much again in memory for what was read of it. */
void creation_count(struct creation *cr, size_t bytes);
size_t creations_bytes(const struct api *a);
void creations_forget(struct api *a); /* api goes; what the store still holds of them lives on */

#endif
