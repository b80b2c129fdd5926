/*
 * What channel is told about the VMM that it controls: which driver's protocol, how the VM is to start, and what must be said to
 * the VMM for it. Written by the driver (in keeper) into a sealed memfd, which channel inherits; so channel reads no configuration
 * and decides nothing about a VM.
 *
 * Pure codec but for the memfd; used by keeper (write) and by channel (read, with bounds although the writer is ours).
 */
#ifndef NODED_VMM_PLAN_H
#define NODED_VMM_PLAN_H

#include "common/buf.h"
#include "common/error.h"

#include <stdint.h>

#define VMM_PLAN_MAX (128 * 1024)
/* Cloud Hypervisor 53 takes 51,200 bytes of body, whatever its documentation says; far above what a VM needs. */
#define VMM_PLAN_BODY_MAX 51200
#define VMM_PLAN_PATH_MAX 1024

enum vmm_kind { VMM_QEMU = 1, VMM_CLOUD_HYPERVISOR };

enum vmm_start {
	VMM_COLD = 1, /* boots */
	VMM_GOLDEN,   /* boots, to be made a snapshot of before anything was said to its guest */
	VMM_CLONE,    /* goes on from such a snapshot */
};

struct vmm_plan {
	uint8_t kind;  /* enum vmm_kind */
	uint8_t start; /* enum vmm_start */
	uint32_t memory_mib, vcpus;
	/* Numbers of the VMM's own descriptors that a snapshot lives in; -1 = none. */
	int32_t ram_fd, state_fd;
	uint32_t answer_ms; /* the longest that an answer of the VMM may take */
	char version[65];   /* what the VMM must say that it is, as the probe found it; "" = not asked */
	/* Cloud Hypervisor: the body of vm.create (cold, golden), and the URL of the snapshot (golden: to be made, clone: to go on
	 * from). NULL and "" for QEMU, which gets all of it by its command line. */
	char *create;
	char snapshot[VMM_PLAN_PATH_MAX];
};

void vmm_plan_encode(const struct vmm_plan *plan, struct buf *out);
int vmm_plan_decode(const void *p, size_t n, struct vmm_plan *out, struct err *e) EPH_MUST_CHECK;
void vmm_plan_free(struct vmm_plan *plan);

/* A sealed memfd that holds it, closed on exec; -1: e says why. */
int vmm_plan_write(const struct vmm_plan *plan, struct err *e) EPH_MUST_CHECK;
/* Reads it from there. */
int vmm_plan_read(int fd, struct vmm_plan *out, struct err *e) EPH_MUST_CHECK;

#endif
