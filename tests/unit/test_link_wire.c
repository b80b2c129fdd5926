/* link: noded_link EPH::crypto */
/* sources: tests/unit/link_rig.c controld/pki.c controld/pki_x509.c controld/files.c */
/*
 * The link process for real, over TLS: this test plays keeper (and the brokers behind it) on its socketpair and controld on an nng
 * socket. Link runs in a process of its own by exec of this program, because nng does not survive a fork.
 */
#include "link_rig.h"

static void test_enrol(void **state)
{
	struct link_enrol_reply reply = { .node_id = NODE };
	struct buf b = BUF_INIT(4096), proof = BUF_INIT(256);
	struct link_enrol m;
	struct server_ctx *c;
	struct frame f;
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, false);
	send_capacity(&r, 4);
	c = want(&r.server, LINK_ENROL);
	assert_int_equal(link_enrol_decode(c->req.body, c->req.body_len, &m, &e), 0);
	assert_memory_equal(m.sign_key, r.sign_secret + 32, 32);
	assert_string_equal(m.name, "host-1");
	wire_put_raw(&proof, "ephemeral/enrol/1", 17);
	wire_put_raw(&proof, r.server.challenge, 32);
	wire_put_raw(&proof, m.secret, strlen(m.secret));
	assert_int_equal(crypto_sign_verify_detached(m.proof, proof.data, proof.len, m.sign_key), 0);
	link_enrol_reply_encode(&reply, &b);
	answer(c, LINK_OK, b.data, b.len);
	f = get(&r, RF_KEEPER_ENROLLED, 0, "enrolled");
	assert_int_equal(f.n, b.len);
	assert_memory_equal(f.body, b.data, b.len);
	free(f.body);
	(void)want(&r.server, LINK_NEXT); /* signed as that node: checked where it is received */
	buf_free(&b);
	buf_free(&proof);
	rig_stop(&r);
}

static void test_poll_lease_and_assignment(void **state)
{
	struct assignment a = { .run_id = RUN,
		.attempt = 1,
		.next_seq = 3,
		.memory_mib = 512,
		.vcpus = 1,
		.prompt = (char *)(uintptr_t) "x",
		.cap_micros = 1000,
		.timeout_s = 10,
		.max_model_calls = 3,
		.model = { .id = "a/b",
				.upstream = "b",
				.base_url = "http://x/v1",
				.limit_param = LIMIT_MAX_TOKENS,
				.max_output_tokens = 10,
				.call_timeout_ms = 1000 } };
	struct buf enc = BUF_INIT(ASSIGNMENT_MAX);
	struct link_assign as = { .sealed = (uint8_t *)(uintptr_t) "sealed", .sealed_len = 6 };
	struct link_next_reply reply = { .lease_ms = 12000, .assigns = &as, .assign_count = 1 };
	struct server_ctx *c;
	struct wire_reader rd;
	struct link_next m;
	struct frame f;
	struct rig r;
	int64_t before, deadline;
	size_t n;

	(void)state;
	rig_start(&r, true);
	before = clock_boot_ns();
	send_capacity(&r, 4);
	c = want(&r.server, LINK_NEXT);
	next_of(c, &m);
	assert_int_equal(m.held_count, 0);
	assert_int_equal(m.free_slots, 4);
	assert_int_equal(m.epoch, 42);
	assert_int_equal(m.wait_ms, 0); /* the first one is for the lease */
	link_next_free(&m);
	memcpy(a.token, r.token, TOKEN_LEN);
	assignment_encode(&a, &enc);
	as.assignment = enc.data;
	as.assignment_len = (uint32_t)enc.len;
	answer_next(c, &reply);
	f = get(&r, RF_KEEPER_LEASE, 0, "lease");
	wire_read_init(&rd, f.body, f.n);
	deadline = wire_i64(&rd);
	assert_true(deadline >= before + INT64_C(11000000000));
	assert_true(deadline <= clock_boot_ns() + INT64_C(11000000000)); /* from the sending, less a twelfth */
	free(f.body);
	f = get(&r, RF_KEEPER_ASSIGN, 0, "assign");
	wire_read_init(&rd, f.body, f.n);
	assert_memory_equal(wire_bytes(&rd, ASSIGNMENT_MAX, &n), enc.data, enc.len);
	free(f.body);
	/* It is held from now on, and its share is not free any more, although keeper has not said so yet. */
	c = want(&r.server, LINK_NEXT);
	next_of(c, &m);
	assert_int_equal(m.wait_ms, 2000);
	assert_int_equal(m.held_count, 1);
	assert_memory_equal(m.held[0].token, r.token, TOKEN_LEN);
	assert_int_equal(m.free_slots, 3);
	assert_int_equal(m.free_memory_mib, 3 * 512);
	link_next_free(&m);
	/* Sent again: it is not handed over twice. */
	answer_next(c, &reply);
	/* More room: a second poll says so while the first is parked. */
	c = want(&r.server, LINK_NEXT);
	send_vm(&r, VM_STARTING);
	send_capacity(&r, 5);
	while (server_turn(&r.server, 1000) && !(r.server.ctx[0].waiting && r.server.ctx[1].waiting))
		;
	n = 0;
	for (int i = 0; i < CONTEXTS; i++)
		n += r.server.ctx[i].waiting && r.server.ctx[i].req.type == LINK_NEXT;
	assert_int_equal(n, 2);
	buf_free(&enc);
	rig_stop(&r);
}

