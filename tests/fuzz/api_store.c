/*
 * The store of fuzz_api (api_play.h): store/store.h without Postgres. Each call takes one character of the script: '0' or nothing
 * left = what was asked for, '1'..'9' = another outcome that the store has for it, 'u' unavailable, 'c' conflict, 'i' internal, 'f'
 * full (the call itself fails). Answers come when store_play_step is called, never from inside the call.
 *
 * Checked at each call: the texts are what Postgres takes and within their columns, ids are ids, numbers are within the bounds that
 * the interface names, the organization is the key's, and the key's role is enough for the change.
 */
#include "api_play.h"

#include "common/clock.h"
#include "common/text.h"
#include "controld/api/run_request.h"
#include "controld/store/store.h"
#include "proto/tools.h"

#define ORG "org_0123456789abcdef0123456789abcdef"
#define OTHER "org_ffffffffffffffffffffffffffffffff"
#define RUN "run_0123456789abcdef0123456789abcdef"
#define NASTY "na\"me\\ \xc3\xa9\x01</script>"
#define OWED 64

/* An answer that is still to come. */
struct owed {
	void (*deliver)(const struct owed *o);
	void (*cb)(void);
	void *arg;
	char what; /* of the script */
	char id[160];
	int64_t number;
};

struct store_sub {
	store_sub_cb cb;
	void *arg;
	struct store_sub *next, **prev;
};

static struct owed owed[OWED];
static size_t owed_first, owed_count;
static const char *script;
static struct store_sub *subs;
static struct store_played played;
static struct store_principal asker; /* who the last key was found to be */

static const struct {
	const char *key;
	struct store_principal who;
} keys[] = {
	{ "eph_viewer", { .role = STORE_ROLE_VIEWER, .default_model = "p/m" } },
	{ "eph_member", { .role = STORE_ROLE_MEMBER, .default_model = "p/m", .allow_emulated = true } },
	{ "eph_plain", { .role = STORE_ROLE_MEMBER, .default_cost_micros = 1 } },
	{ "eph_admin", { .role = STORE_ROLE_ADMIN, .default_model = "p/m", .default_cost_micros = 900000 } },
	{ "eph_expired", { .result = STORE_AUTH_EXPIRED } },
	{ "eph_disabled", { .result = STORE_AUTH_DISABLED } },
	{ "ephop_operator", { .is_operator = true } },
};
#define KEYS (sizeof(keys) / sizeof(keys[0]))
static uint8_t hashes[KEYS][SECRETS_HASH_LEN];

void store_play_begin(const char *s, const struct secrets *secrets)
{
	script = s;
	played = (struct store_played){ .changes = 0 };
	memset(&asker, 0, sizeof(asker));
	for (size_t i = 0; i < KEYS; i++)
		secrets_key_hash(secrets, keys[i].key, hashes[i]);
}

const struct store_played *store_played(void)
{
	return &played;
}

bool store_play_step(void)
{
	struct owed o;

	if (owed_count == 0)
		return false;
	o = owed[owed_first];
	owed_first = (owed_first + 1) % OWED;
	owed_count--;
	o.deliver(&o);
	return true;
}

void store_play_end(void)
{
	must(owed_count == 0 && subs == NULL);
}

/* Queues the answer; -1 when the script says that the call fails. */
static int owe(void (*deliver)(const struct owed *o), void (*cb)(void), void *arg, const char *id, int64_t number, struct err *e)
{
	struct owed *o = &owed[(owed_first + owed_count) % OWED];
	char what = *script ? *script++ : '0';

	if (what == 'f') {
		played.failed = true;
		return err_set(e, ERR_UNAVAILABLE, "too many statements");
	}
	must(owed_count < OWED);
	owed_count++;
	*o = (struct owed){ .deliver = deliver, .cb = cb, .arg = arg, .what = what, .number = number };
	must(text_copy(o->id, sizeof(o->id), id));
	return 0;
}

