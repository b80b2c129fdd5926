/*
 * Asynchronous libpq on libevent. A `pgev` is one connection of one class, in pipeline mode, reconnecting by itself with
 * backoff (100 ms to 5 s). Statements are static structs, prepared once per connection on first use. Everything runs on the
 * loop's thread; callbacks are called from the loop, never from inside pgev_exec. After a lost connection every outstanding
 * statement gets ERR_UNAVAILABLE ("the outcome is unknown"): callers must be idempotent.
 */
#ifndef EPH_PGEV_H
#define EPH_PGEV_H

#include "error.h"

#include <stdbool.h>
#include <stdint.h>

struct event_base;
struct pgev;

struct pg_stmt {
	const char *name; /* unique in the program */
	const char *sql;
	int nparams;
};

/* A text parameter (NULL = SQL NULL) or, with len >= 0, a binary bytea. The bytes are copied at the call. */
struct pg_param {
	const void *data;
	int len; /* -1: terminated text */
};
#define PG_TEXT(s)                                                                                                                 \
	{                                                                                                                          \
		(s), -1                                                                                                            \
	}
#define PG_BYTES(p, n)                                                                                                             \
	{                                                                                                                          \
		(p), (int)(n)                                                                                                      \
	}

/* Results come in text format; bytea columns as \x hex (use pg_bytea). */
struct pg_rows;
int pg_nrows(const struct pg_rows *r);
bool pg_is_null(const struct pg_rows *r, int row, int col);
const char *pg_text(const struct pg_rows *r, int row, int col); /* "" for NULL; valid during the callback */
int64_t pg_i64(const struct pg_rows *r, int row, int col);      /* 0 for NULL */
bool pg_bool(const struct pg_rows *r, int row, int col);
int64_t pg_affected(const struct pg_rows *r); /* rows inserted, updated or deleted */
/* Decodes a bytea column into malloc'd bytes (terminated with a NUL that is not counted). NULL when SQL NULL. */
uint8_t *pg_bytea(const struct pg_rows *r, int row, int col, size_t *len);

/* rows is NULL on error; `sqlstate` is "" unless Postgres answered with an error (then e->code: 40001/40P01/55P03/57014 ->
 * ERR_CONFLICT, 23xxx -> ERR_CONFLICT, 08/57P -> ERR_UNAVAILABLE, else ERR_INTERNAL). */
typedef void (*pg_cb)(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e);

struct pgev_options {
	const char *conninfo;
	const char *class_name; /* for logs: "events", "money", "reads", "listen" */
	int statement_timeout_ms, lock_timeout_ms, idle_in_tx_timeout_ms;
	const char *search_path;                                                /* NULL: server default */
	int max_outstanding;                                                    /* pgev_exec refuses above it (ERR_UNAVAILABLE) */
	void (*on_connect)(void *arg, struct pgev *pg);                         /* after each (re)connect; may be NULL */
	void (*on_notify)(void *arg, const char *channel, const char *payload); /* LISTEN connections; may be NULL */
	void *arg;
};

int pgev_new(struct event_base *base, const struct pgev_options *opt, struct pgev **out, struct err *e) EPH_MUST_CHECK;
void pgev_free(struct pgev *pg); /* outstanding callbacks are called with ERR_UNAVAILABLE first */
/* Queues one statement. -1 (cb not called) when too many are outstanding. While disconnected, statements wait up to 2 s, then fail.
 */
int pgev_exec(struct pgev *pg, const struct pg_stmt *st, const struct pg_param *params, pg_cb cb, void *arg,
		struct err *e) EPH_MUST_CHECK;
/* One-off SQL without parameters (LISTEN, SET); same rules. */
int pgev_sql(struct pgev *pg, const char *sql, pg_cb cb, void *arg, struct err *e) EPH_MUST_CHECK;
bool pgev_connected(const struct pgev *pg);
int pgev_outstanding(const struct pgev *pg);

#endif
