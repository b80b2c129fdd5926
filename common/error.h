/*
 * One error value for the whole tree.
 *
 * A function that can fail returns 0 or -1 and fills the `struct err` that its caller gave (last argument, never NULL).
 * On the way up the message is wrapped with context ("read config: line 3: ..."); at the edge one table turns it into
 * problem+json, a run's error code or an exit status. A `struct err` owns nothing: copy it freely.
 */
#ifndef EPH_ERROR_H
#define EPH_ERROR_H

#include <stdarg.h>
#include <stddef.h>

#define EPH_MUST_CHECK __attribute__((warn_unused_result))
#define EPH_PRINTF(fmt_index, first_arg) __attribute__((format(printf, fmt_index, first_arg)))

enum err_code {
	ERR_NONE = 0,
	ERR_INVALID, /* what the caller or a peer gave is malformed: its fault, say which field */
	ERR_LIMIT,   /* well formed, but over a bound that the message names */
	ERR_NOT_FOUND,
	ERR_CONFLICT, /* the thing is in a state that does not allow this now */
	ERR_DENIED,   /* authenticated and forbidden, or not authenticated */
	ERR_PROTOCOL, /* a peer broke a protocol of ours; the connection is over */
	ERR_TIMEOUT,
	ERR_UNAVAILABLE, /* a dependency does not answer; trying again may help */
	ERR_IO,          /* errno is in `sys` */
	ERR_NOMEM,
	ERR_INTERNAL, /* our own mistake */
};

#define ERR_TEXT_MAX 512

struct err {
	enum err_code code;
	int sys;                 /* errno, or 0 */
	char text[ERR_TEXT_MAX]; /* always terminated; a longer message is cut at the end and ends in "..." */
};

/* Sets the error and returns -1, so that `return err_set(...)` reads well. */
int err_set(struct err *e, enum err_code code, const char *fmt, ...) EPH_PRINTF(3, 4);
/* As err_set with ERR_IO, `sys` = errno as it was at the call, and ": strerror" appended. */
int err_set_errno(struct err *e, const char *fmt, ...) EPH_PRINTF(2, 3);
/* Puts "context: " before the message; keeps code and errno. Returns -1. */
int err_wrap(struct err *e, const char *fmt, ...) EPH_PRINTF(2, 3);
/* Name of the code for logs ("invalid", "limit", ...). Never NULL. */
const char *err_code_name(enum err_code code);

#endif
