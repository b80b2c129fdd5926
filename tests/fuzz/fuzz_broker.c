/*
 * A whole broker under hostile neighbours: a channel that the guest took over, a provider that says anything, a keeper and a link
 * that answer late or wrongly. Everything around it is played: frames, HTTP, clocks. The first byte says what run it is; then
 * operations, each a byte, a length of two and so many bytes (see `operation`).
 *
 * Whatever happens: spent and held stay within the cap, in the meter and in the spool; every event is one that controld takes; what
 * is said to controld at the end is what it takes, once, with the last event's number; the provider's key is in nothing that
 * leaves.
 */
/* link: noded_broker noded_core ephproto_link ephproto EPH::event EPH::sodium */
/* sources: controld/dispatch/check.c */
/* within: noded */
/* reads: noded/broker/broker.c noded/broker/session.c noded/broker/worker.c noded/broker/files.c noded/broker/run.c */
/* reads: noded/broker/events.c noded/broker/model.c noded/broker/model_send.c noded/broker/model_charge.c */
/* reads: noded/broker/guest_json.c noded/broker/meter.c noded/broker/from_keeper.c */
/* reached: 83 % of lines, 67 % of branches; the rest is the start of the process, memory, a full disk, a real connection */
#include "noded/broker/broker.c" /* NOLINT(bugprone-suspicious-include): its frame handlers are called here */

#include "controld/dispatch/check.h"
#include "fuzz.h"

#include <dlfcn.h>
#include <sys/mman.h>

#define RUN "run_0123456789abcdef0123456789abcdef"
#define KEY "sk-key-of-the-operator"
#define FILE_TEXT "abc"

static struct broker *broker;
static int64_t now_ns;

/* --- played: clocks
 * ------------------------------------------------------------------------------------------------------------------ */

int64_t clock_boot_ns(void)
{
	return now_ns;
}

int64_t clock_boot_ms(void)
{
	return now_ns / NS_PER_MS;
}

int64_t clock_mono_ns(void)
{
	return now_ns;
}

int64_t clock_real_ms(void)
{
	return INT64_C(1700000000000) + now_ns / NS_PER_MS;
}

/* Timers of the model are due at the next turn: pauses are not waited for. */
int event_add(struct event *ev, const struct timeval *tv)
{
	static int (*real)(struct event *, const struct timeval *);

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "event_add");
	return real(ev, tv ? &(struct timeval){ 0, 0 } : NULL);
}

/* --- played: frames
 * ------------------------------------------------------------------------------------------------------------------ */

struct framed {
	bool to_keeper;
	unsigned ends, files;
	struct run_end end;
	bool ended, refused, start_asked;
	uint64_t said; /* last seq that link was told */
};
static struct framed keeper_side, channel_side;
static bool key_known; /* somebody but the provider said it: then it may come back */

static void no_key_in(const void *p, size_t n)
{
	must(n == 0 || key_known || memmem(p, n, KEY, strlen(KEY)) == NULL);
}

static void said_to_link(struct framed *f, uint8_t type, const uint8_t *body, size_t n)
{
	struct link_finish finish = { .run_id = RUN };
	struct wire_reader r;
	struct err e;

	must(!f->ended && !f->refused);
	wire_read_init(&r, body, n);
	switch (type) {
	case RF_BL_START:
		must(n == 0 && !f->start_asked);
		f->start_asked = true;
		break;
	case RF_BL_EVENTS: must(wire_u64(&r) >= f->said); break;
	case RF_BL_FINISH:
		must(f->start_asked && run_end_decode(body, n, &finish.end, &e) == 0 && check_finish(&finish, &e) == 0);
		f->end = finish.end;
		f->ended = true;
		run_end_free(&finish.end);
		break;
	case RF_BL_REFUSE: f->refused = true; break;
	case RF_BL_BLOB: must(n == SHA256_LEN + 8); break;
	default: must(false);
	}
}

