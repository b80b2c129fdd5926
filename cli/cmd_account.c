/* Verbs about the key: login, logout, status; and models. */
#include "cli.h"

#include "api.h"
#include "common/text.h"
#include "show.h"
#include "term.h"

#include <errno.h>
#include <signal.h>
#include <termios.h>
#include <unistd.h>

/* --- login -------------------------------------------------------------------------------------------------------------------- */

static struct termios saved_terminal;
static volatile sig_atomic_t terminal_hidden;

static void restore_terminal(int number)
{
	if (terminal_hidden)
		(void)tcsetattr(STDIN_FILENO, TCSAFLUSH, &saved_terminal);
	terminal_hidden = 0;
	if (number != 0)
		_exit(128 + number);
}

/* Turns echo off; Ctrl-C while it is off turns it on again before it ends us. */
static bool hide(void)
{
	struct termios t;

	if (tcgetattr(STDIN_FILENO, &saved_terminal) != 0)
		return false;
	t = saved_terminal;
	t.c_lflag &= ~(tcflag_t)ECHO;
	terminal_hidden = 1;
	(void)signal(SIGINT, restore_terminal);
	(void)signal(SIGTERM, restore_terminal);
	return tcsetattr(STDIN_FILENO, TCSAFLUSH, &t) == 0;
}

/* One line from standard input without its end and the blanks around it. */
static int read_line(char out[SAVED_KEY_MAX], struct err *e)
{
	char line[SAVED_KEY_MAX + 64];
	size_t n = 0, from = 0;
	ssize_t got;

	while (n < sizeof line && (got = read(STDIN_FILENO, line + n, 1)) != 0) {
		if (got < 0)
			return err_set_errno(e, "standard input");
		if (line[n] == '\n')
			break;
		n++;
	}
	while (n > 0 && (line[n - 1] == '\r' || line[n - 1] == ' ' || line[n - 1] == '\t'))
		n--;
	while (from < n && (line[from] == ' ' || line[from] == '\t'))
		from++;
	if (n == from)
		return err_set(e, ERR_INVALID, "no key was given");
	if (!text_fmt(out, SAVED_KEY_MAX, "%.*s", (int)(n - from), line + from))
		return err_set(e, ERR_INVALID, "that is longer than any API key");
	explicit_bzero(line, sizeof line);
	return 0;
}

static int read_key(const char *url, char out[SAVED_KEY_MAX], struct err *e)
{
	bool terminal = isatty(STDIN_FILENO) == 1;
	int rc;

	if (terminal) {
		fprintf(stderr, "API key for %s (not shown): ", url);
		fflush(stderr);
		if (!hide())
			return err_set(e, ERR_IO, "the terminal cannot be switched to hidden input; use `ephemeral login < FILE`");
	}
	rc = read_line(out, e);
	if (terminal) {
		restore_terminal(0);
		(void)signal(SIGINT, SIG_DFL);
		(void)signal(SIGTERM, SIG_DFL);
		fputc('\n', stderr);
	}
	return rc;
}

static const char *organization_name(const struct json *me)
{
	const struct json *org = json_get(me, "organization");

	if (org != NULL && json_type(org) == JSON_OBJECT)
		return json_get_text(org, "name");
	return json_get_text(me, "organization");
}

static const char *role_of(const struct json *me)
{
	const char *role = json_get_text(me, "role");

	return role != NULL ? role : json_get_text(json_get(me, "key"), "role");
}

static int ask_me(struct api *api, struct answer *out)
{
	struct api_call call = { .method = "GET", .path = "/v1/me" };

	return api_ask(api, &call, out);
}

static int save(const struct api *api, struct err *e)
{
	struct saved s;

	if (saved_load(&s, e) != 0 || saved_set(&s, api->url, api->key, e) != 0)
		return -1;
	return saved_store(&s, e);
}

static void warn_clear_text(const char *url)
{
	if (strncmp(url, "http://", 7) == 0 && strncmp(url + 7, "127.", 4) != 0 && strncmp(url + 7, "localhost", 9) != 0 &&
			strncmp(url + 7, "[::1]", 5) != 0)
		term_note("Note: %s is not encrypted; the key can be read on the way.", url);
}

