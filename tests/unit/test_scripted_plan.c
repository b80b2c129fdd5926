/* What the scripted provider answers: from a request's bytes to the plan and its bytes. */
/* link: controld_scripted */
#include "common/json.h"
#include "common/text.h"
#include "controld/scripted/plan.h"

#include "unit.h"

#define SAMPLE                                                                                                                     \
	"This is a sandbox test. Do these steps with the shell and report the real output, never what you expect. 1) Write a "     \
	"small "                                                                                                                   \
	"script that prints the first 15 prime numbers, run it and show the output. 2) Run `whoami` and `pwd`. 3) Try to reach "   \
	"the "                                                                                                                     \
	"internet with `curl -sS -m 8 https://example.com` (and, if curl is missing, python3 with urllib) and report the exact "   \
	"error. "                                                                                                                  \
	"4) Write a file named /tmp/proof.txt and list it. Reply in Markdown, at most 120 words: one line per step with the "      \
	"result, "                                                                                                                 \
	"then one sentence saying whether the network call succeeded."

struct ask {
	const char *prompt;
	const char *outputs[8]; /* tool outputs, NULL ends */
	size_t turns;           /* assistant messages */
	int64_t limit;
	bool no_shell, whole;
};

static void put_request(const struct ask *a, struct buf *out)
{
	struct jw w;
	size_t given = 0;

	jw_init(&w, out);
	jw_object(&w);
	jw_kstr(&w, "model", "auto");
	jw_kbool(&w, "stream", !a->whole);
	jw_kobject(&w, "stream_options");
	jw_kbool(&w, "include_usage", true);
	jw_close(&w);
	if (a->limit)
		jw_kint(&w, "max_completion_tokens", a->limit);
	if (!a->no_shell) {
		static const char tools[] = "[{\"type\":\"function\",\"function\":{\"name\":\"shell\"}}]";

		jw_key(&w, "tools");
		jw_raw(&w, tools, strlen(tools));
	}
	jw_karray(&w, "messages");
	jw_object(&w);
	jw_kstr(&w, "role", "system");
	jw_kstr(&w, "content", "you are an agent");
	jw_close(&w);
	jw_object(&w);
	jw_kstr(&w, "role", "user");
	jw_kstr(&w, "content", a->prompt);
	jw_close(&w);
	for (size_t t = 0; t < a->turns; t++) {
		jw_object(&w);
		jw_kstr(&w, "role", "assistant");
		jw_kstr(&w, "content", NULL);
		jw_close(&w);
		while (given < 8 && a->outputs[given]) {
			jw_object(&w);
			jw_kstr(&w, "role", "tool");
			jw_kstr(&w, "tool_call_id", "x");
			jw_kstr(&w, "content", a->outputs[given++]);
			jw_close(&w);
		}
	}
	jw_close(&w);
	jw_close(&w);
	assert_true(jw_end(&w));
}

static void plan(const struct ask *a, int64_t attempt, struct chat *chat, struct plan *out)
{
	struct buf b = BUF_INIT(16 * 1024 * 1024);
	struct err e;

	put_request(a, &b);
	if (chat_parse(b.data, b.len, chat, &e) != 0)
		fail_msg("%s", e.text);
	buf_free(&b);
	if (plan_make(chat, attempt, out, &e) != 0)
		fail_msg("%s", e.text);
}

static void done(struct chat *c, struct plan *p)
{
	plan_free(p);
	chat_free(c);
}

static void expect_command(const struct plan *p, size_t i, const char *command)
{
	struct json *v;
	struct err e;

	assert_true(i < p->call_count);
	assert_string_equal(p->calls[i].name, "shell");
	assert_int_equal(json_parse(p->calls[i].arguments, strlen(p->calls[i].arguments), &v, &e), 0);
	assert_string_equal(json_get_text(v, "command"), command);
	json_free(v);
}

static size_t words(const char *s)
{
	size_t n = 0;

	while (*s) {
		s += strspn(s, " \n");
		n += *s != '\0';
		s += strcspn(s, " \n");
	}
	return n;
}

