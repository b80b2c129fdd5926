/*
 * The broker's model path by itself: the real model.c, meter and libcurl on a loop, against a provider (upstream.h) on the same
 * loop. One call at a time; what it came to is kept. The key is a canary: every test ends with a look for it in messages, events'
 * texts and the log.
 */
#ifndef TEST_MODEL_RIG_H
#define TEST_MODEL_RIG_H

#include "unit.h"

#include "upstream.h"

#include "noded/broker/model.h"

#include "common/curlev.h"
#include "common/text.h"

#define RIG_RUN "run_0123456789abcdef0123456789abcdef"
#define RIG_KEY "sk-canary-5d1e-88f2c0"
#define SCRIPT_MAX 12

#define REPLY_HEAD "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
#define CHUNK(text) "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" text "\"},\"finish_reason\":null}]}\n\n"
#define CALLS(list) "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[" list "]}}]}\n\n"
#define FINISH(why) "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"" why "\"}]}\n\n"
#define USAGE_IS(json) "data: {\"choices\":[],\"usage\":" json "}\n\n"
#define USAGE USAGE_IS("{\"prompt_tokens\":20,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":5}}")
#define DONE "data: [DONE]\n\n"
#define GOOD REPLY_HEAD CHUNK("hel") CHUNK("lo") FINISH("stop") USAGE DONE
#define GOOD_MICROS 92 /* 15 * 3 + 5 * .3 + 3 * 15, rounded up */
#define ERROR(status, headers, body) "HTTP/1.1 " status "\r\n" headers "Connection: close\r\n\r\n" body

struct model_rig {
	struct event_base *base;
	struct curlev *curl;
	struct upstream *up;
	struct assignment a;
	struct price price;
	struct meter meter;
	struct model *model;
	bool refuse_meter; /* meter_moved says false */
	int64_t began_ms;  /* hand-over */
	int64_t jump_ms;   /* added to the run's clock */
	int64_t time_left_ms;
	const struct answer *script; /* the n-th request gets the n-th; after the last one it hangs up */
	int script_len;
	uint32_t calls;

	/* What the last call came to. */
	bool ended, replied;
	struct model_reply reply;
	struct model_report report;
	enum errcode code;
	char text[ERR_TEXT_MAX];
	int64_t hold; /* the largest that was open during the call */
	char request_id[SCRIPT_MAX][80];
	char body[SCRIPT_MAX][4096];
	int64_t asked_ms[SCRIPT_MAX]; /* when each request came */
};

/* Sets what a test may change (a, price, meter) before rig_open. */
void rig_init(struct model_rig *r);
void rig_open(struct model_rig *r, const struct answer *script, int n, struct ssl_ctx_st *tls, bool at_head);
/* With a provider that is a function. */
void rig_open_with(struct model_rig *r, bool (*decide_all)(void *arg, const struct asked *q, struct answer *out), void *arg);
void rig_close(struct model_rig *r);
/* One call with this user message, to its end. */
void rig_call(struct model_rig *r, const char *text);
/* All at once: a provider that answers with this script, one call. */
void rig_one(struct model_rig *r, const struct answer *script, int n);
/* The whole of stderr so far must not have the key; nor what the call came to. */
void rig_no_key(const struct model_rig *r);
void rig_log_start(void); /* stderr to a file that rig_no_key reads */
const char *rig_log(void);
int rig_log_end(int failed); /* shows what was written to stderr when a test failed; returns its argument */
int64_t rig_now_ms(const struct model_rig *r);

void rig_failed(const struct model_rig *r, enum errcode code, int requests, const char *const *words);
#define FAILED(r, code, requests, ...) rig_failed(r, code, requests, (const char *const[]){ __VA_ARGS__, NULL })

#endif
