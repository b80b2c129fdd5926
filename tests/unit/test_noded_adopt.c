/* What a keeper makes of a VM that another one left: the decisions as tables, the messages, and processes that are not its
 * children. */
/* link: noded_core ephproto EPH::event */
#include "unit.h"

#include "common/text.h"
#include "keeper/adopt.h"
#include "keeper/child.h"
#include "proto/adopt.h"

#include <event2/event.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ALIVE                                                                                                                      \
	{                                                                                                                          \
		true, true, true, true                                                                                             \
	}

static struct adopt_seen good(void)
{
	return (struct adopt_seen){ .kind = JOURNAL_RUN,
		.state = JOURNAL_ASKED,
		.same_boot = true,
		.nonce = true,
		.slot = true,
		.socket = true,
		.proc = { ALIVE, ALIVE, ALIVE } };
}

static void verdicts(void **state)
{
	struct adopt_seen s = good();

	(void)state;
	assert_int_equal(adopt_judge(&s), ADOPT_TAKE);
	s.state = JOURNAL_ADMITTED; /* it boots */
	assert_int_equal(adopt_judge(&s), ADOPT_TAKE);
	s = good();
	s.proc[SLOT_VMM].alive = s.proc[SLOT_CHANNEL].alive = false; /* the broker tells how the run ends */
	s.proc[SLOT_VMM].in_group = s.proc[SLOT_VMM].right_uid = false;
	assert_int_equal(adopt_judge(&s), ADOPT_TAKE);
	s.proc[SLOT_BROKER].alive = false; /* ended, or its pid is another's now */
	assert_int_equal(adopt_judge(&s), ADOPT_NO_BROKER);
	s.proc[SLOT_BROKER].named = false;
	assert_int_equal(adopt_judge(&s), ADOPT_NOT_STARTED);
	for (int role = 0; role < SLOT_ROLES; role++) {
		s = good();
		s.proc[role].in_group = false;
		assert_int_equal(adopt_judge(&s), ADOPT_MOVED);
		s = good();
		s.proc[role].right_uid = false;
		assert_int_equal(adopt_judge(&s), ADOPT_MOVED);
	}
	s = good();
	s.slot = false;
	assert_int_equal(adopt_judge(&s), ADOPT_MOVED);
	s = good();
	s.socket = false;
	assert_int_equal(adopt_judge(&s), ADOPT_NO_SOCKET);
	s = good();
	s.nonce = false;
	assert_int_equal(adopt_judge(&s), ADOPT_OLD_JOURNAL);
	s.same_boot = false; /* whatever else it says: the pids are others' */
	assert_int_equal(adopt_judge(&s), ADOPT_OTHER_BOOT);
	s = good();
	s.state = JOURNAL_GONE;
	assert_int_equal(adopt_judge(&s), ADOPT_OVER);
	s = good();
	s.kind = JOURNAL_GOLDEN;
	assert_int_equal(adopt_judge(&s), ADOPT_GOLDEN);
	s.kind = JOURNAL_WARM;
	assert_int_equal(adopt_judge(&s), ADOPT_TAKE);
}

/* Each verdict has words, and a count that says why. */
static void meanings(void **state)
{
	(void)state;
	for (int v = 0; v < ADOPT_VERDICTS; v++) {
		const struct adopt_meaning *m = adopt_meaning((enum adopt_verdict)v);

		assert_true(m->text != NULL && strlen(m->text) > 10);
		assert_true(m->code == ERRCODE_NODE_RESTARTED || (v == ADOPT_NO_BROKER && m->code == ERRCODE_BROKER_LOST));
		assert_true(v == ADOPT_TAKE ? m->count == STATS_ADOPTED : m->count != STATS_ADOPTED);
	}
}

static void what_a_stop_leaves(void **state)
{
	static const struct adopt_leave table[] = {
		{ .broker_alive = true },
		{ .broker_alive = true, .ending = true },     /* its end is on its way out */
		{ .broker_alive = true, .has_inputs = true }, /* only we have its secrets */
		{ .broker_alive = true, .golden = true },
		{ .broker_alive = true, .boots_unasked = true },
		{ .broker_alive = false },
	};

	(void)state;
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
		assert_int_equal(adopt_may_leave(&table[i]), i == 0);
}

