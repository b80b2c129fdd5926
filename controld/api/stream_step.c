/* The decisions of an event stream. Pure. */
#include "stream_step.h"

#include "common/text.h"

bool stream_check_due(const struct stream_seen *s)
{
	return !s->checking && s->now_ms - s->checked_ms >= STREAM_KEY_MS;
}

enum stream_step stream_next(const struct stream_seen *s)
{
	if (s->complete && s->cursor >= s->head && !s->reading)
		return STREAM_END;
	if (s->queued > STREAM_LOW_BYTES) {
		if (s->backlog_since_ms && s->now_ms - s->backlog_since_ms >= STREAM_BACKLOG_MS)
			return STREAM_CUT;
		return STREAM_BACK_OFF;
	}
	if (s->reading)
		return STREAM_WAIT;
	if (s->hint || s->cursor < s->head)
		return STREAM_READ;
	if (s->now_ms - s->last_write_ms >= STREAM_HEARTBEAT_MS)
		return STREAM_HEARTBEAT;
	return STREAM_WAIT;
}

int64_t stream_sleep_ms(const struct stream_seen *s, enum stream_step step)
{
	int64_t left = s->last_write_ms + STREAM_HEARTBEAT_MS - s->now_ms;

	int64_t check = s->checked_ms + STREAM_KEY_MS - s->now_ms;

	if (step == STREAM_BACK_OFF)
		return STREAM_POLL_MS;
	if (!s->checking && check < left)
		left = check;
	return left > 1 ? left : 1;
}

bool stream_seq_read(const char *s, int64_t *seq)
{
	struct err e;

	return text_i64(s, 0, INT64_C(1000000000000), seq, &e) == 0;
}

bool stream_event_type(const uint8_t *bytes, size_t n, char *out, size_t size)
{
	/* Nothing before "type" is from a guest (run_id, seq, at, t, source), so its first place is the right one. */
	static const char mark[] = ",\"type\":\"";
	const char *p = memmem(bytes, n, mark, sizeof(mark) - 1), *end;
	size_t len;

	if (!p)
		return false;
	p += sizeof(mark) - 1;
	end = memchr(p, '"', (size_t)((const char *)bytes + n - p));
	len = end ? (size_t)(end - p) : 0;
	if (len == 0 || len >= size)
		return false;
	memcpy(out, p, len);
	out[len] = '\0';
	return true;
}
