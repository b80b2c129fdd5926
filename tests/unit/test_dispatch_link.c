/*
 * The node link over real nng and TLS: enrolment, signatures, parking and waking, lost connections, contexts that run out,
 * revocation, draining. The store's functions that dispatch calls are answered here, one loop turn later, as the test says.
 */
/* link: controld_dispatch controld_base ephproto_link ephproto ephloop_event EPH::nng EPH::sodium EPH::crypto */
#include "unit.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "controld/dispatch/internal.h"
#include "controld/pki.h"
#include "controld/secrets.h"
#include "controld/store/store.h"
#include "loop.h"

#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <nng/supplemental/tls/tls.h>
#include <pthread.h>
#include <sodium.h>
#include <stdatomic.h>
#include <time.h>

#define NODE "node_0123456789abcdef0123456789abcdef"
#define RUN "run_0123456789abcdef0123456789abcdef"
#define SECRET "ephnt_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define CONTEXTS 16
#define WAIT_MS 10000

/* --- the store, as far as dispatch sees it -------------------------------------------------------------------------------------
 */

static struct {
	struct event_base *base;
	char dir[64];
	struct secrets *secrets;
	struct pki *pki;
	struct dispatch *d;
	struct store_node node;
	bool revoked, unavailable;
	int waiting_assigns; /* runs that the next claims get */
	int next_calls, start_calls, events_calls, certify_calls;
	int64_t last_t_ms;
	bool hold_next; /* store_next does not call back until released */
	store_next_cb held_cb;
	void *held_arg;
	uint8_t sealed_key[128];
	size_t sealed_len;
	uint8_t sign_secret[64], seal_secret[32];
} t;

struct later {
	void (*run)(struct later *l);
	void *cb, *arg;
	struct event *ev;
};

static void on_later(evutil_socket_t fd, short what, void *arg)
{
	struct later *l = arg;

	(void)fd;
	(void)what;
	event_free(l->ev);
	l->run(l);
	free(l);
}

static int call_later(void (*run)(struct later *), void *cb, void *arg, struct err *e)
{
	struct later *l;
	struct timeval now = { 0, 0 };

	if (t.unavailable)
		return err_set(e, ERR_UNAVAILABLE, "full");
	l = calloc(1, sizeof(*l));
	l->run = run;
	l->cb = cb;
	l->arg = arg;
	l->ev = evtimer_new(t.base, on_later, l);
	event_add(l->ev, &now);
	return 0;
}

static void run_node(struct later *l)
{
	struct store_nodes n = { .nodes = &t.node, .count = 1 };

	(void)!text_copy(t.node.state, sizeof(t.node.state), t.revoked ? "revoked" : "active");
	((store_nodes_cb)l->cb)(l->arg, &n, NULL);
}

static void run_no_node(struct later *l)
{
	struct store_nodes n = { .count = 0 };

	((store_nodes_cb)l->cb)(l->arg, &n, NULL);
}

int store_node_get(struct store *s, const char *node_id, store_nodes_cb cb, void *arg, struct err *e)
{
	(void)s;
	return call_later(strcmp(node_id, NODE) == 0 ? run_node : run_no_node, (void *)cb, arg, e);
}

static void answer_next(store_next_cb cb, void *arg)
{
	struct store_assign assigns[STORE_CLAIM_MAX];
	struct store_next n = { .result = t.revoked ? STORE_NEXT_REVOKED : STORE_NEXT_OK, .lease_ms = 60000, .assigns = assigns };

	memset(assigns, 0, sizeof(assigns));
	for (; t.waiting_assigns > 0; t.waiting_assigns--) {
		struct store_assign *a = &assigns[n.assign_count++];

		assert_true(text_copy(a->a.run_id, sizeof(a->a.run_id), RUN));
		a->a.prompt = (char *)(uintptr_t) "hello";
		a->a.attempt = 1;
		assert_true(text_copy(a->provider, sizeof(a->provider), "openai"));
		a->sealed_key = t.sealed_key;
		a->sealed_key_len = t.sealed_len;
	}
	n.waiting = n.assign_count == 0;
	cb(arg, &n, NULL);
}

static void run_next(struct later *l)
{
	answer_next((store_next_cb)l->cb, l->arg);
}

