/*
 * What keeper says to its broker: the VM to prepare, the run, the lease, answers of link, and the end. On the broker's thread. The
 * same frames come from a later keeper, once it has said who it is (alone.c).
 */
#include "broker_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <unistd.h>

#define KEEPER_QUEUE_MAX (2 * ROLE_FRAME_MAX)

static void event_meter(void *arg, int64_t *spent, int64_t *held)
{
	broker_spooled_meter(arg, spent, held);
}

static void event_appended(void *arg, uint64_t seq)
{
	struct broker *b = arg;

	b->last_seq = seq;
	broker_notify(b);
}

/* A VM without a run: it boots, answers the probe, and waits. */
static int take_prepare(struct broker *b, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, body, n);
	b->boot_limit_ms = wire_i64(&r);
	if (wire_end(&r, "prepare", e) < 0)
		return -1;
	if (b->seen.prepared || b->seen.assigned || b->boot_limit_ms <= 0)
		return err_set(e, ERR_PROTOCOL, "a prepare that comes late, or without a time");
	b->seen.prepared = true;
	return 0;
}

/* The spool's descriptor comes with it. */
static int take_spool(struct broker *b, int *fds, size_t fd_count, struct err *e)
{
	int fd;

	if (fd_count != 1)
		return err_set(e, ERR_PROTOCOL, "an assignment with %zu descriptors, not one", fd_count);
	fd = fds[0];
	fds[0] = -1;
	return spool_open(fd, true, &b->spool, e);
}

static int take_assign(struct broker *b, const uint8_t *body, size_t n, int *fds, size_t fd_count, struct err *e)
{
	struct events_options opt = { .meter = event_meter, .appended = event_appended, .arg = b };
	const struct spool_head *head;
	struct spool_tail tail;

	if (b->seen.assigned)
		return err_set(e, ERR_PROTOCOL, "a second assignment");
	if (role_broker_assign_decode(body, n, &b->ra, e) < 0 ||
			assignment_decode(b->ra.assignment, b->ra.assignment_len, &b->a, e) < 0 ||
			take_spool(b, fds, fd_count, e) < 0)
		return -1;
	head = spool_head(b->spool);
	opt.spool = b->spool;
	if (strcmp(head->run_id, b->a.run_id) != 0 || memcmp(head->token, b->a.token, TOKEN_LEN) != 0)
		return err_set(e, ERR_PROTOCOL, "the spool is another run's");
	opt.age_ms = b->a.age_ms;
	opt.received_boot_ns = b->ra.received_boot_ns;
	spool_tail(b->spool, &tail);
	b->last_seq = tail.next_seq - 1;
	b->events = events_new(&opt);
	if (b->events == NULL)
		return err_set(e, ERR_NOMEM, "no memory for the timeline");
	meter_init(&b->meter, &b->a.price, b->a.cap_micros);
	broker_deadline(b, DL_LEASE, b->ra.lease_deadline_boot_ns);
	if (!b->seen.prepared)
		b->boot_limit_ms = b->ra.boot_deadline_ms;
	b->assigned_ns = clock_boot_ns();
	b->seen.assigned = true;
	return 0;
}

static void from_link(struct broker *b, uint8_t type, const uint8_t *body, size_t n)
{
	switch (type) {
	case RF_LB_STARTED:
		if (n == 1 && b->seen.start_asked && b->seen.fence == 0)
			b->seen.fence = body[0];
		break;
	case RF_LB_CANCEL: session_end(b, ERRCODE_CANCELLED, "%s", ""); break;
	case RF_LB_FINISHED:
		b->seen.finished = true;
		if (n == 1 && b->state < RUN_SIGN && !run_granted(body[0]))
			b->seen.fenced = true; /* the run was taken away while it went on */
		break;
	case RF_LB_BLOB: files_blob(b, body, n); break;
	default: break; /* RF_LB_ACKED: the spool holds everything to the end anyway */
	}
}

/* A lease is only ever renewed: a frame without a time must not take the deadline away. */
static void take_lease(struct broker *b, const uint8_t *body, size_t n)
{
	struct wire_reader r;
	int64_t deadline;

	wire_read_init(&r, body, n);
	deadline = wire_i64(&r);
	if (!r.failed && deadline > 0 && b->state < RUN_SIGN)
		broker_deadline(b, DL_LEASE, deadline);
}

