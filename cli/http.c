/*
 * One HTTP exchange after the other over a libcurl multi handle (for its poll, which also hears Ctrl-C). Owns the handles. Called
 * by api.c only; blocks until the exchange is over.
 */
#include "http.h"

#include "common/clock.h"
#include "common/text.h"
#include "interrupt.h"

#include <ctype.h>
#include <curl/curl.h>
#include <strings.h>

#define TICK_MS 100
#define CONNECT_TIMEOUT_MS 10000L
#define RETRY_AFTER_MAX_S 3600

struct http {
	CURLM *multi;
	CURL *easy;
};

/* What the callbacks of one exchange share. */
struct exchange {
	const struct http_request *req;
	struct http_response *out;
	struct http *h;
	int64_t last_bytes_ns;
	bool stopped; /* on_bytes said no more */
	bool too_long;
};

struct http *http_new(struct err *e)
{
	struct http *h = calloc(1, sizeof *h);

	if (h == NULL || curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
		goto fail;
	h->multi = curl_multi_init();
	h->easy = curl_easy_init();
	if (h->multi != NULL && h->easy != NULL)
		return h;
fail:
	http_free(h);
	(void)err_set(e, ERR_NOMEM, "the HTTP library cannot be started");
	return NULL;
}

void http_free(struct http *h)
{
	if (h == NULL)
		return;
	if (h->easy != NULL)
		curl_easy_cleanup(h->easy);
	if (h->multi != NULL)
		curl_multi_cleanup(h->multi);
	free(h);
}

void http_response_init(struct http_response *r)
{
	memset(r, 0, sizeof *r);
	buf_init(&r->body, HTTP_BODY_MAX);
	r->retry_after_s = -1;
}

void http_response_free(struct http_response *r)
{
	buf_free(&r->body);
}

static size_t on_body(char *p, size_t size, size_t count, void *arg)
{
	struct exchange *x = arg;
	size_t n = size * count;
	long status = 0;

	x->last_bytes_ns = clock_mono_ns();
	(void)curl_easy_getinfo(x->h->easy, CURLINFO_RESPONSE_CODE, &status);
	if (x->req->on_bytes != NULL && status == 200) {
		if (x->req->on_bytes(x->req->arg, p, n))
			return n;
		x->stopped = true;
		return CURL_WRITEFUNC_ERROR;
	}
	if (buf_add(&x->out->body, p, n))
		return n;
	x->too_long = true;
	return CURL_WRITEFUNC_ERROR;
}

static size_t on_header(char *p, size_t size, size_t count, void *arg)
{
	static const char name[] = "retry-after:";
	struct exchange *x = arg;
	size_t n = size * count, at = sizeof name - 1, digits = 0;
	char value[8];

	x->last_bytes_ns = clock_mono_ns();
	if (n <= at || strncasecmp(p, name, at) != 0)
		return n;
	while (at < n && p[at] == ' ')
		at++;
	while (at < n && digits < sizeof value - 1 && isdigit((unsigned char)p[at]))
		value[digits++] = p[at++];
	value[digits] = '\0';
	if (digits > 0) {
		int64_t s;
		struct err e;

		if (text_i64(value, 0, RETRY_AFTER_MAX_S, &s, &e) != 0)
			s = RETRY_AFTER_MAX_S;
		x->out->retry_after_s = s;
	}
	return n;
}

/* A proxy of the environment cannot reach our own loopback. */
static bool is_loopback(const char *url)
{
	static const char *const hosts[] = { "127.", "localhost:", "localhost/", "[::1]" };
	const char *host = strstr(url, "://");

	for (size_t i = 0; host != NULL && i < sizeof hosts / sizeof hosts[0]; i++)
		if (strncasecmp(host + 3, hosts[i], strlen(hosts[i])) == 0)
			return true;
	return false;
}

static bool options(struct exchange *x, struct curl_slist *headers, char *error_text)
{
	CURL *c = x->h->easy;
	const struct http_request *req = x->req;
	bool ok = true;

	curl_easy_reset(c);
	ok &= curl_easy_setopt(c, CURLOPT_URL, req->url) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 0L) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_NETRC, (long)CURL_NETRC_IGNORED) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_TIMEOUT_MS) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_USERAGENT, "ephemeral-cli/" EPHEMERAL_VERSION) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, req->method) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_ERRORBUFFER, error_text) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_WRITEDATA, x) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, on_header) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_HEADERDATA, x) == CURLE_OK;
	ok &= curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, (long)req->timeout_ms) == CURLE_OK;
	if (is_loopback(req->url))
		ok &= curl_easy_setopt(c, CURLOPT_PROXY, "") == CURLE_OK;
	if (req->body != NULL) {
		ok &= curl_easy_setopt(c, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)req->body_len) == CURLE_OK;
		ok &= curl_easy_setopt(c, CURLOPT_POSTFIELDS, req->body) == CURLE_OK;
	}
	return ok;
}

