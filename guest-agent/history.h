/*
 * The conversation: what is sent to the model at each call. It always fits one call: when it grows too long its oldest turns are
 * dropped. Pure.
 */
#ifndef GUEST_HISTORY_H
#define GUEST_HISTORY_H

#include "common/error.h"
#include "proto/model.h"

/* Most bytes of all messages; the rest of MODEL_CALL_BYTES_MAX is for lengths and heads. */
#define HISTORY_BYTES_MAX (3 * 1024 * 1024)
/* What is left of a tool's output when the last turn alone is too long. */
#define HISTORY_SHORT_TEXT (16 * 1024)

struct history {
	struct model_message *messages; /* owned, with all texts */
	uint32_t count, cap;
	uint32_t fixed; /* messages at the front that are never dropped: system and user */
	size_t bytes;
	uint32_t dropped; /* turns dropped so far */
};

void history_init(struct history *h);
void history_free(struct history *h);
/* Adds the system prompt or the user's; both stay for ever. */
int history_add_fixed(struct history *h, enum model_role role, const char *content, struct err *e) EPH_MUST_CHECK;
/* Moves content and tool calls of a reply into the conversation; the reply keeps neither. */
int history_add_reply(struct history *h, struct model_reply *r, struct err *e) EPH_MUST_CHECK;
/* Takes content (malloc'd). */
int history_add_result(struct history *h, const char *tool_call_id, char *content, struct err *e) EPH_MUST_CHECK;
/* Once the tool calls of message i have run: arguments that are not JSON become {}, since some providers refuse the whole request.
 */
void history_mend_arguments(struct history *h, uint32_t i);
/* Makes the conversation fit; before each call. */
int history_fit(struct history *h, struct err *e) EPH_MUST_CHECK;

#endif
