/* What a key can see of its organization: me, models, keys. Runs on the loop, does not block. */
#include "api_internal.h"

#include "account.h"
#include "common/price.h"
#include "common/text.h"
#include "proto/event.h"
#include "proto/tools.h"
#include "secrets.h"

#include <sodium.h>

#define LIST_DEFAULT 20
#define KEY_NAME_MAX 128

/* --- me ----------------------------------------------------------------------------------------------------------------- */

static void put_rates(struct jw *w, const struct price *p)
{
	jw_kobject(w, "rates");
	jw_kint(w, "run_fee_micros", p->run_fee);
	jw_kint(w, "compute_micros_per_million_ms", p->compute);
	jw_kint(w, "model_percent_hundredths", p->model_percent);
	jw_kint(w, "web_request_micros_per_million", p->web_request);
	jw_kint(w, "web_search_micros_per_million", p->web_search);
	jw_close(w);
}

static void put_sizes(struct jw *w, const struct api *a)
{
	int i;

	jw_kobject(w, "sizes");
	for (i = 0; i < API_SIZE_COUNT; i++) {
		jw_kobject(w, api_size_name((enum api_size)i));
		jw_kint(w, "memory_mib", a->opt.sizes[i].memory_mib);
		jw_kint(w, "vcpus", a->opt.sizes[i].vcpus);
		jw_close(w);
	}
	jw_close(w);
}

static void put_limits(struct jw *w, const struct api *a, const struct store_me *me)
{
	jw_kobject(w, "limits");
	jw_kint(w, "max_timeout_seconds", a->opt.max_timeout_seconds);
	jw_kint(w, "default_timeout_seconds", a->opt.default_timeout_seconds);
	jw_kint(w, "max_cost_micros", a->opt.max_cost_micros);
	jw_kint(w, "queue_timeout_seconds", a->opt.queue_timeout_seconds);
	jw_kint(w, "max_queued_runs", me->max_queued);
	jw_kint(w, "max_running_runs", me->max_running);
	jw_kint(w, "max_model_calls", RUN_MODEL_CALLS_MAX);
	jw_kint(w, "prompt_bytes", RUN_PROMPT_MAX);
	jw_kint(w, "request_body_bytes", RUN_BODY_MAX);
	jw_kint(w, "files", RUN_FILES_MAX);
	jw_kint(w, "inline_file_bytes", RUN_INLINE_MAX);
	jw_kint(w, "metadata_pairs", RUN_METADATA_MAX);
	jw_kint(w, "output_bytes", GUEST_RESULT_MAX);
	jw_kint(w, "events", EVENT_RUN_COUNT_MAX);
	jw_kint(w, "event_bytes", EVENT_RUN_BYTES_MAX);
	jw_kint(w, "events_per_second", EVENT_RATE_PER_SECOND);
	put_sizes(w, a);
	jw_close(w);
}

