/*
 * What the test of the link process shares: keeper (and the brokers behind it) played on its socketpair, controld on an nng socket.
 */
#ifndef TEST_LINK_RIG_H
#define TEST_LINK_RIG_H

#include "controld/pki.h"
#include "noded/roles.h"
#include "noded/spool.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/errcode.h"
#include "proto/link.h"
#include "proto/role.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/rep.h>
#include <nng/supplemental/tls/tls.h>
#include <nng/transport/tls/tls.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define RUN "run_0123456789abcdef0123456789abcdef"
#define NODE "node_0123456789abcdef0123456789abcdef"
#define WAIT_MS 20000
#define CONTEXTS 8

struct server_ctx {
	nng_ctx ctx;
	nng_aio *aio;
	int index;
	bool sending;
	bool waiting; /* a request that the test has not answered */
	nng_msg *msg;
	struct link_request req;
};

struct server {
	nng_socket socket;
	nng_listener listener;
	int port;
	int pipe[2]; /* indices of contexts whose aio completed */
	struct server_ctx ctx[CONTEXTS];
	uint8_t challenge[32];
	uint8_t sign_key[32];
	int challenges; /* asked for */
	uint64_t counters[64];
};

struct rig {
	struct server server;
	int keeper;
	pid_t pid;
	uint8_t sign_secret[64], seal_public[32], receipt_public[32];
	uint8_t token[TOKEN_LEN];
	int spool_fd;
	struct spool *spool;
	char address[128]; /* "" = server.port */
};

struct frame {
	uint8_t type;
	uint8_t *body;
	size_t n;
};

extern char tls_dir[64]; /* of the deployment that the test is */
extern struct pki *pki;

void server_open(struct server *s);
void server_close(struct server *s);
void answer(struct server_ctx *c, enum link_result result, const void *body, size_t n);
void answer_fence(struct server_ctx *c, uint8_t fence, uint64_t expected);
bool server_turn(struct server *s, int ms);
struct server_ctx *want(struct server *s, uint8_t type);
bool waits(struct server *s, uint8_t type);
void put(struct rig *r, uint8_t type, const void *body, size_t n);
void from_broker(struct rig *r, uint8_t type, const void *body, size_t n);
struct frame get(struct rig *r, uint8_t type, uint8_t inner, const char *what);
void get_token(struct rig *r, uint8_t type, const char *what);
void get_broker_fence(struct rig *r, uint8_t inner, uint8_t fence, const char *what);
void send_capacity(struct rig *r, uint32_t slots);
void rig_keys(struct rig *r);                /* without a server */
void rig_link(struct rig *r, bool enrolled); /* sends it to r->address */
void rig_start(struct rig *r, bool enrolled);
void rig_stop(struct rig *r);
void append_event(struct rig *r);
void tell_events(struct rig *r);
void send_vm(struct rig *r, uint8_t state);
void send_finish(struct rig *r, uint64_t last_seq);
void events_are(struct server_ctx *c, uint64_t first, uint32_t count);
void to_started(struct rig *r);
void next_of(struct server_ctx *c, struct link_next *m);
void answer_next(struct server_ctx *c, const struct link_next_reply *m);

#endif
