/* link: noded_broker EPH::test_tls */
/* sources: tests/unit/model_rig.c tests/unit/upstream.c */
/*
 * What a provider says in a 2xx answer: usage that is missing, false or huge and what it costs; tool calls in every odd shape;
 * texts of other kinds; bytes that are no text. What comes out is what the guest gets.
 */
#include "model_rig.h"

#include "loop.h"

#define WHOLE(json) "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" json
#define TALLY "\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":5}}"

static int64_t spent_on_model(const struct model_rig *r)
{
	return meter_spent(&r->meter, 0) - r->price.run_fee;
}

/* --- usage ---------------------------------------------------------------------------------------------------------------------
 */

enum bill { AS_SAID, THE_HOLD, OVER };

static void test_usage(void **state)
{
	static const struct {
		const char *usage; /* the last events but [DONE] */
		enum bill bill;
		int64_t micros;
	} rows[] = {
		{ USAGE, AS_SAID, GOOD_MICROS },
		{ "", THE_HOLD, 0 },
		{ USAGE_IS("null"), THE_HOLD, 0 },
		{ USAGE_IS("{}"), THE_HOLD, 0 },
		{ USAGE_IS("[20,3]"), THE_HOLD, 0 },
		{ USAGE_IS("\"many\""), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":0,\"completion_tokens\":0,\"total_tokens\":0}"), AS_SAID, 0 }, /* its loss */
		{ USAGE_IS("{\"prompt_tokens\":1,\"completion_tokens\":1,\"total_tokens\":2}"), AS_SAID, 18 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"total_tokens\":9999999}"), AS_SAID,
				105 }, /* the parts count */
		{ USAGE_IS("{\"prompt_tokens\":-20,\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":-3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20.5,\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":2e1,\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":\"20\",\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":true,\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":9223372036854775808,\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":18446744073709551616,\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":1e400,\"completion_tokens\":3}"), THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":21}}"),
				THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":-1}}"),
				THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":\"5\"}}"),
				THE_HOLD, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"prompt_tokens_details\":null}"), AS_SAID, 105 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":null}}"),
				AS_SAID, 105 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"completion_tokens_details\":{\"reasoning_tokens\":99}"
			   "}"),
				AS_SAID, 105 },
		{ USAGE_IS("{\"prompt_tokens\":999999,\"completion_tokens\":3}"), OVER, 0 },
		{ USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":1000000}"), OVER, 0 },
		{ USAGE_IS("{\"prompt_tokens\":9223372036854775807,\"completion_tokens\":9223372036854775807}"), OVER, 0 },
		{ USAGE_IS("{\"prompt_tokens\":999999,\"completion_tokens\":3}") USAGE, AS_SAID,
				GOOD_MICROS }, /* the last word counts */
		{ USAGE USAGE_IS("{\"prompt_tokens\":999999,\"completion_tokens\":3}"), OVER, 0 },
		{ USAGE USAGE_IS("null"), AS_SAID, GOOD_MICROS },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[1024];
		struct answer a = { .bytes = text };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), REPLY_HEAD CHUNK("hello") FINISH("stop") "%s" DONE, rows[i].usage));
		rig_init(&r);
		rig_one(&r, &a, 1);
		if (!r.replied)
			fail_msg("row %zu: %s", i, r.text);
		assert_string_equal(r.reply.content, "hello"); /* a false count does not take the answer away */
		assert_int_equal(r.report.cost_micros, spent_on_model(&r));
		assert_int_equal(r.meter.usage.model_calls, 1);
		if (rows[i].bill == AS_SAID) {
			if (r.report.cost_micros != rows[i].micros)
				fail_msg("row %zu: %lld micros", i, (long long)r.report.cost_micros);
			assert_int_equal(r.meter.usage.unmetered_model_micros, 0);
		} else {
			if (r.report.cost_micros != r.hold)
				fail_msg("row %zu: %lld of %lld micros", i, (long long)r.report.cost_micros, (long long)r.hold);
			assert_int_equal(r.meter.usage.unmetered_model_micros, r.hold);
			assert_int_equal(r.meter.usage.input_tokens, 0); /* what is not believed is not shown */
			assert_int_equal(r.meter.usage.output_tokens, 0);
			assert_int_equal(r.meter.unmetered, rows[i].bill == THE_HOLD);
			assert_int_equal(r.meter.over_hold, rows[i].bill == OVER);
			assert_non_null(strstr(r.report.note, "the hold was charged"));
		}
		rig_close(&r);
	}
}

