/* Verbs for operators, over /v1/operator: organizations, keys, hosts, providers, models, prices. */
#include "cli.h"

#include "api.h"
#include "common/ids.h"
#include "common/text.h"
#include "show.h"
#include "term.h"

#include <fcntl.h>
#include <unistd.h>

#define BODY_MAX (64U * 1024)
#define PATH_MAX_BYTES 1024
#define MICROS_PER_SECOND_TO_MILLION_MS 1000 /* a million milliseconds are 1,000 seconds */
#define MILLION 1000000

/* A request's body in the making. */
struct body {
	struct buf b;
	struct jw w;
};

static void body_begin(struct body *o)
{
	buf_init(&o->b, BODY_MAX);
	jw_init(&o->w, &o->b);
	jw_object(&o->w);
}

static int complain_use(const struct err *e)
{
	term_complain("%s", e->text);
	return CLI_USE;
}

/* Asks and shows the answer; `show` prints it for people. Frees the body. */
static int ask(const struct args *a, const char *method, const char *path, struct body *o, const char *key, void (*show)(const struct json *))
{
	struct api api;
	struct api_call call = { .method = method, .path = path, .idempotency_key = key };
	struct answer answer = { .json = NULL };
	int rc = api_open_operator(&api, a);

	if (rc == CLI_OK && o != NULL) {
		jw_close(&o->w);
		if (!jw_end(&o->w)) {
			term_complain("a value is too long, or no valid UTF-8");
			rc = CLI_USE;
		}
		call.body = &o->b;
	}
	if (rc == CLI_OK) {
		rc = api_ask(&api, &call, &answer);
		if (rc == CLI_OK && api.json)
			(void)api_print_json(&answer);
		else if (rc == CLI_OK && show != NULL)
			show(answer.json);
		answer_free(&answer);
	}
	if (o != NULL)
		buf_free(&o->b);
	api_close(&api);
	return rc;
}

/* prefix + word percent-encoded (slashes kept where the route has them) + suffix. */
static bool make_path(char out[PATH_MAX_BYTES], const char *prefix, const char *word, const char *suffix)
{
	struct buf b = BUF_INIT(PATH_MAX_BYTES - 1);
	bool ok;

	buf_add_str(&b, prefix);
	while (*word != '\0') {
		char piece[256];
		size_t n = strcspn(word, "/");

		if (!text_fmt(piece, sizeof piece, "%.*s", (int)n, word)) {
			buf_free(&b);
			return false;
		}
		api_query(&b, piece);
		word += n;
		if (*word == '/') {
			buf_add_char(&b, '/');
			word++;
		}
	}
	buf_add_str(&b, suffix);
	ok = !b.failed && buf_cstr(&b) != NULL && text_copy(out, PATH_MAX_BYTES, buf_cstr(&b));
	buf_free(&b);
	return ok;
}

static int bad_word(const char *what)
{
	term_complain("that is too long to be %s", what);
	return CLI_USE;
}

static bool no_slash(const char *id)
{
	return id[0] != '\0' && strchr(id, '/') == NULL;
}

/* --- organizations ---------------------------------------------------------------------------------------------------------- */

static void show_id(const struct json *v)
{
	if (json_get_text(v, "id") != NULL)
		printf("%s\n", json_get_text(v, "id"));
}

int cmd_org_create(const struct args *a)
{
	struct body o;

	body_begin(&o);
	jw_kstr(&o.w, "name", a->words[0]);
	if (args_flag(a, "allow-emulated"))
		jw_kbool(&o.w, "allow_emulated", true);
	if (args_flag(a, "unlimited"))
		jw_kbool(&o.w, "unlimited", true);
	if (args_value(a, "default-model") != NULL)
		jw_kstr(&o.w, "default_model", args_value(a, "default-model"));
	return ask(a, "POST", "/v1/operator/orgs", &o, NULL, show_id);
}

