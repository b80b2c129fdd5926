/* link: ephproto EPH::sodium */
/* sources: controld/api/run_request.c controld/api/run_files.c controld/api/problem.c */
/*
 * The body of POST /v1/runs by table: what is taken and what it becomes, and for each fault where it is said to be and which words
 * help. All faults of a body are found at once.
 */
#include "common/text.h"
#include "controld/api/run_request.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static const struct run_limits limits = {
	.default_timeout_seconds = 300, .max_timeout_seconds = 3600, .max_cost_micros = 10000000
};

static int parse(const char *body, size_t n, const char *header, struct run_request **rq, struct field_errors *fe)
{
	field_errors_init(fe);
	*rq = NULL;
	return run_request_parse(body, n, header, &limits, rq, fe);
}

static void show(const struct field_errors *fe)
{
	size_t i;

	for (i = 0; i < fe->count; i++)
		print_message("    %s: %s\n", fe->list[i].at, fe->list[i].detail);
}

/* One body, the one fault that it has: its place and a piece of its text. */
struct fault {
	const char *body, *at, *says;
};

static const struct fault faults[] = {
	{ "", "#", "at least `prompt`" },
	{ "nonsense", "#", "as JSON" },
	{ "[]", "#", "must be an object" },
	{ "\"prompt\"", "#", "must be an object" },
	{ "{}", "#/prompt", "missing" },
	{ "{\"prompt\":\"a\"} x", "#", "as JSON" },
	{ "{\"prompt\":\"a\",\"prompt\":\"b\"}", "#", "as JSON" },
	{ "{\"prompt\":\"\\u0000\"}", "#", "as JSON" },
	{ "{\"prompt\":\"\xc0\x80\"}", "#", "as JSON" },
	{ "{\"prompt\":\"\\ud800\"}", "#", "as JSON" },
	{ "{\"prompt\":\"\"}", "#/prompt", "is empty" },
	{ "{\"prompt\":\" \\n\\t\"}", "#/prompt", "is empty" },
	{ "{\"prompt\":null}", "#/prompt", "must be a string" },
	{ "{\"prompt\":[\"a\"]}", "#/prompt", "must be a string" },
	{ "{\"prompt\":\"a\",\"promt\":\"b\"}", "#/promt", "not a field of a run; the fields are prompt" },
	{ "{\"prompt\":\"a\",\"a/b~c d\":1}", "#/a~1b~0c%20d", "not a field" },
	{ "{\"prompt\":\"a\",\"shell\":1}", "#/shell", "true or false" },
	{ "{\"prompt\":\"a\",\"shell\":\"yes\"}", "#/shell", "true or false" },
	{ "{\"prompt\":\"a\",\"shell\":null}", "#/shell", "true or false" },
	{ "{\"prompt\":\"a\",\"timeout_seconds\":0}", "#/timeout_seconds", "from 1 to 3600" },
	{ "{\"prompt\":\"a\",\"timeout_seconds\":3601}", "#/timeout_seconds", "from 1 to 3600" },
	{ "{\"prompt\":\"a\",\"timeout_seconds\":-1}", "#/timeout_seconds", "from 1 to 3600" },
	{ "{\"prompt\":\"a\",\"timeout_seconds\":1.5}", "#/timeout_seconds", "without a fraction" },
	{ "{\"prompt\":\"a\",\"timeout_seconds\":1e2}", "#/timeout_seconds", "without a fraction" },
	{ "{\"prompt\":\"a\",\"timeout_seconds\":\"60\"}", "#/timeout_seconds", "whole number" },
	{ "{\"prompt\":\"a\",\"max_cost_micros\":0}", "#/max_cost_micros", "from 1 to 10000000" },
	{ "{\"prompt\":\"a\",\"max_cost_micros\":10000001}", "#/max_cost_micros", "from 1 to 10000000" },
	{ "{\"prompt\":\"a\",\"max_cost_micros\":99999999999999999999}", "#/max_cost_micros", "whole number" },
	{ "{\"prompt\":\"a\",\"max_cost_micros\":true}", "#/max_cost_micros", "whole number" },
	{ "{\"prompt\":\"a\",\"max_model_calls\":0}", "#/max_model_calls", "from 1 to 1000" },
	{ "{\"prompt\":\"a\",\"max_model_calls\":1001}", "#/max_model_calls", "from 1 to 1000" },
	{ "{\"prompt\":\"a\",\"model\":\"gpt\"}", "#/model", "provider/model" },
	{ "{\"prompt\":\"a\",\"model\":\"\"}", "#/model", "provider/model" },
	{ "{\"prompt\":\"a\",\"model\":7}", "#/model", "must be a string" },
	{ "{\"prompt\":\"a\",\"size\":\"huge\"}", "#/size", "small" },
	{ "{\"prompt\":\"a\",\"size\":2}", "#/size", "must be a string" },
	{ "{\"prompt\":\"a\",\"metadata\":[]}", "#/metadata", "an object of strings" },
	{ "{\"prompt\":\"a\",\"metadata\":{\"k\":1}}", "#/metadata/k", "must be a string" },
	{ "{\"prompt\":\"a\",\"metadata\":{\"\":\"v\"}}", "#/metadata/", "1 to 64" },
	{ "{\"prompt\":\"a\",\"idempotency_key\":\"\"}", "#/idempotency_key", "visible ASCII" },
	{ "{\"prompt\":\"a\",\"idempotency_key\":\"a b\"}", "#/idempotency_key", "visible ASCII" },
	{ "{\"prompt\":\"a\",\"idempotency_key\":\"\xc3\xa4\"}", "#/idempotency_key", "visible ASCII" },
	{ "{\"prompt\":\"a\",\"web\":\"no\"}", "#/web", "must be false" },
	{ "{\"prompt\":\"a\",\"zero_data_retention\":1}", "#/zero_data_retention", "true or false" },
	{ "{\"prompt\":\"a\",\"files\":{}}", "#/files", "an array" },
	{ "{\"prompt\":\"a\",\"files\":[7]}", "#/files/0", "an object" },
	{ "{\"prompt\":\"a\",\"files\":[{\"content\":\"x\"}]}", "#/files/0/path", "missing" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\"}]}", "#/files/0", "exactly one of" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"content\":\"x\",\"content_base64\":\"eA==\"}]}", "#/files/0",
			"exactly one of" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"/etc/passwd\",\"content\":\"x\"}]}", "#/files/0/path", "relative path" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a/../b\",\"content\":\"x\"}]}", "#/files/0/path", "relative path" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a//b\",\"content\":\"x\"}]}", "#/files/0/path", "relative path" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\".\",\"content\":\"x\"}]}", "#/files/0/path", "relative path" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"\",\"content\":\"x\"}]}", "#/files/0/path", "relative path" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":7,\"content\":\"x\"}]}", "#/files/0/path", "must be a string" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"content\":7}]}", "#/files/0/content", "must be a string" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"content_base64\":\"e\"}]}", "#/files/0/content_base64", "not base64" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"content_base64\":\"eA\"}]}", "#/files/0/content_base64", "not base64" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"content\":\"x\",\"mode\":7}]}", "#/files/0/mode", "not a member" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"content\":\"x\"},{\"path\":\"a\",\"content\":\"y\"}]}", "#/files/1/path",
			"twice" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"content\":\"x\"},{\"path\":\"a/b\",\"content\":\"y\"}]}",
			"#/files/1/path", "directory" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a/b\",\"content\":\"x\"},{\"path\":\"a\",\"content\":\"y\"}]}",
			"#/files/1/path", "directory" },
};