static const struct err *trouble(const struct owed *o, struct err *e)
{
	switch (o->what) {
	case 'u': err_set(e, ERR_UNAVAILABLE, "connection lost"); break;
	case 'c': err_set(e, ERR_CONFLICT, "lock timeout"); break;
	case 'i': err_set(e, ERR_INTERNAL, "syntax error at \"secret\""); break;
	default: return NULL;
	}
	played.failed = true;
	played.broken = played.broken || o->what == 'i';
	return e;
}

/* What `fn` answers: a function that fills struct `type` and one that hands it over. */
#define ANSWER(name, type, cb_type)                                                                                                \
	static void fill_##name(const struct owed *o, struct type *r);                                                             \
	static void name(const struct owed *o)                                                                                     \
	{                                                                                                                          \
		struct type r;                                                                                                     \
		struct err e;                                                                                                      \
		const struct err *bad = trouble(o, &e);                                                                            \
                                                                                                                                   \
		memset(&r, 0, sizeof(r));                                                                                          \
		if (!bad)                                                                                                          \
			fill_##name(o, &r);                                                                                        \
		((cb_type)o->cb)(o->arg, bad ? NULL : &r, bad);                                                                    \
	}                                                                                                                          \
	static void fill_##name(const struct owed *o, struct type *r)

#define OWE(name, id, number) owe(name, (void (*)(void))cb, arg, id, number, e)

/* --- what is given must be fit
 * ---------------------------------------------------------------------------------------------------- */

static void text_fits(const char *s, size_t min, size_t max)
{
	must(s != NULL && strlen(s) >= min && strlen(s) <= max && text_utf8_clean(s, strlen(s)));
}

static void text_fits_or_null(const char *s, size_t max)
{
	if (s)
		text_fits(s, 0, max);
}

static void within(int64_t v, int64_t min, int64_t max)
{
	must(v >= min && v <= max);
}

static void page_fits(const char *cursor, int limit)
{
	text_fits_or_null(cursor, ID_MAX - 1);
	within(limit, 1, STORE_LIST_MAX);
}

/* Of the asker's organization; of any for the operator. */
static void org_fits(const char *org_id)
{
	must(id_valid("org", org_id));
	must(asker.is_operator || strcmp(org_id, ORG) == 0);
}

static void may(enum store_role role)
{
	must(asker.is_operator || asker.role >= role);
}

static void operator_only(void)
{
	must(asker.is_operator);
}

static void copy(char *out, size_t size, const char *s)
{
	must(text_copy(out, size, s));
}

#define COPY(field, s) copy(field, sizeof(field), s)

/* --- who asks --------------------------------------------------------------------------------------------------------------------
 */

ANSWER(principal, store_principal, store_auth_cb)
{
	r->result = STORE_AUTH_UNKNOWN;
	if (o->number >= 0)
		*r = keys[o->number].who;
	COPY(r->org_id, ORG);
	COPY(r->org_name, NASTY);
	COPY(r->key_id, "key_0123456789abcdef0123456789abcdef");
	COPY(r->key_name, NASTY);
	asker = *r;
}

int store_auth(struct store *s, const uint8_t key_hash[32], store_auth_cb cb, void *arg, struct err *e)
{
	int64_t found = -1;

	(void)s;
	for (size_t i = 0; i < KEYS; i++)
		if (memcmp(hashes[i], key_hash, sizeof(hashes[i])) == 0)
			found = (int64_t)i;
	return OWE(principal, "", found);
}

const char *store_role_text(enum store_role r)
{
	static const char *const names[] = { "none", "viewer", "member", "admin" };

	return names[r];
}

enum store_role store_role_parse(const char *s)
{
	for (enum store_role r = STORE_ROLE_VIEWER; r <= STORE_ROLE_ADMIN; r++)
		if (strcmp(store_role_text(r), s) == 0)
			return r;
	return STORE_ROLE_NONE;
}

ANSWER(health, store_health, store_health_cb)
{
	r->partitions_ahead_days = o->what - '1';
	r->schema_version = 1;
	r->nodes_live = o->what % 2;
}

int store_health(struct store *s, store_health_cb cb, void *arg, struct err *e)
{
	(void)s;
	return OWE(health, "", 0);
}

