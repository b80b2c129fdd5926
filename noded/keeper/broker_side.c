/*
 * Keeper's end of a broker's socket: what the broker asks of keeper, and what is relayed between it and link without being read.
 * Keeper's loop; never blocks but for the journal's two fsyncs when START is asked for.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <string.h>
#include <unistd.h>

#define BROKER_QUEUE_MAX (12 * 1024 * 1024)
static const char *const start_modes[] = { [JOURNAL_COLD] = "cold", [JOURNAL_CLONE] = "clone", [JOURNAL_FROM_WARM] = "warm" };
#define LEASE_UNKNOWN_NS INT64_C(55000000000) /* an assignment came without a lease: as long as a usual one lasts */

void frame_clear(struct frame *f)
{
	free(f->body);
	f->body = NULL;
	f->n = 0;
	f->type = 0;
}

static bool frame_set(struct frame *f, uint8_t type, const uint8_t *body, size_t n)
{
	uint8_t *copy = malloc(n + 1);

	if (!copy)
		return false;
	if (n > 0)
		memcpy(copy, body, n);
	frame_clear(f);
	*f = (struct frame){ .type = type, .body = copy, .n = n };
	return true;
}

/* Sends, or ends the run: a broker that does not read for megabytes cannot be relied on for anything. */
static void send_frame(struct vm *vm, uint8_t type, const void *body, size_t n)
{
	if (!vm->broker || framed_send(vm->broker, type, body, n))
		return;
	log_error("run=%s vm=%s broker does not take frames type=%u", vm->journal.run_id, vm->journal.vm, type);
	if (vm->proc[SLOT_BROKER].state == PROC_ALIVE)
		child_kill(vm->proc[SLOT_BROKER].child); /* its end is what ends the run */
}

/* --- from the broker ---------------------------------------------------------------------------------------------------------- */

static enum replay replay_of(uint8_t type)
{
	switch (type) {
	case RF_BL_START: return REPLAY_START;
	case RF_BL_BLOB: return REPLAY_BLOB;
	case RF_BL_EVENTS: return REPLAY_EVENTS;
	case RF_BL_FINISH:
	case RF_BL_REFUSE: return REPLAY_END;
	default: return REPLAY_COUNT;
	}
}

/* From this moment controld may hold the run for running: an end that keeper reports must be a finish. */
static int note_start(struct vm *vm, struct err *e)
{
	const enum journal_state before = vm->journal.state;

	if (before >= JOURNAL_ASKED)
		return 0;
	vm->journal.state = JOURNAL_ASKED;
	if (journal_store(vm->keeper->journal_dir, &vm->journal, e) == 0)
		return 0;
	/* The start is not asked for, so what keeper reports is a start that failed. (Link would make one of a finish as well.) */
	vm->journal.state = before;
	return -1;
}

static int to_link(struct vm *vm, const uint8_t *body, size_t n, struct err *e)
{
	enum replay kind;

	if (n < 1)
		return err_set(e, ERR_PROTOCOL, "relay without a type");
	kind = replay_of(body[0]);
	if (kind == REPLAY_COUNT)
		return err_set(e, ERR_PROTOCOL, "relay of type %u", body[0]);
	if (body[0] == RF_BL_REFUSE && vm_again_refused(vm, body + 1, n - 1)) {
		vm_boot_over(vm);
		return 0;
	}
	if (body[0] == RF_BL_START) {
		vm_boot_over(vm);
		vm_again_forget(vm);
		if (note_start(vm, e))
			return -1;
		metrics_started(vm);
	}
	if (body[0] == RF_BL_REFUSE) {
		vm_boot_over(vm);
		metrics_not_started(vm, n > 1 && body[1] != 0);
	}
	if (!frame_set(&vm->replay[kind], body[0], body + 1, n - 1))
		return err_set(e, ERR_NOMEM, "no memory");
	/* Its first byte says whether this counts as an attempt: after a clone that did not come up, the next one boots. */
	if (body[0] == RF_BL_REFUSE && n > 1 && vm->clone_failed)
		vm->replay[kind].body[0] = 0;
	link_side_relay(vm->keeper, vm, body[0], vm->replay[kind].body, n - 1);
	return 0;
}

