/* link: controld_dispatch ephproto_link ephproto EPH::sodium */
/* sources: controld/api/stream_step.c */
/*
 * A node's request as controld reads it: the envelope, the signature check, then the body as if the signature had been good, judged
 * as dispatch/requests.c does. Also the other direction: an answer as a node reads it, and a join token.
 *
 * A signature that is not by the node's key is never taken; one that is, over any bytes, is taken once, by the node it names, and
 * not with another challenge, counter, type or body. What passes a check is clean, in range and found by those who read bytes.
 */
/* reads: controld/dispatch/check.c controld/dispatch/peer.c proto/link.c */
/* reached: 81 % of lines, 58 % of branches; the rest is memory, texts for the log, proofs that only a node can make */
#include "controld/dispatch/check.h"
#include "controld/dispatch/peer.h"

#include "common/price.h"
#include "common/text.h"
#include "controld/api/stream_step.h"
#include "fuzz.h"
#include "proto/link.h"

#include <sodium.h>

#define NODE "node_0123456789abcdef0123456789abcdef"

/* --- bodies
 * ----------------------------------------------------------------------------------------------------------------------- */

static void checked_events(const struct link_events *ev)
{
	char found[64];

	must(id_valid("run", ev->run_id) && ev->spent_micros >= 0 && ev->spent_micros <= PRICE_MICROS_MAX);
	for (uint32_t i = 0; i < ev->record_count; i++) {
		const struct link_record *r = &ev->records[i];

		must(stream_event_type(r->bytes, r->len, found, sizeof(found)));
		must(strcmp(found, event_type_text((enum event_type)r->type)) == 0);
	}
}

static void checked_finish(const struct link_finish *f)
{
	const struct usage *u = &f->end.usage;

	must(id_valid("run", f->run_id) && f->end.code < 1000);
	must(text_utf8_clean((const char *)f->end.output, f->end.output_len) && f->end.output_len <= GUEST_RESULT_MAX + 1);
	must(u->input_tokens >= 0 && u->output_tokens >= 0 && u->cached_input_tokens >= 0 && u->compute_ms >= 0);
	must(f->end.cost.total >= 0 && f->end.cost.total <= PRICE_MICROS_MAX);
}

static void decode_body(const struct link_request *r)
{
	const void *p = r->body;
	size_t n = r->body_len;
	struct link_enrol enrol;
	struct link_next next;
	struct link_start start;
	struct link_events events;
	struct link_finish finish;
	struct link_refuse refuse;
	struct link_blob blob;
	struct link_image image;
	struct link_image_blob piece;
	struct link_bye bye;
	struct err e;
	int64_t last;

	switch (r->type) {
	case LINK_ENROL: (void)!link_enrol_decode(p, n, &enrol, &e); break;
	case LINK_NEXT:
		if (link_next_decode(p, n, &next, &e) == 0) {
			(void)!check_next(&next, &e);
			link_next_free(&next);
		}
		break;
	case LINK_START:
		if (link_start_decode(p, n, &start, &e) == 0)
			(void)!check_run_id(start.run_id, &e);
		break;
	case LINK_EVENTS:
		if (link_events_decode(p, n, &events, &e) == 0) {
			if (check_events(&events, &last, &e) == 0)
				checked_events(&events);
			link_events_free(&events);
		}
		break;
	case LINK_FINISH:
		if (link_finish_decode(p, n, &finish, &e) == 0) {
			if (check_finish(&finish, &e) == 0)
				checked_finish(&finish);
			link_finish_free(&finish);
		}
		break;
	case LINK_REFUSE:
		if (link_refuse_decode(p, n, &refuse, &e) == 0)
			(void)!check_refuse(&refuse, &e);
		break;
	case LINK_BLOB:
		if (link_blob_decode(p, n, &blob, &e) == 0)
			(void)!check_blob(&blob, &e);
		break;
	case LINK_IMAGE:
		if (link_image_decode(p, n, &image, &e) == 0 && check_image(&image, &e) == 0)
			must(text_utf8_clean(image.note, strlen(image.note)) &&
					strspn(image.current, "0123456789abcdef") == strlen(image.current));
		break;
	case LINK_IMAGE_BLOB:
		if (link_image_blob_decode(p, n, &piece, &e) == 0)
			must(piece.offset % LINK_BLOB_MAX == 0 && piece.offset < LINK_IMAGE_BYTES_MAX);
		break;
	case LINK_BYE: (void)!link_bye_decode(p, n, &bye, &e); break;
	default: break;
	}
}

