/* Fields of a model (model.h), shared by its files only. */
#ifndef BROKER_MODEL_INTERNAL_H
#define BROKER_MODEL_INTERNAL_H

#include "model.h"
#include "model_stream.h"

#include "common/buf.h"
#include "common/curlev.h"

struct event;

struct model {
	struct model_options opt;
	char key[513];                /* the provider's bearer; wiped */
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

#endif
