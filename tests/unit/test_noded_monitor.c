/* QEMU's monitor as channel speaks to it: up, a snapshot made, a VM that goes on from one, and everything that is not believed. */
/* link: noded_core */
#include "unit.h"

#include "channel/control.h"
#include "common/text.h"

struct monitor {
	char sent[256];
	unsigned int up, events, known, opened;
	bool refused;
	const char *asked;
	char event[64];
	int fd;
};

static void monitor_send(void *arg, const void *line, size_t n)
{
	struct monitor *m = arg;

	assert_true(text_fmt(m->sent, sizeof(m->sent), "%.*s", (int)n, (const char *)line));
}

static void monitor_up(void *arg)
{
	((struct monitor *)arg)->up++;
}

static void monitor_event(void *arg, const char *name)
{
	struct monitor *m = arg;

	m->events++;
	assert_true(text_copy(m->event, sizeof(m->event), name));
}

static void monitor_known(void *arg)
{
	((struct monitor *)arg)->known++;
}

static void monitor_open(void *arg)
{
	((struct monitor *)arg)->opened++;
}

static void monitor_snapshot(void *arg, const char *why)
{
	((struct monitor *)arg)->refused = why != NULL;
}

static void monitor_wait(void *arg, const char *what)
{
	((struct monitor *)arg)->asked = what;
}

static int monitor_send_fd(void *arg, const void *bytes, size_t n, int fd, struct err *e)
{
	(void)e;
	monitor_send(arg, bytes, n);
	((struct monitor *)arg)->fd = fd;
	return 0;
}

static struct control *monitor_of(struct monitor *m, enum vmm_start start)
{
	static struct vmm_plan plan;
	struct control_ops ops = { .send = monitor_send,
		.send_fd = monitor_send_fd,
		.on_known = monitor_known,
		.on_up = monitor_up,
		.on_event = monitor_event,
		.on_guest_open = monitor_open,
		.on_snapshot = monitor_snapshot,
		.on_wait = monitor_wait,
		.arg = m };
	struct control *q;
	struct err e;

	plan = (struct vmm_plan){
		.kind = VMM_QEMU, .start = (uint8_t)start, .ram_fd = -1, .state_fd = start == VMM_CLONE ? 10 : -1
	};
	memset(m, 0, sizeof(*m));
	q = control_new(&plan, &ops);
	assert_non_null(q);
	assert_int_equal(control_start(q, &e), 0);
	return q;
}

static struct control *monitor(struct monitor *m)
{
	return monitor_of(m, VMM_COLD);
}

/* The monitor says `text`; what it is told then holds `want`, when that is not NULL, and nothing else is said. */
static void exchange(struct control *q, struct monitor *m, const char *text, const char *want)
{
	struct err e;

	memset(m->sent, 0, sizeof(m->sent));
	assert_int_equal(control_feed(q, text, strlen(text), &e), 0);
	if (want)
		assert_non_null(strstr(m->sent, want));
	else
		assert_string_equal(m->sent, "");
}

#define MOVED(status) "{\"event\":\"MIGRATION\",\"data\":{\"status\":\"" status "\"}}\n"

/* A golden VM is up like another, and makes its snapshot when it is asked to; the event may come before the answer. */
static void qmp_makes_a_snapshot(void **state)
{
	static const int fd = 77;
	struct monitor m;

	(void)state;
	for (int early = 0; early < 3; early++) {
		struct control *q = monitor_of(&m, VMM_GOLDEN);

		exchange(q, &m, "{\"QMP\":{}}\n", "qmp_capabilities");
		exchange(q, &m, "{\"return\":{},\"id\":1}\n", NULL);
		assert_int_equal(m.up, 1);
		control_snapshot(q, &fd, 1);
		assert_non_null(strstr(m.sent, "\"stop\""));
		exchange(q, &m, "{\"event\":\"STOP\"}\n{\"return\":{},\"id\":7}\n", "x-ignore-shared");
		exchange(q, &m, "{\"return\":{},\"id\":8}\n", "getfd");
		assert_int_equal(m.fd, fd);
		exchange(q, &m, "{\"return\":{},\"id\":9}\n", "\"fd:state\"");
		exchange(q, &m, MOVED("setup") MOVED("active"), NULL);
		m.refused = true;
		if (early == 0)
			exchange(q, &m, "{\"return\":{},\"id\":10}\n" MOVED("completed"), NULL);
		else if (early == 1)
			exchange(q, &m, MOVED("completed") "{\"return\":{},\"id\":10}\n", NULL);
		if (early < 2) {
			assert_false(m.refused);
		} else {
			m.refused = false;
			exchange(q, &m, "{\"return\":{},\"id\":10}\n" MOVED("failed"), NULL);
			assert_true(m.refused);
		}
		control_free(q);
	}
}