static void test_run(void **state)
{
	struct server_ctx *c;
	struct link_finish fin;
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, true);
	send_capacity(&r, 4);
	send_vm(&r, VM_STARTING);
	append_event(&r);
	tell_events(&r);
	assert_false(waits(&r.server, LINK_EVENTS)); /* not before START is granted */
	from_broker(&r, RF_BL_START, NULL, 0);
	c = want(&r.server, LINK_START);
	assert_false(waits(&r.server, LINK_EVENTS));
	answer_fence(c, FENCE_APPLIED, 0);
	get_broker_fence(&r, RF_LB_STARTED, FENCE_APPLIED, "started");
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 3, 1);
	for (int i = 0; i < 300; i++)
		append_event(&r);
	tell_events(&r);
	assert_false(waits(&r.server, LINK_FINISH));
	answer_fence(c, FENCE_APPLIED, 4);
	free(get(&r, RF_KEEPER_TO_BROKER, RF_LB_ACKED, "acked").body);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 4, LINK_EVENTS_MAX);
	send_finish(&r, 303);
	answer_fence(c, FENCE_GAP, 3); /* controld lost what it had: all again */
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 3, LINK_EVENTS_MAX);
	answer_fence(c, FENCE_DUPLICATE, 259);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 259, 45);
	answer(c, LINK_BUSY, "\0\0\0\0", 4);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 259, 45);
	answer_fence(c, FENCE_APPLIED, 304);
	c = want(&r.server, LINK_FINISH);
	assert_int_equal(link_finish_decode(c->req.body, c->req.body_len, &fin, &e), 0);
	assert_int_equal(fin.end.last_seq, 303);
	link_finish_free(&fin);
	answer_fence(c, FENCE_APPLIED, 0);
	get_broker_fence(&r, RF_LB_FINISHED, FENCE_APPLIED, "finished");
	get_token(&r, RF_KEEPER_DONE, "done");
	rig_stop(&r);
}

static void test_stale(void **state)
{
	struct link_next m;
	struct rig r;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_STALE, 0);
	get_token(&r, RF_KEEPER_KILL, "kill");
	get_token(&r, RF_KEEPER_DONE, "done");
	/* It is not held any more. */
	for (int i = 0; i < 3; i++) {
		struct link_next_reply reply = { .lease_ms = 0 };
		struct server_ctx *c = want(&r.server, LINK_NEXT);

		next_of(c, &m);
		link_next_free(&m);
		answer_next(c, &reply);
		if (m.held_count == 0)
			break;
	}
	rig_stop(&r);
}

