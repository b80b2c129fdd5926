/* Metrics: the exact texts of both formats, which of them Accept asks for, the listener. */
/* link: ephloop_http EPH::event */
#include "unit.h"

#include "loop.h"
#include "metrics.h"
#include "metrics_http.h"
#include "netlisten.h"
#include "text.h"

#include <unistd.h>

static const char *const colors[] = { "red", "blue" };
static const char *const sizes[] = { "small", "big" };
static const uint32_t bounds[] = { 5, 100, 2500 };
static const struct metrics_family families[] = {
	{ "eph_things", METRICS_COUNTER, NULL, "Things, \"so\\called\"\nby us." },
	{ "eph_spent_seconds", METRICS_COUNTER, "seconds", "Time spent." },
	{ "eph_depth", METRICS_GAUGE, NULL, "Depth." },
	{ "eph_took_seconds", METRICS_HISTOGRAM, "seconds", "Time taken." },
	{ "eph_build", METRICS_INFO, NULL, "What runs." },
};

static void write_all(void *arg, struct metrics *m)
{
	const uint64_t counts[] = { 3, 4 }, pairs[] = { 1, 2, 3, 4 };
	const struct metrics_label info[] = { { "version", "a\"b\\c\nd" }, { "kind", "\xc3\xa4" } }, mode = { "mode", "cold" };
	uint64_t bucket[4] = { 0 }, sum = 0;
	static const int64_t took[] = { -7, 5, 6, 100, 2500, 2501, 90000 };

	(void)arg;
	for (size_t i = 0; i < COUNT(took); i++)
		metrics_took(bounds, COUNT(bounds), bucket, &sum, took[i]);
	metrics_begin(m, &families[0]);
	metrics_each(m, "color", colors, 2, counts);
	metrics_begin(m, &families[1]);
	metrics_plain(m, 1234500, 6);
	metrics_begin(m, &families[2]);
	metrics_each2(m, "color", colors, 2, "size", sizes, 2, pairs);
	metrics_value(m, &mode, 1, -1050, 3);
	metrics_plain(m, -3, 0);
	metrics_plain(m, INT64_MIN, 0);
	metrics_begin(m, &families[3]);
	metrics_times(m, &mode, 1, bounds, COUNT(bounds), bucket, sum);
	metrics_times(m, NULL, 0, bounds, COUNT(bounds), bucket, 0);
	metrics_begin(m, &families[4]);
	metrics_value(m, info, 2, 1, 0);
}

#define SAMPLES_DEPTH                                                                                                              \
	"eph_depth{color=\"red\",size=\"small\"} 1\neph_depth{color=\"red\",size=\"big\"} 2\n"                                     \
	"eph_depth{color=\"blue\",size=\"small\"} 3\neph_depth{color=\"blue\",size=\"big\"} 4\n"                                   \
	"eph_depth{mode=\"cold\"} -1.05\neph_depth -3\neph_depth -9223372036854775808\n"
#define SAMPLES_TOOK                                                                                                               \
	"eph_took_seconds_bucket{mode=\"cold\",le=\"0.005\"} 2\neph_took_seconds_bucket{mode=\"cold\",le=\"0.1\"} 4\n"             \
	"eph_took_seconds_bucket{mode=\"cold\",le=\"2.5\"} 5\neph_took_seconds_bucket{mode=\"cold\",le=\"+Inf\"} 7\n"              \
	"eph_took_seconds_sum{mode=\"cold\"} 95.112\neph_took_seconds_count{mode=\"cold\"} 7\n"                                    \
	"eph_took_seconds_bucket{le=\"0.005\"} 2\neph_took_seconds_bucket{le=\"0.1\"} 4\n"                                         \
	"eph_took_seconds_bucket{le=\"2.5\"} 5\neph_took_seconds_bucket{le=\"+Inf\"} 7\n"                                          \
	"eph_took_seconds_sum 0\neph_took_seconds_count 7\n"
#define SAMPLE_INFO "eph_build_info{version=\"a\\\"b\\\\c\\nd\",kind=\"\xc3\xa4\"} 1\n"

