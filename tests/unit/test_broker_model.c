/* link: ephproto */
/* sources: noded/broker/model_stream.c noded/broker/model_request.c noded/broker/model_error.c */
/* What is sent to a provider, byte for byte, and what is made of its answers, cut at every byte. */
#include "noded/broker/model_error.h"
#include "noded/broker/model_request.h"
#include "noded/broker/model_stream.h"

#include "common/json.h"
#include "common/text.h"
#include "proto/tools.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define S(text) ((char *)(uintptr_t)(text))

/* --- requests ---------------------------------------------------------------------------------------------------------------- */

static const struct model_spec spec = { .id = "p/m", .upstream = "m-1", .limit_param = LIMIT_MAX_COMPLETION_TOKENS };

static void test_request_golden(void **state)
{
	struct model_tool_call tc = { S("call_1"), S("shell"), S("{\"command\":\"ls\"}") };
	struct model_message m[] = {
		{ .role = ROLE_SYSTEM, .content = S("sys"), .tool_call_id = S("") },
		{ .role = ROLE_USER, .content = S("say \"hi\"\n"), .tool_call_id = S("") },
		{ .role = ROLE_ASSISTANT, .content = S(""), .tool_call_id = S(""), .calls = &tc, .call_count = 1 },
		{ .role = ROLE_TOOL, .content = S("out"), .tool_call_id = S("call_1") },
	};
	struct model_call c = { .call = 1, .messages = m, .message_count = 4 };
	struct buf b = BUF_INIT(MODEL_REQUEST_MAX), again = BUF_INIT(MODEL_REQUEST_MAX);
	struct json *v;
	struct err e;
	size_t prefix;

	(void)state;
	assert_int_equal(model_request_prefix(&spec, 0, &c, &b, &e), 0);
	prefix = b.len;
	assert_true(model_request_tail(LIMIT_MAX_COMPLETION_TOKENS, 77, &b));
	assert_true(b.len - prefix <= MODEL_TAIL_MAX);
	assert_string_equal(buf_cstr(&b), "{\"model\":\"m-1\",\"stream\":true,\"stream_options\":{\"include_usage\":true},"
					  "\"store\":false,\"messages\":["
					  "{\"role\":\"system\",\"content\":\"sys\"},"
					  "{\"role\":\"user\",\"content\":\"say \\\"hi\\\"\\n\"},"
					  "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"call_1\",\"type\":"
					  "\"function\",\"function\":"
					  "{\"name\":\"shell\",\"arguments\":\"{\\\"command\\\":\\\"ls\\\"}\"}}]},"
					  "{\"role\":\"tool\",\"tool_call_id\":\"call_1\",\"content\":\"out\"}"
					  "],\"max_completion_tokens\":77}");
	assert_int_equal(json_parse((char *)b.data, b.len, &v, &e), 0);
	json_free(v);
	/* A shorter conversation is a prefix of the longer one, up to a comma. */
	c.message_count = 2;
	assert_int_equal(model_request_prefix(&spec, 0, &c, &again, &e), 0);
	assert_memory_equal(again.data, b.data, again.len);
	assert_int_equal(b.data[again.len], ',');
	buf_free(&b);
	buf_free(&again);
}

static void test_request_tools(void **state)
{
	struct model_message m = { .role = ROLE_USER, .content = S("x"), .tool_call_id = S("") };
	struct model_call c = { .call = 1, .messages = &m, .message_count = 1 };
	struct assignment a = { .shell = false };
	struct buf b = BUF_INIT(MODEL_REQUEST_MAX);
	struct json *v;
	struct err e;

	(void)state;
	assert_int_equal(model_tools_allowed(&a) & TOOL_BIT(TOOL_SHELL), 0);
	a.shell = true;
	assert_int_equal(model_tools_allowed(&a), (1u << TOOL_COUNT) - 1);
	assert_int_equal(model_request_prefix(&spec, TOOL_BIT(TOOL_SHELL) | TOOL_BIT(TOOL_READ_FILE), &c, &b, &e), 0);
	assert_true(model_request_tail(LIMIT_MAX_TOKENS, INT64_MAX, &b));
	assert_int_equal(json_parse((char *)b.data, b.len, &v, &e), 0);
	assert_int_equal(json_len(json_get(v, "tools")), 2);
	assert_string_equal(json_get_text(json_get(json_at(json_get(v, "tools"), 0), "function"), "name"), "shell");
	assert_int_equal(json_get_int(v, "max_tokens", 0), INT64_MAX);
	assert_null(json_get(v, "n"));
	json_free(v);
	buf_free(&b);
}

