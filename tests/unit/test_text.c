/* Strings, UTF-8, numbers, money, time, hex, base64, escaping: tables, the bad cases first. */
#include "unit.h"

#include "text.h"

static void test_utf8(void **state)
{
	static const struct {
		const char *s;
		size_t n;
		bool valid, clean;
	} cases[] = {
		{ "\xff", 1, false, false },
		{ "\x80", 1, false, false },
		{ "\xc3", 1, false, false },
		{ "\xc0\x80", 2, false, false },
		{ "\xc1\xbf", 2, false, false },
		{ "\xe0\x9f\xbf", 3, false, false },
		{ "\xed\xa0\x80", 3, false, false },
		{ "\xed\xbf\xbf", 3, false, false },
		{ "\xf0\x8f\xbf\xbf", 4, false, false },
		{ "\xf4\x90\x80\x80", 4, false, false },
		{ "\xf5\x80\x80\x80", 4, false, false },
		{ "\xf8\x88\x80\x80\x80", 5, false, false },
		{ "\xe2\x82", 2, false, false },
		{ "a\xe2\x82\x41", 4, false, false },
		{ "a\0b", 3, true, false },
		{ "", 0, true, true },
		{ "abc", 3, true, true },
		{ "\xc2\x80", 2, true, true },
		{ "\xe0\xa0\x80", 3, true, true },
		{ "\xed\x9f\xbf", 3, true, true },
		{ "\xee\x80\x80", 3, true, true },
		{ "\xf0\x90\x80\x80", 4, true, true },
		{ "\xf4\x8f\xbf\xbf", 4, true, true },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		assert_int_equal(text_utf8_valid(cases[i].s, cases[i].n), cases[i].valid);
		assert_int_equal(text_utf8_clean(cases[i].s, cases[i].n), cases[i].clean);
	}
}

static void test_utf8_border(void **state)
{
	static const struct {
		const char *s;
		size_t n, border;
	} cases[] = {
		{ "", 0, 0 },
		{ "abc", 3, 3 },
		{ "a\xc3", 2, 1 },
		{ "a\xc3\xa4", 3, 3 },
		{ "a\xe2", 2, 1 },
		{ "a\xe2\x82", 3, 1 },
		{ "a\xe2\x82\xac", 4, 4 },
		{ "a\xf0", 2, 1 },
		{ "a\xf0\x9f", 3, 1 },
		{ "a\xf0\x9f\x98", 4, 1 },
		{ "a\xf0\x9f\x98\x80", 5, 5 },
		{ "\x80\x80\x80\x80", 4, 4 },
		{ "\xff", 1, 1 },
		{ "a\xff", 2, 2 },
		{ "\xe0\x80", 2, 2 } /* can never become valid */,
		{ "\xed\xa0", 2, 2 },
		{ "\xc3\xa4\x80", 3, 3 },
		{ "\xf4\x90\x80", 3, 3 },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		if (text_utf8_border(cases[i].s, cases[i].n) != cases[i].border)
			fail_msg("case %zu: %zu", i, text_utf8_border(cases[i].s, cases[i].n));
	}
}

static void test_i64(void **state)
{
	static const char *const bad[] = { "", "-", "+1", " 1", "1 ", "1a", "0x1", "1.0", "--1", "9223372036854775808",
		"-9223372036854775809", "99999999999999999999999" };
	int64_t v = 7;
	struct err e;

	(void)state;
	for (size_t i = 0; i < COUNT(bad); i++)
		assert_int_equal(text_i64(bad[i], INT64_MIN, INT64_MAX, &v, &e), -1);
	assert_int_equal(v, 7);
	assert_int_equal(text_i64("-1", 0, 10, &v, &e), -1);
	assert_int_equal(text_i64("11", 0, 10, &v, &e), -1);
	assert_string_equal(e.text, "must be a whole number from 0 to 10");
	assert_ok(text_i64("-9223372036854775808", INT64_MIN, INT64_MAX, &v, &e));
	assert_true(v == INT64_MIN);
	assert_ok(text_i64("9223372036854775807", INT64_MIN, INT64_MAX, &v, &e));
	assert_true(v == INT64_MAX);
}

