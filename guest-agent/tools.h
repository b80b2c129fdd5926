/*
 * Runs the tool calls of a model. A mistake of the model is told to the model and never ends the run.
 */
#ifndef GUEST_TOOLS_H
#define GUEST_TOOLS_H

#include "args.h"
#include "channel.h"
#include "common/buf.h"
#include "exec.h"
#include "proto/model.h"

#include <stdbool.h>

/* Most bytes of a result: head and tail of an output whose every byte was replaced by a three-byte character, and a few lines. */
#define TOOL_RESULT_MAX (3 * 256 * 1024 + 8192)

struct tools {
	struct channel *ch;
	int sigchld_fd;
	const char *workdir;
	bool shell;       /* false: there is no shell tool in this run */
	int64_t limit_ms; /* the longest a call may take */
};

/* The tools of this run as TOOL_BITs. */
uint32_t tools_offered(const struct tools *t);
/*
 * Runs one call and appends the result's text. `was_cut`: the reply ended at its token limit, which explains broken arguments.
 * -1 only when the channel is over or the machine is broken.
 */
int tools_call(const struct tools *t, const struct model_tool_call *call, bool was_cut, struct buf *result,
		struct err *e) EPH_MUST_CHECK;

/* One function a tool; args are checked. */
int tool_shell(const struct tools *t, const char *call_id, const struct tool_args *a, struct buf *result,
		struct err *e) EPH_MUST_CHECK;
int tool_files(const struct tools *t, enum tool which, const char *call_id, const struct tool_args *a, struct buf *result,
		struct err *e) EPH_MUST_CHECK;

/* Puts a tool.called event on the timeline. path may be NULL, problem "" when there was none, bytes -1 when unknown. */
void tools_event(
		const struct tools *t, const char *call_id, const char *name, const char *path, int64_t bytes, const char *problem);

#endif
