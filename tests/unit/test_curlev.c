/* Outward calls: addresses, redirects, bounds, pauses, cancelling inside callbacks, nothing sent twice. */
/* link: ephloop_curl ephloop_http EPH::event */
#include "unit.h"

#include "curlev.h"
#include "httpd.h"
#include "loop.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/listener.h>

static struct event_base *base;
static struct curlev *curl;
static struct httpd *server;
static char url_base[64];

static struct {
	int requests, closed;
	char seen[2000];
	struct http_req *held;
} srv;

struct call {
	struct curl_call *handle;
	int heads, done, status;
	size_t bytes;
	char body[5000], headers[2000], said[ERR_TEXT_MAX];
	enum err_code code;
	bool cancel_on_data, refuse_data, free_all, pause_first, paused_once;
	struct call *cancel_other;
	bool deny;
	int judged;
};

static void note(const char *text)
{
	size_t n = strlen(srv.seen);

	snprintf(srv.seen + n, sizeof(srv.seen) - n, "%s", text);
}

static void handler(void *arg, struct http_req *r)
{
	static char big[200000];
	const char *path = http_path(r);
	size_t n;

	(void)arg;
	(void)http_body(r, &n);
	srv.requests++;
	note(http_method_name(r));
	note(path);
	snprintf(srv.seen + strlen(srv.seen), sizeof(srv.seen) - strlen(srv.seen), " n=%zu", n);
	for (size_t i = 0; i < 4; i++) {
		static const char *const names[] = { "Accept", "Content-Type", "X-Test", "Expect" };
		const char *v = http_header(r, names[i]);

		if (v)
			snprintf(srv.seen + strlen(srv.seen), sizeof(srv.seen) - strlen(srv.seen), " %s=%s", names[i], v);
	}
	note(";");
	if (strcmp(path, "/redirect") == 0) {
		http_reply_header(r, "Location", "/elsewhere");
		http_reply(r, 302, NULL, "go", 2);
	} else if (strcmp(path, "/big") == 0) {
		memset(big, 'b', sizeof(big));
		http_reply(r, 200, NULL, big, sizeof(big));
	} else if (strcmp(path, "/stream") == 0) {
		http_stream_start(r, 200, "text/event-stream");
		for (int i = 0; i < 40; i++)
			http_stream_write(r, "0123456789", 10);
		http_stream_end(r);
	} else if (strcmp(path, "/hold") == 0) {
		srv.held = r;
	} else {
		http_reply_header(r, "X-Reply", " spaced ");
		http_reply(r, 200, "text/plain", "hello", 5);
	}
}

static bool allow(void *arg, const struct sockaddr *sa, socklen_t len)
{
	struct call *c = arg;

	(void)sa;
	(void)len;
	c->judged++;
	return !c->deny;
}

static void on_head(void *arg, int status)
{
	struct call *c = arg;

	c->heads++;
	c->status = status;
}

static void on_header(void *arg, const char *name, size_t name_len, const char *value, size_t value_len)
{
	struct call *c = arg;
	size_t n = strlen(c->headers);

	snprintf(c->headers + n, sizeof(c->headers) - n, "%.*s=%.*s;", (int)name_len, name, (int)value_len, value);
}

static bool on_data(void *arg, const uint8_t *p, size_t n)
{
	struct call *c = arg;

	assert_int_equal(c->done, 0);
	if (c->bytes + n < sizeof(c->body))
		memcpy(c->body + c->bytes, p, n);
	c->bytes += n;
	if (c->cancel_on_data) {
		curl_call_cancel(c->handle);
		c->handle = NULL;
	}
	if (c->cancel_other && c->cancel_other->handle) {
		curl_call_cancel(c->cancel_other->handle);
		c->cancel_other->handle = NULL;
	}
	if (c->pause_first) {
		c->pause_first = false;
		c->paused_once = true;
		curl_call_pause(c->handle, true);
	}
	return !c->refuse_data;
}

