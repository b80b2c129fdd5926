/*
 * Metrics of this controld on a listener of their own (metrics_listen): what store, node link and API counted, and what the
 * database was last seen to hold. A scrape is answered from memory, whatever Postgres does. Made by serve.c after the parts that it
 * reads, ended before them; on the loop, never blocks.
 */
#ifndef CONTROLD_METRICS_H
#define CONTROLD_METRICS_H

#include "common/error.h"

struct api;
struct control_metrics;
struct dispatch;
struct event_base;
struct store;

struct control_metrics_options {
	struct event_base *base;
	const char *listen; /* host:port, port 0 = any free one */
	struct store *store;
	const struct dispatch *dispatch;
	const struct api *api;
};

int control_metrics_start(const struct control_metrics_options *opt, struct control_metrics **out, struct err *e) EPH_MUST_CHECK;
const char *control_metrics_address(const struct control_metrics *c); /* as bound */
void control_metrics_free(struct control_metrics *c);                 /* NULL allowed */

#endif
