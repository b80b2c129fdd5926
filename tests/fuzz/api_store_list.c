/* Lists that fuzz_api's store answers with: none, one or two rows, with texts that a page must escape. */
#include "api_store.h"

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