static const char as_text[] = "# HELP eph_things_total Things, \"so\\\\called\"\\nby us.\n# TYPE eph_things_total counter\n"
			      "eph_things_total{color=\"red\"} 3\neph_things_total{color=\"blue\"} 4\n"
			      "# HELP eph_spent_seconds_total Time spent.\n# TYPE eph_spent_seconds_total counter\n"
			      "eph_spent_seconds_total 1.2345\n"
			      "# HELP eph_depth Depth.\n# TYPE eph_depth gauge\n" SAMPLES_DEPTH
			      "# HELP eph_took_seconds Time taken.\n# TYPE eph_took_seconds histogram\n" SAMPLES_TOOK
			      "# HELP eph_build_info What runs.\n# TYPE eph_build_info gauge\n" SAMPLE_INFO;
static const char as_open[] =
		"# HELP eph_things Things, \\\"so\\\\called\\\"\\nby us.\n# TYPE eph_things counter\n"
		"eph_things_total{color=\"red\"} 3\neph_things_total{color=\"blue\"} 4\n"
		"# HELP eph_spent_seconds Time spent.\n# TYPE eph_spent_seconds counter\n# UNIT eph_spent_seconds seconds\n"
		"eph_spent_seconds_total 1.2345\n"
		"# HELP eph_depth Depth.\n# TYPE eph_depth gauge\n" SAMPLES_DEPTH
		"# HELP eph_took_seconds Time taken.\n# TYPE eph_took_seconds histogram\n# UNIT eph_took_seconds "
		"seconds\n" SAMPLES_TOOK "# HELP eph_build What runs.\n# TYPE eph_build info\n" SAMPLE_INFO "# EOF\n";

static void test_texts(void **state)
{
	struct buf out = BUF_INIT(65536);
	struct metrics m;

	(void)state;
	metrics_init(&m, &out, METRICS_TEXT);
	write_all(NULL, &m);
	metrics_end(&m);
	assert_string_equal(buf_cstr(&out), as_text);
	buf_reset(&out);
	metrics_init(&m, &out, METRICS_OPENMETRICS);
	write_all(NULL, &m);
	metrics_end(&m);
	assert_string_equal(buf_cstr(&out), as_open);
	buf_free(&out);
}

static void test_accept(void **state)
{
	static const struct {
		const char *accept;
		enum metrics_format format;
	} cases[] = {
		{ NULL, METRICS_TEXT },
		{ "", METRICS_TEXT },
		{ "*/*", METRICS_TEXT },
		{ "text/plain", METRICS_TEXT },
		{ "application/*", METRICS_TEXT },
		{ "application/openmetrics-text", METRICS_OPENMETRICS },
		{ "Application/OpenMetrics-Text; Version=1.0.0", METRICS_OPENMETRICS },
		{ "application/openmetrics-text;version=\"1.0.0\"", METRICS_OPENMETRICS },
		{ "application/openmetrics-text;version=2.0.0", METRICS_TEXT },
		{ "application/openmetrics-text;q=0", METRICS_TEXT },
		{ "application/openmetrics-text;q=0.000, */*", METRICS_TEXT },
		{ "application/openmetrics-text;q=0.5, text/plain;q=0.6", METRICS_TEXT },
		{ "application/openmetrics-text;q=0.6, text/plain;q=0.5", METRICS_OPENMETRICS },
		{ "application/openmetrics-text;q=0.5, text/plain;q=0.5", METRICS_OPENMETRICS },
		{ "text/plain;q=0.9,application/openmetrics-text;q=1.000", METRICS_OPENMETRICS },
		{ "application/openmetrics-text;q=0.5, text/*;q=0.6", METRICS_TEXT },
		{ "application/openmetrics-text;q=0.5, */*;q=0.6", METRICS_TEXT },
		{ "application/openmetrics-text;q=0.5, */*;q=0.6, text/*;q=0.1", METRICS_OPENMETRICS },
		{ "application/openmetrics-text;q=0.5, */*;q=0.6, text/plain;q=0", METRICS_OPENMETRICS },
		{ "application/openmetrics-text;q=2", METRICS_TEXT },
		{ "application/openmetrics-text;q=1.5", METRICS_TEXT },
		{ "application/openmetrics-text;q=", METRICS_TEXT },
		{ "application/openmetrics-text;q=0.1234", METRICS_TEXT },
		{ "application/openmetrics-text;q=nan, text/plain;q=0.1", METRICS_TEXT },
		{ ",,;;q,application/openmetrics-text ; q = 0.3 ;x", METRICS_OPENMETRICS },
		/* What a Prometheus of today sends, and an older one. */
		{ "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/"
		  "plain;version=0.0.4;"
		  "q=0.5,*/*;q=0.1",
				METRICS_OPENMETRICS },
		{ "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", METRICS_OPENMETRICS },
		{ "text/plain;version=0.0.4;q=1,*/*;q=0.1", METRICS_TEXT },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++)
		if (metrics_accepted(cases[i].accept) != cases[i].format)
			fail_msg("%s", cases[i].accept ? cases[i].accept : "(none)");
}

