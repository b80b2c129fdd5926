/* Strict JSON in and out. */
#include "unit.h"

#include "json.h"

#define S(s) (s), sizeof(s) - 1

static void test_refused(void **state)
{
	static const struct {
		const char *s;
		size_t n;
		enum err_code code;
		const char *says;
	} cases[] = {
		{ S(""), ERR_INVALID, "byte 0" },
		{ S("  "), ERR_INVALID, "not valid JSON" },
		{ S("nul"), ERR_INVALID, NULL },
		{ S("[1,]"), ERR_INVALID, "/1" },
		{ S("{\"a\":1,}"), ERR_INVALID, NULL },
		{ S("{a:1}"), ERR_INVALID, NULL },
		{ S("[1 2]"), ERR_INVALID, NULL },
		{ S("1 2"), ERR_INVALID, NULL },
		{ S("{} x"), ERR_INVALID, NULL },
		{ S("/* c */ 1"), ERR_INVALID, "comment" },
		{ S("[1] // c"), ERR_INVALID, NULL },
		{ S("'a'"), ERR_INVALID, NULL },
		{ S("01"), ERR_INVALID, NULL },
		{ S("+1"), ERR_INVALID, NULL },
		{ S(".5"), ERR_INVALID, NULL },
		{ S("1."), ERR_INVALID, NULL },
		{ S("1e"), ERR_INVALID, NULL },
		{ S("-"), ERR_INVALID, NULL },
		{ S("NaN"), ERR_INVALID, NULL },
		{ S("Infinity"), ERR_INVALID, NULL },
		{ S("\"\n\""), ERR_INVALID, NULL },
		{ S("\"\\x41\""), ERR_INVALID, NULL },
		{ S("\"\\u12\""), ERR_INVALID, NULL },
		{ S("\"abc"), ERR_INVALID, NULL },
		{ S("\xef\xbb\xbf{}"), ERR_INVALID, NULL },
		{ S("[\"a\0b\"]"), ERR_INVALID, "byte 3: a NUL" },
		{ S("\"\\u0000\""), ERR_INVALID, "\\u0000" },
		{ S("[1,\v2]"), ERR_INVALID, "byte 3: only blanks" },
		{ S("{}\f"), ERR_INVALID, "byte 2: only blanks" },
		/* yajl sees no token that the end of the text cuts. */
		{ S("{\"a\":1}\"x"), ERR_INVALID, "byte 7: the document has ended" },
		{ S("[] tru"), ERR_INVALID, "byte 3: the document has ended" },
		{ S("42\"}d6"), ERR_INVALID, "byte 2: the document has ended" },
		{ S("\"a\"\""), ERR_INVALID, "byte 3: the document has ended" },
		{ S("12tru"), ERR_INVALID, "byte 0" },
		{ S("\"\\ud800\""), ERR_INVALID, "surrogate" },
		{ S("\"\\udc00\""), ERR_INVALID, "surrogate" },
		{ S("\"\\ud800\\ud800\""), ERR_INVALID, "surrogate" },
		{ S("\"\\ud800x\""), ERR_INVALID, "surrogate" },
		{ S("\"\\ud83d\\u0041\""), ERR_INVALID, "surrogate" },
		{ S("\"\xc0\x80\""), ERR_INVALID, "byte 1: not valid UTF-8" },
		{ S("\"\xed\xa0\x80\""), ERR_INVALID, "UTF-8" },
		{ S("\"\xf4\x90\x80\x80\""), ERR_INVALID, "UTF-8" },
		{ S("\"caf\xc3\""), ERR_INVALID, "byte 4" },
		{ S("{\"a\":1,\"a\":2}"), ERR_INVALID, "\"/a\": this key stands twice" },
		{ S("{\"a\":[{},{\"b~/c\":1,\"b~/c\":1}]}"), ERR_INVALID, "\"/a/1/b~0~1c\"" },
		{ S("{\"a\":1,\"\\u0061\":2}"), ERR_INVALID, "twice" },
		{ S("{\"1\":0,\"2\":0,\"3\":0,\"4\":0,\"5\":0,\"6\":0,\"7\":0,\"8\":0,\"9\":0,\"10\":0,\"11\":0,\"12\":0,\"13\":0,"
		    "\"7\":0}"),
				ERR_INVALID, "\"/7\"" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct json *v = (struct json *)1;
		struct err e;

		if (json_parse(cases[i].s, cases[i].n, &v, &e) == 0)
			fail_msg("case %zu was taken: %s", i, cases[i].s);
		assert_null(v);
		assert_int_equal(e.code, cases[i].code);
		if (cases[i].says && !strstr(e.text, cases[i].says))
			fail_msg("case %zu: no \"%s\" in: %s", i, cases[i].says, e.text);
	}
}

static void test_limits(void **state)
{
	struct buf b = BUF_INIT(4 << 20);
	struct json *v;
	struct err e;

	(void)state;
	for (int depth = 64; depth <= 65; depth++) {
		buf_reset(&b);
		for (int i = 0; i < depth; i++)
			buf_add_str(&b, i % 2 ? "{\"a\":" : "[");
		buf_add_str(&b, "1");
		for (int i = depth - 1; i >= 0; i--)
			buf_add_str(&b, i % 2 ? "}" : "]");
		assert_int_equal(json_parse((char *)b.data, b.len, &v, &e), depth == 64 ? 0 : -1);
		json_free(v);
	}
	assert_int_equal(e.code, ERR_LIMIT);
	buf_reset(&b);
	buf_add_char(&b, '[');
	for (int i = 0; i < 1000001; i++)
		buf_add_str(&b, "1,");
	buf_add_str(&b, "1]");
	assert_int_equal(json_parse((char *)b.data, b.len, &v, &e), -1);
	assert_int_equal(e.code, ERR_LIMIT);
	buf_reset(&b);
	for (int i = 0; i < 300; i++)
		buf_add_char(&b, '1');
	assert_int_equal(json_parse((char *)b.data, b.len, &v, &e), -1);
	assert_int_equal(e.code, ERR_LIMIT);
	buf_reset(&b);
	for (int i = 0; i < 1000000; i++) /* never deeper than the bound, however deep it claims to be */
		buf_add_char(&b, '[');
	assert_int_equal(json_parse((char *)b.data, b.len, &v, &e), -1);
	assert_int_equal(e.code, ERR_LIMIT);
	buf_free(&b);
}

static void test_values(void **state)
{
	static const char text[] = "{\"s\":\"a\\u00e4\\n\\ud83d\\ude00\\/\",\"i\":-9223372036854775808,\"m\":9223372036854775807,"
				   "\"big\":9223372036854775808,\"d\":1.50,\"e\":1e3,\"t\":true,\"f\":false,\"n\":null,\"a\":[1,"
				   "\"x\",[]],\"o\":{}}";
	struct json *v;
	const struct json *a;
	struct err e;

	(void)state;
	assert_ok(json_parse(text, sizeof(text) - 1, &v, &e));
	assert_int_equal(json_type(v), JSON_OBJECT);
	assert_int_equal(json_len(v), 11);
	assert_string_equal(json_key(v, 0), "s");
	assert_string_equal(json_get_text(v, "s"), "a\xc3\xa4\n\xf0\x9f\x98\x80/");
	assert_int_equal(json_len(json_get(v, "s")), 9);
	assert_true(json_get_int(v, "i", 0) == INT64_MIN);
	assert_true(json_get_int(v, "m", 0) == INT64_MAX);
	assert_int_equal(json_type(json_get(v, "big")), JSON_DECIMAL);
	assert_string_equal(json_as_text(json_get(v, "big")), "9223372036854775808");
	assert_string_equal(json_as_text(json_get(v, "d")), "1.50");
	assert_int_equal(json_type(json_get(v, "e")), JSON_DECIMAL);
	assert_true(json_get_bool(v, "t", false));
	assert_false(json_get_bool(v, "f", true));
	assert_int_equal(json_type(json_get(v, "n")), JSON_NULL);
	a = json_get(v, "a");
	assert_int_equal(json_len(a), 3);
	assert_int_equal(json_as_int(json_at(a, 0)), 1);
	assert_null(json_at(a, 3));
	assert_null(json_key(a, 0));
	/* wrong types read as absent */
	assert_int_equal(json_get_int(v, "s", 42), 42);
	assert_null(json_get_text(v, "i"));
	assert_null(json_get(a, "x"));
	assert_null(json_get(NULL, "x"));
	assert_int_equal(json_len(NULL), 0);
	assert_string_equal(json_type_name(JSON_DECIMAL), "number");
	json_free(v);
	json_free(NULL);
}

static void test_canonical(void **state)
{
	static const struct {
		const char *in, *out;
	} cases[] = {
		{ " { \"b\" : 1 , \"a\" : [ 1 , 2.50 ] } ", "{\"a\":[1,2.50],\"b\":1}" },
		{ "{\"\xc3\xa4\":1,\"z\":2,\"Z\":3,\"\":4}", "{\"\":4,\"Z\":3,\"z\":2,\"\xc3\xa4\":1}" },
		{ "\"\\u0041\\u001f\\t\\\"\\\\\\/\"", "\"A\\u001f\\t\\\"\\\\/\"" },
		{ "-0", "0" },
		{ "[]", "[]" },
		{ "{}", "{}" },
		{ "{\"a\":{\"d\":null,\"c\":true}}", "{\"a\":{\"c\":true,\"d\":null}}" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct buf b = BUF_INIT(1000), again = BUF_INIT(1000), small = BUF_INIT(1);
		struct json *v, *w;
		struct err e;

		assert_ok(json_parse(cases[i].in, strlen(cases[i].in), &v, &e));
		assert_true(json_canonical(v, &b));
		assert_string_equal(buf_cstr(&b), cases[i].out);
		assert_ok(json_parse((char *)b.data, b.len, &w, &e));
		assert_true(json_canonical(w, &again));
		assert_string_equal(buf_cstr(&again), cases[i].out);
		assert_int_equal(json_canonical(v, &small), strlen(cases[i].out) <= 1);
		json_free(v);
		json_free(w);
		buf_free(&b);
		buf_free(&again);
		buf_free(&small);
	}
}

static void test_writer(void **state)
{
	struct buf b = BUF_INIT(1000);
	struct json *v;
	struct jw w;
	struct err e;

	(void)state;
	assert_ok(json_parse("{\"b\":1.0,\"a\":[]}", 16, &v, &e));
	jw_init(&w, &b);
	jw_object(&w);
	jw_kstr(&w, "s", "q\"\\\n\x01\x7f\xc3\xa4");
	jw_kstr(&w, "null", NULL);
	jw_kstrn(&w, "n", "abcdef", 3);
	jw_kint(&w, "i", INT64_MIN);
	jw_kbool(&w, "t", true);
	jw_knull(&w, "z");
	jw_karray(&w, "a");
	jw_int(&w, 1);
	jw_object(&w);
	jw_close(&w);
	jw_raw(&w, "[2]", 3);
	jw_json(&w, v);
	jw_close(&w);
	jw_kobject(&w, "o");
	jw_close(&w);
	jw_close(&w);
	assert_true(jw_end(&w));
	assert_string_equal(buf_cstr(&b),
			"{\"s\":\"q\\\"\\\\\\n\\u0001\x7f\xc3\xa4\",\"null\":null,\"n\":\"abc\",\"i\":-9223372036854775808,"
			"\"t\":true,\"z\":null,\"a\":[1,{},[2],{\"b\":1.0,\"a\":[]}],\"o\":{}}");
	json_free(v);
	buf_free(&b);
}

/* Each of these is a mistake of the caller and must show in jw_end. */
static void wrong(int which, struct jw *w)
{
	switch (which) {
	case 0: break; /* nothing written */
	case 1:
		jw_int(w, 1);
		jw_int(w, 2);
		break;
	case 2: jw_object(w); break;
	case 3:
		jw_object(w);
		jw_int(w, 1);
		jw_close(w);
		break;
	case 4:
		jw_object(w);
		jw_key(w, "a");
		jw_close(w);
		break;
	case 5:
		jw_object(w);
		jw_key(w, "a");
		jw_key(w, "b");
		jw_int(w, 1);
		jw_close(w);
		break;
	case 6:
		jw_array(w);
		jw_key(w, "a");
		jw_close(w);
		break;
	case 7: jw_close(w); break;
	case 8:
		jw_key(w, "a");
		jw_int(w, 1);
		break;
	case 9: jw_str(w, "\xff"); break;
	case 10: jw_strn(w, "a\0b", 3); break;
	case 11:
		for (int i = 0; i < 33; i++)
			jw_array(w);
		for (int i = 0; i < 33; i++)
			jw_close(w);
		break;
	case 12:
		jw_object(w);
		jw_kint(w, "\xc3", 1);
		jw_close(w);
		break;
	case 13:
		for (int i = 0; i < 100; i++)
			jw_array(w);
		for (int i = 0; i < 100; i++)
			jw_close(w);
		break;
	default:
		jw_str(w, "0123456789012345678901234567890123456789012345678901234567890123456789");
		break; /* too long for the buffer */
	}
}

static void test_writer_mistakes(void **state)
{
	(void)state;
	for (int i = 0; i < 15; i++) {
		struct buf b = BUF_INIT(60);
		struct jw w;

		jw_init(&w, &b);
		wrong(i, &w);
		if (jw_end(&w))
			fail_msg("mistake %d went through: %s", i, buf_cstr(&b));
		buf_free(&b);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_refused),
		cmocka_unit_test(test_limits),
		cmocka_unit_test(test_values),
		cmocka_unit_test(test_canonical),
		cmocka_unit_test(test_writer),
		cmocka_unit_test(test_writer_mistakes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
