/* Verbs for operators, over /v1/operator: organizations, keys, hosts. */
#include "cli.h"

#include "admin.h"
#include "common/ids.h"
#include "common/text.h"
#include "show.h"
#include "term.h"

/* --- organizations ---------------------------------------------------------------------------------------------------------- */

static void show_id(const struct json *v)
{
	if (json_get_text(v, "id") != NULL)
		term_say("%s", json_get_text(v, "id"));
	if (!json_get_bool(v, "allow_emulated", true))
		term_note("Its runs go to hosts with KVM only; `ephemeral admin org set %s --allow-emulated yes` "
			  "lets them go to others.",
				json_get_text(v, "id") != NULL ? json_get_text(v, "id") : "ORG");
}

int cmd_org_create(const struct args *a)
{
	struct admin_body o;

	admin_begin(&o);
	jw_kstr(&o.w, "name", a->words[0]);
	if (args_flag(a, "allow-emulated"))
		jw_kbool(&o.w, "allow_emulated", true);
	if (args_flag(a, "unlimited"))
		jw_kbool(&o.w, "unlimited", true);
	if (args_value(a, "default-model") != NULL)
		jw_kstr(&o.w, "default_model", args_value(a, "default-model"));
	return admin_ask(a, "POST", "/v1/operator/orgs", &o, NULL, show_id);
}

static void show_orgs(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "ORGANIZATION", "id", 36, SHOW_TEXT },
		{ "NAME", "name", 24, SHOW_TEXT },
		{ "BALANCE", "balance_micros", 12, SHOW_MONEY },
		{ "RESERVED", "reserved_micros", 12, SHOW_MONEY },
		{ "EMULATED", "allow_emulated", 8, SHOW_BOOL },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
	if (json_get_text(v, "next_cursor") != NULL)
		term_note("There are more; use --json and the API's cursor.");
}

int cmd_org_list(const struct args *a)
{
	return admin_ask(a, "GET", "/v1/operator/orgs?limit=100", NULL, NULL, show_orgs);
}

static void show_org(const struct json *v)
{
	char text[32];

	if (json_get_text(v, "name") == NULL)
		return;
	text_dollars(json_get_int(v, "balance_micros", 0), text);
	term_say("%s  %s  balance %s%s%s%s%s%s", json_get_text(v, "id") != NULL ? json_get_text(v, "id") : "?",
			json_get_text(v, "name"), text, json_get_bool(v, "disabled", false) ? "  disabled" : "",
			json_get_bool(v, "unlimited", false) ? "  unlimited" : "",
			json_get_bool(v, "allow_emulated", false) ? "  emulated hosts allowed" : "",
			json_get_text(v, "selector") != NULL ? "  hosts with " : "",
			json_get_text(v, "selector") != NULL ? json_get_text(v, "selector") : "");
}

/* Adds a yes or no, turned round where the interface asks the opposite. */
static int put_switch(const struct args *a, struct jw *w, const char *option, const char *field, bool opposite, struct err *e)
{
	const char *text = args_value(a, option);

	if (text == NULL)
		return 0;
	if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
		return err_set(e, ERR_INVALID, "--%s %s: it must be yes or no", option, text);
	jw_kbool(w, field, (strcmp(text, "yes") == 0) != opposite);
	return 0;
}

static int put_default_cost(const struct args *a, struct jw *w, struct err *e)
{
	const char *text = args_value(a, "default-max-cost");
	int64_t micros;

	if (text == NULL)
		return 0;
	if (text_micros(text[0] == '$' ? text + 1 : text, &micros, e) != 0)
		return err_wrap(e, "--default-max-cost");
	jw_kint(w, "default_max_cost_micros", micros);
	return 0;
}

/* The interface takes labels as one text: a=b,c=d. */
static int put_labels(const struct args *a, const char *option, struct jw *w, const char *field, struct err *e)
{
	struct buf b = BUF_INIT(1024);
	const char *label;
	int rc = 0;

	for (size_t i = 0; rc == 0 && (label = args_list(a, option, i)) != NULL; i++) {
		if (label[0] == '\0' && i == 0 && args_list(a, option, 1) == NULL)
			continue; /* none at all */
		if (strchr(label, '=') == NULL || label[0] == '=' || strchr(label, ',') != NULL)
			rc = err_set(e, ERR_INVALID, "--%s %s: it must be KEY=VALUE, without commas", option, label);
		else if (!buf_add_str(&b, i > 0 ? "," : "") || !buf_add_str(&b, label))
			rc = err_set(e, ERR_LIMIT, "the labels are over 1024 bytes");
	}
	if (rc == 0 && args_list(a, option, 0) != NULL)
		jw_kstrn(w, field, b.len > 0 ? (const char *)b.data : "", b.len);
	buf_free(&b);
	return rc;
}

