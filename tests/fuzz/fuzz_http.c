/* The strict reading of request framing: any cut gives the same verdict, and so many whole requests. */
/* link: ephloop_http */
/* reads: common/httpd_scan.c */
/* reached: 96 % of lines, 95 % of branches; the rest is memory */
#include "fuzz.h"

#include "httpd_scan.h"

static struct http_scan run(const uint8_t *data, size_t n, size_t step)
{
	struct http_scan s;
	bool good = true;

	http_scan_init(&s, 512, 2000);
	for (size_t at = 0; at < n; at += step) {
		bool now = http_scan_feed(&s, data + at, step < n - at ? step : n - at);

		must(good || !now); /* for good */
		good = now;
		must(s.line.len <= 512);
	}
	must(good == (s.state != SCAN_BAD));
	must(good || (s.status >= 400 && s.detail));
	http_scan_free(&s);
	return s;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct http_scan whole = run(data, n, n ? n : 1), bytes = run(data, n, 1), pieces = run(data, n, 7);

	must(whole.done == bytes.done && whole.done == pieces.done);
	must(whole.state == bytes.state && whole.state == pieces.state);
	return 0;
}
