/*
 * The JSON of guest events. The guest is hostile: its strings are bytes. Text is given as `text` where it is clean UTF-8 and as
 * `base64` otherwise; a character whose bytes came in two chunks of one command's stream is put together again and not called
 * invalid. Pure.
 */
#ifndef BROKER_GUEST_JSON_H
#define BROKER_GUEST_JSON_H

#include "common/buf.h"
#include "proto/event.h"
#include "proto/guest.h"

#include <stdbool.h>
#include <stdint.h>

/* The first bytes of a character that the last chunk of stdout (1) or stderr (2) ended in. One command runs at a time. */
struct guest_tails {
	char call_id[129]; /* whose output this is */
	uint8_t bytes[3][4];
	uint8_t len[3];
};

enum guest_json_result { GUEST_JSON_EVENT = 1, GUEST_JSON_NOTHING /* all of it is held back */, GUEST_JSON_FAILED };

/* Appends the event's data object. */
enum guest_json_result guest_json(struct guest_tails *t, const struct guest_event *g, enum event_type *type, struct buf *data);
/* True when this event ends the output that the tails belong to: write them first. */
bool guest_json_ends_output(const struct guest_tails *t, const struct guest_event *g);
/* Appends the shell.output of what is held back of a stream and forgets it; false when there is nothing. */
bool guest_json_tail(struct guest_tails *t, uint8_t stream, struct buf *data);

#endif
