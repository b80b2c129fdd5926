/*
 * Frames of the channel: what the guest says, one typed message at a time, in its order. The channel has parsed the guest's bytes,
 * but it may have been taken over by them: every frame is decoded and checked again, and is legal in its state only. Guest events
 * that the rate holds back wait here, and what came after them waits behind; the credit that is not given back meanwhile slows the
 * guest.
 */
#include "broker_internal.h"
#include "model_request.h"

#include "common/clock.h"
#include "common/ids.h"
#include "common/json.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/tools.h"

#define NS_PER_MS INT64_C(1000000)

static void protocol(struct broker *b, const char *what)
{
	session_end(b, ERRCODE_WORKER_PROTOCOL_ERROR, "The worker broke the protocol: %s.", what);
}

/* --- model calls ------------------------------------------------------------------------------------------------------------- */

static void send_reply(struct broker *b, struct model_reply *reply)
{
	struct buf body = BUF_INIT(ROLE_FRAME_MAX);

	wire_put_u32(&body, b->call_stream);
	wire_put_u8(&body, CALL_MODEL);
	model_reply_encode(reply, &body);
	if (body.failed || !framed_send(b->channel, RF_CH_REPLY, body.data, body.len))
		session_end(b, ERRCODE_CHANNEL_LOST, "The channel did not take a reply of %zu bytes.", body.len);
	buf_free(&body);
}

static void on_reply(void *arg, struct model_reply *reply, const struct model_report *report)
{
	struct broker *b = arg;

	tally_call(b, report, STATS_CALL_OK);
	session_model_event(b, report);
	reply->calls_left = b->calls < b->a.max_model_calls ? b->a.max_model_calls - b->calls : 0;
	if (!b->seen.ending)
		send_reply(b, reply);
	model_reply_free(reply);
	worker_drain(b);
	session_advance(b);
}

static void on_failed(void *arg, enum errcode code, const char *text, const struct model_report *report)
{
	struct broker *b = arg;

	tally_call(b, report, code == ERRCODE_BUDGET_EXCEEDED || code == ERRCODE_TIMED_OUT ? STATS_CALL_BUDGET : STATS_CALL_FAILED);
	session_model_event(b, report);
	session_end(b, code, "%s", text);
	session_advance(b);
}

/* A tool that this run does not have is not offered to the model; the timeline says that it was asked for. */
static void deny_tools(struct broker *b, uint32_t tools)
{
	struct buf data = BUF_INIT(512);
	struct jw w;

	for (unsigned i = 0; i < TOOL_COUNT && !b->seen.ending; i++) {
		if ((tools & TOOL_BIT(i)) == 0)
			continue;
		buf_reset(&data);
		jw_init(&w, &data);
		jw_object(&w);
		jw_kstr(&w, "rule", "tools");
		jw_kstr(&w, "what", tool_info((enum tool)i)->name);
		jw_close(&w);
		b->tally.denials[STATS_DENIED_TOOL]++;
		session_event(b, EV_DENIED, &data);
	}
	buf_free(&data);
}

static void take_call(struct broker *b, const uint8_t *body, size_t n)
{
	struct model_call call;
	struct wire_reader r;
	uint32_t stream;
	uint8_t kind;
	struct err e;

	wire_read_init(&r, body, n);
	stream = wire_u32(&r);
	kind = wire_u8(&r);
	if (r.failed || kind != CALL_MODEL) {
		protocol(b, "a call of unknown kind");
		return;
	}
	if (model_busy(b->model)) {
		protocol(b, "a second model call before the answer to the first");
		return;
	}
	if (model_call_decode(r.p, r.left, &call, &e) < 0) {
		protocol(b, e.text);
		return;
	}
	if (call.call != b->calls + 1) {
		protocol(b, "model calls are not numbered in order");
	} else if (call.call > b->a.max_model_calls) {
		session_end(b, ERRCODE_MODEL_CALLS_EXCEEDED, "All of the run's %u model calls (max_model_calls) are used.",
				b->a.max_model_calls);
	} else if (call.tools >> TOOL_COUNT != 0) {
		protocol(b, "tools that do not exist");
	} else {
		b->calls = call.call;
		b->call_stream = stream;
		deny_tools(b, call.tools & ~model_tools_allowed(&b->a));
		if (!b->seen.ending && model_start(b->model, &call, &e) < 0)
			protocol(b, e.text);
	}
	model_call_free(&call);
}

