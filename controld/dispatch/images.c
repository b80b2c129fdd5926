/*
 * What hosts ask about images of guests, and their goodbye: decode, judge, ask the store, answer (as requests.c does for runs). On
 * the loop's thread; nothing here blocks.
 */
#include "internal.h"

#include "check.h"

#include "common/log.h"

#include <string.h>

static void on_wanted(void *arg, const struct store_images *m, const struct err *e)
{
	struct request *r = arg;
	struct link_image_reply reply = { .wanted = false };
	struct buf b = BUF_INIT(512);
	uint8_t hash[SHA256_LEN], message[128];

	if (e) {
		request_store_error(r, e);
		return;
	}
	if (m->count == 1) {
		reply.wanted = true;
		for (int i = 0; i < LINK_IMAGE_FILES; i++) {
			memcpy(reply.sha256[i], m->images[0].files[i].sha256, SHA256_LEN);
			reply.size[i] = m->images[0].files[i].size;
		}
		link_image_hash((const uint8_t(*)[SHA256_LEN])reply.sha256, hash);
		pki_root_sign(r->d->pki, message, link_image_message(r->head.node_id, hash, message), reply.signature);
	}
	link_image_reply_encode(&reply, &b);
	request_reply(r, &b);
	buf_free(&b);
}

void image_begin(struct request *r)
{
	struct link_image m;
	struct err e;

	if (link_image_decode(r->head.body, r->head.body_len, &m, &e) != 0 || check_image(&m, &e) != 0)
		request_bad(r, &e);
	else if (store_image_wanted(r->d->store, r->head.node_id, &m, on_wanted, r, &e) != 0)
		request_store_error(r, &e);
}

void image_blob_begin(struct request *r)
{
	struct link_image_blob m;
	struct err e;

	if (link_image_blob_decode(r->head.body, r->head.body_len, &m, &e) != 0)
		request_bad(r, &e);
	else if (store_image_blob(r->d->store, &m, request_on_blob, r, &e) != 0)
		request_store_error(r, &e);
}

static void on_bye(void *arg, const struct store_done *d, const struct err *e)
{
	struct request *r = arg;
	struct buf b = BUF_INIT(16);

	if (e) {
		request_store_error(r, e);
		return;
	}
	log_info("node stopped node=%s known=%s", r->head.node_id, d->result == STORE_DONE ? "yes" : "no");
	request_reply(r, &b);
	buf_free(&b);
}

void bye_begin(struct request *r)
{
	struct link_bye m;
	struct err e;

	if (link_bye_decode(r->head.body, r->head.body_len, &m, &e) != 0) {
		request_bad(r, &e);
		return;
	}
	next_answer_node(r->d, r->head.node_id); /* a poll that is parked here would hear of runs that nobody takes any more */
	if (store_node_bye(r->d->store, r->head.node_id, m.epoch, on_bye, r, &e) != 0)
		request_store_error(r, &e);
}
