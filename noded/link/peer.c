/*
 * Connections to the controlds (peer.h). What nng 1.5.2 needs: no resending by itself (RESENDTIME -1: a lost pipe ends its requests
 * at once), sizes bounded on both sides, receive only after the send has completed, and never nng_close on the loop.
 *
 * Owns the sockets, contexts and aios. A socket that was given up keeps its memory (its callbacks may still come); when too many
 * hang in their closing, or were replaced, the process ends and keeper starts a fresh one. VMs do not notice.
 */
#include "peer.h"

#include "common/clock.h"
#include "common/inbox.h"
#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <nng/supplemental/tls/tls.h>
#include <nng/transport/tls/tls.h>
#include <pthread.h>
#include <sodium.h>
#include <unistd.h>

#define MESSAGE_ROOM 256 /* of nng, above LINK_MESSAGE_MAX */
#define SEND_TIMEOUT_MS 5000
#define CHALLENGE_TIMEOUT_MS 5000
#define CHALLENGE_PAUSE_MS 500 /* after a challenge that was not answered */
#define DIALER_DEAD_MS 30000   /* no pipe for this long: the dialer may have stopped for good */
#define PIPE_DEAD_PART 8       /* a pipe that does not answer for this part of the lease: its end may never have been told */
#define CLOSING_MAX 64         /* sockets that hang in nng_close */
#define REPLACED_MAX 2000      /* a day of an unreachable controld; some 10 KiB each */
#define TICK_MS 250

enum slot_state { SLOT_FREE, SLOT_SENDING, SLOT_RECEIVING };

/* What the inbox carries. First member of each kind. */
enum posted_kind { POSTED_SLOT, POSTED_PIPE, POSTED_CLOSED };
struct posted {
	struct inbox_item item;
	enum posted_kind kind;
};

struct slot {
	struct posted posted; /* at most once at a time */
	struct peer *peer;
	enum slot_state state;
	nng_ctx ctx;
	nng_aio *aio;
	uint32_t context; /* its number in signatures */
	uint64_t counter; /* grows with each request */
	uint64_t request_id;
	uint8_t type;
	int timeout_ms;
	void *user;
};

enum peer_state { PEER_DOWN, PEER_CONNECTED /* challenge not known */, PEER_READY };

/* One socket to one address. */
struct peer {
	struct posted closed; /* posted when nng_close of a socket that was given up has returned */
	struct peers *all;
	char address[160];
	nng_socket socket;
	enum peer_state state;
	bool abandoned;
	int pipe;                 /* id of the pipe that stands; 0 = none */
	int64_t unready_since_ms; /* CLOCK_BOOTTIME */
	int64_t ask_after_ms;     /* no challenge before */
	uint8_t challenge[32];
	struct slot slots[PEER_SLOTS];
	struct slot ask; /* for CHALLENGE alone, so that it never waits for a slot */
};

struct pipe_item {
	struct posted posted;
	struct peer *peer;
	int pipe;
	bool up;
};

struct peers {
	struct peers_options opt;
	peer_answer answer;
	struct inbox *inbox;
	struct event *tick;
	struct peer *peers[PEER_ADDRESSES_MAX];
	size_t count, active;
	uint32_t closing; /* sockets whose nng_close has not returned */
	uint64_t made;    /* connections so far */
	bool clock_compared;
	int64_t clock_offset_ms; /* a controld's wall clock before ours, at the last challenge */
	uint32_t replaced;       /* sockets given up so far: their memory is left behind */
	uint64_t next_request_id;
	int64_t pipe_dead_ms; /* see PIPE_DEAD_PART */
};

/* --- nng threads: only these two functions ----------------------------------------------------------------------------------- */

static void on_aio(void *arg)
{
	struct slot *s = arg;

	inbox_post(s->peer->all->inbox, &s->posted.item);
}

static void on_pipe(nng_pipe pipe, nng_pipe_ev ev, void *arg)
{
	struct peer *peer = arg;
	struct pipe_item *item = calloc(1, sizeof(*item));

	if (item == NULL)
		return; /* the tick and the requests' own time limits find out */
	item->peer = peer;
	item->pipe = nng_pipe_id(pipe);
	item->posted.kind = POSTED_PIPE;
	item->up = ev == NNG_PIPE_EV_ADD_POST;
	inbox_post(peer->all->inbox, &item->posted.item);
}