ANSWER(me, store_me, store_me_cb)
{
	COPY(r->org_id, o->id);
	COPY(r->org_name, NASTY);
	r->balance_micros = PRICE_MICROS_MAX;
	r->reserved_micros = o->what;
}

int store_me(struct store *s, const char *org_id, store_me_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	return OWE(me, org_id, 0);
}

/* --- changes
 * ---------------------------------------------------------------------------------------------------------------------- */

ANSWER(done, store_done, store_done_cb)
{
	r->result = o->what >= '1' && o->what <= '3' ? (enum store_done_result)(o->what - '0') : STORE_DONE;
	r->id = o->id;
	r->detail = o->what == '2' ? NASTY : o->what == '4' ? "no organization" : "";
	if (o->what == '4')
		r->result = STORE_DONE_NOT_FOUND;
	played.changes += r->result == STORE_DONE;
}

#define CHANGE(id) OWE(done, id, 0)

int store_key_create(struct store *s, const struct store_key_new *k, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_ADMIN);
	org_fits(k->org_id);
	text_fits_or_null(k->name, STORE_NAME_MAX - 1);
	must(!k->member_id || !*k->member_id || id_valid("mem", k->member_id));
	within(k->role, STORE_ROLE_VIEWER, STORE_ROLE_ADMIN);
	must(k->expires_at_ms == 0 || k->expires_at_ms > clock_real_ms() - 60000);
	return CHANGE("key_0123456789abcdef0123456789abcdef");
}

int store_key_revoke(struct store *s, const char *org_id, const char *key_id, bool keep_admin, store_done_cb cb, void *arg,
		struct err *e)
{
	(void)s;
	may(STORE_ROLE_ADMIN);
	org_fits(org_id);
	must(id_valid("key", key_id) && keep_admin != asker.is_operator);
	return CHANGE(key_id);
}

static void member_fits(const struct store_member_change *m)
{
	text_fits_or_null(m->name, STORE_MEMBER_NAME_MAX - 1);
	must(!m->name || utf8_length(m->name, strlen(m->name)) <= 128);
	text_fits_or_null(m->email, STORE_EMAIL_MAX - 1);
	within(m->role, STORE_ROLE_NONE, STORE_ROLE_ADMIN);
}

int store_member_create(struct store *s, const char *org_id, const struct store_member_change *m, store_done_cb cb, void *arg,
		struct err *e)
{
	(void)s;
	may(STORE_ROLE_ADMIN);
	org_fits(org_id);
	member_fits(m);
	must(m->name && m->role != STORE_ROLE_NONE);
	return CHANGE("mem_0123456789abcdef0123456789abcdef");
}

int store_member_update(struct store *s, const char *org_id, const char *member_id, const struct store_member_change *m,
		store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_ADMIN);
	org_fits(org_id);
	member_fits(m);
	must(id_valid("mem", member_id));
	return CHANGE(member_id);
}

int store_member_remove(struct store *s, const char *org_id, const char *member_id, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_ADMIN);
	org_fits(org_id);
	must(id_valid("mem", member_id));
	return CHANGE(member_id);
}

static void org_change_fits(const struct store_org_change *c)
{
	operator_only();
	text_fits_or_null(c->name, STORE_NAME_MAX - 1);
	text_fits_or_null(c->default_model, STORE_NAME_MAX - 1);
	within(c->disabled, -1, 1);
	within(c->allow_emulated, -1, 1);
	within(c->unlimited, -1, 1);
	within(c->default_cost_micros, -1, PRICE_MICROS_MAX);
	within(c->max_queued, -1, 1000000);
	within(c->max_running, -1, 1000000);
}

int store_org_create(struct store *s, const struct store_org_change *c, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_change_fits(c);
	must(c->name && *c->name);
	return CHANGE(OTHER);
}

int store_org_update(
		struct store *s, const char *org_id, const struct store_org_change *c, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_change_fits(c);
	org_fits(org_id);
	must(!c->name || *c->name);
	return CHANGE(org_id);
}