static void test_one_fault(void **state)
{
	size_t i;

	(void)state;
	for (i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		const struct fault *f = &faults[i];
		struct run_request *rq;
		struct field_errors fe;

		if (parse(f->body, strlen(f->body), NULL, &rq, &fe) == 0)
			fail_msg("taken: %s", f->body);
		if (fe.count != 1 || strcmp(fe.list[0].at, f->at) != 0 || !strstr(fe.list[0].detail, f->says)) {
			show(&fe);
			fail_msg("%s: wanted %s ... %s", f->body, f->at, f->says);
		}
		assert_int_equal(field_errors_problem(&fe), PROBLEM_INVALID_REQUEST);
		assert_true(text_utf8_clean(fe.list[0].detail, strlen(fe.list[0].detail)));
		field_errors_free(&fe);
	}
}

/* Well formed, but of a feature that comes later. */
static const char *const later[][2] = {
	{ "{\"workflow\":\"w\"}", "#/workflow" },
	{ "{\"prompt\":\"a\",\"workflow\":\"w\"}", "#/workflow" },
	{ "{\"prompt\":\"a\",\"input\":{\"x\":1}}", "#/input" },
	{ "{\"prompt\":\"a\",\"input\":7}", "#/input" },
	{ "{\"prompt\":\"a\",\"web\":true}", "#/web" },
	{ "{\"prompt\":\"a\",\"web\":{\"allow_domains\":[\"example.com\"]}}", "#/web" },
	{ "{\"prompt\":\"a\",\"connections\":{\"a\":\"b\"}}", "#/connections" },
	{ "{\"prompt\":\"a\",\"output_schema\":{}}", "#/output_schema" },
	{ "{\"prompt\":\"a\",\"zero_data_retention\":true}", "#/zero_data_retention" },
	{ "{\"prompt\":\"a\",\"callback_url\":\"https://example.com/\"}", "#/callback_url" },
	{ "{\"prompt\":\"a\",\"outputs\":[\"x\"]}", "#/outputs" },
	{ "{\"prompt\":\"a\",\"files\":[{\"path\":\"a\",\"file_id\":\"file_1\"}]}", "#/files/0/file_id" },
};

