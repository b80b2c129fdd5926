/* Server-sent events, both ways: an incremental reader with bounds (model replies, the CLI's timeline) and a writer. Pure. */
#ifndef EPH_SSE_H
#define EPH_SSE_H

#include "buf.h"
#include "error.h"

struct sse_reader {
	struct buf line, data, id, event;
	bool after_cr, bom_done;
	uint8_t bom_seen;
	/* One event; data is terminated; id is the last one seen ("" none), event "" = message. false stops the reading. */
	bool (*on_event)(void *arg, const char *event, const char *id, const char *data, size_t n);
	void *arg;
};

/* max bounds one line and one event's data. */
void sse_reader_init(struct sse_reader *r, size_t max, bool (*on_event)(void *, const char *, const char *, const char *, size_t),
		void *arg);
void sse_reader_free(struct sse_reader *r);
/* ERR_LIMIT over the bound, ERR_CONFLICT when on_event said stop. Any cut of the stream gives the same events. */
int sse_reader_feed(struct sse_reader *r, const void *p, size_t n, struct err *e) EPH_MUST_CHECK;

/* "id: ..\nevent: ..\ndata: ..\n\n"; data must hold no newline. */
bool sse_write(struct buf *out, const char *event, const char *id, const char *data, size_t n);

#endif