ANSWER(credit, store_credit, store_credit_cb)
{
	r->result = o->what >= '1' && o->what <= '4' ? (enum store_credit_result)(o->what - '0') : STORE_CREDIT_DONE;
	r->balance_micros = o->number;
	played.changes += r->result == STORE_CREDIT_DONE;
}

int store_org_credit(struct store *s, const char *org_id, int64_t amount_micros, const char *note, const char *idempotency_key,
		const uint8_t body_hash[32], store_credit_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)body_hash;
	operator_only();
	org_fits(org_id);
	text_fits_or_null(note, 500);
	text_fits_or_null(idempotency_key, 255);
	must(amount_micros != 0 && (!idempotency_key || *idempotency_key));
	within(amount_micros, -PRICE_MICROS_MAX, PRICE_MICROS_MAX);
	return OWE(credit, "", amount_micros);
}

int store_provider_put(struct store *s, const char *name, const char *base_url, bool any_address, const uint8_t *sealed_key,
		size_t sealed_len, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	text_fits(name, 1, 64);
	text_fits(base_url, 8, 512);
	must(strncmp(base_url, "https://", 8) == 0 || (any_address && strncmp(base_url, "http://", 7) == 0));
	must(!strpbrk(base_url, " @?#\r\n") && sealed_len <= 512 + SECRETS_SEAL_OVERHEAD && (sealed_key || sealed_len == 0));
	return CHANGE(name);
}

int store_model_put(struct store *s, const struct model_spec *spec, bool make_default, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)make_default;
	operator_only();
	text_fits(spec->id, 3, 128);
	text_fits(spec->upstream, 0, 128);
	within(spec->max_output_tokens, 0, 10000000);
	within(spec->min_output_tokens, 0, 10000000);
	within(spec->tokens_per_byte_milli, 0, 1000000);
	within(spec->overhead_tokens, 0, 10000000);
	must(spec->call_timeout_ms == 0 || (spec->call_timeout_ms >= 1000 && spec->call_timeout_ms <= 3600000));
	return CHANGE(spec->id);
}

int store_price_model_put(struct store *s, const char *model_id, const struct store_price_model *p, store_done_cb cb, void *arg,
		struct err *e)
{
	(void)s;
	operator_only();
	text_fits(model_id, 3, 128);
	within(p->input, 0, INT64_C(1000000000000));
	within(p->output, 0, INT64_C(1000000000000));
	within(p->cached_input, -1, INT64_C(1000000000000));
	within(p->model_percent, 0, 100000);
	return CHANGE(model_id);
}

int store_price_common_put(struct store *s, const struct price *p, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	within(p->run_fee, -1, PRICE_MICROS_MAX);
	within(p->compute, -1, INT64_C(1000000000000));
	within(p->web_request, -1, INT64_C(1000000000000));
	within(p->web_search, -1, INT64_C(1000000000000));
	return CHANGE("");
}

int store_node_token_create(struct store *s, const uint8_t secret_hash[32], int64_t uses, int64_t expires_at_ms, const char *labels,
		const char *isolation, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)secret_hash;
	operator_only();
	within(uses, 1, 1000);
	must(expires_at_ms > 0);
	text_fits(labels, 0, 512);
	must(!strpbrk(labels, "\" \\\n") && (strcmp(isolation, "kvm") == 0 || strcmp(isolation, "emulated") == 0));
	return CHANGE("tok_1");
}

int store_node_act(struct store *s, const char *node_id, enum store_node_action a, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)a;
	operator_only();
	must(id_valid("node", node_id));
	return CHANGE(node_id);
}

/* --- lists
 * --------------------------------------------------------------------------------------------------------------------------- */

static size_t rows(const struct owed *o)
{
	return o->what == '1' ? 0 : o->what == '2' ? 2 : 1;
}

