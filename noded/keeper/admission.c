/* Admission's arithmetic (admission.h). Pure. */
#include "keeper/admission.h"

static uint32_t rest(uint32_t total, uint32_t used)
{
	return total > used ? total - used : 0;
}

int admission_take(struct admission *a, uint32_t memory_mib, uint32_t vcpus, struct err *e)
{
	uint64_t need = (uint64_t)memory_mib + a->overhead_mib;

	if (need > a->total_memory_mib)
		return err_set(e, ERR_LIMIT, "a guest of %u MiB with %u MiB overhead never fits this host (memory_mib = %u)",
				memory_mib, a->overhead_mib, a->total_memory_mib);
	if (vcpus > a->total_vcpus)
		return err_set(e, ERR_LIMIT, "%u vcpus never fit this host (vcpus = %u)", vcpus, a->total_vcpus);
	if (a->used_slots >= a->total_slots)
		return err_set(e, ERR_CONFLICT, "all %u slots are taken", a->total_slots);
	if (need > rest(a->total_memory_mib, a->used_memory_mib))
		return err_set(e, ERR_CONFLICT, "%u MiB are free, %u MiB are needed", rest(a->total_memory_mib, a->used_memory_mib),
				(uint32_t)need);
	if (vcpus > rest(a->total_vcpus, a->used_vcpus))
		return err_set(e, ERR_CONFLICT, "%u vcpus are free, %u are needed", rest(a->total_vcpus, a->used_vcpus), vcpus);
	a->used_memory_mib += (uint32_t)need;
	a->used_vcpus += vcpus;
	a->used_slots++;
	return 0;
}

void admission_give_vm(struct admission *a, uint32_t memory_mib, uint32_t vcpus)
{
	a->used_memory_mib = rest(a->used_memory_mib, memory_mib + a->overhead_mib);
	a->used_vcpus = rest(a->used_vcpus, vcpus);
}

void admission_give_slot(struct admission *a)
{
	a->used_slots = rest(a->used_slots, 1);
}

static uint32_t least(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

void admission_offer(const struct admission *a, struct admission_offer *out)
{
	uint32_t memory = rest(a->total_memory_mib, a->used_memory_mib);
	uint32_t slots = least(rest(a->total_slots, a->used_slots), memory / (ADMISSION_USUAL_MIB + a->overhead_mib));

	/* One small run may fit where a usual one does not. */
	if (slots == 0 && a->used_slots < a->total_slots && memory > a->overhead_mib)
		slots = 1;
	out->free_slots = slots;
	out->total_memory_mib = rest(a->total_memory_mib, a->overhead_mib);
	/* A VM's memory is back before its slot is: without a slot to subtract for, no more than the whole may be said to be free.
	 */
	out->free_memory_mib = least(rest(memory, slots * a->overhead_mib), out->total_memory_mib);
	out->free_vcpus = rest(a->total_vcpus, a->used_vcpus);
	if (out->free_memory_mib == 0 || out->free_vcpus == 0)
		out->free_slots = 0;
	out->total_slots = a->total_slots;
	out->total_vcpus = a->total_vcpus;
}