static const char *const good_outputs[] = {
	"/tmp/ephemeral-run-s2TPIy/scratch\nworker\n[exit code 0]",
	"/usr/bin/curl\ncurl: (6) Could not resolve host: example.com\n[exit code 6]",
	"2 3 5 7 11 13 17 19 23 29 31 37 41 43 47\n[exit code 0]",
	"-rw-r--r-- 1 worker worker 14 Oct  7 15:02 /tmp/proof.txt\n[exit code 0]",
};

static void test_sample_pairs(void **state)
{
	struct ask a = { .prompt = SAMPLE };
	struct chat c;
	struct plan p;

	(void)state;
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 2);
	assert_null(p.text);
	expect_command(&p, 0, "pwd; whoami");
	expect_command(&p, 1, "command -v curl && curl -sS -m 8 https://example.com");
	done(&c, &p);
	a.turns = 1;
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 2);
	assert_non_null(strstr(p.calls[0].arguments,
			"printf '%s\\\\n' '#!/usr/bin/env python3' 'primes = []' 'n = 2' 'while len(primes) < 15:' ' if all("));
	expect_command(&p, 1, "printf 'sandbox proof\\n' > /tmp/proof.txt && ls -l /tmp/proof.txt");
	done(&c, &p);
}

static void test_sample_report(void **state)
{
	struct ask a = { .prompt = SAMPLE, .turns = 2 };
	struct chat c;
	struct plan p;

	(void)state;
	memcpy(a.outputs, good_outputs, sizeof(good_outputs));
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 0);
	assert_string_equal(p.text, "1. Prime script output: 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47\n"
				    "2. whoami: worker; pwd: /tmp/ephemeral-run-s2TPIy/scratch\n"
				    "3. curl error: curl: (6) Could not resolve host: example.com\n"
				    "4. /tmp/proof.txt created; ls -l: -rw-r--r-- 1 worker worker 14 Oct  7 15:02 /tmp/proof.txt\n"
				    "The network call did not succeed.");
	assert_true(words(p.text) <= 120);
	done(&c, &p);
}

/* Whatever the commands printed: nothing is said that they did not print, and the answer keeps its length. */
static void test_sample_invents_nothing(void **state)
{
	struct ask a = { .prompt = SAMPLE, .turns = 2 };
	char *long_line = calloc(1, 300001);
	struct chat c;
	struct plan p;

	(void)state;
	plan(&a, 1, &c, &p);
	assert_null(strstr(p.text, "2 3 5"));
	assert_null(strstr(p.text, "curl: ("));
	assert_null(strstr(p.text, "worker"));
	assert_non_null(strstr(p.text, "Whether the network call succeeded is not in the output."));
	done(&c, &p);

	a.outputs[0] = "[exit code 127]";
	a.outputs[1] = "/usr/bin/curl\n<!doctype html>\n[exit code 0]";
	a.outputs[2] = "Traceback\n[exit code 1]";
	a.outputs[3] = "";
	plan(&a, 1, &c, &p);
	assert_non_null(strstr(p.text, "1. Prime script failed: Traceback"));
	assert_non_null(strstr(p.text, "whoami: not in the output (exit code 127)"));
	assert_non_null(strstr(p.text, "The network call succeeded."));
	done(&c, &p);

	for (size_t i = 0; i < 300000; i++)
		long_line[i] = i % 2 ? ' ' : 'w';
	for (size_t i = 0; i < 4; i++)
		a.outputs[i] = long_line;
	plan(&a, 1, &c, &p);
	assert_true(words(p.text) <= 120);
	done(&c, &p);
	for (size_t i = 0; i < 300000; i++)
		long_line[i] = '\n';
	plan(&a, 1, &c, &p);
	assert_true(words(p.text) <= 120);
	done(&c, &p);
	free(long_line);
}

static void test_commands(void **state)
{
	struct ask a = {
		.prompt = "Look:\n```sh\nuname -a\n```\nand\n````sh\necho '```'\nid\n````\n```python\nprint(1)\n```\n  ```sh\nlast"
	};
	struct chat c;
	struct plan p;

	(void)state;
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 3);
	expect_command(&p, 0, "uname -a");
	expect_command(&p, 1, "echo '```'\nid");
	expect_command(&p, 2, "last");
	done(&c, &p);
	a.turns = 1;
	a.outputs[0] = "Linux\n[exit code 0]";
	a.outputs[1] = "```\n[exit code 0]";
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 0);
	assert_non_null(strstr(p.text, "a script, not a model"));
	assert_non_null(strstr(p.text, "```\nLinux\n[exit code 0]\n```\n"));
	assert_non_null(strstr(p.text, "````\n```\n[exit code 0]\n````\n"));
	assert_non_null(strstr(p.text, "There is no output of this command."));
	done(&c, &p);
}

