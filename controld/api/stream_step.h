/*
 * What an event stream does next, as a pure function of what it has seen, and the small readings that resuming needs. events.c does
 * what these say; the tests go through them by table.
 */
#ifndef CONTROLD_API_STREAM_STEP_H
#define CONTROLD_API_STREAM_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STREAM_LOW_BYTES (64 * 1024) /* above it nothing more is read from the store */
#define STREAM_BACKLOG_MS 10000      /* a client that stays above the low mark so long is cut; it can resume */
#define STREAM_HEARTBEAT_MS 15000
#define STREAM_KEY_MS 15000 /* how often its key is looked up again: a stream does not outlive the right to it */
#define STREAM_POLL_MS 20   /* looking whether a full client has taken something */
#define STREAM_PAGE 32      /* events in one read */

struct stream_seen {
	bool reading;   /* a read is under way */
	bool hint;      /* something may have happened since the last read */
	bool complete;  /* settled: nothing will come after head */
	int64_t cursor; /* last seq that was written to the client, or where it resumed */
	int64_t head;   /* last seq there is */
	size_t queued;  /* bytes that the client has not taken */
	int64_t now_ms;
	int64_t backlog_since_ms; /* 0 = not above the low mark */
	int64_t last_write_ms;
	bool checking; /* its key is being looked up */
	int64_t checked_ms;
};

enum stream_step { STREAM_READ = 1, STREAM_WAIT, STREAM_HEARTBEAT, STREAM_BACK_OFF, STREAM_END, STREAM_CUT };

/* Before anything else: is it time to look the key up? */
bool stream_check_due(const struct stream_seen *s);
enum stream_step stream_next(const struct stream_seen *s);
/* How long the timer may sleep after WAIT or BACK_OFF. */
int64_t stream_sleep_ms(const struct stream_seen *s, enum stream_step step);
/* A seq as clients give it (Last-Event-ID, after, cursor): digits, up to 10^12. */
bool stream_seq_read(const char *s, int64_t *seq);
/* The type of an event out of its exact bytes; false when they are not ours. */
bool stream_event_type(const uint8_t *bytes, size_t n, char *out, size_t size);

#endif
