/* link: ephproto EPH::sodium */
/* sources: controld/api/run_render.c */
/* A run as clients see it: every field in each state, what a cost is before it is final, what lists leave out, mended output. */
#include "controld/api/run_render.h"

#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define RUN "run_0123456789abcdef0123456789abcdef"

static struct store_run sample(void)
{
	struct store_run run = {
		.id = RUN,
		.status = "queued",
		.error_code = "",
		.error_message = "",
		.cap_micros = 40000,
		.reserved_micros = 40000,
		.created_at_ms = 1700000000123,
		.request_json = "{\"prompt\":\"p\"}",
		.prompt = "p",
		.prompt_len = 1,
		.model = "scripted/auto",
		.size = "standard",
		.timeout_s = 120,
		.max_model_calls = 100,
		.shell = true,
		.waiting_reason = "capacity",
		.waiting_since_ms = 1700000000123,
		.price = { .run_fee = 100, .compute = 200000 },
	};

	return run;
}

static struct json *rendered(const struct store_run *run, bool in_list, bool hide_node)
{
	struct run_view view = { .public_url = "http://localhost:8080", .hide_node = hide_node, .in_list = in_list };
	struct buf out = BUF_INIT(16 * 1024 * 1024);
	struct json *doc;
	struct jw w;
	struct err e;

	jw_init(&w, &out);
	run_render(&w, run, &view);
	assert_true(jw_end(&w));
	if (json_parse((const char *)out.data, out.len, &doc, &e) == -1)
		fail_msg("%s", e.text);
	buf_free(&out);
	return doc;
}

static int64_t parts(const struct json *doc)
{
	const struct json *c = json_get(doc, "cost");

	return json_get_int(c, "run_fee_micros", -1) + json_get_int(c, "compute_micros", -1) + json_get_int(c, "model_micros", -1) +
	       json_get_int(c, "web_micros", -1);
}

static void test_fields(void **state)
{
	static const char *const all[] = { "id", "status", "output", "error", "cost_micros", "cost_final", "cost_note",
		"billing_pending", "cost", "usage", "reserved_micros", "released_micros", "created_at", "started_at", "ended_at",
		"expires_at", "request", "isolation", "node", "url", "waiting_for", "cancel_requested_at", "model", "workflow",
		"web", "shell", "timeout_seconds", "max_cost_micros", "size", "metadata", "files", "prompt", "max_model_calls",
		"zero_data_retention" };
	struct store_run run = sample();
	struct json *doc = rendered(&run, false, false);
	size_t i;

	(void)state;
	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		if (!json_get(doc, all[i]))
			fail_msg("%s is missing", all[i]);
	assert_int_equal(json_len(doc), sizeof(all) / sizeof(all[0]));
	assert_string_equal(json_get_text(doc, "created_at"), "2023-11-14T22:13:20.123Z");
	assert_string_equal(json_get_text(doc, "url"), "http://localhost:8080/v1/runs/" RUN);
	assert_string_equal(json_get_text(json_get(doc, "waiting_for"), "reason"), "capacity");
	assert_int_equal(json_type(json_get(doc, "started_at")), JSON_NULL);
	assert_int_equal(json_type(json_get(doc, "error")), JSON_NULL);
	assert_int_equal(json_type(json_get(doc, "node")), JSON_NULL);
	assert_string_equal(json_get_text(json_get(doc, "request"), "prompt"), "p");
	json_free(doc);
}

static void test_cost(void **state)
{
	struct store_run run = sample();
	struct json *doc = rendered(&run, false, false);

	(void)state;
	/* Waiting or running: the whole reservation, which the final cost cannot pass. */
	assert_int_equal(json_get_int(doc, "cost_micros", -1), 40000);
	assert_int_equal(parts(doc), 40000);
	assert_false(json_get_bool(doc, "cost_final", true));
	assert_false(json_get_bool(doc, "billing_pending", true));
	assert_int_equal(json_type(json_get(doc, "cost_note")), JSON_STRING);
	json_free(doc);
	/* Parts never pass the reservation, however high the rates are. */
	run.price.compute = INT64_MAX;
	run.price.run_fee = 50000;
	doc = rendered(&run, false, false);
	assert_int_equal(parts(doc), 40000);
	json_free(doc);
	/* Ended, not settled. */
	run = sample();
	run.ended = true;
	memcpy(run.status, "succeeded", 10);
	run.waiting_reason[0] = '\0';
	run.cost = (struct cost){ .run_fee = 100, .compute = 2000, .model = 300, .total = 2400 };
	doc = rendered(&run, false, false);
	assert_int_equal(json_get_int(doc, "cost_micros", -1), 2400);
	assert_int_equal(parts(doc), 2400);
	assert_false(json_get_bool(doc, "cost_final", true));
	assert_true(json_get_bool(doc, "billing_pending", false));
	assert_int_equal(json_type(json_get(doc, "waiting_for")), JSON_NULL);
	json_free(doc);
	/* Settled. */
	run.settled = true;
	run.released_micros = 37600;
	doc = rendered(&run, false, false);
	assert_true(json_get_bool(doc, "cost_final", false));
	assert_false(json_get_bool(doc, "billing_pending", true));
	assert_int_equal(json_type(json_get(doc, "cost_note")), JSON_NULL);
	assert_int_equal(json_get_int(doc, "released_micros", -1), 37600);
	json_free(doc);
}

