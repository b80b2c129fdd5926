/*
 * controld's configuration: the struct that its key table (config.c) fills, and what follows from it. Read-only after it was
 * loaded, but for the reloadable keys, which main.c copies over at SIGHUP on the loop's thread.
 */
#ifndef CONTROLD_CONFIG_H
#define CONTROLD_CONFIG_H

#include "../common/buf.h"
#include "../common/error.h"

#include <stdbool.h>
#include <stdint.h>

/* Name in every server certificate of a deployment: nodes ask for it whatever address they dial. */
#define LINK_TLS_NAME "controld.ephemeral.internal"

/* What a run of a size gets. */
struct config_size {
	uint32_t memory_mib, vcpus;
};

struct config {
	/* Where things are. Strings are owned by this struct. */
	char *database;            /* libpq conninfo */
	char *listen;              /* public API */
	char *operator_listen;     /* operator API */
	char *link_listen;         /* node link, tls+tcp */
	char *metrics_listen;      /* "" = off */
	char *scripted_listen;     /* scripted provider; "" = off */
	char *scripted_token_file; /* NULL = none */
	char *keyring;
	char *tls_dir;
	char *link_addresses; /* what join tokens carry; NULL = from link_listen */
	char *link_names;     /* more names and addresses for the server certificate; "" = none */
	char *public_url;     /* NULL = from listen */

	/* Lease and time bounds, seconds. */
	int64_t lease_seconds, lease_renew_seconds, lease_grace_seconds;
	int64_t queue_timeout_seconds, ending_timeout_seconds;
	int64_t max_timeout_seconds, default_timeout_seconds;
	int64_t retention_days;

	/* Money, micros. */
	int64_t max_cost_micros, default_cost_micros;

	/* Per organization. */
	int64_t max_queued_per_org, max_running_per_org;

	/* Sizes of a run, "memory_mib,vcpus" as written; `sizes` after config_finish. */
	char *size_small, *size_standard, *size_large;
	struct config_size small, standard, large;

	/* Process bounds. */
	int64_t http_connections;     /* of each HTTP listener */
	int64_t http_body_budget_mib; /* bytes of request bodies in flight, all requests together */
	int64_t http_deadline_seconds;
	int64_t http_idle_seconds;
	int64_t stream_clients; /* SSE and wait clients */
	int64_t link_contexts;  /* node requests held at once, parked polls included */
	int64_t link_poll_seconds;
	int64_t start_wait_seconds; /* for Postgres at start */
	int64_t stop_wait_seconds;  /* for requests under way at the end */

	bool hide_node;
	bool callback_http; /* http:// callback URLs allowed */
	int64_t log_level;  /* enum log_level */
	bool log_json;
};

/* Loads, checks what one key alone cannot say, fills the derived fields. On failure `c` is freed. */
int config_read(struct config *c, const char *path, const char *const *overrides, size_t override_count,
		struct err *e) EPH_MUST_CHECK;
void config_release(struct config *c);
/* Takes over the reloadable keys of `fresh`; *kept (may be NULL) is how many others differ and need a restart. */
void config_reload(struct config *c, const struct config *fresh, size_t *kept);
/* The table for `controld help config`. */
void config_print_help(struct buf *out);

#endif
