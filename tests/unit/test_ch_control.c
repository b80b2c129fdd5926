/* link: noded_core */
/* Control of Cloud Hypervisor: what it is told, in which order, and what it may answer. Answers that are cut, giant, of another
 * status, type or state; a configuration that comes back changed; floods and halves of events; the plan that all of it is done by.
 */
#include "unit.h"

#include "channel/ch_compare.h"
#include "channel/ch_events.h"
#include "channel/ch_http.h"
#include "channel/control.h"

#include "common/text.h"
#include "vmm/ch_config.h"

#include <stdio.h>
#include <unistd.h>

#define OK_204 "HTTP/1.1 204 \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n\r\n"
#define PING "{\"build_version\":\"v53.0\",\"version\":\"53.0.0\",\"pid\":7,\"features\":[\"kvm\"]}"

struct played {
	char sent[VMM_PLAN_BODY_MAX + 2048];
	unsigned int up, known, events, snapshots;
	char event[32], why[ERR_TEXT_MAX];
	const char *asked; /* NULL: no answer is awaited */
};

static void on_send(void *arg, const void *bytes, size_t n)
{
	struct played *p = arg;

	assert_true(text_fmt(p->sent, sizeof(p->sent), "%.*s", (int)n, (const char *)bytes));
}

static void on_known(void *arg)
{
	((struct played *)arg)->known++;
}

static void on_up(void *arg)
{
	((struct played *)arg)->up++;
}

static void on_event(void *arg, const char *name)
{
	struct played *p = arg;

	p->events++;
	assert_true(text_copy(p->event, sizeof(p->event), name));
}

static void on_snapshot(void *arg, const char *why)
{
	struct played *p = arg;

	p->snapshots++;
	assert_true(text_copy(p->why, sizeof(p->why), why ? why : ""));
}

static void on_wait(void *arg, const char *what)
{
	((struct played *)arg)->asked = what;
}

static const struct vmm_host host = { .binary = "/opt/ch", .version = "cloud-hypervisor 53.0", .kvm = true };

/* A plan as the driver writes it. */
static void make_plan(struct vmm_plan *plan, enum vmm_start start)
{
	struct vmm_params p = { .start = start, .memory_mib = 512, .vcpus = 2, .golden_dir = "/x" };
	struct buf body = BUF_INIT(VMM_PLAN_BODY_MAX);
	struct err e;

	*plan = (struct vmm_plan){
		.kind = VMM_CLOUD_HYPERVISOR, .start = (uint8_t)start, .ram_fd = -1, .state_fd = -1, .answer_ms = 10
	};
	assert_int_equal(ch_config(&host, &p, &body, &e), 0);
	plan->create = buf_steal(&body, NULL);
	assert_true(text_copy(plan->version, sizeof(plan->version), "v53.0"));
	assert_true(text_copy(plan->snapshot, sizeof(plan->snapshot), "file:///g/snapshot"));
}

static struct control *control(struct played *p, const struct vmm_plan *plan)
{
	struct control_ops ops = {
		.send = on_send,
		.on_known = on_known,
		.on_up = on_up,
		.on_event = on_event,
		.on_snapshot = on_snapshot,
		.on_wait = on_wait,
		.arg = p,
	};
	struct control *c;
	struct err e;

	memset(p, 0, sizeof(*p));
	c = control_new(plan, &ops);
	assert_non_null(c);
	assert_int_equal(control_start(c, &e), 0);
	assert_true(strncmp(p->sent, "GET /api/v1/vmm.ping HTTP/1.1\r\n", 31) == 0);
	return c;
}

static int answer(struct control *c, const char *bytes, size_t n, struct err *e)
{
	return control_feed(c, bytes, n, e);
}

static int answer_with(struct control *c, int status, const char *body, struct err *e)
{
	char *text = NULL;
	int n = asprintf(&text, "HTTP/1.1 %d \r\nServer: x\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
			status, strlen(body), body);
	int rc;

	assert_true(n > 0);
	rc = answer(c, text, (size_t)n, e);
	free(text);
	return rc;
}

static int answer_204(struct control *c, struct err *e)
{
	return answer(c, OK_204, sizeof(OK_204) - 1, e);
}

