/*
 * One statement: its copy of the parameters, how it goes into libpq's buffers, what its results mean. Called by pgev.c on the
 * loop's thread; does not block, because the connection is non-blocking.
 */
#include "pgev_internal.h"

#include "text.h"

#include <stdlib.h>
#include <string.h>

struct pg_job *pg_job_make(const struct pg_stmt *st, const char *sql, const struct pg_param *params, pg_cb cb, void *arg)
{
	size_t n = st ? (size_t)st->nparams : 0, bytes = 0;
	struct pg_job *job;
	char *at;

	for (size_t i = 0; i < n; i++) {
		if (params[i].data)
			bytes += params[i].len < 0 ? strlen(params[i].data) + 1 : (size_t)params[i].len + 1;
	}
	job = calloc(1, sizeof(*job) + n * (sizeof(char *) + 2 * sizeof(int)) + bytes);
	if (!job)
		return NULL;
	job->st = st;
	job->cb = cb;
	job->arg = arg;
	job->nparams = (int)n;
	job->values = (const char **)(void *)(job + 1);
	job->lengths = (int *)(void *)(job->values + n);
	job->formats = job->lengths + n;
	at = (char *)(job->formats + n);
	for (size_t i = 0; i < n; i++) {
		size_t len;

		if (!params[i].data)
			continue;
		len = params[i].len < 0 ? strlen(params[i].data) : (size_t)params[i].len;
		memcpy(at, params[i].data, len);
		job->values[i] = at;
		job->lengths[i] = (int)len;
		job->formats[i] = params[i].len < 0 ? 0 : 1;
		at += len + 1;
	}
	if (!st) {
		job->sql = strdup(sql);
		if (!job->sql) {
			free(job);
			return NULL;
		}
	}
	return job;
}

void pg_job_free(struct pg_job *job)
{
	PQclear(job->result);
	free(job->sql);
	free(job);
}

/* A group of its own: [Parse] Bind Execute Sync. So each statement is one transaction and a failure ends with its group. */
bool pg_job_send(struct pg_job *job, PGconn *conn, bool pipeline)
{
	if (!pipeline) {
		if (!job->st)
			return PQsendQuery(conn, job->sql) == 1;
		return PQsendQueryParams(conn, job->st->sql, job->nparams, NULL, job->values, job->lengths, job->formats, 0) == 1;
	}
	if (!job->st)
		return PQsendQueryParams(conn, job->sql, 0, NULL, NULL, NULL, NULL, 0) == 1 && PQpipelineSync(conn) == 1;
	if (job->parsed_here && PQsendPrepare(conn, job->st->name, job->st->sql, job->nparams, NULL) != 1)
		return false;
	return PQsendQueryPrepared(conn, job->st->name, job->nparams, job->values, job->lengths, job->formats, 0) == 1 &&
	       PQpipelineSync(conn) == 1;
}

bool pg_job_result(struct pg_job *job, PGresult *res)
{
	switch (PQresultStatus(res)) {
	case PGRES_COMMAND_OK:
	case PGRES_TUPLES_OK:
	case PGRES_EMPTY_QUERY:
		job->good_results++;
		if (job->has_error)
			break;
		PQclear(job->result);
		job->result = res;
		return true;
	case PGRES_PIPELINE_ABORTED: /* what stood behind the error in its group */ break;
	case PGRES_FATAL_ERROR:
	case PGRES_BAD_RESPONSE:
		if (job->has_error)
			break;
		PQclear(job->result);
		job->result = res;
		job->has_error = true;
		return true;
	default: PQclear(res); return false;
	}
	PQclear(res);
	return true;
}

static const char *sqlstate_of(const PGresult *res)
{
	const char *state = res ? PQresultErrorField(res, PG_DIAG_SQLSTATE) : NULL;

	return state ? state : "";
}

enum pg_retry pg_job_retry(const struct pg_job *job)
{
	const char *state = sqlstate_of(job->result), *where;

	if (!job->st || job->again || !job->has_error)
		return PG_RETRY_NO;
	if (!job->parsed_here && strcmp(state, "26000") == 0)
		return PG_RETRY_UNKNOWN;
	where = PQresultErrorField(job->result, PG_DIAG_SOURCE_FUNCTION);
	if (strcmp(state, "0A000") == 0 && where && strcmp(where, "RevalidateCachedQuery") == 0)
		return PG_RETRY_STALE;
	return PG_RETRY_NO;
}

void pg_job_rewind(struct pg_job *job)
{
	PQclear(job->result);
	job->result = NULL;
	job->has_error = false;
	job->good_results = 0;
	job->again = true;
}

