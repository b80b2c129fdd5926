/*
 * What becomes of the bytes that a command prints. Owns the bytes it holds; called by the shell tool as output comes. Pure.
 */
#include "output.h"

#include "common/text.h"

#include <inttypes.h>
#include <string.h>

#define REPLACEMENT "\xef\xbf\xbd"

void keep_init(struct keep *k)
{
	*k = (struct keep){ .total = 0 };
	buf_init(&k->head, KEEP_HEAD);
	buf_init(&k->tail, KEEP_TAIL);
}

void keep_free(struct keep *k)
{
	buf_free(&k->head);
	buf_free(&k->tail);
}

/* n is at most KEEP_TAIL. */
static bool ring_add(struct keep *k, const uint8_t *p, size_t n)
{
	size_t room = KEEP_TAIL - k->tail.len;
	size_t first = n < room ? n : room;

	if (!buf_add(&k->tail, p, first))
		return false;
	p += first;
	n -= first;
	while (n > 0) {
		size_t part = KEEP_TAIL - k->tail_at;

		if (part > n)
			part = n;
		memcpy(k->tail.data + k->tail_at, p, part);
		k->tail_at = (k->tail_at + part) % KEEP_TAIL;
		p += part;
		n -= part;
	}
	return true;
}

bool keep_add(struct keep *k, const uint8_t *p, size_t n)
{
	size_t head = KEEP_HEAD - k->head.len;

	k->total += n;
	if (head > n)
		head = n;
	if (!buf_add(&k->head, p, head))
		return false;
	p += head;
	n -= head;
	if (n > KEEP_TAIL) {
		p += n - KEEP_TAIL;
		n = KEEP_TAIL;
	}
	return ring_add(k, p, n);
}

static uint64_t cut_bytes(const struct keep *k)
{
	return k->total - k->head.len - k->tail.len;
}

bool keep_render(const struct keep *k, struct buf *out)
{
	struct buf whole = BUF_INIT(KEEP_HEAD + KEEP_TAIL + 128);
	bool ok = buf_add(&whole, k->head.data, k->head.len);

	if (cut_bytes(k) > 0)
		ok = buf_printf(&whole, "\n[... %" PRIu64 " bytes cut ...]\n", cut_bytes(k)) && ok;
	if (k->tail.len > 0) {
		ok = buf_add(&whole, k->tail.data + k->tail_at, k->tail.len - k->tail_at) && ok;
		ok = buf_add(&whole, k->tail.data, k->tail_at) && ok;
	}
	ok = (whole.len == 0 || output_clean(out, whole.data, whole.len)) && ok;
	buf_free(&whole);
	return ok;
}

/* Length of the valid character at the front of p[0..n), or 0. */
static size_t char_len(const uint8_t *p, size_t n)
{
	size_t len = p[0] < 0x80 ? 1 : p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;

	return p[0] != 0 && len <= n && text_utf8_valid((const char *)p, len) ? len : 0;
}

bool output_clean(struct buf *out, const uint8_t *p, size_t n)
{
	size_t from = 0, at = 0;
	bool ok = true;

	while (at < n) {
		size_t len = p[at] != 0 && p[at] < 0x80 ? 1 : char_len(p + at, n - at);

		if (len > 0) {
			at += len;
			continue;
		}
		ok = buf_add(out, p + from, at - from) && buf_add_str(out, REPLACEMENT) && ok;
		from = ++at;
	}
	return buf_add(out, p + from, at - from) && ok;
}

void chunker_init(struct chunker *c, size_t chunk_max, uint64_t *budget, uint64_t *cut)
{
	*c = (struct chunker){ .chunk_max = chunk_max, .budget = budget, .cut = cut };
	buf_init(&c->held, chunk_max);
}

void chunker_free(struct chunker *c)
{
	buf_free(&c->held);
}

static void send_front(struct chunker *c, size_t n, chunk_fn *fn, void *ctx)
{
	if (n == 0)
		return;
	if (!fn(ctx, c->held.data, n))
		*c->cut += n;
	buf_consume(&c->held, n);
}

/* What may leave now: whole characters; all of it when it is a full chunk without a border (it is no text then). */
static size_t sendable(const struct chunker *c)
{
	size_t n = text_utf8_border((const char *)c->held.data, c->held.len);

	return n == 0 && c->held.len >= c->chunk_max ? c->held.len : n;
}

void chunker_add(struct chunker *c, const uint8_t *p, size_t n, chunk_fn *fn, void *ctx)
{
	size_t taken = n < *c->budget ? n : (size_t)*c->budget;

	*c->budget -= taken;
	*c->cut += n - taken;
	while (taken > 0) {
		size_t room = c->chunk_max - c->held.len;
		size_t part = taken < room ? taken : room;

		if (!buf_add(&c->held, p, part)) {
			*c->cut += taken;
			c->held.failed = false;
			return;
		}
		p += part;
		taken -= part;
		if (c->held.len == c->chunk_max)
			send_front(c, sendable(c), fn, ctx);
	}
}

void chunker_flush(struct chunker *c, bool end, chunk_fn *fn, void *ctx)
{
	/* The end of the budget may have cut a character: it is not sent in half. */
	bool whole = end && *c->cut == 0;

	if (c->held.len == 0)
		return;
	send_front(c, whole ? c->held.len : sendable(c), fn, ctx);
	if (end) {
		*c->cut += c->held.len;
		buf_reset(&c->held);
	}
}

bool chunker_ready(const struct chunker *c)
{
	return c->held.len > 0 && sendable(c) > 0;
}

int64_t pace_due(struct pace *p, int64_t now_ms)
{
	int64_t back = (now_ms - p->refilled_ms) / PACE_REFILL_MS, gap = p->last_ms + PACE_GAP_MS, refill;

	p->used = back < p->used ? p->used - back : 0;
	p->refilled_ms = p->used > 0 ? p->refilled_ms + back * PACE_REFILL_MS : now_ms;
	refill = p->used >= PACE_BURST ? p->refilled_ms + PACE_REFILL_MS : gap;
	return refill > gap ? refill : gap;
}

void pace_take(struct pace *p, int64_t now_ms)
{
	p->last_ms = now_ms;
	p->used++;
}
