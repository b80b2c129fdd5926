/* Who is at the other end of a pipe: signatures, challenges, counters, revocation, enrolment proofs. */
/* link: controld_dispatch ephproto_link EPH::sodium */
#include "unit.h"

#include "common/text.h"
#include "controld/dispatch/peer.h"

#include <sodium.h>

#define NODE "node_0123456789abcdef0123456789abcdef"
#define OTHER "node_ffffffffffffffffffffffffffffffff"

static uint8_t public_key[32], secret_key[64], other_public[32], other_secret[64], seal_key[32];

static int set_up(void **state)
{
	(void)state;
	if (sodium_init() < 0)
		return -1;
	crypto_sign_keypair(public_key, secret_key);
	crypto_sign_keypair(other_public, other_secret);
	return 0;
}

static void sign(struct link_request *r, const uint8_t challenge[32], const uint8_t key[64])
{
	uint8_t message[256];
	size_t n = link_signed_message(r, challenge, message);

	assert_true(n > 0);
	crypto_sign_detached(r->signature, NULL, message, n, key);
}

static struct link_request request(struct peer *p, uint32_t context, uint64_t counter)
{
	struct link_request r = { .type = LINK_START,
		.request_id = 1,
		.context = context,
		.counter = counter,
		.body = (const uint8_t *)"body",
		.body_len = 4 };

	assert_true(text_copy(r.node_id, sizeof(r.node_id), NODE));
	sign(&r, peer_challenge(p), secret_key);
	return r;
}

static void good_peer(struct peer *p, uint32_t id)
{
	peer_init(p, id);
	peer_challenge(p);
	peer_set_node(p, NODE, public_key, seal_key, false);
}

static void test_good(void **state)
{
	struct peer p;
	struct link_request r;

	(void)state;
	good_peer(&p, 1);
	for (uint64_t counter = 1; counter < 4; counter++) {
		r = request(&p, 0, counter);
		assert_int_equal(peer_check(&p, &r), PEER_OK);
	}
	r = request(&p, 1, 1); /* another context counts for itself */
	assert_int_equal(peer_check(&p, &r), PEER_OK);
	assert_true(p.proven);
}

static void test_no_challenge(void **state)
{
	struct peer p, asked;
	struct link_request r;

	(void)state;
	peer_init(&p, 1);
	good_peer(&asked, 2);
	r = request(&asked, 0, 1);
	assert_int_equal(peer_check(&p, &r), PEER_NO_CHALLENGE);
	peer_challenge(&p);
	assert_int_equal(peer_check(&p, &r), PEER_NEED_NODE);
}

static void test_other_pipes_challenge(void **state)
{
	struct peer one, two;
	struct link_request r;

	(void)state;
	good_peer(&one, 1);
	good_peer(&two, 2);
	assert_memory_not_equal(one.challenge, two.challenge, 32);
	r = request(&one, 0, 1);
	assert_int_equal(peer_check(&two, &r), PEER_SIGNATURE);
	assert_int_equal(peer_check(&one, &r), PEER_OK);
	assert_memory_equal(peer_challenge(&one), one.challenge, 32); /* asked again: the same */
}

static void test_bad_signatures(void **state)
{
	struct peer p;
	struct link_request good, r;

	(void)state;
	good_peer(&p, 1);
	good = request(&p, 3, 7);
	for (size_t i = 0; i < 64; i++) {
		r = good;
		r.signature[i] ^= 0x10;
		assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
	}
	r = good;
	sign(&r, p.challenge, other_secret);
	assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
	r = good;
	r.type = LINK_FINISH;
	assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
	r = good;
	r.context = 4;
	assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
	r = good;
	r.counter = 8;
	assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
	r = good;
	r.body = (const uint8_t *)"bodY";
	assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
	r = good;
	r.body_len = 3;
	assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
	assert_int_equal(p.seen_count, 0); /* nothing of all that was remembered */
	assert_int_equal(peer_check(&p, &good), PEER_OK);
}

static void test_replay(void **state)
{
	struct peer p;
	struct link_request r;

	(void)state;
	good_peer(&p, 1);
	r = request(&p, 0, 5);
	assert_int_equal(peer_check(&p, &r), PEER_OK);
	assert_int_equal(peer_check(&p, &r), PEER_REPLAY);
	r = request(&p, 0, 4);
	assert_int_equal(peer_check(&p, &r), PEER_REPLAY);
	r = request(&p, 0, UINT64_MAX);
	assert_int_equal(peer_check(&p, &r), PEER_OK);
	r = request(&p, 0, 6);
	assert_int_equal(peer_check(&p, &r), PEER_REPLAY);
}

static void test_contexts_are_bounded(void **state)
{
	struct peer p;
	struct link_request r;

	(void)state;
	good_peer(&p, 1);
	for (uint32_t i = 0; i < PEER_CONTEXTS_MAX; i++) {
		r = request(&p, i * 1000, 1);
		assert_int_equal(peer_check(&p, &r), PEER_OK);
	}
	r = request(&p, 1, 1);
	assert_int_equal(peer_check(&p, &r), PEER_CONTEXTS);
	r = request(&p, 0, 2);
	assert_int_equal(peer_check(&p, &r), PEER_OK);
}

