/* The operator's calls about model providers, models and prices. On operator_listen only. Runs on the loop, does not block. */
#include "api_internal.h"

#include "common/price.h"
#include "common/text.h"
#include "proto/tools.h"
#include "secrets.h"

#include <ctype.h>
#include <inttypes.h>

#define TOKENS_MAX 10000000
#define RATE_MAX INT64_C(1000000000000) /* micros per million units: a dollar for each */

/* --- names -------------------------------------------------------------------------------------------------------------- */

static bool name_ok(const char *s, size_t max, const char *also)
{
	size_t i, n = strlen(s);

	if (n == 0 || n > max)
		return false;
	for (i = 0; i < n; i++)
		if (!isalnum((unsigned char)s[i]) && !strchr(also, s[i]))
			return false;
	return true;
}

/* The provider in the path, or NULL after a 400. */
static const char *provider_name(struct api_req *r)
{
	if (name_ok(api_param(r, 0), 64, "._-"))
		return api_param(r, 0);
	api_problem(r, PROBLEM_INVALID_REQUEST, "A provider's name has 1 to 64 letters, digits, dots, dashes or underscores.");
	return NULL;
}

/* "provider/model" from the path; false after a 400. */
static bool model_id(struct api_req *r, char out[sizeof(((struct model_spec *)0)->id)])
{
	if (!provider_name(r))
		return false;
	if (name_ok(api_param(r, 1), RUN_MODEL_MAX, "._-:/@+") &&
			text_fmt(out, sizeof(((struct model_spec *)0)->id), "%s/%s", api_param(r, 0), api_param(r, 1)))
		return true;
	api_problem(r, PROBLEM_INVALID_REQUEST,
			"A model's id, provider/model, has at most %d bytes; the part after the slash has letters, digits and . _ "
			"- : / @ +",
			RUN_MODEL_MAX);
	return false;
}

/* --- providers ---------------------------------------------------------------------------------------------------------- */

static void put_provider(struct jw *w, const struct store_provider *p)
{
	jw_object(w);
	jw_kstr(w, "name", p->name);
	jw_kstr(w, "base_url", p->base_url);
	jw_kbool(w, "any_address", p->any_address);
	jw_kbool(w, "has_key", p->has_key);
	jw_close(w);
}

static void on_providers(void *arg, const struct store_providers *p, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(256 * 1024);
	struct jw w;
	size_t i;

	if (!r)
		return;
	list_begin(&w, &out);
	for (i = 0; i < p->count; i++)
		put_provider(&w, &p->providers[i]);
	list_end(&w, NULL);
	api_reply(r, 200, &out);
}

void operator_provider_list(struct api_req *r)
{
	struct err e;

	api_asked(store_provider_list(r->api->opt.store, on_providers, api_hold(r), &e), r, &e);
}

static void on_provider(void *arg, const struct store_providers *p, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(8192);
	struct jw w;
	size_t i;

	if (!r)
		return;
	for (i = 0; i < p->count && strcmp(p->providers[i].name, api_param(r, 0)) != 0; i++)
		continue;
	if (i == p->count) {
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such provider any more.");
		return;
	}
	jw_init(&w, &out);
	put_provider(&w, &p->providers[i]);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

static void on_provider_put(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct err e2;

	if (!r)
		return;
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "provider");
	else
		api_asked(store_provider_list(r->api->opt.store, on_provider, api_hold(r), &e2), r, &e2);
}

/* Printable, absolute, without what would let a credential or a second target hide in it. */
static void check_base_url(struct body *b, const char *url, bool any_address)
{
	struct pointer at = { .up = NULL, .key = "base_url" };
	const char *host = strncmp(url, "https://", 8) == 0 ? url + 8 : strncmp(url, "http://", 7) == 0 ? url + 7 : NULL;
	size_t i, n = strlen(url);

	for (i = 0; i < n && url[i] > 0x20 && url[i] < 0x7f && !strchr("@?#\"\\<>", url[i]); i++)
		continue;
	if (!host || !*host || *host == '/' || i < n)
		field_bad(&b->errors, &at, "must be like https://api.example.com/v1, without user, query or fragment");
	else if (url[n - 1] == '/')
		field_bad(&b->errors, &at, "must not end in a slash; /chat/completions is appended to it");
	else if (url[4] != 's' && !any_address)
		field_bad(&b->errors, &at, "is http; send https, or any_address: true for a provider on your own network");
}

