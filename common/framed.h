/*
 * Frames {u32 length of what follows, u8 type, body} over a stream socketpair between processes of ours, on libevent. Descriptors
 * may ride along with a frame (SCM_RIGHTS). Length is bounded; a malformed frame ends the peer. Output is bounded: framed_send
 * says false when the peer does not read (the owner decides what that means).
 */
#ifndef EPH_FRAMED_H
#define EPH_FRAMED_H

#include "buf.h"
#include "error.h"

#include <stdbool.h>
#include <stdint.h>

struct event_base;
struct framed;

struct framed_options {
	int fd;            /* owned from here on; set non-blocking */
	size_t max_frame;  /* body bytes */
	size_t max_queued; /* output bytes waiting */
	/* One frame. fds (owned by the callback) came with its first byte; usually none. */
	void (*on_frame)(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count);
	/* Peer gone or broke the framing (e set then). Called once; the framed is dead but must still be freed (not inside). */
	void (*on_end)(void *arg, const struct err *e);
	void (*on_drained)(void *arg); /* output went empty; may be NULL */
	void *arg;
};

int framed_new(struct event_base *base, const struct framed_options *opt, struct framed **out, struct err *e) EPH_MUST_CHECK;
bool framed_send(struct framed *f, uint8_t type, const void *body, size_t n);
bool framed_send_fds(struct framed *f, uint8_t type, const void *body, size_t n, const int *fds,
		size_t fd_count); /* dups: caller keeps its own */
size_t framed_queued(const struct framed *f);
void framed_pause(struct framed *f, bool paused); /* stop reading: back-pressure */
/* Blocks up to ms to write out what is queued (used right before an exit). */
void framed_flush(struct framed *f, int ms);
void framed_free(struct framed *f); /* safe inside its own callbacks: reaped at the end of the turn */

#endif
