/* Runs through the store's functions on a loop, against a real Postgres: a life, batches, idempotency, cancel, hints. */
/* link: controld_store ephproto ephbase EPH::pq EPH::event */
#include "store_fixture.h"

static void life_of_a_run(void **state)
{
	const enum event_type types[] = { EV_MICROVM_READY, EV_WORKER_STARTED, EV_MICROVM_DESTROYED };
	uint8_t content[STORE_FILE_CHUNK + 10];
	struct store_file file = { .path = "data/in.bin", .size = sizeof(content), .data = content };
	struct store_pair meta = { "team", "a b" };
	struct store_run_new r = new_run();
	struct link_next n = ask();
	struct link_finish f;
	struct link_blob b;
	struct link_held held;
	struct store_run_filter filter = { .status = "succeeded", .metadata = &meta, .metadata_count = 1, .limit = 10 };
	char run[ID_MAX];
	struct err e;

	(void)state;
	memset(content, 'x', sizeof(content));
	memset(file.sha256, 0xab, sizeof(file.sha256));
	r.files = &file;
	r.file_count = 1;
	r.metadata = &meta;
	r.metadata_count = 1;
	CALL(store_run_create(t.store, &r, on_create, NULL, &e));
	assert_int_equal(got.create.result, STORE_CREATED);
	assert_true(id_valid("run", got.create.run_id));
	assert_int_equal(t.queued_hints, 1);
	assert_true(text_copy(run, sizeof(run), got.create.run_id));

	CALL(store_run_get(t.store, t.org, run, on_runs, NULL, &e));
	assert_int_equal(got.count, 1);
	assert_string_equal(got.run.status, "queued");
	assert_string_equal(got.prompt, r.prompt);
	assert_string_equal(got.request, r.request_json);
	assert_string_equal(got.text, " |team=a b|data/in.bin");
	assert_string_equal(got.run.waiting_reason, "no_node");
	assert_int_equal(got.run.price.web_search, 6);
	CALL(store_run_get(t.store, "org_other", run, on_runs, NULL, &e));
	assert_int_equal(got.count, 0);

	CALL(store_next(t.store, t.node, &n, 4, on_next, NULL, &e));
	assert_int_equal(got.next.result, STORE_NEXT_OK);
	assert_int_equal(got.next.lease_ms, 60000);
	assert_int_equal(got.next.assign_count, 1);
	assert_string_equal(got.assign[0].a.run_id, run);
	assert_string_equal(got.assign_prompt, r.prompt);
	assert_string_equal(got.assign[0].a.model.upstream, "auto");
	assert_string_equal(got.assign[0].provider, "scripted");
	assert_int_equal(got.assign[0].sealed_key_len, 6);
	assert_int_equal(got.assign[0].a.file_count, 1);
	assert_int_equal(got.assign[0].a.next_seq, 3);
	assert_int_equal(got.assign[0].a.price.run_fee, 7);
	memset(&held, 0, sizeof(held));
	memcpy(held.run_id, run, sizeof(run));
	memcpy(held.token, got.assign[0].a.token, TOKEN_LEN);

	memset(&b, 0, sizeof(b));
	memcpy(b.run_id, run, sizeof(run));
	memcpy(b.token, held.token, TOKEN_LEN);
	memcpy(b.sha256, file.sha256, SHA256_LEN);
	CALL(store_blob(t.store, t.node, &b, on_blob, NULL, &e));
	assert_true(got.blob.found);
	assert_int_equal(got.blob.total, sizeof(content));
	assert_int_equal(got.blob.len, STORE_FILE_CHUNK);
	assert_memory_equal(got.bytes, content, STORE_FILE_CHUNK);
	b.offset = STORE_FILE_CHUNK;
	CALL(store_blob(t.store, t.node, &b, on_blob, NULL, &e));
	assert_int_equal(got.blob.len, 10);
	b.token[0] ^= 1;
	CALL(store_blob(t.store, t.node, &b, on_blob, NULL, &e));
	assert_false(got.blob.found);

	CALL(store_run_start(t.store, t.node, run, held.token, on_fence, NULL, &e));
	assert_int_equal(got.fence.fence, FENCE_APPLIED);
	CALL(store_run_get(t.store, t.org, run, on_runs, NULL, &e));
	assert_string_equal(got.run.status, "running");
	assert_string_equal(got.run.node_id, t.node);
	assert_int_equal(got.run.cost.total, 7);

	send_events(run, held.token, 4, types, 1);
	assert_int_equal(got.fence.fence, FENCE_GAP);
	assert_int_equal(got.fence.expected_seq, 3);
	send_events(run, held.token, 3, types, 3);
	assert_int_equal(got.fence.fence, FENCE_APPLIED);
	assert_int_equal(got.fence.expected_seq, 6);

	n.held = &held;
	n.held_count = 1;
	CALL(store_next(t.store, t.node, &n, 4, on_next, NULL, &e));
	assert_true(got.next.waiting);

	memset(&f, 0, sizeof(f));
	memcpy(f.run_id, run, sizeof(run));
	memcpy(f.token, held.token, TOKEN_LEN);
	f.end.output = (uint8_t *)(uintptr_t) "result";
	f.end.output_len = 6;
	f.end.last_seq = 5;
	f.end.usage = (struct usage){ .model_calls = 2, .input_tokens = 30, .output_tokens = 4, .compute_ms = 500 };
	f.end.cost = (struct cost){ 7, 100, 50, 0, 157 };
	assert_true(text_copy(f.end.isolation, sizeof(f.end.isolation), "emulated"));
	CALL(store_run_finish(t.store, t.node, &f, on_fence, NULL, &e));
	assert_int_equal(got.fence.fence, FENCE_APPLIED);
	assert_true(loop_until(t.base, is_settled, NULL, 5000));

	CALL(store_run_get(t.store, t.org, run, on_runs, NULL, &e));
	assert_string_equal(got.run.status, "succeeded");
	assert_string_equal(got.output, "result");
	assert_true(got.run.settled);
	assert_int_equal(got.run.cost.total, 157);
	assert_int_equal(got.run.released_micros, 40000 - 157);
	assert_int_equal(got.run.usage.input_tokens, 30);
	assert_string_equal(got.run.isolation, "emulated");
	CALL(store_events_page(t.store, t.org, run, 0, 1000, on_events, NULL, &e));
	assert_true(got.events.complete);
	assert_int_equal(got.events.head_seq, 7);
	assert_string_equal(got.text, "1 2 3 4 5 6 7 ");
	CALL(store_events_page(t.store, t.org, run, 7, 1000, on_events, NULL, &e));
	assert_true(got.events.found && got.events.complete && got.events.count == 0);
	CALL(store_events_page(t.store, "org_other", run, 0, 1000, on_events, NULL, &e));
	assert_false(got.events.found);
	CALL(store_run_list(t.store, t.org, &filter, on_runs, NULL, &e));
	assert_int_equal(got.count, 1);
	meta.value = "b";
	CALL(store_run_list(t.store, t.org, &filter, on_runs, NULL, &e));
	assert_int_equal(got.count, 0);
	CALL(store_receipt(t.store, t.org, run, on_receipt, NULL, &e));
	assert_true(got.receipt.found && got.receipt.ended);
	assert_int_equal(got.receipt.last_seq, 5);
	CALL(store_me(t.store, t.org, on_me, NULL, &e));
	assert_int_equal(got.me.balance_micros, 100000000 - 157);
	assert_int_equal(got.me.reserved_micros, 0);
}

