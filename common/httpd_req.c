/*
 * Requests and replies of httpd: what a handler sees and says. A http_req lives until its reply, its abort, or (with a close
 * callback) until the client goes away; evhttp's own request may die earlier, and then `ev` is NULL. Loop thread, never blocks.
 */
#include "httpd_internal.h"

#include "log.h"
#include "text.h"

#include <event2/http_struct.h>
#include <event2/keyvalq_struct.h>
#include <stdlib.h>
#include <string.h>

/* --- making -------------------------------------------------------------------------------------------------------------- */

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c = (char)(c | 0x20);
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decodes in place, once. False on a bad escape, NUL, or what is no UTF-8. */
static bool decode(char *s, bool plus)
{
	char *out = s, *from = s;

	for (; *s; s++) {
		if (*s == '%') {
			int high = hex(s[1]), low = high < 0 ? -1 : hex(s[2]);

			if (low < 0 || (high == 0 && low == 0))
				return false;
			*out++ = (char)(high << 4 | low);
			s += 2;
		} else {
			*out++ = plus && *s == '+' ? ' ' : *s;
		}
	}
	*out = '\0';
	return text_utf8_clean(from, (size_t)(out - from));
}

static const char *parse_query(struct http_req *r)
{
	char *at = r->query;

	while (at) {
		char *next = strchr(at, '&'), *equals;

		if (next)
			*next++ = '\0';
		if (*at) {
			equals = strchr(at, '=');
			if (equals)
				*equals++ = '\0';
			if (!decode(at, true) || (equals && !decode(equals, true)))
				return "the query holds a bad percent-escape, a NUL or text that is not UTF-8";
			if (r->pair_count == HTTP_QUERY_MAX)
				return "the query holds more than 64 parameters";
			r->pairs[r->pair_count++] = (struct http_pair){ at, equals ? equals : "" };
		}
		at = next;
	}
	return NULL;
}

static void free_req(struct http_req *r)
{
	if (r->free_user)
		r->free_user(r->user);
	if (r->raw_head)
		evbuffer_free(r->raw_head);
	free(r->path);
	free(r->query);
	free(r);
}

int http_req_make(struct http_conn *c, struct evhttp_request *ev, struct http_req **out, const char **problem)
{
	struct http_req *r = calloc(1, sizeof(*r));
	const char *uri = evhttp_request_get_uri(ev), *question = strchr(uri, '?');
	char *address = NULL;
	uint16_t port = 0;

	*out = NULL;
	*problem = NULL;
	if (!r)
		return -1;
	r->path = question ? strndup(uri, (size_t)(question - uri)) : strdup(uri);
	r->query = question ? strdup(question + 1) : NULL;
	if (!r->path || (question && !r->query)) {
		free_req(r);
		return -1;
	}
	r->conn = c;
	r->ev = ev;
	switch (evhttp_request_get_command(ev)) {
	case EVHTTP_REQ_GET: r->method = HTTP_GET; break;
	case EVHTTP_REQ_POST: r->method = HTTP_POST; break;
	case EVHTTP_REQ_PUT: r->method = HTTP_PUT; break;
	case EVHTTP_REQ_PATCH: r->method = HTTP_PATCH; break;
	case EVHTTP_REQ_DELETE: r->method = HTTP_DELETE; break;
	case EVHTTP_REQ_HEAD: r->method = HTTP_HEAD; break;
	default: r->method = HTTP_OPTIONS; break;
	}
	evhttp_connection_get_peer(evhttp_request_get_connection(ev), &address, &port);
	if (!address || !text_copy(r->peer, sizeof(r->peer), address))
		r->peer[0] = '\0';
	if (!decode(r->path, false))
		*problem = "the path holds a bad percent-escape, a NUL or text that is not UTF-8";
	else if (r->query)
		*problem = parse_query(r);
	*out = r;
	return 0;
}

/* `owned`: evhttp's request, which is ours to free now; NULL when evhttp frees it itself. */
void http_req_gone(struct http_req *r, struct evhttp_request *owned)
{
	r->conn = NULL;
	r->ev = owned;
	if (!r->on_close)
		return; /* its handler will still reply: then it is freed */
	r->on_close(r->on_close_arg);
	if (owned)
		evhttp_request_free(owned);
	free_req(r);
}

/* A reply to nobody. */
static void drop(struct http_req *r)
{
	if (r->ev && !r->conn)
		evhttp_request_free(r->ev);
	free_req(r);
}

/* --- reading ------------------------------------------------------------------------------------------------------------- */

enum http_method http_method(const struct http_req *r)
{
	return r->method;
}