static void test_money(void **state)
{
	static const char *const bad[] = { "", ".", ".5", "5.", "-1", "+1", "1.0000001", "1e3", "$1", "1.2.3", " 1", "1000000001",
		"9999999999999999999" };
	static const struct {
		const char *s;
		int64_t micros;
		const char *shown;
	} good[] = {
		{ "0", 0, "$0.00" },
		{ "0.05", 50000, "$0.05" },
		{ "0.00353", 3530, "$0.00353" },
		{ "1", 1000000, "$1.00" },
		{ "0.000001", 1, "$0.000001" },
		{ "12.5", 12500000, "$12.50" },
		{ "1000000000", INT64_C(1000000000000000), "$1000000000.00" },
	};
	int64_t v;
	char out[32];
	struct err e;

	(void)state;
	for (size_t i = 0; i < COUNT(bad); i++)
		assert_int_equal(text_micros(bad[i], &v, &e), -1);
	for (size_t i = 0; i < COUNT(good); i++) {
		assert_ok(text_micros(good[i].s, &v, &e));
		assert_true(v == good[i].micros);
		text_dollars(v, out);
		assert_string_equal(out, good[i].shown);
	}
	text_dollars(-3530, out);
	assert_string_equal(out, "-$0.00353");
	text_dollars(INT64_MIN, out);
	assert_string_equal(out, "-$9223372036854.775808");
}

static void test_time(void **state)
{
	static const char *const bad[] = { "", "2026-11-30", "2026-11-30T12:00:00", "2026-11-30T12:00:00+01:00",
		"2026-11-30 12:00:00Z", "2026-13-01T00:00:00Z", "2026-02-29T00:00:00Z", "1900-02-29T00:00:00Z",
		"2026-11-30T24:00:00Z", "2026-11-30T12:60:00Z", "2026-11-30T12:00:60Z", "2026-11-30T12:00:00.Z",
		"2026-11-30T12:00:00Zx", "2026-11-30T12:00:00.1234567890Z", "0000-01-01T00:00:00Z", "2026-1-30T12:00:00Z" };
	static const struct {
		const char *s;
		int64_t ms;
	} good[] = {
		{ "1970-01-01T00:00:00.000Z", 0 },
		{ "2026-11-30T12:00:00.123Z", INT64_C(1796040000123) },
		{ "1969-12-31T23:59:59.999Z", -1 },
		{ "2000-02-29T00:00:00.000Z", INT64_C(951782400000) },
	};
	int64_t ms;
	char out[32];

	(void)state;
	for (size_t i = 0; i < COUNT(bad); i++) {
		if (text_parse_time_ms(bad[i], &ms))
			fail_msg("%s was taken", bad[i]);
	}
	for (size_t i = 0; i < COUNT(good); i++) {
		assert_true(text_parse_time_ms(good[i].s, &ms));
		assert_true(ms == good[i].ms);
		text_time_ms(ms, out);
		assert_string_equal(out, good[i].s);
	}
	assert_true(text_parse_time_ms("1970-01-01T00:00:01.5Z", &ms) && ms == 1500);
	assert_true(text_parse_time_ms("1970-01-01T00:00:01.123456789Z", &ms) && ms == 1123);
	text_time_ms(INT64_MAX, out);
	text_time_ms(INT64_MIN, out);
}

static void test_hex_and_base64(void **state)
{
	static const char *const bad64[] = { "a", "ab=", "ab==c", "ab+/", "YQ", "YR==", "YWJ=", "YW J", "Y===", "====" };
	uint8_t raw[16], back[16];
	char text[64];
	size_t n;

	(void)state;
	assert_false(text_unhex("0", raw, 1));
	assert_false(text_unhex("000", raw, 1));
	assert_false(text_unhex("0G", raw, 1));
	assert_false(text_unhex("AB", raw, 1));
	assert_true(text_unhex("", raw, 0));
	for (size_t i = 0; i < COUNT(bad64); i++) {
		struct buf b = BUF_INIT(100);

		if (strcmp(bad64[i], "ab+/") != 0)
			assert_false(text_unb64(bad64[i], strlen(bad64[i]), &b));
		if (strcmp(bad64[i], "YQ") != 0) /* fine without padding */
			assert_false(text_unb64url(bad64[i], raw, sizeof(raw), &n));
		buf_free(&b);
	}
	for (size_t len = 0; len <= 16; len++) {
		struct buf b = BUF_INIT(100), plain = BUF_INIT(100);

		for (size_t i = 0; i < len; i++)
			raw[i] = (uint8_t)(i * 37 + 251);
		text_hex(raw, len, text);
		assert_true(text_unhex(text, back, len));
		assert_memory_equal(raw, back, len);
		text_b64url(raw, len, text);
		assert_true(text_unb64url(text, back, sizeof(back), &n));
		assert_int_equal(n, len);
		assert_memory_equal(raw, back, len);
		if (len > 0)
			assert_false(text_unb64url(text, back, len - 1, &n));
		assert_true(text_b64(&b, raw, len));
		assert_true(text_unb64((const char *)b.data, b.len, &plain));
		assert_int_equal(plain.len, len);
		assert_memory_equal(len ? plain.data : raw, raw, len);
		buf_free(&b);
		buf_free(&plain);
	}
}

