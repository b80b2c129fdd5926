/*
 * Builds a provider's request from what the guest asked, by allowlist: nothing of the guest's is copied as JSON, and every member
 * but the messages is ours. Pure. The body is made in two parts, so that its size is known before the money decides the output
 * limit:
 *
 *   {"model":..,"stream":true,"stream_options":{"include_usage":true},"store":false,"tools":[..],"messages":[..   <- prefix
 *   ],"max_completion_tokens":N}                                                                                  <- tail
 *
 * The next request of the same conversation begins with the same prefix; this is how a known token count is used again (meter.h).
 */
#ifndef BROKER_MODEL_REQUEST_H
#define BROKER_MODEL_REQUEST_H

#include "common/buf.h"
#include "common/error.h"
#include "proto/assignment.h"
#include "proto/model.h"

#include <stdbool.h>
#include <stdint.h>

#define MODEL_REQUEST_MAX (16 * 1024 * 1024) /* bytes of a whole body: 4 MiB of messages with room for escapes */
#define MODEL_TAIL_MAX 64                    /* what the tail can add at most */

/* Tools that may be offered to this run; others that the guest names are left out. */
uint32_t model_tools_allowed(const struct assignment *a);

/* Appends the prefix. ERR_INVALID: the messages make no conversation (a tool's answer without an id, no message at all);
 * ERR_LIMIT: over MODEL_REQUEST_MAX. */
int model_request_prefix(const struct model_spec *spec, uint32_t tools, const struct model_call *call, struct buf *out,
		struct err *e) EPH_MUST_CHECK;
/* Appends the tail: the body is whole then. */
bool model_request_tail(enum limit_param param, int64_t limit_tokens, struct buf *out);
const char *model_limit_name(enum limit_param param);

#endif