bool framed_send(struct framed *f, uint8_t type, const void *body, size_t n)
{
	struct guest_setup setup;
	struct model_reply reply;
	struct err e;

	must(n <= ROLE_FRAME_MAX);
	no_key_in(body, n);
	if (f->to_keeper) {
		must(type >= RF_KEEPER_DESTROY && type <= RF_KEEPER_STATS && f->ends == 0);
		f->ends += type == RF_KEEPER_END;
		if (type == RF_KEEPER_TO_LINK)
			said_to_link(f, *(const uint8_t *)body, (const uint8_t *)body + 1, n - 1);
		return true;
	}
	must(type >= RF_CH_PROBE && type <= RF_CH_STOP);
	if (type == RF_CH_SETUP) {
		must(keeper_side.start_asked && guest_setup_decode(body, n, &setup, &e) == 0);
		guest_setup_free(&setup);
	} else if (type == RF_CH_REPLY) {
		must(model_reply_decode((const uint8_t *)body + 5, n - 5, &reply, &e) == 0);
		model_reply_free(&reply);
	}
	return true;
}

bool framed_send_fds(struct framed *f, uint8_t type, const void *body, size_t n, const int *fds, size_t fd_count)
{
	(void)fds;
	must(fd_count == 0);
	return framed_send(f, type, body, n);
}

int framed_new(struct event_base *base, const struct framed_options *opt, struct framed **out, struct err *e)
{
	(void)base;
	(void)opt;
	(void)out;
	return err_set(e, ERR_INTERNAL, "not used here");
}

size_t framed_queued(const struct framed *f)
{
	(void)f;
	return 0;
}

void framed_pause(struct framed *f, bool paused)
{
	(void)f;
	(void)paused;
}

void framed_flush(struct framed *f, int ms)
{
	(void)f;
	(void)ms;
}

void framed_free(struct framed *f)
{
	(void)f;
}

/* --- played: the provider
 * -------------------------------------------------------------------------------------------------------------- */

struct curl_call {
	struct curl_request req;
	int status;
};
static struct curl_call *call; /* under way; one at a time */

static void call_drop(void)
{
	free(call);
	call = NULL;
}

int curlev_new(struct event_base *base, int max_connections, struct curlev **out, struct err *e)
{
	(void)base;
	(void)max_connections;
	(void)e;
	*out = NULL;
	return 0;
}

void curlev_free(struct curlev *c)
{
	(void)c;
	must(call == NULL);
}

int curlev_start(struct curlev *c, const struct curl_request *req, struct curl_call **out, struct err *e)
{
	struct spool_tail t;
	int64_t spent, held;

	(void)c;
	(void)e;
	must(call == NULL && req->body_len > 0);
	no_key_in(req->body, req->body_len);
	/* What the call may cost is on the host before its first byte leaves. */
	spool_tail(broker->spool, &t);
	broker_meter(broker, &spent, &held);
	must(held <= t.held && t.spent + t.held <= broker->meter.cap);
	call = calloc(1, sizeof(*call));
	must(call);
	call->req = *req;
	*out = call;
	return 0;
}

void curl_call_cancel(struct curl_call *c)
{
	must(c && c == call);
	call_drop();
}

void curl_call_pause(struct curl_call *c, bool paused)
{
	(void)c;
	(void)paused;
}

static void provider_done(const struct err *e)
{
	struct curl_call c;

	if (!call)
		return;
	c = *call;
	call_drop();
	c.req.on_done(c.req.arg, c.status, e);
}

static void provider(uint8_t what, const uint8_t *p, size_t n)
{
	struct err e;

	if (!call)
		return;
	switch (what) {
	case 3:
		if (call->status == 0 && n >= 2) {
			call->status = 200 + (p[0] | p[1] << 8) % 400;
			call->req.on_head(call->req.arg, call->status);
		}
		break;
	case 4:
		if (call->status && call->req.on_header)
			call->req.on_header(call->req.arg, "Retry-After", 11, (const char *)p, n);
		break;
	case 5:
		if (call->status && !call->req.on_data(call->req.arg, p, n) && call) {
			err_set(&e, ERR_PROTOCOL, "the receiver ended it");
			provider_done(&e);
		}
		break;
	default:
		err_set(&e, n > 0 && p[0] & 2 ? ERR_TIMEOUT : ERR_UNAVAILABLE, "connection reset by %s",
				n > 0 && p[0] & 4 ? KEY : "peer");
		provider_done(n > 0 && p[0] & 1 ? &e : NULL);
	}
}