static void test_safe(void **state)
{
	static const struct {
		const char *in;
		size_t n;
		bool lines;
		const char *out;
	} cases[] = {
		{ "a\x1b[31mb", 7, false, "a\\x1b[31mb" },
		{ "\x07\x7f\0", 3, false, "\\x07\\x7f\\x00" },
		{ "a\nb\tc\rd", 7, false, "a\\x0ab\\x09c\\x0dd" },
		{ "a\nb\tc\rd", 7, true, "a\nb\tc\\x0dd" },
		{ "\xc2\x9b"
		  "31m",
				5, false, "\\u{9b}31m" },
		{ "\xff\xc3", 2, false, "\\xff\\xc3" },
		{ "\xe2\x80\xae"
		  "abc",
				6, false, "\\u{202e}abc" },
		{ "\xe2\x81\xa6", 3, false, "\\u{2066}" },
		{ "\xe2\x80\x8e\xe2\x80\x8f", 6, false, "\\u{200e}\\u{200f}" },
		{ "\xe2\x80\xa8", 3, true, "\\u{2028}" },
		{ "h\xc3\xa4\xf0\x9f\x98\x80", 7, false, "h\xc3\xa4\xf0\x9f\x98\x80" },
		{ "", 0, false, "" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct buf b = BUF_INIT(200);

		assert_true(text_safe(&b, cases[i].in, cases[i].n, cases[i].lines));
		assert_string_equal(buf_cstr(&b), cases[i].out);
		buf_free(&b);
	}
}

static void test_fmt(void **state)
{
	char out[6] = "old";

	(void)state;
	assert_false(text_fmt(out, sizeof(out), "%s", "123456"));
	assert_string_equal(out, "");
	assert_true(text_fmt(out, sizeof(out), "%d", 12345));
	assert_false(text_copy(out, sizeof(out), "123456"));
	assert_string_equal(out, "");
	assert_true(text_copy(out, sizeof(out), "12345"));
}

static void check_wrap(const char *text, size_t at, size_t indent, size_t width, const char *expected)
{
	struct buf b = BUF_INIT(4096);

	assert_true(text_wrap(&b, text, at, indent, width));
	assert_string_equal(buf_cstr(&b), expected);
	buf_free(&b);
}

static void test_wrap(void **state)
{
	(void)state;
	check_wrap("", 0, 0, 10, "");
	check_wrap("one two three", 0, 2, 7, "one two\n  three");
	check_wrap("one two three", 1, 2, 7, "one\n  two\n  three");
	check_wrap("averylongword that stays", 0, 0, 8, "averylongword\nthat\nstays");
	check_wrap("a\nb c", 0, 1, 3, "a\n b\n c");
	check_wrap("ää öö", 0, 0, 5, "ää öö"); /* characters, not bytes */
	check_wrap("two  blanks ", 0, 0, 80, "two blanks");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_utf8),
		cmocka_unit_test(test_utf8_border),
		cmocka_unit_test(test_i64),
		cmocka_unit_test(test_money),
		cmocka_unit_test(test_time),
		cmocka_unit_test(test_hex_and_base64),
		cmocka_unit_test(test_safe),
		cmocka_unit_test(test_fmt),
		cmocka_unit_test(test_wrap),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
