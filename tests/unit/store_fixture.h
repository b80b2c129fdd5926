/*
 * A store on a loop with a migrated database of its own, an organization with credit and an enrolled node; every callback writes
 * what it was told into `got`. For the tests of controld/store; each is one program with one Postgres.
 */
#ifndef EPH_UNIT_STORE_FIXTURE_H
#define EPH_UNIT_STORE_FIXTURE_H

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

static inline bool answered(void *arg)
{
	return got.calls >= *(int *)arg;
}

static inline void wait_calls(int n)
{
	assert_true(loop_until(t.base, answered, &n, 10000));
}

static inline void begin(void)
{
	memset(&got, 0, sizeof(got));
}

static inline bool note(const struct err *e)
{
	got.calls++;
	got.failed = e != NULL;
	if (e)
		got.error = *e;
	return e == NULL;
}

static inline void finish_call(int result, const struct err *e)
{
	if (result != 0)
		fail_msg("refused: %s", e->text);
	assert_int_equal(got.calls, 0); /* never from inside the call */
	wait_calls(1);
	if (got.failed)
		fail_msg("failed: %s", got.error.text);
}
#define CALL(call)                                                                                                                 \
	do {                                                                                                                       \
		begin();                                                                                                           \
		finish_call((call), &e);                                                                                           \
	} while (0)

static inline void on_done(void *arg, const struct store_done *d, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.done = *d;
	assert_true(text_copy(got.id, sizeof(got.id), d->id));
	assert_true(text_copy(got.detail, sizeof(got.detail), d->detail));
}

static inline void on_auth(void *arg, const struct store_principal *p, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.principal = *p;
}

static inline void on_me(void *arg, const struct store_me *me, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.me = *me;
}

static inline void on_credit(void *arg, const struct store_credit *c, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.changed = c->balance_micros;
}

static inline void on_create(void *arg, const struct store_create *c, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.create = *c;
}

static inline void on_runs(void *arg, const struct store_runs *r, const struct err *e)
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
	assert_true(text_fmt(got.output, sizeof(got.output), "%.*s", (int)got.run.output_len,
			got.run.output ? (const char *)got.run.output : ""));
	assert_true(text_fmt(got.prompt, sizeof(got.prompt), "%.*s", (int)got.run.prompt_len, got.run.prompt));
	assert_true(text_copy(got.request, sizeof(got.request), got.run.request_json));
	assert_true(text_fmt(got.text, sizeof(got.text), "%s %s|%s=%s|%s", got.run.error_code, got.run.error_message,
			got.run.metadata_count ? got.run.metadata[0].key : "",
			got.run.metadata_count ? got.run.metadata[0].value : "", got.run.file_count ? got.run.files[0].path : ""));
}

static inline void on_fence(void *arg, const struct store_fence *f, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.fence = *f;
}

static inline void on_cancel(void *arg, const struct store_cancel *c, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.cancel = *c;
}

static inline void on_blob(void *arg, const struct store_blob *b, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.blob = *b;
	assert_true(b->len <= sizeof(got.bytes));
	if (b->len)
		memcpy(got.bytes, b->bytes, b->len);
}

static inline void on_next(void *arg, const struct store_next *n, const struct err *e)
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

static inline void on_events(void *arg, const struct store_events *ev, const struct err *e)
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

static inline void on_models(void *arg, const struct store_models *m, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.count = m->count;
	if (m->count)
		got.model = m->models[0];
}

static inline void on_enrol(void *arg, const struct store_enrol *r, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.changed = r->result;
	assert_true(text_copy(got.id, sizeof(got.id), r->node_id));
}

static inline void on_nodes(void *arg, const struct store_nodes *n, const struct err *e)
{
	(void)arg;
	if (!note(e))
		return;
	got.count = n->count;
	if (n->count)
		got.node = n->nodes[0];
}

static inline void on_receipt(void *arg, const struct store_receipt *r, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.receipt = *r;
}

static inline void on_health(void *arg, const struct store_health *h, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.health = *h;
}

static inline void on_swept(void *arg, const struct store_swept *r, const struct err *e)
{
	(void)arg;
	if (note(e))
		got.changed = r->changed;
}

static inline void hint_queued(void *arg, uint32_t memory_mib, uint32_t vcpus, bool emulated, uint32_t count)
{
	(void)arg;
	(void)memory_mib;
	(void)vcpus;
	(void)emulated;
	t.queued_hints += (int)count;
}

