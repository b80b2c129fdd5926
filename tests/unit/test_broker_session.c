/* link: ephproto ephproto_link ephloop_event ephloop_curl EPH::sodium EPH::event EPH::curl */
/* sources: noded/spool.c noded/broker/broker.c noded/broker/session.c noded/broker/worker.c noded/broker/files.c noded/broker/run.c
 * noded/broker/events.c noded/broker/guest_json.c noded/broker/meter.c noded/broker/model.c noded/broker/model_request.c
 * noded/broker/model_stream.c */
/*
 * The broker process for real: this test plays keeper, link, channel and guest over its socketpairs, and a provider over HTTP on
 * loopback in a process of its own. Each way a run can end, what it costs, what stands in the spool.
 */
#include "noded/roles.h"
#include "noded/spool.h"

#include "common/clock.h"
#include "common/json.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/errcode.h"
#include "proto/link.h"
#include "proto/role.h"
#include "proto/tools.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define RUN "run_0123456789abcdef0123456789abcdef"
#define WAIT_MS 15000
#define ANSWERS_MAX 8

/* --- the provider ------------------------------------------------------------------------------------------------------------ */

#define SSE_HEAD "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
#define CHUNK(text) "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" text "\"},\"finish_reason\":null}]}\n\n"
#define STOP "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
#define USAGE(in, cached, out)                                                                                                     \
	"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":" #in ",\"completion_tokens\":" #out                                   \
	",\"prompt_tokens_details\":{\"cached_tokens\":" #cached "}}}\n\n"
#define DONE "data: [DONE]\n\n"
#define HELLO_REPLY SSE_HEAD CHUNK("hel") CHUNK("lo") STOP USAGE(20, 5, 3) DONE

struct shared {
	int requests;
	int64_t held[ANSWERS_MAX], spent[ANSWERS_MAX]; /* meter in the spool when the request had come */
	char request[ANSWERS_MAX][16384];
};

struct provider {
	int port;
	pid_t pid;
	struct shared *shared;
};

static void serve_one(int fd, struct shared *shared, const char *answer, int spool_fd)
{
	char *in = shared->request[shared->requests % ANSWERS_MAX];
	size_t have = 0, want = SIZE_MAX;
	struct spool *spool;
	struct err e;

	while (have < want && have < sizeof(shared->request[0]) - 1) {
		ssize_t n = read(fd, in + have, sizeof(shared->request[0]) - 1 - have);
		char *head, *length;

		if (n <= 0)
			break;
		have += (size_t)n;
		in[have] = '\0';
		head = strstr(in, "\r\n\r\n");
		length = head != NULL ? strcasestr(in, "content-length: ") : NULL;
		if (length != NULL)
			want = (size_t)(head - in) + 4 + strtoul(length + 16, NULL, 10);
	}
	if (spool_open(dup(spool_fd), false, &spool, &e) == 0) {
		struct spool_tail t;

		spool_tail(spool, &t);
		shared->held[shared->requests % ANSWERS_MAX] = t.held;
		shared->spent[shared->requests % ANSWERS_MAX] = t.spent;
		spool_close(spool);
	}
	shared->requests++;
	if (strcmp(answer, "hang") == 0)
		pause();
	for (size_t sent = 0; sent < strlen(answer);) {
		ssize_t n = write(fd, answer + sent, strlen(answer) - sent);

		if (n <= 0)
			break;
		sent += (size_t)n;
	}
	close(fd);
}

/* Answers the n-th request with the n-th answer; after the last one it hangs up. */
static struct provider provider_start(const char *const *answers, int spool_fd)
{
	struct provider p = { .shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
					      0) };
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(a);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_true(p.shared != MAP_FAILED && fd >= 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	assert_int_equal(listen(fd, 16), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
	p.port = ntohs(a.sin_port);
	p.pid = fork();
	assert_true(p.pid >= 0);
	if (p.pid == 0) {
		(void)signal(SIGPIPE, SIG_IGN);
		for (int i = 0; answers[i] != NULL; i++) {
			int c = accept(fd, NULL, NULL);

			if (c >= 0)
				serve_one(c, p.shared, answers[i], spool_fd);
		}
		_exit(0);
	}
	close(fd);
	return p;
}

static void provider_stop(struct provider *p)
{
	kill(p->pid, SIGKILL);
	waitpid(p->pid, NULL, 0);
	munmap(p->shared, sizeof(struct shared));
}

/* --- frames ------------------------------------------------------------------------------------------------------------------ */

struct frame {
	uint8_t type;
	uint8_t *body;
	size_t n;
};

static void put(int fd, uint8_t type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX + 16);
	size_t sent = 0;

	wire_put_u32(&b, (uint32_t)n + 1);
	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	while (sent < b.len) {
		ssize_t w = send(fd, b.data + sent, b.len - sent, MSG_NOSIGNAL);

		assert_true(w > 0);
		sent += (size_t)w;
	}
	buf_free(&b);
}