/* --- the run
 * --------------------------------------------------------------------------------------------------------------------------- */

/* Of the spool file: as much as the last run wrote. */
static size_t dirty = 1 << 20;

static int fresh_spool(void)
{
	static const struct spool_head head = { .run_id = RUN,
		.attempt = 1,
		.queued_at_ms = INT64_C(1700000000000),
		.age_ms = 100,
		.first_seq = 3,
		.cap_micros = 40000 };
	static const uint8_t zeros[1 << 20];
	static int fd = -1;
	struct err e;

	if (fd < 0)
		fd = memfd_create("spool", MFD_CLOEXEC);
	must(fd >= 0 && pwrite(fd, zeros, dirty, 0) == (ssize_t)dirty && spool_format(fd, &head, &e) == 0);
	return dup(fd);
}

static void on_keeper_frame(struct broker *b, uint8_t type, const uint8_t *body, size_t n)
{
	keeper_options(b, -1).on_frame(b, type, body, n, NULL, 0);
}

static void give_assignment(struct broker *b, uint8_t kind)
{
	struct assign_file file = { .path = "d/a.txt", .size = strlen(FILE_TEXT) };
	struct assignment a = { .run_id = RUN,
		.attempt = 1,
		.queued_at_ms = INT64_C(1700000000000),
		.age_ms = 100,
		.next_seq = 3,
		.timeout_s = 60,
		.max_model_calls = kind & 64 ? 1 : 3,
		.memory_mib = 512,
		.vcpus = 1,
		.shell = kind & 1,
		.cap_micros = kind & 2 ? 40000 : 3000,
		.prompt = (char[]){ "do it" },
		.files = &file,
		.file_count = kind & 4 ? 1 : 0,
		.price = { .run_fee = kind & 8 ? 100 : 0,
				.compute = kind & 16 ? 50000 : 0,
				.input = 250000,
				.cached_input = 25000,
				.output = kind & 32 ? 2000000 : 0 },
		.model = { .id = "p/m",
				.upstream = "m",
				.base_url = "http://127.0.0.1/v1",
				.limit_param = LIMIT_MAX_COMPLETION_TOKENS,
				.max_output_tokens = 4096,
				.min_output_tokens = 16,
				.tokens_per_byte_milli = 1000,
				.overhead_tokens = 100,
				.call_timeout_ms = 30000 } };
	struct run_secrets secrets = { .model_key = KEY };
	struct role_broker_assign ra = { .received_boot_ns = now_ns,
		.lease_deadline_boot_ns = now_ns + 55 * NS_PER_S,
		.boot_deadline_ms = 5000,
		.image = "img",
		.vmm = "qemu",
		.isolation = "kvm",
		.jail = "full",
		.start_mode = "cold" };
	struct buf enc = BUF_INIT(65536), sec = BUF_INIT(1024), body = BUF_INIT(65536);
	const int spool = fresh_spool(); /* the broker's from here on */

	crypto_hash_sha256(file.sha256, (const uint8_t *)FILE_TEXT, strlen(FILE_TEXT));
	assignment_encode(&a, &enc);
	run_secrets_encode(&secrets, &sec);
	ra.assignment = enc.data;
	ra.assignment_len = (uint32_t)enc.len;
	ra.secrets = sec.data;
	ra.secrets_len = (uint32_t)sec.len;
	role_broker_assign_encode(&ra, &body);
	keeper_options(b, -1).on_frame(b, RF_BROKER_ASSIGN, body.data, body.len, &spool, 1);
	must(b->seen.assigned);
	buf_free(&enc);
	buf_free(&sec);
	buf_free(&body);
}

static void channel_frame(struct broker *b, uint8_t type, const struct buf *body)
{
	on_channel_frame(b, type, body->data, body->len, NULL, 0);
}

static void keeper_frame(struct broker *b, uint8_t type, const struct buf *body)
{
	on_keeper_frame(b, type, body->data, body->len);
}