static void test_no_commands(void **state)
{
	struct ask a = { .prompt = "Write a poem with `sh`." };
	struct chat c;
	struct plan p;

	(void)state;
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 0);
	assert_non_null(strstr(p.text, "a script, not a model"));
	done(&c, &p);
	a.prompt = "```sh\nid\n```";
	a.no_shell = true;
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 0);
	assert_non_null(strstr(p.text, "no shell"));
	done(&c, &p);
}

static void test_report_keeps_the_limit(void **state)
{
	struct ask a = { .prompt = "```sh\nyes\n```\n```sh\nid\n```", .turns = 1, .limit = 500 };
	char *long_text = calloc(1, 100001);
	struct chat c;
	struct plan p;

	(void)state;
	memset(long_text, 'y', 100000);
	a.outputs[0] = long_text;
	a.outputs[1] = "uid=1000(worker)\n[exit code 0]";
	plan(&a, 1, &c, &p);
	assert_string_equal(p.finish, "");
	assert_true(strlen(p.text) <= 2000);
	assert_true(p.completion_tokens <= 500);
	assert_non_null(strstr(p.text, "bytes are left out here"));
	assert_non_null(strstr(p.text, "uid=1000(worker)\n[exit code 0]"));
	done(&c, &p);
	a.limit = 20;
	plan(&a, 1, &c, &p);
	assert_string_equal(p.finish, "length");
	assert_int_equal(p.completion_tokens, 20);
	done(&c, &p);
	free(long_text);
}

static void test_turns(void **state)
{
	struct ask a = {
		.prompt = "x\n```turns\n[{\"tool_calls\":[{\"name\":\"shell\",\"arguments\":{\"command\":\"id\",\"n\":[1,\"{{tool:"
			  "1}}\"]}},"
			  "{\"name\":\"f\",\"arguments\":\"not {json\",\"id\":\"mine\"}],\"usage\":null},"
			  "{\"text\":\"<{{tool:2}}|{{tool:1}}|{{tool:9}}|{{tool:x}}>\",\"finish_reason\":\"length\",\"usage\":{"
			  "\"prompt_tokens\":7}}]\n```\n",
	};
	struct chat c;
	struct plan p;

	(void)state;
	plan(&a, 1, &c, &p);
	assert_int_equal(p.call_count, 2);
	assert_string_equal(p.calls[0].arguments, "{\"command\":\"id\",\"n\":[1,\"[there is no tool output 1]\"]}");
	assert_string_equal(p.calls[0].id, "call_1_1");
	assert_string_equal(p.calls[1].arguments, "not {json");
	assert_string_equal(p.calls[1].id, "mine");
	assert_true(p.no_usage);
	done(&c, &p);
	a.turns = 1;
	a.outputs[0] = "one";
	a.outputs[1] = "two \"quoted\"";
	plan(&a, 1, &c, &p);
	assert_string_equal(p.text, "<two \"quoted\"|one|[there is no tool output 9]|{{tool:x}}>");
	assert_string_equal(p.finish, "length");
	assert_string_equal(p.usage, "{\"prompt_tokens\":7}");
	done(&c, &p);
	a.turns = 2;
	plan(&a, 1, &c, &p);
	assert_non_null(strstr(p.text, "has 2 turns"));
	done(&c, &p);
}