int cmd_org_set(const struct args *a)
{
	char path[ADMIN_PATH_MAX];
	struct admin_body o;
	struct err e;

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/orgs/", a->words[0], ""))
		return admin_bad_word("an organization's id");
	admin_begin(&o);
	if (args_value(a, "name") != NULL)
		jw_kstr(&o.w, "name", args_value(a, "name"));
	if (args_value(a, "default-model") != NULL)
		jw_kstr(&o.w, "default_model", args_value(a, "default-model"));
	if (args_list(a, "selector", 0) != NULL && put_labels(a, "selector", &o.w, "selector", &e) != 0) {
		buf_free(&o.b);
		return admin_use(&e);
	}
	if (put_switch(a, &o.w, "enabled", "disabled", true, &e) != 0 ||
			put_switch(a, &o.w, "allow-emulated", "allow_emulated", false, &e) != 0 ||
			put_switch(a, &o.w, "unlimited", "unlimited", false, &e) != 0 || put_default_cost(a, &o.w, &e) != 0 ||
			admin_count(a, &o.w, "max-queued", "max_queued_runs", 0, &e) != 0 ||
			admin_count(a, &o.w, "max-running", "max_running_runs", 0, &e) != 0) {
		buf_free(&o.b);
		return admin_use(&e);
	}
	if (o.b.len == 1) { /* the brace that opens it */
		buf_free(&o.b);
		(void)err_set(&e, ERR_INVALID, "nothing to change; `ephemeral help admin org set` lists what there is");
		return admin_use(&e);
	}
	return admin_ask(a, "PATCH", path, &o, NULL, show_org);
}

static void show_credit(const struct json *v)
{
	char text[32];

	text_dollars(json_get_int(v, "balance_micros", 0), text);
	printf("balance %s\n", text);
}

int cmd_org_credit(const struct args *a)
{
	char path[ADMIN_PATH_MAX], made[ID_MAX];
	const char *dollars = a->words[1], *key = args_value(a, "idempotency-key");
	struct admin_body o;
	struct err e;
	int64_t micros;

	if (text_micros(dollars[0] == '$' ? dollars + 1 : dollars, &micros, &e) != 0) {
		(void)err_wrap(&e, "%s", dollars);
		return admin_use(&e);
	}
	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/orgs/", a->words[0], "/credit"))
		return admin_bad_word("an organization's id");
	if (key == NULL) {
		id_make("cli", made);
		key = made;
	}
	admin_begin(&o);
	jw_kint(&o.w, "amount_micros", micros);
	if (args_value(a, "note") != NULL)
		jw_kstr(&o.w, "note", args_value(a, "note"));
	return admin_ask(a, "POST", path, &o, key, show_credit);
}

/* --- keys ------------------------------------------------------------------------------------------------------------------- */

static void show_key(const struct json *v)
{
	if (json_get_text(v, "key") != NULL)
		term_say("%s", json_get_text(v, "key"));
	term_note("This is the only time the key is shown (id %s).", json_get_text(v, "id") != NULL ? json_get_text(v, "id") : "?");
}

int cmd_key_create(const struct args *a)
{
	char path[ADMIN_PATH_MAX];
	struct admin_body o;

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/orgs/", a->words[0], "/keys"))
		return admin_bad_word("an organization's id");
	admin_begin(&o);
	jw_kstr(&o.w, "role", args_value(a, "role") != NULL ? args_value(a, "role") : "member");
	if (args_value(a, "name") != NULL)
		jw_kstr(&o.w, "name", args_value(a, "name"));
	if (args_value(a, "member") != NULL)
		jw_kstr(&o.w, "member_id", args_value(a, "member"));
	if (args_value(a, "expires-at") != NULL)
		jw_kstr(&o.w, "expires_at", args_value(a, "expires-at"));
	return admin_ask(a, "POST", path, &o, NULL, show_key);
}