static void test_not_available(void **state)
{
	size_t i;

	(void)state;
	for (i = 0; i < sizeof(later) / sizeof(later[0]); i++) {
		struct run_request *rq;
		struct field_errors fe;

		assert_int_equal(parse(later[i][0], strlen(later[i][0]), NULL, &rq, &fe), -1);
		if (fe.count != 1 || strcmp(fe.list[0].at, later[i][1]) != 0) {
			show(&fe);
			fail_msg("%s", later[i][0]);
		}
		assert_int_equal(field_errors_problem(&fe), PROBLEM_NOT_AVAILABLE);
		field_errors_free(&fe);
	}
}

static void test_all_at_once(void **state)
{
	static const char body[] = "{\"prompt\":7,\"shell\":\"x\",\"timeout_seconds\":0,\"web\":true,\"nonsense\":1,\"files\":[{"
				   "\"path\":\"..\"},{}],"
				   "\"metadata\":{\"a\":1,\"b\":2}}";
	static const char *const at[] = { "#/prompt", "#/shell", "#/timeout_seconds", "#/web", "#/nonsense", "#/files/0/path",
		"#/files/0", "#/files/1/path", "#/files/1", "#/metadata/a", "#/metadata/b" };
	struct run_request *rq;
	struct field_errors fe;
	size_t i;

	(void)state;
	assert_int_equal(parse(body, sizeof(body) - 1, "\"\"", &rq, &fe), -1);
	assert_int_equal(fe.count, sizeof(at) / sizeof(at[0]) + 1);
	for (i = 0; i < sizeof(at) / sizeof(at[0]); i++)
		assert_string_equal(fe.list[i].at, at[i]);
	assert_int_equal(fe.list[i].where, FIELD_HEADER);
	assert_string_equal(fe.list[i].at, "Idempotency-Key");
	assert_int_equal(field_errors_problem(&fe), PROBLEM_INVALID_REQUEST);
	field_errors_free(&fe);
}

static void test_defaults(void **state)
{
	/* What means the default may be said. */
	static const char body[] = "{\"prompt\":\"a\",\"web\":false,\"connections\":{},\"zero_data_retention\":false,\"input\":{},"
				   "\"outputs\":[],"
				   "\"workflow\":null,\"callback_url\":null,\"output_schema\":null,\"files\":[],\"metadata\":{}}";
	struct run_request *rq;
	struct field_errors fe;

	(void)state;
	assert_int_equal(parse(body, sizeof(body) - 1, NULL, &rq, &fe), 0);
	assert_string_equal(rq->prompt, "a");
	assert_int_equal(rq->timeout_seconds, 300);
	assert_int_equal(rq->max_cost_micros, 0);
	assert_int_equal(rq->max_model_calls, 100);
	assert_int_equal(rq->size, API_SIZE_STANDARD);
	assert_false(rq->shell);
	assert_null(rq->model);
	assert_string_equal(rq->idempotency_key, "");
	run_request_free(rq);
}

