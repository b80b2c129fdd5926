/* Asynchronous Postgres against a real server: pipelines, errors between neighbours, lost backends, a restarted server, LISTEN. */
/* link: ephloop_pg EPH::event */
#include "unit.h"

#include "loop.h"
#include "pgev.h"
#include "postgres.h"

static struct test_postgres server;
static struct event_base *base;
static struct pgev *pg;

struct answer {
	int calls, order;
	bool ok;
	enum err_code code;
	char state[8], text[256], said[ERR_TEXT_MAX];
	int rows;
	int64_t affected;
};
static int order;

static void on_answer(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct answer *a = arg;

	a->calls++;
	a->order = ++order;
	a->ok = rows != NULL;
	a->rows = pg_nrows(rows);
	a->affected = pg_affected(rows);
	a->code = e ? e->code : ERR_NONE;
	assert_true(text_copy(a->state, sizeof(a->state), sqlstate));
	assert_true(text_copy(a->said, sizeof(a->said), e ? e->text : ""));
	assert_true(text_copy(a->text, sizeof(a->text), rows && pg_nrows(rows) ? pg_text(rows, 0, 0) : ""));
}

static bool answered(void *arg)
{
	return ((struct answer *)arg)->calls > 0;
}

static bool connected(void *arg)
{
	return pgev_connected(arg);
}

static bool disconnected(void *arg)
{
	return !pgev_connected(arg);
}

static bool idle(void *arg)
{
	return pgev_outstanding(arg) == 0;
}

static struct pgev *open_pg(void (*on_notify)(void *, const char *, const char *), int max)
{
	char conninfo[160];
	struct pgev_options opt = { .conninfo = conninfo,
		.class_name = "test",
		.statement_timeout_ms = 3000,
		.lock_timeout_ms = 1000,
		.idle_in_tx_timeout_ms = 5000,
		.search_path = "public, pg_temp",
		.max_outstanding = max,
		.on_notify = on_notify };
	struct pgev *out;
	struct err e;

	assert_true(text_fmt(conninfo, sizeof(conninfo), "host=%s user=postgres dbname=postgres", server.dir));
	assert_ok(pgev_new(base, &opt, &out, &e));
	return out;
}

static struct answer sql(const char *text)
{
	struct answer a = { 0 };
	struct err e;

	assert_ok(pgev_sql(pg, text, on_answer, &a, &e));
	assert_true(loop_until(base, answered, &a, 10000));
	assert_int_equal(a.calls, 1);
	return a;
}

static int setup(void **state)
{
	(void)state;
	base = event_base_new();
	pg = open_pg(NULL, 1000);
	assert_true(loop_until(base, connected, pg, 30000));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	pgev_free(pg);
	event_base_free(base);
	return 0;
}

static void test_settings_and_values(void **state)
{
	static const struct pg_stmt st = { "values", "SELECT $1::text, $2::bigint, $3::bytea, $4::text, $5::boolean", 5 };
	struct pg_param params[] = { PG_TEXT("h\xc3\xa4"), PG_TEXT("-5"), PG_BYTES("a\0b", 3), { NULL, -1 }, PG_TEXT("true") };
	struct answer a = { 0 };
	struct err e;

	(void)state;
	assert_string_equal(sql("SHOW search_path").text, "public, pg_temp");
	assert_string_equal(sql("SHOW statement_timeout").text, "3s");
	assert_string_equal(sql("SHOW application_name").text, "ephemeral/test");
	for (int i = 0; i < 3; i++) {
		a.calls = 0;
		assert_ok(pgev_exec(pg, &st, params, on_answer, &a, &e));
		assert_int_equal(a.calls, 0); /* never from inside */
		assert_true(loop_until(base, answered, &a, 5000));
		assert_string_equal(a.text, "h\xc3\xa4");
	}
}

