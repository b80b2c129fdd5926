/* The rest of the store on a loop: keys, members, prices, sweeps, closing under load, a crash of Postgres, check-ledger. */
/* link: controld_store ephproto ephbase EPH::pq EPH::event */
#include "store_fixture.h"

static void keys_and_auth(void **state)
{
	uint8_t hash[32], operator_hash[32];
	struct store_key_new k = { .org_id = t.org, .key_hash = hash, .name = "ci", .role = STORE_ROLE_ADMIN };
	int64_t count = 0;
	struct err e;

	(void)state;
	random_bytes(hash, sizeof(hash));
	random_bytes(operator_hash, sizeof(operator_hash));
	CALL(store_auth(t.store, hash, on_auth, NULL, &e));
	assert_int_equal(got.principal.result, STORE_AUTH_UNKNOWN);
	CALL(store_key_create(t.store, &k, on_done, NULL, &e));
	char id[ID_MAX];
	memcpy(id, got.id, ID_MAX);
	CALL(store_auth(t.store, hash, on_auth, NULL, &e));
	assert_int_equal(got.principal.result, STORE_AUTH_OK);
	assert_string_equal(got.principal.org_id, t.org);
	assert_string_equal(got.principal.key_name, "ci");
	assert_int_equal(got.principal.role, STORE_ROLE_ADMIN);
	assert_string_equal(got.principal.default_model, "scripted/auto");
	assert_true(got.principal.allow_emulated);
	CALL(store_key_revoke(t.store, t.org, id, true, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_CONFLICT);
	CALL(store_key_revoke(t.store, "org_other", id, false, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_NOT_FOUND);
	CALL(store_key_revoke(t.store, t.org, id, false, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE);
	CALL(store_auth(t.store, hash, on_auth, NULL, &e));
	assert_int_equal(got.principal.result, STORE_AUTH_EXPIRED);
	assert_ok(store_operator_key_count(conninfo, &count, &e));
	assert_ok(store_operator_key_add(conninfo, operator_hash, "first", &e));
	int64_t now = 0;
	assert_ok(store_operator_key_count(conninfo, &now, &e));
	assert_int_equal(now, count + 1);
	CALL(store_auth(t.store, operator_hash, on_auth, NULL, &e));
	assert_true(got.principal.result == STORE_AUTH_OK && got.principal.is_operator);
}

static void on_members(void *arg, const struct store_members *m, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.count = m->count;
	if (m->count > 0)
		assert_true(text_fmt(got.text, sizeof(got.text), "%s|%s|%s", m->members[0].name, m->members[0].email,
				store_role_text(m->members[0].role)));
	assert_true(text_copy(got.cursor, sizeof(got.cursor), m->next_cursor ? m->next_cursor : ""));
}

/* A key of `member` with `role`; what the store said is in got. */
static void key_for(const char *member, enum store_role role, uint8_t hash[32])
{
	struct store_key_new k = { .org_id = t.org, .key_hash = hash, .member_id = member, .role = role };
	struct err e;

	random_bytes(hash, 32);
	CALL(store_key_create(t.store, &k, on_done, NULL, &e));
}

static enum store_role role_of(const uint8_t hash[32])
{
	struct err e;

	CALL(store_auth(t.store, hash, on_auth, NULL, &e));
	return got.principal.result == STORE_AUTH_OK ? got.principal.role : STORE_ROLE_NONE;
}

/* What a member may do bounds what their keys may do, at every moment; the last admin key stays, whichever way it would go. */
static void members_and_their_keys(void **state)
{
	struct store_member_change m = { .name = "Ada", .role = STORE_ROLE_ADMIN };
	uint8_t first[32], second[32], own[32], refused[32];
	char id[ID_MAX], key[ID_MAX];
	struct err e;

	(void)state;
	CALL(store_member_create(t.store, "org_other", &m, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_NOT_FOUND);
	CALL(store_member_create(t.store, t.org, &m, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE);
	memcpy(id, got.id, ID_MAX);
	CALL(store_member_get(t.store, t.org, id, on_members, NULL, &e));
	assert_string_equal(got.text, "Ada||admin");
	CALL(store_member_get(t.store, "org_other", id, on_members, NULL, &e));
	assert_int_equal(got.count, 0);
	key_for(id, STORE_ROLE_ADMIN, first);
	assert_int_equal(role_of(first), STORE_ROLE_ADMIN);
	assert_string_equal(got.principal.member_id, id);

	/* Theirs is the only admin key. */
	m = (struct store_member_change){ .role = STORE_ROLE_VIEWER };
	CALL(store_member_update(t.store, t.org, id, &m, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_CONFLICT);
	CALL(store_member_remove(t.store, t.org, id, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_CONFLICT);
	key_for(id, STORE_ROLE_ADMIN, second); /* a second one of the same member is no help */
	CALL(store_member_remove(t.store, t.org, id, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_CONFLICT);
	key_for(NULL, STORE_ROLE_ADMIN, own);
	assert_int_equal(got.done.result, STORE_DONE);
	memcpy(key, got.id, ID_MAX);

	m.email = "ada@example.com";
	CALL(store_member_update(t.store, t.org, id, &m, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE);
	CALL(store_member_get(t.store, t.org, id, on_members, NULL, &e));
	assert_string_equal(got.text, "Ada|ada@example.com|viewer");
	assert_int_equal(role_of(first), STORE_ROLE_VIEWER);
	key_for(id, STORE_ROLE_MEMBER, refused);
	assert_int_equal(got.done.result, STORE_DONE_CONFLICT);
	key_for("mem_other", STORE_ROLE_VIEWER, refused);
	assert_int_equal(got.done.result, STORE_DONE_NOT_FOUND);
	/* Keys that are admin in name only do not count. */
	CALL(store_key_revoke(t.store, t.org, key, true, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_CONFLICT);

	CALL(store_member_remove(t.store, "org_other", id, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_NOT_FOUND);
	for (int i = 0; i < 2; i++) { /* and again, as after a lost answer */
		CALL(store_member_remove(t.store, t.org, id, on_done, NULL, &e));
		assert_int_equal(got.done.result, STORE_DONE);
	}
	assert_int_equal(role_of(first), STORE_ROLE_NONE);
	assert_int_equal(role_of(second), STORE_ROLE_NONE);
	assert_int_equal(role_of(own), STORE_ROLE_ADMIN);
	CALL(store_member_update(t.store, t.org, id, &m, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_NOT_FOUND);
	key_for(id, STORE_ROLE_VIEWER, refused);
	assert_int_equal(got.done.result, STORE_DONE_NOT_FOUND);
	CALL(store_member_list(t.store, t.org, NULL, 10, on_members, NULL, &e));
	assert_int_equal(got.count, 0);
}

static void models_and_prices(void **state)
{
	const struct price common = { .run_fee = 3, .compute = -1, .web_request = 9, .web_search = -1 };
	struct model_spec spec = { .id = "nowhere/x" };
	struct err e;

	(void)state;
	CALL(store_model_get(t.store, "scripted/auto", on_models, NULL, &e));
	assert_int_equal(got.count, 1);
	assert_true(got.model.priced && got.model.is_default);
	assert_int_equal(got.model.price.cached_input, 50000);
	assert_int_equal(got.model.price.compute, 200000);
	assert_int_equal(got.model.spec.call_timeout_ms, 60000);
	CALL(store_price_common_put(t.store, &common, on_done, NULL, &e));
	CALL(store_model_get(t.store, "scripted/auto", on_models, NULL, &e));
	assert_int_equal(got.model.price.run_fee, 3);
	assert_int_equal(got.model.price.compute, 200000);
	assert_int_equal(got.model.price.web_request, 9);
	CALL(store_model_get(t.store, "no/such", on_models, NULL, &e));
	assert_int_equal(got.count, 0);
	CALL(store_model_put(t.store, &spec, false, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE_NOT_FOUND);
}

static void sweeps_and_health(void **state)
{
	struct err e;

	(void)state;
	for (int i = 0; i < STORE_SWEEP_COUNT; i++)
		CALL(store_sweep(t.store, (enum store_sweep)i, on_swept, NULL, &e));
	CALL(store_health(t.store, on_health, NULL, &e));
	assert_int_equal(got.health.schema_version, (int64_t)migration_count);
	assert_int_equal(got.health.partitions_ahead_days, 7);
	assert_true(store_connected(t.store));
}

static int closed_calls;

static void on_closed(void *arg, const struct store_create *c, const struct err *e)
{
	struct store_run_new r = new_run();
	struct err refused;

	(void)arg;
	(void)c;
	closed_calls++;
	if (e)
		assert_int_not_equal(store_run_create(t.store, &r, on_closed, NULL, &refused), 0);
}

static void on_closed_fence(void *arg, const struct store_fence *f, const struct err *e)
{
	(void)arg;
	(void)f;
	assert_non_null(e);
	closed_calls++;
}

/* Everything that was asked is answered, and what asks again in its callback is refused. */
static void closing_under_load(void **state)
{
	struct store_run_new r = new_run();
	struct link_events ev = { .first_seq = 1 };
	struct jobs *jobs;
	struct err e;

	(void)state;
	assert_ok(jobs_new(t.base, t.store, &jobs, &e));
	event_base_loop(t.base, EVLOOP_ONCE);
	closed_calls = 0;
	assert_true(text_copy(ev.run_id, sizeof(ev.run_id), "run_00000000000000000000000000000000"));
	for (int i = 0; i < 200; i++) {
		assert_ok(store_run_create(t.store, &r, on_closed, NULL, &e));
		assert_ok(store_run_events(t.store, t.node, &ev, 0, on_closed_fence, NULL, &e));
	}
	jobs_free(jobs);
	store_close(t.store);
	assert_int_equal(closed_calls, 400);
	open_store();
}

static bool connected(void *arg)
{
	(void)arg;
	return store_connected(t.store);
}

/* A crash of Postgres: what was outstanding fails, and everything works again once it is back. */
static void postgres_crashes(void **state)
{
	struct err e;

	(void)state;
	create_run();
	kill(pg_pid, SIGQUIT);
	waitpid(pg_pid, NULL, 0);
	begin();
	assert_ok(store_health(t.store, on_health, NULL, &e));
	wait_calls(1);
	assert_true(got.failed);
	assert_int_equal(got.error.code, ERR_UNAVAILABLE);
	assert_true(pg_server_start());
	assert_true(loop_until(t.base, connected, NULL, 20000));
	create_run();
}

static bool nothing_to_settle(void *arg)
{
	(void)arg;
	return strcmp(pg_do("flow", "SELECT count(*) FROM settle_pending"), "0") == 0;
}

/* A table that somebody holds: what was not read is not said to hold. */
static void check_that_cannot_read(FILE *out)
{
	PGconn *other = PQconnectdb(conninfo);
	char impatient[320];
	struct err e;

	PQclear(PQexec(other, "BEGIN"));
	PQclear(PQexec(other, "LOCK TABLE org_hot IN ACCESS EXCLUSIVE MODE"));
	assert_true(text_fmt(impatient, sizeof(impatient), "%s options='-c lock_timeout=100'", conninfo));
	assert_int_equal(store_check_ledger(impatient, false, out, &e), -1);
	assert_int_equal(e.code, ERR_CONFLICT);
	PQfinish(other);
	assert_int_equal(store_check_ledger(impatient, false, out, &e), 0);
}

static void ledger_holds(void **state)
{
	FILE *out = fopen("/dev/null", "w");
	struct err e;
	char run[ID_MAX];

	(void)state;
	create_run();
	memcpy(run, got.create.run_id, ID_MAX);
	CALL(store_run_cancel(t.store, t.org, run, on_cancel, NULL, &e));
	assert_int_equal(got.cancel.result, STORE_CANCEL_ENDED);
	assert_true(loop_until(t.base, nothing_to_settle, NULL, 5000));
	/* The tests before took rows out of the queue by hand: places are counted anew. */
	pg_do("flow", "UPDATE run_live SET admitted = true");
	pg_do("flow", "UPDATE org_hot h SET admitted = (SELECT count(*) FROM run_live l LEFT JOIN queue q USING (run_id) WHERE "
		      "l.org_id = h.org_id "
		      "AND coalesce(q.ready, true))");
	assert_int_equal(store_check_ledger(conninfo, true, out, &e), 0);
	create_run();
	assert_int_equal(store_check_ledger(conninfo, false, out, &e), 0);
	check_that_cannot_read(out);
	/* A row slipped in behind the functions is found by either, a changed old one by the whole check. */
	pg_do("flow", "INSERT INTO ledger (at_ms, org_id, kind, balance_delta, reserved_delta) SELECT eph_now_ms(), org_id, "
		      "'deposit', 1, 0 FROM org_hot LIMIT 1");
	assert_int_equal(store_check_ledger(conninfo, false, out, &e), 1);
	pg_do("flow", "UPDATE org_hot SET balance = balance + 1 WHERE org_id = (SELECT org_id FROM ledger ORDER BY id DESC LIMIT "
		      "1)");
	assert_int_equal(store_check_ledger(conninfo, false, out, &e), 0);
	pg_do("flow", "SET session_replication_role = replica; UPDATE ledger SET balance_delta = balance_delta - 1, reserved_delta "
		      "= reserved_delta - 1 "
		      "WHERE kind = 'charge'");
	assert_int_equal(store_check_ledger(conninfo, true, out, &e), 1);
	fclose(out);
}

/* A schema that needs a newer binary is refused, and nothing is changed. */
static void migrations_know_their_binary(void **state)
{
	struct err e;
	int applied = 0;

	(void)state;
	pg_do("flow", "UPDATE schema_state SET min_binary = 99");
	assert_int_equal(store_migrate(conninfo, &applied, &e), -1);
	assert_int_equal(e.code, ERR_CONFLICT);
	pg_do("flow", "UPDATE schema_state SET min_binary = 1");
	assert_ok(store_migrate(conninfo, &applied, &e));
	assert_int_equal(applied, 0);
	assert_string_equal(pg_do("flow", "SELECT remedy FROM error_codes WHERE code = 'no_capacity'"),
			errcode_remedy(ERRCODE_NO_CAPACITY));
}

static bool swept_all(void *arg)
{
	(void)arg;
	return got.calls > 0;
}

/* A month on, the day partitions of today are detached and dropped, one at a time, and what an earlier sweep left detached as well.
 */
static void retention(void **state)
{
	struct err e;
	int rounds = 0;

	(void)state;
	pg_do("flow", "TRUNCATE run_live; TRUNCATE settle_pending");
	pg_do("flow", "DO $$ BEGIN EXECUTE format('ALTER TABLE events DETACH PARTITION %I', (SELECT min(relname) FROM pg_class "
		      "WHERE relname ~ "
		      "'^events_[0-9]{8}$' AND relkind = 'r')); END $$");
	pg_do("flow", "CREATE OR REPLACE FUNCTION eph_clock_offset_ms() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE AS "
		      "'SELECT 33 * 86400000::bigint'");
	do {
		begin();
		assert_ok(store_sweep(t.store, STORE_SWEEP_PARTITIONS, on_swept, NULL, &e));
		assert_true(loop_until(t.base, swept_all, NULL, 20000));
		assert_false(got.failed);
	} while (got.changed > 0 && ++rounds < 50);
	assert_in_range(rounds, 12, 24);
	assert_string_equal(pg_do("flow", "SELECT count(*) FROM eph_partitions_old(30 * 86400000::bigint)"), "0");
	create_run();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(keys_and_auth, set_up, tear_down),
		cmocka_unit_test_setup_teardown(members_and_their_keys, set_up, tear_down),
		cmocka_unit_test_setup_teardown(models_and_prices, set_up, tear_down),
		cmocka_unit_test_setup_teardown(sweeps_and_health, set_up, tear_down),
		cmocka_unit_test_setup_teardown(closing_under_load, set_up, tear_down),
		cmocka_unit_test_setup_teardown(postgres_crashes, set_up, tear_down),
		cmocka_unit_test_setup_teardown(ledger_holds, set_up, tear_down),
		cmocka_unit_test_setup_teardown(migrations_know_their_binary, set_up, tear_down),
		cmocka_unit_test_setup_teardown(retention, set_up, tear_down),
	};
	int status = store_test_begin();

	return status ? status : cmocka_run_group_tests_name("store_admin", tests, NULL, NULL);
}