static bool read_exact(int fd, void *p, size_t n, int64_t until_ms)
{
	uint8_t *out = p;

	while (n > 0) {
		struct pollfd pfd = { .fd = fd, .events = POLLIN };
		int64_t left = until_ms - clock_mono_ns() / 1000000;
		ssize_t got;

		if (left <= 0 || poll(&pfd, 1, (int)left) <= 0)
			return false;
		got = read(fd, out, n);
		if (got <= 0)
			return false;
		out += got;
		n -= (size_t)got;
	}
	return true;
}

static bool get(int fd, struct frame *f, int64_t until_ms)
{
	uint8_t head[5];

	f->body = NULL;
	if (!read_exact(fd, head, 5, until_ms))
		return false;
	f->n = ((size_t)head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 | (size_t)head[3] << 24) - 1;
	f->type = head[4];
	f->body = malloc(f->n + 1);
	return read_exact(fd, f->body, f->n, until_ms);
}

/* --- a run ------------------------------------------------------------------------------------------------------------------- */

struct rig {
	int keeper, channel, spool_fd, kill_fd;
	pid_t pid;
	struct provider provider;
	struct assignment a;
	struct assign_file files[2];
	int64_t lease_ms, boot_ms;
	uint32_t next_call;
	struct run_end end;
	bool ended;
	uint8_t refuse_failed;
	uint32_t refuse_code;
	char refuse_reason[513];
	int64_t credit;
};

static void rig_defaults(struct rig *r)
{
	*r = (struct rig){ .lease_ms = 60000, .boot_ms = 10000, .next_call = 1 };
	r->a = (struct assignment){ .run_id = RUN,
		.attempt = 1,
		.queued_at_ms = 1700000000000,
		.age_ms = 700,
		.next_seq = 3,
		.timeout_s = 60,
		.max_model_calls = 5,
		.memory_mib = 512,
		.vcpus = 1,
		.shell = true,
		.cap_micros = 40000,
		.prompt = (char *)(uintptr_t) "do it",
		.price = { .run_fee = 10, .input = 3000000, .cached_input = 300000, .output = 15000000, .compute = 200000 },
		.model = { .id = "test/model",
				.upstream = "model-1",
				.any_address = true,
				.limit_param = LIMIT_MAX_COMPLETION_TOKENS,
				.max_output_tokens = 1000,
				.min_output_tokens = 16,
				.tokens_per_byte_milli = 1000,
				.overhead_tokens = 20,
				.call_timeout_ms = 5000 } };
	memset(r->a.token, 3, TOKEN_LEN);
	memset(r->a.prev_hash, 8, EVENT_HASH_LEN);
}

static void broker_child(int keeper, int channel, int spool, int killer)
{
	int fds[4] = { keeper, channel, spool, killer };

	/* Out of the way first: the targets may be among the sources. */
	for (int i = 0; i < 4; i++)
		fds[i] = fcntl(fds[i], F_DUPFD, 100);
	for (int i = 0; i < 4; i++)
		dup2(fds[i], 3 + i);
	for (int i = 7; i < 200; i++)
		close(i);
	_exit(broker_main());
}

static void rig_start(struct rig *r, const char *const *answers)
{
	struct spool_head head = { .run_id = RUN,
		.attempt = 1,
		.queued_at_ms = r->a.queued_at_ms,
		.age_ms = r->a.age_ms,
		.first_seq = r->a.next_seq,
		.cap_micros = r->a.cap_micros };
	int keeper[2], channel[2];
	struct err e;

	memcpy(head.token, r->a.token, TOKEN_LEN);
	memcpy(head.prev_hash, r->a.prev_hash, EVENT_HASH_LEN);
	r->spool_fd = memfd_create("spool", 0);
	r->kill_fd = memfd_create("kill", 0);
	assert_int_equal(spool_format(r->spool_fd, &head, &e), 0);
	if (answers != NULL) {
		r->provider = provider_start(answers, r->spool_fd);
		assert_true(text_fmt(r->a.model.base_url, sizeof(r->a.model.base_url), "http://127.0.0.1:%d/v1", r->provider.port));
	}
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, keeper), 0);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, channel), 0);
	r->pid = fork();
	assert_true(r->pid >= 0);
	if (r->pid == 0)
		broker_child(keeper[1], channel[1], r->spool_fd, r->kill_fd);
	close(keeper[1]);
	close(channel[1]);
	r->keeper = keeper[0];
	r->channel = channel[0];
}

static void give_assignment(struct rig *r)
{
	struct buf a = BUF_INIT(ASSIGNMENT_MAX), s = BUF_INIT(4096), body = BUF_INIT(ROLE_FRAME_MAX);
	struct run_secrets secrets = { .model_key = "sk-canary-7f3a" };
	struct role_broker_assign ra = { .received_boot_ns = clock_boot_ns(),
		.boot_deadline_ms = r->boot_ms,
		.image = "debian-12",
		.vmm = "qemu 7.2",
		.isolation = "emulated",
		.jail = "full",
		.start_mode = "cold" };

	assignment_encode(&r->a, &a);
	run_secrets_encode(&secrets, &s);
	ra.assignment = a.data;
	ra.assignment_len = (uint32_t)a.len;
	ra.secrets = s.data;
	ra.secrets_len = (uint32_t)s.len;
	ra.lease_deadline_boot_ns = clock_boot_ns() + r->lease_ms * 1000000;
	role_broker_assign_encode(&ra, &body);
	assert_false(body.failed);
	put(r->keeper, RF_BROKER_ASSIGN, body.data, body.len);
	buf_free(&a);
	buf_free(&s);
	buf_free(&body);
}

