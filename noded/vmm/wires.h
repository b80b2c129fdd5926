/*
 * The descriptors that a VMM and its channel get: made by the driver before both are started, closed by keeper when both have
 * their copies. Keeper's thread; used by drivers and by keeper.
 */
#ifndef NODED_VMM_WIRES_H
#define NODED_VMM_WIRES_H

#include "common/error.h"

#include <stddef.h>

#define VMM_WIRES_MAX 12

struct vmm_wires {
	int vmm[VMM_WIRES_MAX]; /* [i] becomes descriptor 3 + i of the VMM */
	size_t vmm_count;
	int channel[VMM_WIRES_MAX]; /* [i] becomes descriptor CHANNEL_FD_GUEST + i of channel */
	size_t channel_count;
};

/* Take over the descriptor, also when they fail (-1: it was none, or there are too many; errno says). */
int vmm_wires_vmm(struct vmm_wires *w, int fd) EPH_MUST_CHECK;
int vmm_wires_channel(struct vmm_wires *w, int fd) EPH_MUST_CHECK;
/* A stream between both. */
int vmm_wires_pair(struct vmm_wires *w) EPH_MUST_CHECK;
/* A copy of a descriptor of keeper's for the VMM; keeper's own stays open. */
int vmm_wires_lend(struct vmm_wires *w, int fd) EPH_MUST_CHECK;
void vmm_wires_close(struct vmm_wires *w);

#endif
