/*
 * Server-sent events as the WHATWG text has them. The reader keeps at most one line and one event, each within the bound it was
 * given. Pure: called by the broker on model replies and by the CLI on the timeline; both ends are foreign.
 */
#include "sse.h"

#include <string.h>

#define SSE_FIELD_MAX 1024 /* bytes of an id or an event name */

static const uint8_t bom[3] = { 0xef, 0xbb, 0xbf };

void sse_reader_init(struct sse_reader *r, size_t max, bool (*on_event)(void *, const char *, const char *, const char *, size_t),
		void *arg)
{
	*r = (struct sse_reader){ .on_event = on_event, .arg = arg };
	buf_init(&r->line, max);
	buf_init(&r->data, max < SIZE_MAX ? max + 1 : max); /* one more for the newline that is cut at the end */
	buf_init(&r->id, SSE_FIELD_MAX);
	buf_init(&r->event, SSE_FIELD_MAX);
}

void sse_reader_free(struct sse_reader *r)
{
	buf_free(&r->line);
	buf_free(&r->data);
	buf_free(&r->id);
	buf_free(&r->event);
}

static int too_long(const char *what, size_t max, struct err *e)
{
	return err_set(e, ERR_LIMIT, "event stream: %s is longer than %zu bytes", what, max);
}

/* The blank line: hands the event over, if it has any data. */
static int dispatch(struct sse_reader *r, struct err *e)
{
	const char *event = buf_cstr(&r->event), *id = buf_cstr(&r->id), *data;
	bool go_on = true;

	if (r->data.len > 0) {
		r->data.len--; /* the newline after the last data line */
		data = buf_cstr(&r->data);
		if (!event || !id || !data)
			return err_set(e, ERR_NOMEM, "event stream: no memory");
		go_on = r->on_event(r->arg, event, id, data, r->data.len);
	}
	buf_reset(&r->data);
	buf_reset(&r->event);
	if (!go_on)
		return err_set(e, ERR_CONFLICT, "event stream: stopped by its reader");
	return 0;
}

static int set_field(struct buf *b, const char *name, const uint8_t *value, size_t n, struct err *e)
{
	buf_reset(b);
	if (!buf_add(b, value, n))
		return too_long(name, b->max, e);
	return 0;
}

static int field(struct sse_reader *r, const uint8_t *line, size_t n, struct err *e)
{
	const uint8_t *colon = memchr(line, ':', n), *value;
	size_t name = colon ? (size_t)(colon - line) : n, left;

	value = line + name + (colon ? 1 : 0);
	left = n - name - (colon ? 1 : 0);
	if (left > 0 && value[0] == ' ') {
		value++;
		left--;
	}
	if (name == 4 && memcmp(line, "data", 4) == 0) {
		if (!buf_add(&r->data, value, left) || !buf_add_char(&r->data, '\n'))
			return too_long("an event", r->line.max, e);
		return 0;
	}
	if (name == 5 && memcmp(line, "event", 5) == 0 && !memchr(value, '\0', left))
		return set_field(&r->event, "an event name", value, left, e);
	if (name == 2 && memcmp(line, "id", 2) == 0 && !memchr(value, '\0', left))
		return set_field(&r->id, "an event id", value, left, e);
	return 0; /* comments, retry and what later versions may add */
}

static int end_of_line(struct sse_reader *r, struct err *e)
{
	int rc = 0;

	if (r->line.len == 0)
		rc = dispatch(r, e);
	else if (r->line.data[0] != ':')
		rc = field(r, r->line.data, r->line.len, e);
	buf_reset(&r->line);
	return rc;
}

/* One byte of the possible byte order mark; true when it was swallowed. What only looked like one goes into the line. */
static bool skip_bom(struct sse_reader *r, uint8_t c)
{
	if (r->bom_done)
		return false;
	if (c == bom[r->bom_seen]) {
		if (++r->bom_seen == sizeof(bom))
			r->bom_done = true;
		return true;
	}
	buf_add(&r->line, bom, r->bom_seen);
	r->bom_done = true;
	return false;
}

int sse_reader_feed(struct sse_reader *r, const void *p, size_t n, struct err *e)
{
	const uint8_t *at = p, *end = at + n;

	while (at < end) {
		const uint8_t *stop = at;

		if (skip_bom(r, *at)) {
			at++;
			continue;
		}
		if (r->after_cr && *at == '\n') { /* second half of CRLF, perhaps in another piece */
			r->after_cr = false;
			at++;
			continue;
		}
		r->after_cr = false;
		while (stop < end && *stop != '\r' && *stop != '\n')
			stop++;
		if (!buf_add(&r->line, at, (size_t)(stop - at)))
			return too_long("a line", r->line.max, e);
		at = stop;
		if (at == end)
			break;
		r->after_cr = *at++ == '\r';
		if (end_of_line(r, e) != 0)
			return -1;
	}
	return 0;
}

static bool put_field(struct buf *out, const char *name, const char *value, size_t n)
{
	if (memchr(value, '\n', n) || memchr(value, '\r', n))
		return false;
	return buf_add_str(out, name) && buf_add(out, value, n) && buf_add_char(out, '\n');
}

bool sse_write(struct buf *out, const char *event, const char *id, const char *data, size_t n)
{
	size_t before = out->len;

	if ((!id || put_field(out, "id: ", id, strlen(id))) && (!event || put_field(out, "event: ", event, strlen(event))) &&
			put_field(out, "data: ", data, n) && buf_add_char(out, '\n'))
		return true;
	out->len = before; /* half an event is worse than none */
	return false;
}
