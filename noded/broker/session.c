/*
 * Carries out what run.c decides: hand-over, ends, reports. On the broker's thread. The order of an end is fixed here: model call
 * closed (and charged), kill ordered, waiting guest events written, *gone* awaited, microvm.destroyed, signature, finish.
 */
#include "broker_internal.h"

#include "common/clock.h"
#include "common/ids.h"
#include "common/json.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#define NS_PER_MS INT64_C(1000000)

void session_spool_failed(struct broker *b, const struct err *e)
{
	b->tally.spool_full += !b->seen.ending;
	if (e->code == ERR_LIMIT)
		session_end(b, ERRCODE_EVENTS_OVERFLOW, "%s", e->text);
	else
		session_end(b, ERRCODE_INTERNAL, "The run's record could not be written: %s", e->text);
}

void session_event(struct broker *b, enum event_type type, const struct buf *data)
{
	struct err e;

	if (events_host(b->events, type, data, &e) < 0)
		session_spool_failed(b, &e);
}

void session_model_event(struct broker *b, const struct model_report *r)
{
	struct buf data = BUF_INIT(4096);
	struct jw w;

	jw_init(&w, &data);
	jw_object(&w);
	jw_kint(&w, "call", r->call);
	jw_kint(&w, "attempts", r->attempts);
	jw_kstr(&w, "model", b->a.model.id);
	jw_kint(&w, "input_tokens", r->tokens.input);
	jw_kint(&w, "cached_input_tokens", r->tokens.cached);
	jw_kint(&w, "output_tokens", r->tokens.output);
	jw_kint(&w, "cost_micros", r->cost_micros);
	jw_kstr(&w, "finish", r->finish);
	jw_kint(&w, "duration_ms", r->duration_ms);
	if (r->note[0] != '\0')
		jw_kstr(&w, "note", r->note);
	jw_close(&w);
	session_event(b, EV_MODEL_CALL, &data);
	buf_free(&data);
}

void session_end(struct broker *b, enum errcode code, const char *fmt, ...)
{
	struct model_report report;
	va_list ap;

	if (b->seen.ending || b->seen.fenced)
		return;
	b->seen.ending = true;
	b->code = code;
	va_start(ap, fmt);
	(void)vsnprintf(b->detail, sizeof(b->detail), fmt, ap);
	va_end(ap);
	b->detail[text_utf8_border(b->detail, strlen(b->detail))] = '\0';
	if (b->model != NULL && model_cancel(b->model, &report)) {
		tally_call(b, &report, STATS_CALL_CUT);
		session_model_event(b, &report);
	}
}

/* --- steps ------------------------------------------------------------------------------------------------------------------- */

static void step_boot(struct broker *b)
{
	b->boot_ns = clock_boot_ns();
	broker_deadline(b, DL_BOOT, b->boot_ns + b->boot_limit_ms * NS_PER_MS);
}

/* From here on only keeper has a deadline for this VM, until a run takes it. */
static void step_ready(struct broker *b)
{
	b->ready_ns = clock_boot_ns();
	broker_deadline(b, DL_BOOT, 0);
	if (b->keeper != NULL && !framed_send(b->keeper, RF_KEEPER_READY, NULL, 0))
		session_end(b, ERRCODE_INTERNAL, "Keeper does not take frames.");
}

static void step_probe(struct broker *b)
{
	random_bytes(b->nonce, sizeof(b->nonce));
	if (!framed_send(b->channel, RF_CH_PROBE, b->nonce, sizeof(b->nonce)))
		session_end(b, ERRCODE_CHANNEL_LOST, "The channel does not take frames.");
}

static void step_start(struct broker *b)
{
	struct buf data = BUF_INIT(4096);
	struct jw w;

	broker_deadline(b, DL_BOOT, 0);
	if (b->ready_ns == 0)
		b->ready_ns = clock_boot_ns();
	jw_init(&w, &data);
	jw_object(&w);
	jw_kint(&w, "boot_ms", (b->ready_ns - b->boot_ns) / NS_PER_MS);
	jw_kstr(&w, "vmm", b->ra.vmm);
	jw_kstr(&w, "isolation", b->ra.isolation);
	jw_kstr(&w, "kernel", b->hello.kernel);
	jw_kstr(&w, "jail", b->ra.jail);
	jw_close(&w);
	session_event(b, EV_MICROVM_READY, &data);
	buf_free(&data);
	if (b->seen.ending)
		return;
	b->seen.start_asked = true;
	broker_notify_now(b);
	broker_to_link(b, RF_BL_START, NULL, 0);
}

