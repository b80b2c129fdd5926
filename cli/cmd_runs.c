/* Verbs about runs that exist: runs, get, wait, cancel; and models. */
#include "cli.h"

#include "api.h"
#include "common/clock.h"
#include "common/ids.h"
#include "common/text.h"
#include "interrupt.h"
#include "show.h"
#include "term.h"
#include "timeline.h"
#include "watch.h"

#define PAGES_MAX 10000
#define WAIT_POLL_S 30
#define WAIT_PAUSE_MS 200 /* between long polls, also where the service answers at once */

/* --- runs ------------------------------------------------------------------------------------------------------------------- */

/* Lists carry the prompt cut; where it stands only in the request the column stays empty. */
static void print_runs(const struct json *data, bool titles)
{
	static const struct show_column columns[] = {
		{ "RUN", "id", 36, SHOW_TEXT },
		{ "STATUS", "status", 11, SHOW_TEXT },
		{ "CREATED", "created_at", 19, SHOW_TIME },
		{ "COST", "cost_micros", 10, SHOW_COST },
		{ "PROMPT", "prompt", 20, SHOW_TEXT },
	};

	show_table(data, columns, sizeof columns / sizeof columns[0], titles);
}

static bool runs_path(const struct args *a, const char *cursor, struct buf *b)
{
	const char *limit = args_value(a, "limit"), *status = args_value(a, "status"), *label;

	buf_printf(b, "/v1/runs?limit=");
	api_query(b, limit != NULL ? limit : args_flag(a, "all") ? "100" : "20");
	if (cursor != NULL) {
		buf_add_str(b, "&cursor=");
		api_query(b, cursor);
	}
	if (status != NULL) {
		buf_add_str(b, "&status=");
		api_query(b, status);
	}
	for (size_t i = 0; (label = args_list(a, "metadata", i)) != NULL; i++) {
		const char *equals = strchr(label, '=');
		char key[80];

		if (equals == NULL || !text_fmt(key, sizeof key, "%.*s", (int)(equals - label), label))
			return false;
		buf_add_str(b, "&metadata.");
		api_query(b, key);
		buf_add_char(b, '=');
		api_query(b, equals + 1);
	}
	return buf_cstr(b) != NULL && !b->failed;
}

/* One page. *next is the cursor of the following one, "" when there is none. */
static int runs_page(struct api *api, const struct args *a, const char *cursor, bool first, char next[512])
{
	struct buf path = BUF_INIT((size_t)16 * 1024);
	struct api_call call = { .method = "GET" };
	struct answer answer = { .json = NULL };
	const char *after;
	int rc = CLI_USE;

	next[0] = '\0';
	http_response_init(&answer.raw);
	if (!runs_path(a, cursor, &path)) {
		term_complain("--metadata wants KEY=VALUE");
		goto out;
	}
	call.path = buf_cstr(&path);
	rc = api_ask(api, &call, &answer);
	if (rc != CLI_OK)
		goto out;
	after = json_get_text(answer.json, "next_cursor");
	if (after != NULL && !text_copy(next, 512, after))
		next[0] = '\0';
	if (api->json)
		(void)api_print_json(&answer);
	else if (first && json_get(answer.json, "data") != NULL && json_len(json_get(answer.json, "data")) == 0)
		term_note("No runs yet. Start one: ephemeral run 'What is 2 + 2?' --wait");
	else
		print_runs(json_get(answer.json, "data"), first);
out:
	answer_free(&answer);
	buf_free(&path);
	return rc;
}

int cmd_runs(const struct args *a)
{
	struct api api;
	char cursor[512] = "", next[512];
	const char *from = args_value(a, "cursor");
	int rc = api_open(&api, a);

	if (rc == CLI_OK && from != NULL && !text_copy(cursor, sizeof cursor, from)) {
		term_complain("--cursor is too long to be one of ours");
		rc = CLI_USE;
	}
	for (int page = 0; rc == CLI_OK && page < PAGES_MAX; page++) {
		rc = runs_page(&api, a, cursor[0] != '\0' ? cursor : NULL, page == 0, next);
		if (rc != CLI_OK || next[0] == '\0')
			break;
		if (!args_flag(a, "all")) {
			if (!api.json)
				term_note("There are more: --all, or --cursor %s", next);
			break;
		}
		memcpy(cursor, next, sizeof cursor);
	}
	api_close(&api);
	return rc;
}

