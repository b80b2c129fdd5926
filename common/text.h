/*
 * Strings: bounded formatting whose truncation is an error, strict UTF-8, strict numbers, hex and base64url, escaping for
 * terminals and logs. Includes the poison list: the C calls that this tree does not use.
 */
#ifndef EPH_TEXT_H
#define EPH_TEXT_H

#include "buf.h"
#include "error.h"

#include <stdbool.h>
#include <stdint.h>
/* Their declarations have to be seen before the names are poisoned below. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Formats into out[size]; false (and out = "") when it does not fit. */
bool text_fmt(char *out, size_t size, const char *fmt, ...) EPH_PRINTF(3, 4) EPH_MUST_CHECK;
/* Copies; false (and out = "") when it does not fit. */
bool text_copy(char *out, size_t size, const char *s) EPH_MUST_CHECK;

/* Strict UTF-8 (no overlong forms, no surrogates, at most U+10FFFF). NUL is accepted here; see text_utf8_clean. */
bool text_utf8_valid(const char *s, size_t n);
/* Strict UTF-8 and no NUL byte: what Postgres text and our JSON take. */
bool text_utf8_clean(const char *s, size_t n);
/* Length of the longest prefix of s[0..n) that ends on a character border (only the last 3 bytes are looked at; invalid bytes
 * count as characters of one byte, so that a stream of them still moves on). */
size_t text_utf8_border(const char *s, size_t n);

/* Whole string must be the number; no sign but '-' where min < 0, no spaces. Errors name the bounds. */
int text_i64(const char *s, int64_t min, int64_t max, int64_t *out, struct err *e) EPH_MUST_CHECK;
/* "0.05" dollars -> 50000 micros; at most 6 decimals, no sign, no exponent. */
int text_micros(const char *dollars, int64_t *micros, struct err *e) EPH_MUST_CHECK;
/* 3530 -> "$0.00353": 2 to 6 decimals, trailing zeros cut. out must hold 32. */
void text_dollars(int64_t micros, char out[32]);

void text_hex(const uint8_t *p, size_t n, char *out);                  /* out: 2n + 1 */
bool text_unhex(const char *s, uint8_t *out, size_t n) EPH_MUST_CHECK; /* exactly 2n lower-case digits, then the end */
/* base64url without padding; out must hold 4*((n+2)/3)+1. */
void text_b64url(const uint8_t *p, size_t n, char *out);
bool text_unb64url(const char *s, uint8_t *out, size_t max, size_t *n) EPH_MUST_CHECK;
/* Standard base64 with padding, appended to b. */
bool text_b64(struct buf *b, const uint8_t *p, size_t n);
/* Strict standard base64 (padding required, no white space), decoded bytes appended to b. */
bool text_unb64(const char *s, size_t n, struct buf *b) EPH_MUST_CHECK;

/* RFC 3339 UTC with milliseconds, "2026-11-30T12:00:00.123Z". out must hold 32. */
void text_time_ms(int64_t unix_ms, char out[32]);
bool text_parse_time_ms(const char *s, int64_t *unix_ms) EPH_MUST_CHECK;

/* Appends s with control characters, escapes, bidi overrides and invalid UTF-8 shown as \xNN or \u{N}: safe for a terminal or
 * a log line. Newline and tab pass only when `lines` is true. */
bool text_safe(struct buf *b, const char *s, size_t n, bool lines);
/* One character of that: writes its safe form to out (a string) and returns how many of the n bytes it stands for. n > 0. */
size_t text_safe_char(const char *s, size_t n, bool lines, char out[16]);

/* Characters of n bytes of clean UTF-8. */
size_t text_utf8_length(const char *s, size_t n);

/* Appends s with line breaks at blanks so that no line has more than `width` characters (a longer word stays whole); `at` is the
 * column where it begins, `indent` where each further line does. A newline of s is kept, and what follows it is wrapped anew. */
bool text_wrap(struct buf *b, const char *s, size_t at, size_t indent, size_t width);

/* gcc only: clang's fortified headers make macros of these names. */
#if !defined(EPH_NO_POISON) && !defined(__clang__)
#pragma GCC poison strcpy strcat sprintf vsprintf strncpy strncat strtok atoi atol atoll gets
#endif

#endif
