/* What becomes of a command's output: head and tail, chunks, pace. */
/* link: guestparts */
#include "guest-agent/output.h"

#include "common/text.h"
#include "unit.h"

static void short_output_is_whole(void **state)
{
	struct keep k;
	struct buf out = BUF_INIT(1024);

	(void)state;
	keep_init(&k);
	assert_true(keep_render(&k, &out));
	assert_int_equal(out.len, 0);
	assert_true(keep_add(&k, (const uint8_t *)"a\xff", 2));
	assert_true(keep_add(&k, (const uint8_t *)"\0b\xe2\x82", 4));
	assert_true(keep_add(&k, (const uint8_t *)"\xac", 1));
	assert_true(keep_render(&k, &out));
	assert_string_equal(buf_cstr(&out), "a\xef\xbf\xbd\xef\xbf\xbd"
					    "b\xe2\x82\xac");
	keep_free(&k);
	buf_free(&out);
}

/* Bytes 'A' + i % 26, in pieces of odd sizes. */
static void add_pattern(struct keep *k, size_t total, size_t step)
{
	uint8_t piece[4096];
	size_t at = 0;

	while (at < total) {
		size_t n = total - at < step ? total - at : step;

		for (size_t i = 0; i < n; i++)
			piece[i] = (uint8_t)('A' + (at + i) % 26);
		assert_true(keep_add(k, piece, n));
		at += n;
	}
}

static void long_output_keeps_both_ends(void **state)
{
	static const size_t totals[] = { KEEP_HEAD, KEEP_HEAD + 1, KEEP_HEAD + KEEP_TAIL, KEEP_HEAD + KEEP_TAIL + 1, 1000003 };
	static const size_t steps[] = { 1, 7, 4096 };

	(void)state;
	for (size_t t = 0; t < 5; t++)
		for (size_t s = 0; s < 3; s++) {
			size_t total = totals[t], kept = KEEP_HEAD + KEEP_TAIL;
			struct buf out = BUF_INIT(2 * kept);
			struct keep k;
			char line[64];

			keep_init(&k);
			add_pattern(&k, total, steps[s]);
			assert_true(keep_render(&k, &out));
			assert_int_equal(k.total, total);
			if (total <= kept) {
				assert_int_equal(out.len, total);
			} else {
				assert_true(text_fmt(line, sizeof line, "\n[... %zu bytes cut ...]\n", total - kept));
				assert_memory_equal(out.data + KEEP_HEAD, line, strlen(line));
				assert_int_equal(out.len, kept + strlen(line));
			}
			assert_int_equal(out.data[out.len - 1], 'A' + (total - 1) % 26);
			assert_int_equal(out.data[0], 'A');
			keep_free(&k);
			buf_free(&out);
		}
}

static void one_huge_piece(void **state)
{
	size_t n = KEEP_HEAD + 3 * KEEP_TAIL;
	uint8_t *p = malloc(n);
	struct buf out = BUF_INIT(2 * n);
	struct keep k;

	(void)state;
	assert_non_null(p);
	memset(p, 'x', n);
	p[n - 1] = 'z';
	keep_init(&k);
	assert_true(keep_add(&k, p, n));
	assert_true(keep_render(&k, &out));
	assert_int_equal(out.data[out.len - 1], 'z');
	keep_free(&k);
	buf_free(&out);
	free(p);
}

struct sink {
	struct buf all;
	size_t chunks, largest;
	bool refuse;
};

static bool take(void *ctx, const uint8_t *p, size_t n)
{
	struct sink *s = ctx;

	if (s->refuse)
		return false;
	s->chunks++;
	s->largest = n > s->largest ? n : s->largest;
	return buf_add(&s->all, p, n);
}