/* --- sockets ----------------------------------------------------------------------------------------------------------------- */

static int nng_fail(struct err *e, const char *what, int rc)
{
	return err_set(e, rc == NNG_ENOMEM ? ERR_NOMEM : ERR_INTERNAL, "%s: %s", what, nng_strerror(rc));
}

static int slot_open(struct peer *peer, struct slot *s, uint32_t context, struct err *e)
{
	int rc;

	s->peer = peer;
	s->context = context;
	rc = nng_ctx_open(&s->ctx, peer->socket);
	if (rc == 0)
		rc = nng_aio_alloc(&s->aio, on_aio, s);
	return rc == 0 ? 0 : nng_fail(e, "nng context", rc);
}

static int dial(struct peer *peer, struct err *e)
{
	nng_tls_config *tls;
	nng_dialer dialer;
	int rc = nng_tls_config_alloc(&tls, NNG_TLS_MODE_CLIENT);

	if (rc != 0)
		return nng_fail(e, "TLS", rc);
	rc = nng_tls_config_ca_chain(tls, peer->all->opt.ca_pem, NULL);
	if (rc == 0)
		rc = nng_tls_config_server_name(tls, PEER_SERVER_NAME);
	if (rc == 0)
		rc = nng_tls_config_auth_mode(tls, NNG_TLS_AUTH_MODE_REQUIRED);
	if (rc == 0)
		rc = nng_dialer_create(&dialer, peer->socket, peer->address);
	if (rc == 0)
		rc = nng_dialer_set_ptr(dialer, NNG_OPT_TLS_CONFIG, tls);
	nng_tls_config_free(tls); /* the dialer keeps its own reference */
	if (rc == 0)
		rc = nng_dialer_set_ms(dialer, NNG_OPT_RECONNMINT, 100);
	if (rc == 0)
		rc = nng_dialer_set_ms(dialer, NNG_OPT_RECONNMAXT, 3000);
	if (rc == 0)
		rc = nng_dialer_set_bool(dialer, NNG_OPT_TCP_KEEPALIVE, true);
	if (rc == 0)
		rc = nng_dialer_start(dialer, NNG_FLAG_NONBLOCK);
	return rc == 0 ? 0 : nng_fail(e, peer->address, rc);
}

static int peer_new(struct peers *all, const char *address, struct peer **out, struct err *e)
{
	struct peer *peer = calloc(1, sizeof(*peer));
	int rc;

	*out = NULL;
	if (peer == NULL)
		return err_set(e, ERR_NOMEM, "no memory for a connection");
	peer->all = all;
	peer->closed.kind = POSTED_CLOSED;
	peer->unready_since_ms = clock_boot_ms();
	if (!text_copy(peer->address, sizeof(peer->address), address)) {
		free(peer);
		return err_set(e, ERR_INVALID, "controld address \"%.40s...\" is longer than %zu bytes", address,
				sizeof(peer->address) - 1);
	}
	rc = nng_req0_open(&peer->socket);
	if (rc == 0)
		rc = nng_socket_set_ms(peer->socket, NNG_OPT_REQ_RESENDTIME, -1);
	if (rc == 0)
		rc = nng_socket_set_size(peer->socket, NNG_OPT_RECVMAXSZ, LINK_MESSAGE_MAX + MESSAGE_ROOM);
	if (rc == 0)
		rc = nng_pipe_notify(peer->socket, NNG_PIPE_EV_ADD_POST, on_pipe, peer);
	if (rc == 0)
		rc = nng_pipe_notify(peer->socket, NNG_PIPE_EV_REM_POST, on_pipe, peer);
	if (rc != 0)
		return nng_fail(e, "nng socket", rc); /* `peer` stays: nng may hold it */
	for (uint32_t i = 0; i < PEER_SLOTS; i++)
		if (slot_open(peer, &peer->slots[i], i + 1, e) < 0)
			return -1;
	if (slot_open(peer, &peer->ask, PEER_SLOTS + 1, e) < 0 || dial(peer, e) < 0)
		return -1;
	*out = peer;
	return 0;
}

static void *closer(void *arg)
{
	struct peer *peer = arg;

	(void)nng_close(peer->socket);
	inbox_post(peer->all->inbox, &peer->closed.item);
	return NULL;
}

