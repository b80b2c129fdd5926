/* The other ends of a broker under test (broker_rig.h). Forks for broker and provider; waits for frames with a deadline. */
#include "broker_rig.h"
#include "fd_frame.h"

/* --- the provider ------------------------------------------------------------------------------------------------------------ */

/* Waits until the other end's process has taken every byte out of its socket: the kernel lists how many lie there. */
static void wait_until_read(int fd)
{
	struct sockaddr_in peer;
	socklen_t len = sizeof(peer);
	struct pollfd none = { .fd = -1 };
	unsigned port, tx, rx = 1;
	char line[256];

	if (getpeername(fd, (struct sockaddr *)&peer, &len) != 0)
		return;
	for (int i = 0; i < WAIT_MS / 5 && rx != 0; i++) {
		FILE *f = fopen("/proc/net/tcp", "r");

		while (f != NULL && fgets(line, sizeof(line), f) != NULL)
			if (sscanf(line, " %*d: %*x:%x %*x:%*x %*x %x:%x", &port, &tx, &rx) == 3 && port == ntohs(peer.sin_port))
				break;
			else
				rx = 1;
		if (f != NULL)
			fclose(f);
		(void)poll(&none, 1, 5);
	}
}

static void serve_one(int fd, struct shared *shared, const char *answer, int spool_fd)
{
	char *in = shared->request[shared->requests % ANSWERS_MAX];
	size_t have = 0, want = SIZE_MAX;
	bool hang = strncmp(answer, "hang after ", 11) == 0;
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
	if (hang)
		answer += strlen("hang after ");
	for (size_t sent = 0; sent < strlen(answer);) {
		ssize_t n = write(fd, answer + sent, strlen(answer) - sent);

		if (n <= 0)
			break;
		sent += (size_t)n;
	}
	if (hang) {
		wait_until_read(fd);
		shared->hung++;
		pause();
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

void put(int fd, uint8_t type, const void *body, size_t n)
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

void rig_defaults(struct rig *r)
{
	*r = (struct rig){ .ctl = -1, .lease_ms = 60000, .boot_ms = 10000, .next_call = 1, .key = "sk-canary-7f3a" };
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

static void broker_child(int keeper, int channel, int killer, int ctl)
{
	static const int places[] = { BROKER_FD_KEEPER, BROKER_FD_CHANNEL, BROKER_FD_KILL, BROKER_FD_CTL };
	int fds[] = { keeper, channel, killer, ctl };

	/* Out of the way first: the targets may be among the sources. */
	for (int i = 0; i < 4; i++)
		fds[i] = fcntl(fds[i], F_DUPFD, 100);
	close(BROKER_FD_CTL);
	for (int i = 0; i < 4; i++)
		if (fds[i] >= 0)
			dup2(fds[i], places[i]);
	for (int i = 7; i < 200; i++)
		close(i);
	_exit(broker_main());
}

void rig_start(struct rig *r, const char *const *answers)
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
		broker_child(keeper[1], channel[1], r->kill_fd, r->ctl);
	close(keeper[1]);
	close(channel[1]);
	r->keeper = keeper[0];
	r->channel = channel[0];
}

void give_assignment(struct rig *r)
{
	struct buf a = BUF_INIT(ASSIGNMENT_MAX), s = BUF_INIT(4096), body = BUF_INIT(ROLE_FRAME_MAX);
	struct run_secrets secrets = { .model_key = "" };
	struct role_broker_assign ra = { .received_boot_ns = clock_boot_ns(),
		.boot_deadline_ms = r->boot_ms,
		.image = "debian-12",
		.vmm = "qemu 7.2",
		.isolation = "emulated",
		.jail = "full",
		.start_mode = "cold" };

	assert_true(text_copy(secrets.model_key, sizeof(secrets.model_key), r->key));
	assignment_encode(&r->a, &a);
	run_secrets_encode(&secrets, &s);
	ra.assignment = a.data;
	ra.assignment_len = (uint32_t)a.len;
	ra.secrets = s.data;
	ra.secrets_len = (uint32_t)s.len;
	ra.lease_deadline_boot_ns = clock_boot_ns() + r->lease_ms * 1000000;
	role_broker_assign_encode(&ra, &body);
	assert_false(body.failed);
	assert_true(put_fd_frame(r->keeper, RF_BROKER_ASSIGN, body.data, body.len, r->spool_fd, ROLE_FRAME_MAX));
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
struct frame from_keeper_side(struct rig *r, uint8_t type, uint8_t inner)
{
	int64_t until = clock_mono_ns() / 1000000 + WAIT_MS;
	struct frame f;

	for (;;) {
		if (!get(r->keeper, &f, until))
			fail_msg("no frame %u/%u from the broker", type, inner);
		if (f.type == RF_KEEPER_TO_LINK)
			note_inner(r, &f);
		if (f.type == RF_KEEPER_STATS)
			assert_int_equal(stats_broker_add(f.body, f.n, &r->tally, &(struct err){ .code = 0 }), 0);
		if (f.type == type && (type != RF_KEEPER_TO_LINK || f.body[0] == inner))
			return f;
		free(f.body);
	}
}

struct frame from_channel_side(struct rig *r, uint8_t type)
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

void to_link_side(struct rig *r, uint8_t type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);

	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	put(r->keeper, RF_BROKER_FROM_LINK, b.data, b.len);
	buf_free(&b);
}

void hello(struct rig *r, const uint8_t nonce[GUEST_NONCE_LEN])
{
	struct guest_hello h = { .protocol = GUEST_PROTOCOL, .kernel = "6.1.0-test", .agent = "0", .memory_mib = 512 };
	struct buf b = BUF_INIT(4096);

	memcpy(h.nonce, nonce, GUEST_NONCE_LEN);
	guest_hello_encode(&h, &b);
	put(r->channel, RF_CB_HELLO, b.data, b.len);
	buf_free(&b);
}

void to_probe(struct rig *r, uint8_t nonce[GUEST_NONCE_LEN])
{
	struct frame probe;

	give_assignment(r);
	put(r->channel, RF_CB_VMM_UP, NULL, 0);
	probe = from_channel_side(r, RF_CH_PROBE);
	assert_int_equal(probe.n, GUEST_NONCE_LEN);
	memcpy(nonce, probe.body, GUEST_NONCE_LEN);
	free(probe.body);
}

void ack(struct rig *r)
{
	struct guest_setup_ack m = {
		.reseeded = true, .clock_set = true, .workdir = "/tmp/ephemeral-run-abcdef/scratch", .boot_id = "1-2-3"
	};
	struct buf b = BUF_INIT(4096);

	guest_setup_ack_encode(&m, &b);
	put(r->channel, RF_CB_SETUP_ACK, b.data, b.len);
	buf_free(&b);
}

void wait_frame(struct rig *r, uint8_t type, uint8_t inner)
{
	struct frame f = from_keeper_side(r, type, inner);

	free(f.body);
}

void wait_channel(struct rig *r, uint8_t type)
{
	struct frame f = from_channel_side(r, type);

	free(f.body);
}

void to_start(struct rig *r)
{
	uint8_t nonce[GUEST_NONCE_LEN];

	to_probe(r, nonce);
	hello(r, nonce);
	wait_frame(r, RF_KEEPER_TO_LINK, RF_BL_START);
}

void to_work(struct rig *r)
{
	uint8_t fence = FENCE_APPLIED;

	to_start(r);
	to_link_side(r, RF_LB_STARTED, &fence, 1);
	wait_channel(r, RF_CH_SETUP);
	wait_channel(r, RF_CH_FILES_END);
	ack(r);
}

void call_model(struct rig *r, const char *text)
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

void reply_is(struct rig *r, const char *content)
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
void to_the_end(struct rig *r)
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

void rig_stop(struct rig *r)
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

void finish_with(struct rig *r, const char *output)
{
	put(r->channel, RF_CB_RESULT, output, strlen(output));
	to_the_end(r);
}

/* --- what stands in the spool ------------------------------------------------------------------------------------------------- */

/* All events as "type type ..."; `find` gets the data of the last one of that type as a copy. */
void read_events(struct rig *r, char types[4096], enum event_type find, char data[65536], int *count)
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

int64_t data_int(const char *event, const char *key)
{
	struct json *v;
	struct err e;
	int64_t n;

	assert_int_equal(json_parse(event, strlen(event), &v, &e), 0);
	n = json_get_int(json_get(v, "data"), key, -1);
	json_free(v);
	return n;
}

bool data_text_is(const char *event, const char *key, const char *want)
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

void wait_until_answering(struct rig *r)
{
	struct pollfd none = { .fd = -1 };

	for (int i = 0; i < WAIT_MS / 10 && *(volatile int *)&r->provider.shared->hung == 0; i++)
		(void)poll(&none, 1, 10);
	assert_true(r->provider.shared->hung > 0);
}