static void show_keys(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "KEY", "id", 36, SHOW_TEXT },
		{ "ROLE", "role", 8, SHOW_TEXT },
		{ "CREATED", "created_at", 19, SHOW_TIME },
		{ "LAST USED", "last_used_at", 19, SHOW_TIME },
		{ "REVOKED", "revoked_at", 19, SHOW_TIME },
		{ "NAME", "name", 16, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_key_list(const struct args *a)
{
	char path[ADMIN_PATH_MAX];

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/orgs/", a->words[0], "/keys?limit=100"))
		return admin_bad_word("an organization's id");
	return admin_ask(a, "GET", path, NULL, NULL, show_keys);
}

int cmd_key_revoke(const struct args *a)
{
	char start[ADMIN_PATH_MAX], path[ADMIN_PATH_MAX];

	if (!admin_no_slash(a->words[0]) || !admin_no_slash(a->words[1]) ||
			!admin_path(start, "/v1/operator/orgs/", a->words[0], "/keys/") ||
			!admin_path(path, start, a->words[1], ""))
		return admin_bad_word("an id");
	return admin_ask(a, "DELETE", path, NULL, NULL, NULL);
}

/* --- hosts ------------------------------------------------------------------------------------------------------------------ */

static void show_token(const struct json *v)
{
	if (json_get_text(v, "token") == NULL)
		return;
	term_say("%s", json_get_text(v, "token"));
	term_note("It is shown this once. Put it into the file that join_token_file of the host's noded.conf names "
		  "(deploy/README.md).");
}

int cmd_node_token(const struct args *a)
{
	struct admin_body o;
	struct err e;

	admin_begin(&o);
	if (admin_count(a, &o.w, "uses", "uses", 1, &e) != 0 ||
			admin_count(a, &o.w, "expires-in", "expires_in_seconds", 1, &e) != 0 ||
			put_labels(a, "label", &o.w, "labels", &e) != 0) {
		buf_free(&o.b);
		return admin_use(&e);
	}
	if (args_value(a, "isolation") != NULL)
		jw_kstr(&o.w, "isolation", args_value(a, "isolation"));
	return admin_ask(a, "POST", "/v1/operator/node-tokens", &o, NULL, show_token);
}

static void show_nodes(const struct json *v)
{
	static const struct show_column columns[] = {
		{ "NODE", "id", 37, SHOW_TEXT },
		{ "NAME", "name", 20, SHOW_TEXT },
		{ "STATE", "condition", 9, SHOW_TEXT },
		{ "ISOLATION", "isolation", 9, SHOW_TEXT },
		{ "RUNS", "runs", 5, SHOW_COUNT },
		{ "IMAGE", "image", 12, SHOW_TEXT },
		{ "", "image_state", 8, SHOW_TEXT },
		{ "LAST SEEN", "last_seen_at", 19, SHOW_TIME },
		{ "LABELS", "labels", 20, SHOW_TEXT },
	};

	show_table(json_get(v, "data"), columns, sizeof columns / sizeof columns[0], true);
}

int cmd_node_list(const struct args *a)
{
	return admin_ask(a, "GET", "/v1/operator/nodes?limit=100", NULL, NULL, show_nodes);
}

static int node_act(const struct args *a, const char *suffix)
{
	char path[ADMIN_PATH_MAX];

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/nodes/", a->words[0], suffix))
		return admin_bad_word("a node's id");
	return admin_ask(a, "POST", path, NULL, NULL, NULL);
}

int cmd_node_drain(const struct args *a)
{
	return node_act(a, "/drain");
}

int cmd_node_undrain(const struct args *a)
{
	return node_act(a, "/undrain");
}

int cmd_node_revoke(const struct args *a)
{
	return node_act(a, "/revoke");
}

int cmd_node_remove(const struct args *a)
{
	char path[ADMIN_PATH_MAX];

	if (!admin_no_slash(a->words[0]) || !admin_path(path, "/v1/operator/nodes/", a->words[0], ""))
		return admin_bad_word("a node's id");
	return admin_ask(a, "DELETE", path, NULL, NULL, NULL);
}
