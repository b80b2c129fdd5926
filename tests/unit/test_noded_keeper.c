/* keeper's pure parts: journal, slots, admission, and what is done next about a VM. */
/* link: noded_core */
#include "unit.h"

#include "common/text.h"
#include "keeper/admission.h"
#include "keeper/files.h"
#include "keeper/journal.h"
#include "keeper/slots.h"
#include "keeper/vm_step.h"

#include <sodium.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- journal ------------------------------------------------------------------------------------------------------------------ */

static void example(struct journal *j)
{
	*j = (struct journal){ .kind = JOURNAL_RUN,
		.start_mode = JOURNAL_CLONE,
		.attempt = 2,
		.state = JOURNAL_ASKED,
		.slot = 7,
		.memory_mib = 512,
		.vcpus = 1,
		.admitted_real_ms = 1790000000123,
		.first_seq = 3,
		.spool_is_memfd = true };
	id_make("vm", j->vm);
	id_make("run", j->run_id);
	memset(j->token, 0x5a, sizeof(j->token));
	memset(j->image_hash, 0xc3, sizeof(j->image_hash));
	memset(j->ctl_nonce, 0x77, sizeof(j->ctl_nonce));
	assert_true(text_copy(j->vmm, sizeof(j->vmm), "qemu 7.2.22"));
	assert_true(text_copy(j->boot_id, sizeof(j->boot_id), "f9726847-1559-49c8-be2f-facca8ad68a9"));
	for (int i = 0; i < SLOT_ROLES; i++) {
		j->process[i] = (struct journal_process){ .pid = 100 + i, .start_time = 123456789012 + (uint64_t)i };
		assert_true(text_fmt(j->cgroup[i], sizeof(j->cgroup[i]), "%s.%d", j->vm, i));
	}
}

static void journal_round_trip(void **state)
{
	struct buf b = BUF_INIT(JOURNAL_MAX);
	struct journal in, out;
	struct err e;

	(void)state;
	example(&in);
	journal_encode(&in, &b);
	assert_false(b.failed);
	assert_int_equal(journal_decode(b.data, b.len, &out, &e), 0);
	assert_string_equal(out.vm, in.vm);
	assert_string_equal(out.run_id, in.run_id);
	assert_memory_equal(out.token, in.token, sizeof(in.token));
	assert_int_equal(out.state, JOURNAL_ASKED);
	assert_int_equal(out.slot, 7);
	assert_true(out.spool_is_memfd);
	assert_string_equal(out.boot_id, in.boot_id);
	assert_int_equal(out.kind, JOURNAL_RUN);
	assert_int_equal(out.start_mode, JOURNAL_CLONE);
	assert_memory_equal(out.ctl_nonce, in.ctl_nonce, sizeof(in.ctl_nonce));
	assert_string_equal(out.vmm, in.vmm);
	for (int i = 0; i < SLOT_ROLES; i++) {
		assert_int_equal(out.process[i].pid, in.process[i].pid);
		assert_int_equal(out.process[i].start_time, in.process[i].start_time);
		assert_string_equal(out.cgroup[i], in.cgroup[i]);
	}
	buf_free(&b);
}

static void seal(struct buf *b)
{
	uint8_t check[16];

	b->len -= sizeof(check);
	crypto_generichash(check, sizeof(check), b->data, b->len, NULL, 0);
	assert_true(buf_add(b, check, sizeof(check)));
}

/* A warm or golden VM has no run; a run without an id, or a warm VM with one, is no entry. */
static void journal_kinds(void **state)
{
	struct journal in, out;
	struct err e;

	(void)state;
	for (int kind = JOURNAL_RUN; kind <= JOURNAL_GOLDEN; kind++)
		for (int named = 0; named < 2; named++) {
			struct buf b = BUF_INIT(JOURNAL_MAX);

			example(&in);
			in.kind = (enum journal_kind)kind;
			if (!named)
				in.run_id[0] = '\0';
			journal_encode(&in, &b);
			assert_int_equal(journal_decode(b.data, b.len, &out, &e), (kind == JOURNAL_RUN) == (named == 1) ? 0 : -1);
			buf_free(&b);
		}
}

