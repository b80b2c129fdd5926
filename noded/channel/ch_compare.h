/*
 * Is a VM as it was asked for? Cloud Hypervisor ignores fields that it does not know, so a name that changed between versions would
 * switch a protection off without a word: what vm.info says is compared with what vm.create was told, field by field.
 *
 * Pure; used by ch_api.c.
 */
#ifndef NODED_CHANNEL_CH_COMPARE_H
#define NODED_CHANNEL_CH_COMPARE_H

#include "common/json.h"

/* Every field of `asked` must be in `config` with the same value, and no device beyond those asked for. -1: e names the field. */
int ch_compare(const struct json *asked, const struct json *config, struct err *e) EPH_MUST_CHECK;

#endif
