/* The command line: options, verbs, near names, the request that they make, URLs, raw bytes of answers. */
/* link: ephcli */
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/raw.h"
#include "cli/request.h"
#include "cli/saved.h"

#include "common/text.h"

#include "unit.h"

#define ARGV_MAX 16

/* Splits at '|' into argv; text is changed. */
static int split(char *text, char **argv)
{
	int n = 0;

	if (*text == '\0')
		return 0;
	for (char *p = text;; p++) {
		argv[n++] = p;
		p = strchr(p, '|');
		if (p == NULL || n == ARGV_MAX)
			return n;
		*p = '\0';
	}
}

static const struct verb *verb_of(const char *name)
{
	for (size_t i = 0; i < VERBS_COUNT; i++)
		if (strcmp(VERBS[i].name, name) == 0)
			return &VERBS[i];
	return NULL;
}

static int parse(const char *line, char *copy, struct args *out, struct err *e)
{
	const struct verb *run = verb_of("run");
	static char *argv[ARGV_MAX];

	assert_true(text_copy(copy, 512, line));
	return args_parse(run->options, run->option_count, split(copy, argv), argv, out, e);
}

static void test_options(void **state)
{
	char copy[512];
	struct args a;
	struct err e;

	(void)state;
	assert_int_equal(parse("hello|--shell|--metadata|a=b|--metadata=c=d|--wait|--json", copy, &a, &e), 0);
	assert_int_equal(a.word_count, 1);
	assert_string_equal(a.words[0], "hello");
	assert_true(args_flag(&a, "shell") && args_flag(&a, "wait") && args_flag(&a, "json"));
	assert_string_equal(args_list(&a, "metadata", 1), "c=d");
	assert_null(args_list(&a, "metadata", 2));
	assert_int_equal(parse("--|--shell", copy, &a, &e), 0);
	assert_string_equal(a.words[0], "--shell");
	assert_int_equal(parse("-|--timeout|5", copy, &a, &e), 0);
	assert_string_equal(a.words[0], "-");
}

static void test_refused(void **state)
{
	static const char *const lines[][2] = {
		{ "--shel", "unknown option --shel; did you mean --shell?" },
		{ "--tiemout|5", "unknown option --tiemout; did you mean --timeout?" },
		{ "--xyzzy", "unknown option --xyzzy" },
		{ "--timeout", "--timeout needs a value: --timeout SECONDS" },
		{ "--shell=1", "--shell takes no value" },
		{ "--model|a|--model|b", "--model is given twice" },
		{ "-x", "unknown option -x; options have two dashes" },
	};
	char copy[512];
	struct args a;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
		assert_int_equal(parse(lines[i][0], copy, &a, &e), -1);
		assert_string_equal(e.text, lines[i][1]);
	}
}

static void test_verbs(void **state)
{
	static const struct {
		const char *line, *verb; /* NULL: none */
		int used;
		const char *text;
	} cases[] = {
		{ "run|x", "run", 1, "" },
		{ "admin|node|list|--json", "admin node list", 3, "" },
		{ "admin|nod|list", NULL, 0, "did you mean \"admin node list\"?" },
		{ "rnu", NULL, 0, "did you mean \"run\"?" },
		{ "statsu", NULL, 0, "did you mean \"status\"?" },
		{ "frobnicate", NULL, 0, "`ephemeral help` lists them" },
		{ "admin", NULL, 0, "admin needs a verb" },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		char copy[512], *argv[ARGV_MAX];
		const struct verb *v;
		struct err e;
		int used;

		assert_true(text_copy(copy, sizeof copy, cases[i].line));
		v = verb_find(split(copy, argv), argv, &used, &e);
		if (cases[i].verb == NULL) {
			assert_null(v);
			assert_non_null(strstr(e.text, cases[i].text));
			continue;
		}
		assert_non_null(v);
		assert_string_equal(v->name, cases[i].verb);
		assert_int_equal(used, cases[i].used);
	}
}

static void test_table(void **state)
{
	(void)state;
	for (size_t i = 0; i < VERBS_COUNT; i++) {
		assert_non_null(VERBS[i].run);
		assert_true(VERBS[i].words_min <= VERBS[i].words_max && VERBS[i].words_max <= ARGS_WORDS_MAX);
		for (size_t k = 0; k < VERBS[i].option_count; k++)
			assert_true((VERBS[i].options[k].kind == OPT_FLAG) == (VERBS[i].options[k].value == NULL));
	}
}

