/*
 * Cloud Hypervisor's API, as much of it as starting a VM and making a snapshot of one takes (control.h). One request at a time, in
 * one fixed order; every answer is checked, and what the VMM made of the configuration is read back and compared, because it
 * ignores what it does not know.
 *
 *   cold, golden:  vmm.ping -> vm.create  -> vm.info -> vm.boot -> up      golden then:  vm.pause -> vm.snapshot -> done
 *   clone:         vmm.ping -> vm.restore -> vm.info -> up
 */
#include "channel/ch_compare.h"
#include "channel/ch_events.h"
#include "channel/ch_http.h"
#include "channel/control.h"

#include "common/json.h"
#include "common/log.h"
#include "common/text.h"

#include <stdlib.h>
#include <string.h>

#define REQUEST_MAX (VMM_PLAN_BODY_MAX + 1024)
#define REASON_MAX 256

enum step { S_NEW, S_PING, S_CREATE, S_CHECK, S_BOOT, S_RESTORE, S_CHECK_CLONE, S_UP, S_PAUSE, S_SNAPSHOT, S_DONE };

struct ch_api {
	const struct vmm_plan *plan;
	struct control_ops ops;
	enum step step;
	bool waiting; /* for the answer to this step's request */
	struct ch_http answer;
	struct ch_events events;
};

static void *ch_make(const struct vmm_plan *plan, const struct control_ops *ops)
{
	struct ch_api *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->plan = plan;
	c->ops = *ops;
	ch_http_init(&c->answer);
	ch_events_init(&c->events);
	return c;
}

static void ch_free(void *state)
{
	struct ch_api *c = state;

	ch_http_free(&c->answer);
	ch_events_free(&c->events);
	free(c);
}

/* --- requests ----------------------------------------------------------------------------------------------------------------- */

static int ask(struct ch_api *c, enum step step, const char *method, const char *what, const char *body, struct err *e)
{
	struct buf b = BUF_INIT(REQUEST_MAX);

	buf_printf(&b, "%s /api/v1/%s HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n", method, what);
	if (body)
		buf_printf(&b, "Content-Type: application/json\r\nContent-Length: %zu\r\n", strlen(body));
	buf_add_str(&b, "\r\n");
	if (body)
		buf_add_str(&b, body);
	if (b.failed) {
		buf_free(&b);
		return err_set(e, ERR_LIMIT, "the request %s is too long", what);
	}
	c->step = step;
	c->waiting = true;
	c->ops.send(c->ops.arg, b.data, b.len);
	c->ops.on_wait(c->ops.arg, what);
	buf_free(&b);
	return 0;
}

static int ask_restore(struct ch_api *c, struct err *e)
{
	struct buf body = BUF_INIT(2048);
	struct jw w;
	int rc;

	jw_init(&w, &body);
	jw_object(&w);
	jw_kstr(&w, "source_url", c->plan->snapshot);
	jw_kstr(&w, "memory_restore_mode", "Copy"); /* of memory in a file nothing is copied: it is mapped */
	jw_kbool(&w, "prefault", false);
	jw_kbool(&w, "resume", true);
	jw_close(&w);
	if (!jw_end(&w) || !buf_cstr(&body))
		rc = err_set(e, ERR_LIMIT, "the path of the snapshot is too long");
	else
		rc = ask(c, S_RESTORE, "PUT", "vm.restore", buf_cstr(&body), e);
	buf_free(&body);
	return rc;
}

static int ask_snapshot(struct ch_api *c, struct err *e)
{
	struct buf body = BUF_INIT(2048);
	struct jw w;
	int rc;

	jw_init(&w, &body);
	jw_object(&w);
	jw_kstr(&w, "destination_url", c->plan->snapshot);
	jw_close(&w);
	if (!jw_end(&w) || !buf_cstr(&body))
		rc = err_set(e, ERR_LIMIT, "the path of the snapshot is too long");
	else
		rc = ask(c, S_SNAPSHOT, "PUT", "vm.snapshot", buf_cstr(&body), e);
	buf_free(&body);
	return rc;
}

static int ch_start(void *state, struct err *e)
{
	return ask(state, S_PING, "GET", "vmm.ping", NULL, e);
}

static void ch_snapshot(void *state, const int *fds, size_t fd_count)
{
	struct ch_api *c = state;
	struct err e;

	(void)fds;
	(void)fd_count; /* the directory is in the VMM's tree */
	if (c->step != S_UP)
		c->ops.on_snapshot(c->ops.arg, "the VM does not run");
	else if (ask(c, S_PAUSE, "PUT", "vm.pause", NULL, &e))
		c->ops.on_snapshot(c->ops.arg, e.text);
}

/* --- answers ------------------------------------------------------------------------------------------------------------------ */

static const char *step_name(enum step step)
{
	static const char *const names[] = { "", "vmm.ping", "vm.create", "vm.info", "vm.boot", "vm.restore", "vm.info", "",
		"vm.pause", "vm.snapshot", "" };

	return names[step];
}

/* The body of an error is a list of texts, from the outermost to the cause: hostile, so cut and escaped. */
static void reason(const struct ch_http *a, char out[REASON_MAX])
{
	struct buf safe = BUF_INIT(REASON_MAX - 1);
	size_t n = a->body.len < REASON_MAX / 5 ? a->body.len : REASON_MAX / 5;

	if (n == 0 || !text_safe(&safe, (const char *)a->body.data, n, false) || !buf_cstr(&safe) ||
			!text_copy(out, REASON_MAX, buf_cstr(&safe)))
		memcpy(out, "none", sizeof("none"));
	buf_free(&safe);
}