static void messages(void **state)
{
	struct role_adopted in = { .version = ADOPT_VERSION, .state = ADOPTED_ALL, .boot_ns = 5, .lease_deadline_boot_ns = 6 }, out;
	struct role_adopt ask = { .version = ADOPT_VERSION, .lease_deadline_boot_ns = 7 }, asked;
	struct buf b = BUF_INIT(1024);
	struct err e;

	(void)state;
	id_make("vm", in.vm);
	memset(in.token, 9, sizeof(in.token));
	role_adopted_encode(&in, &b);
	assert_int_equal(role_adopted_decode(b.data, b.len, &out, &e), 0);
	assert_string_equal(out.vm, in.vm);
	assert_memory_equal(out.token, in.token, TOKEN_LEN);
	assert_true(out.state == ADOPTED_ALL && out.boot_ns == 5 && out.lease_deadline_boot_ns == 6);
	for (size_t n = 2; n < b.len; n++)
		assert_int_equal(role_adopted_decode(b.data, n, &out, &e), -1);
	b.data[0]++; /* of another version nothing else is read */
	assert_int_equal(role_adopted_decode(b.data, 2, &out, &e), 0);
	assert_int_equal(out.version, ADOPT_VERSION + 1);
	buf_reset(&b);
	in.state = ADOPTED_ALL + 1;
	role_adopted_encode(&in, &b);
	assert_int_equal(role_adopted_decode(b.data, b.len, &out, &e), -1);
	buf_reset(&b);
	role_adopt_encode(&ask, &b);
	assert_int_equal(role_adopt_decode(b.data, b.len, &asked, &e), 0);
	assert_true(asked.version == ADOPT_VERSION && asked.lease_deadline_boot_ns == 7);
	ask.lease_deadline_boot_ns = -1;
	buf_reset(&b);
	role_adopt_encode(&ask, &b);
	assert_int_equal(role_adopt_decode(b.data, b.len, &asked, &e), -1);
	buf_free(&b);
}

static void nobody(void *arg, const struct journal *j)
{
	(void)j;
	++*(int *)arg;
}

/* Killed while it wrote an entry: the half of it goes, and nothing else. */
static void half_an_entry(void **state)
{
	static const char *const names[] = { ".vm_0123456789abcdef0123456789abcdef.tmp", ".vm_0123456789abcdef0123456789abcdef",
		".other.tmp", "vm_0123456789abcdef0123456789abcdef.tmp" };
	char dir[] = "/tmp/eph-journal-XXXXXX", path[128];
	int entries = 0;
	struct err e;

	(void)state;
	assert_non_null(mkdtemp(dir));
	for (size_t i = 0; i < COUNT(names); i++) {
		assert_true(text_fmt(path, sizeof(path), "%s/%s", dir, names[i]));
		assert_int_equal(close(open(path, O_WRONLY | O_CREAT | O_EXCL, 0600)), 0);
	}
	assert_int_equal(journal_each(dir, nobody, &entries, &e), 0);
	assert_int_equal(entries, 0);
	for (size_t i = 0; i < COUNT(names); i++) {
		assert_true(text_fmt(path, sizeof(path), "%s/%s", dir, names[i]));
		assert_int_equal(unlink(path), i == 0 ? -1 : 0);
	}
	assert_int_equal(rmdir(dir), 0);
}

/* --- processes of another parent ---------------------------------------------------------------------------------------------- */

struct seen_end {
	struct event_base *base;
	int ends, status;
};

static void on_exit_seen(void *arg, int status)
{
	struct seen_end *s = arg;

	s->ends++;
	s->status = status;
	event_base_loopbreak(s->base);
}

/* A grandchild whose parent has gone: pid, with a pipe that ends when it does. */
static pid_t orphan(void)
{
	int pipes[2];
	pid_t first, pid = 0;

	assert_int_equal(pipe(pipes), 0);
	first = fork();
	assert_true(first >= 0);
	if (first == 0) {
		pid = fork();
		if (pid == 0) {
			pause();
			_exit(0);
		}
		_exit(write(pipes[1], &pid, sizeof(pid)) == sizeof(pid) ? 0 : 1);
	}
	assert_int_equal(read(pipes[0], &pid, sizeof(pid)), sizeof(pid));
	waitpid(first, NULL, 0);
	close(pipes[0]);
	close(pipes[1]);
	return pid;
}

static void a_process_of_another(void **state)
{
	const struct timeval limit = { .tv_sec = 10 };
	struct seen_end s = { .base = event_base_new() };
	const struct child_ops ops = { .on_exit = on_exit_seen, .arg = &s };
	pid_t pid = orphan();
	uint64_t start = journal_start_time(pid);
	struct child *c;
	struct err e;
	char text[64];

	(void)state;
	assert_true(start > 0);
	assert_int_equal(child_adopt(s.base, pid, start + 1, &ops, &c, &e), -1); /* the number is another's now */
	assert_int_equal(e.code, ERR_NOT_FOUND);
	assert_int_equal(child_adopt(s.base, 0, 0, &ops, &c, &e), -1);
	assert_int_equal(child_adopt(s.base, pid, start, &ops, &c, &e), 0);
	child_leave(c);
	assert_true(journal_start_time(pid) == start); /* left, it lives */
	assert_int_equal(child_adopt(s.base, pid, start, &ops, &c, &e), 0);
	child_kill(c);
	event_base_loopexit(s.base, &limit);
	event_base_dispatch(s.base);
	assert_int_equal(s.ends, 1);
	assert_int_equal(s.status, CHILD_STATUS_UNKNOWN);
	child_status_text(s.status, text);
	assert_string_equal(text, "exit status unknown to this noded");
	assert_int_equal(child_adopt(s.base, pid, start, &ops, &c, &e), -1); /* gone, or a zombie */
	event_base_free(s.base);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(verdicts),
		cmocka_unit_test(meanings),
		cmocka_unit_test(what_a_stop_leaves),
		cmocka_unit_test(messages),
		cmocka_unit_test(half_an_entry),
		cmocka_unit_test(a_process_of_another),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
