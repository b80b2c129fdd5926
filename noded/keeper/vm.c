/*
 * One VM's life in keeper: the boot queue, the steps to its end. The order of everything is decided by vm_next
 * (vm_step.h); here it is carried out. Keeper's loop; blocks only for the journal.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "jail/cgroup.h"

#include <errno.h>
#include <event2/event.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define RETRY_FIRST_MS 2
#define RETRY_MAX_MS 1000
#define CHANNEL_GRACE_MS 300
#define LEAVE_FLUSH_MS 100 /* of each VM: its broker reads at once, or it stands still */

const char *const vm_role_names[SLOT_ROLES] = { "broker", "channel", "vmm" };

struct vm *vm_find(struct keeper *k, const uint8_t token[TOKEN_LEN])
{
	for (struct vm *vm = k->vms; vm; vm = vm->next)
		if (vm->journal.kind == JOURNAL_RUN && memcmp(vm->journal.token, token, TOKEN_LEN) == 0)
			return vm;
	return NULL;
}

struct vm *vm_named(const struct keeper *k, const char *id)
{
	for (struct vm *vm = k->vms; vm; vm = vm->next)
		if (strcmp(vm->journal.vm, id) == 0)
			return vm;
	return NULL;
}

/* --- making and freeing ------------------------------------------------------------------------------------------------------- */

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	vm_step_all(arg);
}

struct vm *vm_new(struct keeper *k, const struct journal *j)
{
	struct vm *vm = calloc(1, sizeof(*vm)), **end = &k->vms;

	if (!vm)
		return NULL;
	vm->keeper = k;
	vm->journal = *j;
	vm->spool_fd = -1;
	vm->gone_ms = -1;
	vm->timer = event_new(k->base, -1, 0, on_timer, vm);
	if (!vm->timer) {
		free(vm);
		return NULL;
	}
	while (*end)
		end = &(*end)->next;
	*end = vm;
	return vm;
}

void vm_leave(struct vm *vm)
{
	for (int i = 0; i < SLOT_ROLES; i++) {
		if (vm->proc[i].child)
			child_leave(vm->proc[i].child);
		vm->proc[i].child = NULL;
	}
	if (vm->broker)
		framed_flush(vm->broker, LEAVE_FLUSH_MS); /* the run may be on its way to it */
	vm_free(vm);
}

void vm_free(struct vm *vm)
{
	for (struct vm **p = &vm->keeper->vms; *p; p = &(*p)->next)
		if (*p == vm) {
			*p = vm->next;
			break;
		}
	for (int i = 0; i < SLOT_ROLES; i++) {
		if (vm->proc[i].child)
			child_drop(vm->proc[i].child);
		cgroup_free(vm->proc[i].cgroup);
	}
	if (vm->broker)
		framed_free(vm->broker);
	for (int i = 0; i < REPLAY_COUNT; i++)
		frame_clear(&vm->replay[i]);
	for (size_t i = 0; i < vm->early_count; i++)
		frame_clear(&vm->early[i]);
	if (vm->secrets)
		explicit_bzero(vm->secrets, vm->secrets_len);
	free(vm->secrets);
	free(vm->assignment);
	vm_again_forget(vm);
	if (vm->keeper->golden.vm == vm)
		vm->keeper->golden.vm = NULL;
	golden_free(vm->making);
	if (vm->spool_fd >= 0)
		close(vm->spool_fd);
	event_free(vm->timer);
	free(vm);
}

/* --- boot queue --------------------------------------------------------------------------------------------------------------- */

static uint32_t boots_of(const struct keeper *k, enum journal_kind kind)
{
	uint32_t n = 0;

	for (const struct vm *vm = k->vms; vm; vm = vm->next)
		n += vm->booting && vm->journal.kind == kind;
	return n;
}

/* Runs come before VMs that nobody waits for and do not wait for them; these leave a boot place free, if there is more than one. */
static struct vm *first_waiting(const struct keeper *k)
{
	struct vm *spare = NULL;

