/*
 * A model provider for tests of model calls, on the test's own loop: it takes raw connections (plain or TLS), reads requests whole
 * and lets the test decide what comes back, byte for byte: cut, slow, endless, reset. It counts what it was asked.
 */
#ifndef TEST_UPSTREAM_H
#define TEST_UPSTREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct event_base;
struct bufferevent;
struct upstream;
struct ssl_ctx_st;

enum after {
	AFTER_CLOSE, /* when all is sent */
	AFTER_KEEP,  /* the next request may come on it */
	AFTER_HANG,  /* nothing more is said */
	AFTER_RESET, /* RST instead of FIN */
};

/* One answer. Bytes are sent as they stand. */
struct answer {
	const char *bytes;
	size_t n; /* 0: strlen(bytes) */
	enum after after;
	const char *flood; /* then this again and again, flood_total bytes of it */
	size_t flood_total;
	int trickle_ms; /* > 0: one byte of `bytes` each so many ms */
};

struct asked {
	const char *head, *body; /* terminated; valid inside the callback */
	size_t body_len;
	int number; /* of the request, from 1 */
	int on_connection;
};

struct upstream_options {
	struct event_base *base;
	struct ssl_ctx_st *tls; /* NULL: plain */
	bool at_head;           /* answer as soon as the head is there */
	/* What to answer; false: hang up without a word. */
	bool (*decide)(void *arg, const struct asked *q, struct answer *out);
	void *arg;
};

struct upstream_counts {
	int connections, requests, open;
	int bodies;       /* requests whose whole body came */
	uint64_t read;    /* bytes, after TLS */
	uint64_t flooded; /* bytes of floods that left */
	char last_auth[600];
};

struct upstream *upstream_new(const struct upstream_options *opt);
void upstream_free(struct upstream *u);
int upstream_port(const struct upstream *u);
struct upstream_counts *upstream_counts(struct upstream *u);
/* Closes every connection that waits for a request (as a provider does with idle ones); `reset`: with an RST. */
void upstream_close_idle(struct upstream *u, bool reset);
struct ssl_ctx_st *upstream_self_signed(void); /* for 127.0.0.1, trusted by nobody; SSL_CTX_free */

#endif
