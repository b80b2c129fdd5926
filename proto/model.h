/*
 * A model call as it crosses the guest channel and the channel-broker socket: typed, bounded, never JSON. The guest sends
 * messages, the numbers of its tools and a wished token limit; the broker builds the provider's request itself.
 */
#ifndef PROTO_MODEL_H
#define PROTO_MODEL_H

#include "common/buf.h"
#include "common/error.h"

#include <stdint.h>

#define MODEL_CALL_BYTES_MAX (4 * 1024 * 1024) /* one encoded call, or one reply */
#define MODEL_MESSAGES_MAX 4096
#define MODEL_TOOL_CALLS_MAX 64 /* in one reply */
#define MODEL_STR_MAX                                                                                                              \
	(2 * 1024 * 1024) /* one content or one arguments string: over GUEST_RESULT_MAX, so that an output that is too large is    \
			     seen as one */
#define MODEL_ID_MAX 128  /* a tool call's id or name */

enum model_role { ROLE_SYSTEM = 1, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL };
enum model_finish { FINISH_STOP = 1, FINISH_TOOL_CALLS, FINISH_LENGTH, FINISH_FILTER, FINISH_OTHER };
enum model_status { MODEL_OK = 1, MODEL_FAILED /* provider gave no usable answer; error_text says why; the run is about to end */ };

struct model_tool_call {
	char *id;        /* as the provider gave it; made up by the broker when missing */
	char *name;      /* any text a model said; checked by whoever runs it */
	char *arguments; /* text that should be JSON; never parsed on the host */
};

struct model_message {
	enum model_role role;
	char *content;                 /* "" when none */
	char *tool_call_id;            /* ROLE_TOOL */
	struct model_tool_call *calls; /* ROLE_ASSISTANT */
	uint32_t call_count;
};

struct model_call {
	uint32_t call;        /* 1, 2, ... : counted by the guest, must be the next one */
	uint32_t wish_tokens; /* 0 = no wish */
	uint32_t tools;       /* TOOL_BITs */
	struct model_message *messages;
	uint32_t message_count;
};

struct model_reply {
	uint32_t call;
	enum model_status status;
	char *error_text;
	enum model_finish finish;
	char *content;
	struct model_tool_call *calls;
	uint32_t call_count;
	uint32_t calls_left; /* model calls this run may still make */
};

void model_call_encode(const struct model_call *c, struct buf *out);
int model_call_decode(const void *p, size_t n, struct model_call *out, struct err *e) EPH_MUST_CHECK;
void model_call_free(struct model_call *c);
void model_reply_encode(const struct model_reply *r, struct buf *out);
int model_reply_decode(const void *p, size_t n, struct model_reply *out, struct err *e) EPH_MUST_CHECK;
void model_reply_free(struct model_reply *r);
const char *model_finish_text(enum model_finish f); /* "stop", "tool_calls", "length", "content_filter", "other" */

#endif
