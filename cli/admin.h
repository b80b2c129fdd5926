/*
 * What the verbs for operators share: a request's body, its path, one exchange on the operator listener. Used by cmd_admin.c,
 * cmd_member.c and cmd_catalog.c.
 */
#ifndef CLI_ADMIN_H
#define CLI_ADMIN_H

#include "args.h"
#include "common/buf.h"
#include "common/json.h"

#define ADMIN_PATH_MAX 1024

/* A request's body in the making: one object. Freed by admin_ask; by buf_free(&b) when it is never sent. */
struct admin_body {
	struct buf b;
	struct jw w;
};
void admin_begin(struct admin_body *o);
/* Adds an option's whole number, at least min, when it is given. */
int admin_count(const struct args *a, struct jw *w, const char *option, const char *field, int64_t min,
		struct err *e) EPH_MUST_CHECK;

/* Asks and shows the answer: as JSON, or by `show` (NULL: nothing). o and key may be NULL. The exit status. */
int admin_ask(const struct args *a, const char *method, const char *path, struct admin_body *o, const char *key,
		void (*show)(const struct json *));

/* prefix + word percent-encoded (slashes kept, where the route has them) + suffix; false when it is too long. */
bool admin_path(char out[ADMIN_PATH_MAX], const char *prefix, const char *word, const char *suffix) EPH_MUST_CHECK;
bool admin_no_slash(const char *id);
/* Complaints; each gives CLI_USE. */
int admin_bad_word(const char *what);
int admin_use(const struct err *e);

#endif