static void ends_that_are_too_large(void **state)
{
	const enum event_type destroyed = EV_MICROVM_DESTROYED;
	struct link_next n = ask();
	struct link_finish f;
	struct err e;
	char run[ID_MAX];

	(void)state;
	create_run();
	CALL(store_next(t.store, t.node, &n, 1, on_next, NULL, &e));
	memset(&f, 0, sizeof(f));
	memcpy(f.run_id, got.assign[0].a.run_id, ID_MAX);
	memcpy(run, f.run_id, ID_MAX);
	memcpy(f.token, got.assign[0].a.token, TOKEN_LEN);
	CALL(store_run_start(t.store, t.node, run, f.token, on_fence, NULL, &e));
	send_events(run, f.token, 3, &destroyed, 1);
	f.end.last_seq = 3;
	f.end.output_len = GUEST_RESULT_MAX + 1;
	f.end.output = calloc(1, f.end.output_len);
	assert_true(text_copy(f.end.isolation, sizeof(f.end.isolation), "emulated"));
	CALL(store_run_finish(t.store, t.node, &f, on_fence, NULL, &e));
	free(f.end.output);
	CALL(store_run_get(t.store, t.org, run, on_runs, NULL, &e));
	assert_string_equal(got.run.status, "failed");
	assert_string_equal(got.text, "output_too_large The output is over 1 MiB.|=|");
	assert_true(loop_until(t.base, is_settled, NULL, 5000));
}

static int created, replayed, insufficient;
static char first_run[ID_MAX];

static void count_create(void *arg, const struct store_create *c, const struct err *e)
{
	(void)arg;
	if (!note(e))
		fail_msg("%s", e->text);
	created += c->result == STORE_CREATED;
	replayed += c->result == STORE_REPLAYED;
	insufficient += c->result == STORE_INSUFFICIENT;
	if (c->run_id[0] && !first_run[0])
		memcpy(first_run, c->run_id, ID_MAX);
	else if (c->result == STORE_REPLAYED)
		assert_string_equal(first_run, c->run_id);
}

