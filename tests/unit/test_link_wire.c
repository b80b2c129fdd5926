/* link: ephproto ephproto_link ephloop_event EPH::sodium EPH::event EPH::nng EPH::crypto */
/* sources: noded/spool.c noded/link/link.c noded/link/peer.c noded/link/poll.c noded/link/requests.c noded/link/runs.c
 * controld/pki.c controld/pki_x509.c controld/files.c */
/*
 * The link process for real, over TLS: this test plays keeper (and the brokers behind it) on its socketpair and controld on an nng
 * socket. Link runs in a process of its own by exec of this program, because nng does not survive a fork.
 */
#include "controld/pki.h"
#include "noded/roles.h"
#include "noded/spool.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/errcode.h"
#include "proto/link.h"
#include "proto/role.h"

#include <errno.h>
#include <fcntl.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/rep.h>
#include <nng/supplemental/tls/tls.h>
#include <nng/transport/tls/tls.h>
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
#define NODE "node_0123456789abcdef0123456789abcdef"
#define WAIT_MS 20000
#define CONTEXTS 8

/* --- controld ---------------------------------------------------------------------------------------------------------------- */

struct server_ctx {
	nng_ctx ctx;
	nng_aio *aio;
	int index;
	bool sending;
	bool waiting; /* a request that the test has not answered */
	nng_msg *msg;
	struct link_request req;
};

struct server {
	nng_socket socket;
	nng_listener listener;
	int port;
	int pipe[2]; /* indices of contexts whose aio completed */
	struct server_ctx ctx[CONTEXTS];
	uint8_t challenge[32];
	uint8_t sign_key[32];
	int challenges; /* asked for */
	uint64_t counters[64];
};

static void on_aio(void *arg)
{
	struct server_ctx *c = arg;
	struct server *s = (struct server *)(void *)((char *)(c - c->index) - offsetof(struct server, ctx));
	uint8_t index = (uint8_t)c->index;

	if (write(s->pipe[1], &index, 1) != 1)
		abort();
}

static char tls_dir[64];
static struct pki *pki;

static void listen_again(struct server *s)
{
	nng_tls_config *tls;
	char url[64];

	assert_int_equal(nng_tls_config_alloc(&tls, NNG_TLS_MODE_SERVER), 0);
	assert_int_equal(nng_tls_config_own_cert(tls, pki_server_pem(pki), pki_server_key(pki), NULL), 0);
	assert_true(text_fmt(url, sizeof(url), "tls+tcp://127.0.0.1:%d", s->port));
	assert_int_equal(nng_listener_create(&s->listener, s->socket, url), 0);
	assert_int_equal(nng_listener_set_ptr(s->listener, NNG_OPT_TLS_CONFIG, tls), 0);
	nng_tls_config_free(tls); /* the listener keeps its own reference */
	assert_int_equal(nng_listener_start(s->listener, 0), 0);
	if (s->port == 0)
		assert_int_equal(nng_listener_get_int(s->listener, NNG_OPT_TCP_BOUND_PORT, &s->port), 0);
}

static void server_open(struct server *s)
{
	assert_int_equal(nng_rep0_open(&s->socket), 0);
	assert_int_equal(nng_socket_set_size(s->socket, NNG_OPT_RECVMAXSZ, LINK_MESSAGE_MAX + 64), 0);
	for (int i = 0; i < CONTEXTS; i++) {
		struct server_ctx *c = &s->ctx[i];

		c->index = i;
		c->sending = c->waiting = false;
		assert_int_equal(nng_ctx_open(&c->ctx, s->socket), 0);
		assert_int_equal(nng_aio_alloc(&c->aio, on_aio, c), 0);
		nng_ctx_recv(c->ctx, c->aio);
	}
	listen_again(s);
}

static void server_start(struct server *s, const uint8_t sign_key[32])
{
	memset(s, 0, sizeof(*s));
	memcpy(s->sign_key, sign_key, 32);
	assert_int_equal(pipe(s->pipe), 0);
	server_open(s);
}