static void model_call(struct broker *b, struct buf *body)
{
	struct model_message m = { .role = ROLE_USER, .content = (char[]){ "hi" }, .tool_call_id = (char[]){ "" } };
	struct model_call c = { .call = b->calls + 1, .tools = 1, .messages = &m, .message_count = 1 };

	wire_put_u32(body, 1);
	wire_put_u8(body, CALL_MODEL);
	model_call_encode(&c, body);
	channel_frame(b, RF_CB_CALL, body);
}

/* What a good neighbour would say now, so that depth costs the fuzzer little. */
static void good_step(struct broker *b)
{
	struct guest_hello hello = { .protocol = GUEST_PROTOCOL, .kernel = "6.1", .agent = "0.1" };
	struct guest_setup_ack ack = { .reseeded = true, .clock_set = true, .workdir = "/w", .boot_id = "b" };
	struct buf body = BUF_INIT(65536);

	memcpy(hello.nonce, b->nonce, sizeof(hello.nonce));
	switch (b->state) {
	case RUN_NEW:
	case RUN_BOOT: channel_frame(b, RF_CB_VMM_UP, &body); break;
	case RUN_PROBE:
		guest_hello_encode(&hello, &body);
		channel_frame(b, RF_CB_HELLO, &body);
		break;
	case RUN_START:
		buf_add(&body, (uint8_t[]){ RF_LB_STARTED, FENCE_APPLIED }, 2);
		keeper_frame(b, RF_BROKER_FROM_LINK, &body);
		break;
	case RUN_SETUP:
		if (b->files.asked) {
			wire_put_u8(&body, RF_LB_BLOB);
			wire_put_u64(&body, strlen(FILE_TEXT));
			wire_put_bytes(&body, FILE_TEXT, strlen(FILE_TEXT));
			keeper_frame(b, RF_BROKER_FROM_LINK, &body);
		} else {
			guest_setup_ack_encode(&ack, &body);
			channel_frame(b, RF_CB_SETUP_ACK, &body);
		}
		break;
	case RUN_WORK: model_call(b, &body); break;
	case RUN_DESTROY:
		if (b->seen.gone) { /* only START's answer is missing */
			buf_add(&body, (uint8_t[]){ RF_LB_STARTED, FENCE_APPLIED }, 2);
			keeper_frame(b, RF_BROKER_FROM_LINK, &body);
			break;
		}
		wire_put_i64(&body, 3);
		keeper_frame(b, RF_BROKER_GONE, &body);
		break;
	case RUN_SIGN:
		must(buf_reserve(&body, 64));
		memset(body.data, 1, 64);
		buf_commit(&body, 64);
		keeper_frame(b, RF_BROKER_SIGNATURE, &body);
		break;
	case RUN_FINISH:
		buf_add(&body, (uint8_t[]){ RF_LB_FINISHED, FENCE_APPLIED }, 2);
		keeper_frame(b, RF_BROKER_FROM_LINK, &body);
		break;
	case RUN_READY: /* never: every run comes before its VM is up */
	case RUN_OVER:
	case RUN_STATES: break;
	}
	buf_free(&body);
}

static void operation(struct broker *b, uint8_t what, const uint8_t *p, size_t n)
{
	static const uint8_t others[] = { RF_BROKER_LEASE, RF_BROKER_VMM_EXITED, RF_BROKER_GONE, RF_BROKER_SIGNATURE,
		RF_BROKER_ASSIGN };

	key_known = key_known || (what < 3 && n > 0 && memmem(p, n, KEY, strlen(KEY)));
	switch (what) {
	case 0: /* from the channel: type, body */
		if (n > 0)
			on_channel_frame(b, (uint8_t)(RF_CB_VMM_UP + p[0] % 12), p + 1, n - 1, NULL, 0);
		break;
	case 1: on_keeper_frame(b, RF_BROKER_FROM_LINK, p, n); break;
	case 2:
		if (n > 0)
			on_keeper_frame(b, others[p[0] % sizeof(others)], p + 1, n - 1);
		break;
	case 3: /* status, 4: Retry-After, 5: bytes, 6: the end of the provider's answer */
	case 4:
	case 5:
	case 6: provider(what, p, n); break;
	case 7: /* time passes: milliseconds */
		now_ns += (int64_t)(n > 2 ? p[0] | p[1] << 8 | (p[2] & 3) << 16 : n > 0 ? p[0] : 1) * NS_PER_MS;
		check_deadlines(b);
		break;
	case 8: on_channel_end(b, NULL); break;
	case 9: on_tick(-1, 0, b); break;
	default: good_step(b); break;
	}
}

