/* The families of controld and how they are written (metrics.h). One table, one function a group, in its order. */
#include "metrics/metrics.h"

#include "api/api.h"
#include "dispatch/dispatch.h"
#include "store/figures.h"

#include "common/clock.h"
#include "common/metrics_http.h"
#include "common/netlisten.h"

#include <stdlib.h>

struct control_metrics {
	struct control_metrics_options opt;
	struct metrics_http *http;
	char address[300];
};

enum family {
	BUILD,
	SCHEMA,
	DATABASE_UP,
	DATABASE_AGE,
	CONNECTED,
	OUTSTANDING,
	RUNS,
	QUEUE_OLDEST,
	PENDING_OLDEST,
	NODES,
	SLOTS,
	CREATES,
	CLAIMS,
	RECLAIMS,
	CLAIM_SECONDS,
	START_SECONDS,
	REQUEUES,
	LOST,
	ENDED,
	ERRORS,
	SETTLE_SECONDS,
	CHARGED,
	UNCOUNTED,
	REQUESTS,
	UNDER_WAY,
	STREAMS,
	CONNECTIONS,
	BODY_BYTES,
	LINK_REQUESTS,
	LINK_CONNECTIONS,
	LINK_POLLS,
	LINK_CONTEXTS,
	FAMILIES
};

#define N "ephemeral_"
static const struct metrics_family table[FAMILIES] = {
	[BUILD] = { N "build", METRICS_INFO, NULL, "The controld that answers." },
	[SCHEMA] = { N "schema_version", METRICS_GAUGE, NULL, "Migrations that the database has." },
	[DATABASE_UP] = { N "database_up", METRICS_GAUGE, NULL,
			"1 while the last try to read figures from Postgres worked; with 0, those of it here are old." },
	[DATABASE_AGE] = { N "database_figures_age_seconds", METRICS_GAUGE, "seconds",
			"Age of the figures that come from Postgres; -1 before the first." },
	[CONNECTED] = { N "database_connected", METRICS_GAUGE, NULL, "1 while the connection of this class stands." },
	[OUTSTANDING] = { N "database_statements", METRICS_GAUGE, NULL, "Statements that wait for Postgres, by connection class." },
	[RUNS] = { N "runs", METRICS_GAUGE, NULL, "Runs that are not settled, of the whole deployment, by state." },
	[QUEUE_OLDEST] = { N "queue_oldest_seconds", METRICS_GAUGE, "seconds",
			"Age of the oldest run that is queued; 0 without one." },
	[PENDING_OLDEST] = { N "billing_pending_oldest_seconds", METRICS_GAUGE, "seconds",
			"How long ago the run ended that has waited longest for its settlement; 0 without one." },
	[NODES] = { N "nodes", METRICS_GAUGE, NULL, "Enrolled nodes of the whole deployment by state; revoked ones are none." },
	[SLOTS] = { N "nodes_slots", METRICS_GAUGE, NULL, "Places for VMs on nodes that are live and take runs: free, and all." },
	[CREATES] = { N "creates", METRICS_COUNTER, NULL, "Runs asked for here, by result." },
	[CLAIMS] = { N "claims", METRICS_COUNTER, NULL, "Runs given to nodes here." },
	[RECLAIMS] = { N "claims_again", METRICS_COUNTER, NULL, "Of those, runs that an earlier node did not start." },
	[CLAIM_SECONDS] = { N "claim_seconds", METRICS_HISTOGRAM, "seconds", "From a run's creation to its first node." },
	[START_SECONDS] = { N "start_seconds", METRICS_HISTOGRAM, "seconds",
			"From a run's creation to worker.started, by start mode, as its events come in here." },
	[REQUEUES] = { N "requeues", METRICS_COUNTER, NULL, "Runs that went back into the queue, by reason." },
	[LOST] = { N "runs_lost", METRICS_COUNTER, NULL, "Running runs that were ended here because their node's lease ran out." },
	[ENDED] = { N "runs_ended", METRICS_COUNTER, NULL, "Runs settled here, by status." },
	[ERRORS] = { N "run_errors", METRICS_COUNTER, NULL, "Runs settled here that did not succeed, by error code." },
	[SETTLE_SECONDS] = { N "settle_seconds", METRICS_HISTOGRAM, "seconds", "From a run's end to its settlement." },
	[CHARGED] = { N "charged_micros", METRICS_COUNTER, "micros", "Millionths of a US dollar that settled runs were charged." },
	[UNCOUNTED] = { N "runs_uncounted", METRICS_COUNTER, NULL,
			"Settled runs that are missing in the four families above, because the database did not answer." },
	[REQUESTS] = { N "http_requests", METRICS_COUNTER, NULL, "HTTP requests answered, by class of route and of status." },
	[UNDER_WAY] = { N "http_requests_under_way", METRICS_GAUGE, NULL, "HTTP requests that wait for their answer." },
	[STREAMS] = { N "http_streams", METRICS_GAUGE, NULL, "Event streams and waits: open, and the most that may be." },
	[CONNECTIONS] = { N "http_connections", METRICS_GAUGE, NULL, "Open connections of both API listeners." },
	[BODY_BYTES] = { N "http_body_bytes", METRICS_GAUGE, "bytes", "Bytes of request bodies that are held." },
	[LINK_REQUESTS] = { N "link_requests", METRICS_COUNTER, NULL, "Requests of nodes answered, by type and result." },
	[LINK_CONNECTIONS] = { N "link_connections", METRICS_GAUGE, NULL, "Connections of nodes." },
	[LINK_POLLS] = { N "link_polls_parked", METRICS_GAUGE, NULL, "Polls of nodes that wait for work." },
	[LINK_CONTEXTS] = { N "link_contexts", METRICS_GAUGE, NULL,
			"Places for requests of nodes: busy with the store, made, and the most that may be." },
};

