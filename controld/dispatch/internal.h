/*
 * Between the files of dispatch/: the server (server.c), the life of a request (request.c), pipes (pipes.c), the listener and its
 * watchdog (listener.c), what is asked (requests.c, enrol.c) and the polls (next.c). All on the loop's thread; see server.c for the
 * three places where nng's threads come in.
 */
#ifndef CONTROLD_DISPATCH_INTERNAL_H
#define CONTROLD_DISPATCH_INTERNAL_H

#include "dispatch.h"

#include "peer.h"

#include "../pki.h"
#include "../secrets.h"
#include "../store/store.h"
#include "common/inbox.h"
#include "proto/link.h"

#include <nng/nng.h>
#include <sys/queue.h>
#include <sys/socket.h>

struct event;

#define DISPATCH_PIPE_BUCKETS 1024
#define DISPATCH_CONTEXTS_STEP 8
#define DISPATCH_HELD_BYTES_MAX (256 * 1024 * 1024) /* of requests that wait for the store; more are answered LINK_BUSY */

/* What comes out of the inbox. First member, so that the handler can tell. */
enum item_kind { ITEM_REQUEST = 1, ITEM_PIPE_NEW, ITEM_PIPE_GONE };
struct item {
	struct inbox_item link;
	enum item_kind kind;
};

enum request_state {
	REQUEST_RECEIVING, /* nng waits for a request */
	REQUEST_WORKING,   /* here, or with the store */
	REQUEST_PARKED,    /* a poll with nothing to do */
	REQUEST_SENDING,   /* nng sends the answer */
	REQUEST_DEAD,      /* nng is closing */
	REQUEST_STATES,
};

/* Runs of this kind wait. passes: how many nodes may still be asked after one that could not take them. */
struct wake {
	uint32_t memory_mib, vcpus, passes;
	bool allow_emulated;
};

/* One nng context and what it is busy with. Made once, used again and again, freed with the server. */
struct request {
	struct item item; /* posted when its aio completes; at most one at a time */
	struct dispatch *d;
	enum request_state state;
	nng_ctx ctx;
	nng_aio *aio;
	nng_msg *msg; /* the request while WORKING or PARKED: head and body are views into it */
	size_t msg_len;
	uint32_t pipe_id;
	struct link_request head;
	/* NEXT only */
	bool polling;     /* is in d->polls */
	bool again;       /* something happened while the store was asked: ask once more */
	struct wake wake; /* what it was woken for, to be passed on when it cannot take it */
	struct link_next next;
	uint32_t lease_ms;
	int64_t park_until_ms; /* boot clock */
	struct event *park_timer;
	uint8_t seal_key[32];
	/* ENROL only */
	struct link_enrol enrol;
	char enrolled_id[ID_MAX];
	TAILQ_ENTRY(request) poll_entry;
	LIST_ENTRY(request) all_entry;
};

/* One nng pipe. */
struct pipe {
	struct peer peer;
	int64_t opened_ms; /* boot clock */
	int64_t cut_at_ms; /* 0 = not */
	bool has_far;
	uint8_t far[18];  /* address and port of the far end */
	uint32_t strikes; /* malformed or unauthentic requests */
	LIST_ENTRY(pipe) entry;
};

struct dispatch {
	struct event_base *base;
	struct store *store;
	const struct secrets *secrets;
	const struct pki *pki;
	char listen[300];
	char address[320];
	uint16_t port;
	uint32_t contexts_max, contexts, receiving;
	int poll_ms;
	bool draining, closing;

	nng_socket socket;
	bool socket_open;
	nng_listener listener;
	struct inbox *inbox;
	struct event *sweep; /* each second: pipes to cut */
	struct watchdog *watchdog;
	bool listener_down;
	struct sockaddr_storage bound; /* what the watchdog dials, and where strangers come in */
	socklen_t bound_len;
	bool bound_any; /* all addresses: `bound` is loopback then */
	int probe_ms;
	struct strangers *strangers;

	LIST_HEAD(, request) all;
	TAILQ_HEAD(polls, request) polls; /* NEXT requests, oldest first, parked or with the store */
	LIST_HEAD(pipe_list, pipe) pipes[DISPATCH_PIPE_BUCKETS];
	uint32_t pipe_count;
	uint32_t working; /* requests in REQUEST_WORKING */
	size_t held_bytes;
	uint64_t answered[LINK_TYPES][LINK_RESULTS];
};

/* request.c */
bool request_add(struct dispatch *d); /* one more context, receiving; false: no memory */
/* Its aio is done (from the inbox): a request came, or an answer went out. */
void request_completed(struct request *r);
void request_free(struct request *r); /* when nng is closed */
void request_reply(struct request *r, const struct buf *body);
void request_refuse(struct request *r, enum link_result result, const char *text);
/* For a store function that said -1, or called back with an error: LINK_BUSY, logged when it is ours. */
void request_store_error(struct request *r, const struct err *e);
void request_park(struct request *r);
void request_work(struct request *r); /* back from PARKED */

/* pipes.c */
struct pipe *dispatch_pipe(struct dispatch *d, uint32_t id); /* NULL: gone */
/* Made at a pipe's first request. NULL when there are too many, or no memory: the pipe is closed then. */
struct pipe *pipe_make(struct dispatch *d, uint32_t id);
void pipe_drop(struct dispatch *d, struct pipe *p);
void pipe_gone(struct dispatch *d, uint32_t id);
void pipes_sweep(struct dispatch *d); /* each second */
/* A fault of the peer: the eighth cuts the pipe. */
void dispatch_strike(struct dispatch *d, uint32_t pipe_id, const char *why);
/* Cuts every pipe of the node a second from now, so that the answer that says so still goes out. */
void dispatch_cut_node(struct dispatch *d, const char *node_id);

/* requests.c: a request whose signature was checked */
void request_dispatch(struct request *r);
void request_bad(struct request *r, const struct err *e); /* malformed: a strike, and LINK_BAD */
void request_on_blob(void *arg, const struct store_blob *found, const struct err *e);

/* images.c */
void image_begin(struct request *r);
void image_blob_begin(struct request *r);
void bye_begin(struct request *r);

/* next.c */
void next_begin(struct request *r);
void next_forget(struct request *r); /* the request is answered: out of the list, memory freed */
void next_wake_queued(struct dispatch *d, uint32_t memory_mib, uint32_t vcpus, bool allow_emulated, uint32_t count);
void next_wake_node(struct dispatch *d, const char *node_id);
void next_answer_node(struct dispatch *d, const char *node_id); /* its parked polls, with nothing */
void next_answer_parked(struct request *r);                     /* with what it has: nothing */
void next_shed(struct dispatch *d, uint32_t count);             /* answers the longest parked polls to free contexts */

/* enrol.c */
void enrol_begin(struct request *r);

/* strangers.c */
bool strangers_far_end(nng_pipe pipe, uint8_t out[18]);
void strangers_sweep(struct dispatch *d); /* each second */
void strangers_free(struct dispatch *d);

/* listener.c */
int listener_start(struct dispatch *d, struct err *e) EPH_MUST_CHECK;
int watchdog_start(struct dispatch *d, struct err *e) EPH_MUST_CHECK;
void watchdog_stop(struct dispatch *d);

#endif
