/*
 * evhttp, hardened: header, body and read-buffer limits, a deadline for a whole request, strict framing (what Debian's 2.1.12
 * still lets through is refused with 400 + close before the handler), a process-wide byte budget for bodies (503), bounded
 * connections, HEAD answered like GET without its body, slow readers cut. One loop, one thread.
 */
#ifndef EPH_HTTPD_H
#define EPH_HTTPD_H

#include "buf.h"
#include "error.h"

#include <stdbool.h>
#include <stdint.h>

struct evbuffer;
struct event_base;
struct evhttp_request;
struct httpd;
struct http_req;

enum http_method { HTTP_GET = 1, HTTP_POST = 2, HTTP_PUT = 4, HTTP_PATCH = 8, HTTP_DELETE = 16, HTTP_HEAD = 32, HTTP_OPTIONS = 64 };

struct httpd_options {
	const char *listen; /* "127.0.0.1:8080", port 0 allowed */
	int listen_fd;      /* above 0: a bound socket (net_listen) to use instead; closed with the server, and when it fails */
	size_t max_headers; /* bytes of request line and headers; more -> 431 */
	size_t max_body;    /* bytes; more -> 413 problem naming the limit */
	size_t body_budget; /* bytes of bodies in flight for the process; more -> 503 with Retry-After */
	int request_deadline_ms; /* first byte to last byte of a request */
	int idle_timeout_ms;     /* keep-alive */
	int max_connections;
	/* Called once per sane request; must answer now or later with one of the http_reply calls or http_stream_*. */
	void (*handler)(void *arg, struct http_req *req);
	/* Called for what httpd itself refuses (400, 413, 503...), so that errors look the same everywhere. May be NULL: plain
	 * text. */
	void (*refuse)(void *arg, struct http_req *req, int status, const char *detail);
	void *arg;
};

int httpd_new(struct event_base *base, const struct httpd_options *opt, struct httpd **out, struct err *e) EPH_MUST_CHECK;
uint16_t httpd_port(const struct httpd *h);   /* the bound one */
int httpd_connections(const struct httpd *h); /* open now */
int httpd_sending(const struct httpd
				*h); /* connections with a request under way or bytes that are not sent yet; for an orderly end */
size_t httpd_bytes_held(const struct httpd *h); /* of requests, against body_budget */
void httpd_stop_accepting(struct httpd *h);
void httpd_free(struct httpd *h);

enum http_method http_method(const struct http_req *r);
const char *http_method_name(const struct http_req *r);
const char *http_path(const struct http_req *r); /* decoded once; a bad escape or NUL was refused with 400 already */
const char *http_header(const struct http_req *r, const char *name); /* NULL when absent; first one */
int http_header_count(const struct http_req *r, const char *name);
/* Query parameter, decoded; NULL when absent. *count (may be NULL) is how often it stands there. */
const char *http_query(const struct http_req *r, const char *name, int *count);
size_t http_query_size(const struct http_req *r);
void http_query_at(const struct http_req *r, size_t i, const char **name, const char **value);
const uint8_t *http_body(const struct http_req *r, size_t *n); /* contiguous, valid until the reply */
size_t http_body_size(const struct http_req *r);
/* The body, taken out without copying it: the caller's (evbuffer_free), on any thread. NULL: no memory, and it stays. */
struct evbuffer *http_take_body(struct http_req *r);
const char *http_peer(const struct http_req *r); /* address text */
void *http_user(const struct http_req *r);
void http_set_user(struct http_req *r, void *user, void (*free_user)(void *user)); /* freed with the request */
/* Called if the client goes away before the reply; after it the request must not be touched. */
void http_on_close(struct http_req *r, void (*cb)(void *arg), void *arg);

void http_reply_header(struct http_req *r, const char *name, const char *value); /* before the reply; CR/LF refused */
/* Sends the whole reply and ends the request (r is gone). body may be NULL. */
void http_reply(struct http_req *r, int status, const char *content_type, const void *body, size_t n);

/* Streaming (SSE): head, then chunks. http_stream_queued tells bytes not sent yet: above 256 KiB the caller must cut the client
 * with http_stream_abort. No idle timeout while streaming; the caller sends heartbeats. */
void http_stream_start(struct http_req *r, int status, const char *content_type);
void http_stream_write(struct http_req *r, const void *p, size_t n);
size_t http_stream_queued(const struct http_req *r);
void http_stream_end(struct http_req *r);   /* r is gone */
void http_stream_abort(struct http_req *r); /* closes the connection; r is gone */

#endif
