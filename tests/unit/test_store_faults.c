/*
 * Postgres that fails in the middle of every statement: for each table that a run writes to, its first write raises an error (disk
 * full, a deadlock, too many connections, an administrator's shutdown, out of memory, an error of our own), at each step of a run's
 * life. Each callback comes once, says so, and nothing half is left: the same request again goes on, and the books hold.
 */
/* link: controld_store ephproto ephbase EPH::pq EPH::event */
#include "store_fixture.h"

static const char *const tables[] = { "idempotency", "runs", "run_content", "ledger", "events", "run_live", "queue", "org_hot",
	"nodes_live", "run_output", "settle_pending", "org_class" };

static const struct {
	const char *state;
	enum err_code code;
} faults[] = {
	{ "53100", ERR_UNAVAILABLE }, /* disk full */
	{ "40P01", ERR_CONFLICT },    /* deadlock */
	{ "53300", ERR_UNAVAILABLE }, /* too many connections */
	{ "57P01", ERR_UNAVAILABLE }, /* administrator's shutdown */
	{ "57014", ERR_CONFLICT },    /* statement timeout */
	{ "40001", ERR_CONFLICT },    /* serialization failure */
	{ "25006", ERR_UNAVAILABLE }, /* read only */
	{ "XX000", ERR_INTERNAL },
};

static enum err_code expected;
static int hits; /* attempts that failed, of all */

static void fault_on(const char *table, const char *state)
{
	char sql[512];

	assert_true(text_fmt(sql, sizeof(sql),
			"CREATE OR REPLACE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION "
			"''injected'' USING "
			"ERRCODE = ''%s''; END'; "
			"CREATE TRIGGER fault BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION fault()",
			state, table));
	pg_do("flow", sql);
}

static void fault_off(const char *table)
{
	char sql[128];

	assert_true(text_fmt(sql, sizeof(sql), "DROP TRIGGER fault ON %s", table));
	pg_do("flow", sql);
}

/* One attempt; false when it failed, as it may only with the code that was injected. */
static bool attempt(int result, const struct err *e)
{
	if (result != 0)
		fail_msg("refused: %s", e->text);
	wait_calls(1);
	loop_until(t.base, answered, &(int){ 2 }, 1);
	assert_int_equal(got.calls, 1);
	if (got.failed) {
		assert_int_equal(got.error.code, expected);
		hits++;
	}
	if (got.create.result == STORE_IN_PROGRESS) { /* a create with a key that met a lock: try again, with 409 */
		assert_int_equal(expected, ERR_CONFLICT);
		hits++;
		return false;
	}
	return !got.failed;
}
#define ATTEMPT(call) (begin(), attempt((call), &e))

/* The step while the table fails, then once more when it does not. */
#define STEP(call)                                                                                                                 \
	do {                                                                                                                       \
		fault_on(table, state);                                                                                            \
		(void)ATTEMPT(call);                                                                                               \
		fault_off(table);                                                                                                  \
		if (!ATTEMPT(call))                                                                                                \
			fail_msg("%s %s: %s", table, state, got.error.text);                                                       \
	} while (0)

static void expect_fence(void)
{
	assert_true(got.fence.fence == FENCE_APPLIED || got.fence.fence == FENCE_DUPLICATE);
}

static int send_end(const struct link_events *ev, struct err *e)
{
	return store_run_events(t.store, t.node, ev, 10, on_fence, NULL, e);
}

