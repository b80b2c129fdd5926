/* The listener for scrapes (metrics_http.h), on httpd. Answers at once, from memory. */
#include "metrics_http.h"

#include "httpd.h"

#include <stdlib.h>
#include <string.h>

#define TEXT_MAX (1024 * 1024)
#define CONNECTIONS_MAX 64
#define HEADERS_MAX (16 * 1024)
#define DEADLINE_MS 10000
#define IDLE_MS 150000 /* above the usual pauses between two scrapes */

struct metrics_http {
	struct metrics_http_options opt;
	struct httpd *httpd;
};

static void say(struct http_req *r, int status, const char *text)
{
	http_reply(r, status, "text/plain; charset=utf-8", text, strlen(text));
}

static void answer(struct metrics_http *h, struct http_req *r)
{
	const enum metrics_format format = metrics_accepted(http_header(r, "Accept"));
	struct buf out = BUF_INIT(TEXT_MAX);
	struct metrics m;

	metrics_init(&m, &out, format);
	h->opt.write(h->opt.arg, &m);
	metrics_end(&m);
	http_reply_header(r, "Cache-Control", "no-store");
	http_reply_header(r, "Vary", "Accept");
	if (out.failed)
		say(r, 500, "The metrics did not fit.\n");
	else
		http_reply(r, 200, metrics_content_type(format), out.data, out.len);
	buf_free(&out);
}

static void on_request(void *arg, struct http_req *r)
{
	const char *path = http_path(r);

	if (strcmp(path, "/metrics") != 0) {
		say(r, 404, "There is /metrics here and nothing else.\n");
	} else if (http_method(r) != HTTP_GET && http_method(r) != HTTP_HEAD) {
		http_reply_header(r, "Allow", "GET, HEAD");
		say(r, 405, "Only GET and HEAD are allowed here.\n");
	} else {
		answer(arg, r);
	}
}

int metrics_http_new(struct event_base *base, const struct metrics_http_options *opt, struct metrics_http **out, struct err *e)
{
	struct metrics_http *h = calloc(1, sizeof(*h));
	struct httpd_options http = {
		.listen = opt->listen,
		.listen_fd = opt->listen_fd,
		.max_headers = HEADERS_MAX,
		.max_body = 1,
		.body_budget = 64,
		.request_deadline_ms = DEADLINE_MS,
		.idle_timeout_ms = IDLE_MS,
		.max_connections = CONNECTIONS_MAX,
		.handler = on_request,
		.arg = h,
	};

	*out = NULL;
	if (!h)
		return err_set(e, ERR_NOMEM, "metrics: no memory");
	h->opt = *opt;
	if (httpd_new(base, &http, &h->httpd, e) != 0) {
		free(h);
		return err_wrap(e, "metrics_listen");
	}
	*out = h;
	return 0;
}

uint16_t metrics_http_port(const struct metrics_http *h)
{
	return httpd_port(h->httpd);
}

void metrics_http_free(struct metrics_http *h)
{
	if (!h)
		return;
	httpd_free(h->httpd);
	free(h);
}