static void check_row(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	size_t n;
	uint8_t *bytes;

	assert_null(e);
	assert_string_equal(sqlstate, "");
	assert_int_equal(pg_i64(rows, 0, 0), INT64_MIN);
	bytes = pg_bytea(rows, 0, 1, &n);
	assert_int_equal(n, 3);
	assert_memory_equal(bytes, "a\0b", 4);
	free(bytes);
	assert_true(pg_is_null(rows, 0, 2));
	assert_string_equal(pg_text(rows, 0, 2), "");
	assert_null(pg_bytea(rows, 0, 2, &n));
	assert_true(pg_bool(rows, 0, 3));
	assert_true(pg_is_null(rows, 5, 9)); /* not there */
	((struct answer *)arg)->calls++;
}

static void test_reading(void **state)
{
	struct answer a = { 0 };
	struct err e;

	(void)state;
	assert_ok(pgev_sql(pg, "SELECT (-9223372036854775808)::bigint, '\\x610062'::bytea, NULL::text, true", check_row, &a, &e));
	assert_true(loop_until(base, answered, &a, 5000));
}

/* In one pipeline: neighbours of a failing statement are executed, in order, each its own transaction. */
static void test_neighbours(void **state)
{
	static const struct pg_stmt add = { "add", "INSERT INTO n VALUES ($1::int)", 1 };
	struct answer a[40] = { 0 };
	struct err e;

	(void)state;
	sql("DROP TABLE IF EXISTS n");
	sql("CREATE TABLE n (v int PRIMARY KEY)");
	order = 0;
	for (int i = 0; i < 40; i++) {
		char v[16];
		struct pg_param p = PG_TEXT(v);

		assert_true(text_fmt(v, sizeof(v), "%d", i % 30)); /* the last ten are there already */
		assert_ok(pgev_exec(pg, &add, &p, on_answer, &a[i], &e));
	}
	assert_int_equal(pgev_outstanding(pg), 40);
	assert_true(loop_until(base, idle, pg, 5000));
	for (int i = 0; i < 40; i++) {
		assert_int_equal(a[i].order, i + 1);
		assert_int_equal(a[i].ok, i < 30);
		assert_int_equal(a[i].code, i < 30 ? ERR_NONE : ERR_CONFLICT);
		assert_string_equal(a[i].state, i < 30 ? "" : "23505");
		assert_int_equal(a[i].affected, i < 30 ? 1 : 0);
	}
	assert_string_equal(sql("SELECT count(*) FROM n").text, "30");
}

/* A statement that cannot be parsed now may be later; those behind it in the pipeline get their own answer. */
static void test_parse_fails_then_works(void **state)
{
	static const struct pg_stmt st = { "later", "SELECT v FROM later WHERE v = $1::int", 1 };
	struct pg_param p = PG_TEXT("1");
	struct answer a[4] = { 0 };
	struct err e;

	(void)state;
	sql("DROP TABLE IF EXISTS later");
	for (int i = 0; i < 3; i++)
		assert_ok(pgev_exec(pg, &st, &p, on_answer, &a[i], &e));
	assert_ok(pgev_sql(pg, "SELECT 7", on_answer, &a[3], &e));
	assert_true(loop_until(base, idle, pg, 5000));
	assert_string_equal(a[0].state, "42P01");
	assert_string_equal(a[1].state, "42P01");
	assert_false(a[2].ok);
	assert_string_equal(a[3].text, "7");
	sql("CREATE TABLE later AS SELECT 1 AS v");
	a[0].calls = 0;
	assert_ok(pgev_exec(pg, &st, &p, on_answer, &a[0], &e));
	assert_true(loop_until(base, answered, &a[0], 5000));
	assert_string_equal(a[0].text, "1");
}

/* A migration changes the columns of a statement that was prepared before. */
static void test_stale_plan(void **state)
{
	static const struct pg_stmt st = { "stale", "SELECT * FROM stale", 0 };
	struct answer a[5] = { 0 };
	struct err e;

	(void)state;
	sql("DROP TABLE IF EXISTS stale");
	sql("CREATE TABLE stale AS SELECT 1 AS v");
	assert_ok(pgev_exec(pg, &st, NULL, on_answer, &a[0], &e));
	assert_true(loop_until(base, idle, pg, 5000));
	sql("ALTER TABLE stale ADD w text DEFAULT 'w'");
	for (int i = 1; i < 5; i++)
		assert_ok(pgev_exec(pg, &st, NULL, on_answer, &a[i], &e));
	assert_true(loop_until(base, idle, pg, 5000));
	for (int i = 0; i < 5; i++) {
		assert_true(a[i].ok);
		assert_int_equal(a[i].calls, 1);
	}
}

