/*
 * How a VM comes to be known: reservation, slot, journal, spool; and what becomes of an assignment: a warm VM is handed over, or
 * one is started, if need be in the place of warm ones, or it is refused with its reason. Keeper's loop; blocks only for the
 * journal and the allocation of the spool.
 */
#include "keeper/keeper_internal.h"
#include "keeper/room.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "spool.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GUEST_MIB_MIN 128

/* An assignment as it came, with what is needed to start it. */
struct order {
	const struct assignment *a;
	const uint8_t *bytes, *sealed;
	size_t n, sealed_len;
	int64_t received_boot_ns;
};

/* --- journal and spool -------------------------------------------------------------------------------------------------------- */

bool vm_fill_journal(struct keeper *k, enum journal_kind kind, uint32_t memory_mib, uint32_t vcpus, struct journal *j)
{
	*j = (struct journal){
		.kind = kind,
		.start_mode = JOURNAL_COLD,
		.state = JOURNAL_ADMITTED,
		.memory_mib = memory_mib,
		.vcpus = vcpus,
		.admitted_real_ms = clock_real_ms(),
	};
	id_make("vm", j->vm);
	random_bytes(j->ctl_nonce, sizeof(j->ctl_nonce));
	memcpy(j->image_hash, k->host.image_hash, SHA256_LEN);
	for (int i = 0; i < SLOT_ROLES; i++)
		if (!text_fmt(j->cgroup[i], sizeof(j->cgroup[i]), "%s.%s.%s", j->vm, vm_role_names[i], k->tag))
			return false;
	return text_copy(j->boot_id, sizeof(j->boot_id), k->host.boot_id) && text_copy(j->vmm, sizeof(j->vmm), k->host.vmm.version);
}

static void fill_run(const struct assignment *a, struct journal *j)
{
	j->kind = JOURNAL_RUN;
	j->attempt = a->attempt;
	j->admitted_real_ms = clock_real_ms();
	j->first_seq = a->next_seq;
	j->spool_is_memfd = a->zero_data_retention;
	memcpy(j->run_id, a->run_id, sizeof(j->run_id));
	memcpy(j->token, a->token, TOKEN_LEN);
}

