/*
 * Providers, models, prices. Owns a copy of the models with today's prices, at most a second old, so that a create reads nothing
 * for it. Called by api and dispatch on the loop's thread; does not block.
 */
#include "store_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>

#define MODELS_MAX 500
#define CATALOG_NS INT64_C(1000000000)

struct waiting {
	struct waiting *next;
	struct call *call;
};

struct catalog {
	struct store *s;
	struct store_model *models;
	size_t count;
	int64_t loaded_ns; /* CLOCK_BOOTTIME when the copy was asked for; 0 = never, or a change made it void */
	int64_t asked_ns;
	unsigned changes; /* changes made through this controld */
	unsigned asked_changes;
	bool loading;
	struct waiting *waiting;
	struct event *turn; /* answers from the copy, in the loop's next turn */
};

/* ---- the copy -------------------------------------------------------------------------------------------------------------------
 */

static const struct pg_stmt stmt_models = {
	.name = "models",
	.sql = "SELECT m.id, m.provider, m.upstream, p.base_url, p.any_address, m.limit_param, m.max_output_tokens, "
	       "m.min_output_tokens, "
	       "m.tokens_per_byte_milli, m.overhead_tokens, m.call_timeout_ms, x.model_id IS NOT NULL, "
	       "m.id = (SELECT value FROM settings WHERE name = 'default_model'), c.run_fee, c.compute, coalesce(x.input, 0), "
	       "coalesce(x.cached_input, 0), coalesce(x.output, 0), coalesce(x.model_percent, 0), c.web_request, c.web_search "
	       "FROM models m JOIN providers p ON p.name = m.provider "
	       "LEFT JOIN LATERAL (SELECT * FROM model_prices y WHERE y.model_id = m.id AND y.valid_from_ms <= eph_now_ms() "
	       "ORDER BY y.valid_from_ms DESC LIMIT 1) x ON true "
	       "CROSS JOIN LATERAL (SELECT * FROM common_prices z WHERE z.valid_from_ms <= eph_now_ms() ORDER BY z.valid_from_ms "
	       "DESC LIMIT 1) c "
	       "ORDER BY m.id LIMIT 500",
	.nparams = 0,
};

static void read_model(const struct pg_rows *rows, int i, struct store_model *m)
{
	col_text(rows, i, 0, m->spec.id, sizeof(m->spec.id));
	col_text(rows, i, 1, m->provider, sizeof(m->provider));
	col_text(rows, i, 2, m->spec.upstream, sizeof(m->spec.upstream));
	col_text(rows, i, 3, m->spec.base_url, sizeof(m->spec.base_url));
	m->spec.any_address = pg_bool(rows, i, 4);
	m->spec.limit_param = strcmp(pg_text(rows, i, 5), "max_tokens") == 0 ? LIMIT_MAX_TOKENS : LIMIT_MAX_COMPLETION_TOKENS;
	m->spec.max_output_tokens = pg_i64(rows, i, 6);
	m->spec.min_output_tokens = pg_i64(rows, i, 7);
	m->spec.tokens_per_byte_milli = pg_i64(rows, i, 8);
	m->spec.overhead_tokens = pg_i64(rows, i, 9);
	m->spec.call_timeout_ms = pg_i64(rows, i, 10);
	m->priced = pg_bool(rows, i, 11);
	m->is_default = pg_bool(rows, i, 12);
	m->price.run_fee = pg_i64(rows, i, 13);
	m->price.compute = pg_i64(rows, i, 14);
	m->price.input = pg_i64(rows, i, 15);
	m->price.cached_input = pg_i64(rows, i, 16);
	m->price.output = pg_i64(rows, i, 17);
	m->price.model_percent = pg_i64(rows, i, 18);
	m->price.web_request = pg_i64(rows, i, 19);
	m->price.web_search = pg_i64(rows, i, 20);
}

/* Everything, or the one that the call names. */
static void answer(const struct catalog *k, struct call *c)
{
	struct store_models out = { .models = k->models, .count = k->count };

	if (c->kind) {
		out.count = 0;
		for (size_t i = 0; i < k->count; i++) {
			if (strcmp(k->models[i].spec.id, c->text) == 0) {
				out.models = &k->models[i];
				out.count = 1;
			}
		}
	}
	c->cb.models(c->arg, &out, NULL);
	free(c);
}

static void answer_all(struct catalog *k, const struct err *e)
{
	struct waiting *list = k->waiting;

	k->waiting = NULL;
	while (list) {
		struct waiting *w = list;

		list = w->next;
		if (e) {
			w->call->cb.models(w->call->arg, NULL, e);
			free(w->call);
		} else {
			answer(k, w->call);
		}
		free(w);
	}
}

static bool fresh(const struct catalog *k)
{
	return k->loaded_ns != 0 && clock_boot_ns() - k->loaded_ns < CATALOG_NS;
}

static void load(struct catalog *k);

