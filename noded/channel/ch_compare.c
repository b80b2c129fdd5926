/* Compares two configurations of Cloud Hypervisor (ch_compare.h). The second is hostile. Pure. */
#include "channel/ch_compare.h"

#include "common/text.h"

#include <string.h>

#define PATH_MAX_BYTES 128

static int differs(const char *path, struct err *e)
{
	return err_set(e, ERR_PROTOCOL, "vm.info: %s is not as it was asked for", path);
}

static int compare(const struct json *asked, const struct json *got, const char *path, struct err *e);

static int compare_members(const struct json *asked, const struct json *got, const char *path, struct err *e)
{
	char below[PATH_MAX_BYTES];

	for (size_t i = 0; i < json_len(asked); i++) {
		const char *key = json_key(asked, i);
		const struct json *member = json_get(got, key);

		if (!text_fmt(below, sizeof(below), "%s%s%s", path, *path ? "." : "", key))
			return err_set(e, ERR_INTERNAL, "a field's path is too long");
		if (!member)
			return err_set(e, ERR_PROTOCOL, "vm.info does not say %s: this version does not know it", below);
		if (compare(json_at(asked, i), member, below, e))
			return -1;
	}
	return 0;
}

static int compare_entries(const struct json *asked, const struct json *got, const char *path, struct err *e)
{
	char below[PATH_MAX_BYTES];

	if (json_len(got) != json_len(asked))
		return differs(path, e);
	for (size_t i = 0; i < json_len(asked); i++) {
		if (!text_fmt(below, sizeof(below), "%s.%zu", path, i))
			return err_set(e, ERR_INTERNAL, "a field's path is too long");
		if (compare(json_at(asked, i), json_at(got, i), below, e))
			return -1;
	}
	return 0;
}

static int compare(const struct json *asked, const struct json *got, const char *path, struct err *e)
{
	bool same = json_type(asked) == json_type(got);

	if (same && json_type(asked) == JSON_OBJECT)
		return compare_members(asked, got, path, e);
	if (same && json_type(asked) == JSON_ARRAY)
		return compare_entries(asked, got, path, e);
	if (same && json_type(asked) == JSON_BOOL)
		same = json_as_bool(asked) == json_as_bool(got);
	else if (same && json_type(asked) == JSON_INT)
		same = json_as_int(asked) == json_as_int(got);
	else if (same && json_type(asked) == JSON_STRING)
		same = strcmp(json_as_text(asked), json_as_text(got)) == 0;
	return same ? 0 : differs(path, e);
}

/* Ways out of a VM and into one: none was asked for, and none may be there. */
static int refuse_devices(const struct json *config, struct err *e)
{
	static const char *const none[] = { "net", "fs", "pmem", "devices", "user_devices", "vdpa", "balloon", "tpm",
		"generic_vhost_user", "generic-vhost-user", "landlock_rules", "platform", "numa" };

	for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
		const struct json *v = json_get(config, none[i]);

		if (v && json_type(v) != JSON_NULL && !(json_type(v) == JSON_ARRAY && json_len(v) == 0))
			return err_set(e, ERR_PROTOCOL, "vm.info: there is a %s, which was not asked for", none[i]);
	}
	return 0;
}

int ch_compare(const struct json *asked, const struct json *config, struct err *e)
{
	return compare(asked, config, "", e) || refuse_devices(config, e) ? -1 : 0;
}