static void body_of(const char *line, const char *wanted)
{
	struct buf body = BUF_INIT(REQUEST_BODY_MAX);
	struct request_permissions p;
	char copy[512];
	struct args a;
	struct err e;

	assert_int_equal(parse(line, copy, &a, &e), 0);
	if (request_build(&a, &body, &p, &e) != 0)
		assert_string_equal(e.text, wanted);
	else
		assert_string_equal(buf_cstr(&body), wanted);
	buf_free(&body);
}

static void test_request(void **state)
{
	(void)state;
	body_of("hi|--shell|--max-cost|0.04|--timeout|120",
			"{\"prompt\":\"hi\",\"shell\":true,\"timeout_seconds\":120,\"max_cost_micros\":40000}");
	body_of("hi|--allow-domain|a.example|--allow-domain|*.b.example",
			"{\"prompt\":\"hi\",\"web\":{\"allow_domains\":[\"a.example\",\"*.b.example\"]}}");
	body_of("hi|--metadata|k=v=w|--size|small", "{\"prompt\":\"hi\",\"size\":\"small\",\"metadata\":{\"k\":\"v=w\"}}");
	body_of("hi|--metadata|kv", "--metadata kv: it must be KEY=VALUE");
	body_of("hi|--metadata|k=1|--metadata|k=2", "--metadata k is given twice");
	body_of("hi|--max-cost|1|--max-cost-micros|5", "--max-cost and --max-cost-micros say the same: give one");
	body_of("", "what shall the agent do? Give a PROMPT (- reads it from standard input) or --request FILE");
	body_of("hi|--request|/nonexistent/x.json", "/nonexistent/x.json: No such file or directory");
}

static void test_urls(void **state)
{
	static const char *const good[][2] = {
		{ "HTTP://LocalHost:8080/", "http://localhost:8080" },
		{ "https://a.example/Sub/", "https://a.example/Sub" },
		{ "http://[::1]:80", "http://[::1]:80" },
	};
	static const char *const bad[] = { "", "a.example", "ftp://a", "http://", "https:///x", "http://u:p@a", "http://a?x",
		"http://a b", "http://a\n" };
	char out[SAVED_URL_MAX];
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
		assert_int_equal(saved_url(good[i][0], out, &e), 0);
		assert_string_equal(out, good[i][1]);
	}
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
		assert_int_equal(saved_url(bad[i], out, &e), -1);
}

static bool join(void *arg, const char *bytes, size_t n)
{
	struct buf *b = arg;

	return buf_add(b, bytes, n) && buf_add_char(b, ';');
}

static void test_raw(void **state)
{
	static const char *const cases[][2] = {
		{ "{\"data\":[{\"a\":[1,2]} , {\"b\":\"]}\\\"\"}, 3,\"x\",[ ] ],\"next_cursor\":null}",
				"{\"a\":[1,2]};{\"b\":\"]}\\\"\"};3;\"x\";[ ];" },
		{ " { \"x\" : {\"data\":[9]}, \"data\" : [ 1.50 ] } ", "1.50;" },
		{ "{\"data\":[]}", "" },
		{ "{\"data\":7}", "" },
		{ "[]", "" },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		struct buf b = BUF_INIT(4096);

		(void)raw_member_array(cases[i][0], strlen(cases[i][0]), "data", join, &b);
		assert_string_equal(buf_cstr(&b), cases[i][1]);
		buf_free(&b);
		/* A cut text never makes it read past its end (ASan watches). */
		for (size_t n = 0; n < strlen(cases[i][0]); n++) {
			char *copy = malloc(n > 0 ? n : 1);

			assert_non_null(copy);
			memcpy(copy, cases[i][0], n);
			(void)raw_member_array(copy, n, "data", join, &b);
			free(copy);
			buf_free(&b);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_options),
		cmocka_unit_test(test_refused),
		cmocka_unit_test(test_verbs),
		cmocka_unit_test(test_table),
		cmocka_unit_test(test_request),
		cmocka_unit_test(test_urls),
		cmocka_unit_test(test_raw),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
