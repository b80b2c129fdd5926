/*
 * The agent's tools: one table for the guest (which runs them) and the broker (which describes them to the model). A guest names
 * tools by number; it never sends a description or a schema, so nothing it says is copied into a provider request as JSON.
 */
#ifndef PROTO_TOOLS_H
#define PROTO_TOOLS_H

#include <stdint.h>

enum tool { TOOL_SHELL = 0, TOOL_READ_FILE, TOOL_WRITE_FILE, TOOL_LIST_FILES, TOOL_COUNT };

struct tool_info {
	const char *name;
	const char *description;
	const char *parameters; /* JSON Schema, compact, ours */
};

const struct tool_info *tool_info(enum tool t);
enum tool tool_parse(const char *name); /* TOOL_COUNT when unknown */

/* Bytes that the agent adds to a prompt in its first request: its instructions, the tools, the JSON around them. A bound for
 * admission, not for the meter, which counts what was really built. */
#define AGENT_REQUEST_BYTES 3072

#define TOOL_BIT(t) (UINT32_C(1) << (t))

#endif