/* What the version before this wrote is a run that booted cold and that nobody may adopt; a later version is not guessed at. */
static void journal_versions(void **state)
{
	static const uint8_t nobody[JOURNAL_NONCE];
	struct buf b = BUF_INIT(JOURNAL_MAX);
	struct journal in, out;
	struct err e;

	(void)state;
	example(&in);
	journal_encode(&in, &b);
	b.data[4] = JOURNAL_VERSION + 1;
	seal(&b);
	assert_int_equal(journal_decode(b.data, b.len, &out, &e), -1);
	b.data[4] = 1;
	b.len -= 1 + 1 + JOURNAL_NONCE + 4 + strlen(in.vmm);
	seal(&b);
	assert_int_equal(journal_decode(b.data, b.len, &out, &e), 0);
	assert_int_equal(out.kind, JOURNAL_RUN);
	assert_int_equal(out.start_mode, JOURNAL_COLD);
	assert_memory_equal(out.ctl_nonce, nobody, sizeof(nobody));
	assert_string_equal(out.run_id, in.run_id);
	buf_free(&b);
}

/* Every cut and every changed byte is found. */
static void journal_damage(void **state)
{
	struct buf b = BUF_INIT(JOURNAL_MAX);
	struct journal in, out;
	struct err e;

	(void)state;
	example(&in);
	journal_encode(&in, &b);
	for (size_t n = 0; n < b.len; n++)
		assert_int_equal(journal_decode(b.data, n, &out, &e), -1);
	for (size_t i = 0; i < b.len; i++) {
		b.data[i] ^= 0x10;
		assert_int_equal(journal_decode(b.data, b.len, &out, &e), -1);
		b.data[i] ^= 0x10;
	}
	buf_free(&b);
}

static void journal_stat(void **state)
{
	static const char plain[] = "42 (qemu) S 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 987654 1 2 3";
	static const char odd[] = "42 (a) Z 9 (b) R 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 55 1";
	uint64_t start;
	char s;

	(void)state;
	assert_true(journal_parse_stat(plain, &start, &s));
	assert_int_equal(start, 987654);
	assert_int_equal(s, 'S');
	assert_true(journal_parse_stat(odd, &start, &s));
	assert_int_equal(start, 55);
	assert_int_equal(s, 'R');
	assert_false(journal_parse_stat("42 (x) S 1 2", &start, &s));
	assert_false(journal_parse_stat("", &start, &s));
	assert_false(journal_parse_stat("42 (x)", &start, &s));
}

/* --- slots -------------------------------------------------------------------------------------------------------------------- */

static void slots_give_and_take(void **state)
{
	struct slots *s;
	struct err e;

	(void)state;
	assert_int_equal(slots_new(200000, 3, &s, &e), 0);
	assert_int_equal(slots_take(s), 0);
	assert_true(slots_hold(s, 1));
	assert_false(slots_hold(s, 3));
	assert_int_equal(slots_take(s), 2);
	assert_int_equal(slots_take(s), -1);
	assert_int_equal(slots_free_count(s), 0);
	slots_give(s, 0);
	slots_give(s, 0); /* twice is once */
	assert_int_equal(slots_free_count(s), 1);
	assert_int_equal(slots_take(s), 0);
	slots_give(s, 0);
	slots_give(s, 1);
	slots_give(s, 2);
	/* Round robin: an id that was just given back rests. */
	assert_int_equal(slots_take(s), 1);
	assert_int_equal(slots_uid(s, 2, SLOT_BROKER), 200006);
	assert_int_equal(slots_uid(s, 2, SLOT_CHANNEL), 200007);
	assert_int_equal(slots_uid(s, 2, SLOT_VMM), 200008);
	slots_free(s);
}

