/* sources: controld/api/problem.c */
/* RFC 9457: the table of types, what is rendered, that no byte of the input can break it, pointers. */
#include "controld/api/problem.h"

#include "common/json.h"
#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct json *rendered(enum problem p, const char *detail, const struct field_errors *fe)
{
	struct buf out = BUF_INIT(256 * 1024);
	struct json *doc;
	struct err e;

	assert_true(problem_render(&out, "https://eph.example", p, detail, "req_1", fe));
	if (json_parse((const char *)out.data, out.len, &doc, &e) == -1)
		fail_msg("%s", e.text);
	buf_free(&out);
	return doc;
}

static void test_table(void **state)
{
	int i, k;

	(void)state;
	for (i = 0; i < PROBLEM_COUNT; i++) {
		enum problem p = (enum problem)i;
		struct json *doc = rendered(p, "why", NULL);
		char type[128];

		assert_true(text_fmt(type, sizeof(type), "https://eph.example/problems/%s", problem_name(p)));
		assert_string_equal(json_get_text(doc, "type"), type);
		assert_string_equal(json_get_text(doc, "title"), problem_title(p));
		assert_int_equal(json_get_int(doc, "status", 0), problem_status(p));
		assert_string_equal(json_get_text(doc, "detail"), "why");
		assert_null(json_get(doc, "errors"));
		assert_true(problem_status(p) >= 400 && problem_status(p) < 600);
		assert_int_equal(problem_parse(problem_name(p)), p);
		assert_true(strlen(problem_help(p)) > 40);
		for (k = 0; k < i; k++)
			assert_string_not_equal(problem_name(p), problem_name((enum problem)k));
		json_free(doc);
	}
	assert_int_equal(problem_parse("nothing"), PROBLEM_COUNT);
	assert_int_equal(problem_parse(""), PROBLEM_COUNT);
}

static void test_errors(void **state)
{
	struct pointer files = { .key = "files" }, second = { .up = &files, .index = 1 }, path = { .up = &second, .key = "path" };
	struct field_errors fe;
	struct json *doc;

	(void)state;
	field_errors_init(&fe);
	field_bad(&fe, &path, "is %s", "wrong");
	query_bad(&fe, "limit", "is too high");
	header_bad(&fe, "Idempotency-Key", "is empty");
	field_bad(&fe, NULL, "is strange \x1b[31m \xff");
	doc = rendered(PROBLEM_INVALID_REQUEST, "several", &fe);
	assert_int_equal(json_len(json_get(doc, "errors")), 4);
	assert_string_equal(json_get_text(json_at(json_get(doc, "errors"), 0), "pointer"), "#/files/1/path");
	assert_string_equal(json_get_text(json_at(json_get(doc, "errors"), 0), "detail"), "files/1/path is wrong");
	assert_string_equal(json_get_text(json_at(json_get(doc, "errors"), 1), "parameter"), "limit");
	assert_string_equal(json_get_text(json_at(json_get(doc, "errors"), 2), "header"), "Idempotency-Key");
	assert_string_equal(json_get_text(json_at(json_get(doc, "errors"), 3), "pointer"), "#");
	assert_null(strchr(json_get_text(json_at(json_get(doc, "errors"), 3), "detail"), 0x1b));
	json_free(doc);
	field_errors_free(&fe);
}

static void test_which(void **state)
{
	struct pointer web = { .key = "web" };
	struct field_errors fe;

	(void)state;
	field_errors_init(&fe);
	assert_false(field_errors_any(&fe));
	field_later(&fe, &web, "is not available");
	assert_int_equal(field_errors_problem(&fe), PROBLEM_NOT_AVAILABLE);
	field_bad(&fe, NULL, "is bad too");
	assert_int_equal(field_errors_problem(&fe), PROBLEM_INVALID_REQUEST);
	field_errors_free(&fe);
	assert_false(field_errors_any(&fe));
}

static void test_pointers(void **state)
{
	static const struct {
		const char *key, *shown;
	} keys[] = {
		{ "plain", "#/plain" },
		{ "", "#/" },
		{ "a/b", "#/a~1b" },
		{ "a~b", "#/a~0b" },
		{ "a b", "#/a%20b" },
		{ "\xc3\xa4", "#/%C3%A4" },
		{ "\"", "#/%22" },
		{ "a\nb", "#/a%0Ab" },
		{ "#", "#/%23" },
		{ "%", "#/%25" },
	};
	size_t i;

	(void)state;
	for (i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
		struct pointer at = { .key = keys[i].key };
		struct buf out = BUF_INIT(1024);

		assert_true(pointer_print(&at, &out));
		assert_string_equal(buf_cstr(&out), keys[i].shown);
		buf_free(&out);
	}
}

static void test_long(void **state)
{
	struct buf key = BUF_INIT(100000);
	struct field_errors fe;
	struct pointer at;
	struct json *doc;
	size_t i;

	(void)state;
	while (key.len < 50000)
		buf_add_char(&key, 'k');
	at = (struct pointer){ .key = buf_cstr(&key) };
	field_errors_init(&fe);
	for (i = 0; i < FIELD_ERRORS_MAX + 10; i++)
		field_bad(&fe, &at, "is %s", buf_cstr(&key));
	doc = rendered(PROBLEM_INVALID_REQUEST, buf_cstr(&key), &fe);
	assert_int_equal(json_len(json_get(doc, "errors")), FIELD_ERRORS_MAX);
	assert_int_equal(json_get_int(doc, "more_errors", 0), 10);
	json_free(doc);
	field_errors_free(&fe);
	buf_free(&key);
}

static void test_translation(void **state)
{
	static const struct {
		enum err_code code;
		enum problem p;
	} codes[] = {
		{ ERR_INVALID, PROBLEM_INVALID_REQUEST },
		{ ERR_LIMIT, PROBLEM_INVALID_REQUEST },
		{ ERR_NOT_FOUND, PROBLEM_NOT_FOUND },
		{ ERR_CONFLICT, PROBLEM_CONFLICT },
		{ ERR_UNAVAILABLE, PROBLEM_UNAVAILABLE },
		{ ERR_TIMEOUT, PROBLEM_UNAVAILABLE },
		{ ERR_NOMEM, PROBLEM_INTERNAL },
		{ ERR_IO, PROBLEM_INTERNAL },
		{ ERR_INTERNAL, PROBLEM_INTERNAL },
		{ ERR_PROTOCOL, PROBLEM_INTERNAL },
	};
	size_t i;

	(void)state;
	for (i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
		struct err e = { .code = codes[i].code };

		assert_int_equal(problem_of_err(&e), codes[i].p);
	}
	assert_int_equal(problem_of_status(400), PROBLEM_INVALID_REQUEST);
	assert_int_equal(problem_of_status(408), PROBLEM_INVALID_REQUEST);
	assert_int_equal(problem_of_status(413), PROBLEM_TOO_LARGE);
	assert_int_equal(problem_of_status(503), PROBLEM_UNAVAILABLE);
	assert_int_equal(problem_of_status(500), PROBLEM_INTERNAL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_table),
		cmocka_unit_test(test_errors),
		cmocka_unit_test(test_which),
		cmocka_unit_test(test_pointers),
		cmocka_unit_test(test_long),
		cmocka_unit_test(test_translation),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
