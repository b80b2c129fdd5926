/*
 * One attempt's exchange with the provider over HTTP: its body and request, and what comes back, down to where model.c decides what
 * it was (model_attempt_done). The key goes into the request's header here and is wiped behind it. Called by model.c and from
 * curl's callbacks, on the broker's thread; never blocks.
 */
#include "model_error.h"
#include "model_internal.h"
#include "model_request.h"

#include "common/netaddr.h"
#include "common/text.h"

#include <event2/event.h>
#include <sodium.h>
#include <string.h>

#define CONNECT_TIMEOUT_MS 10000
#define LINGER_MS 50 /* between the answer's last word and the end of its body */

static bool any_address(void *arg, const struct sockaddr *sa, socklen_t len)
{
	const struct model *m = arg;

	(void)len;
	return m->opt.a->model.any_address || (m->own_known && net_is_global(sa) && !net_own_has(&m->own, sa));
}

static void on_head(void *arg, int status)
{
	struct model *m = arg;

	m->status = status;
}

static void on_header(void *arg, const char *name, size_t name_len, const char *value, size_t value_len)
{
	struct model *m = arg;

	if (name_len == 11 && strncasecmp(name, "retry-after", 11) == 0)
		m->retry_after_ms = model_retry_after_ms(value, value_len);
}

static bool on_data(void *arg, const uint8_t *p, size_t n)
{
	struct model *m = arg;

	if (m->status < 200 || m->status > 299) {
		size_t room = MODEL_ERROR_BODY_MAX - m->error_body.len;

		(void)buf_add(&m->error_body, p, n < room ? n : room);
		return n <= room; /* more is not needed, and nobody says how much more there is */
	}
	if (model_stream_feed(m->stream, p, n, &m->stream_error) < 0)
		return false;
	/* The answer is over. The end of its body keeps the connection for the next call; it is not waited for much longer. */
	if (model_stream_done(m->stream) && !event_pending(m->linger, EV_TIMEOUT, NULL))
		event_add(m->linger, &(struct timeval){ 0, LINGER_MS * 1000 });
	return true;
}

void model_on_linger(evutil_socket_t fd, short what, void *arg)
{
	struct model *m = arg;

	(void)fd;
	(void)what;
	if (m->http == NULL)
		return;
	curl_call_cancel(m->http);
	model_attempt_done(m, m->status, NULL);
}

bool model_lay_body(struct model *m, const struct meter_plan *p)
{
	m->body.len = m->prefix_len;
	m->stream = model_stream_new(m->key);
	m->status = 0;
	m->retry_after_ms = -1;
	m->stream_error = (struct err){ .code = ERR_NONE };
	return m->stream != NULL && model_request_tail(m->limit_param, p->output_tokens, &m->body);
}

int model_send(struct model *m, int64_t timeout_ms, struct err *e)
{
	const struct assignment *a = m->opt.a;
	char url[640], auth[600], id[128];
	const char *headers[] = { "Content-Type: application/json", "Accept: text/event-stream, application/json", id, auth };
	struct curl_request req = { .method = "POST",
		.url = url,
		.headers = headers,
		.header_count = m->key[0] != '\0' ? 4 : 3,
		.body = m->body.data,
		.body_len = m->body.len,
		.connect_timeout_ms = CONNECT_TIMEOUT_MS,
		.timeout_ms = timeout_ms > INT32_MAX ? INT32_MAX : (int)timeout_ms,
		.max_body = MODEL_BODY_MAX,
		.allow_addr = any_address,
		.on_head = on_head,
		.on_header = on_header,
		.on_data = on_data,
		.on_done = model_attempt_done,
		.arg = m };
	int rc = -1;

	if (!text_fmt(url, sizeof(url), "%s/chat/completions", a->model.base_url) ||
			!text_fmt(id, sizeof(id), "X-Request-Id: %s-%u-%u", a->run_id, m->report.call, m->report.attempts) ||
			!text_fmt(auth, sizeof(auth), "Authorization: Bearer %s", m->key))
		(void)err_set(e, ERR_LIMIT, "the provider's address or key is too long");
	else
		rc = curlev_start(m->opt.curl, &req, &m->http, e);
	sodium_memzero(auth, sizeof(auth));
	return rc;
}
