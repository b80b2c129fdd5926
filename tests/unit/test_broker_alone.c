/* link: noded_broker */
/* sources: tests/unit/broker_rig.c */
/* A broker whose keeper dies, at each step of a run: it goes on, knows the next keeper, and says again what waits for an answer. */
#include "broker_rig.h"

#include "proto/adopt.h"

#include <sys/un.h>

#define VM "vm_0123456789abcdef0123456789abcdef"

static const uint8_t nonce[ADOPT_NONCE_LEN] = "as in a journal";

/* A listening socket without a place in the file system: bound to an abstract name that the kernel picks. */
static int listening(struct sockaddr_un *at, socklen_t *len)
{
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	*at = (struct sockaddr_un){ .sun_family = AF_UNIX };
	*len = sizeof(*at);
	assert_true(fd >= 0);
	assert_int_equal(bind(fd, (const struct sockaddr *)at, sizeof(sa_family_t)), 0);
	assert_int_equal(listen(fd, 4), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)at, len), 0);
	return fd;
}

struct scene {
	struct rig r;
	struct sockaddr_un at;
	socklen_t len;
};

static void identify(struct rig *r)
{
	struct role_identity m = { .vm = VM };
	struct buf b = BUF_INIT(256);

	memcpy(m.nonce, nonce, sizeof(nonce));
	role_identity_encode(&m, &b);
	put(r->keeper, RF_BROKER_IDENTITY, b.data, b.len);
	buf_free(&b);
}

static void begin(struct scene *s, const char *const *answers)
{
	rig_defaults(&s->r);
	s->r.ctl = listening(&s->at, &s->len);
	rig_start(&s->r, answers);
	identify(&s->r);
}

static void end(struct scene *s)
{
	rig_stop(&s->r);
	close(s->r.ctl);
}

static void keeper_dies(struct scene *s)
{
	close(s->r.keeper);
	s->r.keeper = -1;
}

static int dial(const struct scene *s)
{
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	assert_int_equal(connect(fd, (const struct sockaddr *)&s->at, s->len), 0);
	return fd;
}

static void say_adopt(int fd, uint16_t version, const uint8_t *with, int64_t lease_ns)
{
	struct role_adopt m = { .version = version, .lease_deadline_boot_ns = lease_ns };
	struct buf b = BUF_INIT(256);

	memcpy(m.nonce, with, sizeof(m.nonce));
	role_adopt_encode(&m, &b);
	put(fd, RF_BROKER_ADOPT, b.data, b.len);
	buf_free(&b);
}

/* The next keeper comes; what the broker says of itself. */
static struct role_adopted adopt(struct scene *s)
{
	struct role_adopted m;
	struct frame f;
	struct err e;

	s->r.keeper = dial(s);
	say_adopt(s->r.keeper, ADOPT_VERSION, nonce, 0);
	f = from_keeper_side(&s->r, RF_KEEPER_ADOPTED, 0);
	assert_int_equal(role_adopted_decode(f.body, f.n, &m, &e), 0);
	free(f.body);
	assert_string_equal(m.vm, VM);
	assert_memory_equal(m.token, s->r.a.token, TOKEN_LEN);
	return m;
}

static struct role_adopted next_keeper(struct scene *s)
{
	keeper_dies(s);
	return adopt(s);
}

static bool killed(const struct rig *r)
{
	char c = 0;

	return pread(r->kill_fd, &c, 1, 0) == 1 && c == '1';
}