ANSWER(key_rows, store_keys, store_keys_cb)
{
	static struct store_key k[2];

	COPY(k[0].id, "key_0123456789abcdef0123456789abcdef");
	COPY(k[0].name, NASTY);
	k[0].role = STORE_ROLE_ADMIN;
	k[0].created_at_ms = 1;
	k[1].role = STORE_ROLE_VIEWER;
	k[1].expires_at_ms = INT64_C(253402300799999);
	r->keys = k;
	r->count = rows(o);
	r->next_cursor = o->what == '2' ? k[0].id : NULL;
}

int store_key_list(struct store *s, const char *org_id, const char *cursor, int limit, store_keys_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_ADMIN);
	org_fits(org_id);
	page_fits(cursor, limit);
	return OWE(key_rows, "", 0);
}

ANSWER(member_rows, store_members, store_members_cb)
{
	static struct store_member m[2];

	COPY(m[0].id, "mem_0123456789abcdef0123456789abcdef");
	COPY(m[0].name, NASTY);
	COPY(m[0].email, NASTY);
	m[0].role = m[1].role = STORE_ROLE_MEMBER;
	r->members = m;
	r->count = rows(o);
	r->next_cursor = o->what == '2' ? m[0].id : NULL;
}

int store_member_list(
		struct store *s, const char *org_id, const char *cursor, int limit, store_members_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	page_fits(cursor, limit);
	return OWE(member_rows, "", 0);
}

int store_member_get(struct store *s, const char *org_id, const char *member_id, store_members_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	must(id_valid("mem", member_id));
	return OWE(member_rows, "", 0);
}

ANSWER(org_rows, store_orgs, store_orgs_cb)
{
	static struct store_org g[2];

	COPY(g[0].id, OTHER);
	COPY(g[0].name, NASTY);
	COPY(g[1].default_model, "p/m");
	g[0].balance_micros = INT64_MAX;
	g[1].default_cost_micros = 3;
	r->orgs = g;
	r->count = rows(o);
	r->next_cursor = o->what == '2' ? g[0].id : NULL;
}

int store_org_list(struct store *s, const char *cursor, int limit, store_orgs_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	page_fits(cursor, limit);
	return OWE(org_rows, "", 0);
}

int store_org_get(struct store *s, const char *org_id, store_orgs_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	org_fits(org_id);
	return OWE(org_rows, "", 0);
}

ANSWER(provider_rows, store_providers, store_providers_cb)
{
	static struct store_provider p[2];

	COPY(p[0].name, *o->id ? o->id : "p");
	COPY(p[0].base_url, "https://api.example.com/v1");
	r->providers = p;
	r->count = rows(o);
}

int store_provider_list(struct store *s, store_providers_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	return OWE(provider_rows, "", 0);
}

ANSWER(model_rows, store_models, store_models_cb)
{
	static struct store_model m[2];

	COPY(m[0].provider, "p");
	COPY(m[0].spec.id, *o->id ? o->id : "p/m");
	m[0].spec.min_output_tokens = 16;
	m[0].spec.max_output_tokens = 1000;
	m[0].spec.tokens_per_byte_milli = 1000;
	m[0].spec.overhead_tokens = 512;
	m[0].spec.call_timeout_ms = 60000;
	m[0].price = (struct price){ .input = 10, .output = 20, .compute = 1000, .run_fee = 100 };
	m[0].priced = o->what != '3';
	m[1] = m[0];
	r->models = m;
	r->count = rows(o);
}

int store_model_list(struct store *s, store_models_cb cb, void *arg, struct err *e)
{
	(void)s;
	return OWE(model_rows, "", 0);
}

int store_model_get(struct store *s, const char *id, store_models_cb cb, void *arg, struct err *e)
{
	(void)s;
	text_fits(id, 1, STORE_NAME_MAX - 1);
	return OWE(model_rows, id, 0);
}

ANSWER(node_rows, store_nodes, store_nodes_cb)
{
	static struct store_node n[2];

	COPY(n[0].id, "node_0123456789abcdef0123456789abcdef");
	COPY(n[0].name, NASTY);
	COPY(n[0].labels, NASTY);
	COPY(n[0].state, "active");
	r->nodes = n;
	r->count = rows(o);
	r->next_cursor = o->what == '2' ? n[0].id : NULL;
}