static void equal_requests_make_one_run(void **state)
{
	struct store_run_new r = new_run();
	struct err e;

	(void)state;
	created = replayed = insufficient = 0;
	first_run[0] = '\0';
	r.idempotency_key = "same";
	begin();
	for (int i = 0; i < 1000; i++)
		assert_ok(store_run_create(t.store, &r, count_create, NULL, &e));
	wait_calls(1000);
	assert_int_equal(created, 1);
	assert_int_equal(replayed, 999);
	r.idempotency_hash[0] = 1;
	CALL(store_run_create(t.store, &r, on_create, NULL, &e));
	assert_int_equal(got.create.result, STORE_IDEMPOTENCY_MISMATCH);
	CALL(store_run_cancel(t.store, t.org, first_run, on_cancel, NULL, &e));
	assert_int_equal(got.cancel.result, STORE_CANCEL_ENDED);
	assert_true(loop_until(t.base, is_settled, NULL, 5000));
}

static void a_wallet_for_ten(void **state)
{
	struct store_run_new r = new_run();
	char org[ID_MAX];
	struct err e;

	(void)state;
	make_org(org, 400000);
	r.org_id = org;
	created = replayed = insufficient = 0;
	begin();
	for (int i = 0; i < 100; i++)
		assert_ok(store_run_create(t.store, &r, count_create, NULL, &e));
	wait_calls(100);
	assert_int_equal(created, 10);
	assert_int_equal(insufficient, 90);
}

static void a_key_in_use(void **state)
{
	struct store_run_new r = new_run(), other = new_run();
	struct err e;
	char info[256];
	PGconn *db;

	(void)state;
	pg_conninfo("flow", info);
	db = PQconnectdb(info);
	PQclear(PQexec(db, "BEGIN"));
	char sql[256];
	assert_true(text_fmt(
			sql, sizeof(sql), "INSERT INTO idempotency VALUES ('%s', 'runs', 'busy', '', '', 9000000000000)", t.org));
	PQclear(PQexec(db, sql));
	r.idempotency_key = "busy";
	begin();
	created = 0;
	assert_ok(store_run_create(t.store, &r, on_create, NULL, &e));
	assert_ok(store_run_create(t.store, &other, count_create, NULL, &e));
	wait_calls(2);
	assert_int_equal(got.create.result, STORE_IN_PROGRESS);
	assert_int_equal(created, 1); /* the other one of the batch is not held up for good */
	PQfinish(db);
}

static void cancel_reaches_the_node(void **state)
{
	struct link_next n = ask();
	struct link_refuse refuse;
	struct err e;
	char run[ID_MAX];

	(void)state;
	pg_do("flow", "TRUNCATE queue");
	create_run();
	memcpy(run, got.create.run_id, ID_MAX);
	CALL(store_run_get(t.store, t.org, run, on_runs, NULL, &e));
	assert_string_equal(got.run.waiting_reason, "capacity");
	CALL(store_next(t.store, t.node, &n, 4, on_next, NULL, &e));
	memset(&refuse, 0, sizeof(refuse));
	memcpy(refuse.run_id, run, ID_MAX);
	memcpy(refuse.token, got.assign[0].a.token, TOKEN_LEN);
	CALL(store_run_cancel(t.store, t.org, run, on_cancel, NULL, &e));
	assert_int_equal(got.cancel.result, STORE_CANCEL_REQUESTED);
	assert_true(t.node_hints > 0);
	CALL(store_next(t.store, t.node, &n, 0, on_next, NULL, &e));
	assert_int_equal(got.next.command_count, 1);
	assert_int_equal(got.command[0].kind, LINK_CMD_CANCEL);
	assert_string_equal(got.command[0].run_id, run);
	n.last_command = got.command[0].id;
	CALL(store_run_refuse(t.store, t.node, &refuse, on_fence, NULL, &e));
	assert_int_equal(got.fence.fence, FENCE_APPLIED);
	CALL(store_run_get(t.store, t.org, run, on_runs, NULL, &e));
	assert_string_equal(got.run.status, "cancelled");
	assert_int_equal(got.run.cost.total, 0);
	assert_true(got.run.cancel_requested_at_ms > 0);
	CALL(store_node_act(t.store, t.node, STORE_NODE_DRAIN, on_done, NULL, &e));
	CALL(store_next(t.store, t.node, &n, 4, on_next, NULL, &e));
	assert_int_equal(got.command[0].kind, LINK_CMD_DRAIN);
	CALL(store_node_get(t.store, t.node, on_nodes, NULL, &e));
	assert_string_equal(got.node.state, "draining");
	assert_true(got.node.live);
	assert_int_equal(got.node.total_memory_mib, 8192);
}

static int told_a, told_b;
static struct store_sub *sub_a, *sub_b;

