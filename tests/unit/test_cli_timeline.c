/* The timeline's lines: the sample's page row by row, what a hostile guest may print, cuts to the width. */
/* link: ephcli */
#include "cli/timeline.h"

#include "common/text.h"

#include "unit.h"

static const struct timeline SHORT = { .width = 112 }, FULL = { .width = 112, .full = true };

/* The event with this type and data at 2.42 s as text; the caller frees. */
static char *render(const struct timeline *t, const char *type, const char *data)
{
	struct buf text = BUF_INIT(65536), out = BUF_INIT(65536);
	struct json *event = NULL;
	struct err e;

	assert_true(buf_printf(&text,
			"{\"run_id\":\"r\",\"seq\":1,\"at\":\"x\",\"t\":2.420,\"source\":\"host\",\"type\":\"%s\",\"data\":%s}",
			type, data));
	assert_int_equal(json_parse((const char *)text.data, text.len, &event, &e), 0);
	timeline_event(t, event, &out);
	assert_false(out.failed);
	json_free(event);
	buf_free(&text);
	return buf_steal(&out, NULL);
}

static void expect(const struct timeline *t, const char *type, const char *data, const char *wanted)
{
	char *got = render(t, type, data);

	assert_string_equal(got != NULL ? got : "", wanted);
	free(got);
}

static void test_sample_page(void **state)
{
	(void)state;
	expect(&SHORT, "run.queued", "{\"reserved_micros\":40000}", "  2.42  Queued       budget $0.04 reserved\n");
	expect(&SHORT, "microvm.ready", "{\"boot_ms\":1,\"isolation\":\"kvm\"}", "  2.42  MicroVM      microVM ready\n");
	expect(&SHORT, "worker.started", "{\"shell\":true,\"web\":false,\"connections\":[]}",
			"  2.42  MicroVM      worker started · shell on · web off\n");
	expect(&SHORT, "shell.started", "{\"call_id\":\"a\",\"command\":\"pwd; whoami\"}", "  2.42  Shell        $ pwd; whoami\n");
	expect(&SHORT, "microvm.destroyed", "{\"reason\":\"result\"}", "  2.42  MicroVM      microVM destroyed\n");
	expect(&SHORT, "run.succeeded", "{\"usage\":{\"model_calls\":3,\"input_tokens\":5000,\"output_tokens\":214}}",
			"  2.42  Succeeded    3 model calls, 5,214 tokens\n");
	expect(&SHORT, "run.settled", "{\"charged_micros\":3530,\"released_micros\":36470}",
			"  2.42  Worker destroyed  $0.00353 charged, $0.03647 released\n");
}

static void test_short_form_leaves_out(void **state)
{
	static const char *const types[] = { "run.claimed", "model.call", "shell.output", "shell.exited", "worker.note" };

	(void)state;
	for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
		expect(&SHORT, types[i], "{\"text\":\"x\"}", "");
}

static void test_full_form(void **state)
{
	(void)state;
	expect(&FULL, "shell.exited", "{\"exit_code\":6,\"duration_ms\":123,\"cut_bytes\":0}",
			"  2.42  Shell        exit 6 in 0.12 s\n");
	expect(&FULL, "shell.exited", "{\"signal\":9,\"duration_ms\":5,\"cut_bytes\":7,\"timed_out\":true}",
			"  2.42  Shell        stopped at its time limit · ended by signal 9 in 0.00 s · 7 bytes of output not "
			"kept\n");
	expect(&FULL, "shell.output", "{\"stream\":\"stdout\",\"text\":\"a\\nb\\n\"}",
			"                     │ a\n                     │ b\n");
	expect(&FULL, "shell.output", "{\"stream\":\"stdout\",\"base64\":\"/w==\"}", "                     │ \\xff\n");
	expect(&FULL, "shell.output", "{\"stream\":\"stdout\",\"base64\":\"?\"}",
			"                     │ (output that is no base64)\n");
}

static void test_class_and_jail_are_said(void **state)
{
	(void)state;
	expect(&SHORT, "microvm.ready", "{\"isolation\":\"emulated\"}", "  2.42  MicroVM      microVM ready · emulated\n");
	expect(&SHORT, "microvm.ready", "{\"isolation\":\"kvm\",\"jail\":\"none\"}",
			"  2.42  MicroVM      microVM ready · WITHOUT JAIL\n");
}

