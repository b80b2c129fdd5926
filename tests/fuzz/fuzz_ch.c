/* link: noded_core */
/*
 * What a Cloud Hypervisor that a guest took over may say: the first byte picks the start mode, or the pipe of events; the rest are
 * the answers of its API or the records. Bytes in one piece and byte by byte must lead to the same requests, words and end; a VM is
 * never said to run before its configuration was compared; events are none but the three.
 */
/* reads: noded/channel/ch_http.c noded/channel/ch_api.c noded/channel/ch_compare.c noded/channel/ch_events.c */
/* reached: 85 % of lines, 65 % of branches; the rest is memory and mistakes of ours */
#include "fuzz.h"

#include "channel/ch_events.h"
#include "channel/control.h"
#include "common/buf.h"

struct outcome {
	struct buf said; /* requests and words, in their order */
	unsigned int infos, ups, events;
	int rc;
};

static void on_send(void *arg, const void *bytes, size_t n)
{
	struct outcome *o = arg;

	must(n > 4 && n <= VMM_PLAN_BODY_MAX + 1024);
	if (memmem(bytes, n, "GET /api/v1/vm.info", 19) != NULL)
		o->infos++;
	buf_add(&o->said, bytes, n);
}

static void on_known(void *arg)
{
	struct outcome *o = arg;

	buf_add_char(&o->said, 'K');
}

static void on_up(void *arg)
{
	struct outcome *o = arg;

	must(o->infos == 1 && o->ups == 0);
	o->ups++;
	buf_add_char(&o->said, 'U');
}

static void on_event(void *arg, const char *name)
{
	struct outcome *o = arg;

	must(strcmp(name, "RESET") == 0 || strcmp(name, "SHUTDOWN") == 0 || strcmp(name, "GUEST_PANICKED") == 0);
	o->events++;
	buf_add_str(&o->said, name);
}

static void on_open(void *arg)
{
	(void)arg;
	must(false); /* is seen by the connection, never by what the VMM says */
}

static void on_snapshot(void *arg, const char *why)
{
	struct outcome *o = arg;

	must(o->ups == 1);
	buf_add_str(&o->said, why ? why : "done");
}

static void on_wait(void *arg, const char *what)
{
	struct outcome *o = arg;

	buf_add_str(&o->said, what ? what : "-");
}

/* As small as can be, so that the fuzzer finds what must come back. */
static void run_api(uint8_t start, const uint8_t *data, size_t n, size_t step, struct outcome *o)
{
	static char create[] = "{\"cpus\":{\"nested\":false},\"disks\":[{\"id\":\"root\"}],\"size\":7}";
	struct vmm_plan plan = {
		.kind = VMM_CLOUD_HYPERVISOR, .start = start, .version = "v53.0", .create = create, .snapshot = "file:///g"
	};
	struct control_ops ops = { .send = on_send,
		.on_known = on_known,
		.on_up = on_up,
		.on_event = on_event,
		.on_guest_open = on_open,
		.on_snapshot = on_snapshot,
		.on_wait = on_wait,
		.arg = o };
	struct control *c = control_new(&plan, &ops);
	bool asked = false;
	struct err e;

	must(c != NULL);
	o->rc = control_start(c, &e);
	must(o->rc == 0);
	for (size_t at = 0; at < n && o->rc == 0; at += step) {
		o->rc = control_feed(c, data + at, n - at < step ? n - at : step, &e);
		if (o->ups == 1 && start == VMM_GOLDEN && !asked && step == 1) {
			asked = true;
			control_snapshot(c, NULL, 0);
		}
	}
	control_free(c);
}

static void run_events(const uint8_t *data, size_t n, size_t step, struct outcome *o)
{
	struct ch_events v;

	ch_events_init(&v);
	for (size_t at = 0; at < n; at += step)
		ch_events_feed(&v, (const char *)data + at, n - at < step ? n - at : step, on_event, o);
	must(v.record.len <= v.record.max && !v.record.failed);
	ch_events_free(&v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct outcome whole = { .rc = 0 }, cut = { .rc = 0 };
	unsigned int what;

	if (n < 1)
		return 0;
	what = data[0] % 4;
	data++;
	n--;
	buf_init(&whole.said, 64 << 20);
	buf_init(&cut.said, 64 << 20);
	if (what == 0) {
		run_events(data, n, n + 1, &whole);
		run_events(data, n, 1, &cut);
	} else {
		run_api((uint8_t)what, data, n, n + 1, &whole);
		run_api((uint8_t)what, data, n, 1, &cut);
	}
	/* A golden VM's snapshot is asked for between two bytes, which only the second way has. */
	if (what != VMM_GOLDEN) {
		must(whole.rc == cut.rc && whole.events == cut.events && whole.ups == cut.ups);
		must(whole.said.len == cut.said.len);
		must(whole.said.len == 0 || memcmp(whole.said.data, cut.said.data, whole.said.len) == 0);
	}
	buf_free(&whole.said);
	buf_free(&cut.said);
	return 0;
}