static void on_tell_a(void *arg)
{
	(void)arg;
	told_a++;
}

/* Frees both, in the callback. */
static void on_tell_b(void *arg)
{
	(void)arg;
	told_b++;
	store_hub_unsubscribe(sub_a);
	store_hub_unsubscribe(sub_b);
	sub_a = sub_b = NULL;
}

static bool told(void *arg)
{
	return *(int *)arg > 0;
}

static bool told_twice(void *arg)
{
	return *(int *)arg >= 2;
}

static void hints_between_controlds(void **state)
{
	const struct store_options opt = { .conninfo = conninfo };
	const struct store_hooks hooks = { hint_queued, hint_node, NULL };
	struct store *other;
	struct err e;
	char run[ID_MAX];

	(void)state;
	create_run();
	memcpy(run, got.create.run_id, ID_MAX);
	assert_ok(store_open(t.base, &opt, &other, &e));
	sub_a = store_hub_subscribe(other, run, on_tell_a, NULL);
	told_a = told_b = 0;
	assert_true(loop_until(t.base, told, &told_a, 5000)); /* the first LISTEN, or the tick */
	store_set_hooks(other, &hooks);
	t.queued_hints = 0;
	told_a = told_b = 0;
	sub_b = store_hub_subscribe(t.store, run, on_tell_b, NULL);
	store_hub_unsubscribe(sub_a);
	sub_a = store_hub_subscribe(t.store, run, on_tell_a, NULL);
	struct store_sub *far = store_hub_subscribe(other, run, on_tell_a, NULL);
	CALL(store_run_cancel(t.store, t.org, run, on_cancel, NULL, &e));
	assert_true(loop_until(t.base, told, &told_b, 5000));
	assert_true(loop_until(t.base, told, &told_a, 5000)); /* by NOTIFY, or the other's tick */
	told_a = 0;
	create_run();
	assert_true(loop_until(t.base, told_twice, &t.queued_hints, 5000)); /* here and by the other */
	store_hub_unsubscribe(far);
	store_close(other);
}

static int pages;

static void on_shared_page(void *arg, const struct store_events *ev, const struct err *e)
{
	(void)arg;
	assert_null(e);
	assert_true(ev->found && ev->count == 1);
	pages++;
	got.calls++;
}

static void readers_share_a_statement(void **state)
{
	struct err e;

	(void)state;
	create_run();
	pages = 0;
	memset(&got.calls, 0, sizeof(got.calls));
	char run[ID_MAX];
	memcpy(run, got.create.run_id, ID_MAX);
	/* Far more than a connection takes at once. */
	for (int i = 0; i < 20000; i++)
		assert_ok(store_events_page(t.store, t.org, run, 0, 100, on_shared_page, NULL, &e));
	wait_calls(20000);
	assert_int_equal(pages, 20000);
}

static void pages_of_runs(void **state)
{
	struct store_run_filter f = { .limit = 2 };
	struct err e;
	char first[ID_MAX];

	(void)state;
	for (int i = 0; i < 3; i++)
		create_run();
	memcpy(first, got.create.run_id, ID_MAX);
	CALL(store_run_list(t.store, t.org, &f, on_runs, NULL, &e));
	assert_int_equal(got.count, 2);
	assert_string_equal(got.run.id, first);
	assert_true(got.cursor[0] != '\0');
	char cursor[ID_MAX];
	memcpy(cursor, got.cursor, ID_MAX);
	f.cursor = cursor;
	CALL(store_run_list(t.store, t.org, &f, on_runs, NULL, &e));
	assert_int_equal(got.count, 1);
	assert_true(got.cursor[0] == '\0');
	f.cursor = NULL;
	f.status = "running";
	CALL(store_run_list(t.store, t.org, &f, on_runs, NULL, &e));
	assert_int_equal(got.count, 0);
	f.status = "queued";
	CALL(store_run_list(t.store, t.org, &f, on_runs, NULL, &e));
	assert_int_equal(got.count, 2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(life_of_a_run, set_up, tear_down),
		cmocka_unit_test_setup_teardown(ends_that_are_too_large, set_up, tear_down),
		cmocka_unit_test_setup_teardown(equal_requests_make_one_run, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_wallet_for_ten, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_key_in_use, set_up, tear_down),
		cmocka_unit_test_setup_teardown(cancel_reaches_the_node, set_up, tear_down),
		cmocka_unit_test_setup_teardown(hints_between_controlds, set_up, tear_down),
		cmocka_unit_test_setup_teardown(readers_share_a_statement, set_up, tear_down),
		cmocka_unit_test_setup_teardown(pages_of_runs, set_up, tear_down),
	};
	int status = store_test_begin();

	return status ? status : cmocka_run_group_tests_name("store_runs", tests, NULL, NULL);
}