int store_next(struct store *s, const char *node_id, const struct link_next *n, uint32_t max_claims, store_next_cb cb, void *arg,
		struct err *e)
{
	(void)s;
	(void)n;
	(void)max_claims;
	assert_string_equal(node_id, NODE);
	t.next_calls++;
	if (t.hold_next) {
		t.held_cb = cb;
		t.held_arg = arg;
		return 0;
	}
	return call_later(run_next, (void *)cb, arg, e);
}

static void run_enrol(struct later *l)
{
	struct store_enrol r = { .result = STORE_ENROL_OK };

	assert_true(text_copy(r.node_id, sizeof(r.node_id), NODE));
	((store_enrol_cb)l->cb)(l->arg, &r, NULL);
}

static void run_enrol_unknown(struct later *l)
{
	struct store_enrol r = { .result = STORE_ENROL_UNKNOWN_TOKEN };

	((store_enrol_cb)l->cb)(l->arg, &r, NULL);
}

int store_node_enrol(struct store *s, const uint8_t secret_hash[32], const struct link_enrol *n, store_enrol_cb cb, void *arg,
		struct err *e)
{
	uint8_t hash[32];

	(void)s;
	secrets_key_hash(t.secrets, SECRET, hash);
	memcpy(t.node.sign_key, n->sign_key, 32);
	memcpy(t.node.seal_key, n->seal_key, 32);
	return call_later(memcmp(hash, secret_hash, 32) == 0 ? run_enrol : run_enrol_unknown, (void *)cb, arg, e);
}

static void run_done(struct later *l)
{
	struct store_done d = { .result = STORE_DONE, .id = "", .detail = "" };

	((store_done_cb)l->cb)(l->arg, &d, NULL);
}

int store_node_certify(
		struct store *s, const char *node_id, const uint8_t certificate[64], store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)certificate;
	t.certify_calls++;
	return call_later(run_done, (void *)cb, arg, e);
}

static void run_fence(struct later *l)
{
	struct store_fence f = { .fence = FENCE_APPLIED, .expected_seq = 7 };

	((store_fence_cb)l->cb)(l->arg, &f, NULL);
}

int store_run_start(struct store *s, const char *node_id, const char *run_id, const uint8_t token[TOKEN_LEN], store_fence_cb cb,
		void *arg, struct err *e)
{
	(void)s;
	(void)token;
	assert_string_equal(node_id, NODE);
	assert_string_equal(run_id, RUN);
	t.start_calls++;
	return call_later(run_fence, (void *)cb, arg, e);
}

int store_run_events(struct store *s, const char *node_id, const struct link_events *ev, int64_t last_t_ms, store_fence_cb cb,
		void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)ev;
	t.events_calls++;
	t.last_t_ms = last_t_ms;
	return call_later(run_fence, (void *)cb, arg, e);
}

int store_run_finish(struct store *s, const char *node_id, const struct link_finish *f, store_fence_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)f;
	return call_later(run_fence, (void *)cb, arg, e);
}

int store_run_refuse(struct store *s, const char *node_id, const struct link_refuse *r, store_fence_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)r;
	return call_later(run_fence, (void *)cb, arg, e);
}

static void run_blob(struct later *l)
{
	struct store_blob b = { .found = true, .total = 5, .bytes = (const uint8_t *)"bytes", .len = 5 };

	((store_blob_cb)l->cb)(l->arg, &b, NULL);
}

int store_blob(struct store *s, const char *node_id, const struct link_blob *b, store_blob_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)b;
	return call_later(run_blob, (void *)cb, arg, e);
}

/* --- a node --------------------------------------------------------------------------------------------------------------------
 */

struct node {
	nng_socket socket;
	nng_dialer dialer;
	atomic_int *pipes; /* outlives the node: a socket that did not close in time still counts here */
	uint8_t challenge[32];
	uint64_t counter;
};

struct call {
	struct node *n;
	nng_ctx ctx;
	nng_aio *aio;
	bool sending;
	atomic_bool idle; /* the aio's callback came */
	int rv;
	nng_msg *reply_msg;
	struct link_reply reply;
};

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

static bool has_no_pipe(void *arg)
{
	return !has_pipe(arg);
}