#define COUNTING(text, out)                                                                                                        \
	"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" text                                                          \
	"\"},\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":20,"                                                            \
	"\"completion_tokens\":" #out "}}\n\n"

/* A provider that counts on in each chunk: the last count is the bill, and a reply that breaks off has none. */
static void test_usage_in_each_chunk(void **state)
{
	struct answer whole = { .bytes = REPLY_HEAD COUNTING("he", 1) COUNTING("llo", 2) FINISH("stop")
						USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3}") DONE },
		      with_finish = { .bytes = REPLY_HEAD COUNTING(
						      "hello", 2) "data: "
								  "{\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":"
								  "\"stop\"}],\"usage\":{"
								  "\"prompt_tokens\":20,\"completion_tokens\":3}}\n\n" DONE },
		      cut[] = { { .bytes = REPLY_HEAD COUNTING("he", 1) COUNTING("llo", 2) }, { .bytes = GOOD } };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	rig_one(&r, &whole, 1);
	assert_int_equal(r.report.cost_micros, 105);
	rig_close(&r);
	rig_init(&r);
	rig_one(&r, &with_finish, 1);
	assert_int_equal(r.report.cost_micros, 105);
	rig_close(&r);
	rig_init(&r);
	rig_one(&r, cut, 2);
	assert_int_equal(r.report.cost_micros, r.hold + GOOD_MICROS);
	assert_int_equal(r.meter.usage.unmetered_model_micros, r.hold);
	rig_close(&r);
}

/* --- tool calls ----------------------------------------------------------------------------------------------------------------
 */

#define F(name, arguments) "\"function\":{\"name\":\"" name "\",\"arguments\":\"" arguments "\"}"

/* Calls as "id name arguments;", ids that were made up as "?". */
static const char *shape_of(const struct model_rig *r)
{
	static char out[2000];
	size_t at = 0;

	out[0] = '\0';
	for (uint32_t i = 0; i < r->reply.call_count && at < sizeof(out); i++) {
		const struct model_tool_call *c = &r->reply.calls[i];

		at += (size_t)snprintf(out + at, sizeof(out) - at, "%s %s %s;", strncmp(c->id, "call_1_", 7) == 0 ? "?" : c->id,
				c->name, c->arguments);
		for (uint32_t k = 0; k < i; k++)
			assert_string_not_equal(c->id, r->reply.calls[k].id);
	}
	return out;
}

