/* keeper's list of VMs, without processes: which warm VM a run is given, slots that two entries name, a broker that is taken over
 * late in its end. */
/* link: noded_core ephproto EPH::event EPH::sodium */
#include "unit.h"

#include "keeper/keeper_internal.h"
#include "loop.h"
#include "proto/adopt.h"

#include "common/clock.h"
#include "common/text.h"
#include "common/wire.h"

#include <event2/event.h>
#include <fcntl.h>
#include <sodium.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOTS 4
#define WAIT_MS 5000

struct rig {
	struct noded_config config;
	struct keeper k;
	char dir[64];
	struct framed *broker; /* the test's end of a VM's broker */
	uint8_t said[8];       /* types of the frames that it was sent */
	size_t count;
	struct role_vm vm; /* the last that link was told of */
};

static int set_up(void **state)
{
	struct rig *r = calloc(1, sizeof(*r));
	struct err e;

	assert_non_null(r);
	assert_true(sodium_init() >= 0);
	assert_true(text_copy(r->dir, sizeof(r->dir), "/tmp/eph-test-vms-XXXXXX"));
	assert_non_null(mkdtemp(r->dir));
	r->config.state_dir = r->config.run_dir = r->dir;
	r->config.warm_ttl_seconds = 600;
	r->k.config = &r->config;
	r->k.base = event_base_new();
	r->k.turn = evtimer_new(r->k.base, loop_tick, NULL);
	r->k.ready_fd = r->k.lock_fd = -1;
	assert_true(text_copy(r->k.journal_dir, sizeof(r->k.journal_dir), r->dir) &&
			text_copy(r->k.spool_dir, sizeof(r->k.spool_dir), r->dir) &&
			text_copy(r->k.vm_dir, sizeof(r->k.vm_dir), r->dir));
	r->k.host.isolation = "emulated";
	r->k.dirty = true; /* the loop's turn is not what is tested */
	assert_ok(slots_new(700000, SLOTS, &r->k.slots, &e));
	r->k.admission = (struct admission){ .total_memory_mib = 8192,
		.total_vcpus = 16,
		.total_slots = SLOTS,
		.total_pids = 10000,
		.pids_each = 100,
		.pids_per_vcpu = 2 };
	*state = r;
	return 0;
}

static int tear_down(void **state)
{
	struct rig *r = *state;
	char command[128];

	while (r->k.vms)
		vm_leave(r->k.vms);
	if (r->broker)
		framed_free(r->broker);
	identity_free(r->k.identity);
	slots_free(r->k.slots);
	event_free(r->k.turn);
	event_base_loop(r->k.base, EVLOOP_NONBLOCK);
	event_base_free(r->k.base);
	assert_true(text_fmt(command, sizeof(command), "rm -rf %s", r->dir));
	assert_int_equal(system(command), 0);
	free(r);
	return 0;
}

static struct vm *add(struct rig *r, enum journal_kind kind, uint32_t slot)
{
	struct journal j;
	struct vm *vm;

	assert_true(vm_fill_journal(&r->k, kind, 512, 1, &j));
	j.slot = slot;
	if (kind == JOURNAL_RUN)
		id_run_make(1, j.run_id);
	assert_true(slots_hold(r->k.slots, slot));
	admission_hold(&r->k.admission, j.memory_mib, j.vcpus);
	vm = vm_new(&r->k, &j);
	assert_non_null(vm);
	return vm;
}

static void on_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct rig *r = arg;
	struct err e;

	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	if (type == RF_LINK_VM)
		assert_ok(role_vm_decode(body, n, &r->vm, &e));
	if (r->count < sizeof(r->said))
		r->said[r->count++] = type;
}

static bool heard_three(void *arg)
{
	return ((const struct rig *)arg)->count >= 3;
}

static bool heard_some(void *arg)
{
	return ((const struct rig *)arg)->count > 0;
}

static void on_end(void *arg, const struct err *e)
{
	(void)arg;
	(void)e;
}

