/*
 * Typed readers and writers for our binary messages (little endian). Errors are sticky: write or read a whole message, then ask
 * once. A reader must end with every byte consumed (wire_end), so trailing bytes are an error. Lengths from the wire are checked
 * against what is there before anything is allocated.
 */
#ifndef EPH_WIRE_H
#define EPH_WIRE_H

#include "buf.h"
#include "error.h"

#include <stdbool.h>
#include <stdint.h>

struct wire_reader {
	const uint8_t *p;
	size_t left;
	bool failed;
	const char *what; /* first thing that failed, for the error text */
};

void wire_read_init(struct wire_reader *r, const void *p, size_t n);
uint8_t wire_u8(struct wire_reader *r);
uint16_t wire_u16(struct wire_reader *r);
uint32_t wire_u32(struct wire_reader *r);
uint64_t wire_u64(struct wire_reader *r);
int64_t wire_i64(struct wire_reader *r);
bool wire_bool(struct wire_reader *r); /* 0 or 1; anything else fails */
void wire_raw(struct wire_reader *r, void *out, size_t n);
/* u32 length + bytes; a view into the message; fails when longer than max. */
const uint8_t *wire_bytes(struct wire_reader *r, size_t max, size_t *n);
/* As wire_bytes, but malloc'd bytes of the caller's own (one zero byte follows, not counted); NULL and *n = 0 on failure. */
uint8_t *wire_bytes_copy(struct wire_reader *r, size_t max, uint32_t *n);
/* u32 length + clean UTF-8 (no NUL); malloc'd copy, "" on failure is NULL; fails when longer than max. */
char *wire_str(struct wire_reader *r, size_t max);
/* As wire_str into a fixed array (size includes the terminator). */
void wire_str_fixed(struct wire_reader *r, char *out, size_t size);
/* u32 count; fails above max. */
uint32_t wire_count(struct wire_reader *r, uint32_t max);
void wire_fail(struct wire_reader *r, const char *what);
/* 0 when nothing failed and every byte was consumed; else ERR_PROTOCOL naming what. */
int wire_end(const struct wire_reader *r, const char *message, struct err *e) EPH_MUST_CHECK;

/* Writers append to a buf; its sticky `failed` is the error. */
void wire_put_u8(struct buf *b, uint8_t v);
void wire_put_u16(struct buf *b, uint16_t v);
void wire_put_u32(struct buf *b, uint32_t v);
void wire_put_u64(struct buf *b, uint64_t v);
void wire_put_i64(struct buf *b, int64_t v);
void wire_put_bool(struct buf *b, bool v);
void wire_put_raw(struct buf *b, const void *p, size_t n);
void wire_put_bytes(struct buf *b, const void *p, size_t n);
void wire_put_str(struct buf *b, const char *s); /* NULL counts as "" */

#endif
