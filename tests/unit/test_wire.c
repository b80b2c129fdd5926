/* Binary messages: cut at every byte, lying lengths, trailing bytes; then the round trip. */
#include "unit.h"

#include "wire.h"

static void write_all(struct buf *b)
{
	wire_put_u8(b, 0xfe);
	wire_put_u16(b, 0x1234);
	wire_put_u32(b, 0x89abcdef);
	wire_put_u64(b, UINT64_C(0x0123456789abcdef));
	wire_put_i64(b, INT64_MIN);
	wire_put_bool(b, true);
	wire_put_raw(b, "raw", 3);
	wire_put_bytes(b, "a\0b", 3);
	wire_put_str(b, "h\xc3\xa4");
	wire_put_str(b, NULL);
	wire_put_str(b, "fixed");
	wire_put_u32(b, 2);
}

static int read_all(const uint8_t *p, size_t n, struct err *e)
{
	struct wire_reader r;
	char raw[3], fixed[6], *s, *empty;
	const uint8_t *bytes;
	size_t len;

	wire_read_init(&r, p, n);
	assert_true(wire_u8(&r) == 0xfe || r.failed);
	assert_true(wire_u16(&r) == 0x1234 || r.failed);
	assert_true(wire_u32(&r) == 0x89abcdef || r.failed);
	assert_true(wire_u64(&r) == UINT64_C(0x0123456789abcdef) || r.failed);
	assert_true(wire_i64(&r) == INT64_MIN || r.failed);
	assert_true(wire_bool(&r) || r.failed);
	wire_raw(&r, raw, 3);
	assert_true(memcmp(raw, "raw", 3) == 0 || r.failed);
	bytes = wire_bytes(&r, 10, &len);
	assert_true((len == 3 && memcmp(bytes, "a\0b", 3) == 0) || r.failed);
	s = wire_str(&r, 3);
	assert_true((s && strcmp(s, "h\xc3\xa4") == 0) || r.failed);
	empty = wire_str(&r, 0);
	assert_true((empty && strcmp(empty, "") == 0) || r.failed);
	wire_str_fixed(&r, fixed, sizeof(fixed));
	assert_true(strcmp(fixed, "fixed") == 0 || r.failed);
	assert_true(wire_count(&r, 2) == 2 || r.failed);
	free(s);
	free(empty);
	return wire_end(&r, "test", e);
}

static void test_cuts_and_trail(void **state)
{
	struct buf b = BUF_INIT(1000);
	struct err e;

	(void)state;
	write_all(&b);
	assert_false(b.failed);
	for (size_t n = 0; n < b.len; n++) {
		uint8_t *exact = malloc(n ? n : 1); /* so that a read past the end is seen */

		memcpy(exact, b.data, n);
		assert_int_equal(read_all(exact, n, &e), -1);
		assert_int_equal(e.code, ERR_PROTOCOL);
		free(exact);
	}
	assert_ok(read_all(b.data, b.len, &e));
	wire_put_u8(&b, 0);
	assert_int_equal(read_all(b.data, b.len, &e), -1);
	assert_string_equal(e.text, "test: 1 bytes too many at the end");
	buf_free(&b);
}

static void test_lies(void **state)
{
	static const uint8_t huge[] = { 0xff, 0xff, 0xff, 0xff, 'a' }, two[] = { 2 }, nul[] = { 2, 0, 0, 0, 'a', 0 },
			     bad[] = { 2, 0, 0, 0, 'a', 0xff }, six[] = { 6, 0, 0, 0, '1', '2', '3', '4', '5', '6' };
	struct wire_reader r;
	char fixed[6];
	size_t n;
	struct err e;

	(void)state;
	wire_read_init(&r, huge, sizeof(huge));
	assert_null(wire_str(&r, SIZE_MAX));
	assert_int_equal(wire_end(&r, "m", &e), -1);
	wire_read_init(&r, huge, sizeof(huge));
	assert_null(wire_bytes(&r, 4, &n));
	assert_int_equal(n, 0);
	assert_non_null(strstr(r.what, "bound"));
	wire_read_init(&r, huge, sizeof(huge));
	assert_int_equal(wire_count(&r, 10), 0);
	assert_true(r.failed);
	wire_read_init(&r, two, sizeof(two));
	wire_bool(&r);
	assert_true(r.failed);
	wire_read_init(&r, nul, sizeof(nul));
	assert_null(wire_str(&r, 10));
	wire_read_init(&r, bad, sizeof(bad));
	wire_str_fixed(&r, fixed, sizeof(fixed));
	assert_true(r.failed);
	assert_string_equal(fixed, "");
	wire_read_init(&r, six, sizeof(six));
	wire_str_fixed(&r, fixed, sizeof(fixed));
	assert_true(r.failed);
	wire_fail(&r, "later"); /* the first reason stays */
	assert_non_null(strstr(r.what, "bound"));
	wire_read_init(&r, NULL, 0);
	assert_ok(wire_end(&r, "empty", &e));
}

static void test_writer_full(void **state)
{
	struct buf b = BUF_INIT(5);

	(void)state;
	wire_put_str(&b, "ab");
	assert_true(b.failed);
	buf_free(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_cuts_and_trail), cmocka_unit_test(test_lies),
		cmocka_unit_test(test_writer_full) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