static void test_list(void **state)
{
	struct store_run run = sample();
	struct buf prompt = BUF_INIT(65536);
	struct json *doc;
	size_t i;

	(void)state;
	for (i = 0; i < 201; i++)
		buf_add_str(&prompt, "\xe2\x82\xac");
	run.prompt = (const char *)prompt.data;
	run.prompt_len = prompt.len;
	doc = rendered(&run, true, false);
	assert_int_equal(json_len(json_get(doc, "prompt")), 600);
	assert_null(json_get(doc, "output"));
	assert_null(json_get(doc, "files"));
	assert_null(json_get(doc, "request"));
	json_free(doc);
	run.prompt_len = 600;
	doc = rendered(&run, true, false);
	assert_int_equal(json_len(json_get(doc, "prompt")), 600);
	json_free(doc);
	buf_free(&prompt);
}

static void test_error_and_node(void **state)
{
	struct store_run run = sample();
	struct json *doc;

	(void)state;
	run.error_code = "budget_exceeded";
	memcpy(run.node_id, "node_1", 7);
	memcpy(run.node_name, "alpha", 6);
	doc = rendered(&run, false, false);
	assert_string_equal(json_get_text(json_get(doc, "error"), "message"), errcode_title(ERRCODE_BUDGET_EXCEEDED));
	assert_string_equal(json_get_text(json_get(doc, "error"), "remedy"), errcode_remedy(ERRCODE_BUDGET_EXCEEDED));
	assert_string_equal(json_get_text(doc, "node"), "alpha");
	json_free(doc);
	run.error_code = "some_newer_code";
	run.error_message = "said by a newer program";
	doc = rendered(&run, false, true);
	assert_string_equal(json_get_text(json_get(doc, "error"), "code"), "some_newer_code");
	assert_string_equal(json_get_text(json_get(doc, "error"), "message"), "said by a newer program");
	assert_int_equal(json_type(json_get(doc, "node")), JSON_NULL);
	json_free(doc);
}

static void test_output(void **state)
{
	static const struct {
		const char *bytes;
		size_t n;
		const char *shown;
	} outputs[] = {
		{ "", 0, "" },
		{ "plain \xe2\x82\xac", 9, "plain \xe2\x82\xac" },
		{ "a\xff"
		  "b",
				3,
				"a\xef\xbf\xbd"
				"b" },
		{ "\xe2\x82", 2, "\xef\xbf\xbd\xef\xbf\xbd" },
		{ "x\0y", 3, "x\xef\xbf\xbdy" },
		{ "\xed\xa0\x80!", 4, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd!" },
	};
	struct store_run run = sample();
	struct json *doc;
	size_t i;

	(void)state;
	run.has_output = true;
	for (i = 0; i < sizeof(outputs) / sizeof(outputs[0]); i++) {
		run.output = (const uint8_t *)outputs[i].bytes;
		run.output_len = outputs[i].n;
		doc = rendered(&run, false, false);
		assert_string_equal(json_get_text(doc, "output"), outputs[i].shown);
		json_free(doc);
	}
	/* No bytes at all, but an output. */
	run.output = NULL;
	run.output_len = 0;
	doc = rendered(&run, false, false);
	assert_string_equal(json_get_text(doc, "output"), "");
	json_free(doc);
}

static void test_usage(void **state)
{
	struct store_run run = sample();
	struct json *doc;

	(void)state;
	run.usage = (struct usage){
		.model_calls = 3, .input_tokens = 5000, .cached_input_tokens = 4000, .output_tokens = 214, .compute_ms = 16000
	};
	doc = rendered(&run, false, false);
	assert_int_equal(json_get_int(json_get(doc, "usage"), "total_tokens", -1), 5214);
	assert_int_equal(json_get_int(json_get(doc, "usage"), "cached_input_tokens", -1), 4000);
	json_free(doc);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_fields),
		cmocka_unit_test(test_cost),
		cmocka_unit_test(test_list),
		cmocka_unit_test(test_error_and_node),
		cmocka_unit_test(test_output),
		cmocka_unit_test(test_usage),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
