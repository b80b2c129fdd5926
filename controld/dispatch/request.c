/*
 * The life of a request: one nng context after the other receives, is worked on, perhaps parked, answers, and receives again.
 *
 *   RECEIVING -> WORKING (checked, then with the store) [-> PARKED -> WORKING ...] -> SENDING -> RECEIVING
 *
 * A context starts to receive only when its send has completed: nng 1.5.2 can crash otherwise. Who went away while parked is found
 * by the pipe's end, and answered into nothing, because a context is not freed by that. Everything here is on the loop, but for the
 * one function marked "nng thread", which appends to the inbox and returns.
 */
#include "internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/wire.h"

#include <event2/event.h>
#include <stdlib.h>
#include <string.h>

#define RECEIVING_LOW 4 /* below it more contexts are made, or polls shed */

static const char *const state_names[] = { "receiving", "working", "parked", "sending", "dead" };
static const bool legal_moves[REQUEST_STATES][REQUEST_STATES] = {
	[REQUEST_RECEIVING] = { [REQUEST_WORKING] = true, [REQUEST_DEAD] = true, [REQUEST_RECEIVING] = true },
	[REQUEST_WORKING] = { [REQUEST_PARKED] = true, [REQUEST_SENDING] = true, [REQUEST_RECEIVING] = true },
	[REQUEST_PARKED] = { [REQUEST_WORKING] = true },
	[REQUEST_SENDING] = { [REQUEST_RECEIVING] = true, [REQUEST_DEAD] = true },
};

static void set_state(struct request *r, enum request_state to)
{
	struct dispatch *d = r->d;

	if (!legal_moves[r->state][to])
		log_error("link request: illegal move from=%s to=%s", state_names[r->state], state_names[to]);
	check_warn(legal_moves[r->state][to]);
	if (r->state == REQUEST_WORKING)
		d->working--;
	if (to == REQUEST_WORKING)
		d->working++;
	r->state = to;
}

/* --- answers ----------------------------------------------------------------------------------------------------------------- */

static void receive(struct request *r)
{
	set_state(r, REQUEST_RECEIVING);
	r->d->receiving++;
	nng_ctx_recv(r->ctx, r->aio);
}

static void let_go(struct request *r)
{
	next_forget(r);
	if (r->msg) {
		nng_msg_free(r->msg);
		r->d->held_bytes -= r->msg_len;
	}
	r->msg = NULL;
	r->msg_len = 0;
}

static void send_reply(struct request *r, enum link_result result, const void *body, size_t n)
{
	struct link_reply reply = {
		.type = r->head.type, .request_id = r->head.request_id, .result = (uint8_t)result, .body = body, .body_len = n
	};
	struct buf b = BUF_INIT(LINK_MESSAGE_MAX);
	nng_msg *m = NULL;

	if (r->head.type < LINK_TYPES && result < LINK_RESULTS)
		r->d->answered[r->head.type][result]++;
	link_reply_encode(&reply, &b);
	let_go(r);
	if (b.failed || nng_msg_alloc(&m, 0) != 0 || nng_msg_append(m, b.data, b.len) != 0) {
		/* The node's own time limit finds that no answer came. */
		log_error("link answer dropped node=%s type=%u reason=\"no memory\"", r->head.node_id, r->head.type);
		if (m)
			nng_msg_free(m);
		receive(r);
	} else {
		set_state(r, REQUEST_SENDING);
		nng_aio_set_msg(r->aio, m);
		nng_ctx_send(r->ctx, r->aio);
	}
	buf_free(&b);
}

void request_reply(struct request *r, const struct buf *body)
{
	send_reply(r, LINK_OK, body->data, body->len);
}

void request_refuse(struct request *r, enum link_result result, const char *text)
{
	struct buf b = BUF_INIT(1024);

	wire_put_str(&b, text);
	send_reply(r, result, b.data, b.len);
	buf_free(&b);
}

void request_store_error(struct request *r, const struct err *e)
{
	if (e->code != ERR_UNAVAILABLE && e->code != ERR_CONFLICT)
		log_error("link request failed node=%s type=%u reason=\"%s\"", r->head.node_id, r->head.type, e->text);
	request_refuse(r, LINK_BUSY, "the control plane's database does not answer; try again");
}

void request_park(struct request *r)
{
	set_state(r, REQUEST_PARKED);
}

void request_work(struct request *r)
{
	set_state(r, REQUEST_WORKING);
}

/* --- contexts ---------------------------------------------------------------------------------------------------------------- */

/* nng thread. */
static void on_aio(void *arg)
{
	struct request *r = arg;

	inbox_post(r->d->inbox, &r->item.link);
}

bool request_add(struct dispatch *d)
{
	struct request *r = calloc(1, sizeof(*r));

	if (!r)
		return false;
	r->d = d;
	r->item.kind = ITEM_REQUEST;
	if (nng_ctx_open(&r->ctx, d->socket) != 0) {
		free(r);
		return false;
	}
	if (nng_aio_alloc(&r->aio, on_aio, r) != 0) {
		nng_ctx_close(r->ctx);
		free(r);
		return false;
	}
	LIST_INSERT_HEAD(&d->all, r, all_entry);
	d->contexts++;
	receive(r);
	return true;
}

