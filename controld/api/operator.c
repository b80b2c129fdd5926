/* The operator's calls about organizations: make, list, change, credit, keys, members. On operator_listen only; on the loop. */
#include "api_internal.h"

#include "account.h"
#include "common/price.h"
#include "common/text.h"
#include "secrets.h"

#define NAME_MAX_BYTES 128
#define COUNT_MAX 1000000

/* --- organizations ------------------------------------------------------------------------------------------------------ */

/* 0 in the store: this organization has no value of its own, the deployment's holds. */
static void own_or_null(struct jw *w, const char *name, int64_t v)
{
	if (v > 0)
		jw_kint(w, name, v);
	else
		jw_knull(w, name);
}

static void put_org(struct jw *w, const struct store_org *o)
{
	jw_object(w);
	jw_kstr(w, "id", o->id);
	jw_kstr(w, "name", o->name);
	jw_kbool(w, "disabled", o->disabled);
	jw_kbool(w, "allow_emulated", o->allow_emulated);
	jw_kbool(w, "unlimited", o->unlimited);
	jw_kstr(w, "default_model", *o->default_model ? o->default_model : NULL);
	own_or_null(w, "default_max_cost_micros", o->default_cost_micros);
	own_or_null(w, "max_queued_runs", o->max_queued);
	own_or_null(w, "max_running_runs", o->max_running);
	jw_kint(w, "balance_micros", o->balance_micros);
	jw_kint(w, "reserved_micros", o->reserved_micros);
	jw_kint(w, "available_micros", o->balance_micros - o->reserved_micros);
	jw_kstr(w, "selector", *o->selector ? o->selector : NULL);
	json_time(w, "created_at", o->created_at_ms);
	jw_close(w);
}

static void on_orgs(void *arg, const struct store_orgs *o, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024 * 1024);
	struct jw w;
	size_t i;

	if (!r)
		return;
	list_begin(&w, &out);
	for (i = 0; i < o->count; i++)
		put_org(&w, &o->orgs[i]);
	list_end(&w, o->next_cursor);
	api_reply(r, 200, &out);
}

void operator_org_list(struct api_req *r)
{
	const char *cursor;
	struct err e;
	int limit;

	if (list_page(r, &cursor, &limit))
		api_asked(store_org_list(r->api->opt.store, cursor, limit, on_orgs, api_hold(r), &e), r, &e);
}

static void answer_one_org(struct api_req *r, const struct store_orgs *o, int status)
{
	struct buf out = BUF_INIT(64 * 1024);
	struct jw w;

	if (o->count == 0) {
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such organization.");
		return;
	}
	jw_init(&w, &out);
	put_org(&w, &o->orgs[0]);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, status, &out);
}

static void on_org(void *arg, const struct store_orgs *o, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (r)
		answer_one_org(r, o, 200);
}

static void on_new_org(void *arg, const struct store_orgs *o, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (r)
		answer_one_org(r, o, 201);
}

/* The id in the path, or NULL after a 404. */
static const char *org_id(struct api_req *r)
{
	if (id_valid("org", api_param(r, 0)))
		return api_param(r, 0);
	api_problem(r, PROBLEM_NOT_FOUND, "There is no such organization.");
	return NULL;
}

void operator_org_get(struct api_req *r)
{
	const char *id = org_id(r);
	struct err e;

	if (id)
		api_asked(store_org_get(r->api->opt.store, id, on_org, api_hold(r), &e), r, &e);
}

#define ORG_FIELDS "name disabled allow_emulated unlimited default_model default_max_cost_micros max_queued_runs max_running_runs"
#define ORG_PATCH_FIELDS ORG_FIELDS " selector"

/* Texts in c are views into b. A selector comes with an organization that is there: the order in which its hosts get their labels
 * is the operator's. */
static void read_org(struct body *b, struct api_req *r, bool is_new, struct store_org_change *c)
{
	body_open(b, r, is_new ? ORG_FIELDS : ORG_PATCH_FIELDS);
	c->name = body_text(b, "name", 1, NAME_MAX_BYTES, is_new);
	c->disabled = body_flag(b, "disabled");
	c->allow_emulated = body_flag(b, "allow_emulated");
	c->unlimited = body_flag(b, "unlimited");
	c->default_model = body_text(b, "default_model", 0, RUN_MODEL_MAX, false);
	c->default_cost_micros = body_int(b, "default_max_cost_micros", 0, r->api->opt.max_cost_micros, -1, false);
	c->max_queued = body_int(b, "max_queued_runs", 0, COUNT_MAX, -1, false);
	c->max_running = body_int(b, "max_running_runs", 0, COUNT_MAX, -1, false);
	c->selector = is_new ? NULL : body_text(b, "selector", 0, STORE_SELECTOR_MAX - 1, false);
	if (c->selector)
		labels_check(b, "selector", c->selector);
}

/* Two things may be missing: the organization in the path, or the model in the body. */
static void org_problem(struct api_req *r, const struct store_done *d)
{
	struct pointer at = { .up = NULL, .key = "default_model" };
	struct field_errors fe;

	if (d->result != STORE_DONE_NOT_FOUND || strstr(d->detail, "organization")) {
		api_done_problem(r, d, "organization");
		return;
	}
	field_errors_init(&fe);
	field_bad(&fe, &at, "is no model here; GET /v1/operator/models lists them");
	api_problem_fields(r, &fe);
}

static void on_org_made(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct err e2;

	if (!r)
		return;
	if (d->result != STORE_DONE)
		org_problem(r, d);
	else
		api_asked(store_org_get(r->api->opt.store, d->id, on_new_org, api_hold(r), &e2), r, &e2);
}

