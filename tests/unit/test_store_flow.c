/* The store's functions on a loop against a real Postgres: the life of a run, batching, hints, closing under load, restarts. */
/* link: controld_store ephproto ephbase EPH::pq EPH::event */
#include "unit.h"

#include "controld/jobs/jobs.h"
#include "controld/store/store.h"
#include "log.h"
#include "loop.h"
#include "pg_cluster.h"

static char conninfo[256];

static struct fixture {
	struct event_base *base;
	struct store *store;
	char org[ID_MAX], node[ID_MAX];
	int queued_hints, node_hints;
} t;

/* What the last callback said. */
static struct {
	int calls;
	bool failed;
	struct err error;
	struct store_done done;
	char id[ID_MAX];
	char detail[256];
	struct store_principal principal;
	struct store_me me;
	struct store_create create;
	struct store_run run;
	size_t count;
	char output[4096], prompt[4096], request[4096], cursor[ID_MAX], text[4096];
	struct store_fence fence;
	struct store_cancel cancel;
	struct store_blob blob;
	uint8_t bytes[STORE_FILE_CHUNK];
	struct store_next next;
	struct store_assign assign[STORE_CLAIM_MAX];
	char assign_prompt[4096];
	struct link_command command[8];
	struct store_events events;
	struct store_model model;
	struct store_node node;
	struct store_receipt receipt;
	struct store_health health;
	int64_t changed;
} got;

static bool answered(void *arg)
{
	return got.calls >= *(int *)arg;
}

static void wait_calls(int n)
{
	assert_true(loop_until(t.base, answered, &n, 10000));
}

static void begin(void)
{
	memset(&got, 0, sizeof(got));
}

static bool note(const struct err *e)
{
	got.calls++;
	got.failed = e != NULL;
	if (e)
		got.error = *e;
	return e == NULL;
}

static void finish_call(int result, const struct err *e)
{
	if (result != 0)
		fail_msg("refused: %s", e->text);
	assert_int_equal(got.calls, 0); /* never from inside the call */
	wait_calls(1);
	if (got.failed)
		fail_msg("failed: %s", got.error.text);
}
#define CALL(call) do { begin(); finish_call((call), &e); } while (0)

static void on_done(void *arg, const struct store_done *d, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.done = *d;
	assert_true(text_copy(got.id, sizeof(got.id), d->id));
	assert_true(text_copy(got.detail, sizeof(got.detail), d->detail));
}

static void on_auth(void *arg, const struct store_principal *p, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.principal = *p;
}

static void on_me(void *arg, const struct store_me *me, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.me = *me;
}

static void on_credit(void *arg, const struct store_credit *c, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.changed = c->balance_micros;
}

static void on_create(void *arg, const struct store_create *c, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.create = *c;
}

static void on_runs(void *arg, const struct store_runs *r, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.count = r->count;
	if (r->next_cursor)
		assert_true(text_copy(got.cursor, sizeof(got.cursor), r->next_cursor));
	if (r->count == 0)
		return;
	got.run = r->runs[0];
	assert_true(text_fmt(got.output, sizeof(got.output), "%.*s", (int)got.run.output_len, got.run.output ? (const char *)got.run.output : ""));
	assert_true(text_fmt(got.prompt, sizeof(got.prompt), "%.*s", (int)got.run.prompt_len, got.run.prompt));
	assert_true(text_copy(got.request, sizeof(got.request), got.run.request_json));
	assert_true(text_fmt(got.text, sizeof(got.text), "%s %s|%s=%s|%s", got.run.error_code, got.run.error_message,
		got.run.metadata_count ? got.run.metadata[0].key : "", got.run.metadata_count ? got.run.metadata[0].value : "",
		got.run.file_count ? got.run.files[0].path : ""));
}

static void on_fence(void *arg, const struct store_fence *f, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.fence = *f;
}

static void on_cancel(void *arg, const struct store_cancel *c, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.cancel = *c;
}

static void on_blob(void *arg, const struct store_blob *b, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.blob = *b;
	assert_true(b->len <= sizeof(got.bytes));
	if (b->len)
		memcpy(got.bytes, b->bytes, b->len);
}

static void on_next(void *arg, const struct store_next *n, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.next = *n;
	for (size_t i = 0; i < n->assign_count; i++)
		got.assign[i] = n->assigns[i];
	if (n->assign_count)
		assert_true(text_copy(got.assign_prompt, sizeof(got.assign_prompt), n->assigns[0].a.prompt));
	for (size_t i = 0; i < n->command_count && i < 8; i++)
		got.command[i] = n->commands[i];
}

static void on_events(void *arg, const struct store_events *ev, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.events = *ev;
	got.text[0] = '\0';
	for (size_t i = 0; i < ev->count; i++) {
		size_t n = strlen(got.text);

		assert_true(text_fmt(got.text + n, sizeof(got.text) - n, "%lld ", (long long)ev->events[i].seq));
	}
}