static void test_values(void **state)
{
	static const char body[] =
			"{\"prompt\":\"gr\xc3\xbc\xc3\x9f\",\"shell\":true,\"model\":\"scripted/auto\",\"timeout_seconds\":120,"
			"\"max_cost_micros\":40000,\"size\":\"large\",\"max_model_calls\":3,\"metadata\":{\"team\":\"x\"},"
			"\"files\":[{\"path\":\"d/a.txt\",\"content\":\"hi\"},{\"path\":\"b\",\"content_base64\":\"AAE=\"},"
			"{\"path\":\"empty\",\"content\":\"\"},{\"path\":\"empty2\",\"content_base64\":\"\"}],\"idempotency_key\":"
			"\"k1\"}";
	struct run_request *rq;
	struct field_errors fe;
	char hex[65];

	(void)state;
	if (parse(body, sizeof(body) - 1, "\"k1\"", &rq, &fe) == -1) {
		show(&fe);
		fail_msg("refused");
	}
	assert_true(rq->shell);
	assert_string_equal(rq->model, "scripted/auto");
	assert_int_equal(rq->timeout_seconds, 120);
	assert_int_equal(rq->max_cost_micros, 40000);
	assert_int_equal(rq->size, API_SIZE_LARGE);
	assert_int_equal(rq->max_model_calls, 3);
	assert_int_equal(rq->metadata_count, 1);
	assert_string_equal(rq->metadata[0].key, "team");
	assert_int_equal(rq->file_count, 4);
	assert_int_equal(rq->files[0].size, 2);
	assert_memory_equal(rq->files[0].data, "hi", 2);
	text_hex(rq->files[0].sha256, 32, hex);
	assert_string_equal(hex, "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4");
	assert_int_equal(rq->files[1].size, 2);
	assert_memory_equal(rq->files[1].data, "\0\1", 2);
	assert_int_equal(rq->files[2].size, 0);
	assert_int_equal(rq->files[3].size, 0);
	text_hex(rq->files[3].sha256, 32, hex);
	assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
	assert_string_equal(rq->idempotency_key, "k1");
	run_request_free(rq);
}

static void test_sizes(void **state)
{
	struct buf body = BUF_INIT(32 * 1024 * 1024);
	struct run_request *rq;
	struct field_errors fe;
	size_t i;

	(void)state;
	/* A prompt of exactly the limit, then one byte more. */
	for (i = 0; i < 2; i++) {
		buf_reset(&body);
		buf_add_str(&body, "{\"prompt\":\"");
		while (body.len < 11 + RUN_PROMPT_MAX + i)
			buf_add_char(&body, 'p');
		buf_add_str(&body, "\"}");
		assert_int_equal(parse((const char *)body.data, body.len, NULL, &rq, &fe), i == 0 ? 0 : -1);
		if (i == 1)
			assert_non_null(strstr(fe.list[0].detail, "131072"));
		field_errors_free(&fe);
		run_request_free(rq);
	}
	/* Two files that together have the limit, then one byte more. */
	for (i = 0; i < 2; i++) {
		size_t k;

		buf_reset(&body);
		buf_add_str(&body, "{\"prompt\":\"p\",\"files\":[{\"path\":\"a\",\"content\":\"");
		for (k = 0; k < RUN_INLINE_MAX / 2; k++)
			buf_add_char(&body, 'f');
		buf_add_str(&body, "\"},{\"path\":\"b\",\"content\":\"");
		for (k = 0; k < RUN_INLINE_MAX / 2 + i; k++)
			buf_add_char(&body, 'f');
		buf_add_str(&body, "\"}]}");
		assert_int_equal(parse((const char *)body.data, body.len, NULL, &rq, &fe), i == 0 ? 0 : -1);
		if (i == 1) {
			assert_string_equal(fe.list[0].at, "#/files/1/content");
			assert_non_null(strstr(fe.list[0].detail, "8388608"));
		}
		field_errors_free(&fe);
		run_request_free(rq);
	}
	/* More files and pairs than are taken. */
	buf_reset(&body);
	buf_add_str(&body, "{\"prompt\":\"p\",\"files\":[");
	for (i = 0; i < 33; i++)
		buf_printf(&body, "%s{\"path\":\"f%zu\",\"content\":\"\"}", i ? "," : "", i);
	buf_add_str(&body, "],\"metadata\":{");
	for (i = 0; i < 17; i++)
		buf_printf(&body, "%s\"k%zu\":\"v\"", i ? "," : "", i);
	buf_add_str(&body, "}}");
	assert_int_equal(parse((const char *)body.data, body.len, NULL, &rq, &fe), -1);
	assert_int_equal(fe.count, 2);
	assert_non_null(strstr(fe.list[0].detail, "33 files"));
	assert_non_null(strstr(fe.list[1].detail, "17 pairs"));
	field_errors_free(&fe);
	/* Thousands of unknown fields are counted, not listed. */
	buf_reset(&body);
	buf_add_str(&body, "{\"prompt\":\"p\"");
	for (i = 0; i < 5000; i++)
		buf_printf(&body, ",\"u%zu\":1", i);
	buf_add_str(&body, "}");
	assert_int_equal(parse((const char *)body.data, body.len, NULL, &rq, &fe), -1);
	assert_int_equal(fe.count, FIELD_ERRORS_MAX);
	assert_int_equal(fe.more, 5000 - FIELD_ERRORS_MAX);
	field_errors_free(&fe);
	buf_free(&body);
}