static void server_close(struct server *s)
{
	struct pollfd p = { .fd = s->pipe[0], .events = POLLIN };
	uint8_t stale[64];

	nng_close(s->socket);
	for (int i = 0; i < CONTEXTS; i++) {
		nng_aio_stop(s->ctx[i].aio);
		nng_aio_free(s->ctx[i].aio);
		if (s->ctx[i].msg != NULL)
			nng_msg_free(s->ctx[i].msg);
		s->ctx[i].msg = NULL;
	}
	while (poll(&p, 1, 0) == 1 && read(s->pipe[0], stale, sizeof(stale)) > 0)
		; /* completions of the contexts that are gone */
}

static void server_stop(struct server *s)
{
	server_close(s);
	close(s->pipe[0]);
	close(s->pipe[1]);
}

static void answer(struct server_ctx *c, enum link_result result, const void *body, size_t n)
{
	struct link_reply reply = {
		.type = c->req.type, .request_id = c->req.request_id, .result = (uint8_t)result, .body = body, .body_len = n
	};
	struct buf b = BUF_INIT(LINK_MESSAGE_MAX);
	nng_msg *m;

	link_reply_encode(&reply, &b);
	assert_int_equal(nng_msg_alloc(&m, 0), 0);
	assert_int_equal(nng_msg_append(m, b.data, b.len), 0);
	buf_free(&b);
	nng_msg_free(c->msg);
	c->msg = NULL;
	c->waiting = false;
	c->sending = true;
	nng_aio_set_msg(c->aio, m);
	nng_ctx_send(c->ctx, c->aio);
}

static void answer_fence(struct server_ctx *c, uint8_t fence, uint64_t expected)
{
	struct buf b = BUF_INIT(64);
	struct link_start_reply one = { .fence = fence };
	struct link_events_reply two = { .fence = fence, .expected_seq = expected };

	if (c->req.type == LINK_EVENTS || c->req.type == LINK_FINISH)
		link_events_reply_encode(&two, &b);
	else
		link_start_reply_encode(&one, &b);
	answer(c, LINK_OK, b.data, b.len);
	buf_free(&b);
}

static void check_signature(struct server *s, const struct link_request *r)
{
	uint8_t message[256];
	size_t n = link_signed_message(r, s->challenge, message);

	assert_int_equal(crypto_sign_verify_detached(r->signature, message, n, s->sign_key), 0);
	assert_string_equal(r->node_id, NODE);
	assert_true(r->context < 64 && r->counter > s->counters[r->context]);
	s->counters[r->context] = r->counter;
}

static void received(struct server *s, struct server_ctx *c)
{
	struct link_challenge_reply ch = { .server_time_ms = 1 };
	struct buf b = BUF_INIT(128);
	struct err e;

	c->msg = nng_aio_get_msg(c->aio);
	assert_int_equal(link_request_decode(nng_msg_body(c->msg), nng_msg_len(c->msg), &c->req, &e), 0);
	if (c->req.type == LINK_CHALLENGE) {
		randombytes_buf(s->challenge, sizeof(s->challenge));
		memset(s->counters, 0, sizeof(s->counters));
		memcpy(ch.challenge, s->challenge, 32);
		link_challenge_reply_encode(&ch, &b);
		s->challenges++;
		answer(c, LINK_OK, b.data, b.len);
		buf_free(&b);
		return;
	}
	if (c->req.type != LINK_ENROL)
		check_signature(s, &c->req);
	c->waiting = true;
}

/* One completion, waited for at most ms. */
static bool server_turn(struct server *s, int ms)
{
	struct pollfd p = { .fd = s->pipe[0], .events = POLLIN };
	struct server_ctx *c;
	uint8_t index;

	if (poll(&p, 1, ms) != 1 || read(s->pipe[0], &index, 1) != 1)
		return false;
	c = &s->ctx[index];
	if (nng_aio_result(c->aio) != 0) {
		if (nng_aio_result(c->aio) != NNG_ECLOSED)
			fail_msg("controld: %s", nng_strerror(nng_aio_result(c->aio)));
	} else if (c->sending) {
		c->sending = false;
		nng_aio_set_msg(c->aio, NULL);
		nng_ctx_recv(c->ctx, c->aio);
	} else {
		received(s, c);
	}
	return true;
}

/* The oldest request of this type that waits for an answer. */
static struct server_ctx *want(struct server *s, uint8_t type)
{
	int64_t until = clock_mono_ns() / 1000000 + WAIT_MS;