static void node_open(struct node *n)
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
	assert_true(text_fmt(url, sizeof(url), "tls+tcp://%s", dispatch_address(t.d)));
	assert_int_equal(nng_dialer_create(&n->dialer, n->socket, url), 0);
	assert_int_equal(nng_tls_config_alloc(&tls, NNG_TLS_MODE_CLIENT), 0);
	assert_int_equal(nng_tls_config_ca_chain(tls, pki_ca_pem(t.pki), NULL), 0);
	assert_int_equal(nng_tls_config_server_name(tls, "controld.ephemeral.internal"), 0);
	assert_int_equal(nng_tls_config_auth_mode(tls, NNG_TLS_AUTH_MODE_REQUIRED), 0);
	assert_int_equal(nng_dialer_set_ptr(n->dialer, NNG_OPT_TLS_CONFIG, tls), 0);
	nng_tls_config_free(tls);
	assert_int_equal(nng_dialer_start(n->dialer, NNG_FLAG_NONBLOCK), 0);
	assert_true(loop_until(t.base, has_pipe, n, WAIT_MS));
}

static void *close_socket(void *arg)
{
	nng_socket *socket = arg;

	nng_close(*socket);
	return NULL;
}

/* nng_close of 1.5.2 may hang after a dialer was at work: then it is left behind, as programs do. */
static void node_close(struct node *n)
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

static bool call_over(void *arg)
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

static void call_bytes(struct node *n, struct call *c, const void *p, size_t len)
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

static void encode(struct node *n, struct buf *out, enum link_type type, const struct buf *body, bool sign)
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
		crypto_sign_detached(r.signature, NULL, message, len, t.sign_secret);
	}
	link_request_encode(&r, out);
	assert_false(out->failed);
}

static void begin(struct node *n, struct call *c, enum link_type type, const struct buf *body, bool sign)
{
	struct buf b = BUF_INIT(LINK_MESSAGE_MAX);

	encode(n, &b, type, body, sign);
	call_bytes(n, c, b.data, b.len);
	buf_free(&b);
}

static void call_free(struct call *c)
{
	nng_aio_stop(c->aio);
	if (c->rv != 0 && c->sending)
		nng_msg_free(nng_aio_get_msg(c->aio));
	nng_ctx_close(c->ctx);
	nng_aio_free(c->aio);
	if (c->reply_msg)
		nng_msg_free(c->reply_msg);
}

static void wait_reply(struct call *c, enum link_result result)
{
	assert_true(loop_until(t.base, call_over, c, WAIT_MS));
	assert_int_equal(c->rv, 0);
	if (c->reply.result != result)
		fail_msg("result %u: %.*s", c->reply.result, (int)c->reply.body_len, (const char *)c->reply.body);
}

static void ask(struct node *n, enum link_type type, const struct buf *body, bool sign, enum link_result result)
{
	struct call c;

	begin(n, &c, type, body, sign);
	wait_reply(&c, result);
	call_free(&c);
}

static void get_challenge(struct node *n)
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

static void node_ready(struct node *n)
{
	node_open(n);
	get_challenge(n);
}

static void put_start(struct buf *b)
{
	struct link_start s;

	memset(&s, 0, sizeof(s));
	assert_true(text_copy(s.run_id, sizeof(s.run_id), RUN));
	link_start_encode(&s, b);
}

static void start_ok(struct node *n)
{
	struct buf b = BUF_INIT(1024);
	int before = t.start_calls;

	put_start(&b);
	ask(n, LINK_START, &b, true, LINK_OK);
	assert_int_equal(t.start_calls, before + 1);
	buf_free(&b);
}

static void begin_next(struct node *n, struct call *c, uint32_t wait_ms)
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

static void wait_next(struct call *c, uint32_t assigns)
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

static int next_wanted;
static bool next_called(void *arg)
{
	(void)arg;
	return t.next_calls >= next_wanted;
}

/* The poll is here and the store has been asked. A parked one is then told from an answered one by its aio. */
static void wait_parked(struct call *c, int calls)
{
	next_wanted = calls;
	loop_until(t.base, call_over, c, 20);
	assert_true(loop_until(t.base, next_called, NULL, WAIT_MS));
	assert_true(loop_until(t.base, call_over, c, 50) == false);
}

/* --- tests ---------------------------------------------------------------------------------------------------------------------
 */

