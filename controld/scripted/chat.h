/*
 * A chat completion request as the script needs it: which model, what was asked last, what was answered since. Pure. Views point
 * into the JSON tree, which the chat owns.
 */
#ifndef CONTROLD_SCRIPTED_CHAT_H
#define CONTROLD_SCRIPTED_CHAT_H

#include "common/error.h"
#include "common/json.h"

#include <stdbool.h>
#include <stdint.h>

#define CHAT_OUTPUTS_MAX 4096

struct chat {
	struct json *root; /* owned */
	char model[65];    /* "auto" or "shell" */
	bool stream, include_usage;
	bool shell;     /* a tool named shell is offered */
	int64_t limit;  /* of completion tokens; 0 = none given */
	char *prompt;   /* owned: text of the last user message */
	size_t turn;    /* assistant messages since */
	char **outputs; /* owned: contents of the tool messages since, in order */
	size_t output_count;
	int64_t prompt_tokens; /* bytes of the request / 4, rounded up */
};

/* ERR_INVALID names what is wrong; ERR_NOT_FOUND: no such model. */
int chat_parse(const void *body, size_t n, struct chat *out, struct err *e) EPH_MUST_CHECK;
void chat_free(struct chat *c);

#endif