/* A run that loses its keeper at every step ends as it would have, once, with its signature. */
static void test_at_every_step(void **state)
{
	static const char *const answers[] = { HELLO_REPLY, NULL };
	uint8_t probe[GUEST_NONCE_LEN], fence = FENCE_APPLIED, gone[8] = { 12 };
	struct role_adopted m;
	struct scene s;
	char types[4096];

	(void)state;
	begin(&s, answers);
	to_probe(&s.r, probe);
	m = next_keeper(&s);
	assert_int_equal(m.state, ADOPTED_ASSIGNED);
	assert_true(m.boot_ns > 0 && m.lease_deadline_boot_ns > m.boot_ns);
	keeper_dies(&s);
	hello(&s.r, probe); /* START is wanted while nobody is there to ask */
	m = adopt(&s);
	wait_frame(&s.r, RF_KEEPER_TO_LINK, RF_BL_START);
	m = next_keeper(&s); /* its answer was lost */
	assert_int_equal(m.state, ADOPTED_ASSIGNED | ADOPTED_READY | ADOPTED_ASKED);
	wait_frame(&s.r, RF_KEEPER_TO_LINK, RF_BL_START);
	to_link_side(&s.r, RF_LB_STARTED, &fence, 1);
	wait_channel(&s.r, RF_CH_SETUP);
	wait_channel(&s.r, RF_CH_FILES_END);
	keeper_dies(&s);
	ack(&s.r);
	call_model(&s.r, "hello"); /* paid and answered without a keeper */
	reply_is(&s.r, "hello");
	assert_false(killed(&s.r));
	(void)adopt(&s);
	wait_frame(&s.r, RF_KEEPER_TO_LINK, RF_BL_EVENTS);
	put(s.r.channel, RF_CB_RESULT, "done", 4);
	wait_frame(&s.r, RF_KEEPER_DESTROY, 0);
	m = next_keeper(&s); /* the order may be lost: it kills by itself, and says so again */
	assert_true((m.state & ADOPTED_ENDING) != 0 && killed(&s.r));
	wait_frame(&s.r, RF_KEEPER_DESTROY, 0);
	put(s.r.keeper, RF_BROKER_GONE, gone, sizeof(gone));
	wait_frame(&s.r, RF_KEEPER_SIGN_DIGEST, 0);
	(void)next_keeper(&s);
	wait_frame(&s.r, RF_KEEPER_SIGN_DIGEST, 0);
	memset(s.r.key, 0x5a, sizeof(s.r.key));
	put(s.r.keeper, RF_BROKER_SIGNATURE, s.r.key, 64);
	wait_frame(&s.r, RF_KEEPER_TO_LINK, RF_BL_FINISH);
	run_end_free(&s.r.end);
	s.r.ended = false;
	(void)next_keeper(&s);
	wait_frame(&s.r, RF_KEEPER_TO_LINK, RF_BL_FINISH);
	assert_memory_equal(s.r.end.receipt_signature, s.r.key, 64);
	assert_int_equal(s.r.end.output_len, 4);
	put(s.r.keeper, RF_BROKER_GONE, gone, sizeof(gone)); /* a keeper that cannot know says it again */
	to_link_side(&s.r, RF_LB_FINISHED, &fence, 1);
	wait_frame(&s.r, RF_KEEPER_END, 0);
	read_events(&s.r, types, EV_COUNT, NULL, NULL);
	assert_string_equal(types, "microvm.ready worker.started model.call microvm.destroyed");
	end(&s);
}

static void test_not_followed(void **state)
{
	static const uint8_t wrong[ADOPT_NONCE_LEN] = "another journal";
	struct role_adopted m;
	struct scene s;
	struct frame f;
	struct err e;
	char c;
	int fd;

	(void)state;
	begin(&s, NULL);
	to_work(&s.r);
	keeper_dies(&s);
	fd = dial(&s);
	say_adopt(fd, ADOPT_VERSION, wrong, 0);
	assert_true(read(fd, &c, 1) <= 0); /* not a word */
	close(fd);
	fd = dial(&s);
	put(fd, RF_BROKER_LEASE, "12345678", 8);
	assert_true(read(fd, &c, 1) <= 0);
	close(fd);
	fd = dial(&s); /* another version is told which one this is, and decides */
	say_adopt(fd, ADOPT_VERSION + 1, nonce, 0);
	s.r.keeper = fd;
	f = from_keeper_side(&s.r, RF_KEEPER_ADOPTED, 0);
	assert_int_equal(role_adopted_decode(f.body, f.n, &m, &e), 0);
	assert_int_equal(m.version, ADOPT_VERSION);
	free(f.body);
	assert_true(read(fd, &c, 1) <= 0);
	close(fd);
	fd = dial(&s); /* one that died before it spoke */
	close(fd);
	(void)adopt(&s); /* the right one is followed after all of them */
	end(&s);
}

/* The lease goes on to count, and can be renewed only by a keeper. */
static void test_lease_alone(void **state)
{
	struct scene s;
	struct role_adopted m;

	(void)state;
	begin(&s, NULL);
	s.r.lease_ms = 1500;
	to_work(&s.r);
	keeper_dies(&s);
	for (int i = 0; i < WAIT_MS / 10 && !killed(&s.r); i++)
		(void)poll(NULL, 0, 10);
	assert_true(killed(&s.r));
	m = adopt(&s); /* late, but what it cost is known */
	assert_true((m.state & ADOPTED_ENDING) != 0);
	to_the_end(&s.r);
	assert_int_equal(s.r.end.code, ERRCODE_LEASE_EXPIRED);
	end(&s);
}

/* Before it has a run, or when keeper never said who it is, there is nothing to go on with. */
static void test_cannot_go_on(void **state)
{
	struct scene s;
	int status;

	(void)state;
	begin(&s, NULL);
	keeper_dies(&s);
	assert_int_equal(waitpid(s.r.pid, &status, 0), s.r.pid);
	s.r.pid = 0;
	assert_true(killed(&s.r));
	end(&s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_at_every_step),
		cmocka_unit_test(test_not_followed),
		cmocka_unit_test(test_lease_alone),
		cmocka_unit_test(test_cannot_go_on),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
