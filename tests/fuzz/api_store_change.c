/* Changes that fuzz_api's store is asked for: keys, members, organizations, the catalog, hosts. Each must be allowed and fit. */
#include "api_store.h"

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
	must(!m->name || text_utf8_length(m->name, strlen(m->name)) <= 128);
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