static void note_inner(struct rig *r, const struct frame *f)
{
	struct wire_reader rd;
	struct err e;

	if (f->body[0] == RF_BL_FINISH) {
		assert_int_equal(run_end_decode(f->body + 1, f->n - 1, &r->end, &e), 0);
		r->ended = true;
	} else if (f->body[0] == RF_BL_REFUSE) {
		wire_read_init(&rd, f->body + 1, f->n - 1);
		r->refuse_failed = wire_bool(&rd);
		r->refuse_code = wire_u32(&rd);
		wire_str_fixed(&rd, r->refuse_reason, sizeof(r->refuse_reason));
		assert_int_equal(wire_end(&rd, "refuse", &e), 0);
	}
}

/* Waits for a frame of this type; `inner` for those relayed to link. Others pass. The caller frees body. */
static struct frame from_keeper_side(struct rig *r, uint8_t type, uint8_t inner)
{
	int64_t until = clock_mono_ns() / 1000000 + WAIT_MS;
	struct frame f;

	for (;;) {
		if (!get(r->keeper, &f, until))
			fail_msg("no frame %u/%u from the broker", type, inner);
		if (f.type == RF_KEEPER_TO_LINK)
			note_inner(r, &f);
		if (f.type == type && (type != RF_KEEPER_TO_LINK || f.body[0] == inner))
			return f;
		free(f.body);
	}
}

static struct frame from_channel_side(struct rig *r, uint8_t type)
{
	int64_t until = clock_mono_ns() / 1000000 + WAIT_MS;
	struct wire_reader rd;
	struct frame f;

	for (;;) {
		if (!get(r->channel, &f, until))
			fail_msg("no frame %u for the channel", type);
		if (f.type == RF_CH_EVENT_CREDIT) {
			wire_read_init(&rd, f.body, f.n);
			r->credit += wire_u32(&rd);
		}
		if (f.type == type)
			return f;
		free(f.body);
	}
}

static void to_link_side(struct rig *r, uint8_t type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);

	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	put(r->keeper, RF_BROKER_FROM_LINK, b.data, b.len);
	buf_free(&b);
}

static void hello(struct rig *r)
{
	struct frame probe = from_channel_side(r, RF_CH_PROBE);
	struct guest_hello h = { .protocol = GUEST_PROTOCOL, .kernel = "6.1.0-test", .agent = "0", .memory_mib = 512 };
	struct buf b = BUF_INIT(4096);

	assert_int_equal(probe.n, GUEST_NONCE_LEN);
	memcpy(h.nonce, probe.body, GUEST_NONCE_LEN);
	guest_hello_encode(&h, &b);
	put(r->channel, RF_CB_HELLO, b.data, b.len);
	buf_free(&b);
	free(probe.body);
}

static void ack(struct rig *r)
{
	struct guest_setup_ack m = {
		.reseeded = true, .clock_set = true, .workdir = "/tmp/ephemeral-run-abcdef/scratch", .boot_id = "1-2-3"
	};
	struct buf b = BUF_INIT(4096);

	guest_setup_ack_encode(&m, &b);
	put(r->channel, RF_CB_SETUP_ACK, b.data, b.len);
	buf_free(&b);
}

static void wait_frame(struct rig *r, uint8_t type, uint8_t inner)
{
	struct frame f = from_keeper_side(r, type, inner);

	free(f.body);
}

static void wait_channel(struct rig *r, uint8_t type)
{
	struct frame f = from_channel_side(r, type);

	free(f.body);
}

static void to_start(struct rig *r)
{
	give_assignment(r);
	put(r->channel, RF_CB_VMM_UP, NULL, 0);
	hello(r);
	wait_frame(r, RF_KEEPER_TO_LINK, RF_BL_START);
}

static void to_work(struct rig *r)
{
	uint8_t fence = FENCE_APPLIED;

	to_start(r);
	to_link_side(r, RF_LB_STARTED, &fence, 1);
	wait_channel(r, RF_CH_SETUP);
	wait_channel(r, RF_CH_FILES_END);
	ack(r);
}

static void call_model(struct rig *r, const char *text)
{
	struct model_message m[2] = {
		{ .role = ROLE_SYSTEM, .content = (char *)(uintptr_t) "be brief", .tool_call_id = (char *)(uintptr_t) "" },
		{ .role = ROLE_USER, .content = (char *)(uintptr_t)text, .tool_call_id = (char *)(uintptr_t) "" }
	};
	struct model_call c = { .call = r->next_call++, .tools = TOOL_BIT(TOOL_SHELL), .messages = m, .message_count = 2 };
	struct buf b = BUF_INIT(MODEL_CALL_BYTES_MAX);

	wire_put_u32(&b, 1);
	wire_put_u8(&b, CALL_MODEL);
	model_call_encode(&c, &b);
	assert_false(b.failed);
	put(r->channel, RF_CB_CALL, b.data, b.len);
	buf_free(&b);
}

