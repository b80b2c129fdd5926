/*
 * The public interface: REST on two listeners, one for members (`listen`) and one for the operator (`operator_listen`), with one
 * route table. Called by controld's main (api_start after the store is open, api_drain and api_free at the end); asks the store
 * for everything and tells dispatch by `wake` what it need not wait for. Runs on controld's loop; nothing here blocks.
 */
#ifndef CONTROLD_API_H
#define CONTROLD_API_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

struct api;
struct event_base;
struct secrets;
struct store;

/* Something in Postgres changed that a node waits for. A hint: it may be lost, the other controlds and the ticks see it anyway. */
enum api_wake {
	API_WAKE_QUEUED = 1, /* id = run: wake one parked node that fits */
	API_WAKE_CANCEL,     /* id = run: its node has a command */
	API_WAKE_NODE,       /* id = node: drained, undrained, revoked */
};

enum api_size { API_SIZE_SMALL, API_SIZE_STANDARD, API_SIZE_LARGE, API_SIZE_COUNT };

struct api_size_spec {
	uint32_t memory_mib;
	uint32_t vcpus;
};

struct api_options {
	struct event_base *base;
	struct store *store;
	struct secrets *secrets;

	/* Config values of the same names; strings must live as long as the api. */
	const char *listen;
	const char *operator_listen;
	const char *public_url;     /* without a slash at the end; NULL or "" = http://<listen as bound> */
	const char *link_addresses; /* "tls+tcp://host:port,..." as bound: what a join token carries */
	const char *ca_pem;         /* the CA that nodes pin */
	const uint8_t *root_key;    /* 32 bytes: public key that certifies nodes, shown with receipts; NULL = none */
	int64_t default_timeout_seconds, max_timeout_seconds;
	int64_t default_cost_micros, max_cost_micros;
	int64_t max_queued_per_org, max_running_per_org;
	int64_t queue_timeout_seconds;
	struct api_size_spec sizes[API_SIZE_COUNT];
	bool hide_node; /* a run does not name its node */
	int64_t http_connections, http_body_budget_mib, http_deadline_seconds,
			http_idle_seconds; /* of each listener; 0 = built in */
	int64_t stream_clients;            /* event streams and waits of this process; 0 = built in */

	/* May be NULL. */
	void (*wake)(void *arg, enum api_wake what, const char *id);
	/* Adds one line for each thing that the rest of controld is not ready for (link listener down, ...). May be NULL. */
	void (*not_ready)(void *arg, struct buf *reasons);
	void *arg; /* of both */
};

/* What metrics say of the interface: requests answered, by class of route and of status. */
enum api_class {
	API_CLASS_CREATE, /* POST /v1/runs */
	API_CLASS_RUN,    /* one run: read, wait, cancel, receipt */
	API_CLASS_RUNS,   /* lists */
	API_CLASS_EVENTS,
	API_CLASS_ACCOUNT, /* keys, members, models, me */
	API_CLASS_OPERATOR,
	API_CLASS_HEALTH, /* and the texts of problems */
	API_CLASS_NONE,   /* no such path or method, or refused before a path was known */
	API_CLASSES
};
#define API_CODES 4 /* 2xx to 5xx */
extern const char *const api_class_names[API_CLASSES];
struct api_figures {
	uint64_t requests[API_CLASSES][API_CODES];
	uint64_t under_way, streams, streams_max, connections, body_bytes;
};
void api_figures(const struct api *a, struct api_figures *out);

/* Binds both listeners and answers from then on. On failure nothing is bound. */
int api_start(const struct api_options *opt, struct api **out, struct err *e) EPH_MUST_CHECK;
uint16_t api_port(const struct api *a);
uint16_t api_operator_port(const struct api *a);
/* "127.0.0.1:8080" as bound, for --ready-fd. Valid as long as the api. */
const char *api_address(const struct api *a);
const char *api_operator_address(const struct api *a);
/* Takes no new connection, answers /readyz with 503, ends event streams and waits so that clients go to another controld. */
void api_drain(struct api *a);
/* True when no request is being answered and every byte of the answers has been sent. */
bool api_idle(const struct api *a);
/* Only while the store still lives. Callbacks of the store that are still to come are answered into nothing. */
void api_free(struct api *a);

#endif