static void test_refusal_and_commands(void **state)
{
	struct link_command commands[] = { { .id = 7, .kind = LINK_CMD_CANCEL, .run_id = RUN },
		{ .id = 9, .kind = LINK_CMD_DRAIN, .run_id = RUN } };
	struct link_next_reply reply = { .lease_ms = 1000, .commands = commands, .command_count = 2 };
	struct buf b = BUF_INIT(256);
	struct server_ctx *c;
	struct link_refuse ref;
	struct link_next m;
	struct frame f;
	struct rig r;
	struct err e;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	memcpy(commands[0].token, r.token, TOKEN_LEN);
	answer_next(want(&r.server, LINK_NEXT), &reply);
	f = get(&r, RF_KEEPER_TO_BROKER, RF_LB_CANCEL, "cancel");
	free(f.body);
	f = get(&r, RF_KEEPER_DRAIN, 0, "drain");
	assert_int_equal(f.body[0], 1);
	free(f.body);
	f = get(&r, RF_KEEPER_COMMAND, 0, "command");
	assert_int_equal(f.body[0], 9);
	free(f.body);
	/* Keeper may die before it has read them: controld may not forget them yet. */
	c = want(&r.server, LINK_NEXT);
	next_of(c, &m);
	assert_int_equal(m.last_command, 0);
	link_next_free(&m);
	reply.command_count = 0;
	answer_next(c, &reply);
	put(&r, RF_LINK_OBEYED, (const uint8_t[8]){ 7 }, 8);
	put(&r, RF_LINK_OBEYED, (const uint8_t[8]){ 9 }, 8);
	for (;;) {
		c = want(&r.server, LINK_NEXT);
		next_of(c, &m);
		if (m.last_command == 9)
			break;
		answer_next(c, &reply);
		link_next_free(&m);
	}
	assert_int_equal(m.last_command, 9);
	assert_true(m.draining);
	link_next_free(&m);
	/* Another run that keeper cannot take. */
	memset(r.token, 0xcd, TOKEN_LEN);
	wire_put_str(&b, RUN);
	wire_put_raw(&b, r.token, TOKEN_LEN);
	wire_put_bool(&b, false);
	wire_put_u32(&b, ERRCODE_NO_CAPACITY);
	wire_put_str(&b, "no room");
	put(&r, RF_LINK_REFUSED, b.data, b.len);
	buf_free(&b);
	c = want(&r.server, LINK_REFUSE);
	assert_int_equal(link_refuse_decode(c->req.body, c->req.body_len, &ref, &e), 0);
	assert_false(ref.failed);
	assert_string_equal(ref.reason, "no room");
	answer_fence(c, FENCE_APPLIED, 0);
	get_token(&r, RF_KEEPER_DONE, "done");
	rig_stop(&r);
}

/* controld restarts in the middle: another pipe, another challenge, and what was asked is asked again. */
static void test_controld_restarts(void **state)
{
	struct rig r;
	int challenges;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	(void)want(&r.server, LINK_EVENTS); /* not answered */
	challenges = r.server.challenges;
	server_close(&r.server);
	server_open(&r.server);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_DUPLICATE, 4);
	assert_true(r.server.challenges > challenges);
	free(get(&r, RF_KEEPER_TO_BROKER, RF_LB_ACKED, "acked").body);
	(void)want(&r.server, LINK_NEXT);
	rig_stop(&r);
}

static void test_new_challenge(void **state)
{
	struct rig r;
	int challenges;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	challenges = r.server.challenges;
	answer(want(&r.server, LINK_EVENTS), LINK_UNAUTHENTIC, "\0\0\0\0", 4);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_APPLIED, 4);
	assert_int_equal(r.server.challenges, challenges + 1);
	rig_stop(&r);
}

/* The broker died: keeper ends the run, its events are in the spool. */
static void test_keeper_ends_a_run(void **state)
{
	struct run_end end = { .code = ERRCODE_BROKER_LOST, .isolation = "kvm", .last_seq = 5 };
	struct buf b = BUF_INIT(65536);
	struct server_ctx *c;
	struct rig r;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	answer_fence(want(&r.server, LINK_EVENTS), FENCE_APPLIED, 4);
	append_event(&r);
	append_event(&r); /* the broker did not live to tell */
	wire_put_raw(&b, r.token, TOKEN_LEN);
	run_end_encode(&end, &b);
	put(&r, RF_LINK_ENDED, b.data, b.len);
	buf_free(&b);
	c = want(&r.server, LINK_EVENTS);
	events_are(c, 4, 2);
	answer_fence(c, FENCE_APPLIED, 6);
	answer_fence(want(&r.server, LINK_FINISH), FENCE_APPLIED, 0);
	get_token(&r, RF_KEEPER_DONE, "done");
	rig_stop(&r);
}

static void test_revoked(void **state)
{
	struct rig r;

	(void)state;
	rig_start(&r, true);
	to_started(&r);
	answer(want(&r.server, LINK_NEXT), LINK_REVOKED, "\0\0\0\0", 4);
	get_token(&r, RF_KEEPER_KILL, "kill");
	rig_stop(&r);
}