/* Ends before the start that say nothing about how the VM came up. */
static bool ended_by_its_run(const char *reason)
{
	return strcmp(reason, errcode_text(ERRCODE_CANCELLED)) == 0 || strcmp(reason, errcode_text(ERRCODE_LEASE_EXPIRED)) == 0 ||
	       strcmp(reason, "fenced") == 0;
}

static int take_destroy(struct vm *vm, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	char *reason;

	wire_read_init(&r, body, n);
	reason = wire_str(&r, 1024);
	if (wire_end(&r, "destroy", e)) {
		free(reason);
		return -1;
	}
	log_info("run=%s vm=%s destroy asked reason=\"%s\"", vm->journal.run_id, vm->journal.vm, reason);
	if (!ended_by_its_run(reason))
		golden_clone_failed(vm, reason);
	free(reason);
	if (vm->destroy_boot_ns == 0)
		vm->destroy_boot_ns = clock_boot_ns();
	vm->want.destroy = true;
	pool_lost(vm);
	vm_boot_over(vm);
	return 0;
}

static int take_sign(struct vm *vm, const uint8_t *body, size_t n, struct err *e)
{
	uint8_t signature[64];

	if (n != SHA256_LEN)
		return err_set(e, ERR_PROTOCOL, "digest of %zu bytes", n);
	if (!vm_may_sign(&vm->seen))
		return err_set(e, ERR_PROTOCOL, "a receipt of a VM that is not gone, or a second one");
	vm->seen.receipt = true;
	identity_sign_receipt(vm->keeper->identity, body, signature);
	send_frame(vm, RF_BROKER_SIGNATURE, signature, sizeof(signature));
	return 0;
}

static void take_end(struct vm *vm)
{
	if (vm->again)
		return;
	vm->want.destroy = vm->want.end = true;
	/* It had nothing to report, so nothing will be acknowledged: fenced before it began, or refused with the answer seen. */
	if (!vm->replay[REPLAY_END].body)
		vm->want.forget = true;
	vm->seen.reported = true;
}

/* It may cross with a run that took the VM while it booted: then it is the run's boot that is over. */
static int take_ready(struct vm *vm, size_t n, struct err *e)
{
	if (n != 0 || !vm->prepared || vm->warm_ready)
		return err_set(e, ERR_PROTOCOL, "ready, but not asked to be, or twice");
	vm_boot_over(vm);
	pool_ready(vm);
	return 0;
}

static int take_frame(struct vm *vm, uint8_t type, const uint8_t *body, size_t n, struct err *e)
{
	if (vm->journal.kind != JOURNAL_RUN && (type == RF_KEEPER_TO_LINK || type == RF_KEEPER_SIGN_DIGEST))
		return err_set(e, ERR_PROTOCOL, "frame of type %u without a run", type);
	switch (type) {
	case RF_KEEPER_DESTROY: return take_destroy(vm, body, n, e);
	case RF_KEEPER_TO_LINK: return to_link(vm, body, n, e);
	case RF_KEEPER_SIGN_DIGEST: return take_sign(vm, body, n, e);
	case RF_KEEPER_END: take_end(vm); return 0;
	case RF_KEEPER_READY: return take_ready(vm, n, e);
	case RF_KEEPER_STATS: return stats_broker_add(body, n, &vm->keeper->stats.broker, e);
	case RF_KEEPER_METER: return n == 16 ? 0 : err_set(e, ERR_PROTOCOL, "meter of %zu bytes", n); /* the spool has it too */
	default: return err_set(e, ERR_PROTOCOL, "frame of type %u", type);
	}
}

