/* What may still start on this host: memory, virtual CPUs, slots and pids, reserved before anything is started. Pure arithmetic. */
#ifndef NODED_KEEPER_ADMISSION_H
#define NODED_KEEPER_ADMISSION_H

#include "common/error.h"

#include <stdint.h>

#define ADMISSION_USUAL_MIB 512 /* guest memory that a usual run asks for; see admission_offer */

/* What there was too little of. */
enum admission_lack { ADMISSION_LACKS_MEMORY, ADMISSION_LACKS_VCPUS, ADMISSION_LACKS_SLOTS, ADMISSION_LACKS_PIDS };

struct admission {
	uint32_t total_memory_mib, total_vcpus, total_slots, total_pids;
	uint32_t used_memory_mib, used_vcpus, used_slots, used_pids;
	uint32_t overhead_mib;    /* of each VM beside its guest's memory */
	uint32_t pids_each;       /* processes and threads that a VM may have, but for those below */
	uint32_t pids_per_vcpu;   /* ... and for each of its vcpus */
	enum admission_lack lack; /* why admission_take said no the last time */
};

/* Reserves; -1 says what there is too little of (ERR_CONFLICT), or that this host could never do it (ERR_LIMIT). */
int admission_take(struct admission *a, uint32_t memory_mib, uint32_t vcpus, struct err *e) EPH_MUST_CHECK;
/* What an earlier noded reserved, whether or not it fits today: it is in use. */
void admission_hold(struct admission *a, uint32_t memory_mib, uint32_t vcpus);
/* In two parts: the VM's memory is free when the VM is gone, its slot when its broker and channel are gone too. */
void admission_give_vm(struct admission *a, uint32_t memory_mib, uint32_t vcpus);
void admission_give_slot(struct admission *a);

/* The VM's part once more, for a slot that is still held. */
int admission_retake_vm(struct admission *a, uint32_t memory_mib, uint32_t vcpus, struct err *e) EPH_MUST_CHECK;

/* What to tell controld, which counts guest memory only: any set of runs within the offer fits with its overhead. */
struct admission_offer {
	uint32_t free_memory_mib, free_vcpus, free_slots;
	uint32_t total_memory_mib, total_vcpus, total_slots;
};
void admission_offer(const struct admission *a, struct admission_offer *out);

#endif