/* A process of somebody else's on our ids: this test's own, whose uid is made a slot's. */
static void slots_of_others(void **state)
{
	struct slots *s;
	struct err e;

	(void)state;
	assert_int_equal(slots_new((uint32_t)getuid(), 1, &s, &e), 0);
	assert_true(slots_look(s) == 1);
	assert_int_equal(slots_take(s), -1);
	assert_int_equal(slots_free_count(s), 0);
	slots_free(s);
	assert_int_equal(slots_new(3900000000U, 4, &s, &e), 0);
	assert_int_equal(slots_look(s), 0);
	assert_int_equal(slots_take(s), 0);
	assert_int_equal(slots_look(s), 0);
	assert_int_equal(slots_free_count(s), 3);
	slots_free(s);
}

static void slots_status(void **state)
{
	uint32_t uid;
	char s;

	(void)state;
	assert_true(slots_parse_status("Name:\tx\nState:\tZ (zombie)\nUid:\t200002\t200002\t1\t1\n", &uid, &s));
	assert_int_equal(uid, 200002);
	assert_int_equal(s, 'Z');
	assert_false(slots_parse_status("Name:\tUid:\t5\nState:\tR\n", &uid, &s));
	assert_false(slots_parse_status("State:\tR\nUid:\tx\n", &uid, &s));
	assert_false(slots_parse_status("", &uid, &s));
}

/* --- admission ---------------------------------------------------------------------------------------------------------------- */

static void admission_bounds(void **state)
{
	struct admission a = {
		.total_memory_mib = 2000, .total_vcpus = 4, .total_slots = 2, .total_pids = 1000, .overhead_mib = 300
	};
	struct err e;

	(void)state;
	assert_int_equal(admission_take(&a, 1701, 1, &e), -1);
	assert_int_equal(e.code, ERR_LIMIT);
	assert_int_equal(admission_take(&a, 512, 5, &e), -1);
	assert_int_equal(e.code, ERR_LIMIT);
	assert_int_equal(admission_take(&a, 1000, 3, &e), 0);
	assert_int_equal(admission_take(&a, 500, 1, &e), -1);
	assert_int_equal(e.code, ERR_CONFLICT);
	assert_int_equal(admission_take(&a, 400, 2, &e), -1);
	assert_int_equal(e.code, ERR_CONFLICT);
	assert_int_equal(admission_take(&a, 400, 1, &e), 0);
	assert_int_equal(admission_take(&a, 0, 0, &e), -1);
	assert_int_equal(e.code, ERR_CONFLICT);
	admission_give_vm(&a, 1000, 3);
	assert_int_equal(admission_take(&a, 1000, 3, &e), -1); /* its slot is not back */
	admission_give_slot(&a);
	assert_int_equal(admission_take(&a, 1000, 3, &e), 0);
	assert_int_equal(admission_take(&a, UINT32_MAX, 1, &e), -1);
	assert_int_equal(a.lack, ADMISSION_LACKS_MEMORY);
}

/* Each thing that runs out is named, and comes back with the VM. */
static void admission_lacks(void **state)
{
	struct admission a = { .total_memory_mib = 4000,
		.total_vcpus = 6,
		.total_slots = 3,
		.total_pids = 300,
		.pids_each = 80,
		.pids_per_vcpu = 10 };
	struct admission_offer o;
	struct err e;

	(void)state;
	assert_int_equal(admission_take(&a, 100, 23, &e), -1);
	assert_int_equal(a.lack, ADMISSION_LACKS_VCPUS);
	a.total_vcpus = 32;
	assert_int_equal(admission_take(&a, 100, 23, &e), -1);
	assert_int_equal(a.lack, ADMISSION_LACKS_PIDS);
	assert_int_equal(e.code, ERR_LIMIT);
	assert_int_equal(admission_take(&a, 100, 5, &e), 0); /* 130 pids */
	assert_int_equal(admission_take(&a, 100, 1, &e), 0); /* 90 */
	admission_offer(&a, &o);
	assert_int_equal(o.free_slots, 0); /* 80 pids are no VM */
	assert_int_equal(admission_take(&a, 100, 1, &e), -1);
	assert_int_equal(a.lack, ADMISSION_LACKS_PIDS);
	assert_int_equal(e.code, ERR_CONFLICT);
	admission_give_vm(&a, 100, 5);
	assert_int_equal(admission_take(&a, 100, 1, &e), 0);
	assert_int_equal(admission_take(&a, 100, 1, &e), -1);
	assert_int_equal(a.lack, ADMISSION_LACKS_SLOTS);
	admission_give_slot(&a);
	assert_int_equal(admission_take(&a, 3900, 1, &e), -1);
	assert_int_equal(a.lack, ADMISSION_LACKS_MEMORY);
	assert_int_equal(admission_take(&a, 100, 31, &e), -1);
	assert_int_equal(a.lack, ADMISSION_LACKS_PIDS);
}