/* --- the listener ------------------------------------------------------------------------------------------------------------- */

struct scene {
	struct event_base *base;
	struct metrics_http *http;
};

static void ask(struct scene *s, const char *request, const char *const *wanted, size_t n)
{
	static struct raw_client c;
	char whole[1024];

	assert_true(text_fmt(whole, sizeof(whole), "%s\r\nHost: a\r\nConnection: close\r\n\r\n", request));
	raw_open(&c, metrics_http_port(s->http));
	if (!raw_talk(s->base, &c, whole, strlen(whole), NULL, 5000))
		fail_msg("no end to %s; got: %s", request, c.got);
	close(c.fd);
	for (size_t i = 0; i < n; i++)
		if (!strstr(c.got, wanted[i]))
			fail_msg("%s\nwithout %s:\n%s", request, wanted[i], c.got);
}

static void test_listener(void **state)
{
	const struct metrics_http_options opt = { .listen = "127.0.0.1:0", .write = write_all };
	struct metrics_http_options given = { .write = write_all };
	struct scene s = { .base = event_base_new() };
	uint16_t port;
	struct err e;

	(void)state;
	assert_ok(metrics_http_new(s.base, &opt, &s.http, &e));
	ask(&s, "GET /metrics HTTP/1.1",
			(const char *const[]){ "HTTP/1.1 200", "Content-Type: text/plain; version=0.0.4; charset=utf-8", as_text },
			3);
	ask(&s, "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text",
			(const char *const[]){ "HTTP/1.1 200",
					"Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8", as_open },
			3);
	ask(&s, "HEAD /metrics HTTP/1.1", (const char *const[]){ "HTTP/1.1 200", "version=0.0.4" }, 2);
	ask(&s, "GET / HTTP/1.1", (const char *const[]){ "HTTP/1.1 404" }, 1);
	ask(&s, "GET /metrics/x HTTP/1.1", (const char *const[]){ "HTTP/1.1 404" }, 1);
	ask(&s, "POST /metrics HTTP/1.1\r\nContent-Length: 0", (const char *const[]){ "HTTP/1.1 405", "Allow: GET, HEAD" }, 2);
	ask(&s, "DELETE /metrics HTTP/1.1", (const char *const[]){ "HTTP/1.1 405" }, 1);
	ask(&s, "POST /metrics HTTP/1.1\r\nContent-Length: 3000\r\nExpect: 100-continue", (const char *const[]){ "HTTP/1.1 4" }, 1);
	metrics_http_free(s.http);

	/* A socket that somebody else has bound. */
	assert_ok(net_listen("127.0.0.1:0", &given.listen_fd, &port, &e));
	assert_ok(metrics_http_new(s.base, &given, &s.http, &e));
	assert_int_equal(metrics_http_port(s.http), port);
	ask(&s, "GET /metrics HTTP/1.1", (const char *const[]){ "HTTP/1.1 200" }, 1);
	metrics_http_free(s.http);
	given.listen_fd = open("/dev/null", O_RDONLY);
	assert_int_equal(metrics_http_new(s.base, &given, &s.http, &e), -1);
	assert_null(s.http);
	event_base_free(s.base);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_texts),
		cmocka_unit_test(test_accept),
		cmocka_unit_test(test_listener),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