static int set_up_with(int probe_ms, int sweep_ms)
{
	struct dispatch_options opt;
	struct pki_made made;
	struct buf sealed = BUF_INIT(sizeof(t.sealed_key));
	char path[128];
	bool keyring;
	struct err e;
	uint8_t sign_public[32], seal_public[32];

	log_init("test", LOG_LEVEL_ERROR, false);
	memset(&t, 0, sizeof(t));
	t.base = event_base_new();
	assert_true(text_copy(t.dir, sizeof(t.dir), "/tmp/eph-test-link-XXXXXX"));
	assert_non_null(mkdtemp(t.dir));
	assert_true(text_fmt(path, sizeof(path), "%s/keyring", t.dir));
	assert_ok(secrets_create(path, &keyring, &e));
	assert_ok(secrets_load(path, &t.secrets, &e));
	assert_true(text_fmt(path, sizeof(path), "%s/tls", t.dir));
	assert_ok(pki_bootstrap(path, "", &made, &e));
	assert_ok(pki_load(path, &t.pki, &e));
	crypto_sign_keypair(sign_public, t.sign_secret);
	crypto_box_keypair(seal_public, t.seal_secret);
	assert_true(text_copy(t.node.id, sizeof(t.node.id), NODE));
	memcpy(t.node.sign_key, sign_public, 32);
	memcpy(t.node.seal_key, seal_public, 32);
	assert_ok(secrets_seal_provider_key(t.secrets, "openai", "sk-test", &sealed, &e));
	memcpy(t.sealed_key, sealed.data, sealed.len);
	t.sealed_len = sealed.len;
	buf_free(&sealed);
	opt = (struct dispatch_options){ .base = t.base,
		.store = NULL,
		.secrets = t.secrets,
		.pki = t.pki,
		.listen = "127.0.0.1:0",
		.contexts_max = CONTEXTS,
		.poll_ms = 10000,
		.probe_ms = probe_ms,
		.sweep_ms = sweep_ms };
	assert_ok(dispatch_start(&opt, &t.d, &e));
	return 0;
}

static int set_up(void **state)
{
	(void)state;
	return set_up_with(0, 0);
}

static int set_up_fast(void **state)
{
	(void)state;
	return set_up_with(50, 40);
}

static int tear_down(void **state)
{
	char command[128];

	(void)state;
	dispatch_free(t.d);
	event_base_free(t.base);
	pki_free(t.pki);
	secrets_free(t.secrets);
	return text_fmt(command, sizeof(command), "rm -rf %s", t.dir) ? system(command) : -1;
}

static void test_address(void **state)
{
	struct dispatch_options opt = { .base = t.base,
		.secrets = t.secrets,
		.pki = t.pki,
		.listen = dispatch_address(t.d),
		.contexts_max = 16,
		.poll_ms = 1000 };
	struct dispatch *second;
	struct err e;

	(void)state;
	assert_int_equal(strncmp(dispatch_address(t.d), "127.0.0.1:", 10), 0);
	assert_string_not_equal(dispatch_address(t.d), "127.0.0.1:0");
	assert_int_equal(dispatch_start(&opt, &second, &e), -1);
	assert_int_equal(e.code, ERR_CONFLICT);
	assert_non_null(strstr(e.text, "in use"));
}

static void sign_parts(uint8_t sig[64], const char *label, const void *a, size_t a_len, const void *b, size_t b_len)
{
	struct buf m = BUF_INIT(512);

	buf_add_str(&m, label);
	buf_add(&m, a, a_len);
	buf_add(&m, b, b_len);
	crypto_sign_detached(sig, NULL, m.data, m.len, t.sign_secret);
	buf_free(&m);
}

static void put_enrol(struct node *n, const char *secret, struct buf *b)
{
	struct link_enrol m;

	memset(&m, 0, sizeof(m));
	assert_true(text_copy(m.secret, sizeof(m.secret), secret));
	assert_true(text_copy(m.name, sizeof(m.name), "host"));
	assert_true(text_copy(m.isolation, sizeof(m.isolation), "emulated"));
	crypto_sign_ed25519_sk_to_pk(m.sign_key, t.sign_secret);
	memcpy(m.seal_key, t.node.seal_key, 32);
	memset(m.receipt_key, 5, 32);
	sign_parts(m.seal_sig, "ephemeral/seal-key/1", m.seal_key, 32, "", 0);
	sign_parts(m.receipt_sig, "ephemeral/receipt-key/1", m.receipt_key, 32, "", 0);
	sign_parts(m.proof, "ephemeral/enrol/1", n->challenge, 32, m.secret, strlen(m.secret));
	link_enrol_encode(&m, b);
}