static void reply_is(struct rig *r, const char *content)
{
	struct frame f = from_channel_side(r, RF_CH_REPLY);
	struct model_reply m;
	struct err e;

	assert_int_equal(f.body[4], CALL_MODEL);
	assert_int_equal(model_reply_decode(f.body + 5, f.n - 5, &m, &e), 0);
	assert_int_equal(m.status, MODEL_OK);
	assert_string_equal(m.content, content);
	model_reply_free(&m);
	free(f.body);
}

/* From the order to kill to the end of the process. */
static void to_the_end(struct rig *r)
{
	uint8_t gone[8] = { 12 }, fence = FENCE_APPLIED;
	uint8_t signature[64];
	int status;

	wait_frame(r, RF_KEEPER_DESTROY, 0);
	put(r->keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(r, RF_KEEPER_SIGN_DIGEST, 0);
	memset(signature, 0x5a, sizeof(signature));
	put(r->keeper, RF_BROKER_SIGNATURE, signature, sizeof(signature));
	wait_frame(r, RF_KEEPER_TO_LINK, RF_BL_FINISH);
	to_link_side(r, RF_LB_FINISHED, &fence, 1);
	wait_frame(r, RF_KEEPER_END, 0);
	assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	r->pid = 0;
	assert_memory_equal(r->end.receipt_signature, signature, sizeof(signature));
	assert_int_equal(r->end.cost.run_fee + r->end.cost.compute + r->end.cost.model + r->end.cost.web, r->end.cost.total);
	assert_true(r->end.cost.total <= r->a.cap_micros);
}

static void rig_stop(struct rig *r)
{
	if (r->pid > 0) {
		kill(r->pid, SIGKILL);
		waitpid(r->pid, NULL, 0);
	}
	if (r->provider.pid > 0)
		provider_stop(&r->provider);
	close(r->keeper);
	close(r->channel);
	close(r->spool_fd);
	close(r->kill_fd);
	run_end_free(&r->end);
}

static void finish_with(struct rig *r, const char *output)
{
	put(r->channel, RF_CB_RESULT, output, strlen(output));
	to_the_end(r);
}

/* --- what stands in the spool ------------------------------------------------------------------------------------------------- */

/* All events as "type type ..."; `find` gets the data of the last one of that type as a copy. */
static void read_events(struct rig *r, char types[4096], enum event_type find, char data[65536], int *count)
{
	struct spool *s;
	struct spool_tail t;
	struct spool_record rec;
	struct err e;
	size_t used = 0;
	enum event_type type;
	int64_t t_ms;

	assert_int_equal(spool_open(dup(r->spool_fd), false, &s, &e), 0);
	spool_tail(s, &t);
	types[0] = '\0';
	if (count != NULL)
		*count = 0;
	for (uint64_t seq = r->a.next_seq; seq < t.next_seq; seq++) {
		assert_int_equal(spool_read(s, seq, &rec, &e), 1);
		if (event_check(rec.bytes, rec.len, RUN, seq, &type, &t_ms, &e) != 0)
			fail_msg("event %d: %s", (int)seq, e.text);
		assert_int_equal(type, rec.type);
		assert_true(rec.spent + rec.held <= r->a.cap_micros);
		if (used < 4000)
			used += (size_t)snprintf(types + used, 4096 - used, "%s%s", used ? " " : "", event_type_text(type));
		if (type == find) {
			if (data != NULL)
				snprintf(data, 65536, "%.*s", (int)rec.len, (const char *)rec.bytes);
			if (count != NULL)
				++*count;
		}
	}
	if (r->ended) {
		assert_int_equal(r->end.last_seq, t.next_seq - 1);
		assert_memory_equal(r->end.last_hash, t.hash, EVENT_HASH_LEN);
	}
	spool_close(s);
}

static int64_t data_int(const char *event, const char *key)
{
	struct json *v;
	struct err e;
	int64_t n;

	assert_int_equal(json_parse(event, strlen(event), &v, &e), 0);
	n = json_get_int(json_get(v, "data"), key, -1);
	json_free(v);
	return n;
}

static bool data_text_is(const char *event, const char *key, const char *want)
{
	struct json *v;
	struct err e;
	const char *s;
	bool same;

	assert_int_equal(json_parse(event, strlen(event), &v, &e), 0);
	s = json_get_text(json_get(v, "data"), key);
	same = s != NULL && strcmp(s, want) == 0;
	json_free(v);
	return same;
}

/* --- tests ------------------------------------------------------------------------------------------------------------------- */

static void test_success(void **state)
{
	const char *answers[] = { HELLO_REPLY, HELLO_REPLY, NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "the answer");
	assert_int_equal(r.end.code, ERRCODE_NONE);
	assert_int_equal(r.end.output_len, 10);
	assert_int_equal(r.end.usage.model_calls, 2);
	assert_int_equal(r.end.usage.input_tokens, 40);
	assert_int_equal(r.end.usage.cached_input_tokens, 10);
	assert_int_equal(r.end.usage.output_tokens, 6);
	assert_int_equal(r.end.cost.model, (30 * 3000000 + 10 * 300000 + 6 * 15000000) / 1000000);
	assert_int_equal(r.end.cost.run_fee, 10);
	assert_true(r.end.worker_started_t_ms >= 700);
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_string_equal(types, "microvm.ready worker.started model.call model.call microvm.destroyed");
	assert_int_equal(data_int(call, "call"), 2);
	assert_int_equal(data_int(call, "attempts"), 1);
	assert_int_equal(data_int(call, "cost_micros"), 92); /* 15*3 + 5*.3 + 3*15, rounded up */
	/* The hold was on the host when the provider had the request, and the second one knew the tokens of the first. */
	assert_true(r.provider.shared->held[0] > 15000);
	assert_true(r.provider.shared->held[1] < r.provider.shared->held[0]);
	assert_non_null(strstr(r.provider.shared->request[0], "Authorization: Bearer sk-canary-7f3a\r\n"));
	assert_non_null(strstr(r.provider.shared->request[0], "X-Request-Id: " RUN "-1-1\r\n"));
	assert_non_null(strstr(r.provider.shared->request[1], "X-Request-Id: " RUN "-2-1\r\n"));
	assert_non_null(strstr(r.provider.shared->request[0], "\"max_completion_tokens\":1000}"));
	rig_stop(&r);
}

static void test_retries(void **state)
{
	const char *answers[] = { "HTTP/1.1 429 Too Many\r\nRetry-After: 0\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
		"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", HELLO_REPLY, NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_int_equal(data_int(call, "attempts"), 3);
	assert_int_equal(data_int(call, "cost_micros"), 92); /* no 2xx head costs nothing */
	assert_non_null(strstr(r.provider.shared->request[2], "X-Request-Id: " RUN "-1-3\r\n"));
	rig_stop(&r);
}

static void test_cut_stream(void **state)
{
	const char *answers[] = { SSE_HEAD CHUNK("hal"), HELLO_REPLY, NULL };
	char types[4096], call[65536];
	int64_t hold;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_int_equal(data_int(call, "attempts"), 2);
	hold = r.end.usage.unmetered_model_micros;
	assert_true(hold > 15000); /* 1000 output tokens at 15 and the request at 3 */
	assert_int_equal(data_int(call, "cost_micros"), hold + 92);
	assert_int_equal(r.end.usage.model_calls, 1);
	rig_stop(&r);
}

static void test_cut_twice(void **state)
{
	const char *answers[] = { SSE_HEAD CHUNK("hal"), SSE_HEAD CHUNK("hal"), HELLO_REPLY, NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.cap_micros = 100000;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_ERROR);
	assert_int_equal(r.provider.shared->requests, 2);
	rig_stop(&r);
}

static void test_provider_refuses(void **state)
{
	const char *answers[] = { "HTTP/1.1 401 No\r\nConnection: close\r\n\r\n{\"error\":{\"message\":\"bad \\u001b[31mkey\"}}",
		NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_ERROR);
	assert_non_null(strstr(r.end.detail, "401"));
	assert_non_null(strstr(r.end.detail, "bad \\x1b[31mkey"));
	assert_non_null(strstr(r.end.detail, "provider's key"));
	assert_int_equal(r.end.cost.model, 0);
	rig_stop(&r);
}

static void test_limit_param_learned(void **state)
{
	const char *answers[] = {
		"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n"
		"{\"error\":{\"message\":\"Unsupported parameter: use 'max_tokens' instead\",\"param\":\"max_completion_tokens\"}}",
		HELLO_REPLY, HELLO_REPLY, NULL
	};
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	call_model(&r, "ho");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	assert_non_null(strstr(r.provider.shared->request[1], "\"max_tokens\":1000}"));
	assert_non_null(strstr(r.provider.shared->request[2], "\"max_tokens\":1000}"));
	rig_stop(&r);
}

static void test_budget_in_a_call(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.cap_micros = 1000; /* the request alone is dearer */
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_BUDGET_EXCEEDED);
	assert_non_null(strstr(r.end.detail, "$0.001"));
	assert_int_equal(r.provider.shared->requests, 0); /* not a byte left */
	rig_stop(&r);
}

static void test_budget_by_compute(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.price.compute = 100000000; /* 100 micros a millisecond: 40000 is 0.4 s */
	rig_start(&r, NULL);
	to_work(&r);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_BUDGET_EXCEEDED);
	assert_true(r.end.cost.compute > 35000);
	assert_true(r.end.usage.compute_ms <= 400);
	rig_stop(&r);
}

