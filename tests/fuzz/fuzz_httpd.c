/*
 * The whole server over a real connection: evhttp must never find a request where the strict reading found none, each request is
 * answered once, and nothing is left when the client has gone.
 */
/* link: ephloop_http EPH::event */
/* reads: common/httpd.c common/httpd_conn.c common/httpd_req.c common/httpd_scan.c */
/* reached: 68 % of lines, 56 % of branches; the rest is streams, deadlines, many connections; varies a little */
#include "fuzz.h"

#include "httpd.h"
#include "httpd_scan.h"
#include "log.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

static struct event_base *base;
static struct httpd *server;
static char source[INET_ADDRSTRLEN]; /* of this input's connection: a late request of an earlier one does not count here */
static uint64_t handled;

static void handler(void *arg, struct http_req *r)
{
	size_t n, body;

	(void)arg;
	handled += strcmp(http_peer(r), source) == 0;
	(void)http_body(r, &body);
	for (size_t i = 0; i < http_query_size(r); i++) {
		const char *name, *value;

		http_query_at(r, i, &name, &value);
		must(name && value);
	}
	n = strlen(http_path(r));
	must(n > 0 && http_path(r)[0] == '/');
	http_reply(r, body > 100 ? 413 : 200, "text/plain", "ok", 2);
}

static void start(void)
{
	struct httpd_options opt = { .listen = "127.0.0.1:0",
		.max_headers = 512,
		.max_body = 2000,
		.body_budget = 100000,
		.request_deadline_ms = 1000,
		.idle_timeout_ms = 1000,
		.max_connections = 100,
		.handler = handler };
	struct err e;

	signal(SIGPIPE, SIG_IGN);
	log_init("fuzz", LOG_LEVEL_ERROR, false);
	base = event_base_new();
	must(base && httpd_new(base, &opt, &server, &e) == 0);
}

static uint64_t strict_count(const uint8_t *data, size_t n)
{
	struct http_scan s;

	http_scan_init(&s, 512, 2000);
	http_scan_feed(&s, data, n);
	http_scan_free(&s);
	return s.done;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_in from = { .sin_family = AF_INET };
	struct linger reset = { 1, 0 };
	static uint32_t inputs;
	size_t sent = 0;
	char sink[4096];
	int fd, quiet = 0;

	if (!server)
		start();
	while (httpd_connections(server) > 50) /* those that ended before a request are found by a timer */
		event_base_loop(base, EVLOOP_ONCE);
	must(httpd_connections(server) > 0 || httpd_bytes_held(server) == 0);
	a.sin_port = htons(httpd_port(server));
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	from.sin_addr.s_addr = htonl(0x7f010000u + inputs++ % 0xf00000u);
	must(inet_ntop(AF_INET, &from.sin_addr, source, sizeof(source)));
	/* Not blocking from the start: the fuzzer's own timer would interrupt a connect that waits. */
	must(fd >= 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0 && bind(fd, (struct sockaddr *)&from, sizeof(from)) == 0);
	must(connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 || errno == EINPROGRESS);
	handled = 0;
	while (quiet < 4) { /* until some turns bring nothing new */
		ssize_t out = sent < n ? send(fd, data + sent, n - sent, MSG_NOSIGNAL) : 0, in;
		uint64_t before = handled;

		sent += out > 0 ? (size_t)out : 0;
		event_base_loop(base, EVLOOP_NONBLOCK);
		in = recv(fd, sink, sizeof(sink), 0);
		if (in == 0)
			break;
		quiet = out > 0 || in > 0 || handled != before ? 0 : quiet + 1;
	}
	must(handled <= strict_count(data, n));
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)); /* no port is left waiting */
	close(fd);
	event_base_loop(base, EVLOOP_NONBLOCK);
	return 0;
}