static void test_enrol(void **state)
{
	struct buf b = BUF_INIT(4096);
	struct link_enrol_reply r;
	struct node n;
	struct call c;
	struct err e;
	uint8_t root[32];

	(void)state;
	node_open(&n);
	put_enrol(&n, SECRET, &b);
	ask(&n, LINK_ENROL, &b, false, LINK_UNAUTHENTIC); /* no challenge yet */
	get_challenge(&n);
	ask(&n, LINK_ENROL, &b, false, LINK_UNAUTHENTIC); /* proof over none */
	buf_reset(&b);
	put_enrol(&n, "ephnt_bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", &b);
	ask(&n, LINK_ENROL, &b, false, LINK_UNAUTHENTIC);
	buf_reset(&b);
	put_enrol(&n, SECRET, &b);
	begin(&n, &c, LINK_ENROL, &b, false);
	wait_reply(&c, LINK_OK);
	assert_ok(link_enrol_reply_decode(c.reply.body, c.reply.body_len, &r, &e));
	assert_string_equal(r.node_id, NODE);
	pki_root_public(t.pki, root);
	assert_memory_equal(root, r.root_key, 32);
	assert_true(pki_node_certified(root, r.node_id, t.node.sign_key, r.certificate));
	assert_int_equal(t.certify_calls, 1);
	call_free(&c);
	start_ok(&n);
	buf_free(&b);
	node_close(&n);
}

static void test_signed_only(void **state)
{
	struct buf b = BUF_INIT(1024), whole = BUF_INIT(4096);
	struct node n, other;
	struct call c;

	(void)state;
	node_open(&n);
	put_start(&b);
	ask(&n, LINK_START, &b, true, LINK_UNAUTHENTIC); /* no challenge */
	get_challenge(&n);
	ask(&n, LINK_START, &b, false, LINK_UNAUTHENTIC);
	start_ok(&n);
	encode(&n, &whole, LINK_START, &b, true);
	call_bytes(&n, &c, whole.data, whole.len);
	wait_reply(&c, LINK_OK);
	call_free(&c);
	call_bytes(&n, &c, whole.data, whole.len); /* the same bytes again */
	wait_reply(&c, LINK_UNAUTHENTIC);
	call_free(&c);
	node_ready(&other);
	buf_reset(&whole);
	encode(&n, &whole, LINK_START, &b, true); /* through another connection */
	call_bytes(&other, &c, whole.data, whole.len);
	wait_reply(&c, LINK_UNAUTHENTIC);
	call_free(&c);
	assert_int_equal(t.start_calls, 2);
	buf_free(&b);
	buf_free(&whole);
	node_close(&n);
	node_close(&other);
}

static void test_poll_parks_and_wakes(void **state)
{
	struct node n;
	struct call c;

	(void)state;
	node_ready(&n);
	begin_next(&n, &c, 10000);
	wait_parked(&c, 1);
	t.waiting_assigns = 2;
	dispatch_wake_queued(t.d, 4096, 1, true, 1); /* does not fit */
	dispatch_wake_queued(t.d, 512, 1, false, 1); /* not for an emulated node */
	assert_false(loop_until(t.base, call_over, &c, 50));
	dispatch_wake_queued(t.d, 512, 1, true, 1);
	wait_next(&c, 2);
	begin_next(&n, &c, 100); /* nothing comes: answered by itself */
	wait_next(&c, 0);
	t.waiting_assigns = 1; /* there is work already: at once */
	begin_next(&n, &c, 10000);
	wait_next(&c, 1);
	start_ok(&n); /* other requests pass while a poll is parked */
	begin_next(&n, &c, 10000);
	wait_parked(&c, t.next_calls + 1);
	start_ok(&n);
	dispatch_wake_node(t.d, NODE);
	call_over(&c);
	dispatch_drain(t.d);
	wait_next(&c, 0);
	node_close(&n);
}