/* Whatever fits the offer by guest memory and count fits with its overhead. */
static void admission_offers(void **state)
{
	(void)state;
	for (uint32_t total = 0; total < 20000; total += 97) {
		struct admission a = {
			.total_memory_mib = total, .total_vcpus = 64, .total_slots = 8, .total_pids = 1000, .overhead_mib = 352
		};
		struct admission_offer o;
		struct err e;

		admission_offer(&a, &o);
		assert_true(o.free_memory_mib <= o.total_memory_mib && o.free_vcpus <= o.total_vcpus &&
				o.free_slots <= o.total_slots);
		assert_true(o.free_slots <= 8);
		for (uint32_t i = 0; i < o.free_slots; i++)
			assert_int_equal(admission_take(&a, o.free_memory_mib / o.free_slots, 1, &e), 0);
		if (o.free_slots == 0)
			assert_true(total <= 352);
	}
}

/* Between a VM's memory and its slot coming back, no more is said to be free than there is. */
static void admission_offer_without_a_slot(void **state)
{
	struct admission a = {
		.total_memory_mib = 4096, .total_vcpus = 8, .total_slots = 1, .total_pids = 1000, .overhead_mib = 320
	};
	struct admission_offer o;
	struct err e;

	(void)state;
	assert_int_equal(admission_take(&a, 512, 1, &e), 0);
	admission_give_vm(&a, 512, 1);
	admission_offer(&a, &o);
	assert_int_equal(o.free_slots, 0);
	assert_true(o.free_memory_mib <= o.total_memory_mib);
	admission_give_slot(&a);
	admission_offer(&a, &o);
	assert_int_equal(o.free_slots, 1);
}

/* --- steps -------------------------------------------------------------------------------------------------------------------- */

static void steps_in_order(void **state)
{
	struct vm_want w = { .destroy = false };
	struct vm_seen s = { .vmm = PROC_ALIVE, .channel = PROC_ALIVE, .broker = PROC_ALIVE };

	(void)state;
	assert_int_equal(vm_next(&w, &s), STEP_NONE);
	w.destroy = true;
	assert_int_equal(vm_next(&w, &s), STEP_KILL_VMM);
	s.vmm = PROC_KILLED;
	assert_int_equal(vm_next(&w, &s), STEP_NONE);
	s.vmm = PROC_LEFT;
	assert_int_equal(vm_next(&w, &s), STEP_CLEAN_VMM);
	s.vmm = PROC_NONE;
	assert_int_equal(vm_next(&w, &s), STEP_TELL_BROKER);
	s.told = true;
	assert_int_equal(vm_next(&w, &s), STEP_NONE);
	w.end = true;
	assert_int_equal(vm_next(&w, &s), STEP_KILL_BROKER);
	s.broker = PROC_KILLED;
	assert_int_equal(vm_next(&w, &s), STEP_KILL_CHANNEL);
	s.channel = PROC_KILLED;
	assert_int_equal(vm_next(&w, &s), STEP_NONE);
	s.broker = PROC_LEFT;
	assert_int_equal(vm_next(&w, &s), STEP_CLEAN_BROKER);
	s.broker = PROC_NONE;
	assert_int_equal(vm_next(&w, &s), STEP_NONE);
	s.channel = PROC_LEFT;
	assert_int_equal(vm_next(&w, &s), STEP_CLEAN_CHANNEL);
	s.channel = PROC_NONE;
	assert_int_equal(vm_next(&w, &s), STEP_CLOSE);
	s.closed = true;
	assert_int_equal(vm_next(&w, &s), STEP_REPORT);
	s.reported = true;
	assert_int_equal(vm_next(&w, &s), STEP_NONE);
	w.forget = true;
	assert_int_equal(vm_next(&w, &s), STEP_FORGET);
}