/* --- writing ------------------------------------------------------------------------------------------------------------------ */

static void begin(struct metrics *m, enum family f)
{
	metrics_begin(m, &table[f]);
}

static void one(struct metrics *m, enum family f, uint64_t value)
{
	begin(m, f);
	metrics_plain(m, (int64_t)value, 0);
}

static void milli(struct metrics *m, enum family f, int64_t ms)
{
	begin(m, f);
	metrics_plain(m, ms, 3);
}

static void each(struct metrics *m, enum family f, const char *label, const char *const *names, size_t n, const uint64_t *values)
{
	begin(m, f);
	metrics_each(m, label, names, n, values);
}

static void times(struct metrics *m, enum family f, const struct figures_times *t)
{
	begin(m, f);
	metrics_times(m, NULL, 0, figures_bounds_ms, FIGURES_BUCKETS, t->bucket, t->sum_ms);
}

static void write_database(const struct store_figures *f, struct metrics *m)
{
	const struct metrics_label build = { .name = "version", .value = EPHEMERAL_VERSION };
	const struct figures_read *r = &f->read;
	uint64_t connected[FIGURES_POOLS], outstanding[FIGURES_POOLS];

	for (size_t i = 0; i < FIGURES_POOLS; i++) {
		connected[i] = f->pools[i].connected;
		outstanding[i] = f->pools[i].outstanding;
	}
	begin(m, BUILD);
	metrics_value(m, &build, 1, 1, 0);
	one(m, SCHEMA, (uint64_t)r->schema_version);
	one(m, DATABASE_UP, r->at_boot_ms > 0 && !r->failed);
	milli(m, DATABASE_AGE, r->at_boot_ms > 0 ? clock_boot_ms() - r->at_boot_ms : -1000);
	each(m, CONNECTED, "class", figures_pool_names, FIGURES_POOLS, connected);
	each(m, OUTSTANDING, "class", figures_pool_names, FIGURES_POOLS, outstanding);
}

static void write_now(const struct figures_read *r, struct metrics *m)
{
	const char *const slots[] = { "free", "total" };
	const uint64_t slot_values[] = { r->free_slots, r->total_slots };

	each(m, RUNS, "state", figures_state_names, FIGURES_STATES, r->runs);
	milli(m, QUEUE_OLDEST, r->oldest_queued_ms);
	milli(m, PENDING_OLDEST, r->oldest_unsettled_ms);
	each(m, NODES, "state", figures_node_names, FIGURES_NODES, r->nodes);
	each(m, SLOTS, "state", slots, 2, slot_values);
}