static void take_result(struct broker *b, const uint8_t *body, size_t n)
{
	if (model_busy(b->model)) {
		protocol(b, "a result before the answer to a model call");
		return;
	}
	if (n > GUEST_RESULT_MAX) {
		session_end(b, ERRCODE_OUTPUT_TOO_LARGE, "The output is over %d bytes.", GUEST_RESULT_MAX);
		return;
	}
	buf_init(&b->output, GUEST_RESULT_MAX);
	if (!buf_add(&b->output, body, n))
		session_end(b, ERRCODE_INTERNAL, "No memory for the output.");
	else
		session_end(b, ERRCODE_NONE, "%s", "");
}

static void take_event(struct broker *b, const uint8_t *body, size_t n)
{
	struct guest_event g;
	struct buf credit = BUF_INIT(8);
	struct err e;

	if (guest_event_decode(body, n, &g, &e) < 0) {
		protocol(b, e.text);
		return;
	}
	if (events_guest(b->events, &g, clock_boot_ns(), &e) < 0)
		session_spool_failed(b, &e);
	wire_put_u32(&credit, (uint32_t)n);
	if (b->channel != NULL && !b->channel_gone)
		(void)framed_send(b->channel, RF_CH_EVENT_CREDIT, credit.data, credit.len);
	buf_free(&credit);
}

/* A text of the guest's, safe to show; out holds 513. */
static void guest_text(const uint8_t *body, size_t n, char out[513])
{
	static const size_t tries[] = { 500, 120 }; /* escaping may make four of each byte */
	struct wire_reader r;
	const uint8_t *p;
	size_t len;
	struct buf safe = BUF_INIT(512);

	wire_read_init(&r, body, n);
	p = wire_bytes(&r, GUEST_FATAL_MAX, &len);
	out[0] = '\0';
	for (size_t i = 0; i < sizeof(tries) / sizeof(tries[0]) && p != NULL && out[0] == '\0'; i++) {
		buf_reset(&safe);
		if (!text_safe(&safe, (const char *)p, text_utf8_border((const char *)p, len < tries[i] ? len : tries[i]), false) ||
				buf_cstr(&safe) == NULL || !text_copy(out, 513, buf_cstr(&safe)))
			out[0] = '\0';
	}
	buf_free(&safe);
}

/* --- order and rate ---------------------------------------------------------------------------------------------------------- */

static void take_ordered(struct broker *b, uint8_t type, const uint8_t *body, size_t n)
{
	char text[513];

	/* While the end flushes, only what was already said for the timeline still counts. */
	if (b->seen.ending && type != RF_CB_EVENT)
		return;
	switch (type) {
	case RF_CB_EVENT: take_event(b, body, n); break;
	case RF_CB_CALL: take_call(b, body, n); break;
	case RF_CB_RESULT: take_result(b, body, n); break;
	case RF_CB_FATAL:
		guest_text(body, n, text);
		session_end(b, ERRCODE_WORKER_FAILED, "%s", text);
		break;
	case RF_CB_PROTOCOL:
		guest_text(body, n, text);
		protocol(b, text);
		break;
	default: break;
	}
}

/* May this frame be taken now? Guest events ask the bucket. */
static bool may_take(struct broker *b, uint8_t type)
{
	int64_t wait_ms = 0, now = clock_boot_ns();

	if (type != RF_CB_EVENT || b->flushing || events_ready(b->events, now, &wait_ms))
		return true;
	broker_deadline(b, DL_RATE, now + wait_ms * NS_PER_MS);
	return false;
}

void worker_drain(struct broker *b)
{
	struct waiting *w;

	while ((w = b->queue) != NULL && may_take(b, w->type)) {
		b->queue = w->next;
		if (b->queue == NULL)
			b->queue_tail = &b->queue;
		b->queue_bytes -= w->n + sizeof(*w);
		take_ordered(b, w->type, w->body, w->n);
		free(w);
	}
}

void worker_queue_free(struct broker *b)
{
	while (b->queue != NULL) {
		struct waiting *next = b->queue->next;

		free(b->queue);
		b->queue = next;
	}
	b->queue_tail = &b->queue;
}