static void on_models(void *arg, const struct store_models *m, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.count = m->count;
	if (m->count)
		got.model = m->models[0];
}

static void on_enrol(void *arg, const struct store_enrol *r, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.changed = r->result;
	assert_true(text_copy(got.id, sizeof(got.id), r->node_id));
}

static void on_nodes(void *arg, const struct store_nodes *n, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.count = n->count;
	if (n->count)
		got.node = n->nodes[0];
}

static void on_receipt(void *arg, const struct store_receipt *r, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.receipt = *r;
}

static void on_health(void *arg, const struct store_health *h, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.health = *h;
}

static void on_swept(void *arg, const struct store_swept *r, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.changed = r->changed;
}

static void hint_queued(void *arg, uint32_t memory_mib, uint32_t vcpus, bool emulated, uint32_t count)
{
	(void)arg;
	(void)memory_mib;
	(void)vcpus;
	(void)emulated;
	t.queued_hints += (int)count;
}

static void hint_node(void *arg, const char *node_id)
{
	(void)arg;
	(void)node_id;
	t.node_hints++;
}

/* ---- set-up ----------------------------------------------------------------------------------------------------------------------- */

static void make_catalog(void)
{
	struct model_spec spec = { .id = "scripted/auto" };
	const struct store_price_model price = { 50000, -1, 400000, 0 };
	struct err e;

	CALL(store_provider_put(t.store, "scripted", "http://127.0.0.1:1/v1", true, (const uint8_t *)"sealed", 6, on_done, NULL, &e));
	CALL(store_model_put(t.store, &spec, true, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE);
	CALL(store_price_model_put(t.store, spec.id, &price, on_done, NULL, &e));
}

static void make_org(char id[ID_MAX], int64_t credit)
{
	struct store_org_change change = { .disabled = -1, .allow_emulated = 1, .unlimited = 0, .default_cost_micros = -1, .max_queued = -1, .max_running = -1 };
	char name[ID_MAX];
	struct err e;

	id_make("test", name);
	change.name = name;
	CALL(store_org_create(t.store, &change, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE);
	assert_true(text_copy(id, ID_MAX, got.id));
	if (credit) {
		CALL(store_org_credit(t.store, id, credit, "test", NULL, NULL, on_credit, NULL, &e));
		assert_int_equal(got.changed, credit);
	}
}

static void make_node(char id[ID_MAX])
{
	struct link_enrol n = { .name = "host", .isolation = "emulated" };
	uint8_t secret[32];
	struct err e;

	random_bytes(secret, sizeof(secret));
	random_bytes(n.sign_key, sizeof(n.sign_key));
	CALL(store_node_token_create(t.store, secret, 1, clock_real_ms() + 60000, "", "emulated", on_done, NULL, &e));
	CALL(store_node_enrol(t.store, secret, &n, on_enrol, NULL, &e));
	assert_int_equal(got.changed, STORE_ENROL_OK);
	assert_true(text_copy(id, ID_MAX, got.id));
	CALL(store_node_certify(t.store, id, n.seal_sig, on_done, NULL, &e));
}

static void open_store(void)
{
	const struct store_options opt = { .conninfo = conninfo, .lease_ms = 60000 };
	const struct store_hooks hooks = { hint_queued, hint_node, NULL };
	struct err e;

	assert_ok(store_open(t.base, &opt, &t.store, &e));
	store_set_hooks(t.store, &hooks);
}

static int set_up(void **state)
{
	static char node[ID_MAX];

	(void)state;
	memset(&t, 0, sizeof(t));
	t.base = event_base_new();
	open_store();
	make_catalog();
	make_org(t.org, 100000000);
	if (!node[0])
		make_node(node);
	memcpy(t.node, node, sizeof(node));
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	store_close(t.store);
	event_base_free(t.base);
	/* Nothing of one test is left for the next. */
	pg_do("flow", "TRUNCATE queue; UPDATE nodes SET state = 'active'");
	return 0;
}

/* ---- steps -------------------------------------------------------------------------------------------------------------------------- */

static struct store_run_new new_run(void)
{
	struct store_run_new r = {
		.org_id = t.org, .key_id = "key_1", .member_id = "", .request_json = "{\"prompt\":\"hi\"}", .prompt = "say \"hi\"\n\xc3\xa4", .prompt_len = 11,
		.model = "scripted/auto", .cap_micros = 40000, .timeout_s = 120, .max_model_calls = 100, .memory_mib = 512, .vcpus = 1,
		.size = "standard", .shell = true, .allow_emulated = true,
		.price = { .run_fee = 7, .compute = 200000, .input = 1, .cached_input = 2, .output = 3, .model_percent = 4, .web_request = 5, .web_search = 6 },
	};

	return r;
}

static struct link_next ask(void)
{
	struct link_next n = { .epoch = 1, .free_memory_mib = 8192, .free_vcpus = 16, .free_slots = 16, .total_memory_mib = 8192, .total_vcpus = 16,
		.total_slots = 16, .isolation = "emulated" };

	return n;
}

static void create_run(void)
{
	struct store_run_new r = new_run();
	struct err e;

	CALL(store_run_create(t.store, &r, on_create, NULL, &e));
	assert_int_equal(got.create.result, STORE_CREATED);
}

static void send_events(const char *run, const uint8_t token[TOKEN_LEN], uint64_t first, const enum event_type *types, uint32_t n)
{
	static struct buf bytes[8];
	struct link_record records[8];
	struct link_events ev = { .spent_micros = 10, .held_micros = 5, .first_seq = first, .records = records, .record_count = n };
	struct err e;

	assert_true(text_copy(ev.run_id, sizeof(ev.run_id), run));
	memcpy(ev.token, token, TOKEN_LEN);
	for (uint32_t i = 0; i < n; i++) {
		const struct event_head head = { run, first + i, 1000, 10, EVENT_HOST, types[i] };

		buf_init(&bytes[i], EVENT_BYTES_MAX);
		assert_true(event_make(&bytes[i], &head, "{}", 2));
		records[i] = (struct link_record){ (uint16_t)types[i], bytes[i].data, (uint32_t)bytes[i].len };
	}
	CALL(store_run_events(t.store, t.node, &ev, 10, on_fence, NULL, &e));
	for (uint32_t i = 0; i < n; i++)
		buf_free(&bytes[i]);
}

static bool is_settled(void *arg)
{
	(void)arg;
	return strcmp(pg_do("flow", "SELECT count(*) FROM run_live"), "0") == 0;
}

/* ---- tests --------------------------------------------------------------------------------------------------------------------------- */

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
	f.end.output = (uint8_t *)(uintptr_t)"result";
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
	f.end.last_seq = 2;
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
	assert_true(text_fmt(sql, sizeof(sql), "INSERT INTO idempotency VALUES ('%s', 'runs', 'busy', '', '', 9000000000000)", t.org));
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

static void ledger_holds(void **state)
{
	FILE *out = fopen("/dev/null", "w");
	struct err e;

	(void)state;
	/* The tests before took rows out of the queue by hand: places are counted anew. */
	pg_do("flow", "UPDATE run_live SET admitted = true");
	pg_do("flow", "UPDATE org_hot h SET admitted = (SELECT count(*) FROM run_live l LEFT JOIN queue q USING (run_id) WHERE l.org_id = h.org_id "
		      "AND coalesce(q.ready, true))");
	assert_int_equal(store_check_ledger(conninfo, true, out, &e), 0);
	create_run();
	assert_int_equal(store_check_ledger(conninfo, false, out, &e), 0);
	/* A row slipped in behind the functions is found by either, a changed old one by the whole check. */
	pg_do("flow", "INSERT INTO ledger (at_ms, org_id, kind, balance_delta, reserved_delta) SELECT eph_now_ms(), org_id, 'deposit', 1, 0 FROM org_hot LIMIT 1");
	assert_int_equal(store_check_ledger(conninfo, false, out, &e), 1);
	pg_do("flow", "UPDATE org_hot SET balance = balance + 1 WHERE org_id = (SELECT org_id FROM ledger ORDER BY id DESC LIMIT 1)");
	assert_int_equal(store_check_ledger(conninfo, false, out, &e), 0);
	pg_do("flow", "SET session_replication_role = replica; UPDATE ledger SET balance_delta = balance_delta - 1, reserved_delta = reserved_delta - 1 "
		      "WHERE kind = 'charge'");
	assert_int_equal(store_check_ledger(conninfo, true, out, &e), 1);
	fclose(out);
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
		cmocka_unit_test_setup_teardown(keys_and_auth, set_up, tear_down),
		cmocka_unit_test_setup_teardown(models_and_prices, set_up, tear_down),
		cmocka_unit_test_setup_teardown(pages_of_runs, set_up, tear_down),
		cmocka_unit_test_setup_teardown(sweeps_and_health, set_up, tear_down),
		cmocka_unit_test_setup_teardown(closing_under_load, set_up, tear_down),
		cmocka_unit_test_setup_teardown(postgres_crashes, set_up, tear_down),
		cmocka_unit_test_setup_teardown(ledger_holds, set_up, tear_down),
	};
	int applied = 0;
	struct err e;

	log_init("test", LOG_LEVEL_ERROR, false);
	if (!pg_cluster_start()) {
		fprintf(stderr, "no Postgres 15 here\n");
		return 77;
	}
	pg_do("postgres", "CREATE DATABASE flow");
	pg_conninfo("flow", conninfo);
	if (store_migrate(conninfo, &applied, &e) != 0 || applied != (int)migration_count || store_migrate(conninfo, &applied, &e) != 0 || applied != 0) {
		fprintf(stderr, "migrate: %s\n", e.text);
		return 1;
	}
	return cmocka_run_group_tests_name("store_flow", tests, NULL, NULL);
}
