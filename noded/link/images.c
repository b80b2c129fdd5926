/*
 * What keeper wants to know about images: which one this host shall have (asked every LINK_IMAGE_MS, sooner when the state
 * changed), and pieces of it, one at a time and only with slots that polls and runs leave free. And the goodbye of a host that
 * stops. Carried, not judged: keeper checks what comes. On link's loop.
 */
#include "link_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <stdlib.h>

#define IMAGE_TIMEOUT_MS 20000
#define BYE_TIMEOUT_MS 1000
#define REFUSED_PAUSE_MS 60000 /* a controld that does not know these questions */
#define SOON_MS 1000
#define SLOTS_FOR_RUNS 2

static bool ask(struct link *l, uint8_t type, const struct buf *body, int timeout_ms)
{
	struct asked *a = body->failed ? NULL : calloc(1, sizeof(*a));

	if (a == NULL)
		return false;
	*a = (struct asked){ .type = type, .sent_boot_ns = clock_boot_ns() };
	if (peers_send(l->peers, type, body->data, body->len, timeout_ms, true, a))
		return true;
	free(a);
	return false;
}

static void give_piece(struct link *l, uint64_t total, const uint8_t *bytes, size_t n)
{
	struct buf b = BUF_INIT(LINK_BLOB_MAX + 64);

	wire_put_u64(&b, l->images.piece.offset);
	wire_put_u64(&b, total);
	wire_put_bytes(&b, bytes, n);
	l->images.piece_due = false;
	if (!b.failed)
		(void)link_to_keeper(l, RF_KEEPER_IMAGE_BLOB, b.data, b.len);
	buf_free(&b);
}

static void pump_piece(struct link *l)
{
	struct buf b = BUF_INIT(128);

	if (!l->images.piece_due || l->images.piece_out ||
			peers_free_slots(l->peers) <= (uint32_t)(POLLS_MAX - l->polls) + SLOTS_FOR_RUNS)
		return;
	link_image_blob_encode(&l->images.piece, &b);
	l->images.piece_out = ask(l, LINK_IMAGE_BLOB, &b, IMAGE_TIMEOUT_MS);
	if (!l->images.piece_out)
		give_piece(l, 0, (const uint8_t *)"", 0); /* keeper pauses */
	buf_free(&b);
}

static void pump_question(struct link *l)
{
	struct buf b = BUF_INIT(1024);
	int64_t now = clock_boot_ms();

	if (!l->images.known || l->images.question_out || now < l->images.after_ms || !l->leased ||
			peers_free_slots(l->peers) <= (uint32_t)(POLLS_MAX - l->polls))
		return;
	link_image_encode(&l->images.state, &b);
	l->images.question_out = ask(l, LINK_IMAGE, &b, IMAGE_TIMEOUT_MS);
	l->images.after_ms = now + (l->images.question_out ? LINK_IMAGE_MS : SOON_MS);
	buf_free(&b);
}

static void pump_bye(struct link *l)
{
	struct link_bye bye = { .epoch = l->init.epoch };
	struct buf b = BUF_INIT(64);

	if (!l->bye_due || l->bye_out)
		return;
	link_bye_encode(&bye, &b);
	l->bye_out = ask(l, LINK_BYE, &b, BYE_TIMEOUT_MS);
	if (!l->bye_out)
		(void)link_to_keeper(l, RF_KEEPER_BYE, NULL, 0); /* nobody hears it: the lease says it later */
	l->bye_due = l->bye_out;
	buf_free(&b);
}

void images_pump(struct link *l)
{
	pump_bye(l);
	if (l->bye_due)
		return;
	pump_question(l);
	pump_piece(l);
}

int64_t images_next_ms(const struct link *l)
{
	return l->images.known && !l->images.question_out && l->leased ? l->images.after_ms : 0;
}

/* --- answers ------------------------------------------------------------------------------------------------------------------ */

static void piece_answer(struct link *l, const struct link_reply *reply)
{
	struct link_blob_reply blob;
	struct err e;

	l->images.piece_out = false;
	if (reply == NULL || reply->result != LINK_OK || link_blob_reply_decode(reply->body, reply->body_len, &blob, &e) < 0 ||
			blob.len > LINK_BLOB_MAX)
		give_piece(l, 0, (const uint8_t *)"", 0);
	else
		give_piece(l, blob.total, blob.bytes, blob.len);
}

void images_answer(struct link *l, const struct asked *a, const struct link_reply *reply)
{
	if (reply != NULL && reply->result == LINK_REVOKED)
		link_kill_all(l);
	if (a->type == LINK_BYE) {
		(void)link_to_keeper(l, RF_KEEPER_BYE, NULL, 0);
	} else if (a->type == LINK_IMAGE_BLOB) {
		piece_answer(l, reply);
	} else {
		l->images.question_out = false;
		if (reply != NULL && reply->result == LINK_OK)
			(void)link_to_keeper(l, RF_KEEPER_IMAGE, reply->body, reply->body_len);
		else if (reply != NULL && reply->result == LINK_BAD)
			l->images.after_ms = clock_boot_ms() + REFUSED_PAUSE_MS;
	}
}

/* --- from keeper -------------------------------------------------------------------------------------------------------------- */

void images_state(struct link *l, const uint8_t *body, size_t n)
{
	struct link_image m;
	struct err e;

	if (link_image_decode(body, n, &m, &e) < 0) {
		log_error("frame about images malformed error=%s", e.text);
		return;
	}
	l->images.state = m;
	if (!l->images.known || l->images.after_ms > clock_boot_ms() + SOON_MS)
		l->images.after_ms = clock_boot_ms() + (l->images.known ? SOON_MS : 0);
	l->images.known = true;
}

void images_ask(struct link *l, const uint8_t *body, size_t n)
{
	struct err e;

	if (link_image_blob_decode(body, n, &l->images.piece, &e) < 0)
		log_error("frame about images malformed error=%s", e.text);
	else
		l->images.piece_due = true;
}