	for (struct vm *vm = k->vms; vm; vm = vm->next) {
		if (!vm->seen.waiting || vm->want.end)
			continue;
		if (vm->journal.kind == JOURNAL_RUN)
			return boots_of(k, JOURNAL_RUN) < k->max_booting ? vm : NULL;
		if (!spare)
			spare = vm;
	}
	return k->booting == 0 || k->booting + 1 < k->max_booting ? spare : NULL;
}

/* What a run was given of warm VMs is its own only when they are gone. */
static bool has_its_place(struct vm *vm)
{
	struct keeper *k = vm->keeper;
	int slot;

	for (const struct vm *other = k->vms; other; other = other->next)
		if (other->unreserved && other->proc[SLOT_VMM].state != PROC_NONE)
			return false;
	if (vm->journal.slot != VM_NO_SLOT)
		return true;
	slot = slots_take(k->slots);
	if (slot >= 0)
		vm->journal.slot = (uint32_t)slot;
	return slot >= 0;
}

void vm_run_waiting(struct keeper *k)
{
	struct vm *vm;
	struct err e;

	while ((vm = first_waiting(k)) != NULL && has_its_place(vm)) {
		vm->seen.waiting = false;
		vm->booting = true;
		vm->boot_began_ns = clock_boot_ns();
		k->booting++;
		if (vm_start(vm, &e))
			vm_fail_start(vm, e.text);
	}
}

void vm_boot_over(struct vm *vm)
{
	if (!vm->booting)
		return;
	vm->booting = false;
	vm->keeper->booting--;
	keeper_changed(vm->keeper); /* the next one starts from the loop, not from inside this VM's callback */
}

/* --- how it ends -------------------------------------------------------------------------------------------------------------- */

/* There is no run, so there is nobody to tell. */
static void end_unused(struct vm *vm, const char *text)
{
	log_info("vm=%s warm or golden, ended reason=\"%s\"", vm->journal.vm, text);
	golden_clone_failed(vm, text);
	pool_lost(vm);
	vm_kill_silently(vm);
}

void vm_end(struct vm *vm, enum errcode code, const char *text)
{
	if (vm->want.end) {
		vm_step_all(vm);
		return;
	}
	if (vm->journal.kind != JOURNAL_RUN) {
		end_unused(vm, text);
		return;
	}
	adopt_over(vm);
	if (code != ERRCODE_NODE_RESTARTED && code != ERRCODE_NO_CAPACITY)
		golden_clone_failed(vm, text);
	if (vm->replay[REPLAY_END].body) {
		vm->seen.reported = true; /* the broker's own word stands */
	} else if (vm->journal.state < JOURNAL_ASKED) {
		vm->refused = true;
		vm->refuse_failed = code != ERRCODE_NODE_RESTARTED && code != ERRCODE_NO_CAPACITY &&
				    !vm->clone_failed; /* the next attempt boots */
		metrics_not_started(vm, vm->refuse_failed);
	}
	vm->end_code = vm->refused && vm->refuse_failed ? ERRCODE_VM_START_FAILED : code;
	if (!text_fmt(vm->end_text, sizeof(vm->end_text), "%.512s", text))
		vm->end_text[0] = '\0';
	log_warn("run=%s vm=%s ended by keeper code=%s reason=\"%s\"", vm->journal.run_id, vm->journal.vm,
			errcode_text(vm->end_code), vm->end_text);
	vm->want.destroy = vm->want.end = true;
	if (vm->destroy_boot_ns == 0)
		vm->destroy_boot_ns = clock_boot_ns();
	vm_step_all(vm);
}

void vm_fail_start(struct vm *vm, const char *text)
{
	vm_end(vm, vm->journal.state < JOURNAL_ASKED ? ERRCODE_VM_START_FAILED : ERRCODE_INTERNAL, text);
}

void vm_kill_silently(struct vm *vm)
{
	if (vm->journal.kind == JOURNAL_RUN)
		log_warn("run=%s vm=%s fenced: destroyed without a report", vm->journal.run_id, vm->journal.vm);
	vm->silent = true;
	vm->seen.reported = true;
	vm->want.destroy = vm->want.end = vm->want.forget = true;
	if (vm->destroy_boot_ns == 0)
		vm->destroy_boot_ns = clock_boot_ns();
	vm_step_all(vm);
}

