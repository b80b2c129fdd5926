/*
 * The server side of HTTP/1.1 on one unix socket, as small as the real one's: connections are kept, one request is answered before
 * the next is looked at, a body has a Content-Length of at most 51,200 bytes, the status line has no reason phrase.
 */
#ifndef STANDIN_HTTP_H
#define STANDIN_HTTP_H

#include "common/buf.h"
#include "common/error.h"

#define HTTP_BODY_MAX 51200
#define HTTP_CONNECTIONS_MAX 10

struct http_answer {
	int status;      /* 0: no answer at all, for faults */
	struct buf body; /* JSON, may be empty */
};

typedef void http_handler(void *arg, const char *method, const char *path, const char *body, size_t n, struct http_answer *out);

/* path: makes the socket there; NULL: fd is a listening socket. */
int http_open(const char *path, int fd, http_handler *handler, void *arg, struct err *e) EPH_MUST_CHECK;
/* Removes the socket of a path. */
void http_close(void);

struct pollfd;
/* Descriptors to wait for: at most HTTP_CONNECTIONS_MAX + 1. Returns how many. */
size_t http_poll(struct pollfd *out);
/* After poll: the same array. */
void http_ready(const struct pollfd *fds, size_t n);

#endif