static void step_setup(struct broker *b)
{
	struct err e;

	b->handover_ns = clock_boot_ns();
	meter_start(&b->meter);
	broker_deadline(b, DL_SETUP, b->handover_ns + SETUP_DEADLINE_MS * NS_PER_MS);
	if (!broker_meter_moved(b))
		return;
	if (worker_setup(b, &e) < 0)
		session_end(b, ERRCODE_INTERNAL, "The run could not be handed over: %s", e.text);
}

static void step_work(struct broker *b)
{
	struct buf data = BUF_INIT(4096);
	int64_t now = clock_boot_ns();
	struct jw w;

	broker_deadline(b, DL_SETUP, 0);
	jw_init(&w, &data);
	jw_object(&w);
	jw_kbool(&w, "shell", b->a.shell);
	jw_kbool(&w, "web", false);
	jw_karray(&w, "connections");
	jw_close(&w);
	jw_kstr(&w, "start_mode", b->ra.start_mode);
	jw_kstr(&w, "image", b->ra.image);
	jw_kstr(&w, "workdir", b->ack.workdir);
	jw_kstr(&w, "boot_id", b->ack.boot_id);
	jw_close(&w);
	b->worker_t_ms = events_t_ms(b->events, now);
	broker_deadline(b, DL_TIMEOUT, now + (int64_t)b->a.timeout_s * 1000 * NS_PER_MS);
	session_event(b, EV_WORKER_STARTED, &data);
	buf_free(&data);
}

static const char *end_reason(const struct broker *b)
{
	if (b->seen.fenced || (b->seen.fence != 0 && !run_granted(b->seen.fence)))
		return "fenced";
	return b->code == ERRCODE_NONE ? "succeeded" : errcode_text(b->code);
}

/* False: keeper is not there, or does not take it. */
static bool say_destroy(struct broker *b)
{
	struct buf reason = BUF_INIT(256);
	bool sent;

	wire_put_str(&reason, end_reason(b));
	sent = b->keeper != NULL && framed_send(b->keeper, RF_KEEPER_DESTROY, reason.data, reason.len);
	buf_free(&reason);
	return sent;
}

static void step_destroy(struct broker *b)
{
	struct model_report report;

	/* An end has closed the call that was under way; of a run that was taken away nobody pays for another attempt. */
	if (b->model != NULL && model_cancel(b->model, &report))
		log_warn("model call of a fenced run cut off run=%s call=%u", b->a.run_id, report.call);
	b->killed_ns = clock_boot_ns();
	if (!say_destroy(b) || b->code == ERRCODE_LEASE_EXPIRED)
		broker_kill(b);
	for (int i = 0; i < DL_COUNT; i++)
		if (i != DL_LEASE && i != DL_ALONE)
			broker_deadline(b, (enum deadline)i, 0);
	if (!b->seen.gone)
		broker_deadline(b, DL_KILL, b->killed_ns + KILL_DEADLINE_MS * NS_PER_MS);
	b->flushing = true;
	worker_drain(b);
	log_info("run ends run=%s reason=%s", b->a.run_id, end_reason(b));
}

static void write_destroyed(struct broker *b)
{
	struct buf data = BUF_INIT(512);
	struct jw w;
	struct err e;

	jw_init(&w, &data);
	jw_object(&w);
	jw_kstr(&w, "reason", end_reason(b));
	jw_kint(&w, "lifetime_ms", (b->killed_ns - (b->boot_ns > b->assigned_ns ? b->boot_ns : b->assigned_ns)) / NS_PER_MS);
	jw_kint(&w, "gone_ms", b->gone_ms);
	jw_close(&w);
	if (events_last(b->events, &data, &e) < 0)
		log_error("microvm.destroyed not written run=%s error=%s", b->a.run_id, e.text);
	buf_free(&data);
}

/* Everything of the end but signature and output, which do not go into its digest. */
static void fill_end(struct broker *b, struct run_end *end)
{
	struct spool_tail tail;

	*end = (struct run_end){ .code = b->code, .worker_started_t_ms = b->worker_t_ms };
	if (!text_copy(end->detail, sizeof(end->detail), b->detail))
		end->detail[0] = '\0';
	meter_final(&b->meter, broker_compute_ms(b), &end->usage, &end->cost);
	spool_tail(b->spool, &tail);
	end->last_seq = tail.next_seq - 1;
	memcpy(end->last_hash, tail.hash, sizeof(end->last_hash));
	memcpy(end->image_hash, b->ra.image_hash, sizeof(end->image_hash));
	if (!text_copy(end->isolation, sizeof(end->isolation), b->ra.isolation))
		end->isolation[0] = '\0';
}