static int answer_info(struct control *c, const char *state, const char *config, struct err *e)
{
	char *text = NULL;
	int rc;

	assert_true(asprintf(&text, "{\"config\":%s,\"state\":\"%s\",\"memory_actual_size\":1,\"device_tree\":{}}", config, state) >
			0);
	rc = answer_with(c, 200, text, e);
	free(text);
	return rc;
}

static bool told(const struct played *p, const char *what)
{
	return strncmp(p->sent, what, strlen(what)) == 0;
}

static void cold(void **state)
{
	struct vmm_plan plan;
	struct played p;
	struct control *c;
	struct err e;

	(void)state;
	make_plan(&plan, VMM_COLD);
	c = control(&p, &plan);
	assert_string_equal(p.asked, "vmm.ping");
	assert_int_equal(p.known, 0);
	assert_int_equal(answer_with(c, 200, PING, &e), 0);
	assert_int_equal(p.known, 1);
	assert_true(told(&p, "PUT /api/v1/vm.create HTTP/1.1\r\n"));
	assert_non_null(strstr(p.sent, plan.create));
	assert_int_equal(answer_204(c, &e), 0);
	assert_true(told(&p, "GET /api/v1/vm.info HTTP/1.1\r\n"));
	assert_int_equal(answer_info(c, "Created", plan.create, &e), 0);
	assert_true(told(&p, "PUT /api/v1/vm.boot HTTP/1.1\r\n"));
	assert_int_equal(p.up, 0);
	assert_int_equal(answer_204(c, &e), 0);
	assert_int_equal(p.up, 1);
	assert_null(p.asked);
	/* It is asked nothing more, so it has nothing to say. */
	assert_int_equal(answer_204(c, &e), -1);
	control_free(c);
	vmm_plan_free(&plan);
}

static void golden_and_clone(void **state)
{
	struct vmm_plan plan;
	struct played p;
	struct control *c;
	struct err e;

	(void)state;
	make_plan(&plan, VMM_GOLDEN);
	assert_non_null(strstr(plan.create, "\"file\":\"/g/memory\",\"shared\":true"));
	c = control(&p, &plan);
	control_snapshot(c, NULL, 0);
	assert_string_equal(p.why, "the VM does not run");
	assert_int_equal(answer_with(c, 200, PING, &e) | answer_204(c, &e) | answer_info(c, "Created", plan.create, &e) |
					 answer_204(c, &e),
			0);
	assert_int_equal(p.up, 1);
	control_snapshot(c, NULL, 0);
	assert_true(told(&p, "PUT /api/v1/vm.pause "));
	assert_int_equal(answer_204(c, &e), 0);
	assert_true(told(&p, "PUT /api/v1/vm.snapshot "));
	assert_non_null(strstr(p.sent, "{\"destination_url\":\"file:///g/snapshot\"}"));
	assert_int_equal(answer_204(c, &e), 0);
	assert_int_equal(p.snapshots, 2);
	assert_string_equal(p.why, "");
	control_free(c);
	vmm_plan_free(&plan);

	make_plan(&plan, VMM_CLONE);
	assert_non_null(strstr(plan.create, "\"file\":\"/g/memory\",\"shared\":false"));
	c = control(&p, &plan);
	assert_int_equal(answer_with(c, 200, PING, &e), 0);
	assert_true(told(&p, "PUT /api/v1/vm.restore "));
	assert_non_null(strstr(p.sent, "\"source_url\":\"file:///g/"
				       "snapshot\",\"memory_restore_mode\":\"Copy\",\"prefault\":false,\"resume\":true"));
	assert_int_equal(answer_204(c, &e), 0);
	assert_int_equal(answer_info(c, "Running", plan.create, &e), 0);
	assert_int_equal(p.up, 1);
	control_free(c);
	vmm_plan_free(&plan);
}