/* The first controld is not there: the second one serves. */
static void test_second_controld(void **state)
{
	struct rig r;

	(void)state;
	rig_keys(&r);
	server_open(&r.server);
	assert_true(text_fmt(r.address, sizeof(r.address), "tls+tcp://127.0.0.1:1,tls+tcp://127.0.0.1:%d", r.server.port));
	rig_link(&r, true);
	to_started(&r);
	rig_stop(&r);
}

#ifdef EPHEMERAL_TEST_CLOCK
static void set_clock(const char *path, int boot_ms)
{
	char fresh[128];
	FILE *f;

	assert_true(text_fmt(fresh, sizeof(fresh), "%s.new", path));
	f = fopen(fresh, "w");
	assert_non_null(f);
	assert_true(fprintf(f, "0 %d\n", boot_ms) > 0);
	assert_int_equal(fclose(f), 0);
	assert_int_equal(rename(fresh, path), 0);
}
#endif

/* Whoever takes the connection and says nothing stops nng's dialer for good: after 30 s another socket dials. */
static void test_stopped_dialer(void **state)
{
#ifdef EPHEMERAL_TEST_CLOCK
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int hole = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), taken, one = 1;
	socklen_t len = sizeof(a);
	char clock[128];
	struct rig r;

	(void)state;
	assert_true(text_fmt(clock, sizeof(clock), "%s/clock", tls_dir));
	set_clock(clock, 0);
	assert_int_equal(setenv("EPHEMERAL_CLOCK_FILE", clock, 1), 0);
	rig_keys(&r);
	assert_int_equal(setsockopt(hole, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), 0);
	assert_int_equal(bind(hole, (struct sockaddr *)&a, sizeof(a)), 0);
	assert_int_equal(listen(hole, 4), 0);
	assert_int_equal(getsockname(hole, (struct sockaddr *)&a, &len), 0);
	r.server.port = ntohs(a.sin_port);
	rig_link(&r, true);
	send_capacity(&r, 4);
	taken = accept(hole, NULL, NULL);
	assert_true(taken >= 0);
	close(hole);
	server_open(&r.server);
	assert_false(waits(&r.server, LINK_NEXT)); /* it hangs in its handshake */
	set_clock(clock, 31000);
	(void)want(&r.server, LINK_NEXT);
	close(taken);
	rig_stop(&r);
	assert_int_equal(unsetenv("EPHEMERAL_CLOCK_FILE"), 0);
	(void)remove(clock);
#else
	(void)state;
	skip(); /* the clock of this build cannot be moved */
#endif
}

static int setup(void **state)
{
	char template[] = "/tmp/eph-link-XXXXXX";
	struct pki_made made;
	struct err e;

	(void)state;
	if (mkdtemp(template) == NULL || !text_fmt(tls_dir, sizeof(tls_dir), "%s/tls", template))
		return -1;
	if (pki_bootstrap(tls_dir, "", &made, &e) < 0 || pki_load(tls_dir, &pki, &e) < 0) {
		print_error("%s\n", e.text);
		return -1;
	}
	return 0;
}

static int teardown(void **state)
{
	static const char *const files[] = { "ca.pem", "ca.key", "server.pem", "server.key", "root.key", "lock", ".lock", "" };
	char path[128];

	(void)state;
	pki_free(pki);
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		if (text_fmt(path, sizeof(path), "%s/%s", tls_dir, files[i]))
			(void)remove(path);
	*strrchr(tls_dir, '/') = '\0';
	(void)remove(tls_dir);
	return 0;
}

/* nng 1.5.2 drops a message now and then when a pipe closes under it: its loss, not ours. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
	return "leak:libnng.so\n";
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_enrol),
		cmocka_unit_test(test_poll_lease_and_assignment),
		cmocka_unit_test(test_run),
		cmocka_unit_test(test_stale),
		cmocka_unit_test(test_refusal_and_commands),
		cmocka_unit_test(test_controld_restarts),
		cmocka_unit_test(test_new_challenge),
		cmocka_unit_test(test_keeper_ends_a_run),
		cmocka_unit_test(test_revoked),
		cmocka_unit_test(test_second_controld),
		cmocka_unit_test(test_stopped_dialer),
	};

	if (sodium_init() < 0)
		return 1;
	if (argc > 1 && strcmp(argv[1], "--link") == 0) {
		log_init("noded/link", LOG_LEVEL_INFO, false);
		return link_main();
	}
	(void)signal(SIGPIPE, SIG_IGN);
	return cmocka_run_group_tests(tests, setup, teardown);
}