static void test_characters(void **state)
{
	struct buf body = BUF_INIT(65536);
	struct run_request *rq;
	struct field_errors fe;
	size_t i, k;

	(void)state;
	/* Limits of metadata are in characters, not in bytes. */
	for (i = 0; i < 2; i++) {
		buf_reset(&body);
		buf_add_str(&body, "{\"prompt\":\"p\",\"metadata\":{\"");
		for (k = 0; k < 64 + i; k++)
			buf_add_str(&body, "\xc3\xa4");
		buf_add_str(&body, "\":\"");
		for (k = 0; k < 512 + i; k++)
			buf_add_str(&body, "\xe2\x82\xac");
		buf_add_str(&body, "\"}}");
		assert_int_equal(parse((const char *)body.data, body.len, NULL, &rq, &fe), i == 0 ? 0 : -1);
		assert_int_equal(fe.count, i == 0 ? 0 : 2);
		field_errors_free(&fe);
		run_request_free(rq);
	}
	buf_free(&body);
}

static void test_keys(void **state)
{
	static const char body[] = "{\"prompt\":\"a\",\"idempotency_key\":\"one\"}";
	char out[RUN_IDEMPOTENCY_MAX + 1], longest[300];
	struct run_request *rq;
	struct field_errors fe;

	(void)state;
	assert_true(idempotency_key_read("abc", out));
	assert_string_equal(out, "abc");
	assert_true(idempotency_key_read("\"abc\"", out));
	assert_string_equal(out, "abc");
	assert_true(idempotency_key_read("\"a\\\"b\\\\c\"", out));
	assert_string_equal(out, "a\"b\\c");
	assert_false(idempotency_key_read("", out));
	assert_false(idempotency_key_read("\"\"", out));
	assert_false(idempotency_key_read("a b", out));
	assert_false(idempotency_key_read("a\x7f", out));
	memset(longest, 'k', sizeof(longest));
	longest[255] = '\0';
	assert_true(idempotency_key_read(longest, out));
	longest[255] = 'k';
	longest[256] = '\0';
	assert_false(idempotency_key_read(longest, out));

	assert_int_equal(parse(body, sizeof(body) - 1, "one", &rq, &fe), 0);
	run_request_free(rq);
	assert_int_equal(parse(body, sizeof(body) - 1, "two", &rq, &fe), -1);
	assert_string_equal(fe.list[0].at, "#/idempotency_key");
	field_errors_free(&fe);
}

static void spelled(const char *body, const char *header, bool (*fn)(const struct run_request *, struct buf *), struct buf *out)
{
	struct run_request *rq;
	struct field_errors fe;

	buf_init(out, 1024 * 1024);
	assert_int_equal(parse(body, strlen(body), header, &rq, &fe), 0);
	assert_true(fn(rq, out));
	run_request_free(rq);
}

static void test_spelling(void **state)
{
	struct buf a, b;

	(void)state;
	/* Order, white space and where the key stands do not matter; content does. */
	spelled("{\"prompt\":\"p\",\"shell\":true,\"idempotency_key\":\"k\"}", NULL, run_request_identity, &a);
	spelled("{ \"shell\" : true, \"prompt\" : \"\\u0070\" }", "k", run_request_identity, &b);
	assert_int_equal(a.len, b.len);
	assert_memory_equal(a.data, b.data, a.len);
	assert_string_equal(buf_cstr(&a), "{\"prompt\":\"p\",\"shell\":true}");
	buf_free(&a);
	buf_free(&b);
	/* The echo names files by size and hash. */
	spelled("{\"prompt\":\"p\",\"files\":[{\"path\":\"a\",\"content\":\"hi\"}]}", NULL, run_request_echo, &a);
	assert_string_equal(buf_cstr(&a), "{\"files\":[{\"path\":\"a\",\"sha256\":"
					  "\"8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4\","
					  "\"size\":2}],\"prompt\":\"p\"}");
	buf_free(&a);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_one_fault),
		cmocka_unit_test(test_not_available),
		cmocka_unit_test(test_all_at_once),
		cmocka_unit_test(test_defaults),
		cmocka_unit_test(test_values),
		cmocka_unit_test(test_sizes),
		cmocka_unit_test(test_characters),
		cmocka_unit_test(test_keys),
		cmocka_unit_test(test_spelling),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