/* Leaves the socket to a thread that may hang in it. Requests under way are answered with nothing first. */
static void peer_abandon(struct peer *peer)
{
	struct peers *all = peer->all;
	pthread_t thread;

	peer->abandoned = true;
	peer->state = PEER_DOWN;
	for (size_t i = 0; i < PEER_SLOTS; i++) {
		struct slot *s = &peer->slots[i];

		if (s->state != SLOT_FREE) {
			s->state = SLOT_FREE;
			all->answer(all->opt.arg, s->user, NULL);
		}
	}
	if (pthread_create(&thread, NULL, closer, peer) == 0)
		pthread_detach(thread);
	if (++all->closing > CLOSING_MAX || ++all->replaced > REPLACED_MAX) {
		log_error("link starts over: sockets that hang=%u, replaced=%u", all->closing, all->replaced);
		_exit(3);
	}
}

/* --- choosing ---------------------------------------------------------------------------------------------------------------- */

static struct peer *active(const struct peers *p)
{
	return p->peers[p->active];
}

/* The active one stays as long as it can be asked. */
static void choose(struct peers *p)
{
	if (active(p)->state == PEER_READY)
		return;
	for (size_t i = 0; i < p->count; i++) {
		if (p->peers[i]->state != PEER_READY)
			continue;
		p->active = i;
		log_info("controld in use address=%s", p->peers[i]->address);
		return;
	}
}

static void set_state(struct peer *peer, enum peer_state to)
{
	enum peer_state from = peer->state;

	if (from == to)
		return;
	peer->state = to;
	if (from == PEER_READY)
		peer->unready_since_ms = clock_boot_ms();
	if (from == PEER_DOWN)
		peer->all->made++;
	if (to == PEER_DOWN || from == PEER_DOWN)
		log_info("controld connection address=%s state=%s", peer->address, to == PEER_DOWN ? "down" : "up");
	choose(peer->all);
	if (to == PEER_READY)
		peer->all->opt.on_ready(peer->all->opt.arg);
}

/* --- requests ---------------------------------------------------------------------------------------------------------------- */

static bool slot_send(struct slot *s, uint8_t type, const void *body, size_t n, int timeout_ms, bool sign, void *user)
{
	struct peers *p = s->peer->all;
	struct link_request r = { .type = type,
		.request_id = ++p->next_request_id,
		.context = s->context,
		.counter = ++s->counter,
		.body = body,
		.body_len = n };
	struct buf out = BUF_INIT(LINK_MESSAGE_MAX);
	uint8_t message[256];
	nng_msg *msg = NULL;
	size_t len;
	bool ok = text_copy(r.node_id, sizeof(r.node_id), p->opt.node_id);

	if (ok && sign) {
		len = link_signed_message(&r, s->peer->challenge, message);
		ok = len > 0 && crypto_sign_detached(r.signature, NULL, message, len, p->opt.sign_secret) == 0;
	}
	link_request_encode(&r, &out);
	ok = ok && !out.failed && nng_msg_alloc(&msg, 0) == 0 && nng_msg_append(msg, out.data, out.len) == 0;
	buf_free(&out);
	if (!ok) {
		if (msg != NULL)
			nng_msg_free(msg);
		return false;
	}
	s->state = SLOT_SENDING;
	s->type = type;
	s->request_id = r.request_id;
	s->timeout_ms = timeout_ms;
	s->user = user;
	nng_aio_set_msg(s->aio, msg);
	nng_aio_set_timeout(s->aio, SEND_TIMEOUT_MS);
	nng_ctx_send(s->ctx, s->aio);
	return true;
}

void peers_lease(struct peers *p, uint32_t lease_ms)
{
	p->pipe_dead_ms = lease_ms / PIPE_DEAD_PART < DIALER_DEAD_MS ? lease_ms / PIPE_DEAD_PART : DIALER_DEAD_MS;
}

void peers_look(const struct peers *p, struct peers_state *out)
{
	*out = (struct peers_state){ .known = (uint32_t)p->count,
		.made = p->made,
		.clock_compared = p->clock_compared,
		.clock_offset_ms = p->clock_offset_ms };
	for (size_t i = 0; i < p->count; i++) {
		out->connected += p->peers[i]->state != PEER_DOWN;
		out->ready += p->peers[i]->state == PEER_READY;
	}
}

uint32_t peers_free_slots(const struct peers *p)
{
	const struct peer *peer = active(p);
	uint32_t n = 0;

	for (size_t i = 0; peer->state == PEER_READY && i < PEER_SLOTS; i++)
		n += peer->slots[i].state == SLOT_FREE;
	return n;
}

