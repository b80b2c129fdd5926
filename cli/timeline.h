/*
 * A run's timeline as text: one event in, its lines out, in the form of the pages: time, label, what happened. Pure (no clock, no
 * terminal); what a guest printed comes out escaped. Used by run --wait, events and replay.
 */
#ifndef CLI_TIMELINE_H
#define CLI_TIMELINE_H

#include "common/buf.h"
#include "common/json.h"

#include <stdbool.h>

struct timeline {
	size_t width; /* columns of a line */
	bool colour;
	bool full; /* every event, with model calls and the output of commands; else what the pages show */
};

enum timeline_kind {
	TIMELINE_STEP,
	TIMELINE_END,     /* one of the five ends; the output can be read now */
	TIMELINE_SETTLED, /* the last event */
};

enum timeline_kind timeline_kind(const struct json *event);
/* Appends the event's lines; nothing for an event that the short form leaves out. */
void timeline_event(const struct timeline *t, const struct json *event, struct buf *out);
/* "Model $0.00033 · Web $0.00 · Compute $0.0032"; parts as in a run's `cost` or in run.settled. No newline. */
void timeline_parts(const struct json *parts, struct buf *out);
/* "shell on · web off" and the like for an object with members shell and web. */
void timeline_permissions(const struct json *v, struct buf *out);
/* Seconds since the run was made, 0 when the event has none. */
double timeline_t(const struct json *event);
/* What the run does after this event, for the line that shows that it lives; NULL = as before. */
const char *timeline_doing(const struct json *event);
/* 5214 -> "5,214"; out holds 32. */
void timeline_number(int64_t n, char out[32]);

#endif