static void ordered(struct broker *b, uint8_t type, const uint8_t *body, size_t n)
{
	struct waiting *w;

	if (b->queue == NULL && may_take(b, type)) {
		take_ordered(b, type, body, n);
		return;
	}
	w = n <= QUEUE_BYTES_MAX && b->queue_bytes + n + sizeof(*w) <= QUEUE_BYTES_MAX ? malloc(sizeof(*w) + n) : NULL;
	if (w == NULL) {
		protocol(b, "more frames than its credit allows");
		return;
	}
	*w = (struct waiting){ .type = type, .n = n };
	if (n > 0)
		memcpy(w->body, body, n);
	*b->queue_tail = w;
	b->queue_tail = &w->next;
	b->queue_bytes += n + sizeof(*w);
}

/* --- frames ------------------------------------------------------------------------------------------------------------------ */

static void take_hello(struct broker *b, const uint8_t *body, size_t n)
{
	struct err e;

	if (b->state != RUN_PROBE || b->seen.hello)
		protocol(b, "a second hello");
	else if (guest_hello_decode(body, n, &b->hello, &e) < 0)
		protocol(b, e.text);
	else if (sodium_memcmp(b->hello.nonce, b->nonce, sizeof(b->nonce)) != 0)
		protocol(b, "the hello does not answer this probe");
	else if (b->hello.protocol != GUEST_PROTOCOL)
		session_end(b, ERRCODE_VM_START_FAILED, "The guest image speaks protocol %u, this host %d: build the image again.",
				b->hello.protocol, GUEST_PROTOCOL);
	else
		b->seen.hello = true;
}

static void take_ack(struct broker *b, const uint8_t *body, size_t n)
{
	struct err e;

	if (b->state != RUN_SETUP || b->seen.setup_acked)
		protocol(b, "an acknowledgement nobody waits for");
	else if (guest_setup_ack_decode(body, n, &b->ack, &e) < 0)
		protocol(b, e.text);
	else if (!b->files.over)
		protocol(b, "setup acknowledged before it was whole");
	else if (!b->ack.reseeded || !b->ack.clock_set)
		session_end(b, ERRCODE_WORKER_FAILED, "The guest could not %s.",
				b->ack.reseeded ? "set its clock" : "take fresh entropy");
	else
		b->seen.setup_acked = true;
}

/* The VM says that it goes, or the monitor is cut: keeper, who sees the wait status, may know better within the grace. */
static void vm_seems_gone(struct broker *b, const char *text)
{
	if (b->state == RUN_NEW || b->state >= RUN_DESTROY || b->deadlines[DL_GRACE] != 0)
		return;
	if (!text_copy(b->vmm_text, sizeof(b->vmm_text), text))
		b->vmm_text[0] = '\0';
	broker_deadline(b, DL_GRACE, clock_boot_ns() + GRACE_MS * NS_PER_MS);
}

static void vmm_event(struct broker *b, const uint8_t *body, size_t n)
{
	char name[513], text[600];

	guest_text(body, n, name);
	if (!text_fmt(text, sizeof(text), "The VM reported %.200s.", name))
		text[0] = '\0';
	log_info("vmm event run=%s event=%.200s", b->a.run_id, name);
	vm_seems_gone(b, text);
}

static void console(struct broker *b, const uint8_t *body, size_t n)
{
	struct buf safe = BUF_INIT(3500);

	if (n > 0 && text_safe(&safe, (const char *)body, n < 800 ? n : 800, false) && buf_cstr(&safe) != NULL)
		log_info("vm console run=%s text=\"%s\"", b->a.run_id, buf_cstr(&safe));
	buf_free(&safe);
}

void worker_frame(struct broker *b, uint8_t type, const uint8_t *body, size_t n)
{
	struct wire_reader r;

	if (b->state >= RUN_DESTROY && type != RF_CB_EVENT)
		return;
	wire_read_init(&r, body, n);
	switch (type) {
	case RF_CB_VMM_UP: b->seen.vmm_up = true; break;
	case RF_CB_HELLO: take_hello(b, body, n); break;
	case RF_CB_SETUP_ACK: take_ack(b, body, n); break;
	case RF_CB_CALL:
	case RF_CB_EVENT:
	case RF_CB_RESULT:
		if (b->state == RUN_WORK || (b->state == RUN_DESTROY && b->worker_t_ms >= 0))
			ordered(b, type, body, n);
		else if (b->state < RUN_DESTROY)
			protocol(b, "it works before it was started");
		break;
	case RF_CB_FATAL:
	case RF_CB_PROTOCOL: ordered(b, type, body, n); break;
	case RF_CB_VMM_EVENT: vmm_event(b, body, n); break;
	case RF_CB_FILE_CREDIT:
		if (b->state == RUN_SETUP)
			files_credit(b, wire_u32(&r));
		break;
	case RF_CB_CONSOLE: console(b, body, n); break;
	case RF_CB_GUEST_OPEN: break; /* the hello follows */
	default: session_end(b, ERRCODE_CHANNEL_LOST, "The channel sent a frame of unknown type %u.", type); break;
	}
}

