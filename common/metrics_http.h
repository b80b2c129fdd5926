/*
 * A listener for scrapes: GET and HEAD of /metrics, in the format that Accept asks for; nothing else is there. Without a key, so
 * it is for loopback or a network of the operator's. On the loop of whoever makes it, never blocks; bounded in connections, time
 * and bytes.
 */
#ifndef EPH_METRICS_HTTP_H
#define EPH_METRICS_HTTP_H

#include "metrics.h"

struct event_base;
struct metrics_http;

struct metrics_http_options {
	const char *listen; /* host:port, port 0 allowed */
	int listen_fd;      /* above 0: a bound socket instead; taken over, also on failure */
	/* Writes all families; metrics_init and metrics_end are done around it. */
	void (*write)(void *arg, struct metrics *m);
	void *arg;
};

int metrics_http_new(struct event_base *base, const struct metrics_http_options *opt, struct metrics_http **out,
		struct err *e) EPH_MUST_CHECK;
uint16_t metrics_http_port(const struct metrics_http *h);
void metrics_http_free(struct metrics_http *h); /* NULL is allowed */

#endif