	for (;;) {
		for (int i = 0; i < CONTEXTS; i++)
			if (s->ctx[i].waiting && s->ctx[i].req.type == type)
				return &s->ctx[i];
		if (clock_mono_ns() / 1000000 > until)
			fail_msg("no request of type %u came", type);
		(void)server_turn(s, 100);
	}
}

static bool waits(struct server *s, uint8_t type)
{
	while (server_turn(s, 300))
		;
	for (int i = 0; i < CONTEXTS; i++)
		if (s->ctx[i].waiting && s->ctx[i].req.type == type)
			return true;
	return false;
}

/* --- keeper ------------------------------------------------------------------------------------------------------------------ */

struct rig {
	struct server server;
	int keeper;
	pid_t pid;
	uint8_t sign_secret[64], seal_public[32], receipt_public[32];
	uint8_t token[TOKEN_LEN];
	int spool_fd;
	struct spool *spool;
	char address[64];
};

static void put_fd(int sock, uint8_t type, const void *body, size_t n, int fd)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX + 16);
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = { .bytes = { 0 } };
	struct iovec iov;
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

	wire_put_u32(&b, (uint32_t)n + 1);
	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	iov = (struct iovec){ b.data, b.len };
	if (fd >= 0) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = sizeof(control.bytes);
		control.align.cmsg_level = SOL_SOCKET;
		control.align.cmsg_type = SCM_RIGHTS;
		control.align.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.align), &fd, sizeof(int));
	}
	assert_int_equal(sendmsg(sock, &msg, MSG_NOSIGNAL), (ssize_t)b.len);
	buf_free(&b);
}

static void put(struct rig *r, uint8_t type, const void *body, size_t n)
{
	put_fd(r->keeper, type, body, n, -1);
}

static void from_broker(struct rig *r, uint8_t type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);

	wire_put_raw(&b, r->token, TOKEN_LEN);
	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	put(r, RF_LINK_FROM_BROKER, b.data, b.len);
	buf_free(&b);
}

struct frame {
	uint8_t type;
	uint8_t *body;
	size_t n;
};

static void read_exact(struct rig *r, void *p, size_t n, int64_t until, const char *what)
{
	uint8_t *out = p;

	while (n > 0) {
		struct pollfd pfd[2] = { { .fd = r->keeper, .events = POLLIN }, { .fd = r->server.pipe[0], .events = POLLIN } };
		ssize_t got;

		if (clock_mono_ns() / 1000000 > until)
			fail_msg("link did not say %s", what);
		(void)poll(pfd, 2, 100);
		if (pfd[1].revents != 0)
			(void)server_turn(&r->server, 0);
		if (pfd[0].revents == 0)
			continue;
		got = read(r->keeper, out, n);
		if (got <= 0)
			fail_msg("link ended instead of saying %s", what);
		out += got;
		n -= (size_t)got;
	}
}

/* Waits for a frame to keeper; `inner` for RF_KEEPER_TO_BROKER. Others pass. */
static struct frame get(struct rig *r, uint8_t type, uint8_t inner, const char *what)
{
	int64_t until = clock_mono_ns() / 1000000 + WAIT_MS;
	uint8_t head[5];
	struct frame f;

	for (;;) {
		read_exact(r, head, 5, until, what);
		f.n = ((size_t)head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 | (size_t)head[3] << 24) - 1;
		f.type = head[4];
		f.body = malloc(f.n + 1);
		read_exact(r, f.body, f.n, until, what);
		if (f.type == type && (type != RF_KEEPER_TO_BROKER || f.body[TOKEN_LEN] == inner))
			return f;
		free(f.body);
	}
}

static void get_token(struct rig *r, uint8_t type, const char *what)
{
	struct frame f = get(r, type, 0, what);

	assert_int_equal(f.n, TOKEN_LEN);
	assert_memory_equal(f.body, r->token, TOKEN_LEN);
	free(f.body);
}

static void get_broker_fence(struct rig *r, uint8_t inner, uint8_t fence, const char *what)
{
	struct frame f = get(r, RF_KEEPER_TO_BROKER, inner, what);

	assert_int_equal(f.n, TOKEN_LEN + 2);
	assert_int_equal(f.body[TOKEN_LEN + 1], fence);
	free(f.body);
}

