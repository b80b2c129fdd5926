/*
 * Strict JSON over yajl: depth <= 64, strict UTF-8 (no overlong, no surrogate, no NUL), duplicate keys refused, no comments, no
 * trailing bytes, numbers kept as text and as int64 where they are one exactly. Errors are ERR_INVALID/ERR_LIMIT with a JSON
 * pointer and a byte offset where there is one. Not for unbounded input: the caller bounds the bytes first.
 */
#ifndef EPH_JSON_H
#define EPH_JSON_H

#include "buf.h"
#include "error.h"

#include <stdbool.h>
#include <stdint.h>

#define JSON_DEPTH_MAX 64

enum json_type { JSON_NULL, JSON_BOOL, JSON_INT, JSON_DECIMAL, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json; /* immutable tree; children are owned by the root */

/* Parses n bytes. On success *out is owned by the caller (json_free). */
int json_parse(const char *s, size_t n, struct json **out, struct err *e) EPH_MUST_CHECK;
void json_free(struct json *root); /* only the root; NULL is fine */

enum json_type json_type(const struct json *v);
const char *json_type_name(enum json_type t); /* "null", "boolean", "integer", "number", "string", "array", "object" */
bool json_as_bool(const struct json *v);
int64_t json_as_int(const struct json *v);      /* JSON_INT only */
const char *json_as_text(const struct json *v); /* JSON_STRING: terminated, NUL-free; JSON_DECIMAL/JSON_INT: the number's text */
size_t json_len(const struct json *v);          /* string bytes, array or object entries */
const struct json *json_at(const struct json *v, size_t i);         /* array element or object value */
const char *json_key(const struct json *v, size_t i);               /* object key */
const struct json *json_get(const struct json *v, const char *key); /* NULL when absent or v is no object */
/* Convenience: NULL / fallback unless the member exists with that type. */
const char *json_get_text(const struct json *v, const char *key);
int64_t json_get_int(const struct json *v, const char *key, int64_t fallback);
bool json_get_bool(const struct json *v, const char *key, bool fallback);

/* Writes v compactly with keys sorted by bytes: equal values give equal bytes (idempotency hash, request hash). */
bool json_canonical(const struct json *v, struct buf *out);

/*
 * Writer: appends compact JSON to a buf. Strings are checked: bytes that are not clean UTF-8 make it fail (sticky; jw_end tells).
 * Nesting is tracked (<= 32); commas and colons are its business.
 */
struct jw {
	struct buf *b;
	uint32_t depth;
	bool first[33];
	bool is_object[33];
	bool after_key;
	bool failed;
};
void jw_init(struct jw *w, struct buf *b);
void jw_object(struct jw *w);
void jw_array(struct jw *w);
void jw_close(struct jw *w); /* closes the innermost object or array */
void jw_key(struct jw *w, const char *key);
void jw_str(struct jw *w, const char *s); /* NULL -> null */
void jw_strn(struct jw *w, const char *s, size_t n);
void jw_int(struct jw *w, int64_t v);
void jw_bool(struct jw *w, bool v);
void jw_null(struct jw *w);
void jw_raw(struct jw *w, const char *json, size_t n); /* n bytes of JSON that we made or checked ourselves */
void jw_json(struct jw *w, const struct json *v);
/* key + value in one */
void jw_kstr(struct jw *w, const char *key, const char *s);
void jw_kstrn(struct jw *w, const char *key, const char *s, size_t n);
void jw_kint(struct jw *w, const char *key, int64_t v);
void jw_kbool(struct jw *w, const char *key, bool v);
void jw_knull(struct jw *w, const char *key);
void jw_kobject(struct jw *w, const char *key);
void jw_karray(struct jw *w, const char *key);
bool jw_end(struct jw *w); /* true when the value is whole and nothing failed */

#endif
