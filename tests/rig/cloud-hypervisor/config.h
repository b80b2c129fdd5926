/*
 * The configuration of a VM: every field that may be sent, with type, bounds and default (config_table.c), and what the real
 * program checks when it boots (config_check.c). Pure but for looking at the files that a configuration names.
 */
#ifndef STANDIN_CONFIG_H
#define STANDIN_CONFIG_H

#include "common/buf.h"
#include "common/error.h"
#include "common/json.h"

enum field_kind {
	FIELD_END, /* ends a table */
	FIELD_BOOL,
	FIELD_INT,
	FIELD_TEXT,
	FIELD_ENUM,
	FIELD_OBJECT,
	FIELD_LIST,    /* of objects */
	FIELD_REFUSED, /* the real one has it, nothing of ours may send it: null alone */
};

struct field {
	const char *name;
	enum field_kind kind;
	const char *absent; /* JSON of the default; NULL: the field is required. A field that is null by default may be null */
	int64_t min, max;
	const char *const *words; /* of an enum */
	const struct field *sub;  /* of an object, or of a list's objects */
};

extern const struct field config_vm[], config_restore[], config_snapshot[];

/* The same value with every default filled in, checked for shape: unknown fields, types, bounds. */
int config_fill(const struct field *fields, const struct json *in, struct buf *out, struct err *e) EPH_MUST_CHECK;

/* What `vm.create` refuses: what it opens itself. */
int config_check_create(const struct json *config, struct err *e) EPH_MUST_CHECK;
/* What `vm.boot` refuses, of a configuration that is filled. */
int config_check_boot(const struct json *config, struct err *e) EPH_MUST_CHECK;

/* Members of members, by a path of names: config_text(c, "console", "mode"). NULL or 0 when not there. */
const char *config_text(const struct json *config, const char *section, const char *name);
int64_t config_int(const struct json *config, const char *section, const char *name);
bool config_bool(const struct json *config, const char *section, const char *name);
/* Entry i of a list; NULL when there is none. */
const struct json *config_entry(const struct json *config, const char *list, size_t i);

#endif