static void chunks_break_no_character(void **state)
{
	static const char text[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9d\x84\x9e"; /* characters of 1, 2, 3 and 4 bytes */
	uint64_t budget = 100000, cut = 0;
	struct sink sink = { .all = BUF_INIT(100000) };
	struct chunker c;

	(void)state;
	chunker_init(&c, 64, &budget, &cut);
	for (size_t i = 0; i < 5000; i++) {
		size_t before = sink.all.len;

		chunker_add(&c, (const uint8_t *)text + i % 10, 1, take, &sink);
		chunker_flush(&c, false, take, &sink);
		assert_true(text_utf8_valid((const char *)sink.all.data + before, sink.all.len - before));
	}
	chunker_flush(&c, true, take, &sink);
	assert_int_equal(sink.all.len, 5000);
	assert_int_equal(cut, 0);
	chunker_free(&c);
	buf_free(&sink.all);
}

static void binary_moves_on(void **state)
{
	uint64_t budget = 100000, cut = 0;
	struct sink sink = { .all = BUF_INIT(100000) };
	uint8_t bytes[1000];
	struct chunker c;

	(void)state;
	memset(bytes, 0xf0, sizeof bytes);
	chunker_init(&c, 64, &budget, &cut);
	chunker_add(&c, bytes, sizeof bytes, take, &sink);
	chunker_flush(&c, true, take, &sink);
	assert_int_equal(sink.all.len, sizeof bytes);
	assert_true(sink.largest <= 64);
	chunker_free(&c);
	buf_free(&sink.all);
}

static void budget_is_shared_and_counted(void **state)
{
	uint64_t budget = 100, cut = 0;
	struct sink sink = { .all = BUF_INIT(1000) };
	struct chunker c[2];
	uint8_t bytes[80];

	(void)state;
	memset(bytes, 'x', sizeof bytes);
	for (size_t i = 0; i < 2; i++)
		chunker_init(&c[i], 64, &budget, &cut);
	for (size_t i = 0; i < 2; i++)
		chunker_add(&c[i], bytes, sizeof bytes, take, &sink);
	for (size_t i = 0; i < 2; i++)
		chunker_flush(&c[i], true, take, &sink);
	assert_int_equal(sink.all.len, 100);
	assert_int_equal(cut, 60);
	budget = 80;
	sink.refuse = true;
	chunker_add(&c[0], bytes, sizeof bytes, take, &sink);
	chunker_flush(&c[0], true, take, &sink);
	assert_int_equal(cut, 140);
	for (size_t i = 0; i < 2; i++)
		chunker_free(&c[i]);
	buf_free(&sink.all);
}

/* The budget ends inside a character: it is not sent in half. */
static void budget_cuts_at_a_character(void **state)
{
	uint64_t budget = 4, cut = 0;
	struct sink sink = { .all = BUF_INIT(1000) };
	struct chunker c;

	(void)state;
	chunker_init(&c, 64, &budget, &cut);
	chunker_add(&c, (const uint8_t *)"ab\xe2\x82\xac", 5, take, &sink);
	chunker_flush(&c, true, take, &sink);
	assert_int_equal(sink.all.len, 2);
	assert_int_equal(cut, 3);
	chunker_free(&c);
	buf_free(&sink.all);
}

static void pace_bounds_the_number(void **state)
{
	struct pace p = { .used = 0 };
	int64_t sent = 0, late = 0;

	(void)state;
	for (int64_t now = 1000000; now < 1120000; now++) {
		if (pace_due(&p, now) > now)
			continue;
		pace_take(&p, now);
		sent++;
	}
	/* a burst, then 20 a second */
	assert_in_range(sent, 2400, 2600);
	p = (struct pace){ .used = 0 };
	for (int64_t now = 1000000; now < 1120000; now += PACE_REFILL_MS) {
		late += pace_due(&p, now) > now;
		pace_take(&p, now);
	}
	assert_int_equal(late, 0);
	/* A bucket that is full keeps the gap as well. */
	p = (struct pace){ .used = PACE_BURST, .refilled_ms = 1000, .last_ms = 1000 + PACE_REFILL_MS - 1 };
	assert_int_equal(pace_due(&p, 1000 + PACE_REFILL_MS - 1), p.last_ms + PACE_GAP_MS);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(short_output_is_whole),
		cmocka_unit_test(long_output_keeps_both_ends),
		cmocka_unit_test(one_huge_piece),
		cmocka_unit_test(chunks_break_no_character),
		cmocka_unit_test(binary_moves_on),
		cmocka_unit_test(budget_is_shared_and_counted),
		cmocka_unit_test(budget_cuts_at_a_character),
		cmocka_unit_test(pace_bounds_the_number),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