/* Gives the VM a broker whose words the test says. */
static void connect_broker(struct rig *r, struct vm *vm)
{
	struct framed_options opt = {
		.max_frame = ROLE_FRAME_MAX, .max_queued = 65536, .on_frame = on_frame, .on_end = on_end, .arg = r
	};
	struct err e;
	int fd[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
	opt.fd = fd[1];
	assert_ok(framed_new(r->k.base, &opt, &r->broker, &e));
	assert_ok(broker_side_open(vm, fd[0], &e));
}

/* A run is given a VM that can take it: not one whose broker is gone, or has not yet said to this keeper how it is. */
static void warm_vms_that_a_run_is_given(void **state)
{
	struct rig *r = *state;
	struct vm *vm = add(r, JOURNAL_WARM, 0), *waits;

	assert_null(pool_take(&r->k, 512, 1)); /* without a broker */
	connect_broker(r, vm);
	vm->prepared = true;
	assert_ptr_equal(pool_take(&r->k, 512, 1), vm);
	assert_null(pool_take(&r->k, 1024, 1));
	assert_null(pool_take(&r->k, 512, 2));
	r->k.host.image_hash[0] = 1;
	assert_null(pool_take(&r->k, 512, 1));
	r->k.host.image_hash[0] = 0;
	vm->adopt_began_ns = 1;
	assert_null(pool_take(&r->k, 512, 1));
	waits = add(r, JOURNAL_WARM, 1);
	waits->seen.waiting = true;
	assert_ptr_equal(pool_take(&r->k, 512, 1), waits);
	vm->adopt_began_ns = 0;
	assert_ptr_equal(pool_take(&r->k, 512, 1), vm);
	vm->journal.kind = JOURNAL_RUN; /* given once */
	assert_ptr_equal(pool_take(&r->k, 512, 1), waits);
	vm->journal.kind = JOURNAL_WARM;
}

/* Warm VMs of an earlier noded end where this one is to have none; at a stop they are left alone. */
static void warm_vms_of_an_earlier_noded(void **state)
{
	struct rig *r = *state;
	struct vm *vm = add(r, JOURNAL_WARM, 0);

	vm->seen.waiting = true; /* nothing of it was started, so it goes at once */
	pool_init(&r->k.pool, 1, 1, 512, 1, clock_boot_ms());
	pool_turn(&r->k);
	assert_ptr_equal(r->k.vms, vm);
	pool_init(&r->k.pool, 0, 0, 512, 1, clock_boot_ms());
	r->k.stopping = true;
	pool_turn(&r->k);
	assert_ptr_equal(r->k.vms, vm);
	r->k.stopping = false;
	pool_turn(&r->k);
	assert_null(r->k.vms);
	assert_int_equal(slots_free_count(r->k.slots), SLOTS);
	assert_int_equal(r->k.admission.used_slots, 0);
}

/* A slot that two entries of the journal name is free when both are gone. */
static void a_slot_of_two(void **state)
{
	struct rig *r = *state;
	struct vm *one = add(r, JOURNAL_RUN, 2), *other = add(r, JOURNAL_RUN, 2);

	vm_kill_silently(other);
	assert_ptr_equal(r->k.vms, one);
	assert_true(slots_taken(r->k.slots, 2));
	vm_kill_silently(one);
	assert_null(r->k.vms);
	assert_false(slots_taken(r->k.slots, 2));
}

/* As many runs may wait for slots as warm VMs are about to give up. */
static void slots_that_come(void **state)
{
	struct rig *r = *state;
	struct journal j;
	struct vm *out;
	struct err e;

	for (uint32_t i = 0; i < SLOTS - 1; i++)
		add(r, JOURNAL_RUN, i);
	out = add(r, JOURNAL_WARM, SLOTS - 1);
	out->unreserved = true;
	admission_give_vm(&r->k.admission, 512, 1);
	admission_give_slot(&r->k.admission);
	r->k.admission.total_slots = SLOTS + 1; /* as if another's process had the ids of a slot */
	for (int i = 0; i < 2; i++) {
		struct vm *vm;

		assert_true(vm_fill_journal(&r->k, JOURNAL_RUN, 512, 1, &j));
		id_run_make(2, j.run_id);
		vm = vm_admit(&r->k, &j, &e);
		assert_int_equal(vm != NULL, i == 0);
		if (vm)
			vm->seen.waiting = true;
	}
	assert_int_equal(e.code, ERR_CONFLICT);
}

/* An earlier keeper destroyed the VM, told the broker so, and was killed before it signed: the run's end stands. */
static void a_receipt_after_a_restart(void **state)
{
	struct rig *r = *state;
	struct vm *vm = add(r, JOURNAL_RUN, 0);
	struct role_adopted m = { .version = ADOPT_VERSION,
		.state = ADOPTED_ASSIGNED | ADOPTED_READY | ADOPTED_ASKED | ADOPTED_ENDING,
		.boot_ns = 1,
		.lease_deadline_boot_ns = clock_boot_ns() + 1000000000 };
	struct buf b = BUF_INIT(512);
	uint8_t digest[SHA256_LEN] = { 1 };
	struct err e;

	assert_ok(identity_open(r->dir, &r->k.identity, &e));
	vm->spool_fd = memfd_create("spool", MFD_CLOEXEC);
	vm->journal.state = JOURNAL_ASKED;
	vm->vmm_ended = true;
	connect_broker(r, vm);
	vm->proc[SLOT_BROKER].state = PROC_ALIVE;
	vm->adopt_began_ns = clock_boot_ns();
	memcpy(m.vm, vm->journal.vm, sizeof(m.vm));
	role_adopted_encode(&m, &b);
	assert_true(framed_send(r->broker, RF_KEEPER_ADOPTED, b.data, b.len));
	assert_true(framed_send(r->broker, RF_KEEPER_SIGN_DIGEST, digest, sizeof(digest)));
	assert_true(loop_until(r->k.base, heard_three, r, WAIT_MS));
	assert_int_equal(r->said[0], RF_BROKER_VMM_EXITED);
	assert_int_equal(r->said[1], RF_BROKER_GONE);
	assert_int_equal(r->said[2], RF_BROKER_SIGNATURE);
	assert_false(vm->want.end);
	assert_true(vm->seen.receipt);
	assert_true(vm->lease_ns == m.lease_deadline_boot_ns);
	vm->proc[SLOT_BROKER].state = PROC_NONE;
	buf_free(&b);
}

/*
 * A run whose start was asked for, and whose broker has not said yet whether it was granted, is not told to link as one that runs:
 * its events would be sent before the grant, and controld would have it killed. One whose broker never says it is.
 */
static void what_link_hears_before_the_broker_speaks(void **state)
{
	struct rig *r = *state;
	struct framed_options to_link = {
		.max_frame = ROLE_FRAME_MAX, .max_queued = 65536, .on_frame = on_frame, .on_end = on_end, .arg = r
	};
	struct framed_options at_link = to_link;
	struct framed *link;
	struct vm *vm = add(r, JOURNAL_RUN, 0);
	struct err e;
	int fd[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
	to_link.fd = fd[0];
	at_link.fd = fd[1];
	assert_ok(framed_new(r->k.base, &to_link, &r->k.link.frames, &e));
	assert_ok(framed_new(r->k.base, &at_link, &link, &e));
	vm->journal.state = JOURNAL_ASKED;
	vm->adopt_began_ns = 1;
	link_side_vm(&r->k, vm);
	assert_true(loop_until(r->k.base, heard_some, r, WAIT_MS));
	assert_int_equal(r->said[0], RF_LINK_VM);
	assert_int_equal(r->vm.state, VM_STARTING);
	r->count = 0;
	vm_end(vm, ERRCODE_BROKER_LOST, "it ended"); /* its record is not there: it is forgotten */
	assert_true(loop_until(r->k.base, heard_some, r, WAIT_MS));
	assert_int_equal(r->said[0], RF_LINK_VM);
	assert_int_equal(r->vm.state, VM_RUNNING);
	framed_free(r->k.link.frames);
	r->k.link.frames = NULL;
	framed_free(link);
}

/* A VM that did not boot and is gone; its broker refuses the run, and it is to be tried once more. */
static struct vm *refused_once(struct rig *r)
{
	struct vm *vm = add(r, JOURNAL_RUN, 0);
	struct buf refusal = BUF_INIT(64);

	vm->again_inputs = (struct vm_inputs){
		.assignment = calloc(1, 8), .secrets = calloc(1, 8), .assignment_len = 8, .secrets_len = 8
	};
	admission_give_vm(&r->k.admission, 512, 1);
	vm->gone_ms = 3;
	wire_put_bool(&refusal, true);
	wire_put_u32(&refusal, ERRCODE_VM_START_FAILED);
	wire_put_str(&refusal, "no hello");
	assert_true(vm_again_refused(vm, refusal.data, refusal.len));
	assert_int_equal(r->k.admission.used_memory_mib, 512);
	assert_int_equal(r->k.stats.boots_again, 1);
	buf_free(&refusal);
	return vm;
}

/* Whatever comes between the two boots of a run is neither lost nor undone by the second one. */
static void between_two_boots(void **state)
{
	struct rig *r = *state;
	struct vm *vm = refused_once(r);

	broker_side_from_link(vm, RF_LB_CANCEL, NULL, 0);
	vm_step_all(vm);
	assert_true(vm->seen.waiting && vm->booted_again && !vm->want.end);
	assert_non_null(vm->assignment);
	assert_int_equal(vm->early_count, 1); /* the second broker hears of it with its assignment */
	assert_int_equal(r->k.admission.used_memory_mib, 512);
	assert_int_equal(r->k.admission.used_slots, 1);
	vm_kill_silently(vm); /* while it waits for its turn */
	assert_null(r->k.vms);

	r->k.stats.boots_again = 0;
	vm = refused_once(r);
	vm_kill_silently(vm); /* fenced before the first is cleaned up */
	assert_null(r->k.vms);

	r->k.stats.boots_again = 0;
	vm = refused_once(r);
	r->k.stopping = r->k.ends_all = true;
	vm_step_all(vm); /* reported, as a start that failed */
	assert_true(vm->seen.closed && vm->seen.reported && vm->refused && vm->refuse_failed);
	r->k.stopping = false;
	vm_done(vm);
	assert_null(r->k.vms);
	assert_int_equal(slots_free_count(r->k.slots), SLOTS);
	assert_int_equal(r->k.admission.used_memory_mib, 0);
	assert_int_equal(r->k.admission.used_slots, 0);
	assert_int_equal(r->k.admission.used_pids, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(warm_vms_that_a_run_is_given, set_up, tear_down),
		cmocka_unit_test_setup_teardown(warm_vms_of_an_earlier_noded, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_slot_of_two, set_up, tear_down),
		cmocka_unit_test_setup_teardown(slots_that_come, set_up, tear_down),
		cmocka_unit_test_setup_teardown(what_link_hears_before_the_broker_speaks, set_up, tear_down),
		cmocka_unit_test_setup_teardown(between_two_boots, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_receipt_after_a_restart, set_up, tear_down),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
