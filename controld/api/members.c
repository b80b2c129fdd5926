/* Members of an organization: list, make, change, remove; for its admins, and the first of them for the operator. Runs on the loop,
 * does not block. */
#include "api_internal.h"

#include "account.h"
#include "common/text.h"

#define NAME_CHARACTERS 128
#define EMAIL_BYTES (STORE_EMAIL_MAX - 1)

/* --- reading ------------------------------------------------------------------------------------------------------------ */

static void put_member(struct jw *w, const struct store_member *m)
{
	jw_object(w);
	jw_kstr(w, "id", m->id);
	jw_kstr(w, "name", m->name);
	jw_kstr(w, "email", *m->email ? m->email : NULL);
	jw_kstr(w, "role", store_role_text(m->role));
	json_time(w, "created_at", m->created_at_ms);
	jw_close(w);
}

static void on_members(void *arg, const struct store_members *m, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct buf out = BUF_INIT(1024 * 1024);
	struct jw w;
	size_t i;

	if (!r)
		return;
	list_begin(&w, &out);
	for (i = 0; i < m->count; i++)
		put_member(&w, &m->members[i]);
	list_end(&w, m->next_cursor);
	api_reply(r, 200, &out);
}

void member_list_answer(struct api_req *r, const char *org_id)
{
	const char *cursor;
	struct err e;
	int limit;

	if (list_page(r, &cursor, &limit))
		api_asked(store_member_list(r->api->opt.store, org_id, cursor, limit, on_members, api_hold(r), &e), r, &e);
}

static void answer_one_member(struct api_req *r, const struct store_members *m, int status)
{
	struct buf out = BUF_INIT(16 * 1024);
	struct jw w;

	if (m->count == 0) { /* removed a moment ago */
		api_problem(r, PROBLEM_NOT_FOUND, "There is no such member.");
		return;
	}
	jw_init(&w, &out);
	put_member(&w, &m->members[0]);
	if (!jw_end(&w))
		out.failed = true;
	api_reply(r, status, &out);
}

static void on_member(void *arg, const struct store_members *m, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (r)
		answer_one_member(r, m, 200);
}

static void on_new_member(void *arg, const struct store_members *m, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (r)
		answer_one_member(r, m, 201);
}

/* --- the body ----------------------------------------------------------------------------------------------------------- */

static const char *read_name(struct body *b, bool required)
{
	const char *s = body_text(b, "name", 0, SIZE_MAX, required);
	struct pointer at = { .up = NULL, .key = "name" };
	size_t length = s ? text_utf8_length(s, strlen(s)) : 0;

	if (s && s[strspn(s, " \t\r\n")] == '\0')
		field_bad(&b->errors, &at, "is empty, but must have 1 to %d characters", NAME_CHARACTERS);
	else if (length > NAME_CHARACTERS)
		field_bad(&b->errors, &at, "has %zu characters, but must have 1 to %d", length, NAME_CHARACTERS);
	return s;
}

/* No more than what every address has: nothing is sent there by this service. */
static bool is_email(const char *s)
{
	const char *at = strchr(s, '@'), *p;

	for (p = s; *p; p++)
		if ((unsigned char)*p <= ' ' || *p == 0x7f)
			return false;
	return at && at > s && at[1] != '\0' && !strchr(at + 1, '@');
}

static const char *read_email(struct body *b)
{
	const char *s = body_text(b, "email", 0, EMAIL_BYTES, false);
	struct pointer at = { .up = NULL, .key = "email" };

	if (s && *s && !is_email(s))
		field_bad(&b->errors, &at, "must be an address like name@example.com of at most %d bytes, or \"\" for none",
				EMAIL_BYTES);
	return s;
}

/* Texts in m are views into b. */
static void read_member(struct body *b, struct api_req *r, bool is_new, struct store_member_change *m)
{
	body_open(b, r, "name email role");
	m->name = read_name(b, is_new);
	m->email = read_email(b);
	m->role = is_new || body_has(b, "role") ? body_role(b, "role") : STORE_ROLE_NONE;
}

/* --- changing ----------------------------------------------------------------------------------------------------------- */

static void on_member_made(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	const char *org_id;
	struct err e2;

	if (!r)
		return;
	if (d->result != STORE_DONE) {
		api_done_problem(r, d, "organization");
		return;
	}
	org_id = r->listener == LISTENER_OPERATOR ? api_param(r, 0) : r->who.org_id;
	api_asked(store_member_get(r->api->opt.store, org_id, d->id, on_new_member, api_hold(r), &e2), r, &e2);
}

void member_create_answer(struct api_req *r, const char *org_id)
{
	struct store_member_change m;
	struct body b;
	struct err e;

	read_member(&b, r, true, &m);
	if (!body_ok(&b, r))
		return;
	api_asked(store_member_create(r->api->opt.store, org_id, &m, on_member_made, api_hold(r), &e), r, &e);
	body_free(&b);
}

static void on_member_changed(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct err e2;

	if (!r)
		return;
	auth_cache_clear(r->api->auth);
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "member");
	else
		api_asked(store_member_get(r->api->opt.store, r->who.org_id, d->id, on_member, api_hold(r), &e2), r, &e2);
}

static void on_member_removed(void *arg, const struct store_done *d, const struct err *e)
{
	struct api_req *r = api_back(arg, e);

	if (!r)
		return;
	auth_cache_clear(r->api->auth);
	if (d->result != STORE_DONE)
		api_done_problem(r, d, "member");
	else
		api_reply_empty(r, 204);
}

/* The id in the path, or NULL after a 404. */
static const char *member_id(struct api_req *r)
{
	if (id_valid("mem", api_param(r, 0)))
		return api_param(r, 0);
	api_problem(r, PROBLEM_NOT_FOUND, "There is no such member.");
	return NULL;
}

void members_list(struct api_req *r)
{
	member_list_answer(r, r->who.org_id);
}

void members_create(struct api_req *r)
{
	member_create_answer(r, r->who.org_id);
}

void members_update(struct api_req *r)
{
	const char *id = member_id(r);
	struct store_member_change m;
	struct body b;
	struct err e;

	if (!id)
		return;
	read_member(&b, r, false, &m);
	if (!body_ok(&b, r))
		return;
	api_asked(store_member_update(r->api->opt.store, r->who.org_id, id, &m, on_member_changed, api_hold(r), &e), r, &e);
	body_free(&b);
}

void members_remove(struct api_req *r)
{
	const char *id = member_id(r);
	struct err e;

	if (id)
		api_asked(store_member_remove(r->api->opt.store, r->who.org_id, id, on_member_removed, api_hold(r), &e), r, &e);
}
