/* The HTTP server of fuzz_api (api_play.h): common/httpd.h without sockets. What it takes is what httpd lets through. */
#include "api_play.h"

#include "common/text.h"

#include <ctype.h>
#include <event2/buffer.h>
#include <strings.h>

struct httpd {
	struct httpd_options opt;
};

static struct httpd listeners[2];
static unsigned listener_count;

/* --- reading a request ------------------------------------------------------------------------------------------------------- */

static int nibble(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Percent escapes, once; NULL for a bad one, NUL or a control character, which httpd refuses. */
static char *unescaped(const char *s, size_t n, bool plus)
{
	char *out = malloc(n + 1);
	size_t o = 0;

	must(out);
	for (size_t i = 0; i < n; i++) {
		char c = s[i];

		if (c == '%') {
			int hi = n - i > 2 ? nibble(s[i + 1]) : -1, lo = n - i > 2 ? nibble(s[i + 2]) : -1;

			if (hi < 0 || lo < 0 || (hi == 0 && lo == 0)) {
				free(out);
				return NULL;
			}
			c = (char)(hi << 4 | lo);
			i += 2;
		} else if (c == '+' && plus) {
			c = ' ';
		}
		out[o++] = c;
	}
	out[o] = '\0';
	return out;
}

static bool read_query(struct play *r, const char *s, size_t n)
{
	while (n > 0) {
		const char *amp = memchr(s, '&', n), *eq;
		size_t part = amp ? (size_t)(amp - s) : n;
		struct play_pair *q = &r->query[r->query_count];

		eq = memchr(s, '=', part);
		if (part > 0 && r->query_count < PLAY_PAIRS) {
			size_t name = eq ? (size_t)(eq - s) : part;

			q->name = unescaped(s, name, true);
			q->value = eq ? unescaped(eq + 1, part - name - 1, true) : strdup("");
			r->query_count++;
			if (!q->name || !q->value)
				return false;
		}
		if (!amp)
			break;
		s += part + 1;
		n -= part + 1;
	}
	return true;
}

static bool read_line(struct play *r, const char *s, size_t n)
{
	static const struct {
		const char *name;
		enum http_method method;
	} all[] = { { "GET ", HTTP_GET }, { "POST ", HTTP_POST }, { "PUT ", HTTP_PUT }, { "PATCH ", HTTP_PATCH },
		{ "DELETE ", HTTP_DELETE }, { "HEAD ", HTTP_HEAD }, { "OPTIONS ", HTTP_OPTIONS } };
	const char *mark;

	for (size_t i = 0; i < n; i++)
		if ((unsigned char)s[i] <= ' ' ? s[i] != ' ' : s[i] == 0x7f)
			return false;
	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]) && !r->method; i++) {
		size_t len = strlen(all[i].name);

		if (n > len && memcmp(s, all[i].name, len) == 0) {
			r->method = all[i].method;
			s += len;
			n -= len;
		}
	}
	if (!r->method || *s != '/')
		return false;
	mark = memchr(s, '?', n);
	r->path = unescaped(s, mark ? (size_t)(mark - s) : n, false);
	return r->path && (!mark || read_query(r, mark + 1, n - (size_t)(mark - s) - 1));
}

static bool read_header(struct play *r, const char *s, size_t n)
{
	const char *colon = memchr(s, ':', n);
	struct play_pair *h = &r->header[r->header_count];

	for (size_t i = 0; i < n; i++)
		if (((unsigned char)s[i] < ' ' && s[i] != '\t') || s[i] == 0x7f)
			return false;
	if (!colon || colon == s || r->header_count == PLAY_PAIRS)
		return false;
	r->header_count++;
	h->name = strndup(s, (size_t)(colon - s));
	n -= (size_t)(colon + 1 - s);
	s = colon + 1;
	while (n > 0 && (*s == ' ' || *s == '\t')) {
		s++;
		n--;
	}
	while (n > 0 && (s[n - 1] == ' ' || s[n - 1] == '\t'))
		n--;
	h->value = strndup(s, n);
	must(h->name && h->value);
	return true;
}

bool play_read(struct play *r, const uint8_t *p, size_t n)
{
	const char *s = (const char *)p;
	bool first = true;

	*r = (struct play){ .status = 0 };
	buf_init(&r->reply, 64 << 20);
	for (;;) {
		const char *end = n > 0 ? memchr(s, '\n', n) : NULL;
		size_t len = end ? (size_t)(end - s) : n;

		if (first ? !read_line(r, s, len) : len > 0 && !read_header(r, s, len))
			return false;
		s += len + (end != NULL);
		n -= len + (end != NULL);
		if ((len == 0 && !first) || !end)
			break;
		first = false;
	}
	r->body = (const uint8_t *)s;
	r->body_len = n;
	return true;
}

static void free_pairs(struct play_pair *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		free(p[i].name);
		free(p[i].value);
	}
}

void play_free(struct play *r)
{
	free(r->path);
	free(r->type);
	free_pairs(r->query, r->query_count);
	free_pairs(r->header, r->header_count);
	free_pairs(r->out, r->out_count);
	buf_free(&r->reply);
}