static void show_orgs(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "ORGANIZATION", "id", 36, SHOW_TEXT },       { "NAME", "name", 24, SHOW_TEXT },
		{ "BALANCE", "balance_micros", 12, SHOW_MONEY }, { "RESERVED", "reserved_micros", 12, SHOW_MONEY },
		{ "EMULATED", "allow_emulated", 8, SHOW_BOOL },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
	if (json_get_text(v, "next_cursor") != NULL)
		term_note("There are more; use --json and the API's cursor.");
}

int cmd_org_list(const struct args *a)
{
	return ask(a, "GET", "/v1/operator/orgs?limit=100", NULL, NULL, show_orgs);
}

static void show_credit(const struct json *v)
{
	char text[32];

	text_dollars(json_get_int(v, "balance_micros", 0), text);
	printf("balance %s\n", text);
}

int cmd_org_credit(const struct args *a)
{
	char path[PATH_MAX_BYTES], made[ID_MAX];
	const char *dollars = a->words[1], *key = args_value(a, "idempotency-key");
	struct body o;
	struct err e;
	int64_t micros;

	if (text_micros(dollars[0] == '$' ? dollars + 1 : dollars, &micros, &e) != 0) {
		(void)err_wrap(&e, "%s", dollars);
		return complain_use(&e);
	}
	if (!no_slash(a->words[0]) || !make_path(path, "/v1/operator/orgs/", a->words[0], "/credit"))
		return bad_word("an organization's id");
	if (key == NULL) {
		id_make("cli", made);
		key = made;
	}
	body_begin(&o);
	jw_kint(&o.w, "amount_micros", micros);
	if (args_value(a, "note") != NULL)
		jw_kstr(&o.w, "note", args_value(a, "note"));
	return ask(a, "POST", path, &o, key, show_credit);
}

/* --- keys ------------------------------------------------------------------------------------------------------------------- */

static void show_key(const struct json *v)
{
	if (json_get_text(v, "key") != NULL)
		printf("%s\n", json_get_text(v, "key"));
	term_note("This is the only time the key is shown (id %s).", json_get_text(v, "id") != NULL ? json_get_text(v, "id") : "?");
}

int cmd_key_create(const struct args *a)
{
	char path[PATH_MAX_BYTES];
	struct body o;

	if (!no_slash(a->words[0]) || !make_path(path, "/v1/operator/orgs/", a->words[0], "/keys"))
		return bad_word("an organization's id");
	body_begin(&o);
	jw_kstr(&o.w, "role", args_value(a, "role") != NULL ? args_value(a, "role") : "member");
	if (args_value(a, "name") != NULL)
		jw_kstr(&o.w, "name", args_value(a, "name"));
	if (args_value(a, "expires-at") != NULL)
		jw_kstr(&o.w, "expires_at", args_value(a, "expires-at"));
	return ask(a, "POST", path, &o, NULL, show_key);
}

