/*
 * What a node may ask for, once server.c knows that it is that node: decode, judge (check.c), ask the store, answer. A table gives
 * each type its handler. On the loop's thread; nothing here blocks. A request stays WORKING until its store function has called
 * back, which it does exactly once, so a request is a safe argument for it.
 */
#include "internal.h"

#include "check.h"

#include "common/log.h"

#define FENCE_REPLY_MAX 64

static void answer_fence(struct request *r, enum fence fence)
{
	struct buf b = BUF_INIT(FENCE_REPLY_MAX);

	/* start and refuse have the same one-field answer. */
	struct link_start_reply reply = { .fence = (uint8_t)fence };

	link_start_reply_encode(&reply, &b);
	request_reply(r, &b);
	buf_free(&b);
}

static void answer_expected(struct request *r, enum fence fence, int64_t expected)
{
	struct buf b = BUF_INIT(FENCE_REPLY_MAX);
	struct link_events_reply reply = { .fence = (uint8_t)fence, .expected_seq = expected > 0 ? (uint64_t)expected : 0 };

	/* events and finish have the same answer. */
	link_events_reply_encode(&reply, &b);
	request_reply(r, &b);
	buf_free(&b);
}

static void on_fence(void *arg, const struct store_fence *f, const struct err *e)
{
	struct request *r = arg;

	if (e)
		request_store_error(r, e);
	else if (r->head.type == LINK_START || r->head.type == LINK_REFUSE)
		answer_fence(r, f->fence);
	else
		answer_expected(r, f->fence, f->expected_seq);
}

void request_bad(struct request *r, const struct err *e)
{
	log_warn("link request refused node=%s type=%u reason=\"%s\"", r->head.node_id, r->head.type, e->text);
	dispatch_strike(r->d, r->pipe_id, "malformed request");
	request_refuse(r, LINK_BAD, e->text);
}

static void begin_start(struct request *r)
{
	struct link_start m;
	struct err e;

	if (link_start_decode(r->head.body, r->head.body_len, &m, &e) != 0 || check_run_id(m.run_id, &e) != 0)
		request_bad(r, &e);
	else if (store_run_start(r->d->store, r->head.node_id, m.run_id, m.token, on_fence, r, &e) != 0)
		request_store_error(r, &e);
}

static void begin_events(struct request *r)
{
	struct link_events m;
	struct err e;
	int64_t last_t_ms;

	if (link_events_decode(r->head.body, r->head.body_len, &m, &e) != 0) {
		request_bad(r, &e);
		return;
	}
	if (check_events(&m, &last_t_ms, &e) != 0)
		request_bad(r, &e);
	else if (store_run_events(r->d->store, r->head.node_id, &m, last_t_ms, on_fence, r, &e) != 0)
		request_store_error(r, &e);
	link_events_free(&m);
}

static void begin_finish(struct request *r)
{
	struct link_finish m;
	struct err e;

	if (link_finish_decode(r->head.body, r->head.body_len, &m, &e) != 0) {
		request_bad(r, &e);
		return;
	}
	if (check_finish(&m, &e) != 0)
		request_bad(r, &e);
	else if (store_run_finish(r->d->store, r->head.node_id, &m, on_fence, r, &e) != 0)
		request_store_error(r, &e);
	link_finish_free(&m);
}

static void begin_refuse(struct request *r)
{
	struct link_refuse m;
	struct err e;

	if (link_refuse_decode(r->head.body, r->head.body_len, &m, &e) != 0 || check_refuse(&m, &e) != 0) {
		request_bad(r, &e);
		return;
	}
	log_info("run refused by its node run=%s node=%s attempt_counts=%s code=%s", m.run_id, r->head.node_id,
			m.failed ? "yes" : "no", errcode_text((enum errcode)m.code));
	if (store_run_refuse(r->d->store, r->head.node_id, &m, on_fence, r, &e) != 0)
		request_store_error(r, &e);
}

void request_on_blob(void *arg, const struct store_blob *found, const struct err *e)
{
	struct request *r = arg;
	struct buf b = BUF_INIT(LINK_BLOB_MAX + 64);
	struct link_blob_reply reply = { .total = 0, .bytes = (const uint8_t *)"", .len = 0 };

	if (e) {
		request_store_error(r, e);
		return;
	}
	if (found->found) {
		reply.total = found->total;
		reply.bytes = found->bytes;
		reply.len = found->len;
	}
	link_blob_reply_encode(&reply, &b);
	request_reply(r, &b);
	buf_free(&b);
}

static void begin_blob(struct request *r)
{
	struct link_blob m;
	struct err e;

	if (link_blob_decode(r->head.body, r->head.body_len, &m, &e) != 0 || check_blob(&m, &e) != 0)
		request_bad(r, &e);
	else if (store_blob(r->d->store, r->head.node_id, &m, request_on_blob, r, &e) != 0)
		request_store_error(r, &e);
}

static void begin_next(struct request *r)
{
	struct err e;

	if (link_next_decode(r->head.body, r->head.body_len, &r->next, &e) != 0) {
		request_bad(r, &e);
		return;
	}
	if (check_next(&r->next, &e) != 0) {
		link_next_free(&r->next);
		request_bad(r, &e);
		return;
	}
	next_begin(r);
}

void request_dispatch(struct request *r)
{
	static void (*const handlers[])(struct request *) = {
		[LINK_NEXT] = begin_next,
		[LINK_START] = begin_start,
		[LINK_EVENTS] = begin_events,
		[LINK_FINISH] = begin_finish,
		[LINK_REFUSE] = begin_refuse,
		[LINK_BLOB] = begin_blob,
		[LINK_IMAGE] = image_begin,
		[LINK_IMAGE_BLOB] = image_blob_begin,
		[LINK_BYE] = bye_begin,
	};
	uint8_t type = r->head.type;

	if (type >= sizeof(handlers) / sizeof(handlers[0]) || !handlers[type]) {
		dispatch_strike(r->d, r->pipe_id, "unknown type of request");
		request_refuse(r, LINK_BAD, "this type of request does not exist here");
	} else {
		handlers[type](r);
	}
}