/* A wake while the store is being asked must not be lost. */
static void test_wake_is_not_lost(void **state)
{
	struct node n;
	struct call c;

	(void)state;
	node_ready(&n);
	t.hold_next = true;
	begin_next(&n, &c, 10000);
	next_wanted = 1;
	while (c.sending)
		loop_until(t.base, call_over, &c, 5);
	assert_true(loop_until(t.base, next_called, NULL, WAIT_MS));
	dispatch_wake_queued(t.d, 512, 1, true, 1);
	t.hold_next = false;
	answer_next(t.held_cb, t.held_arg); /* saw nothing */
	t.waiting_assigns = 1;
	wait_next(&c, 1);
	assert_int_equal(t.next_calls, 2);
	node_close(&n);
}

static void test_second_poll_replaces_the_first(void **state)
{
	struct node n;
	struct call first, second;

	(void)state;
	node_ready(&n);
	begin_next(&n, &first, 10000);
	wait_parked(&first, 1);
	begin_next(&n, &second, 10000);
	wait_next(&first, 0);
	wait_parked(&second, 2);
	t.waiting_assigns = 1;
	dispatch_wake_queued(t.d, 1, 1, true, 1);
	wait_next(&second, 1);
	node_close(&n);
}

static bool all_over(void *arg)
{
	struct call *c = arg;
	bool over = true;

	for (size_t i = 0; i < 3 * CONTEXTS; i++)
		over = call_over(&c[i]) && over;
	return over;
}

/* More requests than contexts: parked polls make room. Then all connections go at once, and the contexts come back. */
static void test_contexts_run_out(void **state)
{
	struct node n[CONTEXTS * 2], last;
	struct call c[CONTEXTS * 2], many[3 * CONTEXTS];
	struct buf b = BUF_INIT(1024);

	(void)state;
	for (size_t i = 0; i < COUNT(n); i++) {
		node_ready(&n[i]);
		begin_next(&n[i], &c[i], 10000);
		while (c[i].sending)
			loop_until(t.base, call_over, &c[i], 5);
	}
	start_ok(&n[0]);
	for (size_t i = 0; i < COUNT(n); i++) {
		call_over(&c[i]);
		call_free(&c[i]);
		node_close(&n[i]);
	}
	node_ready(&last);
	put_start(&b);
	for (size_t i = 0; i < COUNT(many); i++)
		begin(&last, &many[i], LINK_START, &b, true);
	assert_true(loop_until(t.base, all_over, many, WAIT_MS));
	for (size_t i = 0; i < COUNT(many); i++) {
		assert_int_equal(many[i].rv, 0);
		call_free(&many[i]);
	}
	buf_free(&b);
	node_close(&last);
}

static void test_revoked(void **state)
{
	struct node n;
	struct call c;

	(void)state;
	node_ready(&n);
	begin_next(&n, &c, 10000);
	wait_parked(&c, 1);
	t.revoked = true;
	dispatch_wake_node(t.d, NODE);
	wait_reply(&c, LINK_REVOKED);
	call_free(&c);
	assert_true(loop_until(t.base, has_no_pipe, &n, WAIT_MS)); /* it dials again a second later */
	node_close(&n);
	node_ready(&n);
	begin_next(&n, &c, 0);
	wait_reply(&c, LINK_REVOKED);
	call_free(&c);
	node_close(&n);
}

static void test_store_is_away(void **state)
{
	struct buf b = BUF_INIT(1024);
	struct node n;

	(void)state;
	node_ready(&n);
	start_ok(&n);
	t.unavailable = true;
	put_start(&b);
	ask(&n, LINK_START, &b, true, LINK_BUSY);
	t.unavailable = false;
	ask(&n, LINK_START, &b, true, LINK_OK);
	buf_free(&b);
	node_close(&n);
}

static void test_malformed_is_cut(void **state)
{
	struct node n;
	struct call c;
	uint8_t junk[64];

	(void)state;
	node_ready(&n);
	for (int i = 0; i < 8; i++) {
		randombytes_buf(junk, sizeof(junk));
		call_bytes(&n, &c, junk, sizeof(junk));
		wait_reply(&c, LINK_BAD);
		call_free(&c);
	}
	call_bytes(&n, &c, junk, sizeof(junk));
	wait_reply(&c, LINK_BAD);
	call_free(&c);
	assert_true(loop_until(t.base, has_no_pipe, &n, WAIT_MS));
	node_close(&n);
}

