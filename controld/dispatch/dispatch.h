/*
 * The node link: hosts dial in by nng over TLS, ask, and are answered. Owns the listener, its contexts and the polls that wait.
 * Made by main.c after the store; everything runs on controld's loop, nng's own threads only append to an inbox. Never blocks, but
 * for dispatch_free (at most two seconds, after the loop has ended).
 */
#ifndef CONTROLD_DISPATCH_H
#define CONTROLD_DISPATCH_H

#include "common/error.h"
#include "proto/link.h"

#include <stdbool.h>
#include <stdint.h>

struct dispatch;
struct event_base;
struct pki;
struct secrets;
struct store;

struct dispatch_options {
	struct event_base *base;
	struct store *store;
	const struct secrets *secrets;
	const struct pki *pki;
	const char *listen; /* host:port, :port = all addresses, port 0 = any free one */
	int contexts_max;   /* requests held at once */
	int probe_ms;       /* between the watchdog's probes of the listener; 0 = 10 s */
	int sweep_ms;       /* between looks at pipes and strangers; 0 = 1 s */
	int poll_ms;        /* longest that a poll is parked here, whatever the node asks for */
};

/* Listens from then on. ERR_CONFLICT when the address is taken. */
int dispatch_start(const struct dispatch_options *opt, struct dispatch **out, struct err *e) EPH_MUST_CHECK;
/* host:port as bound. */
const char *dispatch_address(const struct dispatch *d);
/* False while the watchdog finds that the listener does not take connections; `why` then says so. */
bool dispatch_healthy(const struct dispatch *d, const char **why);

/* What metrics say of the link. */
struct dispatch_figures {
	uint64_t answered[LINK_TYPES][LINK_RESULTS];
	uint32_t pipes, parked, working, contexts, contexts_max;
};
void dispatch_figures(const struct dispatch *d, struct dispatch_figures *out);

/* The store's hooks (store_hooks): wake parked polls that could take such a run, and the poll of one node. */
void dispatch_wake_queued(struct dispatch *d, uint32_t memory_mib, uint32_t vcpus, bool allow_emulated, uint32_t count);
void dispatch_wake_node(struct dispatch *d, const char *node_id);

/* Answers what is parked and parks nothing more. */
void dispatch_drain(struct dispatch *d);
/* True when no request waits for the store. */
bool dispatch_idle(const struct dispatch *d);
/* After store_close, which calls back whatever is outstanding. NULL is allowed. */
void dispatch_free(struct dispatch *d);

#endif
