/*
 * What a provider's refusal says: its text for the client that pays, what the operator can do about it, and when to ask again. A
 * provider may say back what it was sent, the key too: it is blanked out of whatever is shown or handed on. Pure but for the wall
 * clock (a Retry-After may be a date).
 */
#ifndef BROKER_MODEL_ERROR_H
#define BROKER_MODEL_ERROR_H

#include "common/json.h"
#include "proto/assignment.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODEL_KEY_HIDE_MIN 8 /* a shorter key is no secret, and would blank out words */

/* The message of an error body (`error.message`, `error`, `message`, or the text itself), made safe, without the key, at most 300
 * bytes. `key` may be NULL; `param` (may be NULL) gets error.param or "". */
void model_error_text(const char *body, size_t n, const char *key, char out[321], char param[65]);
/* Its parts: the message of an error object's document (NULL: none), and any text made so. */
const char *model_error_message(const struct json *document);
void model_error_show(const char *text, size_t n, const char *key, char out[321]);
/* A sentence on what can be done. */
const char *model_error_hint(int status);
/* Does this 400 ask for the other name of the output limit? */
bool model_error_wants_other_limit(const char *body, size_t n, const char *param, enum limit_param used);
/* The pause that a Retry-After header (seconds or a date) asks for; -1 when it says neither. At most MODEL_RETRY_AFTER_MAX_MS. */
int64_t model_retry_after_ms(const char *value, size_t n);
#define MODEL_RETRY_AFTER_MAX_MS (INT64_C(1000) * 86400 * 365 * 1000)
/* Blanks the key out of a text of n bytes; true when it was in it. */
bool model_hide_key(char *text, size_t n, const char *key);

#endif