void vm_done(struct vm *vm)
{
	vm->want.forget = true;
	vm_step_all(vm);
}

/* --- steps -------------------------------------------------------------------------------------------------------------------- */

static void kill_proc(struct vm *vm, enum slot_role role)
{
	struct vm_proc *p = &vm->proc[role];

	if (vm->destroy_boot_ns == 0)
		vm->destroy_boot_ns = clock_boot_ns();
	p->state = PROC_KILLED;
	cgroup_kill(p->cgroup);
	child_kill(p->child); /* also when it has not entered its group */
}

static void retry_later(struct vm *vm)
{
	struct timeval tv;

	vm->retry_ms = vm->retry_ms == 0 ? RETRY_FIRST_MS : vm->retry_ms * 2 < RETRY_MAX_MS ? vm->retry_ms * 2 : RETRY_MAX_MS;
	if (vm->retry_ms == RETRY_MAX_MS)
		log_error("run=%s vm=%s something of it does not go away; trying on every %d ms", vm->journal.run_id,
				vm->journal.vm, RETRY_MAX_MS);
	tv = (struct timeval){ .tv_sec = vm->retry_ms / 1000, .tv_usec = vm->retry_ms % 1000 * 1000 };
	event_add(vm->timer, &tv);
}

/* Group and directory of one process. False: something is still busy, a retry is set. */
static bool clean_proc(struct vm *vm, enum slot_role role)
{
	struct vm_proc *p = &vm->proc[role];
	char path[256];
	struct err e;
	int rc = 0;

	cgroup_kill(p->cgroup);
	if (!cgroup_populated(p->cgroup))
		rc = cgroup_remove(p->cgroup, &e);
	else
		rc = 1;
	if (rc < 0)
		log_error("run=%s vm=%s error=\"%s\"", vm->journal.run_id, vm->journal.vm, e.text);
	if (rc == 0 && text_fmt(path, sizeof(path), "%s/%s/%s", vm->keeper->vm_dir, vm->journal.vm, vm_role_names[role]) &&
			rmdir(path) != 0 && errno != ENOENT) {
		log_error("run=%s vm=%s cannot remove path=%s errno=%d", vm->journal.run_id, vm->journal.vm, path, errno);
		rc = 1;
	}
	if (rc != 0) {
		retry_later(vm);
		return false;
	}
	vm->retry_ms = 0;
	cgroup_free(p->cgroup);
	p->cgroup = NULL;
	p->state = PROC_NONE;
	return true;
}

static bool clean_vmm(struct vm *vm)
{
	metrics_look_at_vm(vm);
	if (!clean_proc(vm, SLOT_VMM))
		return false;
	if (vm->again)
		return true; /* and keeps what is reserved for it */
	vm->gone_ms = (clock_boot_ns() - vm->destroy_boot_ns) / 1000000;
	stats_took(&vm->keeper->stats.destroy, vm->gone_ms);
	if (!vm->unreserved)
		admission_give_vm(&vm->keeper->admission, vm->journal.memory_mib, vm->journal.vcpus);
	log_info("run=%s vm=%s gone gone_ms=%lld", vm->journal.run_id, vm->journal.vm, (long long)vm->gone_ms);
	keeper_changed(vm->keeper);
	return true;
}

/* Two entries of a journal may name one slot: it is free when neither has it. */
static void give_slot(struct vm *vm)
{
	struct keeper *k = vm->keeper;

	for (const struct vm *other = k->vms; other; other = other->next)
		if (other != vm && !other->seen.closed && other->journal.slot == vm->journal.slot)
			return;
	slots_give(k->slots, vm->journal.slot);
}