static void test_error_codes(void **state)
{
	static const struct {
		const char *sql, *state;
		enum err_code code;
	} cases[] = {
		{ "SELECT 1/0", "22012", ERR_INTERNAL },
		{ "SELEKT", "42601", ERR_INTERNAL },
		{ "SELECT pg_sleep(10)", "57014", ERR_CONFLICT },
		{ "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$", "40001", ERR_CONFLICT },
		{ "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$", "40P01", ERR_CONFLICT },
		{ "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '55P03'; END $$", "55P03", ERR_CONFLICT },
		{ "DO $$ BEGIN RAISE EXCEPTION E'a\\x1bb' USING ERRCODE = '23514'; END $$", "23514", ERR_CONFLICT },
		{ "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '53300'; END $$", "53300", ERR_UNAVAILABLE },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct answer a = sql(cases[i].sql);

		assert_string_equal(a.state, cases[i].state);
		assert_int_equal(a.code, cases[i].code);
		assert_null(strchr(a.said, '\x1b'));
	}
	assert_string_equal(sql("SELECT 1").text, "1");
	assert_true(sql("").ok);                  /* an empty statement is no error to the server */
	assert_false(sql("COPY n TO STDOUT").ok); /* belongs to nobody: the connection is given up */
	assert_true(loop_until(base, connected, pg, 5000));
}

static void test_too_many(void **state)
{
	struct pgev *few = open_pg(NULL, 2);
	struct answer a[3] = { 0 };
	struct err e;

	(void)state;
	assert_ok(pgev_sql(few, "SELECT 1", on_answer, &a[0], &e));
	assert_ok(pgev_sql(few, "SELECT 1", on_answer, &a[1], &e));
	assert_int_equal(pgev_sql(few, "SELECT 1", on_answer, &a[2], &e), -1);
	assert_int_equal(e.code, ERR_UNAVAILABLE);
	assert_true(loop_until(base, idle, few, 5000));
	assert_int_equal(a[2].calls, 0);
	pgev_free(few);
}

/* A large result and large parameters at once: neither side may wait for the other for ever. */
static void test_large(void **state)
{
	static const struct pg_stmt st = { "large", "SELECT $1::text || $1::text", 1 };
	struct answer a[8] = { 0 };
	char *big = malloc((4 << 20) + 1);
	struct pg_param p = { big, -1 };
	struct err e;

	(void)state;
	memset(big, 'x', 4 << 20);
	big[4 << 20] = '\0';
	for (int i = 0; i < 8; i++) {
		struct pg_param q = { big, -1 };

		(void)q;
		assert_ok(pgev_sql(pg, "SELECT length(repeat('y', 8000000)), repeat('y', 8000000)", on_answer, &a[i], &e));
	}
	assert_true(loop_until(base, idle, pg, 20000));
	for (int i = 0; i < 8; i++)
		assert_string_equal(a[i].text, "8000000");
	memset(a, 0, sizeof(a));
	assert_true(p.data == big);
	{
		static const struct pg_stmt size = { "size", "SELECT length($1::text)", 1 };

		for (int i = 0; i < 8; i++)
			assert_ok(pgev_exec(pg, &size, &p, on_answer, &a[i], &e));
		assert_true(loop_until(base, idle, pg, 20000));
		for (int i = 0; i < 8; i++)
			assert_string_equal(a[i].text, "4194304");
	}
	(void)st;
	free(big);
}