static void live_one_run(const char *table, const char *state)
{
	static const enum event_type types[] = { EV_MICROVM_READY, EV_MICROVM_DESTROYED };
	struct store_run_new r = new_run();
	struct link_next n = ask();
	struct link_held held = { .spent_micros = 0 };
	struct link_record records[2];
	struct link_events ev = { .spent_micros = 10, .first_seq = 3, .records = records, .record_count = 2 };
	struct buf bytes[2];
	struct link_finish f;
	char run[ID_MAX], key[ID_MAX];
	struct err e;

	id_make("key", key);
	r.idempotency_key = key;
	STEP(store_run_create(t.store, &r, on_create, NULL, &e));
	assert_true(got.create.result == STORE_CREATED || got.create.result == STORE_REPLAYED);
	assert_true(text_copy(run, sizeof(run), got.create.run_id));
	STEP(store_next(t.store, t.node, &n, 4, on_next, NULL, &e));
	assert_int_equal(got.next.assign_count, 1);
	assert_string_equal(got.assign[0].a.run_id, run);
	memcpy(held.run_id, run, sizeof(run));
	memcpy(held.token, got.assign[0].a.token, TOKEN_LEN);
	STEP(store_run_start(t.store, t.node, run, held.token, on_fence, NULL, &e));
	expect_fence();
	n.held = &held;
	n.held_count = 1;
	STEP(store_next(t.store, t.node, &n, 4, on_next, NULL, &e));
	memcpy(ev.run_id, run, sizeof(run));
	memcpy(ev.token, held.token, TOKEN_LEN);
	for (uint32_t i = 0; i < 2; i++) {
		const struct event_head head = { run, 3 + i, 1000, 10, EVENT_HOST, types[i] };

		buf_init(&bytes[i], EVENT_BYTES_MAX);
		assert_true(event_make(&bytes[i], &head, "{}", 2));
		records[i] = (struct link_record){ (uint16_t)types[i], bytes[i].data, (uint32_t)bytes[i].len };
	}
	STEP(send_end(&ev, &e));
	expect_fence();
	memset(&f, 0, sizeof(f));
	memcpy(f.run_id, run, sizeof(run));
	memcpy(f.token, held.token, TOKEN_LEN);
	f.end.output = (uint8_t *)(uintptr_t) "done";
	f.end.output_len = 4;
	f.end.last_seq = 4;
	f.end.cost = (struct cost){ 7, 100, 50, 0, 157 };
	assert_true(text_copy(f.end.isolation, sizeof(f.end.isolation), "emulated"));
	STEP(store_run_finish(t.store, t.node, &f, on_fence, NULL, &e));
	expect_fence();
	STEP(store_sweep(t.store, STORE_SWEEP_SETTLE, on_swept, NULL, &e));
	for (int i = 0; i < 3 && !is_settled(NULL); i++) /* after a failure it goes run by run */
		(void)ATTEMPT(store_sweep(t.store, STORE_SWEEP_SETTLE, on_swept, NULL, &e));
	assert_true(loop_until(t.base, is_settled, NULL, 5000));
	CALL(store_events_page(t.store, t.org, run, 0, 1000, on_events, NULL, &e));
	assert_true(got.events.complete);
	assert_string_equal(got.text, "1 2 3 4 5 6 ");
	CALL(store_run_get(t.store, t.org, run, on_runs, NULL, &e));
	assert_string_equal(got.run.status, "succeeded");
	assert_string_equal(got.output, "done");
	for (uint32_t i = 0; i < 2; i++)
		buf_free(&bytes[i]);
}

static void each_table_at_each_step(void **state)
{
	FILE *out = fopen("/dev/null", "w");
	int runs = 0;
	struct err e;

	(void)state;
	for (size_t i = 0; i < COUNT(tables); i++) {
		/* Every kind of error has its turn; disk full has all tables. */
		for (size_t k = 0; k < 2; k++) {
			const size_t fault = k == 0 ? 0 : 1 + i % (COUNT(faults) - 1);

			expected = faults[fault].code;
			hits = 0;
			live_one_run(tables[i], faults[fault].state);
			if (hits < 1)
				fail_msg("no step writes to %s", tables[i]); /* it would prove nothing */

			runs++;
		}
	}
	CALL(store_me(t.store, t.org, on_me, NULL, &e));
	assert_int_equal(got.me.balance_micros, 100000000 - 157 * runs);
	assert_int_equal(got.me.reserved_micros, 0);
	if (store_check_ledger(conninfo, true, out, &e) != 0)
		fail_msg("the ledger does not hold");
	fclose(out);
}

/* Sweeps that fail are sweeps that come again: nothing they do by halves. */
static void sweeps_fail_whole(void **state)
{
	struct err e;

	(void)state;
	for (int what = 0; what < STORE_SWEEP_COUNT; what++) {
		for (size_t i = 0; i < COUNT(faults); i++) {
			expected = faults[i].code;
			fault_on("sweep_clock", faults[i].state);
			(void)ATTEMPT(store_sweep(t.store, (enum store_sweep)what, on_swept, NULL, &e));
			fault_off("sweep_clock");
			if (!ATTEMPT(store_sweep(t.store, (enum store_sweep)what, on_swept, NULL, &e)))
				fail_msg("sweep %d after %s: %s", what, faults[i].state, got.error.text);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(each_table_at_each_step, set_up, tear_down),
		cmocka_unit_test_setup_teardown(sweeps_fail_whole, set_up, tear_down),
	};
	int status = store_test_begin();

	return status ? status : cmocka_run_group_tests_name("store_faults", tests, NULL, NULL);
}