/* --- one run ---------------------------------------------------------------------------------------------------------------- */

int run_id_arg(const struct args *a, const char **id)
{
	*id = a->words[0];
	if (id_valid("run", *id))
		return CLI_OK;
	term_complain("\"%.60s\" is no run's id: it is run_ and 32 hexadecimal digits, as `ephemeral runs` lists them", *id);
	return CLI_USE;
}

static int run_call(struct api *api, const char *method, const char *id, const char *rest, int64_t timeout_ms, struct answer *out)
{
	char path[160];
	struct api_call call = { .method = method, .path = path, .timeout_ms = timeout_ms, .safe = true };

	http_response_init(&out->raw);
	out->json = NULL;
	if (!text_fmt(path, sizeof path, "/v1/runs/%s%s", id, rest))
		return CLI_USE;
	return api_ask(api, &call, out);
}

static bool run_over(const struct json *run)
{
	const char *status = json_get_text(run, "status");

	return status != NULL && strcmp(status, "queued") != 0 && strcmp(status, "running") != 0;
}

static void money_field(const struct json *run)
{
	char cost[32], cap[32];
	struct buf b = BUF_INIT(1024);

	if (!run_over(run)) { /* cost_micros is what is held until then, nothing that was spent */
		show_money("reserved", run, "reserved_micros");
		return;
	}
	text_dollars(json_get_int(run, "cost_micros", 0), cost);
	text_dollars(json_get_int(run, "max_cost_micros", json_get_int(run, "reserved_micros", 0)), cap);
	timeline_parts(json_get(run, "cost"), &b);
	printf("%-12s %s of %s%s · %s\n", "cost", cost, cap, json_get_bool(run, "billing_pending", false) ? " (not final)" : "",
			buf_cstr(&b) != NULL ? buf_cstr(&b) : "");
	buf_free(&b);
}

static void usage_field(const struct json *usage)
{
	char calls[32], tokens[32];

	if (usage == NULL || json_get_int(usage, "model_calls", 0) == 0)
		return;
	timeline_number(json_get_int(usage, "model_calls", 0), calls);
	timeline_number(json_get_int(usage, "total_tokens", 0), tokens);
	printf("%-12s %s model call%s, %s tokens, %.2f s of compute\n", "usage", calls, strcmp(calls, "1") == 0 ? "" : "s", tokens,
			(double)json_get_int(usage, "compute_ms", 0) / 1000);
}

/* waiting_for.reason in words; one that we do not know yet as it came. */
static const char *waiting_text(const char *reason)
{
	static const char *const words[][2] = {
		{ "capacity", "a host with room" },
		{ "no_node", "a host: none is there now" },
		{ "organization_limit", "another run of the organization to end" },
	};

	for (size_t i = 0; reason != NULL && i < sizeof words / sizeof words[0]; i++)
		if (strcmp(reason, words[i][0]) == 0)
			return words[i][1];
	return reason;
}

static void print_run(const struct json *run)
{
	const struct json *error = json_get(run, "error"), *waiting = json_get(run, "waiting_for");
	struct buf b = BUF_INIT(1024);

	show_field("id", json_get_text(run, "id"));
	show_field("status", json_get_text(run, "status"));
	show_field("waiting for", waiting_text(json_get_text(waiting, "reason")));
	show_field("created", json_get_text(run, "created_at"));
	show_field("started", json_get_text(run, "started_at"));
	show_field("ended", json_get_text(run, "ended_at"));
	show_field("model", json_get_text(run, "model"));
	timeline_permissions(run, &b);
	show_field("allowed", buf_cstr(&b));
	show_field("isolation", json_get_text(run, "isolation"));
	show_field("node", json_get_text(run, "node"));
	usage_field(json_get(run, "usage"));
	money_field(run);
	if (error != NULL && json_type(error) == JSON_OBJECT) {
		show_field("error", json_get_text(error, "code"));
		show_field("", json_get_text(error, "message"));
		show_field("", json_get_text(error, "remedy"));
	}
	if (json_get(run, "output") != NULL && json_type(json_get(run, "output")) != JSON_NULL) {
		fputc('\n', stdout);
		watch_print_output(run);
	}
	buf_free(&b);
}