void worker_channel_end(struct broker *b, const struct err *e)
{
	b->channel_gone = true;
	if (e != NULL)
		log_warn("channel broke its framing run=%s error=%s", b->a.run_id, e->text);
	/* A channel whose VM died says so before it ends; one that ends without a word died by itself, and the VM's own end (the
	 * agent powers off when its port closes) is only the consequence. */
	if (b->deadlines[DL_GRACE] == 0)
		session_end(b, ERRCODE_CHANNEL_LOST, "The channel process ended.");
}

/* --- hand-over --------------------------------------------------------------------------------------------------------------- */

static int64_t compute_ms(void *arg)
{
	return broker_compute_ms(arg);
}

static int64_t time_left_ms(void *arg)
{
	const struct broker *b = arg;

	if (b->deadlines[DL_TIMEOUT] == 0)
		return INT64_MAX;
	return (b->deadlines[DL_TIMEOUT] - clock_boot_ns()) / NS_PER_MS;
}

static bool meter_moved(void *arg)
{
	return broker_meter_moved(arg);
}

static int send_setup(struct broker *b, struct err *e)
{
	struct buf body = BUF_INIT(GUEST_SETUP_MAX);
	struct guest_setup setup = { .real_ns = clock_real_ms() * NS_PER_MS,
		.shell = b->a.shell,
		.max_model_calls = b->a.max_model_calls,
		.tool_timeout_ms = TOOL_TIMEOUT_MS,
		.prompt = b->a.prompt,
		.file_count = b->a.file_count };
	int rc = -1;

	setup.files = calloc(b->a.file_count + 1, sizeof(*setup.files));
	if (setup.files == NULL)
		return err_set(e, ERR_NOMEM, "no memory for the setup");
	for (uint32_t i = 0; i < b->a.file_count; i++) {
		setup.files[i].size = b->a.files[i].size;
		if (!text_copy(setup.files[i].path, sizeof(setup.files[i].path), b->a.files[i].path)) {
			free(setup.files);
			return err_set(e, ERR_LIMIT, "the path of file %u is too long", i + 1);
		}
	}
	random_bytes(setup.entropy, sizeof(setup.entropy));
	guest_setup_encode(&setup, &body);
	if (body.failed)
		(void)err_set(e, ERR_LIMIT, "the setup is over %d bytes", GUEST_SETUP_MAX);
	else if (!framed_send(b->channel, RF_CH_SETUP, body.data, body.len))
		(void)err_set(e, ERR_UNAVAILABLE, "the channel does not take frames");
	else
		rc = 0;
	if (body.data != NULL)
		sodium_memzero(body.data, body.len); /* the guest's entropy is the guest's */
	sodium_memzero(setup.entropy, sizeof(setup.entropy));
	free(setup.files);
	buf_free(&body);
	return rc;
}

int worker_setup(struct broker *b, struct err *e)
{
	struct run_secrets secrets;
	struct model_options opt = { .base = b->base,
		.curl = b->curl,
		.a = &b->a,
		.key = secrets.model_key,
		.meter = &b->meter,
		.compute_ms = compute_ms,
		.time_left_ms = time_left_ms,
		.meter_moved = meter_moved,
		.on_reply = on_reply,
		.on_failed = on_failed,
		.arg = b };

	if (run_secrets_decode(b->ra.secrets, b->ra.secrets_len, &secrets, e) < 0)
		return err_wrap(e, "secrets");
	b->model = model_new(&opt);
	sodium_memzero(&secrets, sizeof(secrets));
	if (b->ra.secrets_len > 0)
		sodium_memzero(b->ra.secrets, b->ra.secrets_len);
	if (b->model == NULL)
		return err_set(e, ERR_NOMEM, "no memory for model calls");
	if (send_setup(b, e) < 0)
		return -1;
	return files_start(b, e);
}