static void on_done(void *arg, int status, const struct err *e)
{
	struct call *c = arg;

	c->done++;
	c->handle = NULL;
	c->status = status;
	c->code = e ? e->code : ERR_NONE;
	snprintf(c->said, sizeof(c->said), "%s", e ? e->text : "");
	if (c->free_all) {
		curlev_free(curl);
		curl = NULL;
	}
}

static bool is_done(void *arg)
{
	return ((struct call *)arg)->done > 0;
}

static struct curl_request request(const char *method, const char *url, struct call *c)
{
	return (struct curl_request){ .method = method,
		.url = url,
		.connect_timeout_ms = 2000,
		.timeout_ms = 5000,
		.max_body = 100000,
		.allow_addr = allow,
		.on_head = on_head,
		.on_header = on_header,
		.on_data = on_data,
		.on_done = on_done,
		.arg = c };
}

static const char *url(const char *path)
{
	static char out[200];

	snprintf(out, sizeof(out), "%s%s", url_base, path);
	return out;
}

static void start(struct curl_request *req, struct call *c)
{
	struct err e;

	assert_ok(curlev_start(curl, req, &c->handle, &e));
	assert_int_equal(c->done, 0);
}

static void run(const char *method, const char *where, const void *body, size_t n, struct call *c)
{
	struct curl_request req = request(method, where, c);

	req.body = body;
	req.body_len = n;
	start(&req, c);
	assert_true(loop_until(base, is_done, c, 10000));
	assert_int_equal(c->done, 1);
}

static int setup(void **state)
{
	struct httpd_options opt = { .listen = "127.0.0.1:0",
		.max_headers = 8192,
		.max_body = 100000,
		.body_budget = 1000000,
		.request_deadline_ms = 5000,
		.idle_timeout_ms = 5000,
		.max_connections = 100,
		.handler = handler };
	struct err e;

	(void)state;
	memset(&srv, 0, sizeof(srv));
	base = event_base_new();
	assert_ok(httpd_new(base, &opt, &server, &e));
	assert_ok(curlev_new(base, 10, &curl, &e));
	snprintf(url_base, sizeof(url_base), "http://127.0.0.1:%u", httpd_port(server));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	curlev_free(curl);
	httpd_free(server);
	server = NULL;
	if (srv.held) /* its answer goes nowhere, but it is the handler's to give */
		http_reply(srv.held, 200, NULL, "", 0);
	event_base_free(base);
	return 0;
}