/* Waits until the exchange is over. CURLE_ABORTED_BY_CALLBACK after Ctrl-C, CURLE_OPERATION_TIMEDOUT after too long a silence. */
static CURLcode drive(struct exchange *x)
{
	struct curl_waitfd signal_fd = { .fd = interrupt_fd(), .events = CURL_WAIT_POLLIN };
	int running = 1, left = 0;
	CURLMsg *msg;

	for (;;) {
		if (curl_multi_perform(x->h->multi, &running) != CURLM_OK)
			return CURLE_RECV_ERROR;
		if (running == 0)
			break;
		if (interrupt_seen())
			return CURLE_ABORTED_BY_CALLBACK;
		if (x->req->idle_ms > 0 && clock_mono_ns() - x->last_bytes_ns > x->req->idle_ms * 1000000)
			return CURLE_OPERATION_TIMEDOUT;
		if (x->req->on_tick != NULL)
			x->req->on_tick(x->req->arg);
		if (curl_multi_poll(x->h->multi, &signal_fd, signal_fd.fd >= 0 ? 1 : 0, TICK_MS, NULL) != CURLM_OK)
			return CURLE_RECV_ERROR;
	}
	while ((msg = curl_multi_info_read(x->h->multi, &left)) != NULL)
		if (msg->msg == CURLMSG_DONE)
			return msg->data.result;
	return CURLE_RECV_ERROR;
}

static int verdict(const struct exchange *x, CURLcode code, const char *error_text, struct err *e)
{
	const char *why = error_text[0] != '\0' ? error_text : curl_easy_strerror(code);

	if (x->stopped)
		return err_set(e, ERR_CONFLICT, "stopped");
	if (x->too_long)
		return err_set(e, ERR_LIMIT, "%s: the answer is over %zu MiB", x->req->url, HTTP_BODY_MAX >> 20);
	switch (code) {
	case CURLE_OK: return 0;
	case CURLE_ABORTED_BY_CALLBACK: return err_set(e, ERR_CONFLICT, "interrupted");
	case CURLE_OPERATION_TIMEDOUT: return err_set(e, ERR_TIMEOUT, "%s does not answer in time", x->req->url);
	case CURLE_URL_MALFORMAT: return err_set(e, ERR_INVALID, "%s is no http or https URL", x->req->url);
	case CURLE_UNSUPPORTED_PROTOCOL: /* the URL was checked: the answer is none of HTTP */
	case CURLE_WEIRD_SERVER_REPLY: return err_set(e, ERR_PROTOCOL, "%s does not speak HTTP: %s", x->req->url, why);
	default: return err_set(e, ERR_UNAVAILABLE, "%s cannot be asked: %s", x->req->url, why);
	}
}

int http_send(struct http *h, const struct http_request *req, struct http_response *out, struct err *e)
{
	struct exchange x = { .req = req, .out = out, .h = h, .last_bytes_ns = clock_mono_ns() };
	char error_text[CURL_ERROR_SIZE] = "";
	/* No 100-continue round trip: bodies are small. */
	struct curl_slist *headers = curl_slist_append(NULL, "Expect:");
	CURLcode code;

	for (size_t i = 0; headers != NULL && req->headers != NULL && req->headers[i] != NULL; i++) {
		struct curl_slist *longer = curl_slist_append(headers, req->headers[i]);

		if (longer == NULL) {
			curl_slist_free_all(headers);
			headers = NULL;
			break;
		}
		headers = longer;
	}
	if (headers == NULL)
		return err_set(e, ERR_NOMEM, "out of memory");
	if (!options(&x, headers, error_text) || curl_multi_add_handle(h->multi, h->easy) != CURLM_OK) {
		curl_slist_free_all(headers);
		return err_set(e, ERR_INTERNAL, "the HTTP library refuses a setting");
	}
	code = drive(&x);
	(void)curl_easy_getinfo(h->easy, CURLINFO_RESPONSE_CODE, &out->status);
	(void)curl_multi_remove_handle(h->multi, h->easy);
	curl_slist_free_all(headers);
	return verdict(&x, code, error_text, e);
}
