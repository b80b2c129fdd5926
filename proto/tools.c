/* Descriptions of the agent's tools as a model sees them. Pure data. */
#include "tools.h"

#include <string.h>

static const struct tool_info tools[TOOL_COUNT] = {
	[TOOL_SHELL] = {
		.name = "shell",
		.description = "Run a command with bash in the working directory, as an unprivileged user, and get its exit code and output. "
			       "Nothing of one command is kept for the next but files: no variables, no background processes.",
		.parameters = "{\"type\":\"object\",\"properties\":{\"command\":{\"type\":\"string\",\"description\":\"The command line for bash -c.\"},"
			      "\"timeout_seconds\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":120,\"description\":\"Time limit; 120 when absent.\"}},"
			      "\"required\":[\"command\"],\"additionalProperties\":false}",
	},
	[TOOL_READ_FILE] = {
		.name = "read_file",
		.description = "Read a text file. Long files are read in parts with offset and limit (bytes).",
		.parameters = "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\",\"description\":\"Relative to the working directory, or absolute.\"},"
			      "\"offset\":{\"type\":\"integer\",\"minimum\":0},\"limit\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":262144}},"
			      "\"required\":[\"path\"],\"additionalProperties\":false}",
	},
	[TOOL_WRITE_FILE] = {
		.name = "write_file",
		.description = "Create or replace a file with the given text. Missing folders are made.",
		.parameters = "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\",\"description\":\"Relative to the working directory, or absolute.\"},"
			      "\"content\":{\"type\":\"string\"}},\"required\":[\"path\",\"content\"],\"additionalProperties\":false}",
	},
	[TOOL_LIST_FILES] = {
		.name = "list_files",
		.description = "List a folder: one entry a line with type, size and name.",
		.parameters = "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\",\"description\":\"The working directory when absent.\"}},"
			      "\"additionalProperties\":false}",
	},
};

const struct tool_info *tool_info(enum tool t)
{
	return t < TOOL_COUNT ? &tools[t] : NULL;
}

enum tool tool_parse(const char *name)
{
	for (unsigned i = 0; i < TOOL_COUNT; i++)
		if (strcmp(tools[i].name, name) == 0)
			return (enum tool)i;
	return TOOL_COUNT;
}
