/* Event streams: all at once, byte by byte and in odd pieces must give the same events and the same verdict. */
/* reads: common/sse.c */
/* reached: 86 % of lines, 69 % of branches; the rest writes events */
#include "fuzz.h"

#include "sse.h"

static bool on_event(void *arg, const char *event, const char *id, const char *data, size_t n)
{
	struct buf *b = arg;

	must(strlen(data) <= n);
	buf_printf(b, "%s|%s|%zu|", event, id, n);
	buf_add(b, data, n);
	return true;
}

static int run(const uint8_t *data, size_t n, size_t step, struct buf *out)
{
	struct sse_reader r;
	struct err e;
	int rc = 0;

	sse_reader_init(&r, 200, on_event, out);
	for (size_t at = 0; at < n && rc == 0; at += step)
		rc = sse_reader_feed(&r, data + at, step < n - at ? step : n - at, &e);
	sse_reader_free(&r);
	return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static const size_t steps[] = { 1, 2, 7, 64 };
	struct buf whole = BUF_INIT(1 << 20);
	int rc = run(data, n, n ? n : 1, &whole);

	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
		struct buf cut = BUF_INIT(1 << 20);

		must(run(data, n, steps[i], &cut) == rc);
		must(cut.len == whole.len && (cut.len == 0 || memcmp(cut.data, whole.data, cut.len) == 0));
		buf_free(&cut);
	}
	buf_free(&whole);
	return 0;
}
