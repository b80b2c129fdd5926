/*
 * What the store counts for metrics, and what it reads off the database for them. Counted here is what *this* controld did: sums
 * over all of them are the deployment's. Read off is what everybody sees, by one cheap statement every few seconds, which looks at
 * what is alive and never at history; only while somebody asks for figures. On the loop's thread; plain numbers, no allocation when
 * something is counted.
 */
#ifndef CONTROLD_STORE_FIGURES_H
#define CONTROLD_STORE_FIGURES_H

#include "proto/errcode.h"

#include <stdbool.h>
#include <stdint.h>

#define FIGURES_BUCKETS 14
extern const uint32_t figures_bounds_ms[FIGURES_BUCKETS]; /* upper bounds; one bucket more takes the rest */
struct figures_times {
	uint64_t bucket[FIGURES_BUCKETS + 1];
	uint64_t sum_ms;
};

/* By store_create_result, and the two ways of no answer. */
enum figures_create { FIGURES_CREATE_UNAVAILABLE = 8, FIGURES_CREATE_ERROR, FIGURES_CREATES };
enum figures_mode { FIGURES_COLD, FIGURES_CLONE, FIGURES_WARM, FIGURES_OTHER, FIGURES_MODES };
enum figures_requeue { FIGURES_NO_ROOM, FIGURES_START_FAILED, FIGURES_CLAIM_LOST, FIGURES_REQUEUES };
enum figures_end { FIGURES_SUCCEEDED, FIGURES_FAILED, FIGURES_CANCELLED, FIGURES_TIMED_OUT, FIGURES_INTERRUPTED, FIGURES_ENDS };
enum figures_state { FIGURES_QUEUED, FIGURES_CLAIMED, FIGURES_RUNNING, FIGURES_ENDING, FIGURES_UNSETTLED, FIGURES_STATES };
enum figures_node {
	FIGURES_NODE_LIVE,
	FIGURES_NODE_DRAINING,
	FIGURES_NODE_PROBATION,
	FIGURES_NODE_STOPPED,
	FIGURES_NODE_LOST,
	FIGURES_NODE_UNSEEN, /* enrolled, never asked for work */
	FIGURES_NODES
};
enum figures_pool { FIGURES_PG_EVENTS, FIGURES_PG_MONEY, FIGURES_PG_READS, FIGURES_PG_LISTEN, FIGURES_POOLS };

extern const char *const figures_create_names[FIGURES_CREATES];
extern const char *const figures_mode_names[FIGURES_MODES];
extern const char *const figures_requeue_names[FIGURES_REQUEUES];
extern const char *const figures_end_names[FIGURES_ENDS];
extern const char *const figures_state_names[FIGURES_STATES];
extern const char *const figures_node_names[FIGURES_NODES];
extern const char *const figures_pool_names[FIGURES_POOLS];

/* As the database had it last. */
struct figures_read {
	int64_t at_boot_ms; /* CLOCK_BOOTTIME; 0 = never yet */
	bool failed;        /* the last try did: what stands here is older */
	uint64_t runs[FIGURES_STATES];
	uint64_t nodes[FIGURES_NODES];
	int64_t oldest_queued_ms, oldest_unsettled_ms; /* age then; 0 = there is none */
	uint64_t free_slots, total_slots;              /* of nodes that are live and take runs */
	int64_t schema_version;
};

struct store_figures {
	uint64_t creates[FIGURES_CREATES];
	uint64_t claims, claims_again;             /* runs given to nodes; those of them not for the first time */
	struct figures_times claim;                /* queued -> given, first attempts */
	struct figures_times start[FIGURES_MODES]; /* queued -> worker.started */
	uint64_t requeues[FIGURES_REQUEUES];
	uint64_t lost_runs; /* running runs ended because their node's lease ran out */
	uint64_t ended[FIGURES_ENDS];
	uint64_t errors[ERRCODE_COUNT];
	struct figures_times settle; /* end -> settled */
	uint64_t charged_micros;
	uint64_t not_looked_at; /* settled runs that are missing in the four above: too many at once, or the database did not answer
				 */
	struct figures_read read;
	struct {
		bool connected;
		uint64_t outstanding;
	} pools[FIGURES_POOLS];
};

struct store;

/* The figures as they are; what the database knows is read anew in the background when it is older than a few seconds, and goes on
 * being read while somebody asks here at least every few minutes. */
const struct store_figures *store_figures(struct store *s);

#endif
