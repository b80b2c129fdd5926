/*
 * A second VMM for a run whose first did not boot. Some VMMs wedge now and then in a boot, for no reason of the run or of the host:
 * what was started is destroyed like any other, and the same run starts once more in its place, on the same slot, reservation,
 * spool and attempt; a clone that did not come up boots then. Nobody outside this host hears of it. Until a boot worked the run's
 * inputs are kept for that.
 *
 * Keeper's thread; nothing blocks.
 */
#include "keeper/keeper_internal.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <event2/event.h>
#include <stdlib.h>
#include <string.h>

static void drop(struct vm_inputs *in)
{
	if (in->secrets)
		explicit_bzero(in->secrets, in->secrets_len);
	free(in->secrets);
	free(in->assignment);
	*in = (struct vm_inputs){ .assignment = NULL };
}

void vm_again_keep(struct vm *vm)
{
	const struct vm_inputs in = { vm->assignment, vm->secrets, vm->assignment_len, vm->secrets_len };

	drop(&vm->again_inputs);
	vm->again_inputs = in;
	vm->assignment = vm->secrets = NULL;
	vm->assignment_len = vm->secrets_len = 0;
	/* Not kept a moment longer than needed. */
	if (vm->booted_again || vm->journal.start_mode == JOURNAL_FROM_WARM ||
			(!vm->keeper->host.driver->boot_again && vm->journal.start_mode != JOURNAL_CLONE))
		vm_again_forget(vm);
}

void vm_again_forget(struct vm *vm)
{
	drop(&vm->again_inputs);
}

bool vm_again_refused(struct vm *vm, const uint8_t *body, size_t n)
{
	struct wire_reader r;
	uint32_t code;
	struct err e;
	bool failed;

	if (!vm->again_inputs.assignment || vm->want.end || vm->journal.state >= JOURNAL_ASKED || vm->keeper->stopping)
		return false;
	wire_read_init(&r, body, n);
	failed = wire_bool(&r);
	code = wire_u32(&r);
	wire_str_fixed(&r, vm->end_text, sizeof(vm->end_text));
	if (r.failed || r.left > 0 || !failed || code != ERRCODE_VM_START_FAILED)
		return false;
	/* Its room was free for a moment, if the VM is gone already; whoever has it now keeps it. */
	if (vm->gone_ms >= 0 && admission_retake_vm(&vm->keeper->admission, vm->journal.memory_mib, vm->journal.vcpus, &e))
		return false;
	vm->gone_ms = -1;
	vm->keeper->stats.boots_again++;
	log_warn("run=%s vm=%s did not boot and is tried once more reason=\"%s\"", vm->journal.run_id, vm->journal.vm,
			vm->end_text);
	/* What is reported if this host is stopped meanwhile. */
	vm->refused = vm->refuse_failed = true;
	vm->end_code = ERRCODE_VM_START_FAILED;
	vm->again = true;
	vm->want.destroy = vm->want.end = true;
	return true;
}

bool vm_again_begin(struct vm *vm)
{
	if (!vm->again || vm->keeper->stopping || vm->silent || vm->want.forget)
		return false;
	if (vm->broker)
		framed_free(vm->broker);
	vm->broker = NULL;
	event_del(vm->timer);
	vm->assignment = vm->again_inputs.assignment;
	vm->assignment_len = vm->again_inputs.assignment_len;
	vm->secrets = vm->again_inputs.secrets;
	vm->secrets_len = vm->again_inputs.secrets_len;
	vm->again_inputs = (struct vm_inputs){ .assignment = NULL };
	vm->want = (struct vm_want){ .destroy = false };
	vm->seen = (struct vm_seen){ .waiting = true };
	vm->exec_boot_ns = vm->destroy_boot_ns = 0;
	vm->vmm_ended = vm->channel_waited = vm->refused = vm->refuse_failed = vm->again = vm->prepared = vm->warm_ready = false;
	vm->end_text[0] = vm->broker_text[0] = '\0';
	vm->booted_again = true;
	keeper_changed(vm->keeper); /* which starts who waits */
	return true;
}
