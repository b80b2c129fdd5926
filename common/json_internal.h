/* What json.c, json_scan.c and json_write.c share: the shape of a value, and the look at raw text that comes before yajl. */
#ifndef EPH_JSON_INTERNAL_H
#define EPH_JSON_INTERNAL_H

#include "json.h"

/* 32 bytes, because a hostile body is mostly tiny values. Text, keys and entries live in the document's arena. */
struct json {
	uint8_t type; /* enum json_type */
	bool boolean;
	uint32_t len; /* bytes of text, or entries */
	union {
		const char *text;         /* strings and numbers */
		const struct json *items; /* arrays and objects */
	};
	const char *key; /* of this value in its object; NULL elsewhere */
	int64_t integer;
};

/* Refuses what yajl lets through: bytes that are not strict UTF-8, NUL raw or as \u0000, and lone surrogate escapes. */
int json_scan(const char *s, size_t n, struct err *e) EPH_MUST_CHECK;

/* s as a quoted JSON string. The bytes must be clean UTF-8; false when they are not or the buffer is full. */
bool json_put_string(struct buf *out, const char *s, size_t n);

/* Indexes of an object's entries in byte order of their keys (malloc'd, len of them); NULL when memory ran out. */
uint32_t *json_sorted(const struct json *v);

#endif