static void label_sign(const struct rig *r, const char *label, const uint8_t key[32], uint8_t sig[64])
{
	struct buf b = BUF_INIT(256);

	wire_put_raw(&b, label, strlen(label));
	wire_put_raw(&b, key, 32);
	crypto_sign_detached(sig, NULL, b.data, b.len, r->sign_secret);
	buf_free(&b);
}

static void link_process(struct rig *r)
{
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	r->keeper = pair[0];
	r->pid = vfork();
	if (r->pid == 0) {
		dup2(pair[1], LINK_FD_KEEPER == pair[1] ? dup(pair[1]) : LINK_FD_KEEPER);
		execl("/proc/self/exe", "link", "--link", (char *)NULL);
		_exit(127);
	}
	close(pair[1]);
}

static void send_init(struct rig *r, bool enrolled)
{
	struct role_link_init *init = calloc(1, sizeof(*init));
	struct join_token token = { .expires_ms = 1 };
	struct buf b = BUF_INIT(65536), text = BUF_INIT(8000);

	memcpy(init->sign_secret, r->sign_secret, 64);
	memcpy(init->seal_public, r->seal_public, 32);
	memcpy(init->receipt_public, r->receipt_public, 32);
	label_sign(r, "ephemeral/seal-key/1", r->seal_public, init->seal_sig);
	label_sign(r, "ephemeral/receipt-key/1", r->receipt_public, init->receipt_sig);
	assert_true(text_copy(init->name, sizeof(init->name), "host-1") &&
			text_copy(init->isolation, sizeof(init->isolation), "emulated"));
	init->epoch = 42;
	init->poll_ms = 2000;
	if (enrolled) {
		assert_true(text_copy(init->node_id, sizeof(init->node_id), NODE) &&
				text_copy(init->addresses, sizeof(init->addresses), r->address) &&
				text_copy(init->ca_pem, sizeof(init->ca_pem), pki_ca_pem(pki)));
	} else {
		id_secret_make("ephnt_", token.secret);
		assert_true(text_copy(token.addresses, sizeof(token.addresses), r->address) &&
				text_copy(token.ca_pem, sizeof(token.ca_pem), pki_ca_pem(pki)));
		assert_true(join_token_print(&token, &text));
		assert_true(text_copy(init->join_token, sizeof(init->join_token), buf_cstr(&text)));
	}
	role_link_init_encode(init, &b);
	assert_false(b.failed);
	put(r, RF_LINK_INIT, b.data, b.len);
	buf_free(&b);
	buf_free(&text);
	free(init);
}

static void send_capacity(struct rig *r, uint32_t slots)
{
	struct buf b = BUF_INIT(64);

	wire_put_u32(&b, slots * 512);
	wire_put_u32(&b, slots);
	wire_put_u32(&b, slots);
	wire_put_u32(&b, 4096);
	wire_put_u32(&b, 8);
	wire_put_u32(&b, 8);
	put(r, RF_LINK_CAPACITY, b.data, b.len);
	buf_free(&b);
}

static void rig_start(struct rig *r, bool enrolled)
{
	uint8_t sign_key[32], secret[32];

	memset(r, 0, sizeof(*r));
	crypto_sign_keypair(sign_key, r->sign_secret);
	crypto_box_keypair(r->seal_public, secret);
	randombytes_buf(r->receipt_public, 32);
	memset(r->token, 0xab, TOKEN_LEN);
	r->spool_fd = -1;
	server_start(&r->server, sign_key);
	assert_true(text_fmt(r->address, sizeof(r->address), "tls+tcp://127.0.0.1:%d", r->server.port));
	link_process(r);
	send_init(r, enrolled);
}

static void rig_stop(struct rig *r)
{
	int status;

	close(r->keeper);
	assert_int_equal(waitpid(r->pid, &status, 0), r->pid); /* link ends when keeper goes */
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	spool_close(r->spool);
	if (r->spool_fd >= 0)
		close(r->spool_fd);
	server_stop(&r->server);
}

/* --- pieces of a run --------------------------------------------------------------------------------------------------------- */