/* Any cut of the same bytes leads to the same end. */
static void byte_by_byte(void **state)
{
	struct vmm_plan plan;
	struct played p;
	struct control *c;
	struct err e;
	char *text = NULL;

	(void)state;
	make_plan(&plan, VMM_COLD);
	c = control(&p, &plan);
	assert_true(asprintf(&text, "HTTP/1.1 200 OK\r\ncontent-length:\t%zu \r\nX: y\r\n\r\n%s", strlen(PING), PING) > 0);
	for (size_t i = 0; i < strlen(text); i++) {
		assert_int_equal(p.known, 0);
		assert_int_equal(answer(c, text + i, 1, &e), 0);
	}
	assert_int_equal(p.known, 1);
	free(text);
	control_free(c);
	vmm_plan_free(&plan);
}

static void refuses_answers(void **state)
{
	static const struct {
		const char *bytes, *says;
	} bad[] = {
		{ "HTTP/2 200 \r\n\r\n", "begin as HTTP" },
		{ "nonsense\r\n", "begin as HTTP" },
		{ "HTTP/1.1 20 \r\n", "status" },
		{ "HTTP/1.1 2000\r\n", "status" },
		{ "HTTP/1.1 100 \r\n\r\n", "status" },
		{ "HTTP/1.1 999 \r\n\r\n", "status" },
		{ "HTTP/1.1 200 \n", "carriage return" },
		{ "HTTP/1.1 200 \r\nA\x01: b\r\n", "control character" },
		{ "HTTP/1.1 200 \r\n: b\r\n", "header" },
		{ "HTTP/1.1 200 \r\nno header\r\n", "header" },
		{ "HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n", "in pieces" },
		{ "HTTP/1.1 200 \r\nContent-Length: -1\r\n", "length" },
		{ "HTTP/1.1 200 \r\nContent-Length: 1x\r\n", "length" },
		{ "HTTP/1.1 200 \r\nContent-Length: 99999999999999999999\r\n", "length" },
		{ "HTTP/1.1 200 \r\nContent-Length: 1048577\r\n", "the most" },
		{ "HTTP/1.1 200 \r\nContent-Length: 2\r\nContent-Length: 3\r\n", "two lengths" },
		{ "HTTP/1.1 204 \r\nContent-Length: 2\r\n\r\n", "without content" },
		{ "HTTP/1.1 200 \r\n\r\n", "vmm.ping" },
		{ "HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{]", "vmm.ping" },
		{ "HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n[]", "build_version" },
		{ "HTTP/1.1 200 \r\nContent-Length: 20\r\n\r\n{\"build_version\": 53}", "build_version" },
		{ "HTTP/1.1 200 \r\nContent-Length: 25\r\n\r\n{\"build_version\":\"v52.0\"}", "v52.0, which is not v53.0" },
		{ "HTTP/1.1 204 \r\n\r\n", "answered by status 204" },
		{ "HTTP/1.1 500 \r\nContent-Length: 26\r\n\r\n[\"Error from API\",\"a\\u0001\"]",
				"status 500: [\"Error from API\"" },
	};
	struct vmm_plan plan;
	struct played p;
	struct err e;

	(void)state;
	make_plan(&plan, VMM_COLD);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct control *c = control(&p, &plan);

		assert_int_equal(answer(c, bad[i].bytes, strlen(bad[i].bytes), &e), -1);
		if (strstr(e.text, bad[i].says) == NULL)
			fail_msg("\"%s\" does not say \"%s\"", e.text, bad[i].says);
		assert_int_equal(p.known, 0);
		control_free(c);
	}
	vmm_plan_free(&plan);
}

/* A head without an end is given up, whatever it is made of. */
static void giant_head(void **state)
{
	static char line[CH_HTTP_HEAD_MAX];
	struct vmm_plan plan;
	struct played p;
	struct control *c;
	struct err e;
	int rc = 0;

	(void)state;
	make_plan(&plan, VMM_COLD);
	memset(line, 'a', sizeof(line));
	c = control(&p, &plan);
	assert_int_equal(answer(c, "HTTP/1.1 200 \r\n", 15, &e), 0);
	assert_int_equal(answer(c, line, sizeof(line), &e), -1);
	control_free(c);
	c = control(&p, &plan);
	assert_int_equal(answer(c, "HTTP/1.1 200 \r\n", 15, &e), 0);
	for (int i = 0; i < CH_HTTP_HEAD_MAX && rc == 0; i++)
		rc = answer(c, "a: b\r\n", 6, &e);
	assert_int_equal(rc, -1);
	assert_non_null(strstr(e.text, "longer than"));
	control_free(c);
	vmm_plan_free(&plan);
}