static void test_too_long_is_cut(void **state)
{
	struct node n, good;
	struct call c;
	uint8_t *big = calloc(1, LINK_MESSAGE_MAX + 4096);

	(void)state;
	node_ready(&n);
	call_bytes(&n, &c, big, LINK_MESSAGE_MAX + 4096);
	assert_true(loop_until(t.base, call_over, &c, WAIT_MS));
	assert_int_not_equal(c.rv, 0);
	call_free(&c);
	free(big);
	node_ready(&good);
	start_ok(&good);
	node_close(&good);
	node_close(&n);
}

static void test_blob_and_events(void **state)
{
	struct buf b = BUF_INIT(65536), ev = BUF_INIT(65536);
	struct event_head h = {
		.run_id = RUN, .seq = 3, .queued_at_ms = 1700000000000, .t_ms = 250, .source = EVENT_HOST, .type = EV_MICROVM_READY
	};
	struct link_record record;
	struct link_events m = { .first_seq = 3, .records = &record, .record_count = 1 };
	struct link_blob blob;
	struct node n;

	(void)state;
	memset(&blob, 0, sizeof(blob));
	assert_true(text_copy(blob.run_id, sizeof(blob.run_id), RUN));
	assert_true(text_copy(m.run_id, sizeof(m.run_id), RUN));
	assert_true(event_make(&ev, &h, "{}", 2));
	record = (struct link_record){ .type = EV_MICROVM_READY, .bytes = ev.data, .len = (uint32_t)ev.len };
	node_ready(&n);
	link_events_encode(&m, &b);
	ask(&n, LINK_EVENTS, &b, true, LINK_OK);
	assert_int_equal(t.last_t_ms, 250);
	buf_reset(&b);
	m.first_seq = 4; /* not what the event says */
	link_events_encode(&m, &b);
	ask(&n, LINK_EVENTS, &b, true, LINK_BAD);
	assert_int_equal(t.events_calls, 1);
	buf_reset(&b);
	link_blob_encode(&blob, &b);
	ask(&n, LINK_BLOB, &b, true, LINK_OK);
	buf_free(&b);
	buf_free(&ev);
	node_close(&n);
}

static bool is_down(void *arg)
{
	const char *why;

	(void)arg;
	return !dispatch_healthy(t.d, &why);
}

static bool is_up(void *arg)
{
	return !is_down(arg);
}

/* A listener that stopped taking connections is replaced on the same port. */
static void test_watchdog(void **state)
{
	struct node n, later;

	(void)state;
	node_ready(&n);
	start_ok(&n);
	nng_listener_close(t.d->listener);
	assert_true(loop_until(t.base, is_down, NULL, WAIT_MS));
	node_close(&n);
	assert_true(loop_until(t.base, is_up, NULL, WAIT_MS));
	node_ready(&later);
	start_ok(&later);
	node_close(&later);
}

/* Connections that say nothing, or too little, are shut; a node that is idle is not. */
static void test_strangers(void **state)
{
	struct raw_client silent, slow;
	struct node n;

	(void)state;
	node_ready(&n);
	start_ok(&n);
	raw_open(&silent, t.d->port);
	raw_open(&slow, t.d->port);
	slow.send = "\x16\x03\x01";
	slow.left = 3;
	assert_true(loop_until(t.base, raw_step, &silent, WAIT_MS));
	assert_true(silent.ended);
	assert_true(loop_until(t.base, raw_step, &slow, WAIT_MS));
	assert_true(slow.ended);
	close(silent.fd);
	close(slow.fd);
	start_ok(&n);
	node_close(&n);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_address, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_enrol, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_signed_only, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_poll_parks_and_wakes, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_wake_is_not_lost, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_second_poll_replaces_the_first, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_contexts_run_out, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_revoked, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_store_is_away, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_malformed_is_cut, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_too_long_is_cut, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_blob_and_events, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_watchdog, set_up_fast, tear_down),
		cmocka_unit_test_setup_teardown(test_strangers, set_up_fast, tear_down),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
