/* A node over nng and TLS, and a dispatch of its own for each test (dispatch_rig.h). */
#include "dispatch_rig.h"

#include <nng/protocol/reqrep0/req.h>
#include <nng/supplemental/tls/tls.h>
#include <pthread.h>
#include <sodium.h>
#include <time.h>

/* --- a node --------------------------------------------------------------------------------------------------------------------
 */

/* nng thread */
static void on_pipe(nng_pipe p, nng_pipe_ev ev, void *arg)
{
	(void)p;
	atomic_fetch_add((atomic_int *)arg, ev == NNG_PIPE_EV_ADD_POST ? 1 : -1);
}

static bool has_pipe(void *arg)
{
	return atomic_load(((struct node *)arg)->pipes) > 0;
}

bool has_no_pipe(void *arg)
{
	return !has_pipe(arg);
}

void node_open(struct node *n)
{
	static atomic_int counts[256];
	static size_t used;
	char url[400];
	nng_tls_config *tls;

	memset(n, 0, sizeof(*n));
	n->pipes = &counts[used++ % COUNT(counts)];
	assert_int_equal(nng_req0_open(&n->socket), 0);
	nng_socket_set_ms(n->socket, NNG_OPT_REQ_RESENDTIME, -1);
	nng_pipe_notify(n->socket, NNG_PIPE_EV_ADD_POST, on_pipe, n->pipes);
	nng_pipe_notify(n->socket, NNG_PIPE_EV_REM_POST, on_pipe, n->pipes);
	assert_true(text_fmt(url, sizeof(url), "tls+tcp://%s", dispatch_address(rig.d)));
	assert_int_equal(nng_dialer_create(&n->dialer, n->socket, url), 0);
	assert_int_equal(nng_tls_config_alloc(&tls, NNG_TLS_MODE_CLIENT), 0);
	assert_int_equal(nng_tls_config_ca_chain(tls, pki_ca_pem(rig.pki), NULL), 0);
	assert_int_equal(nng_tls_config_server_name(tls, "controld.ephemeral.internal"), 0);
	assert_int_equal(nng_tls_config_auth_mode(tls, NNG_TLS_AUTH_MODE_REQUIRED), 0);
	assert_int_equal(nng_dialer_set_ptr(n->dialer, NNG_OPT_TLS_CONFIG, tls), 0);
	nng_tls_config_free(tls);
	assert_int_equal(nng_dialer_start(n->dialer, NNG_FLAG_NONBLOCK), 0);
	assert_true(loop_until(rig.base, has_pipe, n, WAIT_MS));
}

static void *close_socket(void *arg)
{
	nng_socket *socket = arg;

	nng_close(*socket);
	return NULL;
}

/* nng_close of 1.5.2 may hang after a dialer was at work: then it is left behind, as programs do. */
void node_close(struct node *n)
{
	static nng_socket sockets[256];
	static size_t used;
	nng_socket *socket = &sockets[used++ % COUNT(sockets)];
	struct timespec until;
	pthread_t closer;

	nng_dialer_close(n->dialer);
	*socket = n->socket;
	assert_int_equal(pthread_create(&closer, NULL, close_socket, socket), 0);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 5;
	if (pthread_timedjoin_np(closer, NULL, &until) != 0)
		pthread_detach(closer);
}

/* nng thread */
static void on_aio(void *arg)
{
	atomic_store(&((struct call *)arg)->idle, true);
}

bool call_over(void *arg)
{
	struct call *c = arg;
	struct err e;

	if (!atomic_load(&c->idle))
		return false;
	c->rv = nng_aio_result(c->aio);
	if (c->rv != 0)
		return true;
	if (c->sending) {
		c->sending = false;
		atomic_store(&c->idle, false);
		nng_ctx_recv(c->ctx, c->aio);
		return false;
	}
	if (!c->reply_msg) {
		c->reply_msg = nng_aio_get_msg(c->aio);
		assert_ok(link_reply_decode(nng_msg_body(c->reply_msg), nng_msg_len(c->reply_msg), &c->reply, &e));
	}
	return true;
}