const char *play_answered(const struct play *r, const char *header)
{
	for (size_t i = 0; i < r->out_count; i++)
		if (strcasecmp(r->out[i].name, header) == 0)
			return r->out[i].value;
	return NULL;
}

void play_hand(struct play *r, bool operator_listener)
{
	struct httpd *h = &listeners[operator_listener];

	h->opt.handler(h->opt.arg, (struct http_req *)r);
}

/* --- common/httpd.h ------------------------------------------------------------------------------------------------------------
 */

int httpd_new(struct event_base *base, const struct httpd_options *opt, struct httpd **out, struct err *e)
{
	(void)base;
	(void)e;
	must(listener_count < 2);
	*out = &listeners[listener_count++];
	(*out)->opt = *opt;
	return 0;
}

uint16_t httpd_port(const struct httpd *h)
{
	return (uint16_t)(8080 + (h - listeners));
}

int httpd_connections(const struct httpd *h)
{
	(void)h;
	return 0;
}

size_t httpd_bytes_held(const struct httpd *h)
{
	(void)h;
	return 0;
}

int httpd_sending(const struct httpd *h)
{
	(void)h;
	return 0;
}

void httpd_stop_accepting(struct httpd *h)
{
	(void)h;
}

void httpd_free(struct httpd *h)
{
	(void)h;
	listener_count--;
}

static struct play *of(const struct http_req *r)
{
	return (struct play *)(uintptr_t)r;
}

enum http_method http_method(const struct http_req *r)
{
	return of(r)->method;
}

const char *http_method_name(const struct http_req *r)
{
	(void)r;
	return "METHOD";
}

const char *http_path(const struct http_req *r)
{
	return of(r)->path;
}

int http_header_count(const struct http_req *r, const char *name)
{
	int n = 0;

	for (size_t i = 0; i < of(r)->header_count; i++)
		n += strcasecmp(of(r)->header[i].name, name) == 0;
	return n;
}

const char *http_header(const struct http_req *r, const char *name)
{
	for (size_t i = 0; i < of(r)->header_count; i++)
		if (strcasecmp(of(r)->header[i].name, name) == 0)
			return of(r)->header[i].value;
	return NULL;
}

const char *http_query(const struct http_req *r, const char *name, int *count)
{
	const char *found = NULL;
	int n = 0;

	for (size_t i = 0; i < of(r)->query_count; i++)
		if (strcmp(of(r)->query[i].name, name) == 0 && n++ == 0)
			found = of(r)->query[i].value;
	if (count)
		*count = n;
	return found;
}

size_t http_query_size(const struct http_req *r)
{
	return of(r)->query_count;
}

void http_query_at(const struct http_req *r, size_t i, const char **name, const char **value)
{
	must(i < of(r)->query_count);
	*name = of(r)->query[i].name;
	*value = of(r)->query[i].value;
}

const uint8_t *http_body(const struct http_req *r, size_t *n)
{
	*n = of(r)->body_len;
	return of(r)->body;
}

size_t http_body_size(const struct http_req *r)
{
	return of(r)->body_len;
}

struct evbuffer *http_take_body(struct http_req *r)
{
	struct evbuffer *out = evbuffer_new();

	must(out && evbuffer_add(out, of(r)->body, of(r)->body_len) == 0);
	of(r)->body_len = 0;
	return out;
}

void http_on_close(struct http_req *r, void (*cb)(void *arg), void *arg)
{
	of(r)->on_close = cb;
	of(r)->on_close_arg = arg;
}

void http_reply_header(struct http_req *r, const char *name, const char *value)
{
	struct play *p = of(r);

	must(p->answers == 0 && !p->streaming && p->out_count < PLAY_PAIRS);
	for (const char *s = value; *s; s++)
		must((unsigned char)*s >= ' ' && *s != 0x7f);
	p->out[p->out_count].name = strdup(name);
	p->out[p->out_count].value = strdup(value);
	must(p->out[p->out_count].name && p->out[p->out_count].value);
	p->out_count++;
}

void http_reply(struct http_req *r, int status, const char *content_type, const void *body, size_t n)
{
	struct play *p = of(r);

	must(p->answers == 0 && !p->streaming && p->on_close == NULL);
	p->answers++;
	p->status = status;
	p->type = content_type ? strdup(content_type) : NULL;
	must(buf_add(&p->reply, body, n));
}

void http_stream_start(struct http_req *r, int status, const char *content_type)
{
	struct play *p = of(r);

	must(p->answers == 0 && !p->streaming);
	p->answers++;
	p->streaming = true;
	p->status = status;
	p->type = strdup(content_type);
}

void http_stream_write(struct http_req *r, const void *bytes, size_t n)
{
	must(of(r)->streaming && !of(r)->ended);
	must(buf_add(&of(r)->reply, bytes, n));
}

size_t http_stream_queued(const struct http_req *r)
{
	must(of(r)->streaming && !of(r)->ended);
	return 0;
}

void http_stream_end(struct http_req *r)
{
	must(of(r)->streaming && !of(r)->ended);
	of(r)->ended = true;
}

void http_stream_abort(struct http_req *r)
{
	http_stream_end(r);
}