static void test_request_refused(void **state)
{
	struct model_message m = { .role = ROLE_TOOL, .content = S("x"), .tool_call_id = S("") };
	struct model_call c = { .call = 1, .messages = &m, .message_count = 1 };
	struct buf b = BUF_INIT(MODEL_REQUEST_MAX), small = BUF_INIT(50);
	struct err e;

	(void)state;
	assert_int_equal(model_request_prefix(&spec, 0, &c, &b, &e), -1);
	assert_int_equal(e.code, ERR_INVALID);
	c.message_count = 0;
	assert_int_equal(model_request_prefix(&spec, 0, &c, &b, &e), -1);
	m.role = ROLE_USER;
	c.message_count = 1;
	assert_int_equal(model_request_prefix(&spec, 0, &c, &small, &e), -1);
	assert_int_equal(e.code, ERR_LIMIT);
	m.content = S("\xff");
	buf_reset(&b);
	assert_int_equal(model_request_prefix(&spec, 0, &c, &b, &e), -1);
	buf_free(&b);
	buf_free(&small);
}

/* --- replies ----------------------------------------------------------------------------------------------------------------- */

static const char stream_text[] = ": comment\r\n\r\n"
				  "data: "
				  "{\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":"
				  "\"gr\xc3\xbc\"},\"finish_reason\":null}],\"usage\":null}\r\n\r\n"
				  "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\\u00df e\"}}]}\n\n"
				  "data: "
				  "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"a1\",\"type\":"
				  "\"function\",\"function\":{\"name\":\"shell\",\"arguments\":\"\"}}]}}]}\n\n"
				  "data: "
				  "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":"
				  "\"{\\\"com\"}}]}}]}\n\n"
				  "data: "
				  "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":"
				  "\"mand\\\":1}\"}}]}}]}\n\n"
				  "data: "
				  "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":1,\"function\":{\"name\":"
				  "\"list_files\",\"arguments\":\"{}\"}}]}}]}\n\n"
				  "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\n"
				  "data: "
				  "{\"choices\":[],\"usage\":{\"prompt_tokens\":120,\"completion_tokens\":30,\"prompt_tokens_"
				  "details\":{\"cached_tokens\":64}}}\n\n"
				  "data: [DONE]\n\n";

static void reply_is_whole(struct model_stream *s)
{
	struct meter_tokens t;
	struct model_reply r;
	struct err e;

	assert_int_equal(model_stream_end(s, &e), 0);
	assert_true(model_stream_usage(s, &t));
	assert_int_equal(t.input, 120);
	assert_int_equal(t.cached, 64);
	assert_int_equal(t.output, 30);
	assert_int_equal(model_stream_take(s, 3, &r, &e), 0);
	assert_int_equal(r.finish, FINISH_TOOL_CALLS);
	assert_string_equal(r.content, "gr\xc3\xbc\xc3\x9f e");
	assert_int_equal(r.call_count, 2);
	assert_string_equal(r.calls[0].id, "a1");
	assert_string_equal(r.calls[0].name, "shell");
	assert_string_equal(r.calls[0].arguments, "{\"command\":1}");
	assert_string_equal(r.calls[1].id, "call_3_2");
	assert_string_equal(r.calls[1].arguments, "{}");
	model_reply_free(&r);
	model_stream_free(s);
}

static void test_stream_at_every_cut(void **state)
{
	const size_t n = sizeof(stream_text) - 1;
	struct model_stream *s;
	struct err e;

	(void)state;
	for (size_t cut = 0; cut <= n; cut++) {
		s = model_stream_new(NULL);
		assert_int_equal(model_stream_feed(s, stream_text, cut, &e), 0);
		assert_int_equal(model_stream_feed(s, stream_text + cut, n - cut, &e), 0);
		assert_true(model_stream_done(s));
		reply_is_whole(s);
	}
	s = model_stream_new(NULL);
	for (size_t i = 0; i < n; i++)
		assert_int_equal(model_stream_feed(s, stream_text + i, 1, &e), 0);
	reply_is_whole(s);
}

/* The stream ends at every byte: whole only once the finish reason came, and never a crash. */
static void test_stream_ends_anywhere(void **state)
{
	const char *finish = strstr(stream_text, "\"tool_calls\"}]}\n\n");
	struct meter_tokens t;
	struct err e;

	(void)state;
	for (size_t n = 0; n < sizeof(stream_text) - 1; n++) {
		struct model_stream *s = model_stream_new(NULL);

		assert_int_equal(model_stream_feed(s, stream_text, n, &e), 0);
		if (n < (size_t)(finish - stream_text)) {
			assert_int_equal(model_stream_end(s, &e), -1);
			assert_int_equal(e.code, ERR_PROTOCOL);
			assert_false(model_stream_usage(s, &t));
		} else {
			(void)!model_stream_end(s, &e);
		}
		model_stream_free(s);
	}
}