/* Without a keeper there is no signature to wait for: the next one is asked. */
static void say_digest(struct broker *b)
{
	uint8_t digest[SHA256_LEN];
	struct run_end end;

	if (b->keeper == NULL)
		return;
	fill_end(b, &end);
	receipt_digest(b->a.run_id, b->a.attempt, b->a.request_hash, &end, digest);
	broker_deadline(b, DL_SIGN, clock_boot_ns() + SIGN_DEADLINE_MS * NS_PER_MS);
	if (!framed_send(b->keeper, RF_KEEPER_SIGN_DIGEST, digest, sizeof(digest)))
		log_warn("keeper does not take the digest run=%s", b->a.run_id);
}

static void step_sign(struct broker *b)
{
	broker_deadline(b, DL_LEASE, 0);
	write_destroyed(b);
	(void)broker_meter_moved(b);
	broker_notify_now(b);
	say_digest(b);
}

static void say_finish(struct broker *b, struct run_end *out)
{
	struct buf body = BUF_INIT(GUEST_RESULT_MAX + 8192);
	struct run_end end;

	fill_end(b, &end);
	memcpy(end.receipt_signature, b->signature, sizeof(end.receipt_signature));
	if (b->code == ERRCODE_NONE) {
		end.output = b->output.data;
		end.output_len = (uint32_t)b->output.len;
	}
	run_end_encode(&end, &body);
	if (body.failed)
		log_error("end not encoded run=%s", b->a.run_id);
	else
		broker_to_link(b, RF_BL_FINISH, body.data, body.len);
	buf_free(&body);
	*out = end;
}

static void step_finish(struct broker *b)
{
	struct run_end end;

	broker_deadline(b, DL_SIGN, 0);
	say_finish(b, &end);
	log_info("run finish run=%s code=%s cost_micros=%lld model_calls=%lld dropped_events=%llu unmetered=%u over_hold=%u",
			b->a.run_id, errcode_text(b->code), (long long)end.cost.total, (long long)end.usage.model_calls,
			(unsigned long long)events_dropped(b->events), b->meter.unmetered, b->meter.over_hold);
}

static void step_refuse(struct broker *b)
{
	struct buf body = BUF_INIT(2048);
	enum errcode code = run_code_before_start(b->code);
	char reason[513];

	if (!text_fmt(reason, sizeof(reason), "%.*s", 500, b->detail))
		reason[0] = '\0';
	reason[text_utf8_border(reason, strlen(reason))] = '\0';
	wire_put_bool(&body, code != ERRCODE_CANCELLED && code != ERRCODE_LEASE_EXPIRED);
	wire_put_u32(&body, (uint32_t)code);
	wire_put_str(&body, reason);
	broker_to_link(b, RF_BL_REFUSE, body.data, body.len);
	buf_free(&body);
	log_warn("run did not start run=%s code=%s", b->a.run_id, errcode_text(code));
}

static void leave(struct broker *b)
{
	b->leaving = true;
	tally_tell(b);
	if (b->keeper != NULL) {
		(void)framed_send(b->keeper, RF_KEEPER_END, NULL, 0);
		framed_flush(b->keeper, 2000);
	}
	event_base_loopexit(b->base, NULL);
}

/* What was said before may have been lost with keeper, and so may the answer: each of these may be said twice. */
void session_say_again(struct broker *b)
{
	struct run_end end;

	if (b->seen.assigned)
		broker_notify_now(b);
	if (b->seen.start_asked && b->seen.fence == 0)
		broker_to_link(b, RF_BL_START, NULL, 0);
	switch (b->state) {
	case RUN_SETUP: files_ask_again(b); break;
	case RUN_DESTROY:
		if (!b->seen.gone && !say_destroy(b))
			broker_kill(b);
		break;
	case RUN_SIGN: say_digest(b); break;
	case RUN_FINISH: say_finish(b, &end); break;
	default: break;
	}
}

static void do_step(struct broker *b, enum run_step step)
{
	switch (step) {
	case STEP_WAIT: break;
	case STEP_BOOT: step_boot(b); break;
	case STEP_PROBE: step_probe(b); break;
	case STEP_READY: step_ready(b); break;
	case STEP_START: step_start(b); break;
	case STEP_SETUP: step_setup(b); break;
	case STEP_WORK: step_work(b); break;
	case STEP_DESTROY: step_destroy(b); break;
	case STEP_SIGN: step_sign(b); break;
	case STEP_FINISH: step_finish(b); break;
	case STEP_REFUSE:
		step_refuse(b);
		leave(b);
		break;
	case STEP_LEAVE: leave(b); break;
	}
}

void session_advance(struct broker *b)
{
	enum run_step step;

	while (!b->leaving && (step = run_next(b->state, &b->seen)) != STEP_WAIT) {
		run_set(&b->state, run_step_state(b->state, step), b->a.run_id);
		do_step(b, step);
	}
}