/* Keeper tells it once, when it is true; also of a VM that it destroyed unasked, because we had stood still for too long. */
static void vm_gone(struct broker *b, const uint8_t *body, size_t n)
{
	struct wire_reader r;

	wire_read_init(&r, body, n);
	if (b->seen.gone)
		return; /* said again by a keeper that cannot know */
	b->gone_ms = wire_i64(&r);
	b->seen.gone = true;
	broker_deadline(b, DL_KILL, 0);
	if (b->state < RUN_DESTROY)
		session_end(b, ERRCODE_VM_CRASHED, "The host destroyed the VM.");
}

static void vmm_exited(struct broker *b, const uint8_t *body, size_t n)
{
	struct wire_reader r;
	const uint8_t *text;
	struct buf safe = BUF_INIT(1000);
	size_t len;

	wire_read_init(&r, body, n);
	(void)wire_u32(&r);
	text = wire_bytes(&r, 4096, &len);
	if (text != NULL && text_safe(&safe, (const char *)text, len < 240 ? len : 240, false) && safe.len > 0)
		session_end(b, ERRCODE_VM_CRASHED, "%s", buf_cstr(&safe));
	else
		session_end(b, ERRCODE_VM_CRASHED, "The VMM ended by itself.");
	buf_free(&safe);
}

static void keeper_frame(struct broker *b, uint8_t type, const uint8_t *body, size_t n)
{
	bool known = b->seen.assigned || (b->seen.prepared && (type == RF_BROKER_VMM_EXITED || type == RF_BROKER_GONE));

	if (!known)
		return; /* nothing to apply it to */
	switch (type) {
	case RF_BROKER_LEASE: take_lease(b, body, n); break;
	case RF_BROKER_FROM_LINK:
		if (n >= 1)
			from_link(b, body[0], body + 1, n - 1);
		break;
	case RF_BROKER_VMM_EXITED: vmm_exited(b, body, n); break;
	case RF_BROKER_GONE: vm_gone(b, body, n); break;
	case RF_BROKER_SIGNATURE:
		if (n == sizeof(b->signature)) {
			memcpy(b->signature, body, n);
			b->seen.is_signed = true;
		}
		break;
	default: log_warn("keeper frame of unknown type run=%s type=%u", b->a.run_id, type); break;
	}
}

static void on_keeper_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	int kept = fd_count > 0 ? fds[0] : -1;
	struct broker *b = arg;
	struct err e;
	int rc = 0;

	for (size_t i = 1; i < fd_count; i++)
		close(fds[i]);
	if (b->keeper == NULL)
		alone_frame(b, type, body, n);
	else if (type == RF_BROKER_IDENTITY)
		rc = role_identity_decode(body, n, &b->identity, &e);
	else if (type == RF_BROKER_PREPARE)
		rc = take_prepare(b, body, n, &e);
	else if (type == RF_BROKER_ASSIGN)
		rc = take_assign(b, body, n, &kept, fd_count, &e);
	else
		keeper_frame(b, type, body, n);
	if (kept >= 0)
		close(kept);
	if (rc < 0) {
		log_error("assignment refused error=%s", e.text);
		event_base_loopexit(b->base, NULL);
		return;
	}
	session_advance(b);
}

static void on_keeper_end(void *arg, const struct err *e)
{
	struct broker *b = arg;

	if (b->leaving)
		return;
	if (b->keeper == NULL) {
		alone_suitor_left(b);
		return;
	}
	log_warn("keeper is gone run=%s state=%s error=%s", b->a.run_id, run_state_name(b->state), e != NULL ? e->text : "");
	if (alone_begin(b))
		session_advance(b);
	else
		broker_give_up(b);
}

struct framed_options keeper_options(struct broker *b, int fd)
{
	return (struct framed_options){ .fd = fd,
		.max_frame = ROLE_FRAME_MAX,
		.max_queued = KEEPER_QUEUE_MAX,
		.on_frame = on_keeper_frame,
		.on_end = on_keeper_end,
		.arg = b };
}