static void test_turns_http(void **state)
{
	struct ask a = {
		.prompt = "```turns\n[{\"http\":{\"status\":429,\"headers\":{\"Retry-After\":\"1\"},\"body\":{\"error\":{}},"
			  "\"attempts\":[1,3]},\"text\":\"ok\","
			  "\"delay_ms\":5,\"chunk_delay_ms\":2,\"cut_after_bytes\":10,\"stream\":false,\"raw\":\"x\"}]\n```",
	};
	struct chat c;
	struct plan p;

	(void)state;
	for (int64_t attempt = 1; attempt <= 3; attempt++) {
		plan(&a, attempt, &c, &p);
		assert_int_equal(p.http_status, attempt == 2 ? 0 : 429);
		assert_int_equal(p.header_count, attempt == 2 ? 0 : 1);
		assert_int_equal(p.delay_ms, 5);
		assert_int_equal(p.chunk_delay_ms, 2);
		assert_int_equal(p.cut_after, 10);
		assert_false(p.stream);
		assert_string_equal(p.raw, "x");
		done(&c, &p);
	}
	assert_int_equal(plan_attempt("run_0-3-2"), 2);
	assert_int_equal(plan_attempt("run_0-3-x"), 1);
	assert_int_equal(plan_attempt(""), 1);
	assert_int_equal(plan_attempt(NULL), 1);
}

static void test_turns_wrong(void **state)
{
	static const char *const wrong[] = { "[", "{}", "[{\"txet\":\"a\"}]", "[{\"delay_ms\":-1}]", "[{\"tool_calls\":[{}]}]",
		"[{\"http\":{}}]", "[{\"http\":{\"status\":42}}]", "[{\"http\":{\"status\":200,\"headers\":{\"a b\":\"c\"}}}]",
		"[7]" };
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		char prompt[256];
		struct ask a = { .prompt = prompt };
		struct buf b = BUF_INIT(65536);
		struct chat c;
		struct plan p;

		assert_true(text_fmt(prompt, sizeof(prompt), "```turns\n%s\n```", wrong[i]));
		put_request(&a, &b);
		assert_int_equal(chat_parse(b.data, b.len, &c, &e), 0);
		assert_int_equal(plan_make(&c, 1, &p, &e), -1);
		assert_int_equal(e.code, ERR_INVALID);
		assert_non_null(strstr(e.text, "turns"));
		chat_free(&c);
		buf_free(&b);
	}
}

static void test_bad_requests(void **state)
{
	static const char parts[] = "{\"model\":\"auto\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":"
				    "\"a\"},{\"text\":\"b\"}]}]}";
	static const char *const bad[] = { "", "[]", "{}", "{\"model\":\"auto\"}", "{\"model\":\"auto\",\"messages\":[]}",
		"{\"model\":\"auto\",\"messages\":[7]}",
		"{\"model\":\"auto\",\"messages\":[{\"role\":\"system\",\"content\":\"x\"}]}",
		"{\"model\":\"gpt\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
		"{\"model\":\"auto\",\"max_tokens\":0,\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}" };
	struct chat c;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_int_equal(chat_parse(bad[i], strlen(bad[i]), &c, &e), -1);
	assert_int_equal(chat_parse(parts, strlen(parts), &c, &e), 0);
	assert_string_equal(c.prompt, "ab");
	chat_free(&c);
}

/* --- bytes ------------------------------------------------------------------------------------------------------------------- */

/* Joins the deltas of a stream; returns what it says of itself. */
struct joined {
	struct buf text, arguments[2];
	size_t calls;
	char finish[33];
	int64_t prompt_tokens, completion_tokens;
	bool done;
};

static void join_event(struct joined *j, const char *data, size_t n)
{
	const struct json *choice, *delta, *call;
	struct json *v;
	struct err e;

	if (n == 6 && memcmp(data, "[DONE]", 6) == 0) {
		j->done = true;
		return;
	}
	if (json_parse(data, n, &v, &e) != 0)
		fail_msg("%s", e.text);
	assert_string_equal(json_get_text(v, "object"), "chat.completion.chunk");
	assert_string_equal(json_get_text(v, "system_fingerprint"), PLAN_IS_A_SCRIPT);
	choice = json_at(json_get(v, "choices"), 0);
	if (json_len(json_get(v, "choices")) == 0) {
		j->prompt_tokens = json_get_int(json_get(v, "usage"), "prompt_tokens", -1);
		j->completion_tokens = json_get_int(json_get(v, "usage"), "completion_tokens", -1);
		json_free(v);
		return;
	}
	delta = json_get(choice, "delta");
	if (json_get_text(delta, "content"))
		buf_add_str(&j->text, json_get_text(delta, "content"));
	if (json_get(delta, "tool_calls")) {
		call = json_at(json_get(delta, "tool_calls"), 0);
		buf_add_str(&j->arguments[json_get_int(call, "index", 0)], json_get_text(json_get(call, "function"), "arguments"));
		j->calls += json_get_text(call, "id") != NULL;
	}
	if (json_get_text(choice, "finish_reason"))
		assert_true(text_copy(j->finish, sizeof(j->finish), json_get_text(choice, "finish_reason")));
	json_free(v);
}