static enum err_code code_of(const char *state)
{
	static const struct {
		const char *prefix;
		enum err_code code;
	} table[] = {
		{ "40001", ERR_CONFLICT }, { "40P01", ERR_CONFLICT }, { "55P03", ERR_CONFLICT }, { "57014", ERR_CONFLICT },
		{ "23", ERR_CONFLICT }, { "08", ERR_UNAVAILABLE }, { "57P", ERR_UNAVAILABLE }, { "53", ERR_UNAVAILABLE },
		{ "25006", ERR_UNAVAILABLE }, /* read only: a standby, while a failover is under way */
	};

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		if (strncmp(state, table[i].prefix, strlen(table[i].prefix)) == 0)
			return table[i].code;
	}
	return ERR_INTERNAL;
}

static const char *job_name(const struct pg_job *job)
{
	return job->st ? job->st->name : "sql";
}

/* Only the primary message: DETAIL shows rows, and rows hold what people sent us. */
static void describe(const struct pg_job *job, const char *class_name, const char *state, struct err *e)
{
	const char *said = PQresultErrorField(job->result, PG_DIAG_MESSAGE_PRIMARY);
	struct buf safe = BUF_INIT(400);

	if (!said)
		said = "no reason was given";
	text_safe(&safe, said, strlen(said) < 200 ? strlen(said) : 200, false);
	err_set(e, code_of(state), "postgres %s: %s: %.*s (%s)", class_name, job_name(job), (int)safe.len,
			safe.data ? (const char *)safe.data : "", state);
	buf_free(&safe);
}

void pg_job_done(struct pg_job *job, const char *class_name)
{
	struct pg_rows rows = { .res = job->result };
	struct err e = { .code = ERR_NONE };
	char state[6] = "";

	if (!job->has_error && !job->result)
		err_set(&e, ERR_INTERNAL, "postgres %s: %s: no result came", class_name, job_name(job));
	if (job->has_error) {
		if (!text_copy(state, sizeof(state), sqlstate_of(job->result)))
			state[0] = '\0';
		describe(job, class_name, state, &e);
	}
	if (job->cb)
		job->cb(job->arg, e.code == ERR_NONE ? &rows : NULL, state, e.code == ERR_NONE ? NULL : &e);
	pg_job_free(job);
}

void pg_job_lost(struct pg_job *job, const char *class_name, const char *why)
{
	struct err e;

	err_set(&e, ERR_UNAVAILABLE, "postgres %s: %s: %s", class_name, job_name(job), why);
	if (job->cb)
		job->cb(job->arg, NULL, "", &e);
	pg_job_free(job);
}

/* --- connecting --------------------------------------------------------------------------------------------------------- */

/* A value inside the `options` keyword: blanks and backslashes are escaped there. */
static void put_setting(struct buf *b, const char *name, const char *value)
{
	buf_printf(b, " -c %s=", name);
	for (; *value; value++) {
		if (*value == ' ' || *value == '\\')
			buf_add_char(b, '\\');
		buf_add_char(b, *value);
	}
}

static void put_ms(struct buf *b, const char *name, int ms)
{
	if (ms > 0)
		buf_printf(b, " -c %s=%d", name, ms);
}

PGconn *pg_connect_start(const struct pgev_options *opt, struct err *e)
{
	const char *keys[64], *values[64];
	char *said = NULL, name[64];
	PQconninfoOption *given = PQconninfoParse(opt->conninfo, &said);
	struct buf options = BUF_INIT(4096);
	PGconn *conn = NULL;
	size_t n = 0;

	if (!given) {
		err_set(e, ERR_INVALID, "postgres %s: connection string: %s", opt->class_name, said ? said : "no memory");
		PQfreemem(said);
		return NULL;
	}
	if (!text_fmt(name, sizeof(name), "ephemeral/%s", opt->class_name))
		name[0] = '\0';
	keys[n] = "fallback_application_name";
	values[n++] = name;
	keys[n] = "client_encoding";
	values[n++] = "UTF8";
	for (const PQconninfoOption *o = given; o->keyword && n < 60; o++) {
		if (!o->val || strcmp(o->keyword, "client_encoding") == 0)
			continue;
		if (strcmp(o->keyword, "options") == 0) {
			buf_add_str(&options, o->val);
			continue;
		}
		keys[n] = o->keyword;
		values[n++] = o->val;
	}
	put_ms(&options, "statement_timeout", opt->statement_timeout_ms);
	put_ms(&options, "lock_timeout", opt->lock_timeout_ms);
	put_ms(&options, "idle_in_transaction_session_timeout", opt->idle_in_tx_timeout_ms);
	if (opt->search_path)
		put_setting(&options, "search_path", opt->search_path);
	keys[n] = "options";
	values[n++] = buf_cstr(&options);
	keys[n] = values[n] = NULL;
	if (!options.failed && options.data)
		conn = PQconnectStartParams(keys, values, 0);
	if (!conn)
		err_set(e, ERR_NOMEM, "postgres %s: no memory for a connection", opt->class_name);
	buf_free(&options);
	PQconninfoFree(given);
	return conn;
}
