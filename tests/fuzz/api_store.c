/*
 * The store of fuzz_api (api_play.h): store/store.h without Postgres. Each call takes one character of the script: '0' or nothing
 * left = what was asked for, '1'..'9' = another outcome that the store has for it, 'u' unavailable, 'c' conflict, 'i' internal, 'f'
 * full (the call itself fails). Answers come when store_play_step is called, never from inside the call.
 *
 * Checked at each call: the texts are what Postgres takes and within their columns, ids are ids, numbers are within the bounds that
 * the interface names, the organization is the key's, and the key's role is enough for the change.
 */
#include "api_store.h"

#define OWED 64

struct store_sub {
	store_sub_cb cb;
	void *arg;
	struct store_sub *next, **prev;
};

static struct owed owed[OWED];
static size_t owed_first, owed_count;
static const char *script;
static struct store_sub *subs;
struct store_played played;
struct store_principal asker;

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

int owed_add(void (*deliver)(const struct owed *o), void (*cb)(void), void *arg, const char *id, int64_t number, struct err *e)
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

const struct err *owed_trouble(const struct owed *o, struct err *e)
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

size_t rows(const struct owed *o)
{
	return o->what == '1' ? 0 : o->what == '2' ? 2 : 1;
}

/* --- what is given must be fit --- */

void text_fits(const char *s, size_t min, size_t max)
{
	must(s != NULL && strlen(s) >= min && strlen(s) <= max && text_utf8_clean(s, strlen(s)));
}

void text_fits_or_null(const char *s, size_t max)
{
	if (s)
		text_fits(s, 0, max);
}

void within(int64_t v, int64_t min, int64_t max)
{
	must(v >= min && v <= max);
}

void page_fits(const char *cursor, int limit)
{
	text_fits_or_null(cursor, ID_MAX - 1);
	within(limit, 1, STORE_LIST_MAX);
}

void org_fits(const char *org_id)
{
	must(id_valid("org", org_id));
	must(asker.is_operator || strcmp(org_id, ORG) == 0);
}

void may(enum store_role role)
{
	must(asker.is_operator || asker.role >= role);
}

void operator_only(void)
{
	must(asker.is_operator);
}

void copy(char *out, size_t size, const char *s)
{
	must(text_copy(out, size, s));
}

/* --- who asks --- */

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

/* --- who waits --- */

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
