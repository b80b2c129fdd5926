/*
 * How keeper reports an end that no broker can report: it goes on with the chain where the broker left the spool, writes
 * `microvm.destroyed`, and charges what the meter held. Keeper's loop; blocks on the disk for one record.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/json.h"
#include "common/log.h"
#include "common/price.h"
#include "common/text.h"
#include "spool.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static int64_t event_time_ms(const struct vm *vm, const struct spool_head *head)
{
	/* CLOCK_BOOTTIME of an earlier boot says nothing; then the wall clock has to do. The spool never goes back. */
	if (strcmp(vm->journal.boot_id, vm->keeper->host.boot_id) == 0)
		return head->age_ms + (clock_boot_ns() - head->received_boot_ns) / 1000000;
	return clock_real_ms() - head->queued_at_ms;
}

static int append_destroyed(struct vm *vm, struct spool *s, const struct spool_tail *tail, struct err *e)
{
	struct buf data = BUF_INIT(2048);
	struct jw w;
	int rc;

	jw_init(&w, &data);
	jw_object(&w);
	jw_kstr(&w, "reason", errcode_text(vm->end_code));
	jw_kint(&w, "lifetime_ms", vm->exec_boot_ns > 0 ? (vm->destroy_boot_ns - vm->exec_boot_ns) / 1000000 : 0);
	jw_kint(&w, "gone_ms", vm->gone_ms);
	jw_close(&w);
	if (!jw_end(&w))
		rc = err_set(e, ERR_INTERNAL, "event data");
	else
		rc = spool_append(s, EVENT_HOST, EV_MICROVM_DESTROYED, event_time_ms(vm, spool_head(s)), data.data, data.len,
				tail->spent, tail->held, NULL, e);
	buf_free(&data);
	return rc;
}

/*
 * Open holds are charged in full: whether their calls were made cannot be known any more. Compute is booked as what it is, up to
 * where the meter had paid for it; how many tokens the rest was is not known here.
 */
static void charge(const struct spool_head *head, const struct spool_tail *tail, struct run_end *end)
{
	int64_t total = tail->spent, compute;

	if (tail->held > 0 && total <= INT64_MAX - tail->held)
		total += tail->held;
	if (total < 0)
		total = 0;
	if (total > head->cap_micros)
		total = head->cap_micros;
	end->cost.total = total;
	end->cost.run_fee = head->run_fee < total ? head->run_fee : total;
	end->usage.compute_ms = tail->compute_ms > 0 ? tail->compute_ms : 0;
	if (!price_of(end->usage.compute_ms, head->compute_price, &compute) || compute > total - end->cost.run_fee)
		compute = total - end->cost.run_fee;
	end->cost.compute = compute;
	end->cost.model = total - end->cost.run_fee - compute;
	end->usage.unmetered_model_micros = end->cost.model;
}

static int close_spool(struct vm *vm, struct run_end *end, struct err *e)
{
	struct spool_tail tail;
	struct spool *s;
	int fd = vm->spool_fd < 0 ? -1 : fcntl(vm->spool_fd, F_DUPFD_CLOEXEC, 3);

	if (fd < 0)
		return err_set(e, ERR_NOT_FOUND, "the run's spool is not there");
	if (spool_open(fd, true, &s, e))
		return -1;
	spool_tail(s, &tail);
	if (tail.last_type != EV_MICROVM_DESTROYED && append_destroyed(vm, s, &tail, e)) {
		spool_close(s);
		return -1;
	}
	spool_tail(s, &tail);
	end->last_seq = tail.next_seq - 1;
	memcpy(end->last_hash, tail.hash, sizeof(end->last_hash));
	charge(spool_head(s), &tail, end);
	spool_close(s);
	return 0;
}

static void report_end(struct vm *vm)
{
	struct run_end end = { .code = (uint32_t)vm->end_code, .worker_started_t_ms = -1 };
	struct frame *f = &vm->replay[REPLAY_END];
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);
	struct err e;

	memcpy(end.image_hash, vm->journal.image_hash, SHA256_LEN);
	if (!text_copy(end.detail, sizeof(end.detail), vm->end_text) ||
			!text_copy(end.isolation, sizeof(end.isolation), vm->keeper->host.isolation))
		end.detail[0] = '\0';
	if (close_spool(vm, &end, &e)) {
		/* Nothing can be proved of this run any more; controld ends it when nobody holds it. */
		log_error("run=%s vm=%s the end cannot be reported error=\"%s\"", vm->journal.run_id, vm->journal.vm, e.text);
		vm->want.forget = true;
		return;
	}
	run_end_encode(&end, &b);
	frame_clear(f);
	*f = (struct frame){ .type = RF_LINK_ENDED };
	f->body = (uint8_t *)buf_steal(&b, &f->n);
	if (!f->body) {
		log_error("run=%s no memory to report its end", vm->journal.run_id);
		return;
	}
	link_side_relay(vm->keeper, vm, RF_LINK_ENDED, f->body, f->n);
}

void vm_report(struct vm *vm)
{
	if (vm->refused)
		link_side_refused(vm->keeper, vm->journal.run_id, vm->journal.token, vm->refuse_failed, vm->end_code, vm->end_text);
	else
		report_end(vm);
}