static void test_ends(void **state)
{
	(void)state;
	expect(&SHORT, "run.failed",
			"{\"error\":{\"code\":\"vm_start_failed\",\"message\":\"no VMM\",\"remedy\":\"Mend "
			"it.\"},\"usage\":{\"model_calls\":0}}",
			"  2.42  Failed       vm_start_failed: no VMM\n                     Mend it.\n");
	expect(&SHORT, "run.timed_out", "{\"error\":{\"code\":\"timed_out\"},\"usage\":{\"model_calls\":1,\"total_tokens\":12}}",
			"  2.42  Timed out    timed_out\n                     1 model call, 12 tokens\n");
	expect(&SHORT, "run.never_heard_of", "{}", "  2.42  Event        run.never_heard_of\n");
	expect(&SHORT, "run.failed", "{}", "  2.42  Failed       \n");
}

/* Nothing that a guest printed reaches the terminal raw. */
static void test_hostile_text(void **state)
{
	static const char *const types[] = { "shell.started", "shell.output", "worker.note", "denied", "tool.called", "web.request",
		"run.failed" };
	static const char data[] = "{\"command\":\"\\u001b[2J\\u009b31m\\u202e\\u0007\\r\",\"text\":\"\\u001b]0;"
				   "x\\u0007\\u2066\\rx\",\"what\":\"\\u001bc\",\"rule\":\"\\u001b\","
				   "\"tool\":\"\\u001b\",\"path\":\"\\u001b\",\"error\":{\"code\":\"\\u001b\",\"message\":"
				   "\"\\u001b\",\"remedy\":\"\\u001b\"},"
				   "\"host\":\"\\u001b\",\"method\":\"\\u001b\",\"status\":\"\\u001b\"}";

	(void)state;
	for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
		char *got = render(&FULL, types[i], data);

		assert_non_null(got);
		for (const char *p = got; *p != '\0'; p++)
			assert_true(*p == '\n' || (unsigned char)*p >= ' ');
		assert_null(strstr(got, "\xc2\x9b"));
		assert_null(strstr(got, "\xe2\x80\xae"));
		assert_null(strstr(got, "\xe2\x81\xa6"));
		free(got);
	}
}

static void test_width(void **state)
{
	struct timeline narrow = { .width = 40 };
	char *got;

	(void)state;
	expect(&narrow, "shell.started", "{\"command\":\"0123456789012345678901234567890123456789\"}",
			"  2.42  Shell        $ 0123456789012345…\n");
	got = render(&narrow, "shell.started", "{\"command\":\"ééééééééééééééééééééééééééé\\nü\"}");
	assert_non_null(strstr(got, "é…\n"));
	free(got);
	expect(&narrow, "run.failed", "{\"error\":{\"code\":\"vm_start_failed\",\"message\":\"0123456789 0123456789 0123456789\"}}",
			"  2.42  Failed       vm_start_failed: 0123456789 0123456789 0123456789\n");
	expect(&SHORT, "shell.started", "{\"command\":\"a\\nb\\tc\\n\"}", "  2.42  Shell        $ a ↵ b c\n");
}

static void test_wrong_types(void **state)
{
	static const char *const types[] = { "run.queued", "run.claimed", "run.requeued", "microvm.ready", "worker.started",
		"model.call", "shell.started", "shell.output", "shell.exited", "tool.called", "worker.note", "connection.call",
		"web.request", "denied", "events.truncated", "microvm.destroyed", "run.succeeded", "run.failed", "run.settled" };
	static const char *const data[] = { "{}", "[]", "1", "null",
		"{\"command\":7,\"text\":[],\"base64\":{},\"usage\":3,\"error\":\"x\",\"web\":\"yes\",\"jail\":1}" };

	(void)state;
	for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
		for (size_t k = 0; k < sizeof data / sizeof data[0]; k++)
			free(render(&FULL, types[i], data[k]));
}

static void test_parts_and_numbers(void **state)
{
	struct buf b = BUF_INIT(256);
	struct json *v = NULL;
	struct err e;
	char text[32];
	static const char parts[] = "{\"run_fee_micros\":0,\"compute_micros\":3200,\"model_micros\":330,\"web_micros\":0}";

	(void)state;
	assert_int_equal(json_parse(parts, sizeof parts - 1, &v, &e), 0);
	timeline_parts(v, &b);
	assert_string_equal(buf_cstr(&b), "Model $0.00033 · Web $0.00 · Compute $0.0032");
	json_free(v);
	buf_free(&b);
	timeline_number(0, text);
	assert_string_equal(text, "0");
	timeline_number(999, text);
	assert_string_equal(text, "999");
	timeline_number(INT64_MAX, text);
	assert_string_equal(text, "9,223,372,036,854,775,807");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sample_page),
		cmocka_unit_test(test_short_form_leaves_out),
		cmocka_unit_test(test_full_form),
		cmocka_unit_test(test_class_and_jail_are_said),
		cmocka_unit_test(test_ends),
		cmocka_unit_test(test_hostile_text),
		cmocka_unit_test(test_width),
		cmocka_unit_test(test_wrong_types),
		cmocka_unit_test(test_parts_and_numbers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
