/* Log lines: one event is one line of valid UTF-8 of bounded length, whatever is in it; a flood is cut and counted. */
#include "unit.h"

#include "clock.h"
#include "log.h"
#include "text.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#define WAIT_NS INT64_C(10000000000)

/* Standard error as a file, between begin() and end(). */
static int file = -1, keep = -1;

static void begin(bool json)
{
	char path[] = "/tmp/eph-log-XXXXXX";

	file = mkstemp(path);
	keep = dup(2);
	assert_true(file >= 0 && keep >= 0);
	unlink(path);
	dup2(file, 2);
	log_init("test", LOG_LEVEL_INFO, json);
}

/* What was written so far, as a string; the caller frees it. */
static char *written(void)
{
	struct buf b = BUF_INIT((size_t)64 * 1024 * 1024);
	char piece[65536];
	off_t at = 0;
	ssize_t n;

	while ((n = pread(file, piece, sizeof(piece), at)) > 0) {
		assert_true(buf_add(&b, piece, (size_t)n));
		at += n;
	}
	assert_true(buf_add_char(&b, '\0'));
	return (char *)b.data; /* NOLINT: the buffer's storage is handed over */
}

static char *end(void)
{
	char *text = written();

	dup2(keep, 2);
	close(keep);
	close(file);
	return text;
}

static char *logged(bool json, const char *message)
{
	begin(json);
	log_debug("not shown");
	log_warn("%s", message);
	return end();
}

static size_t lines(const char *text, const char *with)
{
	size_t count = 0;

	for (const char *at = text, *next; *at; at = next) {
		const char *found = strstr(at, with);

		next = strchr(at, '\n');
		assert_non_null(next); /* no line is cut */
		next++;
		count += found && found < next ? 1 : 0;
	}
	return count;
}

static void test_forms(void **state)
{
	enum log_level level;
	char *line = logged(false, "run=run_1 evil=\x1b[2J\nforged line");

	(void)state;
	assert_string_equal(line + 24, " warn test: run=run_1 evil=\\x1b[2J\\x0aforged line\n");
	free(line);
	line = logged(true, "a=\"q\" \\ \x01 \xff \xc3\xa4");
	assert_non_null(strstr(
			line, "\"level\":\"warn\",\"role\":\"test\",\"message\":\"a=\\\"q\\\" \\\\ \\u0001 \\u00ff \xc3\xa4\"}\n"));
	free(line);
	assert_true(log_level_parse("error", &level) && level == LOG_LEVEL_ERROR);
	assert_false(log_level_parse("ERROR", &level));
	check_warn(1 == 1);
	check_abort(1 == 1);
}

/* Every byte and every unsafe code point, in both forms. */
static void test_one_line_of_text(void **state)
{
	static const char *const evil[] = { "a\r\nb", "\x80\xff\xc3",
		("\xc2\x9b"
		 "31m"),
		"\xe2\x80\xae", "\xe2\x80\xa8", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\x7f" };

	(void)state;
	for (int json = 0; json < 2; json++) {
		for (size_t i = 0; i < sizeof(evil) / sizeof(evil[0]); i++) {
			char *line = logged(json == 1, evil[i]);
			size_t n = strlen(line);

			assert_true(text_utf8_valid(line, n));
			assert_ptr_equal(strchr(line, '\n'), line + n - 1);
			assert_null(strpbrk(line, "\r\x1b\x7f") && json == 0 ? line : NULL);
			if (json == 0) {
				assert_null(strstr(line, "\xc2\x9b"));
				assert_null(strstr(line, "\xe2\x80"));
			}
			free(line);
		}
	}
}

static void test_length(void **state)
{
	static const char *const pieces[] = { "\"", "\xff", "\xc3\xa4", "\xf0\x9f\x98\x80", "\x1b", "x" };
	char big[20000];

	(void)state;
	for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
		size_t n = strlen(pieces[i]);

		for (size_t shift = 0; shift < 4; shift++) {
			size_t at = 0;

			while (at < shift)
				big[at++] = 'x';
			for (; at + n < sizeof(big); at += n)
				memcpy(big + at, pieces[i], n);
			big[at] = '\0';
			for (int json = 0; json < 2; json++) {
				char *line = logged(json == 1, big);
				size_t len = strlen(line);

				assert_in_range(len, 2000, 4096);
				assert_true(text_utf8_valid(line, len));
				assert_ptr_equal(strchr(line, '\n'), line + len - 1);
				assert_true(json == 0 || strcmp(line + len - 3, "\"}\n") == 0);
				free(line);
			}
		}
	}
}

static void flood(int count)
{
	for (int i = 0; i < count; i++)
		log_warn("flood number=%d", i);
}

static void test_flood(void **state)
{
	int64_t until = clock_mono_ns() + WAIT_NS;
	char *text;
	bool said = false;

	(void)state;
	begin(false);
	flood(10000);
	log_warn("another place is heard");
	text = written();
	assert_in_range(lines(text, "flood number="), 100, 400);
	assert_int_equal(lines(text, "another place is heard"), 1);
	free(text);
	/* Any later line brings the count, once. */
	while (!said && clock_mono_ns() < until) {
		log_info("tick");
		(void)poll(NULL, 0, 50);
		text = written();
		said = lines(text, "more suppressed in") == 1;
		free(text);
	}
	assert_true(said);
	log_info("tick");
	text = end();
	assert_int_equal(lines(text, "more suppressed in"), 1);
	assert_int_equal(lines(text, "like: flood number=%d"), 1);
	free(text);
}

static void *flood_thread(void *arg)
{
	(void)arg;
	for (int i = 0; i < 2000; i++)
		log_warn("thread line=%d", i);
	return NULL;
}

static void test_threads(void **state)
{
	pthread_t threads[4];
	char *text;

	(void)state;
	begin(true);
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, flood_thread, NULL), 0);
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(pthread_join(threads[i], NULL), 0);
	text = end();
	assert_in_range(lines(text, "thread line="), 100, 400);
	for (const char *at = text; *at; at = strchr(at, '\n') + 1)
		assert_int_equal(strncmp(at, "{\"at\":\"", 7), 0);
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_forms),
		cmocka_unit_test(test_one_line_of_text),
		cmocka_unit_test(test_length),
		cmocka_unit_test(test_flood),
		cmocka_unit_test(test_threads),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