static void show_keys(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "KEY", "id", 36, SHOW_TEXT },          { "ROLE", "role", 8, SHOW_TEXT },
		{ "CREATED", "created_at", 19, SHOW_TIME }, { "LAST USED", "last_used_at", 19, SHOW_TIME },
		{ "REVOKED", "revoked_at", 19, SHOW_TIME }, { "NAME", "name", 16, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_key_list(const struct args *a)
{
	char path[PATH_MAX_BYTES];

	if (!no_slash(a->words[0]) || !make_path(path, "/v1/operator/orgs/", a->words[0], "/keys?limit=100"))
		return bad_word("an organization's id");
	return ask(a, "GET", path, NULL, NULL, show_keys);
}

int cmd_key_revoke(const struct args *a)
{
	char start[PATH_MAX_BYTES], path[PATH_MAX_BYTES];

	if (!no_slash(a->words[0]) || !no_slash(a->words[1]) || !make_path(start, "/v1/operator/orgs/", a->words[0], "/keys/") ||
			!make_path(path, start, a->words[1], ""))
		return bad_word("an id");
	return ask(a, "DELETE", path, NULL, NULL, NULL);
}

/* --- hosts ------------------------------------------------------------------------------------------------------------------ */

static void show_token(const struct json *v)
{
	if (json_get_text(v, "token") != NULL)
		printf("%s\n", json_get_text(v, "token"));
}

static int put_count(const struct args *a, struct jw *w, const char *option, const char *field, int64_t min, struct err *e)
{
	const char *text = args_value(a, option);
	int64_t n;

	if (text == NULL)
		return 0;
	if (text_i64(text, min, INT64_MAX, &n, e) != 0)
		return err_wrap(e, "--%s", option);
	jw_kint(w, field, n);
	return 0;
}

/* The interface takes labels as one text: a=b,c=d. */
static int put_labels(const struct args *a, struct jw *w, struct err *e)
{
	struct buf b = BUF_INIT(1024);
	const char *label;
	int rc = 0;

	for (size_t i = 0; rc == 0 && (label = args_list(a, "label", i)) != NULL; i++) {
		if (strchr(label, '=') == NULL || label[0] == '=' || strchr(label, ',') != NULL)
			rc = err_set(e, ERR_INVALID, "--label %s: it must be KEY=VALUE, without commas", label);
		else if (!buf_add_str(&b, i > 0 ? "," : "") || !buf_add_str(&b, label))
			rc = err_set(e, ERR_LIMIT, "the labels are over 1024 bytes");
	}
	if (rc == 0 && b.len > 0)
		jw_kstrn(w, "labels", (const char *)b.data, b.len);
	buf_free(&b);
	return rc;
}

int cmd_node_token(const struct args *a)
{
	struct body o;
	struct err e;

	body_begin(&o);
	if (put_count(a, &o.w, "uses", "uses", 1, &e) != 0 || put_count(a, &o.w, "expires-in", "expires_in_seconds", 1, &e) != 0 ||
			put_labels(a, &o.w, &e) != 0) {
		buf_free(&o.b);
		return complain_use(&e);
	}
	if (args_value(a, "isolation") != NULL)
		jw_kstr(&o.w, "isolation", args_value(a, "isolation"));
	return ask(a, "POST", "/v1/operator/node-tokens", &o, NULL, show_token);
}

static void show_nodes(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "NODE", "id", 37, SHOW_TEXT },        { "NAME", "name", 20, SHOW_TEXT }, { "STATE", "state", 9, SHOW_TEXT },
		{ "LIVE", "live", 4, SHOW_BOOL },       { "ISOLATION", "isolation", 9, SHOW_TEXT }, { "RUNS", "runs", 5, SHOW_COUNT },
		{ "LAST SEEN", "last_seen_at", 19, SHOW_TIME },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_node_list(const struct args *a)
{
	return ask(a, "GET", "/v1/operator/nodes?limit=100", NULL, NULL, show_nodes);
}

static int node_act(const struct args *a, const char *suffix)
{
	char path[PATH_MAX_BYTES];

	if (!no_slash(a->words[0]) || !make_path(path, "/v1/operator/nodes/", a->words[0], suffix))
		return bad_word("a node's id");
	return ask(a, "POST", path, NULL, NULL, NULL);
}

int cmd_node_drain(const struct args *a)
{
	return node_act(a, "/drain");
}

int cmd_node_undrain(const struct args *a)
{
	return node_act(a, "/undrain");
}

int cmd_node_revoke(const struct args *a)
{
	return node_act(a, "/revoke");
}

/* --- providers, models, prices ------------------------------------------------------------------------------------------------- */

/* The key in the file (- for standard input), without white space at its end. */
static int read_secret(const char *path, char out[1024], struct err *e)
{
	bool input = strcmp(path, "-") == 0;
	int fd = input ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
	size_t n = 0;
	ssize_t got = 1;

	if (fd < 0)
		return err_set_errno(e, "%s", path);
	while (got > 0 && n < 1023) {
		got = read(fd, out + n, 1023 - n);
		n += got > 0 ? (size_t)got : 0;
	}
	if (!input)
		close(fd);
	if (got < 0)
		return err_set_errno(e, "%s", path);
	while (n > 0 && (unsigned char)out[n - 1] <= ' ')
		n--;
	out[n] = '\0';
	if (n == 0 || got != 0)
		return err_set(e, ERR_INVALID, "%s: %s", input ? "standard input" : path, n == 0 ? "there is no key in it" : "that is longer than any key");
	return 0;
}

int cmd_provider_set(const struct args *a)
{
	char path[PATH_MAX_BYTES], secret[1024];
	const char *url = args_value(a, "base-url"), *file = args_value(a, "api-key-file");
	struct body o;
	struct err e;
	int rc;

	if (url == NULL) {
		term_complain("--base-url is needed, for example --base-url https://api.example.com/v1");
		return CLI_USE;
	}
	if (!no_slash(a->words[0]) || !make_path(path, "/v1/operator/providers/", a->words[0], ""))
		return bad_word("a provider's name");
	if (file != NULL && read_secret(file, secret, &e) != 0)
		return complain_use(&e);
	body_begin(&o);
	jw_kstr(&o.w, "base_url", url);
	if (file != NULL)
		jw_kstr(&o.w, "api_key", secret);
	if (args_flag(a, "any-address"))
		jw_kbool(&o.w, "any_address", true);
	rc = ask(a, "PUT", path, &o, NULL, NULL);
	explicit_bzero(secret, sizeof secret);
	return rc;
}

static void show_providers(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "PROVIDER", "name", 20, SHOW_TEXT }, { "KEY", "has_key", 4, SHOW_BOOL }, { "ANY ADDRESS", "any_address", 11, SHOW_BOOL },
		{ "BASE URL", "base_url", 40, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_provider_list(const struct args *a)
{
	return ask(a, "GET", "/v1/operator/providers", NULL, NULL, show_providers);
}

/* PROVIDER/MODEL, or a complaint. */
static bool model_word(const char *id)
{
	const char *slash = strchr(id, '/');

	if (slash != NULL && slash != id && slash[1] != '\0')
		return true;
	term_complain("\"%.80s\" is no model: it is PROVIDER/MODEL", id);
	return false;
}

int cmd_model_set(const struct args *a)
{
	static const struct {
		const char *option, *field;
	} numbers[] = {
		{ "max-output-tokens", "max_output_tokens" }, { "min-output-tokens", "min_output_tokens" },
		{ "tokens-per-byte-milli", "tokens_per_byte_milli" }, { "overhead-tokens", "overhead_tokens" }, { "call-timeout-ms", "call_timeout_ms" },
	};
	char path[PATH_MAX_BYTES];
	struct body o;
	struct err e;

	if (!model_word(a->words[0]))
		return CLI_USE;
	if (!make_path(path, "/v1/operator/models/", a->words[0], ""))
		return bad_word("a model");
	body_begin(&o);
	for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
		if (put_count(a, &o.w, numbers[i].option, numbers[i].field, 0, &e) != 0) {
			buf_free(&o.b);
			return complain_use(&e);
		}
	}
	if (args_value(a, "upstream") != NULL)
		jw_kstr(&o.w, "upstream", args_value(a, "upstream"));
	if (args_value(a, "limit-param") != NULL)
		jw_kstr(&o.w, "limit_param", args_value(a, "limit-param"));
	if (args_flag(a, "default"))
		jw_kbool(&o.w, "default", true);
	return ask(a, "PUT", path, &o, NULL, NULL);
}

static void show_models(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "MODEL", "id", 32, SHOW_TEXT },
		{ "DEFAULT", "default", 7, SHOW_BOOL },
		{ "PRICED", "priced", 6, SHOW_BOOL },
		{ "INPUT/M", "input_micros_per_million", 10, SHOW_MONEY },
		{ "OUTPUT/M", "output_micros_per_million", 10, SHOW_MONEY },
		{ "UPSTREAM", "upstream", 20, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_model_list(const struct args *a)
{
	return ask(a, "GET", "/v1/operator/models", NULL, NULL, show_models);
}

/* A price option in dollars a unit becomes micros per million units: micros a unit times `factor`. */
static int put_price(const struct args *a, struct jw *w, const char *option, const char *field, int64_t factor, bool *any, struct err *e)
{
	const char *text = args_value(a, option);
	int64_t micros;

	if (text == NULL)
		return 0;
	*any = true;
	if (text_micros(text[0] == '$' ? text + 1 : text, &micros, e) != 0)
		return err_wrap(e, "--%s", option);
	if (micros > INT64_MAX / factor)
		return err_set(e, ERR_LIMIT, "--%s: that is no price", option);
	jw_kint(w, field, micros * factor);
	return 0;
}

static int put_percent(const struct args *a, struct jw *w, struct err *e)
{
	const char *text = args_value(a, "percent");
	int64_t micros;

	if (text == NULL)
		return 0;
	if (text_micros(text, &micros, e) != 0 || micros % 10000 != 0)
		return err_set(e, ERR_INVALID, "--percent: it must be a number with at most two decimals, for example 2.5");
	jw_kint(w, "model_percent_hundredths", micros / 10000);
	return 0;
}

static int put_model_price(const struct args *a, struct jw *w, struct err *e)
{
	bool any = false;

	if (args_value(a, "input") == NULL || args_value(a, "output") == NULL)
		return err_set(e, ERR_INVALID, "a model's price needs --input and --output, in dollars per million tokens");
	if (args_value(a, "run-fee") != NULL || args_value(a, "compute") != NULL || args_value(a, "web-request") != NULL ||
			args_value(a, "web-search") != NULL)
		return err_set(e, ERR_INVALID, "--run-fee, --compute, --web-request and --web-search are the deployment's prices: set them without a model");
	if (put_price(a, w, "input", "input_micros_per_million", 1, &any, e) != 0 ||
			put_price(a, w, "output", "output_micros_per_million", 1, &any, e) != 0 ||
			put_price(a, w, "cached-input", "cached_input_micros_per_million", 1, &any, e) != 0)
		return -1;
	return put_percent(a, w, e);
}

static int put_common_price(const struct args *a, struct jw *w, struct err *e)
{
	bool any = false;

	if (args_value(a, "input") != NULL || args_value(a, "output") != NULL || args_value(a, "cached-input") != NULL || args_value(a, "percent") != NULL)
		return err_set(e, ERR_INVALID, "--input, --output, --cached-input and --percent are a model's prices: name the model");
	if (put_price(a, w, "run-fee", "run_fee_micros", 1, &any, e) != 0 ||
			put_price(a, w, "compute", "compute_micros_per_million_ms", MICROS_PER_SECOND_TO_MILLION_MS, &any, e) != 0 ||
			put_price(a, w, "web-request", "web_request_micros_per_million", MILLION, &any, e) != 0 ||
			put_price(a, w, "web-search", "web_search_micros_per_million", MILLION, &any, e) != 0)
		return -1;
	return any ? 0 : err_set(e, ERR_INVALID, "no price is given: name a model with --input and --output, or give --run-fee, --compute, ...");
}

int cmd_price_set(const struct args *a)
{
	char path[PATH_MAX_BYTES] = "/v1/operator/prices";
	bool model = a->word_count > 0;
	struct body o;
	struct err e;

	if (model && !model_word(a->words[0]))
		return CLI_USE;
	if (model && !make_path(path, "/v1/operator/prices/", a->words[0], ""))
		return bad_word("a model");
	body_begin(&o);
	if ((model ? put_model_price(a, &o.w, &e) : put_common_price(a, &o.w, &e)) != 0) {
		buf_free(&o.b);
		return complain_use(&e);
	}
	return ask(a, "PUT", path, &o, NULL, NULL);
}
