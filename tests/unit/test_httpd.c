/* The HTTP server over real sockets: what is refused and how, limits, deadlines, long polls, streams, memory of pipelines. */
/* link: ephloop_http */
#include "unit.h"

#include <sys/resource.h>

#include "httpd.h"
#include "loop.h"

static struct {
	struct event_base *base;
	struct httpd *h;
	struct http_req *held; /* a handler that answers later */
	int closed, requests, freed;
} t;

static struct raw_client client, second;

static void on_held_close(void *arg)
{
	(void)arg;
	t.closed++;
	t.held = NULL;
}

static void count_free(void *user)
{
	(void)user;
	t.freed++;
}

static void handler(void *arg, struct http_req *r)
{
	char out[512];
	size_t n;
	const char *path = http_path(r), *q = http_query(r, "q", NULL);
	const uint8_t *body = http_body(r, &n);

	(void)arg;
	t.requests++;
	http_set_user(r, &t, count_free);
	if (strcmp(path, "/hold") == 0 || strcmp(path, "/watch") == 0) {
		t.held = r;
		if (path[1] == 'w')
			http_on_close(r, on_held_close, NULL);
		return;
	}
	if (strcmp(path, "/stream") == 0) {
		t.held = r;
		http_on_close(r, on_held_close, NULL);
		http_stream_start(r, 200, "text/event-stream");
		http_stream_write(r, "data: 1\n\n", 9);
		return;
	}
	if (strcmp(path, "/big") == 0) {
		static char big[300000];

		memset(big, 'x', sizeof(big));
		http_reply(r, 200, "text/plain", big, sizeof(big));
		return;
	}
	http_reply_header(r, "X-Test", "yes");
	if (strcmp(path, "/a b/c") == 0)
		http_reply_header(r, "X-Bad", "a\r\nSet-Cookie: b"); /* left out, with a line in the log */
	snprintf(out, sizeof(out), "[%s %s q=%s n=%zu first=%.1s peer=%s]", http_method_name(r), path, q ? q : "-", n,
			n ? (const char *)body : "-", http_peer(r));
	http_reply(r, 200, "text/plain", out, strlen(out));
}

static void refuse(void *arg, struct http_req *r, int status, const char *detail)
{
	char out[512];

	(void)arg;
	snprintf(out, sizeof(out), "{\"status\":%d,\"detail\":\"%s\"}", status, detail);
	http_reply(r, status, "application/problem+json", out, strlen(out));
}

static int start(void **state)
{
	struct httpd_options opt = {
		.listen = "127.0.0.1:0",
		.max_headers = 4096,
		.max_body = 100000,
		.body_budget = 250000,
		.request_deadline_ms = 400,
		.idle_timeout_ms = 1500,
		.max_connections = 64,
		.handler = handler,
		.refuse = refuse,
	};
	struct err e;

	(void)state;
	memset(&t, 0, sizeof(t));
	t.base = event_base_new();
	assert_ok(httpd_new(t.base, &opt, &t.h, &e));
	raw_open(&client, httpd_port(t.h));
	return 0;
}

static int stop(void **state)
{
	(void)state;
	close(client.fd);
	httpd_free(t.h);
	event_base_free(t.base);
	return 0;
}

static void say(const char *bytes, const char *want)
{
	if (!raw_talk(t.base, &client, bytes, strlen(bytes), want, 5000))
		fail_msg("no end to %.60s; got: %s", bytes, client.got);
}

static void has(const char *what)
{
	if (!strstr(client.got, what))
		fail_msg("no \"%s\" in: %s", what, client.got);
}

#define GET(path) "GET " path " HTTP/1.1\r\nHost: a\r\n\r\n"