void call_bytes(struct node *n, struct call *c, const void *p, size_t len)
{
	nng_msg *m;

	memset(c, 0, sizeof(*c));
	c->n = n;
	c->sending = true;
	assert_int_equal(nng_ctx_open(&c->ctx, n->socket), 0);
	assert_int_equal(nng_aio_alloc(&c->aio, on_aio, c), 0);
	assert_int_equal(nng_msg_alloc(&m, 0), 0);
	assert_int_equal(nng_msg_append(m, p, len), 0);
	nng_aio_set_msg(c->aio, m);
	nng_ctx_send(c->ctx, c->aio);
}

void encode(struct node *n, struct buf *out, enum link_type type, const struct buf *body, bool sign)
{
	struct link_request r = { .type = (uint8_t)type,
		.request_id = 9,
		.counter = ++n->counter,
		.body = body ? body->data : NULL,
		.body_len = body ? body->len : 0 };
	uint8_t message[256];
	size_t len;

	assert_true(text_copy(r.node_id, sizeof(r.node_id), sign ? NODE : ""));
	if (sign) {
		len = link_signed_message(&r, n->challenge, message);
		crypto_sign_detached(r.signature, NULL, message, len, rig.sign_secret);
	}
	link_request_encode(&r, out);
	assert_false(out->failed);
}

void begin(struct node *n, struct call *c, enum link_type type, const struct buf *body, bool sign)
{
	struct buf b = BUF_INIT(LINK_MESSAGE_MAX);

	encode(n, &b, type, body, sign);
	call_bytes(n, c, b.data, b.len);
	buf_free(&b);
}

void call_free(struct call *c)
{
	nng_aio_stop(c->aio);
	if (c->rv != 0 && c->sending)
		nng_msg_free(nng_aio_get_msg(c->aio));
	nng_ctx_close(c->ctx);
	nng_aio_free(c->aio);
	if (c->reply_msg)
		nng_msg_free(c->reply_msg);
}

void wait_reply(struct call *c, enum link_result result)
{
	assert_true(loop_until(rig.base, call_over, c, WAIT_MS));
	assert_int_equal(c->rv, 0);
	if (c->reply.result != result)
		fail_msg("result %u: %.*s", c->reply.result, (int)c->reply.body_len, (const char *)c->reply.body);
}

void ask(struct node *n, enum link_type type, const struct buf *body, bool sign, enum link_result result)
{
	struct call c;

	begin(n, &c, type, body, sign);
	wait_reply(&c, result);
	call_free(&c);
}

void get_challenge(struct node *n)
{
	struct link_challenge_reply r;
	struct call c;
	struct err e;

	begin(n, &c, LINK_CHALLENGE, NULL, false);
	wait_reply(&c, LINK_OK);
	assert_ok(link_challenge_reply_decode(c.reply.body, c.reply.body_len, &r, &e));
	memcpy(n->challenge, r.challenge, 32);
	call_free(&c);
}

void node_ready(struct node *n)
{
	node_open(n);
	get_challenge(n);
}

void put_start(struct buf *b)
{
	struct link_start s;

	memset(&s, 0, sizeof(s));
	assert_true(text_copy(s.run_id, sizeof(s.run_id), RUN));
	link_start_encode(&s, b);
}

void start_ok(struct node *n)
{
	struct buf b = BUF_INIT(1024);
	int before = rig.start_calls;

	put_start(&b);
	ask(n, LINK_START, &b, true, LINK_OK);
	assert_int_equal(rig.start_calls, before + 1);
	buf_free(&b);
}