void operator_provider_put(struct api_req *r)
{
	const char *name = provider_name(r), *url, *key;
	struct buf sealed = BUF_INIT(4096);
	struct body b;
	struct err e;
	bool any;

	if (!name)
		return;
	body_open(&b, r, "base_url api_key any_address");
	url = body_text(&b, "base_url", 1, 512, true);
	key = body_text(&b, "api_key", 0, 512, false);
	any = body_flag(&b, "any_address") == 1;
	if (url)
		check_base_url(&b, url, any);
	if (!body_ok(&b, r))
		return;
	if (key && *key && secrets_seal_provider_key(r->api->opt.secrets, name, key, &sealed, &e) == -1) {
		api_error(r, &e);
	} else {
		const uint8_t *bytes = !key ? NULL : sealed.data ? sealed.data : (const uint8_t *)"";

		api_asked(store_provider_put(
					  r->api->opt.store, name, url, any, bytes, sealed.len, on_provider_put, api_hold(r), &e),
				r, &e);
	}
	buf_free(&sealed);
	body_free(&b);
}

/* --- models ------------------------------------------------------------------------------------------------------------- */

static void put_model(struct jw *w, const struct store_model *m)
{
	jw_object(w);
	jw_kstr(w, "id", m->spec.id);
	jw_kstr(w, "provider", m->provider);
	jw_kstr(w, "upstream", m->spec.upstream);
	jw_kbool(w, "default", m->is_default);
	jw_kstr(w, "limit_param", m->spec.limit_param == LIMIT_MAX_TOKENS ? "max_tokens" : "max_completion_tokens");
	jw_kint(w, "max_output_tokens", m->spec.max_output_tokens);
	jw_kint(w, "min_output_tokens", m->spec.min_output_tokens);
	jw_kint(w, "tokens_per_byte_milli", m->spec.tokens_per_byte_milli);
	jw_kint(w, "overhead_tokens", m->spec.overhead_tokens);
	jw_kint(w, "call_timeout_ms", m->spec.call_timeout_ms);
	jw_kbool(w, "priced", m->priced);
	if (m->priced) {
		jw_kint(w, "input_micros_per_million", m->price.input);
		jw_kint(w, "cached_input_micros_per_million", m->price.cached_input);
		jw_kint(w, "output_micros_per_million", m->price.output);
		jw_kint(w, "model_percent_hundredths", m->price.model_percent);
		jw_kint(w, "run_fee_micros", m->price.run_fee);
		jw_kint(w, "compute_micros_per_million_ms", m->price.compute);
		jw_kint(w, "min_cost_micros",
				price_min_cap(&m->price,
						m->spec.overhead_tokens +
								AGENT_REQUEST_BYTES * m->spec.tokens_per_byte_milli / 1000,
						m->spec.min_output_tokens, m->spec.call_timeout_ms));
	}
	jw_close(w);
}

static void on_models(void *arg, const struct store_models *m, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024 * 1024);
	struct jw w;
	size_t i;

	if (!r)
		return;
	list_begin(&w, &out);
	for (i = 0; i < m->count; i++)
		put_model(&w, &m->models[i]);
	list_end(&w, NULL);
	api_reply(r, 200, &out);
}

void operator_model_list(struct api_req *r)
{
	struct err e;

	api_asked(store_model_list(r->api->opt.store, on_models, api_hold(r), &e), r, &e);
}

static void on_model(void *arg, const struct store_models *m, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(8192);
	struct jw w;

	if (!r)
		return;
	if (m->count == 0) {
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such model any more.");
		return;
	}
	jw_init(&w, &out);
	put_model(&w, &m->models[0]);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

/* After a model or its price was written: the model as it is now. */
static void on_model_put(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	char id[sizeof(((struct model_spec *)0)->id)];
	struct err e2;

	if (!r)
		return;
	auth_cache_clear(r->api->auth); /* it holds the default model */
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "provider or model; PUT it first");
	else if (!text_fmt(id, sizeof(id), "%s/%s", api_param(r, 0), api_param(r, 1)))
		api_problem(r, PROBLEM_INTERNAL, "The model's id did not fit.");
	else
		api_asked(store_model_get(r->api->opt.store, id, on_model, api_hold(r), &e2), r, &e2);
}