/* --- what came of the configuration ------------------------------------------------------------------------------------------- */

/* A copy of the configuration with one piece of text replaced. */
static char *changed(const char *config, const char *from, const char *to)
{
	const char *at = strstr(config, from);
	char *out = NULL;

	if (!at)
		fail_msg("the configuration has no %s", from);
	assert_true(asprintf(&out, "%.*s%s%s", (int)(at - config), config, to, at + strlen(from)) > 0);
	return out;
}

static void info_differs(void **state)
{
	static const struct {
		const char *from, *to, *says;
	} cases[] = {
		{ "\"nested\":false", "\"nested\":true", "cpus.nested is not" },
		{ "\"nested\":false,", "", "does not say cpus.nested" },
		{ "\"boot_vcpus\":2", "\"boot_vcpus\":\"2\"", "cpus.boot_vcpus" },
		{ "\"boot_vcpus\":2", "\"boot_vcpus\":2.5", "cpus.boot_vcpus" },
		{ "\"thp\":false", "\"thp\":null", "memory.thp" },
		{ "\"size\":536870912", "\"size\":536870913", "memory.size" },
		{ "\"readonly\":true", "\"readonly\":false", "disks.0.readonly" },
		{ "\"image_type\":\"Raw\"", "\"image_type\":\"Qcow2\"", "disks.0.image_type" },
		{ "\"mode\":\"Off\"", "\"mode\":\"Tty\"", "console.mode" },
		{ "\"cid\":3", "\"cid\":4", "vsock.cid" },
		{ "\"disks\":[", "\"disks\":[{\"path\":\"/etc/shadow\"},", "disks is not" },
		{ "\"disks\":[{", "\"disks\":[null,{", "disks is not" },
		{ "\"pvpanic\":true", "\"pvpanic\":true,\"net\":[{\"tap\":\"x\"}]", "a net" },
		{ "\"pvpanic\":true", "\"pvpanic\":true,\"balloon\":{\"size\":1}", "a balloon" },
		{ "\"pvpanic\":true", "\"pvpanic\":true,\"fs\":[1]", "a fs" },
		{ "\"pvpanic\":true", "\"pvpanic\":true,\"devices\":{}", "a devices" },
	};
	struct vmm_plan plan;
	struct played p;
	struct err e;

	(void)state;
	make_plan(&plan, VMM_COLD);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct control *c = control(&p, &plan);
		char *config = changed(plan.create, cases[i].from, cases[i].to);

		assert_int_equal(answer_with(c, 200, PING, &e) | answer_204(c, &e), 0);
		assert_int_equal(answer_info(c, "Created", config, &e), -1);
		if (strstr(e.text, cases[i].says) == NULL)
			fail_msg("\"%s\" does not say \"%s\"", e.text, cases[i].says);
		assert_true(told(&p, "GET /api/v1/vm.info")); /* and is not booted */
		free(config);
		control_free(c);
	}
	vmm_plan_free(&plan);
}

/* What the VMM adds to it of its own, and lists that are empty, are its business. */
static void info_with_more(void **state)
{
	struct vmm_plan plan;
	struct played p;
	struct control *c;
	struct err e;
	char *config;

	(void)state;
	make_plan(&plan, VMM_COLD);
	config = changed(plan.create, "\"nested\":false", "\"nested\":false,\"max_phys_bits\":46");
	c = control(&p, &plan);
	assert_int_equal(answer_with(c, 200, PING, &e) | answer_204(c, &e) | answer_info(c, "Created", config, &e), 0);
	free(config);
	control_free(c);
	config = changed(plan.create, "\"pvpanic\":true", "\"net\":null,\"fs\":[],\"pvpanic\":true,\"numa\":null");
	c = control(&p, &plan);
	assert_int_equal(answer_with(c, 200, PING, &e) | answer_204(c, &e) | answer_info(c, "Created", config, &e), 0);
	free(config);
	control_free(c);
	vmm_plan_free(&plan);
}