static void write_runs(const struct store_figures *f, struct metrics *m)
{
	each(m, CREATES, "result", figures_create_names, FIGURES_CREATES, f->creates);
	one(m, CLAIMS, f->claims);
	one(m, RECLAIMS, f->claims_again);
	times(m, CLAIM_SECONDS, &f->claim);
	begin(m, START_SECONDS);
	for (size_t i = 0; i < FIGURES_MODES; i++) {
		const struct metrics_label mode = { .name = "mode", .value = figures_mode_names[i] };

		metrics_times(m, &mode, 1, figures_bounds_ms, FIGURES_BUCKETS, f->start[i].bucket, f->start[i].sum_ms);
	}
	each(m, REQUEUES, "reason", figures_requeue_names, FIGURES_REQUEUES, f->requeues);
	one(m, LOST, f->lost_runs);
	each(m, ENDED, "status", figures_end_names, FIGURES_ENDS, f->ended);
	begin(m, ERRORS);
	for (int i = ERRCODE_NONE + 1; i < ERRCODE_COUNT; i++) {
		const struct metrics_label code = { .name = "code", .value = errcode_text((enum errcode)i) };

		metrics_value(m, &code, 1, (int64_t)f->errors[i], 0);
	}
	times(m, SETTLE_SECONDS, &f->settle);
	one(m, CHARGED, f->charged_micros);
	one(m, UNCOUNTED, f->not_looked_at);
}

static void write_api(const struct api *a, struct metrics *m)
{
	static const char *const codes[API_CODES] = { "2xx", "3xx", "4xx", "5xx" };
	struct api_figures f;

	api_figures(a, &f);
	begin(m, REQUESTS);
	metrics_each2(m, "class", api_class_names, API_CLASSES, "code", codes, API_CODES, f.requests[0]);
	one(m, UNDER_WAY, f.under_way);
	begin(m, STREAMS);
	metrics_each(m, "state", (const char *const[]){ "open", "max" }, 2, (const uint64_t[]){ f.streams, f.streams_max });
	one(m, CONNECTIONS, f.connections);
	one(m, BODY_BYTES, f.body_bytes);
}

static void write_link(const struct dispatch *d, struct metrics *m)
{
	struct dispatch_figures f;

	dispatch_figures(d, &f);
	begin(m, LINK_REQUESTS);
	metrics_each2(m, "type", link_type_names + 1, LINK_TYPES - 1, "result", link_result_names, LINK_RESULTS, f.answered[1]);
	one(m, LINK_CONNECTIONS, f.pipes);
	one(m, LINK_POLLS, f.parked);
	begin(m, LINK_CONTEXTS);
	metrics_each(m, "state", (const char *const[]){ "working", "made", "max" }, 3,
			(const uint64_t[]){ f.working, f.contexts, f.contexts_max });
}

static void write_all(void *arg, struct metrics *m)
{
	const struct control_metrics *c = arg;
	const struct store_figures *f = store_figures(c->opt.store);

	write_database(f, m);
	write_now(&f->read, m);
	write_runs(f, m);
	write_api(c->opt.api, m);
	write_link(c->opt.dispatch, m);
}

/* --- up and down -------------------------------------------------------------------------------------------------------------- */

int control_metrics_start(const struct control_metrics_options *opt, struct control_metrics **out, struct err *e)
{
	struct control_metrics *c = calloc(1, sizeof(*c));
	const struct metrics_http_options http = { .listen = opt->listen, .write = write_all, .arg = c };

	*out = NULL;
	if (!c)
		return err_set(e, ERR_NOMEM, "no memory for metrics");
	c->opt = *opt;
	if (metrics_http_new(opt->base, &http, &c->http, e) != 0 ||
			net_listen_text(opt->listen, metrics_http_port(c->http), c->address, sizeof(c->address), e) != 0) {
		control_metrics_free(c);
		return -1;
	}
	(void)store_figures(opt->store); /* so that the first scrape finds something */
	*out = c;
	return 0;
}

const char *control_metrics_address(const struct control_metrics *c)
{
	return c->address;
}

void control_metrics_free(struct control_metrics *c)
{
	if (!c)
		return;
	metrics_http_free(c->http);
	free(c);
}