/* A clone is up when it goes on, not before; a snapshot that does not load is the end of it. */
static void qmp_goes_on_from_a_snapshot(void **state)
{
	struct monitor m;
	struct err e;

	(void)state;
	for (int fails = 0; fails < 2; fails++) {
		struct control *q = monitor_of(&m, VMM_CLONE);

		exchange(q, &m, "{\"QMP\":{}}\n", "qmp_capabilities");
		exchange(q, &m, "{\"return\":{},\"id\":1}\n", "x-ignore-shared");
		exchange(q, &m, "{\"return\":{},\"id\":2}\n", "\"fd:10\"");
		if (fails) {
			assert_int_equal(control_feed(q, MOVED("failed"), strlen(MOVED("failed")), &e), -1);
		} else {
			exchange(q, &m, "{\"return\":{},\"id\":3}\n", NULL);
			assert_int_equal(m.up, 0);
			exchange(q, &m, MOVED("completed"), "\"cont\"");
			assert_int_equal(m.up, 0);
			exchange(q, &m, "{\"event\":\"RESUME\"}\n{\"return\":{},\"id\":5}\n", NULL);
			assert_int_equal(m.up, 1);
		}
		control_free(q);
	}
	{
		const int fd = 77;
		struct control *q = monitor_of(&m, VMM_GOLDEN);

		control_snapshot(q, &fd, 1); /* before it runs */
		assert_true(m.refused);
		control_free(q);
	}
}

static void qmp_talk(void **state)
{
	static const char greeting[] =
			"{\"QMP\":{\"version\":{\"qemu\":{\"micro\":22,\"minor\":2,\"major\":7}},\"capabilities\":[\"oob\"]}}\r\n";
	static const char rest[] = "{\"return\":{},\"id\":1}\r\n{\"timestamp\":{\"seconds\":1,\"microseconds\":2},\"event\":\"RTC_"
				   "CHANGE\",\"data\":{}}\r\n"
				   "{\"event\":\"VSERPORT_CHANGE\",\"data\":{\"open\":true,\"id\":\"port\"}}\r\n"
				   "{\"event\":\"VSERPORT_CHANGE\",\"data\":{\"open\":false,\"id\":\"port\"}}\r\n"
				   "{\"event\":\"VSERPORT_CHANGE\",\"data\":{\"open\":true,\"id\":\"port\"}}\r\n"
				   "{\"event\":\"SHUTDOWN\",\"data\":{\"guest\":true}}\r\n";
	struct monitor m;
	struct control *q = monitor(&m);
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(greeting) - 1; i++)
		assert_int_equal(control_feed(q, greeting + i, 1, &e), 0);
	assert_non_null(strstr(m.sent, "qmp_capabilities"));
	assert_int_equal(m.up, 0);
	assert_int_equal(control_feed(q, rest, sizeof(rest) - 1, &e), 0);
	assert_int_equal(m.up, 1);
	assert_int_equal(m.events, 1);
	assert_string_equal(m.event, "SHUTDOWN");
	assert_int_equal(m.known, 1);
	assert_int_equal(m.opened, 1); /* the first time counts */
	control_free(q);
}

static void qmp_refuses(void **state)
{
	static const char *const bad[] = {
		"{\"event\":\"SHUTDOWN\"}\n",
		"{}\n",
		"[]\n",
		"{\"QMP\":1}\n",
		"nonsense\n",
		"{\"QMP\":{}}\n{\"return\":{},\"id\":2}\n",
		"{\"QMP\":{}}\n{\"error\":{\"class\":\"x\"},\"id\":1}\n",
		"{\"QMP\":{}}\n{\"return\":{},\"id\":1}\n{\"return\":{},\"id\":1}\n",
	};
	static char line[70000];
	struct monitor m;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct control *q = monitor(&m);

		assert_int_equal(control_feed(q, bad[i], strlen(bad[i]), &e), -1);
		control_free(q);
	}
	memset(line, ' ', sizeof(line));
	{
		struct control *q = monitor(&m);

		assert_int_equal(control_feed(q, line, sizeof(line), &e), -1);
		control_free(q);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(qmp_talk),
		cmocka_unit_test(qmp_makes_a_snapshot),
		cmocka_unit_test(qmp_goes_on_from_a_snapshot),
		cmocka_unit_test(qmp_refuses),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
