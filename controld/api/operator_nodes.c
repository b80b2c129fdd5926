/* The operator's calls about nodes: join tokens, list, drain, undrain, revoke. On operator_listen only. Runs on the loop. */
#include "api_internal.h"

#include "account.h"
#include "common/clock.h"
#include "common/text.h"
#include "proto/link.h"
#include "secrets.h"

#include <sodium.h>
#include <stdlib.h>

#define TOKEN_USES_MAX 1000
#define TOKEN_EXPIRY_DEFAULT_S 86400
#define TOKEN_EXPIRY_MAX_S (366 * 86400)

/* --- join tokens -------------------------------------------------------------------------------------------------------- */

struct token_making {
	struct join_token token;
	char labels[513], isolation[16];
	int64_t uses;
};

static void making_free(void *state)
{
	sodium_memzero(state, sizeof(struct token_making));
	free(state);
}

static void on_token(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct token_making *m = r ? r->state : NULL;
	struct buf out = BUF_INIT(64 * 1024), text = BUF_INIT(32 * 1024);
	struct jw w;

	if (!r)
		return;
	if (d->result != STORE_DONE) {
		api_done_problem(r, d, "token");
		return;
	}
	jw_init(&w, &out);
	jw_object(&w);
	jw_kstr(&w, "id", d->id);
	jw_kstr(&w, "token", join_token_print(&m->token, &text) ? buf_cstr(&text) : NULL);
	jw_kint(&w, "uses", m->uses);
	json_time(&w, "expires_at", m->token.expires_ms);
	jw_kstr(&w, "labels", *m->labels ? m->labels : NULL);
	jw_kstr(&w, "isolation", m->isolation);
	jw_close(&w);
	if (!jw_end(&w) || text.failed)
		out.failed = true;
	secrets_wipe(&text);
	api_reply(r, 201, &out);
}

/* "a=b,c=d": names and values that stand in a list on a command line. */
void labels_check(struct body *b, const char *field, const char *s)
{
	struct pointer at = { .up = NULL, .key = field };

	while (*s) {
		size_t n = strcspn(s, ","), equals = strcspn(s, "="), i;

		for (i = 0; i < n && s[i] > 0x20 && s[i] <= 0x7e && s[i] != '"' && s[i] != '\\'; i++)
			;
		if (i < n || equals == 0 || equals >= n || (s[n] == ',' && s[n + 1] == '\0')) {
			field_bad(&b->errors, &at,
					"must be like region=eu,disk=fast: name=value pairs in visible ASCII without quotes");
			return;
		}
		s += n + (s[n] == ',');
	}
}

static void check_isolation(struct body *b, const char *s)
{
	struct pointer at = { .up = NULL, .key = "isolation" };

	if (strcmp(s, "kvm") != 0 && strcmp(s, "emulated") != 0)
		field_bad(&b->errors, &at, "must be \"kvm\" (a node may still be emulated) or \"emulated\"");
}

/* False when what main configured does not fit a token. */
static bool fill_token(struct api_req *r, struct token_making *m, int64_t seconds)
{
	id_secret_make("ephnt_", m->token.secret);
	m->token.expires_ms = clock_real_ms() + seconds * 1000;
	return text_copy(m->token.addresses, sizeof(m->token.addresses),
			       r->api->opt.link_addresses ? r->api->opt.link_addresses : "") &&
	       text_copy(m->token.ca_pem, sizeof(m->token.ca_pem), r->api->opt.ca_pem ? r->api->opt.ca_pem : "") &&
	       *m->token.addresses && *m->token.ca_pem;
}

void operator_token_create(struct api_req *r)
{
	struct token_making *m = calloc(1, sizeof(*m));
	uint8_t hash[SECRETS_HASH_LEN];
	const char *labels, *isolation;
	struct body b;
	int64_t seconds;
	struct err e;

	if (!m) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
		return;
	}
	api_set_state(r, m, making_free);
	body_open(&b, r, "uses expires_in_seconds labels isolation");
	m->uses = body_int(&b, "uses", 1, TOKEN_USES_MAX, 1, false);
	seconds = body_int(&b, "expires_in_seconds", 1, TOKEN_EXPIRY_MAX_S, TOKEN_EXPIRY_DEFAULT_S, false);
	labels = body_text(&b, "labels", 0, 512, false);
	isolation = body_text(&b, "isolation", 1, 15, false);
	if (labels)
		labels_check(&b, "labels", labels);
	if (isolation)
		check_isolation(&b, isolation);
	if (!body_ok(&b, r))
		return;
	if (!text_copy(m->labels, sizeof(m->labels), labels ? labels : ""))
		m->labels[0] = '\0';
	if (!text_copy(m->isolation, sizeof(m->isolation), isolation ? isolation : "kvm"))
		m->isolation[0] = '\0';
	body_free(&b);
	if (!fill_token(r, m, seconds)) {
		api_problem(r, PROBLEM_UNAVAILABLE,
				"This controld has no node link: set link_listen and tls_dir (controld bootstrap makes the CA).");
		return;
	}
	secrets_key_hash(r->api->opt.secrets, m->token.secret, hash);
	api_asked(store_node_token_create(r->api->opt.store, hash, m->uses, m->token.expires_ms, m->labels, m->isolation, on_token,
				  api_hold(r), &e),
			r, &e);
}