static int check_status(const struct ch_api *c, struct err *e)
{
	bool content = c->step == S_PING || c->step == S_CHECK || c->step == S_CHECK_CLONE;
	char text[REASON_MAX];

	if (c->answer.status == (content ? 200 : 204) || (!content && c->answer.status == 200))
		return 0;
	reason(&c->answer, text);
	return err_set(e, ERR_UNAVAILABLE, "%s was answered by status %d: %s", step_name(c->step), c->answer.status, text);
}

/* The program that was asked for its version may have been replaced since; and it must be one that answers as we read. */
static int check_ping(const struct ch_api *c, const struct json *v, struct err *e)
{
	const char *version = json_get_text(v, "build_version");

	if (!version)
		return err_set(e, ERR_PROTOCOL, "vmm.ping says no build_version");
	if (strcmp(version, c->plan->version) != 0)
		return err_set(e, ERR_PROTOCOL, "vmm.ping is of version %.40s, which is not %s, as --version said", version,
				c->plan->version);
	return 0;
}

static int check_info(const struct ch_api *c, const struct json *v, struct err *e)
{
	const char *want = c->step == S_CHECK ? "Created" : "Running", *state = json_get_text(v, "state");
	const struct json *config = json_get(v, "config");
	struct json *asked;
	int rc;

	if (!state || strcmp(state, want) != 0)
		return err_set(e, ERR_PROTOCOL, "vm.info says that the VM is %.20s, not %s", state ? state : "nothing", want);
	if (!config || json_type(config) != JSON_OBJECT)
		return err_set(e, ERR_PROTOCOL, "vm.info has no config");
	if (json_parse(c->plan->create, strlen(c->plan->create), &asked, e))
		return err_wrap(e, "the plan's configuration");
	rc = ch_compare(asked, config, e);
	json_free(asked);
	return rc;
}

static int check_content(const struct ch_api *c, struct err *e)
{
	const struct ch_http *a = &c->answer;
	struct json *v;
	int rc;

	if (json_parse((const char *)a->body.data, a->body.len, &v, e))
		return err_wrap(e, "answer to %s", step_name(c->step));
	rc = c->step == S_PING ? check_ping(c, v, e) : check_info(c, v, e);
	json_free(v);
	return rc;
}

static void up(struct ch_api *c)
{
	c->step = S_UP;
	c->ops.on_up(c->ops.arg);
}

/* The next request after a good answer. */
static int go_on(struct ch_api *c, struct err *e)
{
	switch (c->step) {
	case S_PING:
		c->ops.on_known(c->ops.arg);
		return c->plan->start == VMM_CLONE ? ask_restore(c, e) : ask(c, S_CREATE, "PUT", "vm.create", c->plan->create, e);
	case S_CREATE: return ask(c, S_CHECK, "GET", "vm.info", NULL, e);
	case S_CHECK: return ask(c, S_BOOT, "PUT", "vm.boot", NULL, e);
	case S_RESTORE: return ask(c, S_CHECK_CLONE, "GET", "vm.info", NULL, e);
	case S_BOOT:
	case S_CHECK_CLONE: up(c); return 0;
	case S_PAUSE: return ask_snapshot(c, e);
	case S_SNAPSHOT:
		c->step = S_DONE;
		c->ops.on_snapshot(c->ops.arg, NULL);
		return 0;
	case S_NEW:
	case S_UP:
	case S_DONE: break;
	}
	return err_set(e, ERR_INTERNAL, "an answer in no step");
}

static int take_answer(struct ch_api *c, struct err *e)
{
	bool snapshot = c->step == S_PAUSE || c->step == S_SNAPSHOT;
	bool content = c->step == S_PING || c->step == S_CHECK || c->step == S_CHECK_CLONE;
	int rc;

	c->waiting = false;
	c->ops.on_wait(c->ops.arg, NULL);
	rc = check_status(c, e);
	if (rc == 0 && content)
		rc = check_content(c, e);
	ch_http_next(&c->answer);
	if (rc == 0)
		rc = go_on(c, e);
	if (rc != 0 && snapshot)
		c->ops.on_snapshot(c->ops.arg, e->text);
	return rc;
}

static int ch_feed(void *state, const char *bytes, size_t n, struct err *e)
{
	struct ch_api *c = state;

	while (n > 0) {
		size_t used;
		int rc;

		if (!c->waiting)
			return err_set(e, ERR_PROTOCOL, "the API answers what it was not asked");
		rc = ch_http_feed(&c->answer, bytes, n, &used, e);
		if (rc < 0)
			return -1;
		bytes += used;
		n -= used;
		if (rc > 0 && take_answer(c, e))
			return -1;
	}
	return 0;
}

static void ch_take_events(void *state, const char *bytes, size_t n)
{
	struct ch_api *c = state;

	ch_events_feed(&c->events, bytes, n, c->ops.on_event, c->ops.arg);
}

const struct control_driver control_ch = {
	.name = "api",
	.quit = "PUT /api/v1/vmm.shutdown HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\r\n",
	.make = ch_make,
	.free = ch_free,
	.start = ch_start,
	.feed = ch_feed,
	.events = ch_take_events,
	.snapshot = ch_snapshot,
};
