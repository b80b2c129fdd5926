/* What pgev.c (connection and loop), pgev_job.c (one statement), pgev_list.c (queues, prepared names) and pgev_rows.c
 * (reading results) share. */
#ifndef EPH_PGEV_INTERNAL_H
#define EPH_PGEV_INTERNAL_H

#include "pgev.h"

#include <libpq-fe.h>

struct pg_rows {
	PGresult *res;
};

/* One statement from pgev_exec to its callback; its parameters lie behind it in the same block. */
struct pg_job {
	struct pg_job *next;
	const struct pg_stmt *st; /* NULL: one-off sql */
	char *sql;
	pg_cb cb;
	void *arg;
	int64_t deadline_ms; /* while it waits for a connection (monotonic) */
	bool parsed_here;    /* its Parse goes ahead of it in the same group */
	bool again;          /* sent a second time; see pg_job_retry */
	int good_results;
	PGresult *result; /* the last good one, or the first error */
	bool has_error;
	int nparams;
	const char **values;
	int *lengths, *formats;
};

struct pg_job *pg_job_make(const struct pg_stmt *st, const char *sql, const struct pg_param *params, pg_cb cb, void *arg);
void pg_job_free(struct pg_job *job);
/* Into libpq's output; false when the connection does not take it. */
bool pg_job_send(struct pg_job *job, PGconn *conn, bool pipeline);
/* Takes one result (owned). False when it can belong to no statement of ours (COPY). */
bool pg_job_result(struct pg_job *job, PGresult *res);
/* Whether a failed statement certainly never ran, so that it may be sent once more. */
enum pg_retry {
	PG_RETRY_NO,
	PG_RETRY_UNKNOWN, /* its name is unknown to the server: the Parse that stood ahead of it in another group failed */
	PG_RETRY_STALE,   /* a table changed its columns since it was parsed */
};
enum pg_retry pg_job_retry(const struct pg_job *job);
void pg_job_rewind(struct pg_job *job);
/* Calls back with what came, and frees the job. */
void pg_job_done(struct pg_job *job, const char *class_name);
/* Calls back with ERR_UNAVAILABLE and frees the job. */
void pg_job_lost(struct pg_job *job, const char *class_name, const char *why);

/* A queue of statements: first in, first out. */
struct pg_list {
	struct pg_job *head, **tail;
};
void pg_list_init(struct pg_list *l);
void pg_list_put(struct pg_list *l, struct pg_job *job);
struct pg_job *pg_list_take(struct pg_list *l); /* NULL when it is empty */

/* Which statements the server knows on this connection: by address, open addressing. */
#define PG_PREPARED_MAX 1024 /* statements of a program */
struct pg_prepared {
	struct {
		const struct pg_stmt *st;
		bool parsed; /* or its Parse is under way */
	} slots[2 * PG_PREPARED_MAX];
	int count;
};
/* True when st still has to be parsed; from then on it counts as parsed. */
bool pg_prepared_need(struct pg_prepared *p, const struct pg_stmt *st);
/* st has to be parsed anew at its next use. False when it had to anyway. */
bool pg_prepared_drop(struct pg_prepared *p, const struct pg_stmt *st);
void pg_prepared_forget(struct pg_prepared *p);

/* Options for one connection: the caller's conninfo with our timeouts. Starts connecting; NULL and *e when it cannot. */
PGconn *pg_connect_start(const struct pgev_options *opt, struct err *e);

#endif