/* --- nodes -------------------------------------------------------------------------------------------------------------- */

static void put_room(struct jw *w, const char *name, uint32_t memory_mib, uint32_t vcpus, uint32_t slots)
{
	jw_kobject(w, name);
	jw_kint(w, "memory_mib", memory_mib);
	jw_kint(w, "vcpus", vcpus);
	jw_kint(w, "slots", slots);
	jw_close(w);
}

/* In one word, for people. */
static const char *condition(const struct store_node *n)
{
	if (strcmp(n->state, "revoked") == 0)
		return n->state;
	if (!n->live)
		return n->stopped ? "stopped" : "lost";
	return strcmp(n->state, "active") == 0 && n->probation ? "probation" : n->state;
}

static void put_node(struct jw *w, const struct store_node *n)
{
	jw_object(w);
	jw_kstr(w, "id", n->id);
	jw_kstr(w, "name", n->name);
	jw_kstr(w, "state", n->state);
	jw_kstr(w, "condition", condition(n));
	jw_kbool(w, "live", n->live);
	jw_kbool(w, "stopped", n->stopped);
	jw_kbool(w, "probation", n->probation);
	jw_kint(w, "failed_starts", n->failed_starts);
	json_time(w, "probation_until", n->probation_until_ms);
	jw_kstr(w, "isolation", n->isolation);
	jw_kstr(w, "labels", *n->labels ? n->labels : NULL);
	jw_kstr(w, "image", *n->image ? n->image : NULL);
	jw_kstr(w, "image_state", *n->image_state ? n->image_state : NULL);
	jw_kstr(w, "image_note", *n->image_note ? n->image_note : NULL);
	put_room(w, "total", n->total_memory_mib, n->total_vcpus, n->total_slots);
	put_room(w, "free", n->free_memory_mib, n->free_vcpus, n->free_slots);
	jw_kint(w, "runs", n->runs);
	json_time(w, "lease_until", n->lease_until_ms);
	json_time(w, "last_seen_at", n->last_seen_ms);
	json_time(w, "created_at", n->created_at_ms);
	jw_close(w);
}

static void on_nodes(void *arg, const struct store_nodes *n, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024 * 1024);
	struct jw w;
	size_t i;

	if (!r)
		return;
	list_begin(&w, &out);
	for (i = 0; i < n->count; i++)
		put_node(&w, &n->nodes[i]);
	list_end(&w, n->next_cursor);
	api_reply(r, 200, &out);
}

void operator_node_list(struct api_req *r)
{
	const char *cursor;
	struct err e;
	int limit;

	if (list_page(r, &cursor, &limit))
		api_asked(store_node_list(r->api->opt.store, cursor, limit, on_nodes, api_hold(r), &e), r, &e);
}

static void on_node(void *arg, const struct store_nodes *n, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(8192);
	struct jw w;

	if (!r)
		return;
	if (n->count == 0) {
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such node.");
		return;
	}
	jw_init(&w, &out);
	put_node(&w, &n->nodes[0]);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

/* The request, when the node was acted on, which it hears of; else NULL, and the request is answered. */
static struct api_req *acted(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return NULL;
	if (d->result != STORE_DONE) {
		api_done_problem(r, d, "node");
		return NULL;
	}
	api_wake(r->api, API_WAKE_NODE, api_param(r, 0));
	return r;
}

static void on_acted(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = acted(arg, d, e);
	struct err e2;

	if (r)
		api_asked(store_node_get(r->api->opt.store, api_param(r, 0), on_node, api_hold(r), &e2), r, &e2);
}

static void act(struct api_req *r, enum store_node_action action)
{
	struct body b;
	struct err e;

	body_open(&b, r, "");
	if (!body_ok(&b, r))
		return;
	body_free(&b);
	if (!id_valid("node", api_param(r, 0))) {
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such node.");
		return;
	}
	api_asked(store_node_act(r->api->opt.store, api_param(r, 0), action, on_acted, api_hold(r), &e), r, &e);
}

void operator_node_drain(struct api_req *r)
{
	act(r, STORE_NODE_DRAIN);
}

void operator_node_undrain(struct api_req *r)
{
	act(r, STORE_NODE_UNDRAIN);
}

void operator_node_revoke(struct api_req *r)
{
	act(r, STORE_NODE_REVOKE);
}

static void on_removed(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = acted(arg, d, e);

	if (r)
		api_reply_empty(r, 204);
}

void operator_node_remove(struct api_req *r)
{
	struct err e;

	if (!id_valid("node", api_param(r, 0)))
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such node.");
	else
		api_asked(store_node_act(r->api->opt.store, api_param(r, 0), STORE_NODE_REMOVE, on_removed, api_hold(r), &e), r,
				&e);
}