static inline void hint_node(void *arg, const char *node_id)
{
	(void)arg;
	(void)node_id;
	t.node_hints++;
}

/* ---- set-up
 * ----------------------------------------------------------------------------------------------------------------------- */

static inline void make_catalog(void)
{
	struct model_spec spec = { .id = "scripted/auto" };
	const struct store_price_model price = { 50000, -1, 400000, 0 };
	struct err e;

	CALL(store_provider_put(
			t.store, "scripted", "http://127.0.0.1:1/v1", true, (const uint8_t *)"sealed", 6, on_done, NULL, &e));
	CALL(store_model_put(t.store, &spec, true, on_done, NULL, &e));
	assert_int_equal(got.done.result, STORE_DONE);
	CALL(store_price_model_put(t.store, spec.id, &price, on_done, NULL, &e));
}

static inline void make_org(char id[ID_MAX], int64_t credit)
{
	struct store_org_change change = {
		.disabled = -1, .allow_emulated = 1, .unlimited = 0, .default_cost_micros = -1, .max_queued = -1, .max_running = -1
	};
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

static inline void make_node(char id[ID_MAX])
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

static inline void open_store(void)
{
	const struct store_options opt = { .conninfo = conninfo, .lease_ms = 60000 };
	const struct store_hooks hooks = { hint_queued, hint_node, NULL };
	struct err e;

	assert_ok(store_open(t.base, &opt, &t.store, &e));
	store_set_hooks(t.store, &hooks);
}

static inline int set_up(void **state)
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

static inline int tear_down(void **state)
{
	(void)state;
	store_close(t.store);
	event_base_free(t.base);
	/* Nothing of one test is left for the next. */
	pg_do("flow", "TRUNCATE queue; UPDATE nodes SET state = 'active'");
	return 0;
}

/* ---- steps
 * -------------------------------------------------------------------------------------------------------------------------- */

static inline struct store_run_new new_run(void)
{
	struct store_run_new r = {
		.org_id = t.org,
		.key_id = "key_1",
		.member_id = "",
		.request_json = "{\"prompt\":\"hi\"}",
		.prompt = "say \"hi\"\n\xc3\xa4",
		.prompt_len = 11,
		.model = "scripted/auto",
		.cap_micros = 40000,
		.timeout_s = 120,
		.max_model_calls = 100,
		.memory_mib = 512,
		.vcpus = 1,
		.size = "standard",
		.shell = true,
		.allow_emulated = true,
		.price = { .run_fee = 7,
				.compute = 200000,
				.input = 1,
				.cached_input = 2,
				.output = 3,
				.model_percent = 4,
				.web_request = 5,
				.web_search = 6 },
	};

	return r;
}

static inline struct link_next ask(void)
{
	struct link_next n = { .epoch = 1,
		.free_memory_mib = 8192,
		.free_vcpus = 16,
		.free_slots = 16,
		.total_memory_mib = 8192,
		.total_vcpus = 16,
		.total_slots = 16,
		.isolation = "emulated" };

	return n;
}

static inline void create_run(void)
{
	struct store_run_new r = new_run();
	struct err e;

	CALL(store_run_create(t.store, &r, on_create, NULL, &e));
	assert_int_equal(got.create.result, STORE_CREATED);
}

static inline void send_events(
		const char *run, const uint8_t token[TOKEN_LEN], uint64_t first, const enum event_type *types, uint32_t n)
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

static inline bool is_settled(void *arg)
{
	(void)arg;
	return strcmp(pg_do("flow", "SELECT count(*) FROM run_live"), "0") == 0;
}

/* Starts Postgres and migrates. 0, or the exit status. */
static inline int store_test_begin(void)
{
	int applied = 0;
	struct err e;

	log_init("test", LOG_LEVEL_ERROR, false);
	if (!pg_cluster_start()) {
		fprintf(stderr, "no Postgres 15 here\n");
		return 77;
	}
	pg_do("postgres", "CREATE DATABASE flow");
	pg_conninfo("flow", conninfo);
	if (store_migrate(conninfo, &applied, &e) != 0 || applied != (int)migration_count ||
			store_migrate(conninfo, &applied, &e) != 0 || applied != 0) {
		fprintf(stderr, "migrate: %s\n", e.text);
		return 1;
	}
	return 0;
}

#endif