static void on_me(void *arg, const struct store_me *me, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(64 * 1024);
	int64_t cost;
	struct jw w;

	if (!r)
		return;
	cost = r->who.default_cost_micros ? r->who.default_cost_micros : r->api->opt.default_cost_micros;
	jw_init(&w, &out);
	jw_object(&w);
	jw_kobject(&w, "organization");
	jw_kstr(&w, "id", me->org_id);
	jw_kstr(&w, "name", me->org_name);
	jw_close(&w);
	jw_kstr(&w, "role", store_role_text(r->who.role));
	jw_kobject(&w, "key");
	jw_kstr(&w, "id", r->who.key_id);
	jw_kstr(&w, "name", *r->who.key_name ? r->who.key_name : NULL);
	jw_close(&w);
	jw_kint(&w, "balance_micros", me->balance_micros);
	jw_kint(&w, "reserved_micros", me->reserved_micros);
	jw_kint(&w, "available_micros", me->balance_micros - me->reserved_micros);
	jw_kbool(&w, "unlimited", me->unlimited);
	jw_karray(&w, "budgets");
	jw_close(&w);
	jw_kobject(&w, "runs");
	jw_kint(&w, "queued", me->queued);
	jw_kint(&w, "running", me->running);
	jw_close(&w);
	jw_kstr(&w, "default_model", *r->who.default_model ? r->who.default_model : NULL);
	jw_kint(&w, "default_max_cost_micros", cost);
	jw_kbool(&w, "allow_emulated", me->allow_emulated);
	put_limits(&w, r->api, me);
	put_rates(&w, &me->price);
	jw_close(&w);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

void me_get(struct api_req *r)
{
	struct err e;

	api_asked(store_me(r->api->opt.store, r->who.org_id, on_me, api_hold(r), &e), r, &e);
}

/* --- models ------------------------------------------------------------------------------------------------------------- */

static void put_model(struct jw *w, const struct store_model *m, const char *org_default)
{
	jw_object(w);
	jw_kstr(w, "id", m->spec.id);
	jw_kstr(w, "provider", m->provider);
	jw_kbool(w, "default", strcmp(org_default, m->spec.id) == 0);
	jw_kbool(w, "scripted", strcmp(m->provider, "scripted") == 0);
	jw_kint(w, "input_micros_per_million", m->price.input);
	jw_kint(w, "cached_input_micros_per_million", m->price.cached_input);
	jw_kint(w, "output_micros_per_million", m->price.output);
	jw_kint(w, "model_percent_hundredths", m->price.model_percent);
	jw_kint(w, "max_output_tokens", m->spec.max_output_tokens);
	jw_kint(w, "min_cost_micros",
			price_min_cap(&m->price,
					m->spec.overhead_tokens + AGENT_REQUEST_BYTES * m->spec.tokens_per_byte_milli / 1000,
					m->spec.min_output_tokens, m->spec.call_timeout_ms));
	jw_close(w);
}

/* Those that a run may name now: a model without a price is not one of them. */
static void on_models(void *arg, const struct store_models *models, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024 * 1024);
	struct jw w;
	size_t i;

	if (!r)
		return;
	list_begin(&w, &out);
	for (i = 0; i < models->count; i++)
		if (models->models[i].priced)
			put_model(&w, &models->models[i], r->who.default_model);
	list_end(&w, NULL);
	api_reply(r, 200, &out);
}

void models_list(struct api_req *r)
{
	struct err e;

	api_asked(store_model_list(r->api->opt.store, on_models, api_hold(r), &e), r, &e);
}

/* --- keys: for an admin of the organization, and for the operator ------------------------------------------------------- */

static void key_put(struct jw *w, const struct store_key *k)
{
	jw_object(w);
	jw_kstr(w, "id", k->id);
	jw_kstr(w, "name", *k->name ? k->name : NULL);
	jw_kstr(w, "role", store_role_text(k->role));
	jw_kstr(w, "member_id", *k->member_id ? k->member_id : NULL);
	json_time(w, "created_at", k->created_at_ms);
	json_time(w, "expires_at", k->expires_at_ms);
	json_time(w, "revoked_at", k->revoked_at_ms);
	json_time(w, "last_used_at", k->last_used_at_ms);
	jw_close(w);
}

static void on_keys(void *arg, const struct store_keys *k, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024 * 1024);
	struct jw w;
	size_t i;

	if (!r)
		return;
	list_begin(&w, &out);
	for (i = 0; i < k->count; i++)
		key_put(&w, &k->keys[i]);
	list_end(&w, k->next_cursor);
	api_reply(r, 200, &out);
}

bool list_page(struct api_req *r, const char **cursor, int *limit)
{
	struct field_errors fe;
	int64_t n;

	field_errors_init(&fe);
	api_query_int(r, "limit", 1, STORE_LIST_MAX, LIST_DEFAULT, &n, &fe);
	*limit = (int)n;
	*cursor = http_query(r->http, "cursor", NULL);
	if (*cursor && !**cursor)
		*cursor = NULL;
	if (*cursor && strlen(*cursor) >= ID_MAX)
		query_bad(&fe, "cursor", "must be the next_cursor of the page before, unchanged");
	if (!field_errors_any(&fe))
		return true;
	api_problem_fields(r, &fe);
	return false;
}

void key_list_answer(struct api_req *r, const char *org_id)
{
	const char *cursor;
	struct err e;
	int limit;

	if (list_page(r, &cursor, &limit))
		api_asked(store_key_list(r->api->opt.store, org_id, cursor, limit, on_keys, api_hold(r), &e), r, &e);
}

/* What a new key's answer shows; the secret is in no other place than this and the answer. */
struct key_making {
	struct store_key key;
	char secret[64];
};