static void read_limit_param(struct body *b, struct model_spec *spec)
{
	const char *s = body_text(b, "limit_param", 1, 64, false);
	struct pointer at = { .up = NULL, .key = "limit_param" };

	if (!s)
		return;
	if (strcmp(s, "max_completion_tokens") == 0)
		spec->limit_param = LIMIT_MAX_COMPLETION_TOKENS;
	else if (strcmp(s, "max_tokens") == 0)
		spec->limit_param = LIMIT_MAX_TOKENS;
	else
		field_bad(&b->errors, &at, "must be \"max_completion_tokens\" or \"max_tokens\"");
}

void operator_model_put(struct api_req *r)
{
	struct model_spec spec = { 0 };
	const char *upstream;
	bool is_default;
	struct body b;
	struct err e;

	if (!model_id(r, spec.id))
		return;
	body_open(&b, r,
			"upstream limit_param max_output_tokens min_output_tokens tokens_per_byte_milli overhead_tokens "
			"call_timeout_ms default");
	upstream = body_text(&b, "upstream", 1, 128, false);
	if (upstream && !text_copy(spec.upstream, sizeof(spec.upstream), upstream))
		spec.upstream[0] = '\0';
	read_limit_param(&b, &spec);
	spec.max_output_tokens = body_int(&b, "max_output_tokens", 1, TOKENS_MAX, 0, false);
	spec.min_output_tokens = body_int(&b, "min_output_tokens", 1, TOKENS_MAX, 0, false);
	spec.tokens_per_byte_milli = body_int(&b, "tokens_per_byte_milli", 1, 1000000, 0, false);
	spec.overhead_tokens = body_int(&b, "overhead_tokens", 0, TOKENS_MAX, 0, false);
	spec.call_timeout_ms = body_int(&b, "call_timeout_ms", 1000, 3600000, 0, false);
	is_default = body_flag(&b, "default") == 1;
	if (!body_ok(&b, r))
		return;
	body_free(&b);
	api_asked(store_model_put(r->api->opt.store, &spec, is_default, on_model_put, api_hold(r), &e), r, &e);
}

/* --- prices ------------------------------------------------------------------------------------------------------------- */

void operator_price_put(struct api_req *r)
{
	char id[sizeof(((struct model_spec *)0)->id)];
	struct store_price_model p;
	struct body b;
	struct err e;

	if (!model_id(r, id))
		return;
	body_open(&b, r,
			"input_micros_per_million output_micros_per_million cached_input_micros_per_million "
			"model_percent_hundredths");
	p.input = body_int(&b, "input_micros_per_million", 0, RATE_MAX, 0, true);
	p.output = body_int(&b, "output_micros_per_million", 0, RATE_MAX, 0, true);
	p.cached_input = body_int(&b, "cached_input_micros_per_million", 0, RATE_MAX, -1, false);
	p.model_percent = body_int(&b, "model_percent_hundredths", 0, 100000, 0, false);
	if (!body_ok(&b, r))
		return;
	body_free(&b);
	api_asked(store_price_model_put(r->api->opt.store, id, &p, on_model_put, api_hold(r), &e), r, &e);
}

static void on_price_common(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "price");
	else
		api_reply_empty(r, 204);
}

void operator_price_common_put(struct api_req *r)
{
	struct price p = { 0 };
	struct body b;
	struct err e;

	body_open(&b, r,
			"run_fee_micros compute_micros_per_million_ms web_request_micros_per_million "
			"web_search_micros_per_million");
	p.run_fee = body_int(&b, "run_fee_micros", 0, PRICE_MICROS_MAX, -1, false);
	p.compute = body_int(&b, "compute_micros_per_million_ms", 0, RATE_MAX, -1, false);
	p.web_request = body_int(&b, "web_request_micros_per_million", 0, RATE_MAX, -1, false);
	p.web_search = body_int(&b, "web_search_micros_per_million", 0, RATE_MAX, -1, false);
	if (!body_ok(&b, r))
		return;
	body_free(&b);
	api_asked(store_price_common_put(r->api->opt.store, &p, on_price_common, api_hold(r), &e), r, &e);
}
