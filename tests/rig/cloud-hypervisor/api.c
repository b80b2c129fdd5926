/*
 * Routes (api.h). Unknown paths are 404, a known path with the wrong method 400, errors an array of strings, outermost first.
 */
#include "api.h"

#include "events.h"
#include "faults.h"
#include "vm.h"

#include "common/json.h"
#include "common/text.h"

#include <poll.h>
#include <unistd.h>

#define ROOT "/api/v1/"

static bool shutdown_asked;

const char *api_version(void)
{
	return fault("version") ? fault("version") : "v53.0";
}

static enum vm_result do_ping(struct buf *out, struct err *e)
{
	const char *version = api_version();
	char number[32];
	struct jw w;

	jw_init(&w, out);
	jw_object(&w);
	jw_kstr(&w, "build_version", version);
	/* "v53.0" is release 53.0.0 */
	jw_kstr(&w, "version", text_fmt(number, sizeof(number), "%s.0", version + (version[0] == 'v')) ? number : "");
	jw_kint(&w, "pid", getpid());
	jw_karray(&w, "features");
	jw_str(&w, "kvm");
	jw_str(&w, "io_uring");
	jw_close(&w);
	jw_close(&w);
	return jw_end(&w) ? VM_OK : (enum vm_result)err_set(e, ERR_INTERNAL, "ping");
}

static enum vm_result do_vmm_shutdown(struct err *e)
{
	(void)e;
	shutdown_asked = true;
	return VM_OK;
}

bool api_shutdown_asked(void)
{
	return shutdown_asked;
}

static const struct route {
	const char *name, *method;
	enum vm_result (*tell)(struct buf *out, struct err *e);            /* answers with a body */
	enum vm_result (*act)(struct err *e);                              /* takes and answers none */
	enum vm_result (*take)(const char *body, size_t n, struct err *e); /* takes one */
} routes[] = {
	{ "vmm.ping", "GET", do_ping, NULL, NULL },
	{ "vmm.shutdown", "PUT", NULL, do_vmm_shutdown, NULL },
	{ "vm.info", "GET", vm_info, NULL, NULL },
	{ "vm.counters", "GET", vm_counters, NULL, NULL },
	{ "vm.create", "PUT", NULL, NULL, vm_create },
	{ "vm.delete", "PUT", NULL, vm_delete, NULL },
	{ "vm.boot", "PUT", NULL, vm_boot, NULL },
	{ "vm.shutdown", "PUT", NULL, vm_shutdown, NULL },
	{ "vm.reboot", "PUT", NULL, vm_reboot, NULL },
	{ "vm.pause", "PUT", NULL, vm_pause, NULL },
	{ "vm.resume", "PUT", NULL, vm_resume, NULL },
	{ "vm.snapshot", "PUT", NULL, NULL, vm_snapshot },
	{ "vm.restore", "PUT", NULL, NULL, vm_restore },
};

static void say_error(struct http_answer *out, int status, const char *outer, const char *inner)
{
	struct jw w;

	out->status = status;
	buf_reset(&out->body);
	jw_init(&w, &out->body);
	jw_array(&w);
	jw_str(&w, outer);
	if (inner)
		jw_str(&w, inner);
	jw_close(&w);
	if (!jw_end(&w))
		buf_reset(&out->body);
}

static void say_result(struct http_answer *out, enum vm_result result, const struct err *e)
{
	switch (result) {
	case VM_OK: break;
	case VM_INVALID: say_error(out, 400, "Failed to deserialize JSON", e->text); return;
	case VM_ABSENT: say_error(out, 404, "Error from API", e->text); return;
	case VM_FAILED: say_error(out, 500, "Error from API", e->text); return;
	}
	/* vmm.shutdown says 200, whatever the description of the API says. */
	out->status = out->body.len > 0 || shutdown_asked ? 200 : 204;
}

/* A test wants this call to hang: nothing else is answered meanwhile either, as with the real one. SIGKILL ends it. */
static void hang(void)
{
	for (;;)
		poll(NULL, 0, -1);
}

static void flood_events(void)
{
	for (int i = 0; i < 100000; i++)
		event_say("virtio-device", "activated", "id", "flood");
}

static void go_wrong(const char *call)
{
	static const char garbage[] = "{ \"source\": \"vm\", \"event\": [[[ \377\376 }{ ";
	static const char cut[] = "{\n  \"timestamp\": {\n    \"secs\": 0,\n    \"na\n\n";

	if (fault_is("exit", call))
		_exit(1);
	if (fault_is("hang", call))
		hang();
	if (strcmp(call, "boot") != 0)
		return;
	if (fault_is("events", "flood"))
		flood_events();
	if (fault_is("events", "garbage"))
		event_raw(garbage, sizeof(garbage) - 1);
	if (fault_is("events", "cut"))
		event_raw(cut, sizeof(cut) - 1);
}

static void call(const struct route *r, const char *body, size_t n, struct http_answer *out)
{
	const char *short_name = strchr(r->name, '.') + 1;
	enum vm_result result;
	struct err e = { 0 };

	go_wrong(short_name);
	if (fault_is("fail", short_name)) {
		say_error(out, 500, "Error from API", "a test wants this to fail");
		return;
	}
	if (r->tell)
		result = r->tell(&out->body, &e);
	else if (r->act)
		result = r->act(&e);
	else
		result = r->take(body, n, &e);
	if (result != VM_OK)
		fprintf(stderr, "cloud-hypervisor: HTTP API error response: %s: %s\n", r->name, e.text);
	say_result(out, result, &e);
}

void api_handle(void *arg, const char *method, const char *path, const char *body, size_t n, struct http_answer *out)
{
	(void)arg;
	for (size_t i = 0; strncmp(path, ROOT, sizeof(ROOT) - 1) == 0 && i < sizeof(routes) / sizeof(routes[0]); i++) {
		const struct route *r = &routes[i];

		if (strcmp(path + sizeof(ROOT) - 1, r->name) != 0)
			continue;
		if (strcmp(method, r->method) != 0)
			say_error(out, 400, "Bad Request", NULL);
		else if (n > 0 && !r->take)
			say_error(out, 400, "Bad Request", "this call takes no body");
		else
			call(r, body, n, out);
		return;
	}
	say_error(out, 404, "Not Found", NULL);
}