/* The first frame of an earlier keeper's broker. May free the VM. */
static void take_adopted(struct vm *vm, uint8_t type, const uint8_t *body, size_t n, int fd)
{
	struct err e;
	int rc = 0;

	if (type == RF_KEEPER_ADOPTED) {
		rc = adopt_answered(vm, body, n, fd, &e);
	} else {
		if (fd >= 0)
			close(fd);
		rc = err_set(&e, ERR_PROTOCOL, "it answers with a frame of type %u", type);
	}
	if (rc)
		adopt_failed(vm, e.text);
	else
		vm_step_all(vm);
}

static void on_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct vm *vm = arg;
	struct err e;

	for (size_t i = vm->adopt_began_ns > 0 ? 1 : 0; i < fd_count; i++)
		close(fds[i]);
	if (vm->adopt_began_ns > 0) {
		take_adopted(vm, type, body, n, fd_count > 0 ? fds[0] : -1);
		return;
	}
	if (take_frame(vm, type, body, n, &e)) {
		log_error("run=%s vm=%s broker error=\"%s\"", vm->journal.run_id, vm->journal.vm, e.text);
		vm_end(vm, ERRCODE_BROKER_LOST, e.text);
		return;
	}
	vm_step_all(vm);
}

/* The end of the socket is the end of the broker: its pidfd follows. */
static void on_end(void *arg, const struct err *e)
{
	struct vm *vm = arg;

	framed_free(vm->broker);
	vm->broker = NULL;
	if (vm->want.end)
		return;
	if (!e && vm->proc[SLOT_BROKER].state == PROC_ALIVE)
		child_kill(vm->proc[SLOT_BROKER].child); /* it is ending anyhow; its exit, which says why, comes within the turn */
	else
		vm_end(vm, ERRCODE_BROKER_LOST, e ? e->text : vm->broker_text);
}

int broker_side_open(struct vm *vm, int fd, struct err *e)
{
	struct framed_options opt = {
		.fd = fd,
		.max_frame = ROLE_FRAME_MAX,
		.max_queued = BROKER_QUEUE_MAX,
		.on_frame = on_frame,
		.on_end = on_end,
		.arg = vm,
	};

	return framed_new(vm->keeper->base, &opt, &vm->broker, e);
}

/* --- to the broker ------------------------------------------------------------------------------------------------------------ */

/* An answer takes its question out of what would be said again. */
static void answered(struct vm *vm, uint8_t type)
{
	switch (type) {
	case RF_LB_STARTED: frame_clear(&vm->replay[REPLAY_START]); break;
	case RF_LB_BLOB: frame_clear(&vm->replay[REPLAY_BLOB]); break;
	default: break; /* an end stays until RF_KEEPER_DONE; events are the newest word anyhow */
	}
}

static void pass_on(struct vm *vm, uint8_t type, const uint8_t *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);

	answered(vm, type);
	if (!vm->broker)
		return;
	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	if (!b.failed)
		send_frame(vm, RF_BROKER_FROM_LINK, b.data, b.len);
	buf_free(&b);
}

void broker_side_from_link(struct vm *vm, uint8_t type, const uint8_t *body, size_t n)
{
	if ((!vm->assignment || vm->want.end) && !vm->again) {
		pass_on(vm, type, body, n);
		return;
	}
	/* It has no broker that knows it yet. */
	if (vm->early_count < VM_EARLY_FRAMES && frame_set(&vm->early[vm->early_count], type, body, n))
		vm->early_count++;
}

/* What link said before the broker had its assignment. */
static void pass_early(struct vm *vm)
{
	for (size_t i = 0; i < vm->early_count; i++) {
		pass_on(vm, vm->early[i].type, vm->early[i].body, vm->early[i].n);
		frame_clear(&vm->early[i]);
	}
	vm->early_count = 0;
}

