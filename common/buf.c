/*
 * The bounded byte buffer. Owns the bytes in it until buf_steal or buf_free; no thread safety, never blocks. Everything that
 * keeps foreign bytes calls it, so a wrong length must end in `failed` and never in a write past the end.
 */
#include "buf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void buf_init(struct buf *b, size_t max)
{
	*b = (struct buf)BUF_INIT(max);
}

static void give_up(const struct buf *b)
{
	if (b->wipe && b->data)
		explicit_bzero(b->data, b->cap);
	free(b->data);
}

void buf_free(struct buf *b)
{
	bool wipe = b->wipe;

	give_up(b);
	buf_init(b, b->max);
	b->wipe = wipe;
}

/* realloc leaves what it moved from as it was. */
static uint8_t *move_wiped(const struct buf *b, size_t cap)
{
	uint8_t *data = malloc(cap);

	if (!data)
		return NULL;
	if (b->len > 0)
		memcpy(data, b->data, b->len);
	give_up(b);
	return data;
}

void buf_reset(struct buf *b)
{
	b->len = 0;
	b->failed = false;
}

/* Makes room for n more bytes plus a terminator. The bound is checked first, so that n from a peer allocates nothing. */
static bool grow(struct buf *b, size_t n)
{
	size_t need, cap;
	uint8_t *data;

	if (b->len > b->max || n > b->max - b->len || b->len + n == SIZE_MAX)
		return false;
	need = b->len + n + 1;
	if (need <= b->cap)
		return true;
	cap = b->cap < 64 ? 64 : b->cap;
	while (cap < need)
		cap = cap > SIZE_MAX / 2 ? need : cap * 2;
	if (b->max < SIZE_MAX && cap > b->max + 1)
		cap = b->max + 1;
	data = b->wipe ? move_wiped(b, cap) : realloc(b->data, cap);
	if (!data)
		return false;
	b->data = data;
	b->cap = cap;
	return true;
}

bool buf_add(struct buf *b, const void *p, size_t n)
{
	if (!grow(b, n)) {
		b->failed = true;
		return false;
	}
	if (n > 0)
		memcpy(b->data + b->len, p, n);
	b->len += n;
	return true;
}

bool buf_add_str(struct buf *b, const char *s)
{
	return buf_add(b, s, strlen(s));
}

bool buf_add_char(struct buf *b, char c)
{
	return buf_add(b, &c, 1);
}

bool buf_printf(struct buf *b, const char *fmt, ...)
{
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(NULL, 0, fmt, ap);
	va_end(ap);
	if (n < 0 || !grow(b, (size_t)n)) {
		b->failed = true;
		return false;
	}
	va_start(ap, fmt);
	n = vsnprintf((char *)b->data + b->len, (size_t)n + 1, fmt, ap);
	va_end(ap);
	b->len += (size_t)n;
	return true;
}

uint8_t *buf_reserve(struct buf *b, size_t n)
{
	if (!grow(b, n)) {
		b->failed = true;
		return NULL;
	}
	return b->data + b->len;
}

void buf_commit(struct buf *b, size_t n)
{
	size_t room = b->cap > b->len ? b->cap - b->len - 1 : 0;

	b->len += n < room ? n : room;
}

void buf_consume(struct buf *b, size_t n)
{
	size_t had = b->len;

	if (n == 0 || had == 0)
		return;
	b->len = n >= had ? 0 : had - n;
	if (b->len > 0)
		memmove(b->data, b->data + n, b->len);
	if (b->wipe)
		explicit_bzero(b->data + b->len, had - b->len);
}

const char *buf_cstr(struct buf *b)
{
	if (!grow(b, 0))
		return NULL;
	b->data[b->len] = '\0';
	return (const char *)b->data;
}

char *buf_steal(struct buf *b, size_t *len)
{
	char *s;

	if (!buf_cstr(b))
		return NULL;
	s = (char *)b->data;
	if (len)
		*len = b->len;
	buf_init(b, b->max);
	return s;
}
