/* The other ends of a link under test (link_rig.h). nng's threads only write to a pipe; waits have deadlines. */
#include "link_rig.h"
#include "fd_frame.h"

/* --- controld ---------------------------------------------------------------------------------------------------------------- */

static void on_aio(void *arg)
{
	struct server_ctx *c = arg;
	struct server *s = (struct server *)(void *)((char *)(c - c->index) - offsetof(struct server, ctx));
	uint8_t index = (uint8_t)c->index;

	if (write(s->pipe[1], &index, 1) != 1)
		abort();
}

char tls_dir[64];
struct pki *pki;

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

void server_open(struct server *s)
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

void server_close(struct server *s)
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

void answer(struct server_ctx *c, enum link_result result, const void *body, size_t n)
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

void answer_fence(struct server_ctx *c, uint8_t fence, uint64_t expected)
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
bool server_turn(struct server *s, int ms)
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
struct server_ctx *want(struct server *s, uint8_t type)
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

bool waits(struct server *s, uint8_t type)
{
	while (server_turn(s, 300))
		;
	for (int i = 0; i < CONTEXTS; i++)
		if (s->ctx[i].waiting && s->ctx[i].req.type == type)
			return true;
	return false;
}

/* --- keeper ------------------------------------------------------------------------------------------------------------------ */

static void put_fd(int sock, uint8_t type, const void *body, size_t n, int fd)
{
	assert_true(put_fd_frame(sock, type, body, n, fd, ROLE_FRAME_MAX));
}

void put(struct rig *r, uint8_t type, const void *body, size_t n)
{
	put_fd(r->keeper, type, body, n, -1);
}

void from_broker(struct rig *r, uint8_t type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);

	wire_put_raw(&b, r->token, TOKEN_LEN);
	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	put(r, RF_LINK_FROM_BROKER, b.data, b.len);
	buf_free(&b);
}

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
struct frame get(struct rig *r, uint8_t type, uint8_t inner, const char *what)
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

void get_token(struct rig *r, uint8_t type, const char *what)
{
	struct frame f = get(r, type, 0, what);

	assert_int_equal(f.n, TOKEN_LEN);
	assert_memory_equal(f.body, r->token, TOKEN_LEN);
	free(f.body);
}

void get_broker_fence(struct rig *r, uint8_t inner, uint8_t fence, const char *what)
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

void send_capacity(struct rig *r, uint32_t slots)
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

void rig_keys(struct rig *r)
{
	uint8_t secret[32];

	memset(r, 0, sizeof(*r));
	crypto_sign_keypair(r->server.sign_key, r->sign_secret);
	crypto_box_keypair(r->seal_public, secret);
	randombytes_buf(r->receipt_public, 32);
	memset(r->token, 0xab, TOKEN_LEN);
	r->spool_fd = -1;
	assert_int_equal(pipe(r->server.pipe), 0);
}

void rig_link(struct rig *r, bool enrolled)
{
	if (r->address[0] == '\0')
		assert_true(text_fmt(r->address, sizeof(r->address), "tls+tcp://127.0.0.1:%d", r->server.port));
	link_process(r);
	send_init(r, enrolled);
}

void rig_start(struct rig *r, bool enrolled)
{
	rig_keys(r);
	server_open(&r->server);
	rig_link(r, enrolled);
}

void rig_stop(struct rig *r)
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

void append_event(struct rig *r)
{
	struct err e;

	assert_int_equal(spool_append(r->spool, EVENT_HOST, EV_MICROVM_READY, 1000, "{}", 2, 100, 20, NULL, &e), 0);
}

void tell_events(struct rig *r)
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

void send_vm(struct rig *r, uint8_t state)
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

void send_finish(struct rig *r, uint64_t last_seq)
{
	struct run_end end = { .code = ERRCODE_NONE, .isolation = "emulated", .last_seq = last_seq };
	struct buf b = BUF_INIT(65536);

	run_end_encode(&end, &b);
	from_broker(r, RF_BL_FINISH, b.data, b.len);
	buf_free(&b);
}

void events_are(struct server_ctx *c, uint64_t first, uint32_t count)
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
void to_started(struct rig *r)
{
	send_capacity(r, 4);
	send_vm(r, VM_STARTING);
	append_event(r);
	tell_events(r);
	from_broker(r, RF_BL_START, NULL, 0);
	answer_fence(want(&r->server, LINK_START), FENCE_APPLIED, 0);
	get_broker_fence(r, RF_LB_STARTED, FENCE_APPLIED, "started");
}

void next_of(struct server_ctx *c, struct link_next *m)
{
	struct err e;

	assert_int_equal(link_next_decode(c->req.body, c->req.body_len, m, &e), 0);
}

void answer_next(struct server_ctx *c, const struct link_next_reply *m)
{
	struct buf b = BUF_INIT(LINK_MESSAGE_MAX);

	link_next_reply_encode(m, &b);
	assert_false(b.failed);
	answer(c, LINK_OK, b.data, b.len);
	buf_free(&b);
}