int broker_side_assign(struct vm *vm, struct err *e)
{
	const struct host *h = &vm->keeper->host;
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);
	struct role_broker_assign a = {
		.assignment = vm->assignment,
		.assignment_len = (uint32_t)vm->assignment_len,
		.secrets = vm->secrets,
		.secrets_len = (uint32_t)vm->secrets_len,
		.received_boot_ns = vm->received_boot_ns,
		.lease_deadline_boot_ns = vm->keeper->lease_deadline_boot_ns,
		.boot_deadline_ms = h->boot_timeout_ms,
	};
	char image[2 * SHA256_LEN + 1];
	bool sent;

	if (!vm->broker)
		return err_set(e, ERR_CONFLICT, "the broker is gone");
	if (a.lease_deadline_boot_ns == 0)
		a.lease_deadline_boot_ns = vm->received_boot_ns + LEASE_UNKNOWN_NS;
	memcpy(a.image_hash, vm->journal.image_hash, sizeof(a.image_hash));
	text_hex(a.image_hash, sizeof(a.image_hash), image);
	if (!text_fmt(a.image, sizeof(a.image), "%.12s", image) || !text_copy(a.vmm, sizeof(a.vmm), h->vmm.version) ||
			!text_copy(a.isolation, sizeof(a.isolation), h->isolation) || !text_copy(a.jail, sizeof(a.jail), h->jail) ||
			!text_copy(a.start_mode, sizeof(a.start_mode), start_modes[vm->journal.start_mode]))
		return err_set(e, ERR_INTERNAL, "description of this host is too long");
	if (vm_egress_open(vm, e))
		return -1;
	role_broker_assign_encode(&a, &b);
	sent = !b.failed && framed_send_fds(vm->broker, RF_BROKER_ASSIGN, b.data, b.len, &vm->spool_fd, 1);
	if (b.data)
		explicit_bzero(b.data, b.len);
	buf_free(&b);
	if (!sent)
		return err_set(e, ERR_UNAVAILABLE, "the broker does not take its assignment");
	vm_again_keep(vm);
	pass_early(vm);
	return 0;
}

int broker_side_prepare(struct vm *vm, struct err *e)
{
	struct buf b = BUF_INIT(16);
	bool sent;

	if (!vm->broker)
		return err_set(e, ERR_CONFLICT, "the broker is gone");
	wire_put_i64(&b, vm->keeper->host.boot_timeout_ms);
	sent = !b.failed && framed_send(vm->broker, RF_BROKER_PREPARE, b.data, b.len);
	buf_free(&b);
	vm->prepared = sent;
	return sent ? 0 : err_set(e, ERR_UNAVAILABLE, "the broker does not take frames");
}

void broker_side_exited(struct vm *vm)
{
	struct buf b = BUF_INIT(1024);

	wire_put_u32(&b, (uint32_t)vm->vmm_status);
	wire_put_str(&b, vm->vmm_text);
	if (!b.failed)
		send_frame(vm, RF_BROKER_VMM_EXITED, b.data, b.len);
	buf_free(&b);
}

void broker_side_gone(struct vm *vm)
{
	struct buf b = BUF_INIT(16);

	wire_put_i64(&b, vm->gone_ms > 0 ? vm->gone_ms : 0); /* an earlier keeper may have seen it go */
	if (!b.failed)
		send_frame(vm, RF_BROKER_GONE, b.data, b.len);
	buf_free(&b);
}

void broker_side_lease(struct vm *vm, int64_t deadline_boot_ns)
{
	struct buf b = BUF_INIT(16);

	wire_put_i64(&b, deadline_boot_ns);
	/* Before its assignment it would not know what to do with it, and gets the newest with it. */
	if (!b.failed && !vm->assignment && vm->journal.kind == JOURNAL_RUN)
		send_frame(vm, RF_BROKER_LEASE, b.data, b.len);
	buf_free(&b);
}
