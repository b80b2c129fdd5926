/* Admission's arithmetic (admission.h). Pure. */
#include "keeper/admission.h"

static uint32_t rest(uint32_t total, uint32_t used)
{
	return total > used ? total - used : 0;
}

static uint64_t pids_of(const struct admission *a, uint32_t vcpus)
{
	return a->pids_each + (uint64_t)a->pids_per_vcpu * vcpus;
}

/* What could never be had here. */
static int check_totals(struct admission *a, uint64_t need, uint32_t memory_mib, uint32_t vcpus, struct err *e)
{
	a->lack = ADMISSION_LACKS_MEMORY;
	if (need > a->total_memory_mib)
		return err_set(e, ERR_LIMIT, "a guest of %u MiB with %u MiB overhead never fits this host (memory_mib = %u)",
				memory_mib, a->overhead_mib, a->total_memory_mib);
	a->lack = ADMISSION_LACKS_VCPUS;
	if (vcpus > a->total_vcpus)
		return err_set(e, ERR_LIMIT, "%u vcpus never fit this host (vcpus = %u)", vcpus, a->total_vcpus);
	a->lack = ADMISSION_LACKS_PIDS;
	if (pids_of(a, vcpus) > a->total_pids)
		return err_set(e, ERR_LIMIT,
				"%u vcpus never fit this host: they may have %llu processes, and it allows %u (pid_max, "
				"threads-max, pids.max)",
				vcpus, (unsigned long long)pids_of(a, vcpus), a->total_pids);
	return 0;
}

int admission_take(struct admission *a, uint32_t memory_mib, uint32_t vcpus, struct err *e)
{
	uint64_t need = (uint64_t)memory_mib + a->overhead_mib;

	if (check_totals(a, need, memory_mib, vcpus, e))
		return -1;
	a->lack = ADMISSION_LACKS_SLOTS;
	if (a->used_slots >= a->total_slots)
		return err_set(e, ERR_CONFLICT, "all %u slots are taken", a->total_slots);
	a->lack = ADMISSION_LACKS_MEMORY;
	if (need > rest(a->total_memory_mib, a->used_memory_mib))
		return err_set(e, ERR_CONFLICT, "%u MiB are free, %u MiB are needed", rest(a->total_memory_mib, a->used_memory_mib),
				(uint32_t)need);
	a->lack = ADMISSION_LACKS_VCPUS;
	if (vcpus > rest(a->total_vcpus, a->used_vcpus))
		return err_set(e, ERR_CONFLICT, "%u vcpus are free, %u are needed", rest(a->total_vcpus, a->used_vcpus), vcpus);
	a->lack = ADMISSION_LACKS_PIDS;
	if (pids_of(a, vcpus) > rest(a->total_pids, a->used_pids))
		return err_set(e, ERR_CONFLICT, "%u processes may still be made on this host, a VM with %u vcpus may need %u",
				rest(a->total_pids, a->used_pids), vcpus, (uint32_t)pids_of(a, vcpus));
	a->used_memory_mib += (uint32_t)need;
	a->used_vcpus += vcpus;
	a->used_slots++;
	a->used_pids += (uint32_t)pids_of(a, vcpus);
	return 0;
}

void admission_hold(struct admission *a, uint32_t memory_mib, uint32_t vcpus)
{
	a->used_memory_mib += memory_mib + a->overhead_mib;
	a->used_vcpus += vcpus;
	a->used_slots++;
	a->used_pids += (uint32_t)pids_of(a, vcpus);
}

void admission_give_vm(struct admission *a, uint32_t memory_mib, uint32_t vcpus)
{
	a->used_memory_mib = rest(a->used_memory_mib, memory_mib + a->overhead_mib);
	a->used_vcpus = rest(a->used_vcpus, vcpus);
	a->used_pids = rest(a->used_pids, (uint32_t)pids_of(a, vcpus));
}

void admission_give_slot(struct admission *a)
{
	a->used_slots = rest(a->used_slots, 1);
}

int admission_retake_vm(struct admission *a, uint32_t memory_mib, uint32_t vcpus, struct err *e)
{
	int rc;

	a->used_slots--;
	rc = admission_take(a, memory_mib, vcpus, e);
	if (rc)
		a->used_slots++;
	return rc;
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
	slots = rest(a->total_pids, a->used_pids) / (a->pids_each + a->pids_per_vcpu + 1);
	if (out->free_slots > slots)
		out->free_slots = slots;
	if (out->free_memory_mib == 0 || out->free_vcpus == 0)
		out->free_slots = 0;
	out->total_slots = a->total_slots;
	out->total_vcpus = a->total_vcpus;
}