static void on_org_changed(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct err e2;

	if (!r)
		return;
	auth_cache_clear(r->api->auth);
	if (d->result != STORE_DONE)
		org_problem(r, d);
	else
		api_asked(store_org_get(r->api->opt.store, api_param(r, 0), on_org, api_hold(r), &e2), r, &e2);
}

void operator_org_create(struct api_req *r)
{
	struct store_org_change c;
	struct body b;
	struct err e;

	read_org(&b, r, true, &c);
	if (!body_ok(&b, r))
		return;
	api_asked(store_org_create(r->api->opt.store, &c, on_org_made, api_hold(r), &e), r, &e);
	body_free(&b);
}

void operator_org_update(struct api_req *r)
{
	const char *id = org_id(r);
	struct store_org_change c;
	struct body b;
	struct err e;

	if (!id)
		return;
	read_org(&b, r, false, &c);
	if (!body_ok(&b, r))
		return;
	api_asked(store_org_update(r->api->opt.store, id, &c, on_org_changed, api_hold(r), &e), r, &e);
	body_free(&b);
}

/* --- credit ------------------------------------------------------------------------------------------------------------- */

static void on_credit(void *arg, const struct store_credit *c, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024);
	struct jw w;

	if (!r)
		return;
	switch (c->result) {
	case STORE_CREDIT_NOT_FOUND: api_problem(r, PROBLEM_NOT_FOUND, "There is no such organization."); return;
	case STORE_CREDIT_LIMIT:
		api_problem(r, PROBLEM_CONFLICT,
				"The balance would leave its bounds: it stays above what is reserved and below a billion dollars.");
		return;
	case STORE_CREDIT_MISMATCH:
		api_problem(r, PROBLEM_IDEMPOTENCY_MISMATCH,
				"This Idempotency-Key was used for another credit. Use a fresh key, or the same body for a retry.");
		return;
	case STORE_CREDIT_REPLAYED: api_header(r, "Idempotency-Replayed", "true"); break;
	case STORE_CREDIT_DONE: break;
	}
	jw_init(&w, &out);
	jw_object(&w);
	jw_kstr(&w, "organization_id", api_param(r, 0));
	jw_kint(&w, "balance_micros", c->balance_micros);
	jw_kint(&w, "reserved_micros", c->reserved_micros);
	jw_kint(&w, "available_micros", c->balance_micros - c->reserved_micros);
	jw_close(&w);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, 200, &out);
}

void operator_credit(struct api_req *r)
{
	const char *id = org_id(r), *note, *header;
	char key[RUN_IDEMPOTENCY_MAX + 1] = "";
	struct buf canonical = BUF_INIT(128 * 1024);
	uint8_t hash[SECRETS_HASH_LEN] = { 0 };
	struct pointer at = { .up = NULL, .key = "amount_micros" };
	struct body b;
	int64_t amount;
	struct err e;

	if (!id)
		return;
	body_open(&b, r, "amount_micros note");
	amount = body_int(&b, "amount_micros", -PRICE_MICROS_MAX, PRICE_MICROS_MAX, 0, true);
	note = body_text(&b, "note", 0, 500, false);
	header = http_header(r->http, "Idempotency-Key");
	if (header && (http_header_count(r->http, "Idempotency-Key") > 1 || !idempotency_key_read(header, key)))
		header_bad(&b.errors, "Idempotency-Key", "must be sent once, as 1 to %d visible ASCII characters",
				RUN_IDEMPOTENCY_MAX);
	if (amount == 0 && !field_errors_any(&b.errors))
		field_bad(&b.errors, &at, "is 0, but must be a positive amount (a deposit) or a negative one (an adjustment)");
	if (!body_ok(&b, r))
		return;
	if (!json_canonical(b.doc, &canonical)) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
	} else {
		secrets_body_hash(r->api->opt.secrets, canonical.data, canonical.len, hash);
		api_asked(store_org_credit(r->api->opt.store, id, amount, note, key[0] ? key : NULL, hash, on_credit, api_hold(r),
					  &e),
				r, &e);
	}
	buf_free(&canonical);
	body_free(&b);
}

/* --- keys of an organization -------------------------------------------------------------------------------------------- */

void operator_key_create(struct api_req *r)
{
	const char *id = org_id(r);

	if (id)
		key_create_answer(r, id);
}

/* A list of nothing and a list of nobody's are not the same: the organization is looked up first. */
static void on_list_of(void *arg, const struct store_orgs *o, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	if (o->count == 0)
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such organization.");
	else if (r->route->handle == operator_key_list)
		key_list_answer(r, api_param(r, 0));
	else
		member_list_answer(r, api_param(r, 0));
}

static void list_of(struct api_req *r)
{
	const char *id = org_id(r);
	struct err e;

	if (id)
		api_asked(store_org_get(r->api->opt.store, id, on_list_of, api_hold(r), &e), r, &e);
}

void operator_key_list(struct api_req *r)
{
	list_of(r);
}

/* The operator may take the last admin key away. */
void operator_key_revoke(struct api_req *r)
{
	const char *id = org_id(r);

	if (id)
		key_revoke_answer(r, id, api_param(r, 1), false);
}

/* --- its members: the first of them; from then on an admin key of the organization does it -------------------------------------
 */

void operator_member_create(struct api_req *r)
{
	const char *id = org_id(r);

	if (id)
		member_create_answer(r, id);
}

void operator_member_list(struct api_req *r)
{
	list_of(r);
}