static void join(const struct chat *c, const struct plan *p, struct joined *j)
{
	struct render r;
	struct err e;

	memset(j, 0, sizeof(*j));
	buf_init(&j->text, 1 << 24);
	buf_init(&j->arguments[0], 1 << 24);
	buf_init(&j->arguments[1], 1 << 24);
	assert_int_equal(render_reply(c, p, "run_1-1-1", 1, &r, &e), 0);
	for (size_t i = 0; i < r.count; i++) {
		const char *s = (const char *)r.chunks[i].data;
		size_t n = r.chunks[i].len;

		assert_true(n > 8 && memcmp(s, "data: ", 6) == 0 && s[n - 1] == '\n' && s[n - 2] == '\n');
		join_event(j, s + 6, n - 8);
	}
	render_free(&r);
}

static void free_joined(struct joined *j)
{
	buf_free(&j->text);
	buf_free(&j->arguments[0]);
	buf_free(&j->arguments[1]);
}

static void test_stream(void **state)
{
	struct ask a = { .prompt = SAMPLE };
	struct chat c;
	struct plan p;
	struct joined j;

	(void)state;
	plan(&a, 1, &c, &p);
	join(&c, &p, &j);
	assert_int_equal(j.calls, 2);
	assert_string_equal(buf_cstr(&j.arguments[0]), p.calls[0].arguments);
	assert_string_equal(buf_cstr(&j.arguments[1]), p.calls[1].arguments);
	assert_string_equal(j.finish, "tool_calls");
	assert_int_equal(j.prompt_tokens, c.prompt_tokens);
	assert_int_equal(j.completion_tokens, p.completion_tokens);
	assert_true(j.done);
	free_joined(&j);
	done(&c, &p);

	a.prompt = "```turns\n[{\"text\":\"caf\\u00e9 \\u20ac \\ud83d\\ude00 and so on, over several pieces of text with "
		   "\\\"quotes\\\" \\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\"}]\n```";
	plan(&a, 1, &c, &p);
	join(&c, &p, &j);
	assert_string_equal(buf_cstr(&j.text), p.text);
	assert_string_equal(j.finish, "stop");
	free_joined(&j);
	done(&c, &p);
}

static void test_whole(void **state)
{
	struct ask a = { .prompt = SAMPLE, .whole = true };
	const struct json *message;
	struct render r;
	struct chat c;
	struct plan p;
	struct json *v;
	struct err e;

	(void)state;
	plan(&a, 1, &c, &p);
	assert_int_equal(render_reply(&c, &p, NULL, 1, &r, &e), 0);
	assert_int_equal(r.count, 1);
	assert_int_equal(json_parse((const char *)r.chunks[0].data, r.chunks[0].len, &v, &e), 0);
	message = json_get(json_at(json_get(v, "choices"), 0), "message");
	assert_int_equal(json_len(json_get(message, "tool_calls")), 2);
	assert_int_equal(json_type(json_get(message, "content")), JSON_NULL);
	assert_int_equal(json_get_int(json_get(v, "usage"), "total_tokens", 0), c.prompt_tokens + p.completion_tokens);
	json_free(v);
	render_free(&r);
	done(&c, &p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sample_pairs),
		cmocka_unit_test(test_sample_report),
		cmocka_unit_test(test_sample_invents_nothing),
		cmocka_unit_test(test_commands),
		cmocka_unit_test(test_no_commands),
		cmocka_unit_test(test_report_keeps_the_limit),
		cmocka_unit_test(test_turns),
		cmocka_unit_test(test_turns_http),
		cmocka_unit_test(test_turns_wrong),
		cmocka_unit_test(test_bad_requests),
		cmocka_unit_test(test_stream),
		cmocka_unit_test(test_whole),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