int cmd_login(const struct args *a)
{
	const char *environment = getenv("EPHEMERAL_API_KEY");
	struct api api;
	struct answer me = { .json = NULL };
	struct err e;
	int rc = api_open_url(&api, a);

	if (rc != CLI_OK)
		return rc;
	warn_clear_text(api.url);
	if (read_key(api.url, api.key, &e) != 0) {
		term_complain("%s", e.text);
		api_close(&api);
		return CLI_USE;
	}
	rc = ask_me(&api, &me);
	if (rc == CLI_OK && role_of(me.json) == NULL) {
		term_complain("%s answers, but not as an Ephemeral service does; the key was not saved", api.url);
		rc = CLI_ASK;
	}
	if (rc == CLI_OK && save(&api, &e) != 0) {
		term_complain("the key is good, but cannot be saved: %s", e.text);
		rc = CLI_ASK;
	}
	if (rc == CLI_OK && api.json)
		(void)api_print_json(&me);
	else if (rc == CLI_OK)
		term_note("Logged in to %s: organization %s, role %s.", api.url,
				organization_name(me.json) != NULL ? organization_name(me.json) : "?", role_of(me.json));
	if (rc == CLI_OK && environment != NULL && environment[0] != '\0')
		term_note("EPHEMERAL_API_KEY is set and goes before the saved key.");
	answer_free(&me);
	api_close(&api);
	return rc;
}

int cmd_logout(const struct args *a)
{
	struct api api;
	struct saved s;
	struct err e = { .code = ERR_NONE };
	int rc = api_open_url(&api, a);

	if (rc != CLI_OK)
		return rc;
	if (saved_load(&s, &e) == 0 && !saved_remove(&s, api.url)) {
		term_note("There is no saved key for %s.", api.url);
	} else if (e.code == ERR_NONE && saved_store(&s, &e) == 0) {
		term_note("The key for %s is forgotten here; it still works until it is revoked.", api.url);
	} else {
		term_complain("%s", e.text);
		rc = CLI_ASK;
	}
	api_close(&api);
	return rc;
}

/* --- status ------------------------------------------------------------------------------------------------------------------- */

static void print_rates(const struct json *rates)
{
	char text[32];
	int64_t compute;

	if (rates == NULL)
		return;
	show_money("run fee", rates, "run_fee_micros");
	compute = json_get_int(rates, "compute_micros_per_million_ms", -1);
	if (compute >= 0) {
		text_dollars(compute, text);
		printf("%-12s %s for 1,000 seconds\n", "compute", text);
	}
}

static void print_seconds(const char *name, const struct json *v, const char *key)
{
	if (json_get_int(v, key, -1) >= 0)
		printf("%-12s %lld s\n", name, (long long)json_get_int(v, key, 0));
}

int cmd_status(const struct args *a)
{
	struct api api;
	struct answer me = { .json = NULL };
	int rc = api_open(&api, a);

	if (rc != CLI_OK)
		return rc;
	rc = ask_me(&api, &me);
	if (rc == CLI_OK && api.json) {
		(void)api_print_json(&me);
	} else if (rc == CLI_OK) {
		show_field("url", api.url);
		show_field("key", api.source == API_KEY_ENVIRONMENT ? "from EPHEMERAL_API_KEY" : "saved by login");
		show_field("organization", organization_name(me.json));
		show_field("role", role_of(me.json));
		if (json_get_bool(me.json, "unlimited", false))
			show_field("balance", "unlimited");
		else
			show_money("balance", me.json, "balance_micros");
		show_money("reserved", me.json, "reserved_micros");
		show_money("available", me.json, "available_micros");
		show_count("queued", json_get(me.json, "runs"), "queued");
		show_count("running", json_get(me.json, "runs"), "running");
		show_field("model", json_get_text(me.json, "default_model"));
		show_money("default cap", me.json, "default_max_cost_micros");
		show_money("largest cap", json_get(me.json, "limits"), "max_cost_micros");
		print_seconds("default time", json_get(me.json, "limits"), "default_timeout_seconds");
		print_seconds("longest time", json_get(me.json, "limits"), "max_timeout_seconds");
		print_rates(json_get(me.json, "rates"));
	}
	answer_free(&me);
	api_close(&api);
	return rc;
}

/* --- models ------------------------------------------------------------------------------------------------------------------- */

/* Dollars per million tokens are micros per token: the row's integer is shown as money. */
int cmd_models(const struct args *a)
{
	static const struct show_column columns[] = {
		{ "MODEL", "id", 32, SHOW_TEXT },
		{ "INPUT/M", "input_micros_per_million", 10, SHOW_MONEY },
		{ "OUTPUT/M", "output_micros_per_million", 10, SHOW_MONEY },
		{ "LEAST CAP", "min_cost_micros", 10, SHOW_MONEY },
	};
	struct api api;
	struct api_call call = { .method = "GET", .path = "/v1/models" };
	struct answer answer = { .json = NULL };
	int rc = api_open(&api, a);

	if (rc != CLI_OK)
		return rc;
	rc = api_ask(&api, &call, &answer);
	if (rc == CLI_OK && api.json)
		(void)api_print_json(&answer);
	else if (rc == CLI_OK)
		show_table(json_get(answer.json, "data"), columns, sizeof columns / sizeof columns[0], true);
	answer_free(&answer);
	api_close(&api);
	return rc;
}
