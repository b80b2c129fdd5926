/*
 * libcurl's multi interface on libevent, with the restrictions that every outward call of ours has: http and https only, no
 * redirects, no proxy, no netrc, no body sent twice by itself, an address check on every socket, bounded bodies. One loop, one
 * thread; resolver threads are curl's.
 */
#ifndef EPH_CURLEV_H
#define EPH_CURLEV_H

#include "buf.h"
#include "error.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

struct event_base;
struct curlev;
struct curl_call;

struct curl_request {
	const char *method;
	const char *url;
	const char *const *headers; /* "Name: value", header_count of them */
	size_t header_count;
	const void *body; /* copied */
	size_t body_len;
	int connect_timeout_ms, timeout_ms; /* timeout: the whole call */
	int64_t max_body;                   /* bytes of the reply; more ends the call with ERR_LIMIT */
	const char *ca_file;                /* NULL: system's */
	/* Decides each concrete address before connect(2). NULL = net_is_global. */
	bool (*allow_addr)(void *arg, const struct sockaddr *sa, socklen_t len);
	/* Head of the reply (final status, not 1xx). May be NULL. */
	void (*on_head)(void *arg, int status);
	void (*on_header)(void *arg, const char *name, size_t name_len, const char *value, size_t value_len); /* may be NULL */
	/* Reply bytes as they come; return false to end the call (ERR_PROTOCOL). */
	bool (*on_data)(void *arg, const uint8_t *p, size_t n);
	/* Exactly once, last: status 0 when no head came; e NULL when the transfer was whole. Not called after curl_call_cancel. */
	void (*on_done)(void *arg, int status, const struct err *e);
	void *arg;
};

int curlev_new(struct event_base *base, int max_connections, struct curlev **out, struct err *e) EPH_MUST_CHECK;
void curlev_free(struct curlev *c); /* cancels what is under way */
int curlev_start(struct curlev *c, const struct curl_request *req, struct curl_call **out, struct err *e) EPH_MUST_CHECK;
void curl_call_cancel(struct curl_call *call); /* no callback after this */
/* Back-pressure: while paused no on_data comes. */
void curl_call_pause(struct curl_call *call, bool paused);

#endif
