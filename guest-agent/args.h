/*
 * Arguments of a tool call, as a model wrote them: text that should be a JSON object. Pure.
 */
#ifndef GUEST_ARGS_H
#define GUEST_ARGS_H

#include "common/buf.h"
#include "common/json.h"
#include "proto/tools.h"

#include <stdbool.h>
#include <stdint.h>

#define ARG_PATH_MAX 4095
#define ARG_COMMAND_MAX (128 * 1024 - 1) /* the longest argument that Linux gives to a program */
#define SHELL_LIMIT_SECONDS 120
#define READ_LIMIT_MAX 262144

struct tool_args {
	struct json *root; /* owns the texts below */
	const char *command, *path, *content;
	size_t content_len;
	int64_t timeout_seconds, offset, limit;
};

/*
 * False: `why` holds a text for the model that names what is wrong and what is expected. Defaults are filled in.
 * args_free in both cases.
 */
bool args_parse(enum tool t, const char *text, struct tool_args *out, struct buf *why);
void args_free(struct tool_args *a);

#endif
