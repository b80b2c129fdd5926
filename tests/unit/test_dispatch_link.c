/* The node link over real nng and TLS: enrolment, signatures, revocation, what is malformed, strangers, a listener that hangs. */
/* link: controld_dispatch controld_base ephproto_link ephproto ephloop_event EPH::nng EPH::sodium EPH::crypto */
/* sources: tests/unit/dispatch_rig.c tests/unit/dispatch_store.c */
#include "dispatch_rig.h"

#include <sodium.h>

static void test_address(void **state)
{
	struct dispatch_options opt = { .base = rig.base,
		.secrets = rig.secrets,
		.pki = rig.pki,
		.listen = dispatch_address(rig.d),
		.contexts_max = 16,
		.poll_ms = 1000 };
	struct dispatch *second;
	struct err e;

	(void)state;
	assert_int_equal(strncmp(dispatch_address(rig.d), "127.0.0.1:", 10), 0);
	assert_string_not_equal(dispatch_address(rig.d), "127.0.0.1:0");
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
	crypto_sign_detached(sig, NULL, m.data, m.len, rig.sign_secret);
	buf_free(&m);
}

static void put_enrol(struct node *n, const char *secret, struct buf *b)
{
	struct link_enrol m;

	memset(&m, 0, sizeof(m));
	assert_true(text_copy(m.secret, sizeof(m.secret), secret));
	assert_true(text_copy(m.name, sizeof(m.name), "host"));
	assert_true(text_copy(m.isolation, sizeof(m.isolation), "emulated"));
	crypto_sign_ed25519_sk_to_pk(m.sign_key, rig.sign_secret);
	memcpy(m.seal_key, rig.node.seal_key, 32);
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
	pki_root_public(rig.pki, root);
	assert_memory_equal(root, r.root_key, 32);
	assert_true(pki_node_certified(root, r.node_id, rig.node.sign_key, r.certificate));
	assert_int_equal(rig.certify_calls, 1);
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
	assert_int_equal(rig.start_calls, 2);
	buf_free(&b);
	buf_free(&whole);
	node_close(&n);
	node_close(&other);
}

static void test_revoked(void **state)
{
	struct node n;
	struct call c;

	(void)state;
	node_ready(&n);
	begin_next(&n, &c, 10000);
	wait_parked(&c, 1);
	rig.revoked = true;
	dispatch_wake_node(rig.d, NODE);
	wait_reply(&c, LINK_REVOKED);
	call_free(&c);
	assert_true(loop_until(rig.base, has_no_pipe, &n, WAIT_MS)); /* it dials again a second later */
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
	rig.unavailable = true;
	put_start(&b);
	ask(&n, LINK_START, &b, true, LINK_BUSY);
	rig.unavailable = false;
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
	assert_true(loop_until(rig.base, has_no_pipe, &n, WAIT_MS));
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
	assert_true(loop_until(rig.base, call_over, &c, WAIT_MS));
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
	assert_int_equal(rig.last_t_ms, 250);
	buf_reset(&b);
	m.first_seq = 4; /* not what the event says */
	link_events_encode(&m, &b);
	ask(&n, LINK_EVENTS, &b, true, LINK_BAD);
	assert_int_equal(rig.events_calls, 1);
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
	return !dispatch_healthy(rig.d, &why);
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
	nng_listener_close(rig.d->listener);
	assert_true(loop_until(rig.base, is_down, NULL, WAIT_MS));
	node_close(&n);
	assert_true(loop_until(rig.base, is_up, NULL, WAIT_MS));
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
	raw_open(&silent, rig.d->port);
	raw_open(&slow, rig.d->port);
	slow.send = "\x16\x03\x01";
	slow.left = 3;
	assert_true(loop_until(rig.base, raw_step, &silent, WAIT_MS));
	assert_true(silent.ended);
	assert_true(loop_until(rig.base, raw_step, &slow, WAIT_MS));
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