static void append_event(struct rig *r)
{
	struct err e;

	assert_int_equal(spool_append(r->spool, EVENT_HOST, EV_MICROVM_READY, 1000, "{}", 2, 100, 20, NULL, &e), 0);
}

static void tell_events(struct rig *r)
{
	struct spool_tail t;
	struct buf b = BUF_INIT(64);

	spool_tail(r->spool, &t);
	wire_put_u64(&b, t.next_seq - 1);
	wire_put_i64(&b, 100);
	wire_put_i64(&b, 20);
	from_broker(r, RF_BL_EVENTS, b.data, b.len);
	buf_free(&b);
}

static void send_vm(struct rig *r, uint8_t state)
{
	struct role_vm vm = { .run_id = RUN, .state = state, .first_seq = 3 };
	struct spool_head head = { .run_id = RUN, .first_seq = 3, .queued_at_ms = 1700000000000 };
	struct buf b = BUF_INIT(256);
	struct err e;

	if (r->spool_fd < 0) {
		r->spool_fd = memfd_create("spool", MFD_CLOEXEC);
		assert_int_equal(spool_format(r->spool_fd, &head, &e), 0);
		assert_int_equal(spool_open(fcntl(r->spool_fd, F_DUPFD_CLOEXEC, 3), true, &r->spool, &e), 0);
	}
	memcpy(vm.token, r->token, TOKEN_LEN);
	role_vm_encode(&vm, &b);
	put_fd(r->keeper, RF_LINK_VM, b.data, b.len, r->spool_fd);
	buf_free(&b);
}

static void send_finish(struct rig *r, uint64_t last_seq)
{
	struct run_end end = { .code = ERRCODE_NONE, .isolation = "emulated", .last_seq = last_seq };
	struct buf b = BUF_INIT(65536);

	run_end_encode(&end, &b);
	from_broker(r, RF_BL_FINISH, b.data, b.len);
	buf_free(&b);
}

static void events_are(struct server_ctx *c, uint64_t first, uint32_t count)
{
	struct link_events m;
	struct err e;

	assert_int_equal(link_events_decode(c->req.body, c->req.body_len, &m, &e), 0);
	assert_string_equal(m.run_id, RUN);
	assert_int_equal(m.first_seq, first);
	assert_int_equal(m.record_count, count);
	assert_int_equal(m.spent_micros, 100);
	assert_int_equal(m.held_micros, 20);
	link_events_free(&m);
}

/* A run that is started here: START granted. */
static void to_started(struct rig *r)
{
	send_capacity(r, 4);
	send_vm(r, VM_STARTING);
	append_event(r);
	tell_events(r);
	from_broker(r, RF_BL_START, NULL, 0);
	answer_fence(want(&r->server, LINK_START), FENCE_APPLIED, 0);
	get_broker_fence(r, RF_LB_STARTED, FENCE_APPLIED, "started");
}

static void next_of(struct server_ctx *c, struct link_next *m)
{
	struct err e;

	assert_int_equal(link_next_decode(c->req.body, c->req.body_len, m, &e), 0);
}

static void answer_next(struct server_ctx *c, const struct link_next_reply *m)
{
	struct buf b = BUF_INIT(LINK_MESSAGE_MAX);

	link_next_reply_encode(m, &b);
	assert_false(b.failed);
	answer(c, LINK_OK, b.data, b.len);
	buf_free(&b);
}

/* --- tests ------------------------------------------------------------------------------------------------------------------- */

static void test_enrol(void **state)
{
	struct link_enrol_reply reply = { .node_id = NODE };
	struct buf b = BUF_INIT(4096), proof = BUF_INIT(256);
	struct link_enrol m;
	struct server_ctx *c;
	struct frame f;
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, false);
	send_capacity(&r, 4);
	c = want(&r.server, LINK_ENROL);
	assert_int_equal(link_enrol_decode(c->req.body, c->req.body_len, &m, &e), 0);
	assert_memory_equal(m.sign_key, r.sign_secret + 32, 32);
	assert_string_equal(m.name, "host-1");
	wire_put_raw(&proof, "ephemeral/enrol/1", 17);
	wire_put_raw(&proof, r.server.challenge, 32);
	wire_put_raw(&proof, m.secret, strlen(m.secret));
	assert_int_equal(crypto_sign_verify_detached(m.proof, proof.data, proof.len, m.sign_key), 0);
	link_enrol_reply_encode(&reply, &b);
	answer(c, LINK_OK, b.data, b.len);
	f = get(&r, RF_KEEPER_ENROLLED, 0, "enrolled");
	assert_int_equal(f.n, b.len);
	assert_memory_equal(f.body, b.data, b.len);
	free(f.body);
	(void)want(&r.server, LINK_NEXT); /* signed as that node: checked where it is received */
	buf_free(&b);
	buf_free(&proof);
	rig_stop(&r);
}