static void test_tool_calls(void **state)
{
	static const struct {
		const char *what, *events, *want, *content;
		enum model_finish finish;
	} rows[] = {
		{ "one", CALLS("{\"index\":0,\"id\":\"a\"," F("shell", "{}") "}") FINISH("tool_calls"), "a shell {};", "",
				FINISH_TOOL_CALLS },
		{ "several in one chunk",
				CALLS("{\"index\":0,\"id\":\"a\"," F("shell", "1") "},{\"index\":1,\"id\":\"b\"," F(
						"shell", "2") "}") FINISH("tool_calls"),
				"a shell 1;b shell 2;", "", FINISH_TOOL_CALLS },
		{ "interleaved",
				CALLS("{\"index\":1,\"id\":\"b\"," F("g", "x") "}") CALLS("{\"index\":0,\"id\":\"a\"," F(
						"f", "1") "}") CALLS("{\"index\":1,\"function\":{\"arguments\":\"y\"}}")
						CALLS("{\"index\":0,\"function\":{\"arguments\":\"2\"}}") FINISH("tool_calls"),
				"a f 12;b g xy;", "", FINISH_TOOL_CALLS },
		{ "indices with holes",
				CALLS("{\"index\":63,\"id\":\"z\"," F("g", "") "}")
						CALLS("{\"index\":5,\"id\":\"a\"," F("f", "") "}") FINISH("tool_calls"),
				"a f ;z g ;", "", FINISH_TOOL_CALLS },
		{ "no index, an id begins",
				CALLS("{\"id\":\"a\"," F("f", "1") "}") CALLS("{\"function\":{\"arguments\":\"2\"}}")
						CALLS("{\"id\":\"b\"," F("g", "3") "}") FINISH("tool_calls"),
				"a f 12;b g 3;", "", FINISH_TOOL_CALLS },
		{ "no index, the id in each piece",
				CALLS("{\"id\":\"a\"," F("f", "1") "}") CALLS("{\"id\":\"a\",\"function\":{\"arguments\":\"2\"}}")
						CALLS("{\"id\":\"b\"," F("g", "3") "}") FINISH("tool_calls"),
				"a f 12;b g 3;", "", FINISH_TOOL_CALLS },
		{ "no index, no id, a name begins",
				CALLS("{" F("f", "1") "}") CALLS("{\"function\":{\"arguments\":\"2\"}}") CALLS("{" F("g", "3") "}")
						FINISH("tool_calls"),
				"? f 12;? g 3;", "", FINISH_TOOL_CALLS },
		{ "index is text",
				CALLS("{\"index\":\"0\",\"id\":\"a\"," F("f", "1") "}")
						CALLS("{\"index\":\"0\",\"function\":{\"arguments\":\"2\"}}") FINISH("tool_calls"),
				"a f 12;", "", FINISH_TOOL_CALLS },
		{ "empty ids",
				CALLS("{\"index\":0,\"id\":\"\"," F("f", "1") "},{\"index\":1,\"id\":\"\"," F("g", "2") "}")
						FINISH("tool_calls"),
				"? f 1;? g 2;", "", FINISH_TOOL_CALLS },
		{ "null ids",
				CALLS("{\"index\":0,\"id\":null," F("f", "1") "},{\"index\":1,\"id\":null," F("g", "2") "}")
						FINISH("tool_calls"),
				"? f 1;? g 2;", "", FINISH_TOOL_CALLS },
		{ "same ids",
				CALLS("{\"index\":0,\"id\":\"s\"," F("f", "1") "},{\"index\":1,\"id\":\"s\"," F(
						"g", "2") "},{\"index\":2,\"id\":\"s\"," F("h", "3") "}") FINISH("tool_calls"),
				"s f 1;? g 2;? h 3;", "", FINISH_TOOL_CALLS },
		{ "an id that looks made up",
				CALLS("{\"index\":0,\"id\":\"\"," F("f", "1") "},{\"index\":1,\"id\":\"call_1_1\"," F("g", "2") "}")
						FINISH("tool_calls"),
				"? f 1;? g 2;", "", FINISH_TOOL_CALLS },
		{ "no name", CALLS("{\"index\":0,\"id\":\"a\",\"function\":{\"arguments\":\"{}\"}}") FINISH("tool_calls"), "a  {};",
				"", FINISH_TOOL_CALLS },
		{ "no function", CALLS("{\"index\":0,\"id\":\"a\"}") FINISH("tool_calls"), "a  ;", "", FINISH_TOOL_CALLS },
		{ "unknown tool", CALLS("{\"index\":0,\"id\":\"a\"," F("rm -rf /", "{}") "}") FINISH("tool_calls"),
				"a rm -rf / {};", "", FINISH_TOOL_CALLS },
		{ "arguments are no JSON",
				CALLS("{\"index\":0,\"id\":\"a\"," F("shell", "{\\\"command\\\": ") "}") FINISH("tool_calls"),
				"a shell {\"command\": ;", "", FINISH_TOOL_CALLS },
		{ "finish says stop", CALLS("{\"index\":0,\"id\":\"a\"," F("f", "{}") "}") FINISH("stop"), "a f {};", "",
				FINISH_STOP },
		{ "finish says calls, there are none", CHUNK("words") FINISH("tool_calls"), "", "words", FINISH_TOOL_CALLS },
		{ "cut in the call",
				CHUNK("so") CALLS("{\"index\":0,\"id\":\"a\"," F("f", "{}") "}")
						CALLS("{\"index\":1,\"id\":\"b\"," F("g", "{\\\"x") "}") FINISH("length"),
				"a f {};", "so\n[The reply reached", FINISH_LENGTH },
		{ "cut in an earlier one",
				CALLS("{\"index\":0,\"id\":\"a\"," F("f", "") "},{\"index\":1,\"id\":\"b\"," F("g", "{}") "}")
						CALLS("{\"index\":0,\"function\":{\"arguments\":\"{\\\"x\"}}") FINISH("length"),
				"b g {};", "[The reply reached", FINISH_LENGTH },
		{ "cut in the text", CHUNK("so mu") FINISH("length"), "", "so mu", FINISH_LENGTH },
		{ "filtered", CHUNK("so") FINISH("content_filter"), "", "so", FINISH_FILTER },
		{ "filtered in a call", CALLS("{\"index\":0,\"id\":\"a\"," F("f", "{\\\"x") "}") FINISH("content_filter"), "",
				"[The provider's filter", FINISH_FILTER },
		{ "unknown finish", CHUNK("so") FINISH("eos"), "", "so", FINISH_OTHER },
		{ "old form",
				"data: "
				"{\"choices\":[{\"index\":0,\"delta\":{\"function_call\":{\"name\":\"shell\",\"arguments\":\"{"
				"\\\"com\"}}}]}\n\n"
				"data: "
				"{\"choices\":[{\"index\":0,\"delta\":{\"function_call\":{\"arguments\":\"mand\\\":1}\"}}}]}"
				"\n\n" FINISH("function_call"),
				"? shell {\"command\":1};", "", FINISH_TOOL_CALLS },
		{ "a second choice",
				"data: "
				"{\"choices\":[{\"index\":1,\"delta\":{\"content\":\"other\"}},{\"index\":0,\"delta\":{\"content\":"
				"\"mine\"}}]}\n\n"
				"data: "
				"{\"choices\":[{\"index\":1,\"delta\":{\"content\":\"more\"},\"finish_reason\":\"stop\"}]}"
				"\n\n" CHUNK(" too") FINISH("stop"),
				"", "mine too", FINISH_STOP },
		{ "role of a tool",
				"data: "
				"{\"choices\":[{\"index\":0,\"delta\":{\"role\":\"tool\",\"content\":\"root@host\"}}]}\n\n" FINISH(
						"stop"),
				"", "root@host", FINISH_STOP },
		{ "refusal",
				"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":null,\"refusal\":\"I will "
				"not.\"}}]}\n\n" FINISH("stop"),
				"", "I will not.", FINISH_STOP },
		{ "reasoning is not the answer",
				"data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"hm\",\"reasoning\":\"hm\","
				"\"reasoning_details\":[{\"text\":\"hm\"}],\"content\":\"so\"}}]}\n\n" FINISH("stop"),
				"", "so", FINISH_STOP },
		{ "parts of text",
				"data: "
				"{\"choices\":[{\"index\":0,\"delta\":{\"content\":[{\"type\":\"text\",\"text\":\"so\"},{\"type\":"
				"\"text\",\"text\":"
				"\" far\"}]}}]}\n\n" FINISH("stop"),
				"", "so far", FINISH_STOP },
		{ "others' members",
				"data: "
				"{\"id\":7,\"x_groq\":{\"a\":[1]},\"obfuscation\":\"zzz\",\"created\":1e400,\"choices\":[{"
				"\"index\":0,\"logprobs\":{\"a\":"
				"18446744073709551616},\"delta\":{\"content\":\"so\",\"audio\":{}}}]}\n\n" FINISH("stop"),
				"", "so", FINISH_STOP },
		{ "its own key",
				CHUNK("your key is " RIG_KEY "!") CALLS("{\"index\":0,\"id\":\"" RIG_KEY "\"," F(
						"f", "{\\\"k\\\":\\\"" RIG_KEY "\\\"}") "}") FINISH("tool_calls"),
				"********************* f {\"k\":\"*********************\"};", "your key is *********************!",
				FINISH_TOOL_CALLS },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[4096];
		struct answer a = { .bytes = text };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), REPLY_HEAD "%s" USAGE DONE, rows[i].events));
		rig_init(&r);
		rig_one(&r, &a, 1);
		if (!r.replied)
			fail_msg("%s: %s", rows[i].what, r.text);
		if (strcmp(shape_of(&r), rows[i].want) != 0)
			fail_msg("%s: %s", rows[i].what, shape_of(&r));
		if (strncmp(r.reply.content, rows[i].content, strlen(rows[i].content)) != 0 ||
				(r.reply.content[0] && !rows[i].content[0]))
			fail_msg("%s: %s", rows[i].what, r.reply.content);
		assert_int_equal(r.reply.finish, rows[i].finish);
		assert_int_equal(r.report.cost_micros, GOOD_MICROS);
		rig_close(&r);
	}
}

