/* Verbs for operators, over /v1/operator: model providers, models, prices. */
#include "cli.h"

#include "admin.h"
#include "common/text.h"
#include "show.h"
#include "term.h"

#include <fcntl.h>
#include <unistd.h>

#define MICROS_PER_SECOND_TO_MILLION_MS 1000 /* a million milliseconds are 1,000 seconds */
#define MILLION 1000000

/* --- providers, models, prices -------------------------------------------------------------------------------------------------
 */

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
		return err_set(e, ERR_INVALID, "%s: %s", input ? "standard input" : path,
				n == 0 ? "there is no key in it" : "that is longer than any key");
	return 0;
}

int cmd_provider_set(const struct args *a)
{
	char path[ADMIN_PATH_MAX], secret[1024];
	const char *url = args_value(a, "base-url"), *file = args_value(a, "api-key-file");
	struct admin_body o;
	struct err e;
	int rc;

	if (url == NULL) {
		term_complain("--base-url is needed, for example --base-url https://api.example.com/v1");
		return CLI_USE;
	}
	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/providers/", a->words[0], ""))
		return admin_bad_word("a provider's name");
	if (file != NULL && read_secret(file, secret, &e) != 0)
		return admin_use(&e);
	admin_begin(&o);
	jw_kstr(&o.w, "base_url", url);
	if (file != NULL)
		jw_kstr(&o.w, "api_key", secret);
	if (args_flag(a, "any-address"))
		jw_kbool(&o.w, "any_address", true);
	rc = admin_ask(a, "PUT", path, &o, NULL, NULL);
	explicit_bzero(secret, sizeof secret);
	return rc;
}

static void show_providers(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "PROVIDER", "name", 20, SHOW_TEXT },
		{ "KEY", "has_key", 4, SHOW_BOOL },
		{ "ANY ADDRESS", "any_address", 11, SHOW_BOOL },
		{ "BASE URL", "base_url", 40, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_provider_list(const struct args *a)
{
	return admin_ask(a, "GET", "/v1/operator/providers", NULL, NULL, show_providers);
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
		{ "max-output-tokens", "max_output_tokens" },
		{ "min-output-tokens", "min_output_tokens" },
		{ "tokens-per-byte-milli", "tokens_per_byte_milli" },
		{ "overhead-tokens", "overhead_tokens" },
		{ "call-timeout-ms", "call_timeout_ms" },
	};
	char path[ADMIN_PATH_MAX];
	struct admin_body o;
	struct err e;

	if (!model_word(a->words[0]))
		return CLI_USE;
	if (!admin_path(path, "/v1/operator/models/", a->words[0], ""))
		return admin_bad_word("a model");
	admin_begin(&o);
	for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
		if (admin_count(a, &o.w, numbers[i].option, numbers[i].field, 0, &e) != 0) {
			buf_free(&o.b);
			return admin_use(&e);
		}
	}
	if (args_value(a, "upstream") != NULL)
		jw_kstr(&o.w, "upstream", args_value(a, "upstream"));
	if (args_value(a, "limit-param") != NULL)
		jw_kstr(&o.w, "limit_param", args_value(a, "limit-param"));
	if (args_flag(a, "default"))
		jw_kbool(&o.w, "default", true);
	return admin_ask(a, "PUT", path, &o, NULL, NULL);
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
	return admin_ask(a, "GET", "/v1/operator/models", NULL, NULL, show_models);
}

/* A price option in dollars a unit becomes micros per million units: micros a unit times `factor`. */
static int put_price(
		const struct args *a, struct jw *w, const char *option, const char *field, int64_t factor, bool *any, struct err *e)
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
		return err_set(e, ERR_INVALID,
				"--run-fee, --compute, --web-request and --web-search are the deployment's prices: set them "
				"without a model");
	if (put_price(a, w, "input", "input_micros_per_million", 1, &any, e) != 0 ||
			put_price(a, w, "output", "output_micros_per_million", 1, &any, e) != 0 ||
			put_price(a, w, "cached-input", "cached_input_micros_per_million", 1, &any, e) != 0)
		return -1;
	return put_percent(a, w, e);
}

static int put_common_price(const struct args *a, struct jw *w, struct err *e)
{
	bool any = false;

	if (args_value(a, "input") != NULL || args_value(a, "output") != NULL || args_value(a, "cached-input") != NULL ||
			args_value(a, "percent") != NULL)
		return err_set(e, ERR_INVALID,
				"--input, --output, --cached-input and --percent are a model's prices: name the model");
	if (put_price(a, w, "run-fee", "run_fee_micros", 1, &any, e) != 0 ||
			put_price(a, w, "compute", "compute_micros_per_million_ms", MICROS_PER_SECOND_TO_MILLION_MS, &any, e) !=
					0 ||
			put_price(a, w, "web-request", "web_request_micros_per_million", MILLION, &any, e) != 0 ||
			put_price(a, w, "web-search", "web_search_micros_per_million", MILLION, &any, e) != 0)
		return -1;
	return any ? 0
		   : err_set(e, ERR_INVALID,
				     "no price is given: name a model with --input and --output, or give --run-fee, --compute, "
				     "...");
}

int cmd_price_set(const struct args *a)
{
	char path[ADMIN_PATH_MAX] = "/v1/operator/prices";
	bool model = a->word_count > 0;
	struct admin_body o;
	struct err e;

	if (model && !model_word(a->words[0]))
		return CLI_USE;
	if (model && !admin_path(path, "/v1/operator/prices/", a->words[0], ""))
		return admin_bad_word("a model");
	admin_begin(&o);
	if ((model ? put_model_price(a, &o.w, &e) : put_common_price(a, &o.w, &e)) != 0) {
		buf_free(&o.b);
		return admin_use(&e);
	}
	return admin_ask(a, "PUT", path, &o, NULL, NULL);
}
