/*
 * The node link's server: an nng REP socket over TLS, one context for each request under way, a table of pipes. Owns all of these.
 *
 * Threads. nng calls back on threads of its own in three places, marked "nng thread" below: a context's aio completed, a pipe went
 * away, and the closing thread at the end. The first two append to the inbox and return; everything else in this folder runs on the
 * loop. nng does not survive a fork, and nothing forks in this process.
 *
 * A request's life: RECEIVING -> WORKING (checked, then with the store) [-> PARKED -> WORKING ...] -> SENDING -> RECEIVING. A
 * context starts to receive only when its send has completed: nng 1.5.2 can crash otherwise. Who went away while parked is found by
 * the pipe's end, and answered into nothing, because a context is not freed by that.
 */
#include "internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <event2/event.h>
#include <nng/protocol/reqrep0/rep.h>
#include <pthread.h>
#include <time.h>

#define FIRST_CONTEXTS 16
#define RECEIVING_LOW 4 /* below it more contexts are made, or polls shed */
#define CLOSE_WAIT_S 2
#define PROBE_MS 10000
#define SWEEP_MS 1000

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

/* --- pipes that go away ---------------------------------------------------------------------------------------------------- */

struct pipe_item {
	struct item item;
	uint32_t id;
};

static void on_sweep(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	pipes_sweep(arg);
	strangers_sweep(arg);
}

/* nng thread. Without memory a new pipe is known at its first request, and a parked poll of one that is gone ends by its own time.
 */
static void on_pipe(nng_pipe p, nng_pipe_ev ev, void *arg)
{
	struct dispatch *d = arg;
	struct pipe_item *item = malloc(sizeof(*item));

	if (!item)
		return;
	item->item.kind = ev == NNG_PIPE_EV_ADD_POST ? ITEM_PIPE_NEW : ITEM_PIPE_GONE;
	item->id = (uint32_t)nng_pipe_id(p);
	inbox_post(d->inbox, &item->item.link);
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

static bool add_context(struct dispatch *d)
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
		if (!add_context(d))
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

static void on_request_item(struct request *r)
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

static void on_item(void *arg, struct inbox_item *link)
{
	struct dispatch *d = arg;
	struct item *item = (struct item *)(void *)link;

	if (item->kind == ITEM_REQUEST) {
		on_request_item((struct request *)(void *)item);
	} else {
		struct pipe_item *pipe = (struct pipe_item *)(void *)item;

		if (!d->closing && item->kind == ITEM_PIPE_NEW)
			pipe_make(d, pipe->id);
		else if (!d->closing)
			pipe_gone(d, pipe->id);
		free(pipe);
	}
}

/* --- wakes ------------------------------------------------------------------------------------------------------------------- */

void dispatch_wake_queued(struct dispatch *d, uint32_t memory_mib, uint32_t vcpus, bool allow_emulated, uint32_t count)
{
	next_wake_queued(d, memory_mib, vcpus, allow_emulated, count);
}

struct node_check {
	struct dispatch *d;
};

static void on_node_checked(void *arg, const struct store_nodes *n, const struct err *e)
{
	struct node_check *c = arg;

	if (!e && n->count > 0 && strcmp(n->nodes[0].state, "revoked") == 0) {
		log_warn("node was revoked: its connections are cut node=%s", n->nodes[0].id);
		dispatch_cut_node(c->d, n->nodes[0].id);
	}
	free(c);
}

void dispatch_wake_node(struct dispatch *d, const char *node_id)
{
	struct node_check *c = NULL;
	struct pipe *p;
	struct err e;
	bool here = false;

	for (size_t i = 0; i < DISPATCH_PIPE_BUCKETS; i++) {
		LIST_FOREACH(p, &d->pipes[i], entry)
		{
			if (!p->peer.known || strcmp(p->peer.node_id, node_id) != 0)
				continue;
			p->peer.stale = true;
			here = true;
		}
	}
	if (!here)
		return;
	next_wake_node(d, node_id);
	/* A node that sends nothing hears of its revocation by the end of its connections. */
	c = calloc(1, sizeof(*c));
	if (!c)
		return;
	c->d = d;
	if (store_node_get(d->store, node_id, on_node_checked, c, &e) != 0)
		free(c);
}

/* --- up and down ------------------------------------------------------------------------------------------------------------- */

const char *dispatch_address(const struct dispatch *d)
{
	return d->address;
}

bool dispatch_healthy(const struct dispatch *d, const char **why)
{
	*why = d->listener_down ? "the node link does not take connections" : NULL;
	return !d->listener_down;
}

void dispatch_drain(struct dispatch *d)
{
	d->draining = true;
	next_shed(d, UINT32_MAX);
}

bool dispatch_idle(const struct dispatch *d)
{
	const struct request *r;

	LIST_FOREACH(r, &d->all, all_entry)
	{
		if (r->state == REQUEST_SENDING || r->state == REQUEST_WORKING)
			return false;
	}
	return true;
}

int dispatch_start(const struct dispatch_options *opt, struct dispatch **out, struct err *e)
{
	struct dispatch *d = calloc(1, sizeof(*d));
	int sweep_ms = opt->sweep_ms > 0 ? opt->sweep_ms : SWEEP_MS;
	struct timeval pause = { .tv_sec = sweep_ms / 1000, .tv_usec = sweep_ms % 1000 * 1000 };
	int rv;

	if (!d)
		return err_set(e, ERR_NOMEM, "no memory for the node link");
	d->base = opt->base;
	d->store = opt->store;
	d->secrets = opt->secrets;
	d->pki = opt->pki;
	d->contexts_max = (uint32_t)opt->contexts_max;
	d->poll_ms = opt->poll_ms;
	d->probe_ms = opt->probe_ms > 0 ? opt->probe_ms : PROBE_MS;
	LIST_INIT(&d->all);
	TAILQ_INIT(&d->polls);
	if (!text_copy(d->listen, sizeof(d->listen), opt->listen)) {
		err_set(e, ERR_LIMIT, "link_listen is too long");
		goto fail;
	}
	if (inbox_new(opt->base, on_item, d, &d->inbox, e) != 0)
		goto fail;
	rv = nng_rep0_open(&d->socket);
	if (rv != 0) {
		err_set(e, ERR_INTERNAL, "open the link's socket: %s", nng_strerror(rv));
		goto fail;
	}
	d->socket_open = true;
	nng_pipe_notify(d->socket, NNG_PIPE_EV_ADD_POST, on_pipe, d);
	nng_pipe_notify(d->socket, NNG_PIPE_EV_REM_POST, on_pipe, d);
	for (int i = 0; i < FIRST_CONTEXTS; i++) {
		if (!add_context(d)) {
			err_set(e, ERR_NOMEM, "no memory for the link's contexts");
			goto fail;
		}
	}
	d->sweep = event_new(opt->base, -1, EV_PERSIST, on_sweep, d);
	if (!d->sweep || event_add(d->sweep, &pause) != 0) {
		err_set(e, ERR_NOMEM, "no memory for the node link");
		goto fail;
	}
	if (listener_start(d, e) != 0 || watchdog_start(d, e) != 0)
		goto fail;
	log_info("node link listens address=%s", d->address);
	*out = d;
	return 0;
fail:
	dispatch_free(d);
	return err_wrap(e, "link_listen %s", opt->listen);
}

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
/* nng 1.5.2 forgets a TLS connection whose handshake is under way when its socket closes: seen once in ten ends on a busy machine.
 */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
	return "leak:libnng.so\n";
}
#endif