static void test_usage_over_hold(void **state)
{
	const char *answers[] = { SSE_HEAD CHUNK("a") STOP USAGE(999999999, 0, 5) DONE, NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "a");
	finish_with(&r, "x");
	assert_int_equal(r.end.usage.input_tokens, 0);
	assert_true(r.end.usage.unmetered_model_micros > 15000);
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_int_equal(data_int(call, "cost_micros"), r.end.usage.unmetered_model_micros);
	rig_stop(&r);
}

static void test_call_timeout(void **state)
{
	const char *answers[] = { "hang", NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.model.call_timeout_ms = 400;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_ERROR);
	assert_non_null(strstr(r.end.detail, "400 ms"));
	rig_stop(&r);
}

static void test_timeout_in_a_call(void **state)
{
	const char *answers[] = { "hang", NULL };
	char types[4096], call[65536];
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.timeout_s = 1;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_TIMED_OUT);
	read_events(&r, types, EV_MODEL_CALL, call, NULL);
	assert_string_equal(types, "microvm.ready worker.started model.call microvm.destroyed");
	assert_int_equal(data_int(call, "cost_micros"), 0);
	rig_stop(&r);
}

static void test_model_calls_exceeded(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.a.max_model_calls = 1;
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_MODEL_CALLS_EXCEEDED);
	rig_stop(&r);
}

