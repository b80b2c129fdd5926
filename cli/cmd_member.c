/* Verbs for operators about an organization's members, over /v1/operator. */
#include "cli.h"

#include "admin.h"
#include "show.h"
#include "term.h"

static void show_id(const struct json *v)
{
	if (json_get_text(v, "id") != NULL)
		term_say("%s", json_get_text(v, "id"));
}

int cmd_member_add(const struct args *a)
{
	char path[ADMIN_PATH_MAX];
	struct admin_body o;

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/orgs/", a->words[0], "/members"))
		return admin_bad_word("an organization's id");
	admin_begin(&o);
	jw_kstr(&o.w, "name", a->words[1]);
	if (args_value(a, "email") != NULL)
		jw_kstr(&o.w, "email", args_value(a, "email"));
	jw_kstr(&o.w, "role", args_value(a, "role") != NULL ? args_value(a, "role") : "member");
	return admin_ask(a, "POST", path, &o, NULL, show_id);
}

static void show_members(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "MEMBER", "id", 36, SHOW_TEXT },
		{ "ROLE", "role", 8, SHOW_TEXT },
		{ "ADDED", "created_at", 19, SHOW_TIME },
		{ "NAME", "name", 24, SHOW_TEXT },
		{ "EMAIL", "email", 24, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
	if (json_get_text(v, "next_cursor") != NULL)
		term_note("There are more; use --json and the API's cursor.");
}

int cmd_member_list(const struct args *a)
{
	char path[ADMIN_PATH_MAX];

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/orgs/", a->words[0], "/members?limit=100"))
		return admin_bad_word("an organization's id");
	return admin_ask(a, "GET", path, NULL, NULL, show_members);
}