/* Somebody must always be listening: a node's heartbeat may not wait behind parked polls. */
static void keep_listening(struct dispatch *d)
{
	for (int i = 0; d->receiving < RECEIVING_LOW && d->contexts < d->contexts_max && i < DISPATCH_CONTEXTS_STEP; i++) {
		if (!request_add(d))
			break;
	}
	if (d->receiving < RECEIVING_LOW)
		next_shed(d, RECEIVING_LOW - d->receiving);
}

/* --- a request comes in ------------------------------------------------------------------------------------------------------ */

static void unauthentic(struct request *r, enum peer_result a)
{
	if (a != PEER_NO_CHALLENGE)
		log_warn("link request refused node=%s type=%u reason=\"%s\"", r->head.node_id, r->head.type, peer_text(a));
	dispatch_strike(r->d, r->pipe_id, peer_text(a));
	request_refuse(r, a == PEER_REVOKED ? LINK_REVOKED : LINK_UNAUTHENTIC, peer_text(a));
}

static void authenticate(struct request *r, bool looked_up);

static void on_node(void *arg, const struct store_nodes *n, const struct err *e)
{
	struct request *r = arg;
	struct pipe *p = dispatch_pipe(r->d, r->pipe_id);

	if (e) {
		request_store_error(r, e);
		return;
	}
	if (!p) {
		request_refuse(r, LINK_UNAUTHENTIC, "the connection is gone");
		return;
	}
	if (n->count == 0) {
		unauthentic(r, PEER_NEED_NODE);
		return;
	}
	peer_set_node(&p->peer, n->nodes[0].id, n->nodes[0].sign_key, n->nodes[0].seal_key,
			strcmp(n->nodes[0].state, "revoked") == 0);
	authenticate(r, true);
}

static void authenticate(struct request *r, bool looked_up)
{
	struct pipe *p = dispatch_pipe(r->d, r->pipe_id);
	bool proven = p->peer.proven;
	enum peer_result a = peer_check(&p->peer, &r->head);
	struct err e;

	if (a == PEER_NEED_NODE && !looked_up && id_valid("node", r->head.node_id)) {
		if (store_node_get(r->d->store, r->head.node_id, on_node, r, &e) != 0)
			request_store_error(r, &e);
		return;
	}
	if (a == PEER_REVOKED)
		dispatch_cut_node(r->d, r->head.node_id);
	if (a != PEER_OK) {
		unauthentic(r, a);
		return;
	}
	if (!proven)
		log_info("node connected node=%s", r->head.node_id);
	request_dispatch(r);
}

static void answer_challenge(struct request *r, struct pipe *p)
{
	struct link_challenge_reply reply = { .server_time_ms = clock_real_ms() };
	struct buf b = BUF_INIT(128);

	memcpy(reply.challenge, peer_challenge(&p->peer), sizeof(reply.challenge));
	link_challenge_reply_encode(&reply, &b);
	request_reply(r, &b);
	buf_free(&b);
}

static void begin(struct request *r, nng_msg *msg)
{
	struct dispatch *d = r->d;
	struct pipe *p;
	struct err e;

	set_state(r, REQUEST_WORKING);
	r->msg = msg;
	r->msg_len = nng_msg_len(msg);
	r->pipe_id = (uint32_t)nng_pipe_id(nng_msg_get_pipe(msg));
	d->held_bytes += r->msg_len;
	memset(&r->head, 0, sizeof(r->head));
	p = pipe_make(d, r->pipe_id);
	if (link_request_decode(nng_msg_body(msg), r->msg_len, &r->head, &e) != 0) {
		dispatch_strike(d, r->pipe_id, "malformed request");
		request_refuse(r, LINK_BAD, e.text);
	} else if (!p || p->cut_at_ms) {
		request_refuse(r, p && p->peer.revoked ? LINK_REVOKED : LINK_UNAUTHENTIC, "this connection is being closed");
	} else if (d->held_bytes > DISPATCH_HELD_BYTES_MAX) {
		request_refuse(r, LINK_BUSY, "too many requests wait; try again");
	} else if (r->head.type == LINK_CHALLENGE) {
		answer_challenge(r, p);
	} else if (r->head.type == LINK_ENROL) {
		enrol_begin(r);
	} else {
		authenticate(r, false);
	}
}

void request_completed(struct request *r)
{
	int rv = nng_aio_result(r->aio);
	nng_msg *msg = nng_aio_get_msg(r->aio);

	if (r->state == REQUEST_RECEIVING)
		r->d->receiving--;
	nng_aio_set_msg(r->aio, NULL);
	if (r->d->closing || rv == NNG_ECLOSED || rv == NNG_ECANCELED) {
		/* What did not go out is still ours; what was received at the last moment is dropped. */
		if (msg && (rv != 0 || r->state == REQUEST_RECEIVING))
			nng_msg_free(msg);
		set_state(r, REQUEST_DEAD);
		return;
	}
	if (r->state == REQUEST_RECEIVING && rv == 0 && msg) {
		begin(r, msg);
		keep_listening(r->d);
		return;
	}
	if (rv != 0) {
		if (msg && r->state == REQUEST_SENDING)
			nng_msg_free(msg);
		log_debug("link context error=\"%s\"", nng_strerror(rv));
	}
	receive(r);
}

void request_free(struct request *r)
{
	let_go(r);
	nng_aio_stop(r->aio); /* waits for a callback that still runs */
	nng_aio_free(r->aio);
	if (r->park_timer)
		event_free(r->park_timer);
	LIST_REMOVE(r, all_entry);
	free(r);
}