static void *close_socket(void *arg)
{
	struct dispatch *d = arg;

	nng_close(d->socket);
	return NULL;
}

/* nng_close may hang (a known fault of 1.5.2), and a process must end: a thread of its own closes, and is left behind if it takes
 * too long. False then: nothing that nng's threads may touch can be freed. */
static bool close_in_time(struct dispatch *d)
{
	struct timespec until;
	pthread_t closer;

	if (!d->socket_open)
		return true;
	if (pthread_create(&closer, NULL, close_socket, d) != 0)
		return false;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += CLOSE_WAIT_S;
	if (pthread_timedjoin_np(closer, NULL, &until) != 0) {
		pthread_detach(closer);
		log_warn("node link did not close in time; leaving it behind");
		return false;
	}
	return true;
}

static void free_request(struct request *r)
{
	let_go(r);
	nng_aio_stop(r->aio); /* waits for a callback that still runs */
	nng_aio_free(r->aio);
	if (r->park_timer)
		event_free(r->park_timer);
	LIST_REMOVE(r, all_entry);
	free(r);
}

void dispatch_free(struct dispatch *d)
{
	struct request *r, *next;
	struct pipe *p;

	if (!d)
		return;
	d->closing = true;
	watchdog_stop(d);
	strangers_free(d);
	if (d->sweep)
		event_free(d->sweep);
	d->sweep = NULL;
	if (!close_in_time(d))
		return;
	for (r = LIST_FIRST(&d->all); r; r = next) {
		next = LIST_NEXT(r, all_entry);
		nng_aio_stop(r->aio);
	}
	/* Nobody posts any more: the loop handles what was posted, then the requests can go. */
	if (d->inbox) {
		event_base_loop(d->base, EVLOOP_NONBLOCK);
		inbox_free(d->inbox);
	}
	for (r = LIST_FIRST(&d->all); r; r = next) {
		next = LIST_NEXT(r, all_entry);
		free_request(r);
	}
	for (size_t i = 0; i < DISPATCH_PIPE_BUCKETS; i++) {
		while ((p = LIST_FIRST(&d->pipes[i])) != NULL)
			pipe_drop(d, p);
	}
	free(d);
}
