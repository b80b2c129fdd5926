/*
 * Migrations, and what bootstrap needs before there is a loop. Everything here blocks: called by main.c at start and by the
 * subcommands `migrate` and `bootstrap`, on the main thread.
 *
 * Each migration is one transaction with a lock timeout of 2 s, tried again for up to a minute, so that a start never queues behind
 * a long reader with everybody else behind it. One controld migrates at a time.
 */
#include "store_internal.h"
#include "sync.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"

#include <time.h>

#define RETRY_MS 60000
#define PAUSE_NS 200000000

static const char schema_sql[] = "CREATE TABLE IF NOT EXISTS schema_migrations (name text PRIMARY KEY, applied_at timestamptz NOT "
				 "NULL DEFAULT clock_timestamp());"
				 "CREATE TABLE IF NOT EXISTS schema_state (one boolean PRIMARY KEY DEFAULT true CHECK (one), "
				 "version integer NOT NULL, "
				 "min_binary integer NOT NULL);"
				 "INSERT INTO schema_state (version, min_binary) VALUES (0, 1) ON CONFLICT DO NOTHING";

static int check_binary(PGconn *db, struct err *e)
{
	PGresult *r = sync_query(db, "read the schema's version", "SELECT min_binary, version FROM schema_state", 0, NULL, e);
	int64_t min_binary;

	if (!r)
		return -1;
	min_binary = PQntuples(r) == 1 ? sync_i64(r, 0, 0) : 0;
	PQclear(r);
	if (min_binary > STORE_BINARY)
		return err_set(e, ERR_CONFLICT,
				"this database needs a newer controld (schema %lld, this one speaks %d): upgrade it",
				(long long)min_binary, STORE_BINARY);
	return 0;
}

static int applied_already(PGconn *db, const char *name, bool *yes, struct err *e)
{
	const char *const params[] = { name };
	PGresult *r = sync_query(db, "look up a migration", "SELECT 1 FROM schema_migrations WHERE name = $1", 1, params, e);

	if (!r)
		return -1;
	*yes = PQntuples(r) > 0;
	PQclear(r);
	return 0;
}

static int apply_once(PGconn *db, const struct migration *m, struct err *e)
{
	const char *const params[] = { m->name };
	PGresult *r;

	if (sync_exec(db, "begin", "BEGIN", e) != 0 || sync_exec(db, m->name, m->sql, e) != 0)
		return -1;
	r = sync_query(db, m->name,
			"WITH done AS (INSERT INTO schema_migrations (name) VALUES ($1)) "
			"UPDATE schema_state SET version = version + 1",
			1, params, e);
	if (!r)
		return -1;
	PQclear(r);
	return sync_exec(db, "commit", "COMMIT", e);
}

static int apply(PGconn *db, const struct migration *m, struct err *e)
{
	const int64_t deadline = clock_mono_ns() + (int64_t)RETRY_MS * 1000000;
	const struct timespec pause = { 0, PAUSE_NS };

	for (;;) {
		if (apply_once(db, m, e) == 0) {
			log_info("migration applied name=%s", m->name);
			return 0;
		}
		PQclear(PQexec(db, "ROLLBACK"));
		if (e->code != ERR_CONFLICT || clock_mono_ns() > deadline)
			return err_wrap(e, "migration %s", m->name);
		nanosleep(&pause, NULL);
	}
}

/* The database's own copy of the texts of error codes, for ends that no host reports. */
static int put_error_codes(PGconn *db, struct err *e)
{
	for (int c = ERRCODE_NONE + 1; c < ERRCODE_COUNT; c++) {
		const enum errcode code = (enum errcode)c;
		const char *const params[] = { errcode_text(code), outcome_text(errcode_outcome(code)), errcode_title(code),
			errcode_remedy(code) };
		PGresult *r = sync_query(db, "write the error codes",
				"INSERT INTO error_codes AS x (code, status, title, remedy) VALUES ($1, $2, $3, $4) ON CONFLICT "
				"(code) DO UPDATE SET "
				"status = EXCLUDED.status, title = EXCLUDED.title, remedy = EXCLUDED.remedy "
				"WHERE (x.status, x.title, x.remedy) IS DISTINCT FROM (EXCLUDED.status, EXCLUDED.title, "
				"EXCLUDED.remedy)",
				4, params, e);

		if (!r)
			return -1;
		PQclear(r);
	}
	return 0;
}

static int migrate(PGconn *db, int *applied, struct err *e)
{
	if (sync_exec(db, "wait for another migration",
			    "SET lock_timeout = '60s'; SELECT pg_advisory_lock(hashtext('ephemeral migrate'))", e) != 0 ||
			sync_exec(db, "prepare the schema's own tables", "SET lock_timeout = '2s'", e) != 0 ||
			sync_exec(db, "prepare the schema's own tables", schema_sql, e) != 0 || check_binary(db, e) != 0)
		return -1;
	for (size_t i = 0; i < migration_count; i++) {
		bool yes = false;

		if (applied_already(db, migrations[i].name, &yes, e) != 0)
			return -1;
		if (yes)
			continue;
		if (apply(db, &migrations[i], e) != 0)
			return -1;
		++*applied;
	}
	if (put_error_codes(db, e) != 0)
		return -1;
	return sync_exec(db, "make partitions", "SELECT eph_partitions_make()", e);
}

int store_migrate(const char *conninfo, int *applied, struct err *e)
{
	PGconn *db = sync_open(conninfo, e);
	int count = 0, result;

	if (!db)
		return -1;
	result = migrate(db, &count, e);
	PQfinish(db);
	if (applied)
		*applied = count;
	return result;
}

/* ---- bootstrap ------------------------------------------------------------------------------------------------------------------
 */

int store_operator_key_count(const char *conninfo, int64_t *count, struct err *e)
{
	PGconn *db = sync_open(conninfo, e);
	PGresult *r;

	if (!db)
		return -1;
	r = sync_query(db, "count operator keys", "SELECT count(*) FROM operator_keys WHERE revoked_at_ms IS NULL", 0, NULL, e);
	if (r)
		*count = sync_i64(r, 0, 0);
	PQclear(r);
	PQfinish(db);
	return r ? 0 : -1;
}

int store_operator_key_add(const char *conninfo, const uint8_t key_hash[32], const char *name, struct err *e)
{
	PGconn *db = sync_open(conninfo, e);
	char id[ID_MAX], hex[2 * 32 + 1];
	const char *params[3] = { id, name, hex };
	PGresult *r;

	if (!db)
		return -1;
	id_make("key", id);
	text_hex(key_hash, 32, hex);
	r = sync_query(db, "add an operator key",
			"INSERT INTO operator_keys (id, name, key_hash, created_at_ms) VALUES ($1, $2, decode($3, 'hex'), "
			"eph_now_ms())",
			3, params, e);
	PQclear(r);
	PQfinish(db);
	return r ? 0 : -1;
}