int cmd_get(const struct args *a)
{
	struct api api;
	struct answer answer;
	const char *id;
	int rc = run_id_arg(a, &id);

	if (rc != CLI_OK)
		return rc;
	rc = api_open(&api, a);
	if (rc == CLI_OK) {
		rc = run_call(&api, "GET", id, "", 0, &answer);
		if (rc == CLI_OK && api.json)
			(void)api_print_json(&answer);
		else if (rc == CLI_OK)
			print_run(answer.json);
		answer_free(&answer);
	}
	api_close(&api);
	return rc;
}

/* Long polls until the run is over or the deadline passed (0 = none). */
static int wait_loop(struct api *api, const char *id, int64_t deadline_ms, struct answer *answer)
{
	for (;;) {
		int64_t left_s = deadline_ms > 0 ? (deadline_ms - clock_mono_ns() / 1000000 + 999) / 1000 : WAIT_POLL_S;
		char rest[64];
		int rc;

		left_s = left_s > WAIT_POLL_S ? WAIT_POLL_S : left_s < 1 ? 1 : left_s;
		if (!text_fmt(rest, sizeof rest, "/wait?timeout_seconds=%lld", (long long)left_s))
			return CLI_USE;
		rc = run_call(api, "GET", id, rest, (left_s + 30) * 1000, answer);
		if (rc == CLI_OK && json_get_text(answer->json, "status") == NULL)
			rc = api_stranger(api);
		if (rc != CLI_OK || run_over(answer->json))
			return rc;
		if (deadline_ms > 0 && clock_mono_ns() / 1000000 >= deadline_ms) {
			term_complain("the run is still %s; it goes on", json_get_text(answer->json, "status"));
			return CLI_ASK;
		}
		answer_free(answer);
		http_response_init(&answer->raw);
		if (!interrupt_sleep_ms(WAIT_PAUSE_MS))
			return CLI_DETACHED;
	}
}

int run_wait(struct api *api, const char *id, int64_t deadline_ms, struct answer *answer)
{
	int rc;

	http_response_init(&answer->raw);
	rc = wait_loop(api, id, deadline_ms, answer);
	if (rc == CLI_DETACHED)
		term_note("Detached: the run goes on. Cancel it: ephemeral cancel %s", id);
	return rc;
}

int cmd_wait(const struct args *a)
{
	struct api api;
	struct answer answer = { .json = NULL };
	const char *id, *timeout = args_value(a, "timeout");
	int64_t seconds = 0;
	struct err e;
	int rc = run_id_arg(a, &id);

	if (rc != CLI_OK)
		return rc;
	if (timeout != NULL && text_i64(timeout, 1, 1000000, &seconds, &e) != 0) {
		term_complain("--timeout: %s", e.text);
		return CLI_USE;
	}
	rc = api_open(&api, a);
	if (rc == CLI_OK) {
		interrupt_install();
		rc = run_wait(&api, id, seconds > 0 ? clock_mono_ns() / 1000000 + seconds * 1000 : 0, &answer);
		if (rc == CLI_OK && api.json)
			(void)api_print_json(&answer);
		else if (rc == CLI_OK)
			print_run(answer.json);
		if (rc == CLI_OK)
			rc = watch_exit(json_get_text(answer.json, "status"));
		answer_free(&answer);
	}
	api_close(&api);
	return rc;
}

int cmd_cancel(const struct args *a)
{
	struct api api;
	struct answer answer;
	const char *id;
	int rc = run_id_arg(a, &id);

	if (rc != CLI_OK)
		return rc;
	rc = api_open(&api, a);
	if (rc == CLI_OK) {
		rc = run_call(&api, "POST", id, "/cancel", 0, &answer);
		if (rc == CLI_OK && api.json)
			(void)api_print_json(&answer);
		else if (rc == CLI_OK)
			term_say("%s %s", id, run_over(answer.json) ? json_get_text(answer.json, "status") : "cancel requested");
		answer_free(&answer);
	}
	api_close(&api);
	return rc;
}
