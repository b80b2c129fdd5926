/* See httpd_scan.h. Called by httpd_conn.c on each read, before evhttp sees the bytes; keeps one line of memory. */
#include "httpd_scan.h"

#include <string.h>

void http_scan_init(struct http_scan *s, size_t max_head, uint64_t max_body)
{
	*s = (struct http_scan){ .state = SCAN_REQUEST_LINE, .max_head = max_head, .max_body = max_body };
	buf_init(&s->line, max_head);
}

void http_scan_free(struct http_scan *s)
{
	buf_free(&s->line);
}

bool http_scan_at_rest(const struct http_scan *s)
{
	return s->state == SCAN_REQUEST_LINE && s->line.len == 0;
}

static bool bad(struct http_scan *s, int status, const char *detail)
{
	s->state = SCAN_BAD;
	s->status = status;
	s->detail = detail;
	buf_free(&s->line);
	return false;
}

static bool is_token_char(uint8_t c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool word_is(const uint8_t *p, size_t n, const char *word)
{
	return n == strlen(word) && strncasecmp((const char *)p, word, n) == 0;
}

static void request_over(struct http_scan *s)
{
	s->state = SCAN_REQUEST_LINE;
	s->done++;
	buf_free(&s->line); /* idle connections keep nothing */
}

/* METHOD SP /target SP HTTP/1.x */
static bool request_line(struct http_scan *s, const uint8_t *p, size_t n)
{
	static const char *const methods[] = { "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS" };
	const uint8_t *space = memchr(p, ' ', n), *end = p + n, *target, *version;
	bool known = false;

	for (size_t i = 0; i < n; i++) {
		if (p[i] < 0x20 || p[i] >= 0x7f)
			return bad(s, 400, "the request line holds bytes that are not printable ASCII; percent-encode them");
	}
	if (!space || space == p)
		return bad(s, 400, "the request line is not METHOD TARGET HTTP/1.1");
	target = space + 1;
	version = memchr(target, ' ', (size_t)(end - target));
	if (!version || memchr(version + 1, ' ', (size_t)(end - version - 1)))
		return bad(s, 400, "the request line is not METHOD TARGET HTTP/1.1");
	version++;
	if (!word_is(version, (size_t)(end - version), "HTTP/1.1") && !word_is(version, (size_t)(end - version), "HTTP/1.0"))
		return bad(s, 505, "only HTTP/1.1 and HTTP/1.0 are spoken here");
	for (size_t i = 0; i < sizeof(methods) / sizeof(methods[0]); i++)
		known = known || (strlen(methods[i]) == (size_t)(space - p) && memcmp(p, methods[i], (size_t)(space - p)) == 0);
	if (!known)
		return bad(s, 501, "the method is not one of GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS");
	if (target[0] != '/')
		return bad(s, 400, "the target must be a path that begins with /");
	if (memchr(target, '#', (size_t)(version - target)))
		return bad(s, 400, "the target holds a #; fragments are not sent to servers");
	s->http10 = end[-1] == '0';
	s->is_head = (size_t)(space - p) == 4 && memcmp(p, "HEAD", 4) == 0;
	s->chunked = false;
	s->hosts = s->lengths = 0;
	s->left = s->body_bytes = 0;
	s->state = SCAN_HEADERS;
	return true;
}

static bool content_length(struct http_scan *s, const uint8_t *p, size_t n)
{
	uint64_t v = 0;

	if (s->lengths++ > 0)
		return bad(s, 400, "two Content-Length headers");
	if (n == 0 || n > 18)
		return bad(s, 400, "Content-Length is not a number");
	for (size_t i = 0; i < n; i++) {
		if (p[i] < '0' || p[i] > '9')
			return bad(s, 400, "Content-Length is not a number");
		v = v * 10 + (uint64_t)(p[i] - '0');
	}
	s->left = v;
	return true;
}

static bool header_line(struct http_scan *s, const uint8_t *p, size_t n)
{
	const uint8_t *colon = memchr(p, ':', n), *value;
	size_t name = colon ? (size_t)(colon - p) : 0, left;

	if (p[0] == ' ' || p[0] == '\t')
		return bad(s, 400, "a header is folded over lines; send it in one line");
	if (name == 0)
		return bad(s, 400, "a header line has no name and colon");
	for (size_t i = 0; i < name; i++) {
		if (!is_token_char(p[i]))
			return bad(s, 400, "a header name holds a blank or another character that is not allowed");
	}
	value = colon + 1;
	left = n - name - 1;
	for (size_t i = 0; i < left; i++) {
		if ((value[i] < 0x20 && value[i] != '\t') || value[i] == 0x7f)
			return bad(s, 400, "a header value holds a control character");
	}
	for (; left > 0 && (*value == ' ' || *value == '\t'); left--)
		value++;
	while (left > 0 && (value[left - 1] == ' ' || value[left - 1] == '\t'))
		left--;
	if (word_is(p, name, "Content-Length"))
		return content_length(s, value, left);
	if (word_is(p, name, "Expect") && !word_is(value, left, "100-continue"))
		return bad(s, 417, "the only Expect that is known here is 100-continue");
	if (word_is(p, name, "Transfer-Encoding")) {
		if (s->chunked || s->http10 || !word_is(value, left, "chunked"))
			return bad(s, 400, "Transfer-Encoding may only be chunked, once, in HTTP/1.1");
		s->chunked = true;
	}
	if (word_is(p, name, "Host") && (s->hosts++ > 0 || memchr(value, ' ', left) || memchr(value, '/', left) ||
							memchr(value, '@', left) || memchr(value, ',', left)))
		return bad(s, 400, "the Host header stands twice or is malformed");
	return true;
}

static bool head_over(struct http_scan *s)
{
	if (s->hosts != 1 && !(s->http10 && s->hosts == 0))
		return bad(s, 400, "the Host header is missing");
	if (s->chunked && s->lengths > 0)
		return bad(s, 400, "Content-Length and Transfer-Encoding together");
	if (s->is_head && (s->chunked || s->left > 0))
		return bad(s, 400, "a HEAD request has no body");
	if (s->left > s->max_body)
		return bad(s, 413, "the body is larger than the server takes");
	buf_free(&s->line);
	s->head_bytes = 0;
	if (s->chunked)
		s->state = SCAN_CHUNK_SIZE;
	else if (s->left > 0)
		s->state = SCAN_BODY;
	else
		request_over(s);
	return true;
}

static bool chunk_size(struct http_scan *s, const uint8_t *p, size_t n)
{
	uint64_t v = 0;

	if (n == 0 || n > 8)
		return bad(s, 400, "a chunk size is not 1 to 8 hexadecimal digits (chunk extensions are not taken)");
	for (size_t i = 0; i < n; i++) {
		uint8_t c = p[i];

		if (c >= '0' && c <= '9')
			v = v << 4 | (uint64_t)(c - '0');
		else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
			v = v << 4 | (uint64_t)((c | 0x20) - 'a' + 10);
		else
			return bad(s, 400, "a chunk size is not 1 to 8 hexadecimal digits (chunk extensions are not taken)");
	}
	s->body_bytes += v;
	if (s->body_bytes > s->max_body)
		return bad(s, 413, "the body is larger than the server takes");
	s->left = v;
	s->state = v > 0 ? SCAN_CHUNK : SCAN_LAST;
	return true;
}

static bool whole_line(struct http_scan *s, const uint8_t *p, size_t n)
{
	switch (s->state) {
	case SCAN_REQUEST_LINE: return request_line(s, p, n);
	case SCAN_HEADERS: return n == 0 ? head_over(s) : header_line(s, p, n);
	case SCAN_CHUNK_SIZE: return chunk_size(s, p, n);
	case SCAN_CHUNK_END:
		if (n > 0)
			return bad(s, 400, "a chunk is longer than its size says");
		s->state = SCAN_CHUNK_SIZE;
		return true;
	case SCAN_LAST:
		if (n > 0)
			return bad(s, 400, "trailers after a chunked body are not taken");
		request_over(s);
		return true;
	default: return bad(s, 400, "malformed");
	}
}

/* Bytes of a line; *used is how many were taken. */
static bool feed_line(struct http_scan *s, const uint8_t *p, size_t n, size_t *used)
{
	const uint8_t *lf = memchr(p, '\n', n);
	size_t take = lf ? (size_t)(lf - p) + 1 : n;
	bool head = s->state == SCAN_REQUEST_LINE || s->state == SCAN_HEADERS;
	size_t max = head ? s->max_head : 64;

	*used = take;
	s->head_bytes += head ? take : 0;
	if (s->line.len + take > max || (head && s->head_bytes > s->max_head))
		return bad(s, head ? 431 : 400,
				head ? "the request line and headers are larger than the server takes"
				     : "a chunk size is not 1 to 8 hexadecimal digits (chunk extensions are not taken)");
	if (!buf_add(&s->line, p, take))
		return bad(s, 503, "the server is out of memory");
	if (!lf)
		return true;
	if (s->line.len < 2 || s->line.data[s->line.len - 2] != '\r')
		return bad(s, 400, "a line ends in LF without CR");
	if (memchr(s->line.data, '\r', s->line.len - 2))
		return bad(s, 400, "a line holds a CR");
	s->line.len -= 2;
	if (!whole_line(s, s->line.data, s->line.len))
		return false;
	s->line.len = 0;
	return true;
}

bool http_scan_feed(struct http_scan *s, const uint8_t *p, size_t n)
{
	while (n > 0) {
		size_t used = 0;

		if (s->state == SCAN_BAD)
			return false;
		if (s->state == SCAN_BODY || s->state == SCAN_CHUNK) {
			used = s->left < n ? (size_t)s->left : n;
			s->left -= used;
			if (s->left == 0 && s->state == SCAN_BODY)
				request_over(s);
			else if (s->left == 0)
				s->state = SCAN_CHUNK_END;
		} else if (!feed_line(s, p, n, &used)) {
			return false;
		}
		p += used;
		n -= used;
	}
	return s->state != SCAN_BAD;
}