static void test_whole_answer(void **state)
{
	static const char body[] = "\n "
				   "{\"choices\":[{\"message\":{\"content\":\"hi\",\"tool_calls\":[{\"id\":\"z\",\"function\":{"
				   "\"name\":\"f\",\"arguments\":\"{}\"}}]},"
				   "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}";
	struct meter_tokens t;
	struct model_reply r;
	struct err e;

	(void)state;
	for (size_t cut = 0; cut < sizeof(body); cut++) {
		struct model_stream *s = model_stream_new(NULL);

		assert_int_equal(model_stream_feed(s, body, cut, &e), 0);
		assert_int_equal(model_stream_feed(s, body + cut,
						 sizeof(body) - 1 - (cut < sizeof(body) - 1 ? cut : sizeof(body) - 1), &e),
				0);
		assert_int_equal(model_stream_end(s, &e), 0);
		assert_true(model_stream_usage(s, &t));
		assert_int_equal(t.cached, 0);
		assert_int_equal(model_stream_take(s, 1, &r, &e), 0);
		assert_string_equal(r.content, "hi");
		assert_string_equal(r.calls[0].id, "z");
		assert_int_equal(r.finish, FINISH_STOP);
		model_reply_free(&r);
		model_stream_free(s);
	}
}

static struct model_stream *fed(const char *text)
{
	struct model_stream *s = model_stream_new(NULL);
	struct err e;

	assert_int_equal(model_stream_feed(s, text, strlen(text), &e), 0);
	return s;
}

/* A tool call cut by the token limit is left out and said; whole ones before it stay. */
static void test_length_cuts_a_call(void **state)
{
	struct model_stream *s = fed("data: "
				     "{\"choices\":[{\"delta\":{\"content\":\"so\",\"tool_calls\":[{\"index\":0,\"id\":\"a\","
				     "\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}},"
				     "{\"index\":1,\"id\":\"b\",\"function\":{\"name\":\"g\",\"arguments\":\"{\\\"x\"}}]},\"finish_"
				     "reason\":\"length\"}]}\n\n");
	struct model_reply r;
	struct err e;

	(void)state;
	assert_int_equal(model_stream_end(s, &e), 0);
	assert_int_equal(model_stream_take(s, 1, &r, &e), 0);
	assert_int_equal(r.finish, FINISH_LENGTH);
	assert_int_equal(r.call_count, 1);
	assert_string_equal(r.calls[0].id, "a");
	assert_non_null(strstr(r.content, "so\n[The reply reached its token limit"));
	model_reply_free(&r);
	model_stream_free(s);
}

/* A NUL becomes U+FFFD; what only looks like one stays. */
static void test_nul_is_replaced(void **state)
{
	struct model_stream *s = fed("data: {\"choices\":[{\"delta\":{\"content\":\"a\\u0000b \\\\u0000 "
				     "\\\\\\u0000\"},\"finish_reason\":\"stop\"}]}\n\n");
	struct model_reply r;
	struct err e;

	(void)state;
	assert_int_equal(model_stream_end(s, &e), 0);
	assert_int_equal(model_stream_take(s, 1, &r, &e), 0);
	assert_string_equal(r.content, "a\xef\xbf\xbd"
				       "b \\u0000 \\\xef\xbf\xbd");
	model_reply_free(&r);
	model_stream_free(s);
}

static void test_finish_reasons(void **state)
{
	static const struct {
		const char *text;
		enum model_finish want;
	} rows[] = { { "stop", FINISH_STOP }, { "length", FINISH_LENGTH }, { "content_filter", FINISH_FILTER },
		{ "function_call", FINISH_TOOL_CALLS }, { "eos", FINISH_OTHER } };
	char text[256];
	struct model_reply r;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct model_stream *s;

		assert_true(text_fmt(text, sizeof(text),
				"data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":\"%s\"}]}\n\n",
				rows[i].text));
		s = fed(text);
		assert_int_equal(model_stream_end(s, &e), 0);
		assert_int_equal(model_stream_take(s, 1, &r, &e), 0);
		assert_int_equal(r.finish, rows[i].want);
		model_reply_free(&r);
		model_stream_free(s);
	}
}