static void info_of_another_state(void **state)
{
	static const char *const states[] = { "Running", "Shutdown", "Paused", "BreakPoint", "", "created" };
	struct vmm_plan plan;
	struct played p;
	struct err e;

	(void)state;
	make_plan(&plan, VMM_COLD);
	for (size_t i = 0; i < sizeof(states) / sizeof(states[0]); i++) {
		struct control *c = control(&p, &plan);

		assert_int_equal(answer_with(c, 200, PING, &e) | answer_204(c, &e), 0);
		assert_int_equal(answer_info(c, states[i], plan.create, &e), -1);
		control_free(c);
	}
	vmm_plan_free(&plan);
}

/* A snapshot that fails says so, once. */
static void snapshot_fails(void **state)
{
	struct vmm_plan plan;
	struct played p;
	struct control *c;
	struct err e;

	(void)state;
	make_plan(&plan, VMM_GOLDEN);
	c = control(&p, &plan);
	assert_int_equal(answer_with(c, 200, PING, &e) | answer_204(c, &e) | answer_info(c, "Created", plan.create, &e) |
					 answer_204(c, &e),
			0);
	control_snapshot(c, NULL, 0);
	assert_int_equal(answer_204(c, &e), 0);
	assert_int_equal(answer_with(c, 500, "[\"Error from API\",\"No space left on device\"]", &e), -1);
	assert_int_equal(p.snapshots, 1);
	assert_non_null(strstr(p.why, "No space left"));
	control_free(c);
	vmm_plan_free(&plan);
}

/* --- events ------------------------------------------------------------------------------------------------------------------- */

#define RECORD(source, event)                                                                                                      \
	"{\n  \"timestamp\": {\n    \"secs\": 0,\n    \"nanos\": 5505133\n  },\n  \"source\": \"" source                           \
	"\",\n  \"event\": \"" event "\",\n  \"properties\": null\n}\n\n"

static unsigned int events_of(const char *bytes, size_t n, size_t step, char last[32])
{
	struct played p;
	struct ch_events v;

	memset(&p, 0, sizeof(p));
	ch_events_init(&v);
	for (size_t at = 0; at < n; at += step)
		ch_events_feed(&v, bytes + at, n - at < step ? n - at : step, on_event, &p);
	ch_events_free(&v);
	assert_true(text_copy(last, 32, p.event));
	return p.events;
}

static void events_mean(void **state)
{
	static const char quiet[] =
			RECORD("vmm", "starting") RECORD("vm", "booting") RECORD("vm", "booted") RECORD("guest", "shutdown");
	static const char panic[] =
			"{\"timestamp\":{},\"source\":\"guest\",\"event\":\"panic\",\"properties\":{\"event\":\"panic\"}}\n\n";
	char last[32];

	(void)state;
	assert_int_equal(events_of(quiet, sizeof(quiet) - 1, 1000, last), 0);
	for (size_t step = 1; step < 300; step++) {
		assert_int_equal(events_of(RECORD("vm", "rebooting"), sizeof(RECORD("vm", "rebooting")) - 1, step, last), 1);
		assert_string_equal(last, "RESET");
	}
	assert_int_equal(events_of(RECORD("vm", "shutdown"), sizeof(RECORD("vm", "shutdown")) - 1, 7, last), 1);
	assert_string_equal(last, "SHUTDOWN");
	assert_int_equal(events_of(panic, sizeof(panic) - 1, 9, last), 1);
	assert_string_equal(last, "GUEST_PANICKED");
}

/* A record that was cut costs itself, not the one that follows. */
static void events_cut(void **state)
{
	static const char whole[] = RECORD("vm", "booted"), next[] = RECORD("vm", "rebooting");
	char text[1024], last[32];

	(void)state;
	for (size_t n = 1; n < sizeof(whole) - 1; n++) {
		assert_true(text_fmt(text, sizeof(text), "%.*s%s", (int)n, whole, next));
		assert_int_equal(events_of(text, strlen(text), 1000, last), 1);
	}
}

