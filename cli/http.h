/*
 * HTTP over libcurl, one request at a time, blocking, with Ctrl-C heard at once. http and https only, no redirects, no proxy for
 * loopback, no netrc. Used by api.c; the handle keeps its connection between requests.
 */
#ifndef CLI_HTTP_H
#define CLI_HTTP_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

#define HTTP_BODY_MAX ((size_t)64 * 1024 * 1024) /* longest answer that is kept */

struct http;

struct http_request {
	const char *method;
	const char *url;
	const char *const *headers; /* "Name: value", ended by NULL; may be NULL */
	const void *body;           /* NULL = none */
	size_t body_len;
	int64_t timeout_ms; /* whole exchange; 0 = none */
	int64_t idle_ms;    /* longest silence; 0 = none */
	/* Bytes of a 200 answer as they come, instead of keeping them; false ends the request with ERR_CONFLICT. */
	bool (*on_bytes)(void *arg, const void *p, size_t n);
	void (*on_tick)(void *arg); /* about ten times a second, or NULL */
	void *arg;
};

struct http_response {
	long status;
	struct buf body;
	int64_t retry_after_s; /* -1 when there is no such header */
};

struct http *http_new(struct err *e);
void http_free(struct http *h);
/* 0 with the answer (any status), or -1: ERR_UNAVAILABLE (no answer), ERR_TIMEOUT, ERR_CONFLICT (on_bytes or Ctrl-C ended it). */
int http_send(struct http *h, const struct http_request *req, struct http_response *out, struct err *e) EPH_MUST_CHECK;
void http_response_init(struct http_response *r);
void http_response_free(struct http_response *r);

#endif