static void test_poll_lease_and_assignment(void **state)
{
	struct assignment a = { .run_id = RUN,
		.attempt = 1,
		.next_seq = 3,
		.memory_mib = 512,
		.vcpus = 1,
		.prompt = (char *)(uintptr_t) "x",
		.cap_micros = 1000,
		.timeout_s = 10,
		.max_model_calls = 3,
		.model = { .id = "a/b",
				.upstream = "b",
				.base_url = "http://x/v1",
				.limit_param = LIMIT_MAX_TOKENS,
				.max_output_tokens = 10,
				.call_timeout_ms = 1000 } };
	struct buf enc = BUF_INIT(ASSIGNMENT_MAX);
	struct link_assign as = { .sealed = (uint8_t *)(uintptr_t) "sealed", .sealed_len = 6 };
	struct link_next_reply reply = { .lease_ms = 12000, .assigns = &as, .assign_count = 1 };
	struct server_ctx *c;
	struct wire_reader rd;
	struct link_next m;
	struct frame f;
	struct rig r;
	int64_t before, deadline;
	size_t n;

	(void)state;
	rig_start(&r, true);
	before = clock_boot_ns();
	send_capacity(&r, 4);
	c = want(&r.server, LINK_NEXT);
	next_of(c, &m);
	assert_int_equal(m.held_count, 0);
	assert_int_equal(m.free_slots, 4);
	assert_int_equal(m.epoch, 42);
	assert_int_equal(m.wait_ms, 2000);
	link_next_free(&m);
	memcpy(a.token, r.token, TOKEN_LEN);
	assignment_encode(&a, &enc);
	as.assignment = enc.data;
	as.assignment_len = (uint32_t)enc.len;
	answer_next(c, &reply);
	f = get(&r, RF_KEEPER_LEASE, 0, "lease");
	wire_read_init(&rd, f.body, f.n);
	deadline = wire_i64(&rd);
	assert_true(deadline >= before + INT64_C(11000000000));
	assert_true(deadline <= clock_boot_ns() + INT64_C(11000000000)); /* from the sending, less a twelfth */
	free(f.body);
	f = get(&r, RF_KEEPER_ASSIGN, 0, "assign");
	wire_read_init(&rd, f.body, f.n);
	assert_memory_equal(wire_bytes(&rd, ASSIGNMENT_MAX, &n), enc.data, enc.len);
	free(f.body);
	/* It is held from now on, and its share is not free any more, although keeper has not said so yet. */
	c = want(&r.server, LINK_NEXT);
	next_of(c, &m);
	assert_int_equal(m.held_count, 1);
	assert_memory_equal(m.held[0].token, r.token, TOKEN_LEN);
	assert_int_equal(m.free_slots, 3);
	assert_int_equal(m.free_memory_mib, 3 * 512);
	link_next_free(&m);
	/* Sent again: it is not handed over twice. */
	answer_next(c, &reply);
	/* More room: a second poll says so while the first is parked. */
	c = want(&r.server, LINK_NEXT);
	send_vm(&r, VM_STARTING);
	send_capacity(&r, 5);
	while (server_turn(&r.server, 1000) && !(r.server.ctx[0].waiting && r.server.ctx[1].waiting))
		;
	n = 0;
	for (int i = 0; i < CONTEXTS; i++)
		n += r.server.ctx[i].waiting && r.server.ctx[i].req.type == LINK_NEXT;
	assert_int_equal(n, 2);
	buf_free(&enc);
	rig_stop(&r);
}