/* One object instead of a stream: each element of the list is a call of its own, whatever it lacks. */
static void test_whole_replies(void **state)
{
	static const struct {
		const char *body, *want, *content;
	} rows[] = {
		{ "{\"choices\":[{\"message\":{\"content\":null,\"tool_calls\":[{" F("f", "1") "},{" F(
				  "g", "2") "}]},\"finish_reason\":\"tool_calls\"}]," TALLY "}",
				"? f 1;? g 2;", "" },
		{ "{\"choices\":[{\"message\":{\"tool_calls\":[{\"id\":\"s\"," F("f", "1") "},{\"id\":\"s\"," F(
				  "g", "2") "}]},\"finish_reason\":\"tool_calls\"}]," TALLY "}",
				"s f 1;? g 2;", "" },
		{ "{\"choices\":[{\"message\":{\"tool_calls\":[{\"id\":\"s\"," F(
				  "f", "1") "},{\"id\":\"s\",\"function\":{\"arguments\":\"2\"}}]},\"finish_reason\":"
					    "\"tool_calls\"}]," TALLY "}",
				"s f 1;?  2;", "" },
		{ "{\"choices\":[{\"message\":{\"content\":\"\",\"function_call\":{\"name\":\"f\",\"arguments\":\"{}\"}},\"finish_"
		  "reason\":\"function_call\"}]," TALLY "}",
				"? f {};", "" },
		{ "{\"choices\":[{\"index\":1,\"message\":{\"content\":\"other\"},\"finish_reason\":\"stop\"},{\"index\":0,"
		  "\"message\":{\"content\":\"mine\"},"
		  "\"finish_reason\":\"stop\"}]," TALLY "}",
				"", "mine" },
		{ "{\"choices\":[{\"message\":{\"content\":\"no index\"},\"finish_reason\":\"stop\"}]," TALLY "}", "", "no index" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[2000];
		struct answer a = { .bytes = text };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), WHOLE("%s"), rows[i].body));
		rig_init(&r);
		rig_one(&r, &a, 1);
		if (!r.replied)
			fail_msg("row %zu: %s", i, r.text);
		if (strcmp(shape_of(&r), rows[i].want) != 0)
			fail_msg("row %zu: %s", i, shape_of(&r));
		assert_string_equal(r.reply.content, rows[i].content);
		assert_int_equal(r.report.cost_micros, GOOD_MICROS);
		rig_close(&r);
	}
}