const char *http_method_name(const struct http_req *r)
{
	switch (r->method) {
	case HTTP_GET: return "GET";
	case HTTP_POST: return "POST";
	case HTTP_PUT: return "PUT";
	case HTTP_PATCH: return "PATCH";
	case HTTP_DELETE: return "DELETE";
	case HTTP_HEAD: return "HEAD";
	case HTTP_OPTIONS: return "OPTIONS";
	}
	return "-"; /* bytes that never became a request */
}

const char *http_path(const struct http_req *r)
{
	return r->path ? r->path : "";
}

const char *http_header(const struct http_req *r, const char *name)
{
	return r->ev ? evhttp_find_header(evhttp_request_get_input_headers(r->ev), name) : NULL;
}

int http_header_count(const struct http_req *r, const char *name)
{
	struct evkeyval *h;
	int n = 0;

	if (!r->ev)
		return 0;
	for (h = evhttp_request_get_input_headers(r->ev)->tqh_first; h; h = h->next.tqe_next)
		n += strcasecmp(h->key, name) == 0;
	return n;
}

const char *http_query(const struct http_req *r, const char *name, int *count)
{
	const char *value = NULL;
	int n = 0;

	for (size_t i = 0; i < r->pair_count; i++) {
		if (strcmp(r->pairs[i].name, name) != 0)
			continue;
		if (n++ == 0)
			value = r->pairs[i].value;
	}
	if (count)
		*count = n;
	return value;
}

size_t http_query_size(const struct http_req *r)
{
	return r->pair_count;
}

void http_query_at(const struct http_req *r, size_t i, const char **name, const char **value)
{
	*name = i < r->pair_count ? r->pairs[i].name : NULL;
	*value = i < r->pair_count ? r->pairs[i].value : NULL;
}

const uint8_t *http_body(const struct http_req *r, size_t *n)
{
	struct evbuffer *in = r->ev ? evhttp_request_get_input_buffer(r->ev) : NULL;
	const uint8_t *p = in ? evbuffer_pullup(in, -1) : NULL;

	*n = p ? evbuffer_get_length(in) : 0;
	return p ? p : (const uint8_t *)"";
}

size_t http_body_size(const struct http_req *r)
{
	return r->ev ? evbuffer_get_length(evhttp_request_get_input_buffer(r->ev)) : 0;
}

struct evbuffer *http_take_body(struct http_req *r)
{
	struct evbuffer *out = evbuffer_new();

	if (out && r->ev && evbuffer_add_buffer(out, evhttp_request_get_input_buffer(r->ev)) != 0) {
		evbuffer_free(out);
		out = NULL;
	}
	return out;
}

const char *http_peer(const struct http_req *r)
{
	return r->peer;
}

void *http_user(const struct http_req *r)
{
	return r->user;
}

void http_set_user(struct http_req *r, void *user, void (*free_user)(void *user))
{
	if (r->free_user && r->user != user)
		r->free_user(r->user);
	r->user = user;
	r->free_user = free_user;
}

void http_on_close(struct http_req *r, void (*cb)(void *arg), void *arg)
{
	r->on_close = cb;
	r->on_close_arg = arg;
	if (cb && r->conn && r->ev && !r->streaming)
		http_conn_watch(r->conn);
}

/* --- replying ------------------------------------------------------------------------------------------------------------ */

void http_reply_header(struct http_req *r, const char *name, const char *value)
{
	if (strpbrk(name, "\r\n: ") || strpbrk(value, "\r\n")) {
		log_warn("http reply header with a line break left out name=%.40s", strpbrk(name, "\r\n") ? "?" : name);
		return;
	}
	if (r->raw) {
		if (!r->raw_head)
			r->raw_head = evbuffer_new();
		if (r->raw_head)
			evbuffer_add_printf(r->raw_head, "%s: %s\r\n", name, value);
	} else if (r->conn && r->ev) {
		evhttp_add_header(evhttp_request_get_output_headers(r->ev), name, value);
	}
}

static const char *phrase(int status)
{
	static const struct {
		int status;
		const char *text;
	} table[] = {
		{ 200, "OK" },
		{ 201, "Created" },
		{ 202, "Accepted" },
		{ 204, "No Content" },
		{ 304, "Not Modified" },
		{ 400, "Bad Request" },
		{ 401, "Unauthorized" },
		{ 402, "Payment Required" },
		{ 403, "Forbidden" },
		{ 404, "Not Found" },
		{ 405, "Method Not Allowed" },
		{ 406, "Not Acceptable" },
		{ 408, "Request Timeout" },
		{ 409, "Conflict" },
		{ 410, "Gone" },
		{ 413, "Content Too Large" },
		{ 415, "Unsupported Media Type" },
		{ 422, "Unprocessable Content" },
		{ 429, "Too Many Requests" },
		{ 431, "Request Header Fields Too Large" },
		{ 500, "Internal Server Error" },
		{ 501, "Not Implemented" },
		{ 503, "Service Unavailable" },
		{ 505, "HTTP Version Not Supported" },
	};

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		if (table[i].status == status)
			return table[i].text;
	}
	return "Status";
}