static void test_run(void **state)
{
	struct server_ctx *c;
	struct link_finish fin;
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, true);
	send_capacity(&r, 4);
	send_vm(&r, VM_STARTING);
	append_event(&r);
	tell_events(&r);
	assert_false(waits(&r.server, LINK_EVENTS)); /* not before START is granted */
	from_broker(&r, RF_BL_START, NULL, 0);
	c = want(&r.server, LINK_START);
	assert_false(waits(&r.server, LINK_EVENTS));
	answer_fence(c, FENCE_APPLIED, 0);
	get_broker_fence(&r, RF_LB_STARTED, FENCE_APPLIED, "started");
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 3, 1);
	for (int i = 0; i < 300; i++)
		append_event(&r);
	tell_events(&r);
	assert_false(waits(&r.server, LINK_FINISH));
	answer_fence(c, FENCE_APPLIED, 4);
	free(get(&r, RF_KEEPER_TO_BROKER, RF_LB_ACKED, "acked").body);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 4, LINK_EVENTS_MAX);
	send_finish(&r, 303);
	answer_fence(c, FENCE_GAP, 3); /* controld lost what it had: all again */
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 3, LINK_EVENTS_MAX);
	answer_fence(c, FENCE_DUPLICATE, 259);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 259, 45);
	answer(c, LINK_BUSY, "\0\0\0\0", 4);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 259, 45);
	answer_fence(c, FENCE_APPLIED, 304);
	c = want(&r.server, LINK_FINISH);
	assert_int_equal(link_finish_decode(c->req.body, c->req.body_len, &fin, &e), 0);
	assert_int_equal(fin.end.last_seq, 303);
	link_finish_free(&fin);
	answer_fence(c, FENCE_APPLIED, 0);
	get_broker_fence(&r, RF_LB_FINISHED, FENCE_APPLIED, "finished");
	get_token(&r, RF_KEEPER_DONE, "done");
	rig_stop(&r);
}

static void test_stale(void **state)
{
	struct link_next m;
	struct rig r;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_STALE, 0);
	get_token(&r, RF_KEEPER_KILL, "kill");
	get_token(&r, RF_KEEPER_DONE, "done");
	/* It is not held any more. */
	for (int i = 0; i < 3; i++) {
		struct link_next_reply reply = { .lease_ms = 0 };
		struct server_ctx *c = want(&r.server, LINK_NEXT);

		next_of(c, &m);
		link_next_free(&m);
		answer_next(c, &reply);
		if (m.held_count == 0)
			break;
	}
	rig_stop(&r);
}

static void test_refusal_and_commands(void **state)
{
	struct link_command commands[] = { { .id = 7, .kind = LINK_CMD_CANCEL, .run_id = RUN },
		{ .id = 9, .kind = LINK_CMD_DRAIN, .run_id = RUN } };
	struct link_next_reply reply = { .lease_ms = 1000, .commands = commands, .command_count = 2 };
	struct buf b = BUF_INIT(256);
	struct server_ctx *c;
	struct link_refuse ref;
	struct link_next m;
	struct frame f;
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	memcpy(commands[0].token, r.token, TOKEN_LEN);
	answer_next(want(&r.server, LINK_NEXT), &reply);
	f = get(&r, RF_KEEPER_TO_BROKER, RF_LB_CANCEL, "cancel");
	free(f.body);
	f = get(&r, RF_KEEPER_DRAIN, 0, "drain");
	assert_int_equal(f.body[0], 1);
	free(f.body);
	c = want(&r.server, LINK_NEXT);
	next_of(c, &m);
	assert_int_equal(m.last_command, 9);
	assert_true(m.draining);
	link_next_free(&m);
	/* Another run that keeper cannot take. */
	memset(r.token, 0xcd, TOKEN_LEN);
	wire_put_str(&b, RUN);
	wire_put_raw(&b, r.token, TOKEN_LEN);
	wire_put_bool(&b, false);
	wire_put_u32(&b, ERRCODE_NO_CAPACITY);
	wire_put_str(&b, "no room");
	put(&r, RF_LINK_REFUSED, b.data, b.len);
	buf_free(&b);
	c = want(&r.server, LINK_REFUSE);
	assert_int_equal(link_refuse_decode(c->req.body, c->req.body_len, &ref, &e), 0);
	assert_false(ref.failed);
	assert_string_equal(ref.reason, "no room");
	answer_fence(c, FENCE_APPLIED, 0);
	get_token(&r, RF_KEEPER_DONE, "done");
	rig_stop(&r);
}

