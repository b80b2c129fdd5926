/* Answers as text: `name value` lines and tables from JSON, everything escaped. Used by cmd_runs.c, cmd_account.c, cmd_admin.c. */
#ifndef CLI_SHOW_H
#define CLI_SHOW_H

#include "common/buf.h"
#include "common/json.h"

/* "name       text"; nothing when text is NULL. */
void show_field(const char *name, const char *text);
void show_money(const char *name, const struct json *v, const char *key); /* nothing when there is no such integer */
void show_count(const char *name, const struct json *v, const char *key);

enum show_kind { SHOW_TEXT, SHOW_MONEY, SHOW_COST, SHOW_COUNT, SHOW_BOOL, SHOW_TIME }; /* SHOW_COST: money, "≤" until it is final */
struct show_column {
	const char *title, *key;
	size_t width; /* longer text is cut; the last column takes what is left */
	enum show_kind kind;
};
/* A table of the objects in `data`, with a line of titles if wanted. */
void show_table(const struct json *data, const struct show_column *columns, size_t count, bool titles);
/* One cell as text, "" when the member is missing. */
void show_value(const struct json *v, const char *key, enum show_kind kind, struct buf *out);

#endif
