/* Errors, buffers, ids, clocks: the small parts that everything else leans on. */
#include "unit.h"

#include "buf.h"
#include "clock.h"
#include "error.h"
#include "ids.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static void test_error_long(void **state)
{
	char big[2000];
	struct err e;

	(void)state;
	memset(big, 'x', sizeof(big) - 1);
	big[sizeof(big) - 1] = '\0';
	assert_int_equal(err_set(&e, ERR_LIMIT, "%s", big), -1);
	assert_int_equal(strlen(e.text), ERR_TEXT_MAX - 1);
	assert_string_equal(e.text + ERR_TEXT_MAX - 4, "...");
	assert_int_equal(err_wrap(&e, "outer"), -1);
	assert_int_equal(strncmp(e.text, "outer: xxx", 10), 0);
	assert_string_equal(e.text + ERR_TEXT_MAX - 4, "...");
	assert_int_equal(e.code, ERR_LIMIT);
	err_wrap(&e, "%s", big);
	assert_int_equal(strlen(e.text), ERR_TEXT_MAX - 1);
}

static void test_error_wrap(void **state)
{
	struct err e;

	(void)state;
	errno = ENOENT;
	err_set_errno(&e, "open %s", "a");
	assert_string_equal(e.text, "open a: No such file or directory");
	assert_int_equal(e.sys, ENOENT);
	err_wrap(&e, "line %d", 3);
	err_wrap(&e, "config");
	assert_string_equal(e.text, "config: line 3: open a: No such file or directory");
	assert_int_equal(e.code, ERR_IO);
	assert_int_equal(e.sys, ENOENT);
	for (int c = ERR_NONE; c <= ERR_INTERNAL; c++)
		assert_string_not_equal(err_code_name((enum err_code)c), "unknown");
}

static void test_buf_bounds(void **state)
{
	struct buf b = BUF_INIT(10);

	(void)state;
	assert_false(buf_add(&b, "x", SIZE_MAX));
	assert_false(buf_add(&b, "x", 11));
	assert_true(b.failed);
	assert_null(b.data);
	buf_reset(&b);
	assert_true(buf_add_str(&b, "12345"));
	assert_false(buf_printf(&b, "%s", "123456"));
	assert_int_equal(b.len, 5);
	assert_true(b.failed);
	assert_true(buf_printf(&b, "%s", "67890")); /* the mistake is sticky, room is room */
	assert_true(b.failed);
	assert_false(buf_add_char(&b, 'x'));
	assert_null(buf_reserve(&b, 1));
	assert_non_null(buf_reserve(&b, 0));
	assert_string_equal(buf_cstr(&b), "1234567890");
	buf_consume(&b, 8);
	assert_string_equal(buf_cstr(&b), "90");
	buf_consume(&b, 100);
	assert_int_equal(b.len, 0);
	buf_free(&b);
	assert_int_equal(b.max, 10);
	assert_false(b.failed);
}

static void test_buf_grow_and_steal(void **state)
{
	struct buf b = BUF_INIT(SIZE_MAX);
	size_t n;
	char *s;

	(void)state;
	for (int i = 0; i < 10000; i++)
		assert_true(buf_add(&b, "0123456789", 10));
	assert_int_equal(b.len, 100000);
	memcpy(buf_reserve(&b, 3), "abc", 3);
	buf_commit(&b, 3);
	buf_commit(&b, SIZE_MAX / 2); /* never past what is there */
	assert_true(b.len < b.cap);
	b.len = 100003;
	s = buf_steal(&b, &n);
	assert_int_equal(n, 100003);
	assert_string_equal(s + 100000, "abc");
	assert_null(b.data);
	free(s);
	s = buf_steal(&b, NULL);
	assert_string_equal(s, "");
	free(s);
}

static void test_ids(void **state)
{
	static const char *const bad[] = { "", "run", "run_", "run_0123456789abcdef0123456789abcde",
		"run_0123456789abcdef0123456789abcdef0", "run_0123456789ABCDEF0123456789abcdef",
		"org_0123456789abcdef0123456789abcdef", "run-0123456789abcdef0123456789abcdef" };
	char a[ID_MAX], b[ID_MAX], secret[64];
	uint8_t raw[64];
	size_t n;

	(void)state;
	for (size_t i = 0; i < COUNT(bad); i++)
		assert_false(id_valid("run", bad[i]));
	id_make("org", a);
	id_make("org", b);
	assert_string_not_equal(a, b);
	assert_true(id_valid("org", a));
	id_run_make(0x0123456789ab, a);
	id_run_make(0x0123456789ac, b);
	assert_int_equal(strlen(a), ID_RUN_LEN);
	assert_int_equal(strncmp(a, "run_0123456789ab", 16), 0);
	assert_true(strcmp(a, b) < 0);
	id_secret_make("ephop_", secret);
	assert_int_equal(strlen(secret), 6 + 43);
	assert_true(text_unb64url(secret + 6, raw, sizeof(raw), &n));
	assert_int_equal(n, 32);
}

static void test_clock(void **state)
{
	int64_t boot = clock_boot_ns(), real = clock_real_ms();

	(void)state;
	assert_true(clock_boot_ns() >= boot);
	assert_true(clock_mono_ns() > 0);
	assert_in_range(clock_boot_ms() - boot / 1000000, 0, 5000);
	assert_true(real > INT64_C(1500000000000));
#ifdef EPHEMERAL_TEST_CLOCK
	{
		char path[] = "/tmp/eph-clock-XXXXXX";
		int fd = mkstemp(path);

		assert_int_equal(write(fd, "-3600000 7200000\n", 17), 17);
		close(fd);
		setenv("EPHEMERAL_CLOCK_FILE", path, 1);
		assert_in_range(real - clock_real_ms(), 3590000, 3600000);
		assert_in_range(clock_boot_ms() - boot / 1000000, 7200000, 7210000);
		unsetenv("EPHEMERAL_CLOCK_FILE");
		unlink(path);
		assert_in_range(clock_boot_ms() - boot / 1000000, 0, 10000);
	}
#endif
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_error_long),
		cmocka_unit_test(test_error_wrap),
		cmocka_unit_test(test_buf_bounds),
		cmocka_unit_test(test_buf_grow_and_steal),
		cmocka_unit_test(test_ids),
		cmocka_unit_test(test_clock),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
