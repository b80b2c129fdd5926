/* Synchronous libpq, for start-up and for subcommands that have no loop. Everything here blocks. Called by migrate.c and
 * check_ledger.c only, on the main thread before there is a loop. */
#include "sync.h"

#include "common/log.h"
#include "common/text.h"

PGconn *sync_open(const char *conninfo, struct err *e)
{
	PGconn *db = PQconnectdb(conninfo);

	if (!db || PQstatus(db) != CONNECTION_OK) {
		struct buf safe = BUF_INIT(400);
		const char *said = db ? PQerrorMessage(db) : "no memory";
		size_t n = strlen(said);

		while (n > 0 && said[n - 1] == '\n')
			n--;
		text_safe(&safe, said, n < 300 ? n : 300, false);
		err_set(e, ERR_UNAVAILABLE, "postgres: %.*s", (int)safe.len, safe.data ? (const char *)safe.data : "");
		buf_free(&safe);
		PQfinish(db);
		return NULL;
	}
	PQsetClientEncoding(db, "UTF8");
	PQclear(PQexec(db, "SET client_min_messages = warning"));
	return db;
}

static void sync_fail(PGconn *db, const PGresult *r, const char *what, struct err *e)
{
	const char *said = r ? PQresultErrorField(r, PG_DIAG_MESSAGE_PRIMARY) : NULL;

	err_set(e, PQstatus(db) == CONNECTION_OK ? ERR_INTERNAL : ERR_UNAVAILABLE, "%s: %s", what,
			said ? said : PQerrorMessage(db));
}

PGresult *sync_query(PGconn *db, const char *what, const char *sql, int n, const char *const *params, struct err *e)
{
	PGresult *r = n > 0 ? PQexecParams(db, sql, n, NULL, params, NULL, NULL, 0) : PQexec(db, sql);
	ExecStatusType status = PQresultStatus(r);

	if (status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK)
		return r;
	sync_fail(db, r, what, e);
	if (sync_retryable(r))
		e->code = ERR_CONFLICT;
	PQclear(r);
	return NULL;
}

int sync_exec(PGconn *db, const char *what, const char *sql, struct err *e)
{
	PGresult *r = sync_query(db, what, sql, 0, NULL, e);

	if (!r)
		return -1;
	PQclear(r);
	return 0;
}

bool sync_retryable(const PGresult *r)
{
	static const char *const states[] = { "55P03", "40P01", "40001" };
	const char *state = r ? PQresultErrorField(r, PG_DIAG_SQLSTATE) : NULL;

	for (size_t i = 0; state && i < sizeof(states) / sizeof(states[0]); i++) {
		if (strcmp(state, states[i]) == 0)
			return true;
	}
	return false;
}

int64_t sync_i64(const PGresult *r, int row, int col)
{
	int64_t v = 0;
	struct err ignored;

	if (text_i64(PQgetvalue(r, row, col), INT64_MIN, INT64_MAX, &v, &ignored) != 0)
		return 0;
	return v;
}