static void test_other_node(void **state)
{
	struct peer p;
	struct link_request r;

	(void)state;
	good_peer(&p, 1);
	/* A name alone proves nothing: the next one may still come. */
	r = request(&p, 0, 1);
	assert_true(text_copy(r.node_id, sizeof(r.node_id), OTHER));
	assert_int_equal(peer_check(&p, &r), PEER_NEED_NODE);
	r = request(&p, 0, 1);
	assert_int_equal(peer_check(&p, &r), PEER_OK);
	r = request(&p, 0, 2);
	assert_true(text_copy(r.node_id, sizeof(r.node_id), OTHER));
	sign(&r, p.challenge, other_secret);
	assert_int_equal(peer_check(&p, &r), PEER_OTHER_NODE);
}

static void test_revoked(void **state)
{
	struct peer p;
	struct link_request r;

	(void)state;
	good_peer(&p, 1);
	r = request(&p, 0, 1);
	assert_int_equal(peer_check(&p, &r), PEER_OK);
	p.stale = true;
	r = request(&p, 0, 2);
	assert_int_equal(peer_check(&p, &r), PEER_NEED_NODE);
	peer_set_node(&p, NODE, public_key, seal_key, true);
	assert_int_equal(peer_check(&p, &r), PEER_REVOKED);
	/* Not told to somebody who does not hold the key. */
	r.signature[0] ^= 1;
	assert_int_equal(peer_check(&p, &r), PEER_SIGNATURE);
}

/* --- enrolment --------------------------------------------------------------------------------------------------------------- */

static void sign_parts(uint8_t sig[64], const char *label, const void *a, size_t a_len, const void *b, size_t b_len)
{
	struct buf m = BUF_INIT(512);

	buf_add_str(&m, label);
	buf_add(&m, a, a_len);
	buf_add(&m, b, b_len);
	crypto_sign_detached(sig, NULL, m.data, m.len, secret_key);
	buf_free(&m);
}

static struct link_enrol enrolment(struct peer *p)
{
	struct link_enrol n;

	memset(&n, 0, sizeof(n));
	assert_true(text_copy(n.secret, sizeof(n.secret), "ephnt_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"));
	assert_true(text_copy(n.name, sizeof(n.name), "host"));
	assert_true(text_copy(n.isolation, sizeof(n.isolation), "emulated"));
	memcpy(n.sign_key, public_key, 32);
	memset(n.seal_key, 1, 32);
	memset(n.receipt_key, 2, 32);
	sign_parts(n.seal_sig, "ephemeral/seal-key/1", n.seal_key, 32, "", 0);
	sign_parts(n.receipt_sig, "ephemeral/receipt-key/1", n.receipt_key, 32, "", 0);
	sign_parts(n.proof, "ephemeral/enrol/1", peer_challenge(p), 32, n.secret, strlen(n.secret));
	return n;
}

static void test_enrol(void **state)
{
	struct peer p, other;
	struct link_enrol n;

	(void)state;
	peer_init(&p, 1);
	peer_init(&other, 2);
	n = enrolment(&p);
	assert_null(peer_enrol_fault(&p, &n));
	assert_non_null(peer_enrol_fault(&other, &n)); /* no challenge there */
	peer_challenge(&other);
	assert_non_null(strstr(peer_enrol_fault(&other, &n), "proof"));
	n.seal_key[0] ^= 1;
	assert_non_null(strstr(peer_enrol_fault(&p, &n), "sealing key"));
	n = enrolment(&p);
	memcpy(n.receipt_key, n.seal_key, 32);
	assert_non_null(strstr(peer_enrol_fault(&p, &n), "receipt key"));
	n = enrolment(&p);
	n.secret[10] = 'b'; /* the proof is bound to the secret */
	assert_non_null(strstr(peer_enrol_fault(&p, &n), "proof"));
	n = enrolment(&p);
	assert_true(text_copy(n.isolation, sizeof(n.isolation), "none"));
	assert_non_null(strstr(peer_enrol_fault(&p, &n), "isolation"));
	n = enrolment(&p);
	n.secret[20] = '\0';
	assert_non_null(strstr(peer_enrol_fault(&p, &n), "secret"));
	n = enrolment(&p);
	n.name[0] = '\0';
	assert_non_null(strstr(peer_enrol_fault(&p, &n), "name"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_good),
		cmocka_unit_test(test_no_challenge),
		cmocka_unit_test(test_other_pipes_challenge),
		cmocka_unit_test(test_bad_signatures),
		cmocka_unit_test(test_replay),
		cmocka_unit_test(test_contexts_are_bounded),
		cmocka_unit_test(test_other_node),
		cmocka_unit_test(test_revoked),
		cmocka_unit_test(test_enrol),
	};

	return cmocka_run_group_tests(tests, set_up, NULL);
}