static void events_flood(void **state)
{
	static char junk[64 * 1024];
	static const char one[] = RECORD("vm", "x"), last_one[] = RECORD("vm", "rebooting");
	struct played p;
	struct ch_events v;

	(void)state;
	memset(&p, 0, sizeof(p));
	memset(junk, '{', sizeof(junk));
	ch_events_init(&v);
	for (int i = 0; i < 100; i++)
		ch_events_feed(&v, junk, sizeof(junk), on_event, &p);
	assert_true(v.record.len <= v.record.max);
	ch_events_feed(&v, "\n\n", 2, on_event, &p);
	ch_events_feed(&v, last_one, sizeof(last_one) - 1, on_event, &p);
	assert_int_equal(p.events, 1); /* noise is survived */
	for (int i = 0; i < 20000; i++)
		ch_events_feed(&v, one, sizeof(one) - 1, on_event, &p);
	ch_events_feed(&v, last_one, sizeof(last_one) - 1, on_event, &p);
	assert_int_equal(p.events, 1); /* a flood is not listened to for ever */
	ch_events_free(&v);
}

/* --- plan --------------------------------------------------------------------------------------------------------------------- */

static void plan_round_trip(void **state)
{
	struct buf b = BUF_INIT(VMM_PLAN_MAX);
	struct vmm_plan plan, got;
	struct err e;
	int fd;

	(void)state;
	make_plan(&plan, VMM_GOLDEN);
	plan.ram_fd = 9;
	fd = vmm_plan_write(&plan, &e);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, "x", 1), -1); /* sealed */
	assert_int_equal(vmm_plan_read(fd, &got, &e), 0);
	assert_string_equal(got.create, plan.create);
	assert_string_equal(got.snapshot, plan.snapshot);
	assert_string_equal(got.version, "v53.0");
	assert_true(got.kind == plan.kind && got.start == VMM_GOLDEN && got.ram_fd == 9 && got.state_fd == -1 &&
			got.answer_ms == 10);
	vmm_plan_free(&got);
	close(fd);
	vmm_plan_encode(&plan, &b);
	for (size_t n = 0; n < b.len; n++)
		assert_int_equal(vmm_plan_decode(b.data, n, &got, &e), -1);
	b.data[4] = 3; /* a third kind */
	assert_int_equal(vmm_plan_decode(b.data, b.len, &got, &e), -1);
	b.data[4] = VMM_QEMU;
	b.data[5] = 4;
	assert_int_equal(vmm_plan_decode(b.data, b.len, &got, &e), -1);
	assert_int_equal(vmm_plan_read(0, &got, &e), -1);
	buf_free(&b);
	vmm_plan_free(&plan);
}

/* What must stand in the configuration of every VM, whatever the defaults are. */
static void config_says(void **state)
{
	static const char *const says[] = { "\"nested\":false", "\"core_scheduling\":\"Vm\"", "\"thp\":false",
		"\"mergeable\":false", "\"readonly\":true", "\"image_type\":\"Raw\"", "\"backing_files\":false",
		"\"console\":{\"mode\":\"Off\"}", "\"watchdog\":false", "\"pvpanic\":true", "\"landlock_enable\":false",
		"eph.channel=vsock:1024", "eph.bus=pci", "panic=-1" };
	struct vmm_plan plan;

	(void)state;
	make_plan(&plan, VMM_COLD);
	for (size_t i = 0; i < sizeof(says) / sizeof(says[0]); i++)
		if (strstr(plan.create, says[i]) == NULL)
			fail_msg("no %s in %s", says[i], plan.create);
	assert_null(strstr(plan.create, "\"net\""));
	assert_null(strstr(plan.create, "zones"));
	assert_true(strlen(plan.create) < 4096);
	vmm_plan_free(&plan);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(cold),
		cmocka_unit_test(golden_and_clone),
		cmocka_unit_test(byte_by_byte),
		cmocka_unit_test(refuses_answers),
		cmocka_unit_test(giant_head),
		cmocka_unit_test(info_differs),
		cmocka_unit_test(info_with_more),
		cmocka_unit_test(info_of_another_state),
		cmocka_unit_test(snapshot_fails),
		cmocka_unit_test(events_mean),
		cmocka_unit_test(events_cut),
		cmocka_unit_test(events_flood),
		cmocka_unit_test(plan_round_trip),
		cmocka_unit_test(config_says),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
