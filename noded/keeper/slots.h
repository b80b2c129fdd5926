/*
 * Slots: which user ids a VM's processes get. Slot s is uid_base + 3s (broker), + 1 (channel), + 2 (VMM). A slot is free only when
 * no process of any of its ids is left on this host. Keeper's; no locking.
 */
#ifndef NODED_KEEPER_SLOTS_H
#define NODED_KEEPER_SLOTS_H

#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

enum slot_role { SLOT_BROKER, SLOT_CHANNEL, SLOT_VMM, SLOT_ROLES };

struct slots;

int slots_new(uint32_t uid_base, uint32_t count, struct slots **out, struct err *e) EPH_MUST_CHECK;
void slots_free(struct slots *s);
/* A free slot, taken; -1 when there is none. Slots are given round robin, so that an id rests before it is used again. */
int slots_take(struct slots *s);
/* Takes this one (recovery); false when it is out of range. */
bool slots_hold(struct slots *s, uint32_t slot);
void slots_give(struct slots *s, uint32_t slot);
bool slots_taken(const struct slots *s, uint32_t slot); /* by slots_take or slots_hold */
uint32_t slots_free_count(const struct slots *s);
uint32_t slots_count(const struct slots *s);
uint32_t slots_uid(const struct slots *s, uint32_t slot, enum slot_role role);

/* Looks through /proc for live processes (a zombie is not one) with ids of slots that nobody of ours has: those slots are not given
 * out until a later look finds them empty. Returns how many such slots there are. */
uint32_t slots_look(struct slots *s);
/* Real user id of a live process. */
bool slots_uid_of(int32_t pid, uint32_t *uid) EPH_MUST_CHECK;
/* Pure: the real uid and the state letter from the text of /proc/PID/status. */
bool slots_parse_status(const char *text, uint32_t *uid, char *state);

#endif