/* A broker that stands still keeps no deadline: then keeper does, a little later, also before the VMM was exec'd. */
static void overdue(void **state)
{
	const int64_t s = INT64_C(1000000000);
	struct vm_watch w = { .boot_began_ns = 100 * s, .boot_limit_ns = 30 * s, .vmm_alive = false };

	(void)state;
	assert_int_equal(vm_overdue(&w, 130 * s + VM_BOOT_BACKSTOP_NS), VM_IN_TIME);
	assert_int_equal(vm_overdue(&w, 131 * s + VM_BOOT_BACKSTOP_NS), VM_BOOT_OVERDUE);
	w.boot_began_ns = 0;
	assert_int_equal(vm_overdue(&w, 9999 * s), VM_IN_TIME);
	w.lease_ns = 200 * s;
	assert_int_equal(vm_overdue(&w, 9999 * s), VM_IN_TIME); /* nothing lives */
	w.vmm_alive = true;
	assert_int_equal(vm_overdue(&w, 200 * s + VM_LEASE_BACKSTOP_NS), VM_IN_TIME);
	assert_int_equal(vm_overdue(&w, 201 * s + VM_LEASE_BACKSTOP_NS), VM_LEASE_OVERDUE);
}

static void one_receipt(void **state)
{
	struct vm_seen s = { .vmm = PROC_ALIVE, .channel = PROC_ALIVE, .broker = PROC_ALIVE };

	(void)state;
	for (int vmm = PROC_NONE; vmm < PROC_STATES; vmm++) {
		s.vmm = (enum proc_state)vmm;
		s.told = false;
		assert_false(vm_may_sign(&s));
		s.told = true;
		assert_int_equal(vm_may_sign(&s), vmm == PROC_NONE);
	}
	s.vmm = PROC_NONE;
	s.receipt = true;
	assert_false(vm_may_sign(&s));
}

static void lease_only_grows(void **state)
{
	const int64_t s = INT64_C(1000000000);

	(void)state;
	assert_int_equal(vm_lease_later(0, 155 * s, 100 * s), 155 * s);
	assert_int_equal(vm_lease_later(165 * s, 155 * s, 110 * s), 165 * s); /* an answer that was overtaken */
	assert_int_equal(vm_lease_later(165 * s, INT64_MAX, 110 * s), 110 * s + VM_LEASE_LONGEST_NS);
	assert_int_equal(vm_lease_later(165 * s, INT64_MIN, 110 * s), 165 * s);
}

/* However often link fails, the wait for the next one leaves it most of the lease to be renewed in. */
static void link_comes_back_within_the_lease(void **state)
{
	const int64_t s = 1000000000;

	(void)state;
	assert_int_equal(vm_link_pause_ms(10000, 0, 100 * s), 10000);       /* never granted */
	assert_int_equal(vm_link_pause_ms(10000, 99 * s, 100 * s), 10000);  /* over: nothing to lose */
	assert_int_equal(vm_link_pause_ms(10000, 155 * s, 100 * s), 10000); /* 60 s: as before */
	assert_int_equal(vm_link_pause_ms(10000, 106 * s, 100 * s), 1500);
	assert_int_equal(vm_link_pause_ms(800, 106 * s, 100 * s), 800);
	assert_int_equal(vm_link_pause_ms(10000, 100 * s + s / 2, 100 * s), LINK_RESTART_MIN_MS);
	assert_int_equal(vm_link_pause_ms(10000, INT64_MAX, 100 * s), 10000);
	for (int64_t lease_ms = 1000; lease_ms <= 60000; lease_ms += 500) {
		int64_t now = 100 * s, until = now + lease_ms * 1000000;
		int lives = 0;

		for (int backoff = LINK_RESTART_MIN_MS; lives < 4; lives++, backoff = backoff * 2 < 10000 ? backoff * 2 : 10000)
			now += vm_link_pause_ms(backoff, until, now) * INT64_C(1000000);
		assert_true(now < until); /* four links that failed at once, and a fifth is there in time */
	}
}

