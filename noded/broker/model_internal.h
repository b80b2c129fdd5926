/* Fields of a model (model.h), and what its files call of one another: model.c, model_send.c, model_charge.c. */
#ifndef BROKER_MODEL_INTERNAL_H
#define BROKER_MODEL_INTERNAL_H

#include "model.h"
#include "model_stream.h"

#include "common/buf.h"
#include "common/curlev.h"
#include "common/netaddr.h"

#include <event2/util.h>

#define MODEL_ERROR_BODY_MAX (64 * 1024)

struct event;

struct model {
	struct model_options opt;
	char key[513];      /* the provider's bearer; wiped */
	struct net_own own; /* this host's addresses when the run began */
	bool own_known;
	enum limit_param limit_param; /* as configured, or learned */
	bool limit_learned;

	/* The call under way. */
	bool busy;
	struct model_report report;
	struct buf body; /* prefix, then the attempt's tail */
	size_t prefix_len;
	uint32_t wish_tokens;
	int64_t started_ms;   /* CLOCK_BOOTTIME */
	int64_t deadline_ms;  /* of all attempts together, CLOCK_BOOTTIME */
	bool half_retried;    /* a reply that broke off was asked for again */
	bool counted;         /* in usage.model_calls: its first 2xx head came */
	struct event *timer;  /* the next attempt */
	struct event *linger; /* how long the end of an answer's body is waited for */

	/* The attempt under way; http NULL between attempts. */
	struct curl_call *http;
	struct meter_plan plan;
	struct model_stream *stream;
	struct err stream_error;
	struct buf error_body; /* of a reply that is not 2xx */
	int status;
	int64_t retry_after_ms; /* -1 = not said */

	/* Usage known for a request that began with these bytes; known_tokens -1 = none. */
	int64_t known_tokens;
	size_t known_len;
	uint8_t known_hash[32];
};

/* model.c: an attempt is over, as curl_request.on_done. */
void model_attempt_done(void *m, int status, const struct err *e);

/* model_send.c. Lays a whole body of this attempt: the prefix stays, the tail has this attempt's limit. False: no memory. */
bool model_lay_body(struct model *m, const struct meter_plan *p) EPH_MUST_CHECK;
int model_send(struct model *m, int64_t timeout_ms, struct err *e) EPH_MUST_CHECK;
void model_on_linger(evutil_socket_t fd, short what, void *m); /* the end of a body was waited for long enough */

/* model_charge.c. False: not even the least is affordable; `p` says what would be needed. */
bool model_plan(struct model *m, struct meter_plan *p) EPH_MUST_CHECK;
/* Charges an attempt whose 2xx head came. False: the meter could not be written, which ended the run and this call with it. */
bool model_settle(struct model *m);
bool model_release(struct model *m); /* nothing is charged; false as above */
void model_learn(struct model *m);   /* keeps what the provider counted for exactly these bytes: the next request's bound */
void model_note(struct model *m, const char *text); /* the first one counts */

#endif
