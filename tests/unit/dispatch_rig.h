/*
 * What the tests of the node link share: the store's functions that dispatch calls, answered one loop turn later as the test says,
 * and a node, which speaks over real nng and TLS.
 */
#ifndef TEST_DISPATCH_RIG_H
#define TEST_DISPATCH_RIG_H

#include "unit.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "controld/dispatch/internal.h"
#include "controld/pki.h"
#include "controld/secrets.h"
#include "controld/store/store.h"
#include "loop.h"

#include <nng/nng.h>
#include <stdatomic.h>

#define NODE "node_0123456789abcdef0123456789abcdef"
#define RUN "run_0123456789abcdef0123456789abcdef"
#define SECRET "ephnt_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define CONTEXTS 16
#define WAIT_MS 10000

struct dispatch_rig {
	struct event_base *base;
	char dir[64];
	struct secrets *secrets;
	struct pki *pki;
	struct dispatch *d;
	struct store_node node;
	bool revoked, unavailable;
	int waiting_assigns; /* runs that the next claims get */
	int next_calls, start_calls, events_calls, certify_calls;
	int64_t last_t_ms;
	bool hold_next; /* store_next does not call back until released */
	store_next_cb held_cb;
	void *held_arg;
	uint8_t sealed_key[128];
	size_t sealed_len;
	uint8_t sign_secret[64], seal_secret[32];
};

extern struct dispatch_rig rig;

struct node {
	nng_socket socket;
	nng_dialer dialer;
	atomic_int *pipes; /* outlives the node: a socket that did not close in time still counts here */
	uint8_t challenge[32];
	uint64_t counter;
};

struct call {
	struct node *n;
	nng_ctx ctx;
	nng_aio *aio;
	bool sending;
	atomic_bool idle; /* the aio's callback came */
	int rv;
	nng_msg *reply_msg;
	struct link_reply reply;
};

void answer_next(store_next_cb cb, void *arg);
bool has_no_pipe(void *arg);
void node_open(struct node *n);
void node_close(struct node *n);
bool call_over(void *arg);
void call_bytes(struct node *n, struct call *c, const void *p, size_t len);
void encode(struct node *n, struct buf *out, enum link_type type, const struct buf *body, bool sign);
void begin(struct node *n, struct call *c, enum link_type type, const struct buf *body, bool sign);
void call_free(struct call *c);
void wait_reply(struct call *c, enum link_result result);
void ask(struct node *n, enum link_type type, const struct buf *body, bool sign, enum link_result result);
void get_challenge(struct node *n);
void node_ready(struct node *n);
void put_start(struct buf *b);
void start_ok(struct node *n);
void begin_next(struct node *n, struct call *c, uint32_t wait_ms);
void wait_next(struct call *c, uint32_t assigns);
bool next_called(void *arg);
void wait_parked(struct call *c, int calls);
int set_up(void **state);
int set_up_fast(void **state);
int tear_down(void **state);

#endif