static void turn(struct broker *b)
{
	struct spool_tail t;
	int64_t spent, held;

	event_base_loop(b->base, EVLOOP_NONBLOCK);
	if (!b->seen.assigned)
		return;
	broker_meter(b, &spent, &held);
	must(spent >= 0 && held >= 0 && spent <= b->meter.cap);
	spool_tail(b->spool, &t);
	must(t.spent >= 0 && t.held >= 0 && t.spent + t.held <= b->meter.cap);
}

/* Every event is one that controld takes; the report names the last of them. */
static void check_record(struct broker *b)
{
	struct spool_record rec;
	enum event_type type;
	struct spool_tail t;
	int64_t t_ms, last = 0;
	struct err e;

	spool_tail(b->spool, &t);
	for (uint64_t seq = spool_head(b->spool)->first_seq; seq < t.next_seq; seq++) {
		must(spool_read(b->spool, seq, &rec, &e) == 1);
		must(event_check(rec.bytes, rec.len, RUN, seq, &type, &t_ms, &e) == 0 && type == rec.type && t_ms >= last);
		no_key_in(rec.bytes, rec.len);
		last = t_ms;
	}
	dirty = SPOOL_HEAD_BYTES + 2 * SPOOL_SLOT_BYTES + t.bytes +
		(t.next_seq - spool_head(b->spool)->first_seq) * SPOOL_RECORD_HEAD + 256;
	must(dirty <= 1 << 20);
	if (keeper_side.ended) {
		must(keeper_side.end.last_seq == t.next_seq - 1 && t.last_type == EV_MICROVM_DESTROYED);
		must(keeper_side.end.cost.total <= b->meter.cap && keeper_side.end.cost.total >= 0);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	struct broker b = { .worker_t_ms = -1, .timer_fd = -1, .kill_fd = -1, .keeper = &keeper_side, .channel = &channel_side };
	struct err e;

	if (n < 1 || n > 8192)
		return 0;
	log_init("fuzz", LOG_LEVEL_ERROR + 1, false);
	must(sodium_init() >= 0);
	now_ns = NS_PER_S;
	keeper_side = (struct framed){ .to_keeper = true };
	channel_side = (struct framed){ .to_keeper = false };
	broker = &b;
	key_known = false;
	b.queue_tail = &b.queue;
	must(open_loop(&b, &e) == 0);
	event_del(b.tick); /* op 9 */
	give_assignment(&b, p[0]);
	for (size_t at = 1; at + 3 <= n && !b.leaving;) {
		size_t len = (size_t)p[at + 1] | (size_t)p[at + 2] << 8;

		if (len > n - at - 3)
			len = n - at - 3;
		operation(&b, p[at] % 11, p + at + 3, len);
		turn(&b);
		at += 3 + len;
	}
	/* The rest goes well, or its deadlines come: every run ends. Keeper grants no lease for ever, as an operation may have
	 * done. */
	on_keeper_frame(&b, RF_BROKER_LEASE, (const uint8_t[8]){ [4] = 1 }, 8);
	for (int i = 0; i < 40 && !b.leaving; i++) {
		if (call)
			provider_done(err_set(&e, ERR_UNAVAILABLE, "reset") ? &e : NULL);
		if (b.state >= RUN_DESTROY)
			good_step(&b);
		now_ns += 10 * NS_PER_S;
		check_deadlines(&b);
		turn(&b);
	}
	must(b.leaving && keeper_side.ends == 1);
	check_record(&b);
	close_all(&b);
	must(call == NULL);
	return 0;
}