/* controld restarts in the middle: another pipe, another challenge, and what was asked is asked again. */
static void test_controld_restarts(void **state)
{
	struct rig r;
	int challenges;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	(void)want(&r.server, LINK_EVENTS); /* not answered */
	challenges = r.server.challenges;
	server_close(&r.server);
	server_open(&r.server);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_DUPLICATE, 4);
	assert_true(r.server.challenges > challenges);
	free(get(&r, RF_KEEPER_TO_BROKER, RF_LB_ACKED, "acked").body);
	(void)want(&r.server, LINK_NEXT);
	rig_stop(&r);
}

static void test_new_challenge(void **state)
{
	struct rig r;
	int challenges;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	challenges = r.server.challenges;
	answer(want(&r.server, LINK_EVENTS), LINK_UNAUTHENTIC, "\0\0\0\0", 4);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_APPLIED, 4);
	assert_int_equal(r.server.challenges, challenges + 1);
	rig_stop(&r);
}

/* The broker died: keeper ends the run, its events are in the spool. */
static void test_keeper_ends_a_run(void **state)
{
	struct run_end end = { .code = ERRCODE_BROKER_LOST, .isolation = "kvm", .last_seq = 5 };
	struct buf b = BUF_INIT(65536);
	struct server_ctx *c;
	struct rig r;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_APPLIED, 4);
	append_event(&r);
	append_event(&r); /* the broker did not live to tell */
	wire_put_raw(&b, r.token, TOKEN_LEN);
	run_end_encode(&end, &b);
	put(&r, RF_LINK_ENDED, b.data, b.len);
	buf_free(&b);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 4, 2);
	answer_fence(c, FENCE_APPLIED, 6);
	answer_fence(want(&r.server, LINK_FINISH), FENCE_APPLIED, 0);
	get_token(&r, RF_KEEPER_DONE, "done");
	rig_stop(&r);
}

static void test_revoked(void **state)
{
	struct rig r;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	answer(want(&r.server, LINK_NEXT), LINK_REVOKED, "\0\0\0\0", 4);
	get_token(&r, RF_KEEPER_KILL, "kill");
	rig_stop(&r);
}

static int setup(void **state)
{
	char template[] = "/tmp/eph-link-XXXXXX";
	struct pki_made made;
	struct err e;

	(void)state;
	if (mkdtemp(template) == NULL || !text_fmt(tls_dir, sizeof(tls_dir), "%s/tls", template))
		return -1;
	if (pki_bootstrap(tls_dir, "", &made, &e) < 0 || pki_load(tls_dir, &pki, &e) < 0) {
		print_error("%s\n", e.text);
		return -1;
	}
	return 0;
}

static int teardown(void **state)
{
	static const char *const files[] = { "ca.pem", "ca.key", "server.pem", "server.key", "root.key", "lock", ".lock", "" };
	char path[128];

	(void)state;
	pki_free(pki);
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		if (text_fmt(path, sizeof(path), "%s/%s", tls_dir, files[i]))
			(void)remove(path);
	*strrchr(tls_dir, '/') = '\0';
	(void)remove(tls_dir);
	return 0;
}

/* nng 1.5.2 drops a message now and then when a pipe closes under it: its loss, not ours. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
	return "leak:libnng.so\n";
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_enrol),
		cmocka_unit_test(test_poll_lease_and_assignment),
		cmocka_unit_test(test_run),
		cmocka_unit_test(test_stale),
		cmocka_unit_test(test_refusal_and_commands),
		cmocka_unit_test(test_controld_restarts),
		cmocka_unit_test(test_new_challenge),
		cmocka_unit_test(test_keeper_ends_a_run),
		cmocka_unit_test(test_revoked),
	};

	if (sodium_init() < 0)
		return 1;
	if (argc > 1 && strcmp(argv[1], "--link") == 0) {
		log_init("noded/link", LOG_LEVEL_INFO, false);
		return link_main();
	}
	(void)signal(SIGPIPE, SIG_IGN);
	return cmocka_run_group_tests(tests, setup, teardown);
}
