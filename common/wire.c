/*
 * Little-endian readers and writers of our binary messages. Pure: no state, no blocking; only wire_str allocates, and only after
 * the length was checked against the bytes that are there. Reads bytes from the guest, from nodes and from sibling processes.
 */
#include "wire.h"

#include "text.h"

#include <stdlib.h>
#include <string.h>

void wire_read_init(struct wire_reader *r, const void *p, size_t n)
{
	*r = (struct wire_reader){ .p = p, .left = n };
}

void wire_fail(struct wire_reader *r, const char *what)
{
	if (!r->failed)
		r->what = what;
	r->failed = true;
}

/* The next n bytes, or NULL with the sticky error. */
static const uint8_t *take(struct wire_reader *r, size_t n)
{
	const uint8_t *p = r->p;

	if (r->failed)
		return NULL;
	if (n > r->left) {
		wire_fail(r, "it is shorter than its fields say");
		return NULL;
	}
	if (n > 0)
		r->p += n;
	r->left -= n;
	return p;
}

static uint64_t take_le(struct wire_reader *r, size_t n)
{
	const uint8_t *p = take(r, n);
	uint64_t v = 0;

	for (size_t i = 0; p && i < n; i++)
		v |= (uint64_t)p[i] << (8 * i);
	return v;
}

uint8_t wire_u8(struct wire_reader *r)
{
	return (uint8_t)take_le(r, 1);
}

uint16_t wire_u16(struct wire_reader *r)
{
	return (uint16_t)take_le(r, 2);
}

uint32_t wire_u32(struct wire_reader *r)
{
	return (uint32_t)take_le(r, 4);
}

uint64_t wire_u64(struct wire_reader *r)
{
	return take_le(r, 8);
}

int64_t wire_i64(struct wire_reader *r)
{
	return (int64_t)take_le(r, 8);
}

bool wire_bool(struct wire_reader *r)
{
	uint8_t v = wire_u8(r);

	if (v > 1)
		wire_fail(r, "a boolean is neither 0 nor 1");
	return v == 1;
}

void wire_raw(struct wire_reader *r, void *out, size_t n)
{
	const uint8_t *p = take(r, n);

	if (p && n > 0)
		memcpy(out, p, n);
	else
		memset(out, 0, n);
}

const uint8_t *wire_bytes(struct wire_reader *r, size_t max, size_t *n)
{
	static const uint8_t nothing[1];
	uint32_t len = wire_u32(r);
	const uint8_t *p;

	*n = 0;
	if (!r->failed && len > max)
		wire_fail(r, "a field is longer than its bound");
	p = take(r, len);
	if (!p)
		return r->failed ? NULL : nothing;
	*n = len;
	return p;
}

uint8_t *wire_bytes_copy(struct wire_reader *r, size_t max, uint32_t *n)
{
	size_t len;
	const uint8_t *p = wire_bytes(r, max, &len);
	uint8_t *copy;

	*n = 0;
	if (r->failed)
		return NULL;
	copy = malloc(len + 1);
	if (!copy) {
		wire_fail(r, "memory");
		return NULL;
	}
	if (len > 0)
		memcpy(copy, p, len);
	copy[len] = 0;
	*n = (uint32_t)len;
	return copy;
}

char *wire_str(struct wire_reader *r, size_t max)
{
	size_t n;
	const uint8_t *p = wire_bytes(r, max, &n);
	char *s;

	if (!p)
		return NULL;
	if (!text_utf8_clean((const char *)p, n)) {
		wire_fail(r, "a string is not UTF-8 or holds NUL");
		return NULL;
	}
	s = malloc(n + 1);
	if (!s) {
		wire_fail(r, "there is no memory for it");
		return NULL;
	}
	memcpy(s, p, n);
	s[n] = '\0';
	return s;
}

void wire_str_fixed(struct wire_reader *r, char *out, size_t size)
{
	size_t n;
	const uint8_t *p;

	out[0] = '\0';
	p = wire_bytes(r, size - 1, &n);
	if (!p)
		return;
	if (!text_utf8_clean((const char *)p, n)) {
		wire_fail(r, "a string is not UTF-8 or holds NUL");
		return;
	}
	memcpy(out, p, n);
	out[n] = '\0';
}

uint32_t wire_count(struct wire_reader *r, uint32_t max)
{
	uint32_t n = wire_u32(r);

	if (!r->failed && n > max)
		wire_fail(r, "a list is longer than its bound");
	return r->failed ? 0 : n;
}

int wire_end(const struct wire_reader *r, const char *message, struct err *e)
{
	if (r->failed)
		return err_set(e, ERR_PROTOCOL, "%s: %s", message, r->what ? r->what : "malformed");
	if (r->left > 0)
		return err_set(e, ERR_PROTOCOL, "%s: %zu bytes too many at the end", message, r->left);
	return 0;
}

static void put_le(struct buf *b, uint64_t v, size_t n)
{
	uint8_t raw[8];

	for (size_t i = 0; i < n; i++)
		raw[i] = (uint8_t)(v >> (8 * i));
	buf_add(b, raw, n);
}

void wire_put_u8(struct buf *b, uint8_t v)
{
	put_le(b, v, 1);
}

void wire_put_u16(struct buf *b, uint16_t v)
{
	put_le(b, v, 2);
}

void wire_put_u32(struct buf *b, uint32_t v)
{
	put_le(b, v, 4);
}

void wire_put_u64(struct buf *b, uint64_t v)
{
	put_le(b, v, 8);
}

void wire_put_i64(struct buf *b, int64_t v)
{
	put_le(b, (uint64_t)v, 8);
}

void wire_put_bool(struct buf *b, bool v)
{
	put_le(b, v ? 1 : 0, 1);
}

void wire_put_raw(struct buf *b, const void *p, size_t n)
{
	buf_add(b, p, n);
}

void wire_put_bytes(struct buf *b, const void *p, size_t n)
{
	if (n > UINT32_MAX) {
		b->failed = true;
		return;
	}
	wire_put_u32(b, (uint32_t)n);
	buf_add(b, p, n);
}

void wire_put_str(struct buf *b, const char *s)
{
	wire_put_bytes(b, s ? s : "", s ? strlen(s) : 0);
}