int vm_open_spool(struct vm *vm, struct err *e)
{
	if (vm->journal.spool_is_memfd) {
		vm->spool_fd = memfd_create("spool", MFD_CLOEXEC);
	} else {
		if (!text_fmt(vm->spool_path, sizeof(vm->spool_path), "%s/%s", vm->keeper->spool_dir, vm->journal.vm))
			return err_set(e, ERR_LIMIT, "state_dir is too long");
		vm->spool_fd = open(vm->spool_path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	}
	return vm->spool_fd < 0 ? err_set_errno(e, "create the spool") : 0;
}

/* What a warm VM has ready on disk is of no use to a run whose events may not be there. */
static void drop_spool(struct vm *vm)
{
	if (vm->spool_fd >= 0)
		close(vm->spool_fd);
	vm->spool_fd = -1;
	if (vm->spool_path[0])
		unlink(vm->spool_path);
	vm->spool_path[0] = '\0';
}

static int make_spool(struct vm *vm, const struct order *o, struct err *e)
{
	const struct assignment *a = o->a;
	struct spool_head head = {
		.attempt = a->attempt,
		.queued_at_ms = a->queued_at_ms,
		.age_ms = a->age_ms,
		.received_boot_ns = o->received_boot_ns,
		.first_seq = a->next_seq,
		.cap_micros = a->cap_micros,
		.run_fee = a->price.run_fee,
		.compute_price = a->price.compute,
	};

	memcpy(head.run_id, a->run_id, sizeof(head.run_id));
	memcpy(head.token, a->token, TOKEN_LEN);
	memcpy(head.prev_hash, a->prev_hash, sizeof(head.prev_hash));
	memcpy(head.request_hash, a->request_hash, sizeof(head.request_hash));
	if (a->zero_data_retention)
		drop_spool(vm);
	if (vm->spool_fd < 0 && vm_open_spool(vm, e))
		return -1;
	return spool_format(vm->spool_fd, &head, e);
}

/* Secrets opened, bytes copied: all that a start needs later. */
static int keep_inputs(struct vm *vm, const struct order *o, struct err *e)
{
	struct buf plain = BUF_INIT(4096);

	if (o->sealed_len > 0 && identity_unseal(vm->keeper->identity, o->sealed, o->sealed_len, &plain, e)) {
		buf_free(&plain);
		return -1;
	}
	if (o->sealed_len == 0) {
		struct run_secrets none = { .model_key = "" };

		run_secrets_encode(&none, &plain);
	}
	vm->secrets = (uint8_t *)buf_steal(&plain, &vm->secrets_len);
	vm->assignment = malloc(o->n + 1);
	if (!vm->secrets || !vm->assignment)
		return err_set(e, ERR_NOMEM, "no memory");
	memcpy(vm->assignment, o->bytes, o->n);
	vm->assignment_len = o->n;
	vm->received_boot_ns = o->received_boot_ns;
	return 0;
}

/* --- reservation -------------------------------------------------------------------------------------------------------------- */

/* More warm VMs are on their way out than runs wait for their slots. */
static bool slot_comes(const struct keeper *k)
{
	int64_t coming = 0;

	for (const struct vm *vm = k->vms; vm; vm = vm->next) {
		coming += vm->unreserved && !vm->seen.closed;
		coming -= vm->journal.slot == VM_NO_SLOT && vm->seen.waiting;
	}
	return coming > 0;
}

struct vm *vm_admit(struct keeper *k, struct journal *j, struct err *e)
{
	struct vm *vm;
	int slot;

	if (slots_free_count(k->slots) == 0 && !slot_comes(k)) {
		k->admission.lack = ADMISSION_LACKS_SLOTS;
		err_set(e, ERR_CONFLICT, "no free slot");
		return NULL;
	}
	if (admission_take(&k->admission, j->memory_mib, j->vcpus, e))
		return NULL;
	slot = slots_take(k->slots);
	j->slot = slot < 0 ? VM_NO_SLOT : (uint32_t)slot;
	vm = vm_new(k, j);
	if (vm && journal_store(k->journal_dir, j, e) == 0)
		return vm;
	if (vm)
		vm_free(vm);
	else
		err_set(e, ERR_NOMEM, "no memory");
	slots_give(k->slots, j->slot);
	admission_give_vm(&k->admission, j->memory_mib, j->vcpus);
	admission_give_slot(&k->admission);
	return NULL;
}

/* --- assignments -------------------------------------------------------------------------------------------------------------- */

static void refuse(struct keeper *k, const struct order *o, enum stats_refusal why, const char *text)
{
	bool failed = why == STATS_REFUSED_SIZE || why == STATS_REFUSED_OTHER;

	k->stats.refusals[why]++;
	link_side_refused(k, o->a->run_id, o->a->token, failed, failed ? ERRCODE_VM_START_FAILED : ERRCODE_NO_CAPACITY, text);
}

static int check_sizes(const struct assignment *a, struct err *e)
{
	if (a->memory_mib < GUEST_MIB_MIN)
		return err_set(e, ERR_INVALID, "a guest of %u MiB is too small: %d MiB are the least", a->memory_mib,
				GUEST_MIB_MIN);
	if (a->vcpus < 1)
		return err_set(e, ERR_INVALID, "a guest needs a vcpu");
	return 0;
}

/* Of no space on disk there is one answer, whether it is seen before or when the journal or the spool is written. */
static bool disk_is_full(const struct keeper *k)
{
	struct err e;

	return room_on_disk(k->config->state_dir, 0, &e) != 0;
}

static enum stats_refusal why_not_admitted(const struct keeper *k, const struct err *e)
{
	static const enum stats_refusal lacks[] = { [ADMISSION_LACKS_MEMORY] = STATS_REFUSED_MEMORY,
		[ADMISSION_LACKS_VCPUS] = STATS_REFUSED_VCPUS,
		[ADMISSION_LACKS_SLOTS] = STATS_REFUSED_SLOTS,
		[ADMISSION_LACKS_PIDS] = STATS_REFUSED_PIDS };

	if (e->code == ERR_CONFLICT || e->code == ERR_LIMIT)
		return lacks[k->admission.lack];
	return disk_is_full(k) ? STATS_REFUSED_DISK : STATS_REFUSED_OTHER;
}

/* What was admitted could not be written down. */
static void fail_to_note(struct vm *vm, const struct err *e)
{
	if (disk_is_full(vm->keeper)) {
		vm->keeper->stats.refusals[STATS_REFUSED_DISK]++;
		vm_end(vm, ERRCODE_NO_CAPACITY, e->text);
	} else {
		vm_fail_start(vm, e->text);
	}
}

/* A VM that is booted, or boots, already. */
static void hand_over(struct vm *vm, const struct order *o)
{
	struct keeper *k = vm->keeper;
	struct err e;

	fill_run(o->a, &vm->journal);
	if (vm->warm_ready)
		vm->journal.start_mode = JOURNAL_FROM_WARM;
	log_info("run=%s vm=%s takes a warm vm ready=%d attempt=%u", o->a->run_id, vm->journal.vm, vm->warm_ready, o->a->attempt);
	k->stats.warm[STATS_WARM_TAKEN]++;
	/* On disk before the broker hears of it: whoever finds the broker later must know whose run it has. */
	if (make_spool(vm, o, &e) || keep_inputs(vm, o, &e) || journal_store(k->journal_dir, &vm->journal, &e)) {
		fail_to_note(vm, &e);
		return;
	}
	link_side_vm(k, vm);
	if (vm->prepared && broker_side_assign(vm, &e))
		vm_fail_start(vm, e.text);
	keeper_changed(k);
}

static void start_new(struct keeper *k, const struct order *o)
{
	const struct assignment *a = o->a;
	struct journal j;
	struct vm *vm;
	struct err e;

	if (!a->zero_data_retention && room_on_disk(k->config->state_dir, SPOOL_BYTES, &e)) {
		refuse(k, o, STATS_REFUSED_DISK, e.text);
		return;
	}
	if (!vm_fill_journal(k, JOURNAL_RUN, a->memory_mib, a->vcpus, &j)) {
		refuse(k, o, STATS_REFUSED_OTHER, "journal entry is too long");
		return;
	}
	fill_run(a, &j);
	pool_make_room(k, a->memory_mib, a->vcpus);
	vm = vm_admit(k, &j, &e);
	if (!vm) {
		refuse(k, o, why_not_admitted(k, &e), e.text);
		return;
	}
	vm->seen.waiting = true;
	log_info("run=%s vm=%s admitted slot=%d memory_mib=%u vcpus=%u attempt=%u", a->run_id, vm->journal.vm,
			(int)vm->journal.slot, a->memory_mib, a->vcpus, a->attempt);
	if (make_spool(vm, o, &e) || keep_inputs(vm, o, &e)) {
		fail_to_note(vm, &e);
		return;
	}
	link_side_vm(k, vm);
	keeper_changed(k);
	vm_run_waiting(k);
}

static void assign(struct keeper *k, const struct order *o)
{
	const struct assignment *a = o->a;
	struct vm *vm = vm_find(k, a->token);
	struct err e;

	if (vm) {
		link_side_vm(k, vm); /* given twice: it is here already */
		return;
	}
	if (k->draining || k->stopping) {
		refuse(k, o, k->stopping ? STATS_REFUSED_STOPPING : STATS_REFUSED_DRAINING,
				k->stopping ? "this host is stopping" : "this host is draining");
		return;
	}
	if (!images_usable(k->images, &e)) {
		refuse(k, o, STATS_REFUSED_IMAGE, e.text);
		return;
	}
	if (check_sizes(a, &e)) {
		refuse(k, o, STATS_REFUSED_SIZE, e.text);
		return;
	}
	pool_came(k, a->memory_mib, a->vcpus);
	vm = pool_take(k, a->memory_mib, a->vcpus);
	if (vm)
		hand_over(vm, o);
	else
		start_new(k, o);
}

void vm_assign(struct keeper *k, const uint8_t *bytes, size_t n, const uint8_t *sealed, size_t sealed_len, int64_t received_boot_ns)
{
	struct assignment a;
	const struct order o = { &a, bytes, sealed, n, sealed_len, received_boot_ns };
	struct err e;

	if (assignment_decode(bytes, n, &a, &e)) {
		/* Not even its token can be trusted: controld offers it again when nobody holds it. */
		log_error("assignment cannot be read error=\"%s\"", e.text);
		return;
	}
	assign(k, &o);
	assignment_free(&a);
}