/* --- what is no answer ---------------------------------------------------------------------------------------------------------
 */

#define DELTA(json) "data: {\"choices\":[{\"index\":0,\"delta\":" json "}]}\n\n"

static void test_unusable(void **state)
{
	static const struct {
		const char *events, *says;
	} rows[] = {
		{ CHUNK("so") "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":null}]}\n\n", "finish reason" },
		{ DELTA("{\"content\":5}"), "content" },
		{ DELTA("{\"content\":{}}"), "content" },
		{ DELTA("{\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"http://x/\"}}]}"), "content" },
		{ DELTA("{\"content\":[5]}"), "content" },
		{ DELTA("{\"tool_calls\":[{\"index\":0,\"id\":5}]}"), "id" },
		{ DELTA("{\"tool_calls\":[{\"index\":0,\"id\":\"a\",\"function\":{\"name\":{},\"arguments\":\"\"}}]}"), "name" },
		{ DELTA("{\"tool_calls\":[{\"index\":0,\"id\":\"a\",\"function\":{\"name\":\"f\",\"arguments\":{\"command\":\"ls\"}"
			"}}]}"),
				"arguments" },
		{ DELTA("{\"tool_calls\":[{\"index\":64,\"id\":\"a\"}]}"), "64" },
		{ DELTA("{\"tool_calls\":[{\"index\":9223372036854775807,\"id\":\"a\"}]}"), "64" },
		{ "data: [1,2]\n\n", "object" },
		{ "data: \"hello\"\n\n", "object" },
		{ "data: {\"choices\":\n\n", "JSON" },
		{ "data: {\"choices\":[],\"choices\":[]}\n\n", "JSON" },
		{ DELTA("{\"content\":\"\xff\"}"), "JSON" },
		{ DELTA("{\"content\":\"\xc0\xaf\"}"), "JSON" },
		{ DELTA("{\"content\":\"\xed\xa0\x80\"}"), "JSON" },
		{ DELTA("{\"content\":\"\xf4\x90\x80\x80\"}"), "JSON" },
		{ DELTA("{\"content\":\"\\ud800\"}"), "JSON" },
		{ DELTA("{\"content\":\"\\ud800\\ud800\"}"), "JSON" },
		{ "data: {\"error\":{\"message\":\"overloaded " RIG_KEY "\"}}\n\n",
				"broke its answer off with an error: overloaded" },
		{ "data: {\"error\":\"flat\"}\n\n", "broke its answer off with an error: flat" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		char text[2000];
		struct answer a = { .bytes = text }, all[] = { a, a, a };
		struct model_rig r;

		assert_true(text_fmt(text, sizeof(text), REPLY_HEAD "%s" DONE, rows[i].events));
		rig_init(&r);
		rig_one(&r, all, 3);
		if (!strstr(r.text, rows[i].says))
			fail_msg("row %zu: %s", i, r.replied ? r.reply.content : r.text);
		FAILED(&r, ERRCODE_MODEL_ERROR, strstr(r.text, "64") ? 1 : 2, "not usable");
		assert_int_equal(r.report.cost_micros, r.meter.usage.unmetered_model_micros);
		assert_true(r.report.cost_micros > 15000);
		rig_close(&r);
	}
}

static size_t put_text(char *at, const char *text)
{
	memcpy(at, text, strlen(text) + 1);
	return strlen(text);
}

/* A raw NUL in the stream is no JSON; nesting has its bound; a megabyte of arguments is passed on as it is. */
static void test_large_and_deep(void **state)
{
	static const char nul[] =
			REPLY_HEAD "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\0b\"}}]}\n\n" FINISH("stop") DONE;
	struct answer with_nul[] = { { .bytes = nul, .n = sizeof(nul) - 1 }, { .bytes = GOOD } };
	const size_t mib = 1024 * 1024;
	char *text = malloc(2 * mib), *at = text;
	struct answer a = { .bytes = text }, deep[2] = { a, a };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	rig_one(&r, with_nul, 2);
	assert_true(r.replied && r.report.attempts == 2);
	rig_close(&r);
	/* 1 MiB of '[' as arguments: text, never parsed here. */
	at += put_text(at, REPLY_HEAD "data: "
				      "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"a\","
				      "\"function\":{\"name\":\"f\","
				      "\"arguments\":\"");
	memset(at, '[', mib);
	at += mib;
	put_text(at, "\"}}]}}]}\n\n" FINISH("tool_calls") USAGE DONE);
	rig_init(&r);
	rig_one(&r, &a, 1);
	assert_true(r.replied);
	assert_int_equal(strlen(r.reply.calls[0].arguments), mib);
	rig_close(&r);
	/* The same as JSON of the stream itself. */
	at = text + put_text(text, REPLY_HEAD "data: {\"x\":");
	memset(at, '[', mib);
	put_text(at + mib, "\n\n" DONE);
	rig_init(&r);
	rig_one(&r, deep, 2);
	FAILED(&r, ERRCODE_MODEL_ERROR, 2, "not usable", "JSON");
	rig_close(&r);
	free(text);
}

/* The same call for ever is one call of the model each time; the run's max_model_calls ends it (test_broker_calls). The hold of a
 * conversation whose count is known is tighter, also when that count was false. */
static void test_false_count_is_no_bound_for_ever(void **state)
{
	struct answer a[] = { { .bytes = REPLY_HEAD CHUNK("a") FINISH("stop")
							      USAGE_IS("{\"prompt_tokens\":0,\"completion_tokens\":1}") DONE },
		{ .bytes = REPLY_HEAD CHUNK("b") FINISH("stop") USAGE_IS("{\"prompt_tokens\":300,\"completion_tokens\":1000}")
						DONE } };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	rig_open(&r, a, 2, NULL, false);
	rig_call(&r, "hi");
	assert_int_equal(r.report.cost_micros, 15);
	rig_call(&r, "hi");
	/* What it says now is more than what it said a hold could be: the hold, counted as the operator's loss. */
	assert_int_equal(r.report.cost_micros, r.hold);
	assert_int_equal(r.meter.over_hold, 1);
	rig_close(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_usage),
		cmocka_unit_test(test_usage_in_each_chunk),
		cmocka_unit_test(test_tool_calls),
		cmocka_unit_test(test_whole_replies),
		cmocka_unit_test(test_unusable),
		cmocka_unit_test(test_large_and_deep),
		cmocka_unit_test(test_false_count_is_no_bound_for_ever),
	};

	rig_log_start();
	return rig_log_end(cmocka_run_group_tests(tests, NULL, NULL));
}