static void test_cancel(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_CANCELLED);
	rig_stop(&r);
}

static void assert_killed_by_broker(const struct rig *r)
{
	char c = 0;

	assert_int_equal(pread(r->kill_fd, &c, 1, 0), 1);
	assert_int_equal(c, '1');
}

static void test_lease_expires(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.lease_ms = 700;
	rig_start(&r, NULL);
	to_work(&r);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_LEASE_EXPIRED);
	assert_killed_by_broker(&r);
	rig_stop(&r);
}

static void test_keeper_is_slow_to_kill(void **state)
{
	struct pollfd none = { .fd = -1 };
	char c = 0;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	for (int i = 0; i < WAIT_MS / 10 && pread(r.kill_fd, &c, 1, 0) != 1; i++)
		(void)poll(&none, 1, 10);
	assert_killed_by_broker(&r);
	to_the_end(&r);
	rig_stop(&r);
}

static void test_keeper_goes_away(void **state)
{
	struct rig r;
	int status;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	close(r.keeper);
	r.keeper = -1;
	assert_int_equal(waitpid(r.pid, &status, 0), r.pid);
	assert_true(WIFEXITED(status));
	r.pid = 0;
	assert_killed_by_broker(&r);
	rig_stop(&r);
}

static void test_vmm_exits(void **state)
{
	struct buf b = BUF_INIT(256);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	wire_put_u32(&b, 9);
	wire_put_str(&b, "The VMM was killed by signal 9 (out of memory).");
	put(r.keeper, RF_BROKER_VMM_EXITED, b.data, b.len);
	buf_free(&b);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_VM_CRASHED);
	assert_string_equal(r.end.detail, "The VMM was killed by signal 9 (out of memory).");
	rig_stop(&r);
}

static void test_channel_goes_away(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	close(r.channel);
	r.channel = -1;
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_CHANNEL_LOST);
	rig_stop(&r);
}

static void test_protocol_errors(void **state)
{
	static const struct {
		uint8_t type;
		const char *body;
		size_t n;
	} bad[] = {
		{ RF_CB_CALL, "\1\0\0\0\7", 5 },
		{ RF_CB_CALL, "", 0 },
		{ RF_CB_EVENT, "xx", 2 },
		{ RF_CB_HELLO, "", 0 },
		{ RF_CB_SETUP_ACK, "", 0 },
	};
	struct rig r;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		rig_defaults(&r);
		rig_start(&r, NULL);
		to_work(&r);
		put(r.channel, bad[i].type, bad[i].body, bad[i].n);
		to_the_end(&r);
		assert_int_equal(r.end.code, ERRCODE_WORKER_PROTOCOL_ERROR);
		rig_stop(&r);
	}
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	r.next_call = 2; /* the first call must be number 1 */
	call_model(&r, "hi");
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_WORKER_PROTOCOL_ERROR);
	rig_stop(&r);
}

static void test_output_too_large(void **state)
{
	char *big = malloc(GUEST_RESULT_MAX + 1);
	struct rig r;

	(void)state;
	memset(big, 'x', GUEST_RESULT_MAX + 1);
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	put(r.channel, RF_CB_RESULT, big, GUEST_RESULT_MAX + 1);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_OUTPUT_TOO_LARGE);
	assert_int_equal(r.end.output_len, 0);
	rig_stop(&r);
	free(big);
}

static void test_fatal(void **state)
{
	struct buf b = BUF_INIT(256);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	wire_put_str(&b, "no memory for \x1b]0;evil\x07 the loop");
	put(r.channel, RF_CB_FATAL, b.data, b.len);
	buf_free(&b);
	to_the_end(&r);
	assert_int_equal(r.end.code, ERRCODE_WORKER_FAILED);
	assert_null(strchr(r.end.detail, 0x1b));
	rig_stop(&r);
}