/* kill -9 of the backend: what was sent has an unknown outcome, what comes later works again. */
static void test_backend_killed(void **state)
{
	static const struct pg_stmt st = { "after", "SELECT $1::int + 1", 1 };
	struct pg_param p = PG_TEXT("41");
	struct answer sleeping = { 0 }, behind = { 0 }, later = { 0 };
	struct err e;
	pid_t backend = (pid_t)strtol(sql("SELECT pg_backend_pid()").text, NULL, 10);

	(void)state;
	assert_ok(pgev_exec(pg, &st, &p, on_answer, &later, &e));
	assert_true(loop_until(base, idle, pg, 5000));
	assert_string_equal(later.text, "42");
	memset(&later, 0, sizeof(later));
	assert_ok(pgev_sql(pg, "SELECT pg_sleep(2)", on_answer, &sleeping, &e));
	assert_ok(pgev_exec(pg, &st, &p, on_answer, &behind, &e));
	event_base_loop(base, EVLOOP_NONBLOCK);
	assert_int_equal(kill(backend, SIGKILL), 0);
	assert_true(loop_until(base, disconnected, pg, 5000));
	assert_int_equal(sleeping.code, ERR_UNAVAILABLE);
	assert_int_equal(behind.code, ERR_UNAVAILABLE);
	assert_non_null(strstr(behind.said, "unknown"));
	assert_ok(pgev_exec(pg, &st, &p, on_answer, &later, &e)); /* waits for the next connection, where it is prepared anew */
	assert_true(loop_until(base, answered, &later, 10000));
	if (!later.ok) /* the server takes more than 2 s to recover: then it was refused, never lost */
		assert_int_equal(later.code, ERR_UNAVAILABLE);
	assert_true(loop_until(base, connected, pg, 15000));
	memset(&later, 0, sizeof(later));
	assert_ok(pgev_exec(pg, &st, &p, on_answer, &later, &e));
	assert_true(loop_until(base, answered, &later, 10000));
	assert_string_equal(later.text, "42");
}

/* A server that stands still (or a network that swallows everything): nothing ever says that the connection is gone. What was sent
 * is given up a while after its statement timeout, and the next connection works. */
static void test_backend_silent(void **state)
{
	struct answer sleeping = { 0 }, behind = { 0 };
	struct err e;
	pid_t backend = (pid_t)strtol(sql("SELECT pg_backend_pid()").text, NULL, 10);
	int64_t from = clock_mono_ns();

	(void)state;
	assert_int_equal(kill(backend, SIGSTOP), 0);
	assert_ok(pgev_sql(pg, "SELECT 1", on_answer, &sleeping, &e));
	assert_ok(pgev_sql(pg, "SELECT 2", on_answer, &behind, &e));
	assert_true(loop_until(base, disconnected, pg, 20000));
	assert_in_range((clock_mono_ns() - from) / 1000000, 7900, 12000); /* 3 s of the statement, 5 s for the way */
	assert_int_equal(sleeping.code, ERR_UNAVAILABLE);
	assert_int_equal(behind.code, ERR_UNAVAILABLE);
	assert_non_null(strstr(behind.said, "unknown"));
	assert_true(loop_until(base, connected, pg, 15000));
	assert_string_equal(sql("SELECT 3").text, "3");
	assert_int_equal(kill(backend, SIGCONT), 0);
}

/* One that answers slowly, each statement near its timeout, is not silent. */
static void test_slow_is_not_silent(void **state)
{
	struct answer a[5] = { 0 };
	struct err e;

	(void)state;
	for (size_t i = 0; i < 5; i++)
		assert_ok(pgev_sql(pg, "SELECT pg_sleep(2)", on_answer, &a[i], &e));
	assert_true(loop_until(base, idle, pg, 20000));
	for (size_t i = 0; i < 5; i++)
		assert_true(a[i].ok);
	assert_true(pgev_connected(pg));
}

/* It is this process that stood still, in the loop's wait (SIGCONT ends that, and timers come before sockets then): the answer has
 * come meanwhile. */
static void test_our_own_silence(void **state)
{
	struct answer a = { 0 };
	pid_t self = getpid(), child;
	struct err e;

	(void)state;
	assert_ok(pgev_sql(pg, "SELECT pg_sleep(1), 5", on_answer, &a, &e));
	child = fork();
	if (child == 0) {
		(void)poll(NULL, 0, 300);
		kill(self, SIGSTOP);
		(void)poll(NULL, 0, 8500); /* 3 s of the statement, 5 s for the way, and some */
		kill(self, SIGCONT);
		_exit(0);
	}
	assert_true(loop_until(base, answered, &a, 20000));
	assert_int_equal(waitpid(child, NULL, 0), child);
	assert_true(a.ok);
	assert_true(pgev_connected(pg));
}