void begin_next(struct node *n, struct call *c, uint32_t wait_ms)
{
	struct buf b = BUF_INIT(65536);
	struct link_next m = { .epoch = 1,
		.free_memory_mib = 1024,
		.free_vcpus = 2,
		.free_slots = 2,
		.total_memory_mib = 1024,
		.total_vcpus = 2,
		.total_slots = 2,
		.isolation = "emulated",
		.wait_ms = wait_ms };

	link_next_encode(&m, &b);
	begin(n, c, LINK_NEXT, &b, true);
	buf_free(&b);
}

void wait_next(struct call *c, uint32_t assigns)
{
	struct link_next_reply r;
	struct err e;

	wait_reply(c, LINK_OK);
	assert_ok(link_next_reply_decode(c->reply.body, c->reply.body_len, &r, &e));
	assert_int_equal(r.assign_count, assigns);
	assert_int_equal(r.lease_ms, 60000);
	link_next_reply_free(&r);
	call_free(c);
}

/* arg: how many, an int. */
bool next_called(void *arg)
{
	return rig.next_calls >= *(const int *)arg;
}

/* The poll is here and the store has been asked. A parked one is then told from an answered one by its aio. */
void wait_parked(struct call *c, int calls)
{
	loop_until(rig.base, call_over, c, 20);
	assert_true(loop_until(rig.base, next_called, &calls, WAIT_MS));
	assert_true(loop_until(rig.base, call_over, c, 50) == false);
}

/* --- up and down ------------------------------------------------------------------------------------------------------------ */

static int set_up_with(int probe_ms, int sweep_ms)
{
	struct dispatch_options opt;
	struct pki_made made;
	struct buf sealed = BUF_INIT(sizeof(rig.sealed_key));
	char path[128];
	bool keyring;
	struct err e;
	uint8_t sign_public[32], seal_public[32];

	log_init("test", LOG_LEVEL_ERROR, false);
	memset(&rig, 0, sizeof(rig));
	rig.base = event_base_new();
	assert_true(text_copy(rig.dir, sizeof(rig.dir), "/tmp/eph-test-link-XXXXXX"));
	assert_non_null(mkdtemp(rig.dir));
	assert_true(text_fmt(path, sizeof(path), "%s/keyring", rig.dir));
	assert_ok(secrets_create(path, &keyring, &e));
	assert_ok(secrets_load(path, &rig.secrets, &e));
	assert_true(text_fmt(path, sizeof(path), "%s/tls", rig.dir));
	assert_ok(pki_bootstrap(path, "", &made, &e));
	assert_ok(pki_load(path, &rig.pki, &e));
	crypto_sign_keypair(sign_public, rig.sign_secret);
	crypto_box_keypair(seal_public, rig.seal_secret);
	assert_true(text_copy(rig.node.id, sizeof(rig.node.id), NODE));
	memcpy(rig.node.sign_key, sign_public, 32);
	memcpy(rig.node.seal_key, seal_public, 32);
	assert_ok(secrets_seal_provider_key(rig.secrets, "openai", "sk-test", &sealed, &e));
	memcpy(rig.sealed_key, sealed.data, sealed.len);
	rig.sealed_len = sealed.len;
	buf_free(&sealed);
	opt = (struct dispatch_options){ .base = rig.base,
		.store = NULL,
		.secrets = rig.secrets,
		.pki = rig.pki,
		.listen = "127.0.0.1:0",
		.contexts_max = CONTEXTS,
		.poll_ms = 10000,
		.probe_ms = probe_ms,
		.sweep_ms = sweep_ms };
	assert_ok(dispatch_start(&opt, &rig.d, &e));
	return 0;
}

int set_up(void **state)
{
	(void)state;
	return set_up_with(0, 0);
}

int set_up_fast(void **state)
{
	(void)state;
	return set_up_with(50, 40);
}

int tear_down(void **state)
{
	char command[128];

	(void)state;
	dispatch_free(rig.d);
	event_base_free(rig.base);
	pki_free(rig.pki);
	secrets_free(rig.secrets);
	return text_fmt(command, sizeof(command), "rm -rf %s", rig.dir) ? system(command) : -1;
}