static bool close_vm(struct vm *vm)
{
	struct keeper *k = vm->keeper;
	char path[256];
	struct err e;

	if (text_fmt(path, sizeof(path), "%s/%s/%s", k->vm_dir, vm->journal.vm, VM_CTL_NAME))
		unlink(path);
	if (text_fmt(path, sizeof(path), "%s/%s", k->vm_dir, vm->journal.vm) && rmdir(path) != 0 && errno != ENOENT) {
		log_error("run=%s vm=%s cannot remove path=%s errno=%d", vm->journal.run_id, vm->journal.vm, path, errno);
		retry_later(vm);
		return false;
	}
	if (vm_again_begin(vm))
		return false;
	if (vm->gone_ms < 0) {
		/* It never had a VMM. */
		vm->gone_ms = 0;
		if (!vm->unreserved)
			admission_give_vm(&k->admission, vm->journal.memory_mib, vm->journal.vcpus);
	}
	golden_over(vm);
	give_slot(vm);
	if (!vm->unreserved)
		admission_give_slot(&k->admission);
	vm_boot_over(vm);
	vm->seen.closed = true;
	vm->journal.state = vm->journal.state == JOURNAL_ASKED ? JOURNAL_GONE : vm->journal.state;
	if (!vm->want.forget && journal_store(k->journal_dir, &vm->journal, &e))
		log_error("run=%s vm=%s error=\"%s\"", vm->journal.run_id, vm->journal.vm, e.text);
	keeper_changed(k);
	return true;
}

/* Journal and entry go. The spool stays for its time, unless nothing of the run may stay. */
static void forget(struct vm *vm)
{
	struct keeper *k = vm->keeper;
	struct err e;

	if (vm->spool_path[0]) {
		if (vm->refused || vm->silent || vm->journal.kind != JOURNAL_RUN || k->config->spool_keep_seconds == 0)
			unlink(vm->spool_path);
		else if (vm->spool_fd >= 0)
			futimens(vm->spool_fd, NULL); /* its keep time counts from now */
	}
	if (journal_remove(k->journal_dir, vm->journal.vm, &e))
		log_error("run=%s vm=%s error=\"%s\"", vm->journal.run_id, vm->journal.vm, e.text);
	log_info("run=%s vm=%s forgotten", vm->journal.run_id, vm->journal.vm);
	if (vm->journal.kind == JOURNAL_RUN)
		link_side_gone(k, vm->journal.token);
	vm_free(vm);
	keeper_maybe_stopped(k);
}

/* Without its broker channel ends by itself, after it has logged what the console said last. True: it is given the time. */
static bool wait_for_channel(struct vm *vm)
{
	const struct timeval tv = { .tv_usec = CHANNEL_GRACE_MS * 1000 };

	if (vm->channel_waited || vm->silent || vm->keeper->stopping)
		return false;
	vm->channel_waited = true;
	event_add(vm->timer, &tv);
	return true;
}

static void look(struct vm *vm)
{
	vm->seen.vmm = vm->proc[SLOT_VMM].state;
	vm->seen.channel = vm->proc[SLOT_CHANNEL].state;
	vm->seen.broker = vm->proc[SLOT_BROKER].state;
}

/* False: nothing more to do now. */
static bool take_step(struct vm *vm, enum vm_step step)
{
	switch (step) {
	case STEP_UNQUEUE: vm->seen.waiting = false; return true;
	case STEP_KILL_VMM: kill_proc(vm, SLOT_VMM); return true;
	case STEP_CLEAN_VMM: return clean_vmm(vm);
	case STEP_TELL_BROKER:
		vm->seen.told = true;
		broker_side_gone(vm);
		return true;
	case STEP_KILL_CHANNEL:
		if (wait_for_channel(vm))
			return false;
		kill_proc(vm, SLOT_CHANNEL);
		return true;
	case STEP_KILL_BROKER: kill_proc(vm, SLOT_BROKER); return true;
	case STEP_CLEAN_CHANNEL: return clean_proc(vm, SLOT_CHANNEL);
	case STEP_CLEAN_BROKER: return clean_proc(vm, SLOT_BROKER);
	case STEP_CLOSE: return close_vm(vm);
	case STEP_REPORT:
		vm->seen.reported = true;
		vm_report(vm);
		return true;
	case STEP_FORGET: forget(vm); return false;
	case STEP_NONE: break;
	}
	return false;
}

void vm_step_all(struct vm *vm)
{
	enum vm_step step;

	do {
		look(vm);
		step = vm_next(&vm->want, &vm->seen);
		if (step != STEP_NONE)
			log_debug("run=%s vm=%s step=%s", vm->journal.run_id, vm->journal.vm, vm_step_name(step));
	} while (take_step(vm, step));
}
