/*
 * What the API answers when it says no: one table of problem types (RFC 9457), the list of field errors that goes with a 400, and
 * the one place where errors of the rest of the program become a status. Pure; called by every handler of this folder.
 */
#ifndef CONTROLD_API_PROBLEM_H
#define CONTROLD_API_PROBLEM_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

struct json;

/* name, spelling in the type's URI, status, title, what it means and what to do (GET /problems/<name>) */
#define PROBLEM_TABLE(X)                                                                                                           \
	X(INVALID_REQUEST, "invalid-request", 400, "The request is not valid",                                                     \
			"Something in the request is malformed, unknown or out of range. `errors` lists every fault with a JSON "  \
			"pointer into "                                                                                            \
			"the body, or the name of the parameter or header; each says the limit and what to send instead.")         \
	X(NOT_AVAILABLE, "not-available", 400, "Not available in this version",                                                    \
			"The request is well formed but asks for a feature that this version does not have. Nothing was started. " \
			"Leave the named "                                                                                         \
			"fields out, or send their default.")                                                                      \
	X(UNAUTHORIZED, "unauthorized", 401, "A valid API key is needed",                                                          \
			"Send `Authorization: Bearer eph_...` with a key of your organization. A key that expired or was revoked " \
			"is not taken. "                                                                                           \
			"Operator keys (ephop_...) are taken on the operator listener only.")                                      \
	X(INSUFFICIENT_BALANCE, "insufficient-balance", 402, "Not enough balance",                                                 \
			"A run reserves its whole cost cap before it starts, and the organization's free balance does not cover "  \
			"it. Lower "                                                                                               \
			"max_cost_micros, wait until running runs settle, or ask the operator to add credit: "                     \
			"`ephemeral admin org credit <org> <dollars>`.")                                                           \
	X(FORBIDDEN, "forbidden", 403, "The key's role does not allow this",                                                       \
			"Roles are viewer (read), member (also start and cancel runs) and admin (also keys and members). Use a "   \
			"key with the role "                                                                                       \
			"that the answer names.")                                                                                  \
	X(NOT_FOUND, "not-found", 404, "Not found",                                                                                \
			"There is no such path, or no such thing in your organization. Another organization's things are not "     \
			"found either.")                                                                                           \
	X(METHOD_NOT_ALLOWED, "method-not-allowed", 405, "Method not allowed",                                                     \
			"The path exists; the Allow header lists its methods.")                                                    \
	X(CONFLICT, "conflict", 409, "Conflict with the present state",                                                            \
			"The thing is in a state that does not allow this now. The answer says which.")                            \
	X(IDEMPOTENCY_IN_PROGRESS, "idempotency-in-progress", 409, "The same request is still in progress",                        \
			"Another request with this Idempotency-Key has not been answered yet. Send it again after Retry-After "    \
			"seconds.")                                                                                                \
	X(TOO_LARGE, "too-large", 413, "The body is too large", "The body is over the limit that the answer names.")               \
	X(UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", 415, "Unsupported media type",                                         \
			"Bodies are JSON: send `Content-Type: application/json`, without a Content-Encoding.")                     \
	X(IDEMPOTENCY_MISMATCH, "idempotency-mismatch", 422, "The Idempotency-Key was used for another request",                   \
			"Within 24 hours this key was used with another body. Use a fresh key for a new request, the same body "   \
			"for a retry.")                                                                                            \
	X(RATE_LIMITED, "rate-limited", 429, "Too many",                                                                           \
			"A limit on how many at a time was reached. The answer names it; try again after Retry-After seconds.")    \
	X(INTERNAL, "internal", 500, "A fault of the service",                                                                     \
			"The request was fine; the service made a mistake. Tell the operator the request_id.")                     \
	X(UNAVAILABLE, "unavailable", 503, "Not available at the moment",                                                          \
			"Something that this call needs does not answer. Send it again after Retry-After seconds, with the same "  \
			"Idempotency-Key.")                                                                                        \
	X(NO_NODE, "no-node", 503, "No node could run this",                                                                       \
			"No enrolled node could ever serve a run of this size and isolation. Ask for another size, or the "        \
			"operator to add a "                                                                                       \
			"node: `ephemeral admin node token`.")

enum problem {
#define X(name, text, status, title, help) PROBLEM_##name,
	PROBLEM_TABLE(X)
#undef X
			PROBLEM_COUNT
};

const char *problem_name(enum problem p);
int problem_status(enum problem p);
const char *problem_title(enum problem p);
const char *problem_help(enum problem p);
enum problem problem_parse(const char *name); /* PROBLEM_COUNT when unknown */
/* For a status that httpd itself answers with (400, 408, 413, 417, 431, 501, 503, 505). */
enum problem problem_of_status(int status);
/* Translates an error of the program. Text of ERR_INTERNAL, ERR_IO and ERR_NOMEM is for the log, not for clients. */
enum problem problem_of_err(const struct err *e);

/* --- field errors ------------------------------------------------------------------------------------------------------- */
#define FIELD_ERRORS_MAX 64 /* shown; more are counted */

enum field_where { FIELD_BODY = 1 /* a JSON pointer */, FIELD_QUERY, FIELD_HEADER };

struct field_error {
	enum field_where where;
	bool not_available; /* fine, but of a feature that comes later */
	char *at;           /* owned; "#/files/0/path", or a parameter's or header's name */
	char *detail;       /* owned */
};

struct field_errors {
	struct field_error list[FIELD_ERRORS_MAX];
	size_t count;   /* in list */
	size_t more;    /* not kept */
	size_t invalid; /* kept or not: those that are not `not_available` */
};

/* A place in the body: made on the stack while walking down, written out only when there is an error. */
struct pointer {
	const struct pointer *up; /* NULL = the whole body */
	const char *key;          /* of an object, or NULL: then index */
	size_t index;
};

void field_errors_init(struct field_errors *fe);
void field_errors_free(struct field_errors *fe);
static inline bool field_errors_any(const struct field_errors *fe)
{
	return fe->count + fe->more > 0;
}
/* `not-available` only if nothing else is wrong. */
enum problem field_errors_problem(const struct field_errors *fe);
void field_bad(struct field_errors *fe, const struct pointer *at, const char *fmt, ...) EPH_PRINTF(3, 4);
void field_later(struct field_errors *fe, const struct pointer *at, const char *fmt, ...) EPH_PRINTF(3, 4);
void query_bad(struct field_errors *fe, const char *name, const char *fmt, ...) EPH_PRINTF(3, 4);
void header_bad(struct field_errors *fe, const char *name, const char *fmt, ...) EPH_PRINTF(3, 4);
/* The whole number v into *out; false, with what is wrong said, when it is none or out of range. */
bool field_int(struct field_errors *fe, const struct pointer *at, const struct json *v, int64_t min, int64_t max, int64_t *out);
/* "#/metadata/a~1b" as RFC 6901 says for a URI fragment. */
bool pointer_print(const struct pointer *at, struct buf *out);

/* The whole application/problem+json body. `detail` is cleaned of what is not UTF-8; fe may be NULL. False when out is full. */
bool problem_render(struct buf *out, const char *public_url, enum problem p, const char *detail, const char *request_id,
		const struct field_errors *fe);
/* With a status that is finer than the problem's own: 408, 431 and 505 are all an invalid-request. */
bool problem_render_as(struct buf *out, const char *public_url, enum problem p, int status, const char *detail,
		const char *request_id, const struct field_errors *fe);

#endif
