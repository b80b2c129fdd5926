/* Bearer keys: reading the header, the cache, the look-up, the role. Owns the cache; called by api.c for each route with a need. */
#include "api_internal.h"

#include "common/clock.h"
#include "common/text.h"
#include "secrets.h"

#include <stdlib.h>

struct cached {
	uint8_t hash[SECRETS_HASH_LEN];
	int64_t until_ms; /* boot clock; 0 = empty */
	struct store_principal who;
};

/* Direct-mapped: the hash is keyed, so nobody can choose whose place is taken. */
struct auth_cache {
	struct cached entry[AUTH_CACHE_SIZE];
	unsigned cleared; /* how often: a look-up that began before does not count after */
};

/* What one request waits for. */
struct asking {
	struct api_req *r;
	void (*then)(struct api_req *r);
	uint8_t hash[SECRETS_HASH_LEN];
	unsigned cleared;
};

struct auth_cache *auth_cache_new(void)
{
	return calloc(1, sizeof(struct auth_cache));
}

void auth_cache_free(struct auth_cache *c)
{
	free(c);
}

void auth_cache_clear(struct auth_cache *c)
{
	size_t i;

	c->cleared++;
	for (i = 0; i < AUTH_CACHE_SIZE; i++)
		c->entry[i].until_ms = 0;
}

static size_t place(const uint8_t hash[SECRETS_HASH_LEN])
{
	return (size_t)(hash[0] | hash[1] << 8) % AUTH_CACHE_SIZE;
}

/* Found, and not too old; NULL else. */
static const struct cached *fresh(const struct auth_cache *c, const uint8_t hash[SECRETS_HASH_LEN])
{
	const struct cached *at = &c->entry[place(hash)];

	return at->until_ms > clock_boot_ms() && secrets_equal(at->hash, hash, sizeof(at->hash)) ? at : NULL;
}

bool auth_cached(const struct auth_cache *c, const uint8_t hash[SECRETS_HASH_LEN])
{
	const struct cached *at = fresh(c, hash);

	return at && at->who.result == STORE_AUTH_OK;
}

static void unauthorized(struct api_req *r, const char *why)
{
	api_header(r, "WWW-Authenticate", "Bearer realm=\"ephemeral\"");
	api_problem(r, PROBLEM_UNAUTHORIZED, "%s", why);
}

static bool role_is_enough(const struct store_principal *who, enum api_need need)
{
	switch (need) {
	case NEED_NONE: return true;
	case NEED_VIEWER: return !who->is_operator && who->role >= STORE_ROLE_VIEWER;
	case NEED_MEMBER: return !who->is_operator && who->role >= STORE_ROLE_MEMBER;
	case NEED_ADMIN: return !who->is_operator && who->role >= STORE_ROLE_ADMIN;
	case NEED_OPERATOR: return who->is_operator;
	}
	return false;
}

static void go_on(struct api_req *r, const struct store_principal *who, void (*then)(struct api_req *r))
{
	switch (who->result) {
	case STORE_AUTH_OK: break;
	case STORE_AUTH_EXPIRED:
		unauthorized(r, "This API key has expired or was revoked. Ask an admin of your organization for a new one.");
		return;
	case STORE_AUTH_DISABLED: unauthorized(r, "This key's organization is disabled. Ask the operator of this service."); return;
	case STORE_AUTH_UNKNOWN:
		unauthorized(r, "This API key is not known here. Check that it is whole and belongs to this service.");
		return;
	}
	if (!role_is_enough(who, r->route->need)) {
		api_problem(r, PROBLEM_FORBIDDEN, "This call needs a key with role %s or more; this key's role is %s.",
				api_need_name(r->route->need), who->is_operator ? "operator" : store_role_text(who->role));
		return;
	}
	r->who = *who;
	then(r);
}

static void on_principal(void *arg, const struct store_principal *p, const struct err *e)
{
	struct asking *ask = arg;
	struct api_req *r = ask->r;
	void (*then)(struct api_req * r) = ask->then;

	/* Without a client the api itself may be gone. */
	if (p && r->http && r->api->auth->cleared == ask->cleared) {
		struct cached *c = &r->api->auth->entry[place(ask->hash)];

		memcpy(c->hash, ask->hash, sizeof(c->hash));
		c->who = *p;
		c->until_ms = clock_boot_ms() + AUTH_CACHE_MS;
	}
	free(ask);
	r = api_back(r, e);
	if (r && p)
		go_on(r, p, then);
}

/* The key in `Authorization: Bearer KEY`, or NULL after the answer. */
static const char *bearer(struct api_req *r)
{
	const char *h = http_header(r->http, "Authorization");
	bool operator_here = r->listener == LISTENER_OPERATOR;

	if (!h || http_header_count(r->http, "Authorization") != 1) {
		unauthorized(r, h               ? "There is more than one Authorization header; send one."
				: operator_here ? "Send `Authorization: Bearer ephop_...` with an operator key."
						: "Send `Authorization: Bearer eph_...` with an API key of your organization.");
		return NULL;
	}
	if (strncasecmp(h, "Bearer", 6) != 0 || h[6] != ' ') {
		unauthorized(r, "The Authorization header must be `Bearer` and a key; no other scheme is taken.");
		return NULL;
	}
	h += 6;
	h += strspn(h, " ");
	if (strncmp(h, "ephop_", 6) == 0 && !operator_here) {
		unauthorized(r, "This is an operator key; it is taken on the operator listener only. Use a member key (eph_...) "
				"here.");
		return NULL;
	}
	if (strncmp(h, "eph_", 4) == 0 && operator_here) {
		unauthorized(r, "This is a member key; it is taken on the public listener only. Use an operator key (ephop_...) "
				"here.");
		return NULL;
	}
	if (strncmp(h, operator_here ? "ephop_" : "eph_", operator_here ? 6 : 4) != 0 || strlen(h) > 63) {
		unauthorized(r, operator_here ? "This is no key of this service; operator keys begin with ephop_."
					      : "This is no key of this service; keys begin with eph_.");
		return NULL;
	}
	return h;
}

void auth_check_again(struct api_req *r, void (*then)(struct api_req *r))
{
	const char *key = bearer(r);
	const struct cached *c;
	struct asking *ask;
	struct err e;
	int rc;

	if (!key)
		return;
	secrets_key_hash(r->api->opt.secrets, key, r->key_hash);
	c = fresh(r->api->auth, r->key_hash);
	if (c) {
		struct store_principal who = c->who; /* the handler may empty the cache */

		go_on(r, &who, then);
		return;
	}
	ask = calloc(1, sizeof(*ask));
	if (!ask) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; try again.");
		return;
	}
	memcpy(ask->hash, r->key_hash, sizeof(ask->hash));
	ask->then = then;
	ask->r = api_hold(r);
	ask->cleared = r->api->auth->cleared;
	rc = store_auth(r->api->opt.store, ask->hash, on_principal, ask, &e);
	if (rc == -1)
		free(ask);
	api_asked(rc, r, &e);
}

void auth_check(struct api_req *r)
{
	auth_check_again(r, api_enter);
}