static void on_models(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct catalog *k = arg;
	struct store_model *models;
	int n = pg_nrows(rows);
	struct err no_memory;

	(void)sqlstate;
	k->loading = false;
	if (e) {
		answer_all(k, call_error(e));
		return;
	}
	if (k->changes != k->asked_changes && k->s->reads) { /* a change overtook the question */
		load(k);
		return;
	}
	models = calloc(n > 0 ? (size_t)n : 1, sizeof(*models));
	if (!models) {
		err_set(&no_memory, ERR_NOMEM, "no memory for the models");
		answer_all(k, &no_memory);
		return;
	}
	for (int i = 0; i < n; i++)
		read_model(rows, i, &models[i]);
	free(k->models);
	k->models = models;
	k->count = (size_t)n;
	k->loaded_ns = k->asked_ns;
	answer_all(k, NULL);
}

static void load(struct catalog *k)
{
	struct err e;

	if (k->loading)
		return;
	k->asked_ns = clock_boot_ns();
	k->asked_changes = k->changes;
	k->loading = true;
	if (!k->s->reads)
		err_set(&e, ERR_UNAVAILABLE, "the store is closing");
	else if (pgev_exec(k->s->reads, &stmt_models, NULL, on_models, k, &e) == 0)
		return;
	k->loading = false;
	answer_all(k, &e);
}

static void on_turn(evutil_socket_t fd, short what, void *arg)
{
	struct catalog *k = arg;

	(void)fd;
	(void)what;
	if (fresh(k))
		answer_all(k, NULL);
	else
		load(k);
}

static int wait_for_copy(struct store *s, struct call *c, struct err *e)
{
	struct waiting *w = c ? calloc(1, sizeof(*w)) : NULL;
	const struct timeval now = { 0, 0 };

	if (!w) {
		free(c);
		return err_set(e, ERR_NOMEM, "no memory for a statement");
	}
	w->call = c;
	w->next = s->catalog->waiting;
	s->catalog->waiting = w;
	event_add(s->catalog->turn, &now);
	return 0;
}

int store_model_list(struct store *s, store_models_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);

	if (c)
		c->cb.models = cb;
	return wait_for_copy(s, c, e);
}

int store_model_get(struct store *s, const char *id, store_models_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);

	if (c) {
		c->cb.models = cb;
		c->kind = 1;
		if (!text_copy(c->text, sizeof(c->text), id))
			c->text[0] = '\0'; /* longer than any id: not found */
	}
	return wait_for_copy(s, c, e);
}

int catalog_new(struct store *s, struct catalog **out, struct err *e)
{
	struct catalog *k = calloc(1, sizeof(*k));

	if (k)
		k->turn = evtimer_new(s->base, on_turn, k);
	if (!k || !k->turn) {
		free(k);
		return err_set(e, ERR_NOMEM, "no memory for the models");
	}
	k->s = s;
	*out = k;
	return 0;
}

void catalog_free(struct catalog *k)
{
	struct err e;

	if (!k)
		return;
	err_set(&e, ERR_UNAVAILABLE, "the store is closing");
	answer_all(k, &e);
	event_free(k->turn);
	free(k->models);
	free(k);
}

/* ---- changes
 * ---------------------------------------------------------------------------------------------------------------------- */

static void on_changed(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;

	/* Also after an error: it may have been done. */
	c->s->catalog->changes++;
	c->s->catalog->loaded_ns = 0;
	call_done_rows(c, rows, sqlstate, e);
}

static const struct pg_stmt stmt_provider_put = {
	.name = "provider_put",
	.sql = "INSERT INTO providers (name, base_url, any_address, sealed_key) VALUES ($1, $2, $3, coalesce($4::bytea, '')) "
	       "ON CONFLICT (name) DO UPDATE SET base_url = EXCLUDED.base_url, any_address = EXCLUDED.any_address, "
	       "sealed_key = coalesce($4::bytea, providers.sealed_key) RETURNING 'done', ''",
	.nparams = 4,
};

int store_provider_put(struct store *s, const char *name, const char *base_url, bool any_address, const uint8_t *sealed_key,
		size_t sealed_len, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	params_text(&p, name);
	params_text(&p, base_url);
	params_bool(&p, any_address);
	params_bytes(&p, sealed_key, sealed_len);
	return call_exec(c, s->money, &stmt_provider_put, &p, on_changed, e);
}

static const struct pg_stmt stmt_provider_list = {
	.name = "provider_list",
	.sql = "SELECT name, base_url, any_address, length(sealed_key) > 0 FROM providers ORDER BY name LIMIT 100",
	.nparams = 0,
};