static void test_bad_requests(void **state)
{
	static const struct {
		const char *method, *url, *header;
	} cases[] = {
		{ "GET", "file:///etc/passwd", NULL },
		{ "GET", "gopher://127.0.0.1/", NULL },
		{ "GET", "127.0.0.1/", NULL },
		{ "GET", "", NULL },
		{ "GET", "http://127.0.0.1/a b", NULL },
		{ "GET", "http://127.0.0.1/\r\nX: y", NULL },
		{ "GET", "http://h\xc3\xa4/", NULL },
		{ "GE T", "http://127.0.0.1/", NULL },
		{ "", "http://127.0.0.1/", NULL },
		{ "CONNECT", "http://127.0.0.1/", NULL },
		{ "GET", "http://127.0.0.1/", "no colon" },
		{ "GET", "http://127.0.0.1/", ": v" },
		{ "GET", "http://127.0.0.1/", "A: b\r\nC: d" },
		{ "GET", "http://127.0.0.1/", "Content-Length: 5" },
		{ "GET", "http://127.0.0.1/", "transfer-encoding: chunked" },
		{ "GET", "http://127.0.0.1/", "Expect: 100-continue" },
		{ "GET", "http://127.0.0.1/", "A : b" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct call c = { 0 };
		struct curl_request req = request(cases[i].method, cases[i].url, &c);
		struct err e;

		req.headers = &cases[i].header;
		req.header_count = cases[i].header ? 1 : 0;
		if (curlev_start(curl, &req, &c.handle, &e) == 0)
			fail_msg("case %zu was taken", i);
		assert_int_equal(e.code, ERR_INVALID);
		assert_null(c.handle);
	}
}

static void test_addresses(void **state)
{
	static const char *const urls[] = { "http://127.0.0.1:1/", "http://localhost:1/", "http://2130706433:1/",
		"http://0x7f.1:1/", "http://017700000001:1/", "http://[::1]:1/", "http://[::ffff:127.0.0.1]:1/",
		"http://169.254.169.254/", "http://10.0.0.1/", "http://[fd00::1]/", "http://0.0.0.0:1/" };
	int64_t from = clock_mono_ns();

	(void)state;
	for (size_t i = 0; i < COUNT(urls); i++) {
		struct call c = { 0 };
		struct curl_request req = request("GET", urls[i], &c);

		req.allow_addr = NULL;
		start(&req, &c);
		assert_true(loop_until(base, is_done, &c, 10000));
		if (c.code != ERR_DENIED)
			fail_msg("%s: %s", urls[i], c.said);
		assert_non_null(strstr(c.said, "may not be called"));
	}
	assert_true(clock_mono_ns() - from < INT64_C(5000000000));
	{
		struct call c = { 0 };

		run("GET", "http://user:pw@127.0.0.1:1/", NULL, 0, &c);
		assert_int_equal(c.code, ERR_INVALID);
	}
}

static void test_plain(void **state)
{
	static const char *const headers[] = { "X-Test: 1", "Accept: a/b" }, *const empty[] = { "X-Test:" };
	struct call c = { 0 }, d = { 0 }, h = { 0 };
	struct curl_request req = request("GET", url("/a/../b?x=%2e"), &c);

	(void)state;
	req.headers = headers;
	req.header_count = 2;
	start(&req, &c);
	assert_true(loop_until(base, is_done, &c, 5000));
	assert_string_equal(c.said, "");
	assert_int_equal(c.status, 200);
	assert_int_equal(c.heads, 1);
	assert_string_equal(c.body, "hello");
	assert_non_null(strstr(c.headers, "X-Reply=spaced;Content-Type=text/plain;"));
	assert_string_equal(srv.seen, "GET/a/../b n=0 Accept=a/b X-Test=1;");
	srv.seen[0] = '\0';
	req = request("POST", url("/p"), &d);
	req.headers = empty;
	req.header_count = 1;
	req.body = "body";
	req.body_len = 4;
	start(&req, &d);
	assert_true(loop_until(base, is_done, &d, 5000));
	assert_string_equal(srv.seen, "POST/p n=4 X-Test=;");
	srv.seen[0] = '\0';
	run("HEAD", url("/h"), NULL, 0, &h);
	assert_int_equal(h.bytes, 0);
	assert_int_equal(h.code, ERR_NONE);
	for (size_t i = 0; i < 4; i++) {
		static const char *const methods[] = { "PUT", "PATCH", "DELETE", "OPTIONS" };
		struct call m = { 0 };

		run(methods[i], url("/m"), i < 2 ? "abc" : NULL, i < 2 ? 3 : 0, &m);
		assert_string_equal(m.body, "hello");
	}
	assert_string_equal(srv.seen, "HEAD/h n=0;PUT/m n=3;PATCH/m n=3;DELETE/m n=0;OPTIONS/m n=0;");
}

static void test_redirect_is_not_followed(void **state)
{
	struct call c = { 0 };

	(void)state;
	run("GET", url("/redirect"), NULL, 0, &c);
	assert_int_equal(c.status, 302);
	assert_string_equal(c.body, "go");
	assert_int_equal(srv.requests, 1);
}

static void test_bounds(void **state)
{
	struct call c = { 0 }, s = { 0 }, r = { 0 };
	struct curl_request req;

	(void)state;
	run("GET", url("/big"), NULL, 0, &c); /* by its Content-Length */
	assert_int_equal(c.code, ERR_LIMIT);
	assert_non_null(strstr(c.said, "100000"));
	assert_int_equal(c.bytes, 0);
	req = request("GET", url("/stream"), &s); /* by what came */
	req.max_body = 399;
	start(&req, &s);
	assert_true(loop_until(base, is_done, &s, 5000));
	assert_int_equal(s.code, ERR_LIMIT);
	assert_int_equal(s.status, 200);
	assert_true(s.bytes <= 399);
	r.refuse_data = true;
	run("GET", url("/stream"), NULL, 0, &r);
	assert_int_equal(r.code, ERR_PROTOCOL);
}

static void test_timeout(void **state)
{
	struct call c = { 0 };
	struct curl_request req = request("GET", url("/hold"), &c);

	(void)state;
	req.timeout_ms = 150;
	start(&req, &c);
	assert_true(loop_until(base, is_done, &c, 5000));
	assert_int_equal(c.code, ERR_TIMEOUT);
	assert_int_equal(c.status, 0);
	http_reply(srv.held, 200, NULL, "", 0);
	srv.held = NULL;
}

static void test_refused_connection(void **state)
{
	struct call c = { 0 };
	char where[64];
	uint16_t port = httpd_port(server);

	(void)state;
	httpd_free(server);
	server = NULL;
	snprintf(where, sizeof(where), "http://127.0.0.1:%u/", port);
	run("GET", where, NULL, 0, &c);
	assert_int_equal(c.code, ERR_UNAVAILABLE);
}

static void test_cancel(void **state)
{
	struct call inside = { .cancel_on_data = true }, before = { 0 }, waiting = { 0 }, killer = { .cancel_other = &waiting },
		    last = { 0 };
	struct curl_request req = request("GET", url("/hold"), &before);

	(void)state;
	start(&req, &before);
	curl_call_cancel(before.handle); /* nothing was sent yet */
	req = request("GET", url("/stream"), &inside);
	start(&req, &inside);
	req = request("GET", url("/hold"), &waiting);
	start(&req, &waiting);
	while (!srv.held)
		event_base_loop(base, EVLOOP_ONCE);
	run("GET", url("/plain"), NULL, 0, &killer);
	run("GET", url("/plain"), NULL, 0, &last);
	assert_int_equal(before.done + inside.done + waiting.done, 0);
	assert_null(inside.handle);
	assert_null(waiting.handle);
	http_reply(srv.held, 200, NULL, "x", 1);
	srv.held = NULL;
	req = request("GET", url("/hold"), &before);
	start(&req, &before); /* under way when all is freed */
	event_base_loop(base, EVLOOP_NONBLOCK);
	curlev_free(curl);
	curl = NULL;
	assert_int_equal(before.done, 0);
}

static void test_free_in_done(void **state)
{
	struct call c = { .free_all = true }, other = { 0 };
	struct curl_request req = request("GET", url("/hold"), &other);

	(void)state;
	start(&req, &other);
	run("GET", url("/plain"), NULL, 0, &c);
	assert_null(curl);
	assert_int_equal(other.done, 0);
}

static bool was_paused(void *arg)
{
	return ((struct call *)arg)->paused_once;
}

static void test_pause(void **state)
{
	struct call c = { .pause_first = true };
	struct curl_request req = request("GET", url("/big"), &c);
	size_t at_pause;

	(void)state;
	req.max_body = 1000000;
	start(&req, &c);
	assert_true(loop_until(base, was_paused, &c, 5000));
	at_pause = c.bytes;
	for (int i = 0; i < 50; i++)
		event_base_loop(base, EVLOOP_NONBLOCK);
	assert_int_equal(c.bytes, at_pause);
	assert_int_equal(c.done, 0);
	curl_call_pause(c.handle, false);
	assert_int_equal(c.bytes, at_pause); /* not from inside this call */
	assert_true(loop_until(base, is_done, &c, 5000));
	assert_int_equal(c.bytes, 200000);
	assert_int_equal(c.code, ERR_NONE);
}

/* The second call finds a connection in the pool, opened when the address was still allowed. */
static void test_pooled_connection_is_judged(void **state)
{
	struct call first = { 0 }, second = { .deny = true }, third = { 0 };

	(void)state;
	run("GET", url("/1"), NULL, 0, &first);
	run("GET", url("/2"), NULL, 0, &second);
	assert_int_equal(second.code, ERR_DENIED);
	assert_true(second.judged > 0);
	run("GET", url("/3"), NULL, 0, &third);
	assert_string_equal(srv.seen, "GET/1 n=0;GET/3 n=0;");
}

/* --- a server that closes a pooled connection right when the next request comes on it --- */

static int accepted, heads;

static void flaky_read(struct bufferevent *bev, void *arg)
{
	struct evbuffer *in = bufferevent_get_input(bev);
	int *answered = arg;

	if (evbuffer_search(in, "\r\n\r\n", 4, NULL).pos < 0)
		return;
	heads++;
	evbuffer_drain(in, evbuffer_get_length(in));
	if ((*answered)++ == 0) {
		bufferevent_write(bev, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 40);
	} else {
		free(answered);
		bufferevent_free(bev);
	}
}

static void flaky_event(struct bufferevent *bev, short what, void *arg)
{
	(void)what;
	free(arg);
	bufferevent_free(bev);
}

static void flaky_accept(struct evconnlistener *l, evutil_socket_t fd, struct sockaddr *sa, int n, void *arg)
{
	struct bufferevent *bev = bufferevent_socket_new(base, fd, BEV_OPT_CLOSE_ON_FREE);

	(void)l;
	(void)sa;
	(void)n;
	(void)arg;
	accepted++;
	bufferevent_setcb(bev, flaky_read, NULL, flaky_event, calloc(1, sizeof(int)));
	bufferevent_enable(bev, EV_READ | EV_WRITE);
}

static void test_nothing_is_sent_twice(void **state)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(a);
	struct evconnlistener *l = evconnlistener_new_bind(
			base, flaky_accept, NULL, LEV_OPT_CLOSE_ON_FREE, 10, (struct sockaddr *)&a, sizeof(a));
	struct call first = { 0 }, post = { 0 }, del = { 0 };
	char where[64];

	(void)state;
	accepted = heads = 0;
	getsockname(evconnlistener_get_fd(l), (struct sockaddr *)&a, &len);
	snprintf(where, sizeof(where), "http://127.0.0.1:%u/", ntohs(a.sin_port));
	run("GET", where, NULL, 0, &first); /* its connection is kept */
	assert_int_equal(first.status, 200);
	run("DELETE", where, NULL, 0, &del); /* on a connection of its own, answered there */
	assert_int_equal(del.status, 200);
	assert_int_equal(accepted, 2);
	assert_int_equal(heads, 2);
	/* A body may go out on the kept one, which then turns out dead: it is not sent again. More in test_curlev_reuse.c. */
	run("POST", where, "pay", 3, &post);
	assert_int_equal(post.status, 0);
	assert_int_equal(post.code, ERR_UNAVAILABLE);
	assert_int_equal(heads, 3);
	curlev_free(curl);
	curl = NULL;
	for (int i = 0; i < 10; i++)
		event_base_loop(base, EVLOOP_NONBLOCK);
	evconnlistener_free(l);
}

static void test_many_at_once(void **state)
{
	static struct call many[200];

	(void)state;
	memset(many, 0, sizeof(many));
	for (size_t i = 0; i < COUNT(many); i++) {
		struct curl_request req = request("GET", url("/m"), &many[i]);

		start(&req, &many[i]);
	}
	for (size_t i = 0; i < COUNT(many); i++) {
		assert_true(loop_until(base, is_done, &many[i], 10000));
		assert_int_equal(many[i].status, 200);
	}
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_bad_requests),
		T(test_addresses),
		T(test_plain),
		T(test_redirect_is_not_followed),
		T(test_bounds),
		T(test_timeout),
		T(test_refused_connection),
		T(test_cancel),
		T(test_free_in_done),
		T(test_pause),
		T(test_pooled_connection_is_judged),
		T(test_nothing_is_sent_twice),
		T(test_many_at_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
