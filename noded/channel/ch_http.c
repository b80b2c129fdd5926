/* Reads one HTTP answer after the other (ch_http.h). Owns a line and a body at most. Pure. */
#include "channel/ch_http.h"

#include <string.h>
#include <strings.h>

void ch_http_init(struct ch_http *h)
{
	*h = (struct ch_http){ .state = CH_HTTP_STATUS };
	buf_init(&h->line, CH_HTTP_HEAD_MAX);
	buf_init(&h->body, CH_HTTP_BODY_MAX);
}

void ch_http_free(struct ch_http *h)
{
	buf_free(&h->line);
	buf_free(&h->body);
}

void ch_http_next(struct ch_http *h)
{
	buf_reset(&h->line);
	buf_reset(&h->body);
	h->state = CH_HTTP_STATUS;
	h->head = h->body_left = 0;
	h->has_length = false;
	h->status = 0;
}

/* "HTTP/1.1 200 OK"; that server leaves the reason out, but not the space before it. */
static int take_status(struct ch_http *h, const char *line, struct err *e)
{
	if (strncmp(line, "HTTP/1.1 ", 9) != 0 && strncmp(line, "HTTP/1.0 ", 9) != 0)
		return err_set(e, ERR_PROTOCOL, "an answer does not begin as HTTP");
	line += 9;
	if (strspn(line, "0123456789") != 3 || (line[3] != '\0' && line[3] != ' ') || line[0] < '2' || line[0] > '5')
		return err_set(e, ERR_PROTOCOL, "the status of an answer is no number from 200 to 599");
	h->status = (line[0] - '0') * 100 + (line[1] - '0') * 10 + (line[2] - '0');
	h->state = CH_HTTP_HEADER;
	return 0;
}

static int take_length(struct ch_http *h, const char *value, struct err *e)
{
	size_t digits = strspn(value, "0123456789"), n = 0;

	if (digits == 0 || digits > 8 || value[digits + strspn(value + digits, " \t")] != '\0')
		return err_set(e, ERR_PROTOCOL, "the length of an answer is no number that can be");
	for (size_t i = 0; i < digits; i++)
		n = n * 10 + (size_t)(value[i] - '0');
	if (n > CH_HTTP_BODY_MAX)
		return err_set(e, ERR_PROTOCOL, "an answer of %zu bytes (%d are the most)", n, CH_HTTP_BODY_MAX);
	if (h->has_length && n != h->body_left)
		return err_set(e, ERR_PROTOCOL, "an answer has two lengths");
	h->has_length = true;
	h->body_left = n;
	return 0;
}

static int take_header(struct ch_http *h, const char *line, struct err *e)
{
	const char *colon = strchr(line, ':');
	size_t name = colon ? (size_t)(colon - line) : 0;

	if (name == 0 || strcspn(line, " \t") < name)
		return err_set(e, ERR_PROTOCOL, "a header of an answer is none");
	if (name == strlen("transfer-encoding") && strncasecmp(line, "transfer-encoding", name) == 0)
		return err_set(e, ERR_PROTOCOL, "an answer in pieces");
	if (name == strlen("content-length") && strncasecmp(line, "content-length", name) == 0)
		return take_length(h, colon + 1 + strspn(colon + 1, " \t"), e);
	return 0;
}

static int end_of_head(struct ch_http *h, struct err *e)
{
	if (h->status == 204 && h->body_left > 0)
		return err_set(e, ERR_PROTOCOL, "an answer without content has some");
	h->state = h->body_left > 0 ? CH_HTTP_BODY : CH_HTTP_WHOLE;
	return 0;
}

static int take_line(struct ch_http *h, struct err *e)
{
	const char *line;
	int rc;

	/* Ends in \r\n; nothing before is a control character, so that the line is a text. */
	if (h->line.len == 0 || h->line.data[h->line.len - 1] != '\r')
		return err_set(e, ERR_PROTOCOL, "a line of an answer ends without a carriage return");
	h->line.len--;
	for (size_t i = 0; i < h->line.len; i++)
		if ((h->line.data[i] < 0x20 && h->line.data[i] != '\t') || h->line.data[i] == 0x7f)
			return err_set(e, ERR_PROTOCOL, "a control character in the head of an answer");
	line = buf_cstr(&h->line);
	if (!line)
		return err_set(e, ERR_NOMEM, "no memory");
	if (h->state == CH_HTTP_STATUS)
		rc = take_status(h, line, e);
	else
		rc = h->line.len == 0 ? end_of_head(h, e) : take_header(h, line, e);
	buf_reset(&h->line);
	return rc;
}

/* Up to the end of one line, if it is there. */
static int feed_head(struct ch_http *h, const char *bytes, size_t n, size_t *used, struct err *e)
{
	const char *end = memchr(bytes, '\n', n);

	*used = end ? (size_t)(end - bytes) + 1 : n;
	h->head += *used;
	if (h->head > CH_HTTP_HEAD_MAX || !buf_add(&h->line, bytes, end ? *used - 1 : n))
		return err_set(e, ERR_PROTOCOL, "the head of an answer is longer than %d bytes", CH_HTTP_HEAD_MAX);
	return end ? take_line(h, e) : 0;
}

int ch_http_feed(struct ch_http *h, const char *bytes, size_t n, size_t *used, struct err *e)
{
	size_t part;

	for (*used = 0; *used < n && h->state != CH_HTTP_WHOLE; *used += part) {
		if (h->state != CH_HTTP_BODY) {
			if (feed_head(h, bytes + *used, n - *used, &part, e))
				return -1;
			continue;
		}
		part = n - *used < h->body_left ? n - *used : h->body_left;
		if (!buf_add(&h->body, bytes + *used, part))
			return err_set(e, ERR_NOMEM, "no memory");
		h->body_left -= part;
		if (h->body_left == 0)
			h->state = CH_HTTP_WHOLE;
	}
	return h->state == CH_HTTP_WHOLE;
}