int store_node_list(struct store *s, const char *cursor, int limit, store_nodes_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	page_fits(cursor, limit);
	return OWE(node_rows, "", 0);
}

int store_node_get(struct store *s, const char *node_id, store_nodes_cb cb, void *arg, struct err *e)
{
	(void)s;
	must(id_valid("node", node_id));
	return OWE(node_rows, "", 0);
}

/* --- runs -----------------------------------------------------------------------------------------------------------------------
 */

ANSWER(created, store_create, store_create_cb)
{
	r->result = o->what >= '1' && o->what <= '7' ? (enum store_create_result)(o->what - '0') : STORE_CREATED;
	COPY(r->run_id, RUN);
	r->needed_micros = o->number;
	r->limit = 100;
	played.changes += r->result == STORE_CREATED;
}

static void run_fits(const struct store_run_new *n)
{
	org_fits(n->org_id);
	must(id_valid("key", n->key_id));
	text_fits_or_null(n->idempotency_key, RUN_IDEMPOTENCY_MAX);
	must(n->prompt_len > 0 && n->prompt_len <= RUN_PROMPT_MAX && text_utf8_clean(n->prompt, n->prompt_len));
	text_fits(n->request_json, 2, 2 * 1024 * 1024);
	text_fits(n->model, 1, STORE_NAME_MAX - 1);
	within(n->cap_micros, 1, PRICE_MICROS_MAX);
	within(n->timeout_s, 1, 3600);
	within(n->max_model_calls, 1, RUN_MODEL_CALLS_MAX);
	must(n->memory_mib > 0 && n->vcpus > 0 && n->metadata_count <= STORE_METADATA_MAX && n->file_count <= RUN_FILES_MAX);
	for (size_t i = 0; i < n->metadata_count; i++) {
		text_fits(n->metadata[i].key, 1, 4 * RUN_METADATA_KEY_MAX);
		text_fits(n->metadata[i].value, 0, 4 * RUN_METADATA_VALUE_MAX);
	}
	for (size_t i = 0; i < n->file_count; i++)
		must(guest_path_ok(n->files[i].path) && n->files[i].data);
}

int store_run_create(struct store *s, const struct store_run_new *n, store_create_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_MEMBER);
	run_fits(n);
	return OWE(created, "", n->cap_micros);
}

ANSWER(judged, store_create, store_create_cb)
{
	r->result = o->what >= '1' && o->what <= '7' ? (enum store_create_result)(o->what - '0') : STORE_ADMISSIBLE;
	COPY(r->run_id, RUN);
	r->needed_micros = o->number;
	r->limit = 100;
}

int store_run_judge(struct store *s, const struct store_run_new *n, store_create_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_MEMBER);
	org_fits(n->org_id);
	text_fits_or_null(n->idempotency_key, RUN_IDEMPOTENCY_MAX);
	within(n->cap_micros, 1, PRICE_MICROS_MAX);
	return OWE(judged, "", n->cap_micros);
}

ANSWER(run_rows, store_runs, store_runs_cb)
{
	static const struct store_pair pair = { NASTY, NASTY };
	static const struct store_file file = { .path = "a/\"b", .size = 3 };
	static struct store_run run[2];

	run[0] = (struct store_run){ .output = (const uint8_t *)"\xff\x00out", .output_len = 5, .has_output = true };
	COPY(run[0].id, RUN);
	COPY(run[0].org_id, ORG);
	COPY(run[0].status, o->what == '3' ? "failed" : "queued");
	run[0].ended = o->what == '3';
	run[0].error_code = o->what == '3' ? "model_error" : "";
	run[0].error_message = o->what == '3' ? NASTY : "";
	run[0].request_json = o->what == '2' ? "" : "{\"prompt\":\"x\"}";
	run[0].prompt = NASTY;
	run[0].prompt_len = strlen(NASTY);
	run[0].metadata = &pair;
	run[0].files = &file;
	run[0].metadata_count = run[0].file_count = 1;
	run[0].cap_micros = PRICE_MICROS_MAX;
	run[1] = run[0];
	r->runs = run;
	r->count = rows(o);
	r->next_cursor = o->what == '2' ? RUN : NULL;
}

