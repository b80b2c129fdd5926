/* Synchronous libpq for start-up and subcommands; see sync.c. Everything blocks. */
#ifndef CONTROLD_STORE_SYNC_H
#define CONTROLD_STORE_SYNC_H

#include "common/error.h"

#include <libpq-fe.h>
#include <stdbool.h>
#include <stdint.h>

PGconn *sync_open(const char *conninfo, struct err *e); /* NULL: e says why; else PQfinish */
/* Result of one statement (or several, without parameters); NULL with e set, ERR_CONFLICT when trying again may help. PQclear. */
PGresult *sync_query(PGconn *db, const char *what, const char *sql, int n, const char *const *params, struct err *e);
int sync_exec(PGconn *db, const char *what, const char *sql, struct err *e) EPH_MUST_CHECK;
bool sync_retryable(const PGresult *r);                /* lock timeout, deadlock, serialization */
int64_t sync_i64(const PGresult *r, int row, int col); /* 0 for NULL */

#endif