static void decode_reply(const uint8_t *data, size_t size)
{
	struct link_reply reply;
	struct link_next_reply next;
	struct link_image_reply image;
	struct err e;

	if (link_image_reply_decode(data, size, &image, &e) == 0)
		for (int i = 0; i < LINK_IMAGE_FILES; i++)
			must(image.size[i] <= LINK_IMAGE_BYTES_MAX && (image.size[i] > 0 || !image.wanted));
	if (link_reply_decode(data, size, &reply, &e) == 0 && link_next_reply_decode(reply.body, reply.body_len, &next, &e) == 0)
		link_next_reply_free(&next);
}

static void decode_token(const uint8_t *data, size_t size)
{
	struct join_token token;
	struct err e;
	char *s = strndup((const char *)data, size);
	struct buf again = BUF_INIT(65536);

	must(s);
	if (join_token_parse(s, &token, &e) == 0)
		must(join_token_print(&token, &again) && strcmp(buf_cstr(&again), s) == 0);
	buf_free(&again);
	free(s);
}

/* --- signatures ------------------------------------------------------------------------------------------------------------------
 */

static uint8_t sign_public[32], sign_secret[64];

static void sign(struct link_request *r, const uint8_t challenge[32])
{
	uint8_t message[256];
	size_t n = link_signed_message(r, challenge, message);

	must(n > 0 && n < sizeof(message));
	crypto_sign_detached(r->signature, NULL, message, n, sign_secret);
}

static struct peer connected(void)
{
	struct peer peer;

	peer_init(&peer, 1);
	peer_challenge(&peer);
	peer_set_node(&peer, NODE, sign_public, sign_public, false);
	return peer;
}

/* Any body, signed: taken once and as it is. `how` says what is changed afterwards. */
static void signed_request(uint8_t how, const uint8_t *p, size_t n)
{
	struct buf wire = BUF_INIT(LINK_MESSAGE_MAX);
	struct link_request r = { .type = (uint8_t)(how % LINK_BYE + 1),
		.request_id = how,
		.node_id = NODE,
		.context = how % 5,
		.counter = how / 8,
		.body = p,
		.body_len = n },
			    got;
	struct peer peer = connected(), other = connected();
	struct err e;

	sign(&r, peer.challenge);
	link_request_encode(&r, &wire);
	must(link_request_decode(wire.data, wire.len, &got, &e) == 0 && got.body_len == n && strcmp(got.node_id, NODE) == 0);
	must(peer_check(&peer, &got) == PEER_OK);
	must(peer_check(&peer, &got) == PEER_REPLAY);
	must(peer_check(&other, &got) == PEER_SIGNATURE);
	decode_body(&got);
	peer = connected();
	sign(&r, peer.challenge);
	got = r;
	switch (how % 5) {
	case 0: got.counter++; break;
	case 1: got.type = (uint8_t)(got.type % LINK_BYE + 1); break;
	case 2: got.context++; break;
	case 3: got.signature[how % 64] ^= 1; break;
	default: got.body_len -= n > 0; break;
	}
	must(peer_check(&peer, &got) == PEER_SIGNATURE || (how % 5 == 4 && n == 0));
	buf_free(&wire);
}

static void enrolment(const struct link_enrol *n)
{
	struct peer peer = connected();

	must(peer_enrol_fault(&peer, n) != NULL); /* its proof is over a challenge that was made now */
}

/* A request as it came: nobody knows the key that this would take. */
static void foreign(const uint8_t *data, size_t size)
{
	struct link_request r;
	struct link_enrol enrol;
	struct peer peer;
	struct err e;

	if (link_request_decode(data, size, &r, &e) == 0) {
		peer = connected();
		peer_set_node(&peer, r.node_id, sign_public, sign_public, false);
		must(peer_check(&peer, &r) != PEER_OK);
		decode_body(&r);
	}
	decode_reply(data, size);
	decode_token(data, size);
	if (link_enrol_decode(data, size, &enrol, &e) == 0)
		enrolment(&enrol);
	/* Bodies without an envelope, so that the fuzzer need not find one. */
	for (uint8_t type = LINK_ENROL; size > 0 && type <= LINK_BLOB; type++) {
		struct link_request bare = { .type = type, .body = data, .body_len = size };

		decode_body(&bare);
	}
}

/* First byte: 0..127 a request that is signed here, with this as what is changed; 128 and more: foreign bytes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint8_t seed[32] = { 1 };

	if (size < 1)
		return 0;
	if (sign_secret[0] == 0) {
		must(sodium_init() >= 0);
		crypto_sign_seed_keypair(sign_public, sign_secret, seed);
	}
	if (data[0] < 128)
		signed_request(data[0], data + 1, size - 1);
	else
		foreign(data + 1, size - 1);
	return 0;
}
