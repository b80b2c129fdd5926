/* `ephemeral run`: create a run, safely repeated, and if wanted follow it to its end. */
#include "cli.h"

#include "api.h"
#include "common/clock.h"
#include "common/ids.h"
#include "common/text.h"
#include "interrupt.h"
#include "request.h"
#include "term.h"
#include "watch.h"

#define KEY_MAX 255

static void say_what_is_off(const struct request_permissions *p)
{
	term_note("The agent may use: shell %s · web %s%s", p->shell ? "on" : "off", p->web ? "on" : "off",
			p->shell ? "" : " (--shell lets it run commands)");
}

static bool key_valid(const char *key)
{
	size_t len = strlen(key);

	for (size_t i = 0; i < len; i++)
		if (key[i] <= ' ' || key[i] > '~')
			return false;
	return len > 0 && len <= KEY_MAX;
}

/* Prints the new run: its id alone on standard output, the rest as a note. */
static void say_created(const struct json *run, const char *id, bool wait)
{
	char reserved[32];

	text_dollars(json_get_int(run, "reserved_micros", json_get_int(run, "max_cost_micros", 0)), reserved);
	if (wait) {
		term_note("%s", id);
		return;
	}
	printf("%s\n", id);
	fflush(stdout);
	term_note("queued, %s reserved. Watch it: ephemeral events %s --follow", reserved, id);
}

/* --wait --json: one JSON document, the run at its end. */
static int wait_json(struct api *api, const char *id)
{
	struct answer a = { .json = NULL };
	int rc = run_wait(api, id, 0, &a);

	if (rc == CLI_OK) {
		(void)api_print_json(&a);
		rc = watch_exit(json_get_text(a.json, "status"));
	}
	answer_free(&a);
	return rc;
}

static int follow(struct api *api, const struct args *a, const char *id)
{
	struct watch w = { .api = api, .run = id, .output = true };

	if (api->json)
		return wait_json(api, id);
	w.form.width = term_width(stdout);
	w.form.colour = term_colour(stdout);
	w.form.full = args_flag(a, "verbose");
	return watch_run(&w);
}

static int create(struct api *api, const struct args *a, const struct buf *body, const char *key)
{
	struct api_call call = { .method = "POST", .path = "/v1/runs", .body = body, .idempotency_key = key, .timeout_ms = 60000 };
	struct answer answer;
	char id[ID_MAX] = "";
	int rc = api_ask(api, &call, &answer);

	if (rc == CLI_DETACHED)
		term_note("Interrupted: the run may have been made. The same command with --idempotency-key %s answers with it.",
				key);
	if (rc == CLI_OK) {
		const char *text = json_get_text(answer.json, "id");

		if (text == NULL || !id_valid("run", text) || !text_copy(id, sizeof id, text)) {
			term_complain("%s answers without a run: is this the URL of an Ephemeral service?", api->url);
			rc = CLI_ASK;
		}
	}
	if (rc == CLI_OK && api->json && !args_flag(a, "wait"))
		(void)api_print_json(&answer);
	else if (rc == CLI_OK && !api->json)
		say_created(answer.json, id, args_flag(a, "wait"));
	answer_free(&answer);
	if (rc != CLI_OK || !args_flag(a, "wait"))
		return rc;
	return follow(api, a, id);
}

int cmd_run(const struct args *a)
{
	struct api api;
	struct buf body = BUF_INIT(REQUEST_BODY_MAX);
	struct request_permissions allowed;
	const char *key = args_value(a, "idempotency-key");
	char made[64];
	struct err e;
	int rc;

	if (key == NULL) {
		char id[ID_MAX];

		id_make("cli", id);
		if (!text_copy(made, sizeof made, id))
			return CLI_ASK;
		key = made;
	}
	if (!key_valid(key)) {
		term_complain("--idempotency-key must be 1 to %d visible ASCII characters", KEY_MAX);
		return CLI_USE;
	}
	if (request_build(a, &body, &allowed, &e) != 0) {
		term_complain("%s", e.text);
		buf_free(&body);
		return CLI_USE;
	}
	rc = api_open(&api, a);
	if (rc == CLI_OK) {
		if (!api.json)
			say_what_is_off(&allowed);
		if (args_flag(a, "wait"))
			interrupt_install();
		rc = create(&api, a, &body, key);
	}
	api_close(&api);
	buf_free(&body);
	return rc;
}