static void test_refused(void **state)
{
	static const struct {
		const char *bytes, *status;
	} cases[] = {
		{ "GET / HTTP/1.1\nHost: a\n\n", "400" },
		{ "GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n folded\r\n\r\n", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 3\r\n\r\nabc", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "400" },
		{ "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\n\r\n", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", "400" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nHost: b\r\n\r\n", "400" },
		{ "HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", "400" },
		{ "GET / HTTP/1.1\r\n\r\n", "400" },
		{ "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400" },
		{ "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", "400" },
		{ "GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "GET /%ff HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "GET /?a=%f HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "BREW / HTTP/1.1\r\nHost: a\r\n\r\n", "501" },
		{ "GET / HTTP/2.0\r\nHost: a\r\n\r\n", "505" },
		{ "GET / HTTP/1.1\r\nHost: a\r\nExpect: x\r\n\r\n", "417" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue, x\r\nContent-Length: 1\r\n\r\n", "417" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100001\r\n\r\n", "413" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n", "413" },
		{ "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n186a1\r\n", "413" },
		{ "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", "400" },
		{ "\x16\x03\x01\x02\x7f\x01\x02\x01\xfc\r\n", "400" },
	};

	for (size_t i = 0; i < COUNT(cases); i++) {
		char line[32];

		if (i > 0)
			raw_open(&client, httpd_port(t.h));
		say(cases[i].bytes, NULL);
		snprintf(line, sizeof(line), "HTTP/1.1 %s ", cases[i].status);
		if (strncmp(client.got, line, strlen(line)) != 0)
			fail_msg("case %zu: %s", i, client.got);
		has("application/problem+json");
		if (strstr(strstr(client.got, "Connection: close") + 1, "Connection: close"))
			fail_msg("case %zu was answered twice: %s", i, client.got);
		if (i + 1 < COUNT(cases))
			close(client.fd);
	}
	assert_int_equal(t.requests, 0);
	(void)state;
}

static void test_nul_in_header(void **state)
{
	static const char bytes[] = "GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n";

	(void)state;
	assert_true(raw_talk(t.base, &client, bytes, sizeof(bytes) - 1, NULL, 5000));
	has("HTTP/1.1 400 ");
	has("control character");
}

static void test_long_head(void **state)
{
	char bytes[6000];

	(void)state;
	memset(bytes, 'a', sizeof(bytes));
	memcpy(bytes, "GET / HTTP/1.1\r\nHost: a\r\nX: ", 28);
	bytes[sizeof(bytes) - 1] = '\0';
	say(bytes, NULL);
	has("HTTP/1.1 431 ");
	has("at most 4096 bytes");
}

static void test_plain(void **state)
{
	(void)state;
	say(GET("/a%20b%2Fc?q=1+2&q=3&z"), "]");
	has("HTTP/1.1 200 OK");
	has("[GET /a b/c q=1 2 n=0 first=- peer=127.0.0.1]");
	has("X-Test: yes");
	assert_null(strstr(client.got, "Set-Cookie"));
	client.n = 0;
	say("POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", "]");
	has("[POST /p q=- n=3 first=a");
	client.n = 0;
	say("PUT /p HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nzy\r\nA\r\n0123456789\r\n0\r\n\r\n", "]");
	has("[PUT /p q=- n=12 first=z");
	client.n = 0;
	say("HEAD /h HTTP/1.1\r\nHost: a\r\n\r\n" GET("/after"), "]");
	has("Content-Length: 40");
	assert_null(strstr(client.got, "[HEAD"));
	has("[GET /after");
	assert_int_equal(t.requests, 5);
	assert_int_equal(t.freed, 5);
}

static void test_http10_closes(void **state)
{
	(void)state;
	say("GET /x HTTP/1.0\r\n\r\n", NULL);
	has("[GET /x");
}

static void test_byte_by_byte(void **state)
{
	static const char bytes[] = "POST /slow HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";

	(void)state;
	for (size_t i = 0; i < sizeof(bytes) - 2; i++) {
		assert_int_equal(send(client.fd, bytes + i, 1, 0), 1);
		event_base_loop(t.base, EVLOOP_NONBLOCK);
	}
	say(bytes + sizeof(bytes) - 2, "]");
	has("[POST /slow q=- n=3 first=a");
}

static void test_pipelined(void **state)
{
	(void)state;
	say(GET("/1") GET("/2") GET("/3"), "/3");
	has("[GET /1");
	has("[GET /2");
	has("[GET /3");
}

/* Good requests are answered, the broken one and what follows are not. */
static void test_pipelined_then_bad(void **state)
{
	(void)state;
	say(GET("/1") GET("/2") "GET /3 HTTP/1.1\nHost: a\n\n" GET("/4"), NULL);
	has("[GET /1");
	has("[GET /2");
	assert_null(strstr(client.got, "[GET /3"));
	assert_null(strstr(client.got, "[GET /4"));
	assert_int_equal(t.requests, 2);
}

static void test_smuggled(void **state)
{
	(void)state;
	say("POST /1 HTTP/1.1\r\nHost: a\r\nContent-Length : 30\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\n\r\n", NULL);
	has("HTTP/1.1 400 ");
	assert_int_equal(t.requests, 0);
}

static bool held(void *arg)
{
	(void)arg;
	return t.held != NULL;
}

static bool closed(void *arg)
{
	(void)arg;
	return t.closed > 0;
}

static void test_slow_head_and_body(void **state)
{
	(void)state;
	say("GET / HTTP/1.1\r\nHo", NULL);
	has("HTTP/1.1 408 ");
	close(client.fd);
	raw_open(&client, httpd_port(t.h));
	say("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc", NULL);
	has("HTTP/1.1 408 ");
	has("at most 400 ms");
	assert_int_equal(t.requests, 0);
}

static void test_idle_is_closed(void **state)
{
	(void)state;
	say("", NULL);
	assert_int_equal(client.n, 0);
}

/* A handler that takes longer than the deadline for the request's arrival is not cut. */
static void test_answer_later(void **state)
{
	int64_t until;

	(void)state;
	client.send = GET("/hold");
	client.left = strlen(client.send);
	while (!t.held) {
		raw_step(&client);
		event_base_loop(t.base, EVLOOP_ONCE);
	}
	until = clock_mono_ns() + 700 * INT64_C(1000000);
	while (clock_mono_ns() < until)
		event_base_loop(t.base, EVLOOP_ONCE);
	http_reply(t.held, 202, NULL, "later", 5);
	say(GET("/next"), "]");
	has("HTTP/1.1 202 Accepted");
	has("later");
	has("[GET /next");
}

static void test_client_gone(void **state)
{
	const char *paths[] = { GET("/watch"), GET("/stream"), GET("/hold") };

	(void)state;
	for (size_t i = 0; i < COUNT(paths); i++) {
		t.held = NULL;
		t.closed = 0;
		if (i > 0)
			raw_open(&client, httpd_port(t.h));
		client.send = paths[i];
		client.left = strlen(paths[i]);
		raw_step(&client);
		assert_true(loop_until(t.base, held, NULL, 5000));
		close(client.fd);
		if (i < 2) {
			assert_true(loop_until(t.base, closed, NULL, 5000));
			assert_null(t.held);
		} else { /* nobody asked to be told: the answer goes nowhere, and nothing breaks */
			event_base_loop(t.base, EVLOOP_ONCE);
			http_reply(t.held, 200, NULL, "x", 1);
			event_base_loop(t.base, EVLOOP_ONCE);
		}
		assert_int_equal(t.freed, (int)i + 1);
	}
	raw_open(&client, httpd_port(t.h));
}

static void test_half_close_is_answered(void **state)
{
	(void)state;
	client.half_close = true;
	say(GET("/big"), NULL);
	has("HTTP/1.1 200 OK");
	assert_true(client.n > 300000);
}

static void test_stream(void **state)
{
	(void)state;
	say(GET("/stream"), "data: 1");
	has("Transfer-Encoding: chunked");
	http_stream_write(t.held, "data: 2\n\n", 9);
	assert_true(raw_talk(t.base, &client, "", 0, "data: 2", 5000));
	http_stream_end(t.held);
	say(GET("/after"), "]");
	has("0\r\n\r\nHTTP/1.1 200 OK");
	assert_int_equal(t.closed, 0);
}

static void test_stream_back_pressure(void **state)
{
	static char block[65536];
	size_t queued = 0;

	(void)state;
	say(GET("/stream"), "data: 1");
	for (int i = 0; i < 1000 && queued < 256 * 1024; i++) { /* the client does not read */
		http_stream_write(t.held, block, sizeof(block));
		event_base_loop(t.base, EVLOOP_NONBLOCK);
		queued = http_stream_queued(t.held);
	}
	assert_true(queued >= 256 * 1024);
	http_stream_abort(t.held);
	event_base_loop(t.base, EVLOOP_NONBLOCK);
	assert_true(raw_talk(t.base, &client, "", 0, NULL, 5000) || client.n == sizeof(client.got) - 1);
	assert_int_equal(t.freed, 1);
}

static void test_abort_in_handler_turn(void **state)
{
	(void)state;
	client.send = GET("/hold");
	client.left = strlen(client.send);
	raw_step(&client);
	assert_true(loop_until(t.base, held, NULL, 5000));
	http_stream_abort(t.held);
	say("", NULL);
	assert_int_equal(client.n, 0);
}

static void test_expect_continue(void **state)
{
	(void)state;
	say("POST /e HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", "\r\n\r\n");
	has("HTTP/1.1 100 Continue");
	say("abc", "]");
	has("[POST /e q=- n=3 first=a");
}

/* The next request comes while a long poll watches for the client's end, and while a stream is open. */
static void test_next_request_early(void **state)
{
	(void)state;
	client.send = GET("/watch");
	client.left = strlen(client.send);
	raw_step(&client);
	assert_true(loop_until(t.base, held, NULL, 5000));
	assert_int_equal(send(client.fd, GET("/early"), strlen(GET("/early")), 0), (ssize_t)strlen(GET("/early")));
	for (int i = 0; i < 20; i++)
		event_base_loop(t.base, EVLOOP_NONBLOCK);
	assert_int_equal(t.closed, 0);
	assert_int_equal(t.requests, 1);
	http_reply(t.held, 200, NULL, "first", 5);
	t.held = NULL;
	assert_true(raw_talk(t.base, &client, "", 0, "]", 5000));
	has("first");
	has("[GET /early");
	client.n = 0;
	say(GET("/stream") GET("/early2"), "data: 1");
	for (int i = 0; i < 20; i++)
		event_base_loop(t.base, EVLOOP_NONBLOCK);
	assert_int_equal(t.requests, 3);
	http_stream_end(t.held);
	assert_true(raw_talk(t.base, &client, "", 0, "]", 5000));
	has("[GET /early2");
}

/* The budget is 250,000 bytes: three bodies of 90,000 do not fit together. */
static void test_body_budget(void **state)
{
	static char body[90000], head[] = "POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 95000\r\n\r\n";
	static struct raw_client third;

	(void)state;
	raw_open(&second, httpd_port(t.h));
	raw_open(&third, httpd_port(t.h));
	assert_int_equal(send(client.fd, head, sizeof(head) - 1, 0), (ssize_t)sizeof(head) - 1);
	assert_int_equal(send(second.fd, head, sizeof(head) - 1, 0), (ssize_t)sizeof(head) - 1);
	assert_int_equal(send(third.fd, head, sizeof(head) - 1, 0), (ssize_t)sizeof(head) - 1);
	client.send = second.send = body;
	client.left = second.left = sizeof(body);
	while (client.left > 0 || second.left > 0) {
		raw_step(&client);
		raw_step(&second);
		event_base_loop(t.base, EVLOOP_NONBLOCK);
	}
	assert_true(raw_talk(t.base, &third, body, sizeof(body), NULL, 5000));
	assert_non_null(strstr(third.got, "HTTP/1.1 503 "));
	assert_non_null(strstr(third.got, "Retry-After: 1"));
	close(third.fd);
	assert_true(raw_talk(t.base, &client, body, 5000, "]", 5000));
	has("n=95000");
	close(second.fd);
}

/* A flood of pipelined requests behind one that is being answered stops at the watermark. */
static void test_pipeline_flood(void **state)
{
	static char flood[1 << 20];
	size_t sent = 0;

	(void)state;
	for (size_t i = 0; i + 64 < sizeof(flood); i += strlen(GET("/f")))
		memcpy(flood + i, GET("/f"), strlen(GET("/f")));
	client.send = GET("/watch");
	client.left = strlen(client.send);
	raw_step(&client);
	assert_true(loop_until(t.base, held, NULL, 5000));
	for (int i = 0; i < 3000; i++) {
		ssize_t n = send(client.fd, flood, sizeof(flood), MSG_NOSIGNAL);

		sent += n > 0 ? (size_t)n : 0;
		event_base_loop(t.base, EVLOOP_NONBLOCK);
	}
	assert_true(sent < (20u << 20)); /* kernel buffers and one watermark */
	close(client.fd);
	http_stream_abort(t.held);
	raw_open(&client, httpd_port(t.h));
}

static bool only_one(void *arg)
{
	(void)arg;
	return httpd_connections(t.h) <= 1;
}

static void test_many_connections(void **state)
{
	static struct raw_client many[80];

	(void)state;
	for (int i = 0; i < 200; i++) { /* gone before they said anything, or in the middle of it */
		raw_open(&many[0], httpd_port(t.h));
		if (i % 2)
			assert_int_equal(send(many[0].fd, "POST / HT", 9, 0), 9);
		event_base_loop(t.base, EVLOOP_NONBLOCK);
		close(many[0].fd);
	}
	assert_true(loop_until(t.base, only_one, NULL, 5000)); /* the client that every test opens */
	assert_int_equal(httpd_bytes_held(t.h), 0);
	for (size_t i = 0; i < COUNT(many); i++)
		raw_open(&many[i], httpd_port(t.h));
	for (size_t i = 0; i < COUNT(many); i++) { /* 64 at once; the others are served when those are gone */
		many[i].send = GET("/m");
		many[i].left = strlen(GET("/m"));
		many[i].want = "]";
		assert_true(loop_until(t.base, raw_step, &many[i], 5000));
		assert_non_null(strstr(many[i].got, "[GET /m"));
		close(many[i].fd);
	}
}

/* No descriptor is left for a connection: it waits, and is served when there is one. */
static void test_out_of_descriptors(void **state)
{
	struct rlimit before, low;
	int held[64], count = 0;

	(void)state;
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	low = before;
	low.rlim_cur = (rlim_t)client.fd + 20;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	while (count < 64 && (held[count] = dup(client.fd)) >= 0)
		count++;
	assert_true(count > 5 && count < 64);
	client.send = GET("/");
	client.left = strlen(client.send);
	client.want = "]";
	assert_false(loop_until(t.base, raw_step, &client, 500)); /* its connection could not be accepted */
	while (count > 0)
		close(held[--count]);
	assert_true(loop_until(t.base, raw_step, &client, 5000));
	has("HTTP/1.1 200");
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

static void test_stop_accepting(void **state)
{
	(void)state;
	say(GET("/1"), "]");
	httpd_stop_accepting(t.h);
	client.n = 0;
	say(GET("/2"), NULL);
	has("Connection: close");
	has("[GET /2");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, start, stop)
	const struct CMUnitTest tests[] = {
		T(test_refused),
		T(test_nul_in_header),
		T(test_long_head),
		T(test_plain),
		T(test_http10_closes),
		T(test_byte_by_byte),
		T(test_pipelined),
		T(test_pipelined_then_bad),
		T(test_smuggled),
		T(test_slow_head_and_body),
		T(test_idle_is_closed),
		T(test_answer_later),
		T(test_client_gone),
		T(test_half_close_is_answered),
		T(test_stream),
		T(test_stream_back_pressure),
		T(test_abort_in_handler_turn),
		T(test_body_budget),
		T(test_expect_continue),
		T(test_next_request_early),
		T(test_pipeline_flood),
		T(test_many_connections),
		T(test_out_of_descriptors),
		T(test_stop_accepting),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