static void on_providers(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_provider *list = calloc(100, sizeof(*list));
	struct store_providers out = { .providers = list };
	struct err no_memory;

	(void)sqlstate;
	if (!e && !list) {
		err_set(&no_memory, ERR_NOMEM, "no memory for the providers");
		e = &no_memory;
	}
	for (int i = 0; !e && i < pg_nrows(rows) && i < 100; i++) {
		struct store_provider *v = &list[out.count++];

		col_text(rows, i, 0, v->name, sizeof(v->name));
		col_text(rows, i, 1, v->base_url, sizeof(v->base_url));
		v->any_address = pg_bool(rows, i, 2);
		v->has_key = pg_bool(rows, i, 3);
	}
	c->cb.providers(c->arg, e ? NULL : &out, e ? call_error(e) : NULL);
	free(list);
	free(c);
}

int store_provider_list(struct store *s, store_providers_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.providers = cb;
	return call_exec(c, s->reads, &stmt_provider_list, &p, on_providers, e);
}

static const struct pg_stmt stmt_model_put = {
	.name = "model_put",
	.sql = "WITH known AS (SELECT name FROM providers WHERE name = $2), made AS ("
	       "INSERT INTO models (id, provider, upstream, limit_param, max_output_tokens, min_output_tokens, "
	       "tokens_per_byte_milli, "
	       "overhead_tokens, call_timeout_ms) SELECT $1, name, $3, $4, $5::bigint, $6::bigint, $7::bigint, $8::bigint, "
	       "$9::bigint FROM known "
	       "ON CONFLICT (id) DO UPDATE SET upstream = EXCLUDED.upstream, limit_param = EXCLUDED.limit_param, "
	       "max_output_tokens = EXCLUDED.max_output_tokens, min_output_tokens = EXCLUDED.min_output_tokens, "
	       "tokens_per_byte_milli = EXCLUDED.tokens_per_byte_milli, overhead_tokens = EXCLUDED.overhead_tokens, "
	       "call_timeout_ms = EXCLUDED.call_timeout_ms RETURNING id), standard AS ("
	       "INSERT INTO settings (name, value) SELECT 'default_model', id FROM made WHERE $10 "
	       "ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value) "
	       "SELECT CASE WHEN EXISTS (SELECT 1 FROM made) THEN 'done' ELSE 'not_found' END, 'no provider has the name ' || $2",
	.nparams = 10,
};

int store_model_put(struct store *s, const struct model_spec *spec, bool make_default, store_done_cb cb, void *arg, struct err *e)
{
	const char *slash = strchr(spec->id, '/');
	struct call *c;
	struct params p = { .n = 0 };
	char provider[65];

	if (!slash || slash == spec->id || slash[1] == '\0' || (size_t)(slash - spec->id) >= sizeof(provider))
		return err_set(e, ERR_INVALID, "a model's id is provider/model");
	memcpy(provider, spec->id, (size_t)(slash - spec->id));
	provider[slash - spec->id] = '\0';
	c = call_new(s, arg, e);
	if (!c)
		return -1;
	c->cb.done = cb;
	params_text(&p, spec->id);
	params_text(&p, provider);
	params_text(&p, spec->upstream[0] ? spec->upstream : slash + 1);
	params_text(&p, spec->limit_param == LIMIT_MAX_TOKENS ? "max_tokens" : "max_completion_tokens");
	params_i64(&p, spec->max_output_tokens > 0 ? spec->max_output_tokens : 16384);
	params_i64(&p, spec->min_output_tokens > 0 ? spec->min_output_tokens : 16);
	params_i64(&p, spec->tokens_per_byte_milli > 0 ? spec->tokens_per_byte_milli : 1000);
	params_i64(&p, spec->overhead_tokens > 0 ? spec->overhead_tokens : 512);
	params_i64(&p, spec->call_timeout_ms > 0 ? spec->call_timeout_ms : 60000);
	params_bool(&p, make_default);
	return call_exec(c, s->money, &stmt_model_put, &p, on_changed, e);
}

static const struct pg_stmt stmt_price_model = {
	.name = "price_model",
	.sql = "SELECT eph_price_model_put($1, $2, $3, $4, $5), 'no model has the id ' || $1",
	.nparams = 5,
};

int store_price_model_put(struct store *s, const char *model_id, const struct store_price_model *v, store_done_cb cb, void *arg,
		struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	params_text(&p, model_id);
	params_i64(&p, v->input);
	params_i64(&p, v->cached_input);
	params_i64(&p, v->output);
	params_i64(&p, v->model_percent);
	return call_exec(c, s->money, &stmt_price_model, &p, on_changed, e);
}

static const struct pg_stmt stmt_price_common = {
	.name = "price_common",
	.sql = "SELECT eph_price_common_put($1, $2, $3, $4), ''",
	.nparams = 4,
};

int store_price_common_put(struct store *s, const struct price *v, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	params_i64(&p, v->run_fee);
	params_i64(&p, v->compute);
	params_i64(&p, v->web_request);
	params_i64(&p, v->web_search);
	return call_exec(c, s->money, &stmt_price_common, &p, on_changed, e);
}