int store_run_get(struct store *s, const char *org_id, const char *run_id, store_runs_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	must(id_valid("run", run_id));
	return OWE(run_rows, "", 0);
}

int store_run_list(
		struct store *s, const char *org_id, const struct store_run_filter *f, store_runs_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	page_fits(f->cursor, f->limit);
	text_fits_or_null(f->status, 24);
	must(f->metadata_count <= STORE_METADATA_MAX);
	for (size_t i = 0; i < f->metadata_count; i++) {
		text_fits(f->metadata[i].key, 0, SIZE_MAX);
		text_fits(f->metadata[i].value, 0, SIZE_MAX);
	}
	return OWE(run_rows, "", 0);
}

ANSWER(cancelled, store_cancel, store_cancel_cb)
{
	r->result = o->what >= '1' && o->what <= '3' ? (enum store_cancel_result)(o->what - '0') : STORE_CANCEL_REQUESTED;
	played.changes += r->result != STORE_CANCEL_NOT_FOUND;
}

int store_run_cancel(struct store *s, const char *org_id, const char *run_id, store_cancel_cb cb, void *arg, struct err *e)
{
	(void)s;
	may(STORE_ROLE_MEMBER);
	org_fits(org_id);
	must(id_valid("run", run_id));
	return OWE(cancelled, "", 0);
}

ANSWER(receipt, store_receipt, store_receipt_cb)
{
	r->found = o->what != '1';
	r->ended = o->what != '2';
	r->has_signature = o->what == '3';
	memset(r->signature, o->what, sizeof(r->signature));
}

int store_receipt(struct store *s, const char *org_id, const char *run_id, store_receipt_cb cb, void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	must(id_valid("run", run_id));
	return OWE(receipt, "", 0);
}

ANSWER(page, store_events, store_events_cb)
{
	static const char bytes[] =
			"{\"run_id\":\"r\",\"seq\":1,\"at\":\"x\",\"t\":0,\"source\":\"host\",\"type\":\"run.queued\",\"data\":{}}";
	static const char bad[] = "{\"run_id\":\"r\",\"seq\":1}";
	static struct store_event ev[2];

	r->found = o->what != '1';
	r->complete = o->what == '2';
	r->head_seq = 2;
	r->events = ev;
	for (int64_t seq = 1; seq <= 2; seq++)
		if (seq > o->number && o->what != '4') {
			const char *b = o->what == '3' ? bad : bytes;

			ev[r->count++] = (struct store_event){ .seq = seq, .bytes = (const uint8_t *)b, .len = strlen(b) };
		}
}

int store_events_page(struct store *s, const char *org_id, const char *run_id, int64_t after, int limit, store_events_cb cb,
		void *arg, struct err *e)
{
	(void)s;
	org_fits(org_id);
	must(id_valid("run", run_id));
	within(after, 0, INT64_C(1000000000000));
	within(limit, 1, STORE_EVENTS_PAGE_MAX);
	return OWE(page, "", after);
}

struct store_sub *store_hub_subscribe(struct store *s, const char *run_id, store_sub_cb cb, void *arg)
{
	struct store_sub *sub = *script == 'n' ? NULL : calloc(1, sizeof(*sub));

	(void)s;
	must(id_valid("run", run_id));
	if (!sub) {
		script++;
		return NULL;
	}
	*sub = (struct store_sub){ .cb = cb, .arg = arg, .next = subs, .prev = &subs };
	if (subs)
		subs->prev = &sub->next;
	subs = sub;
	return sub;
}

void store_hub_unsubscribe(struct store_sub *sub)
{
	if (!sub)
		return;
	*sub->prev = sub->next;
	if (sub->next)
		sub->next->prev = sub->prev;
	free(sub);
}

void store_play_hints(void)
{
	if (subs) /* an input has one connection */
		subs->cb(subs->arg);
}
