/*
 * What becomes of the bytes that a command prints: head and tail for the model, chunks that break no character for the timeline.
 * Pure: no clock, no descriptor.
 */
#ifndef GUEST_OUTPUT_H
#define GUEST_OUTPUT_H

#include "common/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KEEP_HEAD (128 * 1024)
#define KEEP_TAIL (128 * 1024)

/* The first and the last bytes of a long text. */
struct keep {
	struct buf head;
	struct buf tail; /* a ring once it is full */
	size_t tail_at;  /* where the ring's oldest byte is */
	uint64_t total;  /* bytes seen */
};
void keep_init(struct keep *k);
void keep_free(struct keep *k);
/* False only when memory ran out: then the bytes are counted and not kept. */
bool keep_add(struct keep *k, const uint8_t *p, size_t n);
/* Appends head, a line on what was cut, tail. Anything that is not clean UTF-8 becomes U+FFFD. */
bool keep_render(const struct keep *k, struct buf *out);

/* Appends n bytes as clean UTF-8: each byte that is not part of a character, and NUL, becomes U+FFFD. */
bool output_clean(struct buf *out, const uint8_t *p, size_t n);

/* One stream of a command on its way to the timeline. */
struct chunker {
	struct buf held; /* not sent yet; at most a chunk */
	size_t chunk_max;
	uint64_t *budget; /* bytes that may still be sent; shared by both streams of a command */
	uint64_t *cut;    /* bytes not sent because the budget was used up */
};
/* How a chunk leaves. False: it was lost, and counts as cut. */
typedef bool chunk_fn(void *ctx, const uint8_t *p, size_t n);

void chunker_init(struct chunker *c, size_t chunk_max, uint64_t *budget, uint64_t *cut);
void chunker_free(struct chunker *c);
/* Takes bytes; full chunks leave at once. */
void chunker_add(struct chunker *c, const uint8_t *p, size_t n, chunk_fn *fn, void *ctx);
/* Sends what is held, up to the last whole character; `end`: all of it. */
void chunker_flush(struct chunker *c, bool end, chunk_fn *fn, void *ctx);
/* True when a flush would send something. */
bool chunker_ready(const struct chunker *c);

/*
 * When less than a full chunk may leave: the first output after a pause at once, then at a distance, and in the long run not often,
 * so that a command that prints without end does not use up the run's events. Zeroed is fresh.
 */
#define PACE_GAP_MS 10    /* least distance of two */
#define PACE_BURST 100    /* of these without a slower pace */
#define PACE_REFILL_MS 50 /* one more each; output that comes no faster is never held back */

struct pace {
	int64_t last_ms;     /* when one left last */
	int64_t used;        /* of the burst */
	int64_t refilled_ms; /* until when the refill is counted */
};
/* The time from which the next may leave. */
int64_t pace_due(struct pace *p, int64_t now_ms);
void pace_take(struct pace *p, int64_t now_ms);

#endif
