/*
 * Strict reading of HTTP/1 request framing from the raw bytes, beside evhttp, which is laxer: bare LF, folded headers, NUL,
 * "Content-Length : 3", two lengths, "0x1" chunks and the like are how one connection is made to hold two different requests
 * for two different readers. Pure and incremental: any cut of the stream gives the same verdict.
 */
#ifndef EPH_HTTPD_SCAN_H
#define EPH_HTTPD_SCAN_H

#include "buf.h"

#include <stdbool.h>
#include <stdint.h>

enum http_scan_state {
	SCAN_REQUEST_LINE,
	SCAN_HEADERS,
	SCAN_BODY,
	SCAN_CHUNK_SIZE,
	SCAN_CHUNK,
	SCAN_CHUNK_END,
	SCAN_LAST,
	SCAN_BAD
};

struct http_scan {
	enum http_scan_state state;
	size_t max_head;
	uint64_t max_body;
	struct buf line; /* the line being read, without its end; empty outside of heads and chunk sizes */
	size_t head_bytes;
	bool http10, is_head, chunked;
	int hosts, lengths;
	uint64_t left; /* of the body or chunk */
	uint64_t body_bytes;
	uint64_t done;      /* whole requests seen */
	int status;         /* SCAN_BAD: the answer */
	const char *detail; /* SCAN_BAD: why, static */
};

void http_scan_init(struct http_scan *s, size_t max_head, uint64_t max_body);
void http_scan_free(struct http_scan *s);
/* False (for good) when the bytes break a rule or a bound; status and detail say which. */
bool http_scan_feed(struct http_scan *s, const uint8_t *p, size_t n);
/* True between requests: nothing of the next one has come. */
bool http_scan_at_rest(const struct http_scan *s);

#endif
