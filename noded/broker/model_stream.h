/*
 * Reads a provider's answer to a chat completion, streamed (server-sent events) or whole (one JSON object: told apart by its first
 * byte), and assembles text, tool calls, finish reason and usage. Pure; any cut of the bytes gives the same result. Bounded: whole
 * body by the caller, one line 4 MiB, texts together MODEL_REPLY_TEXT_MAX, 64 tool calls, MODEL_STR_MAX a string. The provider is
 * foreign: nothing it says is believed beyond that it is an answer.
 */
#ifndef BROKER_MODEL_STREAM_H
#define BROKER_MODEL_STREAM_H

#include "meter.h"

#include "common/error.h"
#include "proto/model.h"

#include <stdbool.h>
#include <stdint.h>

#define MODEL_BODY_MAX (8 * 1024 * 1024)
#define MODEL_LINE_MAX (4 * 1024 * 1024)
#define MODEL_REPLY_TEXT_MAX (3 * 1024 * 1024) /* all strings of a reply: it must fit MODEL_CALL_BYTES_MAX when encoded */

struct model_stream;

/* The key (may be NULL; outlives it) is kept out of the texts of errors. NULL: no memory. */
struct model_stream *model_stream_new(const char *key);
void model_stream_free(struct model_stream *s);
/* ERR_PROTOCOL or ERR_LIMIT ends it: feed no more (usage that came before stays known). */
int model_stream_feed(struct model_stream *s, const void *p, size_t n, struct err *e) EPH_MUST_CHECK;
/* The bytes are over. 0: the answer is whole (a finish reason came). ERR_PROTOCOL: cut short, or no answer at all. */
int model_stream_end(struct model_stream *s, struct err *e) EPH_MUST_CHECK;
/* The terminal marker of a stream came: what follows does not matter, the connection may be closed. */
bool model_stream_done(const struct model_stream *s);
/* Usage as the provider counts it; false when it said none. */
bool model_stream_usage(const struct model_stream *s, struct meter_tokens *out);
/* Moves the answer out, once, after model_stream_end gave 0. Missing tool call ids, and all but the first of equal ones, are made
 * up as call_<call>_<n>. When the reply was cut by its token limit or a filter, the tool call that came last may be cut too: it is
 * left out, and the content says so. */
int model_stream_take(struct model_stream *s, uint32_t call, struct model_reply *out, struct err *e) EPH_MUST_CHECK;

#endif
