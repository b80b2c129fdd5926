/*
 * A Postgres cluster of a test's own: made in a new directory, reachable by a unix socket only, run as user postgres when the
 * test runs as root (the server refuses root), killed by its process id. Include after unit.h.
 */
#ifndef EPH_UNIT_POSTGRES_H
#define EPH_UNIT_POSTGRES_H

#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PG_BIN "/usr/lib/postgresql/15/bin/"

struct test_postgres {
	char dir[64], data[96];
	pid_t pid;
};

static inline pid_t test_postgres_spawn(const struct test_postgres *p, char *const argv[], bool quiet)
{
	struct passwd *pw = getpwnam("postgres");
	pid_t pid = fork();

	if (pid != 0)
		return pid;
	if (geteuid() == 0 && (!pw || setgroups(0, NULL) != 0 || setgid(pw->pw_gid) != 0 || setuid(pw->pw_uid) != 0))
		_exit(126);
	if (chdir(p->dir) != 0)
		_exit(126);
	if (quiet) {
		int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

		dup2(null, 1);
		dup2(null, 2);
	}
	execv(argv[0], argv);
	_exit(127);
}

static inline void test_postgres_start(struct test_postgres *p)
{
	char *const argv[] = { (char *)PG_BIN "postgres", (char *)"-D", p->data, (char *)"-k", p->dir, (char *)"-c",
		(char *)"listen_addresses=", (char *)"-c", (char *)"fsync=off", (char *)"-c", (char *)"max_connections=20",
		(char *)"-c", (char *)"log_min_messages=panic", NULL };

	p->pid = test_postgres_spawn(p, argv, true);
	assert_true(p->pid > 0);
}

/* False when there is no Postgres on this machine. */
static inline bool test_postgres_make(struct test_postgres *p)
{
	struct passwd *pw = getpwnam("postgres");
	char *const argv[] = { (char *)PG_BIN "initdb", (char *)"-D", p->data, (char *)"-A", (char *)"trust", (char *)"-U",
		(char *)"postgres", (char *)"--no-sync", (char *)"-E", (char *)"UTF8", (char *)"--locale=C", NULL };
	int status;
	pid_t pid;

	memset(p, 0, sizeof(*p));
	if (access(PG_BIN "postgres", X_OK) != 0 || (geteuid() == 0 && !pw))
		return false;
	assert_true(text_copy(p->dir, sizeof(p->dir), "/tmp/eph-pg-XXXXXX"));
	assert_non_null(mkdtemp(p->dir));
	assert_true(text_fmt(p->data, sizeof(p->data), "%s/data", p->dir));
	if (geteuid() == 0)
		assert_int_equal(chown(p->dir, pw->pw_uid, pw->pw_gid), 0);
	pid = test_postgres_spawn(p, argv, true);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	test_postgres_start(p);
	return true;
}

/* SIGKILL to the postmaster loses the backends' parent; SIGQUIT ends all at once, without a clean shutdown. */
static inline void test_postgres_stop(struct test_postgres *p)
{
	if (p->pid <= 0)
		return;
	kill(p->pid, SIGQUIT);
	waitpid(p->pid, NULL, 0);
	p->pid = 0;
}

static inline void test_postgres_remove(struct test_postgres *p)
{
	char *const argv[] = { (char *)"/bin/rm", (char *)"-rf", p->data, NULL };
	pid_t pid;

	test_postgres_stop(p);
	if (!p->dir[0])
		return;
	pid = test_postgres_spawn(p, argv, false);
	waitpid(pid, NULL, 0);
	rmdir(p->dir);
}

#endif