/* --- directories -------------------------------------------------------------------------------------------------------------- */

static void directories_of_others_are_refused(void **state)
{
	static const mode_t open_to[] = { 0720, 0702, 0777, 01777 };
	char top[] = "/tmp/eph-test-keeper-XXXXXX", path[128], command[160];
	struct stat st;
	struct err e;

	(void)state;
	assert_non_null(mkdtemp(top));
	assert_true(text_fmt(path, sizeof(path), "%s/a/state", top));
	assert_int_equal(files_mkdir(path, 0700, &e), 0);
	assert_int_equal(files_mkdir(path, 0700, &e), 0);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0700);
	assert_int_equal(chmod(path, 0755), 0);
	assert_int_equal(files_mkdir(path, 0700, &e), 0);
	for (size_t i = 0; i < sizeof(open_to) / sizeof(open_to[0]); i++) {
		assert_int_equal(chmod(path, open_to[i]), 0);
		assert_int_equal(files_mkdir(path, 0700, &e), -1);
		assert_non_null(strstr(e.text, path));
		assert_non_null(strstr(e.text, "chmod go-w"));
	}
	assert_int_equal(chmod(path, 0700), 0);
	if (geteuid() == 0) {
		assert_int_equal(chown(path, 12345, 12345), 0);
		assert_int_equal(files_mkdir(path, 0700, &e), -1);
		assert_non_null(strstr(e.text, "belongs to user 12345"));
		assert_non_null(strstr(e.text, "chown 0"));
	}
	assert_true(text_fmt(command, sizeof(command), "rm -rf %s", top));
	assert_int_equal(system(command), 0);
}

/* In no state is the broker told, or the entry forgotten, while anything of the VM is left. */
static void steps_never_early(void **state)
{
	(void)state;
	for (unsigned int bits = 0; bits < 1U << 14; bits++) {
		struct vm_want w = { bits & 1, bits & 2, bits & 4 };
		struct vm_seen s = { (enum proc_state)((bits >> 3) & 3), (enum proc_state)((bits >> 5) & 3),
			(enum proc_state)((bits >> 7) & 3), bits & 512, bits & 1024, bits & 2048, bits & 4096, bits & 8192 };
		enum vm_step step = vm_next(&w, &s);

		assert_non_null(vm_step_name(step));
		if (s.vmm == PROC_LEFT) /* what ended by itself is cleaned up at once, whether or not anybody asked */
			assert_int_equal(step, STEP_CLEAN_VMM);
		if (step == STEP_TELL_BROKER)
			assert_true(s.vmm == PROC_NONE && s.broker == PROC_ALIVE && w.destroy);
		if (step == STEP_CLOSE || step == STEP_REPORT || step == STEP_FORGET)
			assert_true(s.vmm == PROC_NONE && s.channel == PROC_NONE && s.broker == PROC_NONE && w.end);
		if (step == STEP_KILL_VMM)
			assert_true(s.vmm == PROC_ALIVE && (w.destroy || w.end));
		if (step == STEP_FORGET)
			assert_true(s.closed && w.forget);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(journal_round_trip),
		cmocka_unit_test(journal_kinds),
		cmocka_unit_test(journal_versions),
		cmocka_unit_test(journal_damage),
		cmocka_unit_test(journal_stat),
		cmocka_unit_test(slots_give_and_take),
		cmocka_unit_test(slots_status),
		cmocka_unit_test(slots_of_others),
		cmocka_unit_test(admission_bounds),
		cmocka_unit_test(admission_lacks),
		cmocka_unit_test(admission_offers),
		cmocka_unit_test(admission_offer_without_a_slot),
		cmocka_unit_test(steps_in_order),
		cmocka_unit_test(steps_never_early),
		cmocka_unit_test(overdue),
		cmocka_unit_test(one_receipt),
		cmocka_unit_test(lease_only_grows),
		cmocka_unit_test(link_comes_back_within_the_lease),
		cmocka_unit_test(directories_of_others_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
