/*
 * A private Postgres for one unit test program: initdb below a short path, a unix socket and nothing else, as user postgres when
 * the test is root, fsync off. Ends with the program. Include after unit.h.
 */
#ifndef EPH_UNIT_PG_CLUSTER_H
#define EPH_UNIT_PG_CLUSTER_H

#include "clock.h"
#include "text.h"

#include <fcntl.h>
#include <grp.h>
#include <libpq-fe.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PG_BIN "/usr/lib/postgresql/15/bin/"

static char pg_dir[64];
static pid_t pg_pid;

static inline pid_t pg_spawn(char *const argv[])
{
	struct passwd *pw = geteuid() == 0 ? getpwnam("postgres") : NULL;
	pid_t pid = fork();

	if (pid != 0)
		return pid;
	if (pw && (setgroups(0, NULL) != 0 || setgid(pw->pw_gid) != 0 || setuid(pw->pw_uid) != 0))
		_exit(126);
	if (chdir(pg_dir) != 0)
		_exit(126);
	int log = open("log", O_WRONLY | O_CREAT | O_APPEND, 0600);

	dup2(log, 1);
	dup2(log, 2);
	execv(argv[0], argv);
	_exit(127);
}

static inline void pg_cluster_stop(void)
{
	char *const rm[] = { (char *)(uintptr_t) "/bin/rm", (char *)(uintptr_t) "-rf", pg_dir, NULL };
	pid_t pid;

	if (pg_pid > 0) {
		kill(pg_pid, SIGQUIT);
		waitpid(pg_pid, NULL, 0);
	}
	pg_pid = 0;
	if (pg_dir[0] && (pid = fork()) == 0) {
		execv(rm[0], rm);
		_exit(127);
	} else if (pg_dir[0]) {
		waitpid(pid, NULL, 0);
	}
}

static inline void pg_conninfo(const char *database, char out[256])
{
	assert_true(text_fmt(out, 256, "host=%s dbname=%s user=postgres", pg_dir, database));
}

/* After start_server, also to start it again. */
static inline bool pg_server_start(void)
{
	char *const argv[] = { (char *)(uintptr_t)PG_BIN "postgres", (char *)(uintptr_t) "-D", (char *)(uintptr_t) "data",
		(char *)(uintptr_t) "-k", pg_dir, (char *)(uintptr_t) "-c",
		(char *)(uintptr_t) "listen_addresses=", (char *)(uintptr_t) "-c", (char *)(uintptr_t) "fsync=off",
		(char *)(uintptr_t) "-c", (char *)(uintptr_t) "max_locks_per_transaction=256", NULL };
	int64_t until = clock_mono_ns() + INT64_C(30000000000);
	char info[256];

	pg_pid = pg_spawn(argv);
	pg_conninfo("postgres", info);
	while (PQping(info) != PQPING_OK) {
		if (clock_mono_ns() > until || waitpid(pg_pid, NULL, WNOHANG) != 0)
			return false;
		poll(NULL, 0, 20); /* the interval of a wait with a deadline */
	}
	return true;
}

/* False when there is no Postgres here to run. */
static inline bool pg_cluster_start(void)
{
	char *const initdb[] = { (char *)(uintptr_t)PG_BIN "initdb", (char *)(uintptr_t) "-D", (char *)(uintptr_t) "data",
		(char *)(uintptr_t) "-U", (char *)(uintptr_t) "postgres", (char *)(uintptr_t) "-A", (char *)(uintptr_t) "trust",
		(char *)(uintptr_t) "-E", (char *)(uintptr_t) "UTF8", (char *)(uintptr_t) "--locale=C.UTF-8",
		(char *)(uintptr_t) "--no-sync", NULL };
	struct passwd *pw = getpwnam("postgres");
	int status = 1;

	if (access(initdb[0], X_OK) != 0 || (geteuid() == 0 && !pw))
		return false;
	if (!text_copy(pg_dir, sizeof(pg_dir), "/tmp/eph-pgu-XXXXXX") || !mkdtemp(pg_dir))
		return false;
	atexit(pg_cluster_stop);
	if (geteuid() == 0 && chown(pg_dir, pw->pw_uid, pw->pw_gid) != 0)
		return false;
	waitpid(pg_spawn(initdb), &status, 0);
	return status == 0 && pg_server_start();
}

/*
 * One statement, for the test's own looks and changes; again when it lost a deadlock to what the store does of itself (each try
 * waits for a lock, and is whole or nothing). Returns the first column of the first row (static storage).
 */
static inline const char *pg_do(const char *database, const char *sql)
{
	static char value[4096];
	char info[256];
	PGconn *db;
	PGresult *r;

	pg_conninfo(database, info);
	db = PQconnectdb(info);
	r = PQexec(db, sql);
	for (int tries = 1; tries < 20 && PQresultStatus(r) == PGRES_FATAL_ERROR; tries++) {
		const char *state = PQresultErrorField(r, PG_DIAG_SQLSTATE);

		if (!state || strcmp(state, "40P01") != 0)
			break;
		PQclear(r);
		r = PQexec(db, sql);
	}
	if (PQresultStatus(r) != PGRES_TUPLES_OK && PQresultStatus(r) != PGRES_COMMAND_OK)
		fail_msg("%s: %s", sql, PQerrorMessage(db));
	if (!text_copy(value, sizeof(value), PQntuples(r) > 0 ? PQgetvalue(r, 0, 0) : ""))
		value[0] = '\0';
	PQclear(r);
	PQfinish(db);
	return value;
}

#endif