static void test_bad_streams(void **state)
{
	static const char *const rows[] = {
		"data: {\"choices\":[}\n\n",
		"data: []\n\n",
		"data: {\"choices\":[{\"delta\":{\"content\":5}}]}\n\n",
		"data: {\"error\":{\"message\":\"overloaded\"}}\n\n",
		"data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":64,\"id\":\"a\"}]}}]}\n\n",
		"data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":-1,\"id\":\"a\"}]}}]}\n\n",
		"data: {\"a\":1,\"a\":2}\n\n",
		"data: {\"choices\":[{\"delta\":{\"content\":\"\\ud800\"}}]}\n\n",
		"data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":7}]}}]}\n\n",
	};
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct model_stream *s = model_stream_new(NULL);

		if (model_stream_feed(s, rows[i], strlen(rows[i]), &e) == 0)
			fail_msg("row %zu was taken", i);
		assert_int_equal(model_stream_feed(s, "data: [DONE]\n\n", 14, &e), -1); /* sticky */
		assert_int_equal(model_stream_end(s, &e), -1);
		model_stream_free(s);
	}
}

static void test_bounds(void **state)
{
	const size_t half = 600 * 1024;
	char *line = malloc(half + 256);
	struct model_stream *s = model_stream_new(NULL);
	struct err e;
	size_t n;

	(void)state;
	n = (size_t)snprintf(line, 256, "data: {\"choices\":[{\"delta\":{\"content\":\"");
	memset(line + n, 'x', half);
	n += half;
	n += (size_t)snprintf(line + n, 256, "\"}}]}\n\n");
	for (size_t have = half; have <= MODEL_STR_MAX; have += half)
		assert_int_equal(model_stream_feed(s, line, n, &e), 0);
	assert_int_equal(model_stream_feed(s, line, n, &e), -1); /* over the bound of one text */
	assert_int_equal(e.code, ERR_LIMIT);
	model_stream_free(s);
	s = model_stream_new(NULL);
	assert_int_equal(model_stream_feed(s, "data: ", 6, &e), 0);
	n = 0;
	while (n < 2 * MODEL_LINE_MAX && model_stream_feed(s, line + 60, half, &e) == 0)
		n += half;
	assert_true(n < 2 * MODEL_LINE_MAX); /* a line without an end */
	model_stream_free(s);
	free(line);
}

static void test_usage_that_makes_no_sense(void **state)
{
	static const char *const rows[] = { "{\"prompt_tokens\":\"5\",\"completion_tokens\":1}", "{\"completion_tokens\":1}", "{}",
		"{\"prompt_tokens\":1.5,\"completion_tokens\":1}" };
	char text[512];
	struct meter_tokens t;

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct model_stream *s;

		assert_true(text_fmt(text, sizeof(text), "data: {\"choices\":[],\"usage\":%s}\n\n", rows[i]));
		s = fed(text);
		assert_true(model_stream_usage(s, &t));
		assert_true(t.input < 0 || t.output < 0); /* the meter charges the hold then */
		model_stream_free(s);
	}
}

static void test_error_text(void **state)
{
	static const struct {
		const char *body, *text, *param;
	} rows[] = {
		{ "{\"error\":{\"message\":\"no\",\"param\":\"max_tokens\"}}", "no", "max_tokens" },
		{ "{\"error\":\"flat\"}", "flat", "" },
		{ "{\"message\":\"top\"}", "top", "" },
		{ "<html>oh\x1b[1m</html>", "<html>oh\\x1b[1m</html>", "" },
		{ "", "no message", "" },
	};
	char text[321], param[65], junk[4096];

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		model_error_text(rows[i].body, strlen(rows[i].body), NULL, text, param);
		assert_string_equal(text, rows[i].text);
		assert_string_equal(param, rows[i].param);
	}
	model_error_text("\xcc", 1, NULL, text, param);
	assert_string_equal(text, "\\xcc");
	memset(junk, 1, sizeof(junk));
	model_error_text(junk, sizeof(junk), NULL, text, param);
	assert_true(strlen(text) > 100);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_request_golden),
		cmocka_unit_test(test_request_tools),
		cmocka_unit_test(test_request_refused),
		cmocka_unit_test(test_stream_at_every_cut),
		cmocka_unit_test(test_stream_ends_anywhere),
		cmocka_unit_test(test_whole_answer),
		cmocka_unit_test(test_length_cuts_a_call),
		cmocka_unit_test(test_nul_is_replaced),
		cmocka_unit_test(test_finish_reasons),
		cmocka_unit_test(test_bad_streams),
		cmocka_unit_test(test_bounds),
		cmocka_unit_test(test_usage_that_makes_no_sense),
		cmocka_unit_test(test_error_text),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