bool peers_send(struct peers *p, uint8_t type, const void *body, size_t n, int timeout_ms, bool sign, void *user)
{
	struct peer *peer = active(p);

	if (peer->state != PEER_READY)
		return false;
	for (size_t i = 0; i < PEER_SLOTS; i++)
		if (peer->slots[i].state == SLOT_FREE)
			return slot_send(&peer->slots[i], type, body, n, timeout_ms, sign, user);
	return false;
}

bool peers_challenge(const struct peers *p, uint8_t out[32])
{
	if (active(p)->state != PEER_READY)
		return false;
	memcpy(out, active(p)->challenge, 32);
	return true;
}

static void ask_challenge(struct peer *peer)
{
	if (peer->state != PEER_CONNECTED || peer->ask.state != SLOT_FREE || clock_boot_ms() < peer->ask_after_ms)
		return;
	if (!slot_send(&peer->ask, LINK_CHALLENGE, "", 0, CHALLENGE_TIMEOUT_MS, false, NULL))
		peer->ask_after_ms = clock_boot_ms() + CHALLENGE_PAUSE_MS;
}

static void challenge_answered(struct peer *peer, const struct link_reply *reply)
{
	struct link_challenge_reply c;
	struct err e;

	if (peer->state != PEER_CONNECTED)
		return;
	if (reply == NULL || reply->result != LINK_OK || link_challenge_reply_decode(reply->body, reply->body_len, &c, &e) < 0) {
		peer->ask_after_ms = clock_boot_ms() + CHALLENGE_PAUSE_MS;
		return;
	}
	memcpy(peer->challenge, c.challenge, sizeof(peer->challenge));
	peer->all->clock_offset_ms = c.server_time_ms - clock_real_ms();
	peer->all->clock_compared = true;
	set_state(peer, PEER_READY);
}

/* An answer (or none) for a slot: the slot is free before the owner hears of it. */
static void slot_answer(struct slot *s, const struct link_reply *reply)
{
	struct peer *peer = s->peer;
	struct peers *p = peer->all;
	void *user = s->user;

	s->state = SLOT_FREE;
	s->user = NULL;
	if (s == &peer->ask) {
		challenge_answered(peer, reply);
		return;
	}
	if (reply != NULL && reply->result == LINK_UNAUTHENTIC && peer->state == PEER_READY) {
		log_info("controld wants a new challenge address=%s", peer->address);
		peer->ask_after_ms = clock_boot_ms() + CHALLENGE_PAUSE_MS / 5;
		set_state(peer, PEER_CONNECTED);
	}
	p->answer(p->opt.arg, user, reply);
	p->opt.on_ready(p->opt.arg);
}

static void slot_received(struct slot *s, nng_msg *msg)
{
	struct link_reply reply;
	struct err e;

	if (link_reply_decode(nng_msg_body(msg), nng_msg_len(msg), &reply, &e) < 0) {
		log_warn("controld answer malformed address=%s error=%s", s->peer->address, e.text);
		slot_answer(s, NULL);
	} else if (reply.request_id != s->request_id || reply.type != s->type) {
		log_warn("controld answered another question address=%s", s->peer->address);
		slot_answer(s, NULL);
	} else {
		slot_answer(s, &reply);
	}
	nng_msg_free(msg);
}

static void slot_done(struct slot *s)
{
	int rc = nng_aio_result(s->aio);
	nng_msg *msg = nng_aio_get_msg(s->aio);

	if (s->peer->abandoned)
		return; /* answered when it was given up; its message goes with the socket */
	if (s->state == SLOT_SENDING && rc == 0) {
		s->state = SLOT_RECEIVING;
		nng_aio_set_msg(s->aio, NULL);
		nng_aio_set_timeout(s->aio, s->timeout_ms);
		nng_ctx_recv(s->ctx, s->aio);
		return;
	}
	nng_aio_set_msg(s->aio, NULL);
	if (s->state == SLOT_RECEIVING && rc == 0 && msg != NULL) {
		slot_received(s, msg);
		return;
	}
	if (rc != 0 && s->state == SLOT_SENDING && msg != NULL)
		nng_msg_free(msg); /* not taken: still ours */
	if (s->state != SLOT_FREE) {
		log_info("request without answer address=%s type=%u error=%s", s->peer->address, s->type, nng_strerror(rc));
		if (rc == NNG_ETIMEDOUT && s->peer->state == PEER_READY)
			set_state(s->peer, PEER_CONNECTED); /* it has to answer a challenge before it is asked again */
		slot_answer(s, NULL);
	}
}