/* An answer to bytes that never became a request: written here, since evhttp knows of none. */
static void raw_reply(struct http_req *r, int status, const char *content_type, const void *body, size_t n)
{
	struct evbuffer *out = evbuffer_new();

	if (out) {
		evbuffer_add_printf(
				out, "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Length: %zu\r\n", status, phrase(status), n);
		if (content_type)
			evbuffer_add_printf(out, "Content-Type: %s\r\n", content_type);
		if (r->raw_head)
			evbuffer_add_buffer(out, r->raw_head);
		evbuffer_add(out, "\r\n", 2);
		evbuffer_add(out, body, n);
		bufferevent_write_buffer(r->conn->bev, out);
		evbuffer_free(out);
	}
	r->conn->req = NULL;
	free_req(r);
}

static void common_headers(struct http_req *r, const char *content_type)
{
	if (content_type)
		http_reply_header(r, "Content-Type", content_type);
	if (r->wants_close || http_conn_closing(r->conn))
		http_reply_header(r, "Connection", "close");
}

void http_reply(struct http_req *r, int status, const char *content_type, const void *body, size_t n)
{
	struct http_conn *c = r->conn;
	struct evbuffer *out;
	char length[32];

	if (!c) {
		drop(r);
		return;
	}
	if (r->raw) {
		raw_reply(r, status, content_type, body, n);
		return;
	}
	common_headers(r, content_type);
	out = evbuffer_new();
	if (!out || (n > 0 && r->method != HTTP_HEAD && evbuffer_add(out, body, n) != 0)) {
		if (out)
			evbuffer_free(out);
		http_stream_abort(r);
		return;
	}
	if (r->method == HTTP_HEAD && text_fmt(length, sizeof(length), "%zu", n))
		http_reply_header(r, "Content-Length", length);
	c->req = NULL;
	evhttp_send_reply(r->ev, status, phrase(status), out);
	evbuffer_free(out);
	http_conn_replying(c, false);
	free_req(r);
}

void http_stream_start(struct http_req *r, int status, const char *content_type)
{
	if (!r->conn || r->raw)
		return;
	r->streaming = true;
	if (r->ev->minor == 0) /* HTTP/1.0 knows no chunks: the end of the stream is the end of the connection */
		r->wants_close = true;
	common_headers(r, content_type);
	evhttp_send_reply_start(r->ev, status, phrase(status));
	http_conn_replying(r->conn, true);
}

void http_stream_write(struct http_req *r, const void *p, size_t n)
{
	struct evbuffer *chunk;

	if (!r->conn || r->raw || n == 0)
		return;
	chunk = evbuffer_new();
	if (!chunk || evbuffer_add(chunk, p, n) != 0) {
		r->conn->kill = true; /* a hole in a stream is worse than its end */
		http_conn_todo(r->conn);
	} else {
		evhttp_send_reply_chunk(r->ev, chunk);
	}
	if (chunk)
		evbuffer_free(chunk);
}

size_t http_stream_queued(const struct http_req *r)
{
	return r->conn ? evbuffer_get_length(bufferevent_get_output(r->conn->bev)) : 0;
}

void http_stream_end(struct http_req *r)
{
	struct http_conn *c = r->conn;
	struct evhttp_request *ev = r->ev;

	if (!c) {
		drop(r);
		return;
	}
	c->req = NULL;
	free_req(r);
	http_conn_replying(c, false);
	evhttp_send_reply_end(ev); /* may free ev at once, and then calls on_complete */
}

void http_stream_abort(struct http_req *r)
{
	struct http_conn *c = r->conn;

	if (!c) {
		drop(r);
		return;
	}
	c->req = NULL;
	c->kill = true;
	http_conn_todo(c); /* closed at the end of the turn, not below evhttp's own feet */
	free_req(r);
}

void http_req_refuse(struct httpd *h, struct http_req *r, int status, const char *detail)
{
	char text[256];

	r->wants_close = true;
	if (status == 503)
		http_reply_header(r, "Retry-After", "1");
	if (status == 413 && text_fmt(text, sizeof(text), "%s: at most %zu bytes", detail, h->opt.max_body))
		detail = text;
	if (status == 431 && text_fmt(text, sizeof(text), "%s: at most %zu bytes", detail, h->opt.max_headers))
		detail = text;
	if (status == 408 && text_fmt(text, sizeof(text), "%s: at most %d ms", detail, h->opt.request_deadline_ms))
		detail = text;
	if (h->opt.refuse)
		h->opt.refuse(h->opt.arg, r, status, detail);
	else
		http_reply(r, status, "text/plain; charset=utf-8", detail, strlen(detail));
}