static void test_server_restarted(void **state)
{
	struct answer a = { 0 };
	struct err e;
	int64_t from;

	(void)state;
	test_postgres_stop(&server);
	assert_true(loop_until(base, disconnected, pg, 5000));
	from = clock_mono_ns();
	assert_ok(pgev_sql(pg, "SELECT 1", on_answer, &a, &e));
	assert_true(loop_until(base, answered, &a, 5000));
	assert_int_equal(a.code, ERR_UNAVAILABLE);
	assert_non_null(strstr(a.said, "nothing was sent"));
	assert_in_range((clock_mono_ns() - from) / 1000000, 1900, 3500);
	test_postgres_start(&server);
	assert_true(loop_until(base, connected, pg, 15000));
	assert_string_equal(sql("SELECT 1").text, "1");
}

static char noted[8][64];
static int notes;

static void on_notify(void *arg, const char *channel, const char *payload)
{
	(void)arg;
	assert_true(text_fmt(noted[notes++ % 8], 64, "%s=%s", channel, payload));
}

static bool two_notes(void *arg)
{
	(void)arg;
	return notes >= 2;
}

static void test_listen(void **state)
{
	struct pgev *listener = open_pg(on_notify, 10);
	struct answer a[3] = { 0 };
	struct err e;

	(void)state;
	notes = 0;
	assert_ok(pgev_sql(listener, "LISTEN one", on_answer, &a[0], &e));
	assert_ok(pgev_sql(listener, "LISTEN two", on_answer, &a[1], &e));
	assert_ok(pgev_sql(listener, "SELECT 5", on_answer, &a[2], &e));
	assert_true(loop_until(base, idle, listener, 5000));
	assert_true(a[0].ok && a[1].ok);
	assert_string_equal(a[2].text, "5");
	sql("NOTIFY one, 'a'");
	sql("NOTIFY two, 'b'");
	assert_true(loop_until(base, two_notes, NULL, 5000));
	assert_string_equal(noted[0], "one=a");
	assert_string_equal(noted[1], "two=b");
	pgev_free(listener);
}

static void free_it(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	(void)rows;
	(void)sqlstate;
	(void)e;
	++*(int *)arg;
	pgev_free(pg);
}

static void count(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	(void)rows;
	(void)sqlstate;
	assert_int_equal(e->code, ERR_UNAVAILABLE);
	++*(int *)arg;
}

/* Freed inside a callback with statements outstanding: each callback once. */
static void test_free_inside(void **state)
{
	int calls = 0;
	struct err e;

	(void)state;
	assert_ok(pgev_sql(pg, "SELECT 1", free_it, &calls, &e));
	for (int i = 0; i < 5; i++)
		assert_ok(pgev_sql(pg, "SELECT 2", count, &calls, &e));
	event_base_dispatch(base); /* nothing is left on the loop afterwards */
	assert_int_equal(calls, 6);
	pg = NULL;
}

static void test_bad_conninfo(void **state)
{
	struct pgev_options opt = { .conninfo = "host=/x nonsense=1", .class_name = "bad", .max_outstanding = 1 };
	struct pgev *out;
	struct err e;

	(void)state;
	assert_int_equal(pgev_new(base, &opt, &out, &e), -1);
	assert_int_equal(e.code, ERR_INVALID);
	assert_non_null(strstr(e.text, "nonsense"));
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_settings_and_values),
		T(test_reading),
		T(test_neighbours),
		T(test_parse_fails_then_works),
		T(test_stale_plan),
		T(test_error_codes),
		T(test_too_many),
		T(test_large),
		T(test_listen),
		T(test_free_inside),
		T(test_bad_conninfo),
		T(test_backend_killed),
		T(test_backend_silent),
		T(test_slow_is_not_silent),
		T(test_our_own_silence),
		T(test_server_restarted),
	};
	int rc;

	if (!test_postgres_make(&server)) {
		printf("skipped: there is no " PG_BIN "postgres\n");
		return 77;
	}
	rc = cmocka_run_group_tests(tests, NULL, NULL);
	test_postgres_remove(&server);
	return rc;
}