/* --- events from nng --------------------------------------------------------------------------------------------------------- */

static void pipe_changed(struct pipe_item *item)
{
	struct peer *peer = item->peer;

	if (peer->abandoned)
		return;
	if (item->up) {
		peer->pipe = item->pipe;
		peer->ask_after_ms = 0;
		set_state(peer, PEER_CONNECTED);
		ask_challenge(peer);
	} else if (item->pipe == peer->pipe) {
		peer->pipe = 0;
		set_state(peer, PEER_DOWN);
	}
}

static void on_item(void *arg, struct inbox_item *link)
{
	struct peers *p = arg;
	struct posted *posted = (struct posted *)(void *)link;

	switch (posted->kind) {
	case POSTED_SLOT: slot_done((struct slot *)(void *)posted); break;
	case POSTED_PIPE:
		pipe_changed((struct pipe_item *)(void *)posted);
		free(posted);
		break;
	case POSTED_CLOSED: p->closing--; break;
	}
}

/*
 * A dialer of nng 1.5.2 can stop for good; the end of a connection was seen not to be told (a controld that dies within
 * milliseconds of the handshake); and a controld that takes connections without answering is no better.
 */
static void watch(struct peers *p, size_t i)
{
	struct peer *peer = p->peers[i], *fresh;
	int64_t patience = peer->state == PEER_CONNECTED ? p->pipe_dead_ms : DIALER_DEAD_MS;
	struct err e;

	if (peer->state == PEER_READY || clock_boot_ms() - peer->unready_since_ms < patience)
		return;
	peer->unready_since_ms = clock_boot_ms(); /* also when the new one cannot be made: then it is tried again later */
	if (peer_new(p, peer->address, &fresh, &e) < 0) {
		log_error("controld connection not replaced address=%s error=%s", peer->address, e.text);
		return;
	}
	log_warn("controld not reached: socket replaced address=%s", peer->address);
	p->peers[i] = fresh;
	peer_abandon(peer);
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
	struct peers *p = arg;

	(void)fd;
	(void)what;
	for (size_t i = 0; i < p->count; i++) {
		ask_challenge(p->peers[i]);
		watch(p, i);
	}
	p->opt.on_ready(p->opt.arg);
}

static int add_addresses(struct peers *p, struct err *e)
{
	const char *s = p->opt.addresses;

	while (*s != '\0') {
		size_t n = strcspn(s, ", ");
		char address[513];

		if (n > 0) {
			if (p->count == PEER_ADDRESSES_MAX)
				return err_set(e, ERR_LIMIT, "more than %d controld addresses", PEER_ADDRESSES_MAX);
			if (!text_fmt(address, sizeof(address), "%.*s", (int)n, s) || strncmp(address, "tls+tcp://", 10) != 0)
				return err_set(e, ERR_INVALID, "controld address %zu does not begin with tls+tcp://", p->count + 1);
			if (peer_new(p, address, &p->peers[p->count], e) < 0)
				return -1;
			p->count++;
		}
		s += n + (s[n] != '\0');
	}
	return p->count > 0 ? 0
			    : err_set(e, ERR_INVALID,
					      "no controld address is known: the join token or the key `controld` must name one");
}

int peers_new(const struct peers_options *opt, peer_answer answer, struct peers **out, struct err *e)
{
	struct peers *p = calloc(1, sizeof(*p));
	struct timeval tick = { .tv_usec = TICK_MS * 1000 };

	*out = NULL;
	if (p == NULL)
		return err_set(e, ERR_NOMEM, "no memory for the link");
	/* On a failure below the process ends: nng's threads may hold p already, so it is not freed. */
	p->pipe_dead_ms = DIALER_DEAD_MS;
	p->opt = *opt;
	p->answer = answer;
	if (inbox_new(opt->base, on_item, p, &p->inbox, e) < 0)
		return -1;
	p->tick = event_new(opt->base, -1, EV_PERSIST, on_tick, p);
	if (p->tick == NULL || event_add(p->tick, &tick) != 0)
		return err_set(e, ERR_NOMEM, "no memory for the link's timer");
	if (add_addresses(p, e) < 0)
		return -1;
	*out = p;
	return 0;
}