static void leaves_without_finish(struct rig *r)
{
	uint8_t gone[8] = { 1 };
	int status;

	wait_frame(r, RF_KEEPER_DESTROY, 0);
	put(r->keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(r, RF_KEEPER_END, 0);
	assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
	r->pid = 0;
	assert_false(r->ended);
}

static void test_start_is_stale(void **state)
{
	uint8_t fence = FENCE_STALE;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_start(&r);
	to_link_side(&r, RF_LB_STARTED, &fence, 1);
	leaves_without_finish(&r);
	assert_int_equal(r.refuse_code, 0);
	rig_stop(&r);
}

static void test_boot_deadline(void **state)
{
	struct rig r;

	(void)state;
	rig_defaults(&r);
	r.boot_ms = 300;
	rig_start(&r, NULL);
	give_assignment(&r);
	leaves_without_finish(&r);
	assert_int_equal(r.refuse_code, ERRCODE_VM_START_FAILED);
	assert_true(r.refuse_failed);
	assert_non_null(strstr(r.refuse_reason, "300 ms"));
	rig_stop(&r);
}

/* The VM dies while START is asked: destroyed at once, and the answer decides what is reported. */
static void test_end_while_start_is_asked(void **state)
{
	uint8_t gone[8] = { 1 }, fence = FENCE_APPLIED;
	struct buf b = BUF_INIT(64);
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_start(&r);
	wire_put_u32(&b, 0);
	wire_put_str(&b, "gone");
	put(r.keeper, RF_BROKER_VMM_EXITED, b.data, b.len);
	buf_free(&b);
	wait_frame(&r, RF_KEEPER_DESTROY, 0);
	put(r.keeper, RF_BROKER_GONE, gone, sizeof(gone));
	to_link_side(&r, RF_LB_STARTED, &fence, 1);
	wait_frame(&r, RF_KEEPER_SIGN_DIGEST, 0);
	put(r.keeper, RF_BROKER_SIGNATURE, (uint8_t[64]){ 0 }, 64);
	wait_frame(&r, RF_KEEPER_TO_LINK, RF_BL_FINISH);
	assert_int_equal(r.end.code, ERRCODE_VM_CRASHED);
	assert_int_equal(r.end.cost.total, 0);
	assert_int_equal(r.end.worker_started_t_ms, -1);
	rig_stop(&r);
}

static void output_event(struct rig *r, const char *bytes, size_t n)
{
	struct guest_event g = {
		.kind = GE_SHELL_OUTPUT, .call_id = "c1", .text = (const uint8_t *)bytes, .text_len = n, .stream = 1, .bytes = -1
	};
	struct buf b = BUF_INIT(65536);

	guest_event_encode(&g, &b);
	put(r->channel, RF_CB_EVENT, b.data, b.len);
	r->credit -= (int64_t)b.len;
	buf_free(&b);
}

static void exit_event(struct rig *r)
{
	struct guest_event g = { .kind = GE_SHELL_EXITED, .call_id = "c1", .bytes = -1 };
	struct buf b = BUF_INIT(65536);

	guest_event_encode(&g, &b);
	put(r->channel, RF_CB_EVENT, b.data, b.len);
	r->credit -= (int64_t)b.len;
	buf_free(&b);
}

/* More than the rate allows waits, in order, and nothing is lost; a call behind it waits too. */
static void test_event_rate(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	static char types[4096], out[65536];
	int64_t began = clock_mono_ns();
	struct rig r;
	int count;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	for (int i = 0; i < 400; i++)
		output_event(&r, "line\n", 5);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	assert_true(clock_mono_ns() - began > INT64_C(900000000));
	assert_int_equal(r.credit, 0); /* all of it was given back before the reply came */
	finish_with(&r, "x");
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_int_equal(count, 400);
	rig_stop(&r);
}

/* An end writes what waits at once: nothing that the guest said before is lost. */
static void test_end_flushes(void **state)
{
	static char types[4096], out[65536];
	struct rig r;
	int count;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	for (int i = 0; i < 600; i++)
		output_event(&r, "line\n", 5);
	to_link_side(&r, RF_LB_CANCEL, NULL, 0);
	to_the_end(&r);
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_true(count >= 200);
	rig_stop(&r);
}

static void test_split_characters(void **state)
{
	static char types[4096], out[65536];
	int count;
	struct rig r;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	output_event(&r, "a\xe2\x82", 3);
	output_event(&r, "\xac", 1);
	exit_event(&r);
	finish_with(&r, "x");
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_int_equal(count, 2);
	assert_true(data_text_is(out, "text", "\xe2\x82\xac"));
	rig_stop(&r);

	rig_defaults(&r);
	rig_start(&r, NULL);
	to_work(&r);
	output_event(&r, "a\xe2\x82", 3);
	exit_event(&r);
	finish_with(&r, "x");
	read_events(&r, types, EV_SHELL_OUTPUT, out, &count);
	assert_int_equal(count, 2);
	assert_true(data_text_is(out, "base64", "4oI="));
	assert_string_equal(types, "microvm.ready worker.started shell.output shell.output shell.exited microvm.destroyed");
	rig_stop(&r);
}

static void blob_answer(struct rig *r, const uint8_t *file, size_t size)
{
	struct frame f = from_keeper_side(r, RF_KEEPER_TO_LINK, RF_BL_BLOB);
	struct buf b = BUF_INIT(LINK_BLOB_MAX + 64);
	struct wire_reader rd;
	uint8_t sha[32];
	uint64_t offset;
	size_t n;

	wire_read_init(&rd, f.body + 1, f.n - 1);
	wire_raw(&rd, sha, 32);
	offset = wire_u64(&rd);
	assert_false(rd.failed);
	n = size - (size_t)offset < LINK_BLOB_MAX ? size - (size_t)offset : LINK_BLOB_MAX;
	wire_put_u64(&b, size);
	wire_put_bytes(&b, file + offset, n);
	to_link_side(r, RF_LB_BLOB, b.data, b.len);
	buf_free(&b);
	free(f.body);
}

static void test_files(void **state)
{
	const size_t size = 300000;
	uint8_t *file = malloc(size), *got = malloc(size), fence = FENCE_APPLIED, credit[4] = { 0, 0, 2, 0 };
	size_t have = 0;
	struct rig r;

	(void)state;
	for (size_t i = 0; i < size; i++)
		file[i] = (uint8_t)(i * 7);
	rig_defaults(&r);
	assert_true(text_copy(r.files[0].path, sizeof(r.files[0].path), "empty") &&
			text_copy(r.files[1].path, sizeof(r.files[1].path), "a/b"));
	crypto_hash_sha256(r.files[0].sha256, NULL, 0);
	r.files[1].size = size;
	crypto_hash_sha256(r.files[1].sha256, file, size);
	r.a.files = r.files;
	r.a.file_count = 2;
	rig_start(&r, NULL);
	to_start(&r);
	to_link_side(&r, RF_LB_STARTED, &fence, 1);
	blob_answer(&r, file, size);
	while (have < size) {
		struct frame f = from_channel_side(&r, RF_CH_FILE);

		assert_int_equal(f.body[0], 1);
		memcpy(got + have, f.body + 4, f.n - 4);
		have += f.n - 4;
		free(f.body);
		if (have == GUEST_CREDIT) {
			put(r.channel, RF_CB_FILE_CREDIT, credit, 4); /* 128 KiB more */
			blob_answer(&r, file, size);
		}
	}
	assert_memory_equal(got, file, size);
	wait_channel(&r, RF_CH_FILES_END);
	ack(&r);
	finish_with(&r, "x");
	rig_stop(&r);
	free(file);
	free(got);
}

/* The provider's key is nowhere but in the request. */
static void test_key_stays(void **state)
{
	const char *answers[] = { HELLO_REPLY, NULL };
	uint8_t *all = malloc((size_t)SPOOL_BYTES);
	struct rig r;
	ssize_t n;

	(void)state;
	rig_defaults(&r);
	rig_start(&r, answers);
	to_work(&r);
	call_model(&r, "hi");
	reply_is(&r, "hello");
	finish_with(&r, "x");
	n = pread(r.spool_fd, all, (size_t)SPOOL_BYTES, 0);
	assert_true(n > 1000);
	assert_null(memmem(all, (size_t)n, "sk-canary", 9));
	rig_stop(&r);
	free(all);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_success),
		cmocka_unit_test(test_retries),
		cmocka_unit_test(test_cut_stream),
		cmocka_unit_test(test_cut_twice),
		cmocka_unit_test(test_provider_refuses),
		cmocka_unit_test(test_limit_param_learned),
		cmocka_unit_test(test_budget_in_a_call),
		cmocka_unit_test(test_budget_by_compute),
		cmocka_unit_test(test_usage_over_hold),
		cmocka_unit_test(test_call_timeout),
		cmocka_unit_test(test_timeout_in_a_call),
		cmocka_unit_test(test_model_calls_exceeded),
		cmocka_unit_test(test_cancel),
		cmocka_unit_test(test_lease_expires),
		cmocka_unit_test(test_keeper_is_slow_to_kill),
		cmocka_unit_test(test_keeper_goes_away),
		cmocka_unit_test(test_vmm_exits),
		cmocka_unit_test(test_channel_goes_away),
		cmocka_unit_test(test_protocol_errors),
		cmocka_unit_test(test_output_too_large),
		cmocka_unit_test(test_fatal),
		cmocka_unit_test(test_start_is_stale),
		cmocka_unit_test(test_boot_deadline),
		cmocka_unit_test(test_end_while_start_is_asked),
		cmocka_unit_test(test_event_rate),
		cmocka_unit_test(test_end_flushes),
		cmocka_unit_test(test_split_characters),
		cmocka_unit_test(test_files),
		cmocka_unit_test(test_key_stays),
	};

	(void)signal(SIGPIPE, SIG_IGN);
	if (sodium_init() < 0)
		return 1;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