static void making_free(void *state)
{
	sodium_memzero(state, sizeof(struct key_making));
	free(state);
}

/* Besides the organization in the path two things may be wrong that only the store knows: the member, and the role beside it. */
static void key_problem(struct api_req *r, const struct store_done *d)
{
	const bool no_member = d->result == STORE_DONE_NOT_FOUND && !strstr(d->detail, "organization");
	struct pointer at = { .up = NULL, .key = no_member ? "member_id" : "role" };
	struct field_errors fe;

	if (!no_member && d->result != STORE_DONE_CONFLICT) {
		api_done_problem(r, d, "organization");
		return;
	}
	field_errors_init(&fe);
	field_bad(&fe, &at, "%s", no_member ? "is no member of this organization; GET /v1/members lists them" : d->detail);
	api_problem_fields(r, &fe);
}

static void on_key_made(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct key_making *m = r ? r->state : NULL;
	struct buf out = BUF_INIT(8192);
	struct jw w;

	if (!r)
		return;
	if (d->result != STORE_DONE) {
		key_problem(r, d);
		return;
	}
	jw_init(&w, &out);
	jw_object(&w);
	jw_kstr(&w, "id", d->id);
	jw_kstr(&w, "key", m->secret);
	jw_kstr(&w, "name", *m->key.name ? m->key.name : NULL);
	jw_kstr(&w, "role", store_role_text(m->key.role));
	jw_kstr(&w, "member_id", *m->key.member_id ? m->key.member_id : NULL);
	json_time(&w, "expires_at", m->key.expires_at_ms);
	jw_close(&w);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 201, &out);
}

/* The body of a new key into k; the texts are copied. */
static void read_key(struct body *b, struct api_req *r, struct store_key *k)
{
	const char *name, *member;
	struct pointer at = { .up = NULL, .key = "member_id" };

	body_open(b, r, "name role member_id expires_at");
	name = body_text(b, "name", 0, KEY_NAME_MAX, false);
	k->role = body_role(b, "role");
	member = body_text(b, "member_id", 0, ID_MAX - 1, false);
	if (member && !id_valid("mem", member))
		field_bad(&b->errors, &at, "must be a member's id, mem_ and 32 hex digits, as GET /v1/members lists them");
	k->expires_at_ms = body_future(b, "expires_at");
	if (!text_copy(k->name, sizeof(k->name), name ? name : ""))
		k->name[0] = '\0';
	if (!text_copy(k->member_id, sizeof(k->member_id), member ? member : ""))
		k->member_id[0] = '\0';
}

void key_create_answer(struct api_req *r, const char *org_id)
{
	struct key_making *m = calloc(1, sizeof(*m));
	uint8_t hash[SECRETS_HASH_LEN];
	struct store_key_new n = { .org_id = org_id, .key_hash = hash };
	struct body b;
	struct err e;

	if (!m) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
		return;
	}
	api_set_state(r, m, making_free);
	read_key(&b, r, &m->key);
	if (!body_ok(&b, r))
		return;
	body_free(&b);
	id_secret_make("eph_", m->secret);
	secrets_key_hash(r->api->opt.secrets, m->secret, hash);
	n.name = m->key.name;
	n.member_id = m->key.member_id;
	n.role = m->key.role;
	n.expires_at_ms = m->key.expires_at_ms;
	api_asked(store_key_create(r->api->opt.store, &n, on_key_made, api_hold(r), &e), r, &e);
}

static void on_key_revoked(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	auth_cache_clear(r->api->auth);
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "key");
	else
		api_reply_empty(r, 204);
}

void key_revoke_answer(struct api_req *r, const char *org_id, const char *key_id, bool keep_admin)
{
	struct err e;

	if (!id_valid("key", key_id)) {
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such key.");
		return;
	}
	api_asked(store_key_revoke(r->api->opt.store, org_id, key_id, keep_admin, on_key_revoked, api_hold(r), &e), r, &e);
}

void keys_list(struct api_req *r)
{
	key_list_answer(r, r->who.org_id);
}

void keys_create(struct api_req *r)
{
	key_create_answer(r, r->who.org_id);
}

void keys_revoke(struct api_req *r)
{
	key_revoke_answer(r, r->who.org_id, api_param(r, 0), true);
}
