/*
 * A growable byte buffer with a hard bound. Every foreign byte that we keep is kept in one of these (or in an evbuffer
 * with a watermark); the bound is given when it is made, so that no peer decides how much memory we use.
 * Not thread-safe. A zeroed struct with `max` set is a valid empty buffer.
 */
#ifndef EPH_BUF_H
#define EPH_BUF_H

#include "error.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct buf {
	uint8_t *data; /* owned; not terminated unless buf_cstr was called */
	size_t len;
	size_t cap;
	size_t max;  /* most bytes it will hold; appending more fails and sets `failed` */
	bool failed; /* sticky: an append did not fit or memory ran out */
	bool wipe;   /* it may hold secrets: memory that it gives up is overwritten first */
};

#define BUF_INIT(max_bytes)                                                                                                        \
	{                                                                                                                          \
		.data = NULL, .len = 0, .cap = 0, .max = (max_bytes), .failed = false, .wipe = false                               \
	}

void buf_init(struct buf *b, size_t max);
void buf_free(struct buf *b);  /* frees the bytes and leaves an empty buffer of the same bound and kind */
void buf_reset(struct buf *b); /* len = 0, failed = false, keeps memory */
/* Appends; false (and sticky `failed`) when it would pass `max` or memory ran out. Nothing is appended then. */
bool buf_add(struct buf *b, const void *p, size_t n);
bool buf_add_str(struct buf *b, const char *s);
bool buf_add_char(struct buf *b, char c);
bool buf_printf(struct buf *b, const char *fmt, ...) EPH_PRINTF(2, 3);
/* Room for n more bytes; returns where to write them (then buf_commit) or NULL. */
uint8_t *buf_reserve(struct buf *b, size_t n);
void buf_commit(struct buf *b, size_t n);
/* Drops n bytes from the front (n <= len). */
void buf_consume(struct buf *b, size_t n);
/* A terminated view; NULL only when memory ran out. The terminator is not counted in len. */
const char *buf_cstr(struct buf *b);
/* Hands the memory over (terminated); the buffer is empty afterwards. *len may be NULL. Free with free(). */
char *buf_steal(struct buf *b, size_t *len);

#endif
