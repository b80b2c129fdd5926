/*
 * Answers of Cloud Hypervisor's API: HTTP/1.1 over a connection of its own, one answer to each request. A reader over bytes in any
 * cut, strict and bounded: what speaks here may be a guest that got out. Only what that server says is understood: a status line,
 * headers, a body of a given length or none.
 *
 * Pure; used by ch_api.c on channel's only thread.
 */
#ifndef NODED_CHANNEL_CH_HTTP_H
#define NODED_CHANNEL_CH_HTTP_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>

#define CH_HTTP_HEAD_MAX 8192
#define CH_HTTP_BODY_MAX (1024 * 1024) /* vm.info with its device tree is a few ten KiB */

struct ch_http {
	enum { CH_HTTP_STATUS, CH_HTTP_HEADER, CH_HTTP_BODY, CH_HTTP_WHOLE } state;
	struct buf line; /* what there is of the line that is read */
	struct buf body;
	size_t head;      /* bytes of status line and headers so far */
	size_t body_left; /* bytes of the body still to come */
	bool has_length;
	int status;
};

void ch_http_init(struct ch_http *h);
void ch_http_free(struct ch_http *h);
/* Forgets the answer that was whole: the next one may come. */
void ch_http_next(struct ch_http *h);
/*
 * Takes bytes up to the end of one answer: *used says how many. 1: the answer is whole, in status and body; 0: more must come;
 * -1: this is no answer of that server.
 */
int ch_http_feed(struct ch_http *h, const char *bytes, size_t n, size_t *used, struct err *e) EPH_MUST_CHECK;

#endif
