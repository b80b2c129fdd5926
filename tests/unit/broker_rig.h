/*
 * What the tests of the broker process share: keeper, link, channel and guest played over its socketpairs, a provider over HTTP on
 * loopback in a process of its own. See test_broker_calls.c and test_broker_session.c.
 */
#ifndef TEST_BROKER_RIG_H
#define TEST_BROKER_RIG_H

#include "noded/roles.h"
#include "noded/spool.h"

#include "common/clock.h"
#include "common/json.h"
#include "common/text.h"
#include "common/wire.h"
#include "keeper/stats.h"
#include "proto/errcode.h"
#include "proto/guest.h"
#include "proto/link.h"
#include "proto/role.h"
#include "proto/tools.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
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
#define WAIT_MS 15000
#define ANSWERS_MAX 8

#define SSE_HEAD "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
#define CHUNK(text) "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" text "\"},\"finish_reason\":null}]}\n\n"
#define STOP "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
#define USAGE(in, cached, out)                                                                                                     \
	"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":" #in ",\"completion_tokens\":" #out                                   \
	",\"prompt_tokens_details\":{\"cached_tokens\":" #cached "}}}\n\n"
#define DONE "data: [DONE]\n\n"
#define HELLO_REPLY SSE_HEAD CHUNK("hel") CHUNK("lo") STOP USAGE(20, 5, 3) DONE

struct shared {
	int requests;
	int hung;                                      /* answers that were left hanging */
	int64_t held[ANSWERS_MAX], spent[ANSWERS_MAX]; /* meter in the spool when the request had come */
	char request[ANSWERS_MAX][16384];
};

struct provider {
	int port;
	pid_t pid;
	struct shared *shared;
};

struct frame {
	uint8_t type;
	uint8_t *body;
	size_t n;
};

struct rig {
	int keeper, channel, spool_fd, kill_fd;
	int ctl; /* what the broker listens on for a later keeper; below 0 unless a test made it before rig_start */
	pid_t pid;
	struct provider provider;
	struct assignment a;
	struct assign_file files[2];
	int64_t lease_ms, boot_ms;
	uint32_t next_call;
	char key[64]; /* the provider's */
	struct run_end end;
	bool ended;
	uint8_t refuse_failed;
	uint32_t refuse_code;
	char refuse_reason[513];
	int64_t credit;
	struct stats_broker tally; /* what keeper was told for metrics */
};

void put(int fd, uint8_t type, const void *body, size_t n);
void rig_defaults(struct rig *r);
void rig_start(struct rig *r, const char *const *answers);
void give_assignment(struct rig *r);
void wait_until_answering(struct rig *r); /* the broker has read what the provider says before it hangs */
struct frame from_keeper_side(struct rig *r, uint8_t type, uint8_t inner);
struct frame from_channel_side(struct rig *r, uint8_t type);
void to_link_side(struct rig *r, uint8_t type, const void *body, size_t n);
void ack(struct rig *r);
void wait_frame(struct rig *r, uint8_t type, uint8_t inner);
void wait_channel(struct rig *r, uint8_t type);
void to_probe(struct rig *r, uint8_t nonce[GUEST_NONCE_LEN]); /* the broker waits for a hello with this nonce */
void hello(struct rig *r, const uint8_t nonce[GUEST_NONCE_LEN]);
void to_start(struct rig *r);
void to_work(struct rig *r);
void call_model(struct rig *r, const char *text);
void reply_is(struct rig *r, const char *content);
void to_the_end(struct rig *r);
void rig_stop(struct rig *r);
void finish_with(struct rig *r, const char *output);
void read_events(struct rig *r, char types[4096], enum event_type find, char data[65536], int *count);
int64_t data_int(const char *event, const char *key);
bool data_text_is(const char *event, const char *key, const char *want);

#endif
