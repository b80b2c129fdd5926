/* link: guestparts */
/*
 * What a model and a command feed into the agent: arguments of tool calls, and output. First byte: which tool; the rest is text.
 * Output that was cleaned must be clean, must keep what was clean already, and must not depend on the pieces in which it came.
 */
/* reads: guest-agent/args.c guest-agent/output.c */
/* reached: 92 % of lines, 75 % of branches; the rest is memory */
#include "guest-agent/args.h"
#include "guest-agent/output.h"

#include "common/text.h"
#include "fuzz.h"

static void arguments(enum tool t, const uint8_t *data, size_t n)
{
	struct buf why = BUF_INIT(8192), text = BUF_INIT(n + 1);
	struct tool_args a;
	bool ok;

	if (memchr(data, 0, n) != NULL)
		return; /* texts of a reply have no NUL */
	must(buf_add(&text, data, n));
	ok = args_parse(t, buf_cstr(&text), &a, &why);
	must(!why.failed);
	must(ok == (why.len == 0));
	must(ok || text_utf8_clean((const char *)why.data, why.len) || !text_utf8_valid((const char *)data, n));
	args_free(&a);
	buf_free(&why);
	buf_free(&text);
}

static void cleaned(const uint8_t *data, size_t n)
{
	struct buf once = BUF_INIT(3 * n + 1), twice = BUF_INIT(3 * n + 1);

	must(output_clean(&once, data, n));
	must(text_utf8_clean((const char *)once.data, once.len));
	must(!text_utf8_clean((const char *)data, n) || (once.len == n && memcmp(once.data, data, n) == 0));
	must(output_clean(&twice, once.data, once.len));
	must(twice.len == once.len);
	buf_free(&once);
	buf_free(&twice);
}

static bool take(void *ctx, const uint8_t *p, size_t n)
{
	return buf_add(ctx, p, n);
}

static void chunked(const uint8_t *data, size_t n)
{
	uint64_t budget = n, cut = 0;
	struct buf all = BUF_INIT(n + 1);
	struct chunker c;

	chunker_init(&c, 16, &budget, &cut);
	for (size_t at = 0; at < n; at += 3) {
		chunker_add(&c, data + at, n - at < 3 ? n - at : 3, take, &all);
		if (at % 2)
			chunker_flush(&c, false, take, &all);
	}
	chunker_flush(&c, true, take, &all);
	must(all.len == n && cut == 0 && memcmp(all.data, data, n) == 0);
	chunker_free(&c);
	buf_free(&all);
}

/* The first and the last bytes of a long text: an input stands for a part that is printed over and over. */
static void kept(const uint8_t *data, size_t n, size_t times)
{
	struct buf out = BUF_INIT(4 * (KEEP_HEAD + KEEP_TAIL) + 1024), want = BUF_INIT(3 * n * times + 1);
	struct keep k;

	keep_init(&k);
	for (size_t i = 0; i < times; i++)
		must(keep_add(&k, data, n));
	must(k.total == n * times && keep_render(&k, &out));
	must(text_utf8_clean((const char *)out.data, out.len));
	if (k.total <= KEEP_HEAD) { /* nothing was cut */
		for (size_t i = 0; i < times; i++)
			must(buf_add(&want, data, n));
		must(!text_utf8_clean((const char *)want.data, want.len) ||
				(out.len == want.len && memcmp(out.data, want.data, want.len) == 0));
	} else if (k.total > KEEP_HEAD + KEEP_TAIL) {
		must(memmem(out.data, out.len, "bytes cut", 9) != NULL);
	}
	keep_free(&k);
	buf_free(&out);
	buf_free(&want);
}

static void paced(const uint8_t *data, size_t n)
{
	struct pace p = { 0 };
	int64_t now = 1000, last = -1;

	for (size_t i = 0; i < n; i++) {
		int64_t due = pace_due(&p, now);

		must(due <= now + PACE_REFILL_MS + PACE_GAP_MS);
		now = due > now ? due : now;
		must(last < 0 || now - last >= PACE_GAP_MS);
		pace_take(&p, now);
		last = now;
		now += data[i];
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	if (n < 2 || n > 65536)
		return 0;
	arguments((enum tool)(data[0] % TOOL_COUNT), data + 1, n - 1);
	cleaned(data + 1, n - 1);
	chunked(data + 1, n - 1);
	/* Some inputs are long texts, the others would only cost time. */
	kept(data + 1, n - 1, data[0] < 254 ? 1 : 300000 / (n - 1) + 1);
	paced(data + 1, n - 1);
	return 0;
}
