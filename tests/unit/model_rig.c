/* The other ends of a model under test (model_rig.h). */
#include "model_rig.h"

#include "loop.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/mman.h>

#define CALL_MS 30000

static int log_fd = -1;

void rig_log_start(void)
{
	log_fd = memfd_create("log", MFD_CLOEXEC);
	if (log_fd < 0 || dup2(log_fd, STDERR_FILENO) < 0 || sodium_init() < 0)
		abort();
}

const char *rig_log(void)
{
	static char text[1 << 20];
	ssize_t n = pread(log_fd, text, sizeof(text) - 1, 0);

	text[n > 0 ? n : 0] = '\0';
	return text;
}

int rig_log_end(int failed)
{
	if (failed > 0)
		printf("%s\n", rig_log());
	(void)fflush(stdout); /* a leak that a failure left ends the program before its time */
	return failed;
}

void rig_no_key(const struct model_rig *r)
{
	assert_null(strstr(rig_log(), RIG_KEY));
	assert_null(strstr(r->text, RIG_KEY));
	assert_null(strstr(r->report.note, RIG_KEY));
	if (r->replied) {
		assert_null(strstr(r->reply.content, RIG_KEY));
		for (uint32_t i = 0; i < r->reply.call_count; i++) {
			assert_null(strstr(r->reply.calls[i].arguments, RIG_KEY));
			assert_null(strstr(r->reply.calls[i].name, RIG_KEY));
			assert_null(strstr(r->reply.calls[i].id, RIG_KEY));
		}
	}
}

int64_t rig_now_ms(const struct model_rig *r)
{
	return clock_boot_ms() - r->began_ms + r->jump_ms;
}

static int64_t compute_ms(void *arg)
{
	return rig_now_ms(arg);
}

static int64_t time_left(void *arg)
{
	return ((struct model_rig *)arg)->time_left_ms;
}

static bool moved(void *arg)
{
	struct model_rig *r = arg;

	if (r->meter.open && r->meter.hold_model > r->hold)
		r->hold = r->meter.hold_model;
	return !r->refuse_meter;
}

static void on_reply(void *arg, struct model_reply *reply, const struct model_report *report)
{
	struct model_rig *r = arg;

	assert_false(r->ended);
	r->ended = r->replied = true;
	r->reply = *reply;
	r->report = *report;
}

static void on_failed(void *arg, enum errcode code, const char *text, const struct model_report *report)
{
	struct model_rig *r = arg;

	assert_false(r->ended);
	r->ended = true;
	r->code = code;
	r->report = *report;
	if (!text_copy(r->text, sizeof(r->text), text))
		fail();
}

static bool decide(void *arg, const struct asked *q, struct answer *out)
{
	struct model_rig *r = arg;
	const char *id = strcasestr(q->head, "\r\nX-Request-Id: ");

	if (q->number <= SCRIPT_MAX) {
		snprintf(r->request_id[q->number - 1], sizeof(r->request_id[0]), "%.*s", id ? (int)strcspn(id + 16, "\r") : 0,
				id ? id + 16 : "");
		snprintf(r->body[q->number - 1], sizeof(r->body[0]), "%s", q->body);
		r->asked_ms[q->number - 1] = clock_boot_ms();
	}
	if (q->number > r->script_len)
		return false;
	*out = r->script[q->number - 1];
	return true;
}

void rig_init(struct model_rig *r)
{
	*r = (struct model_rig){ .time_left_ms = 600000,
		.price = { .run_fee = 10, .input = 3000000, .cached_input = 300000, .output = 15000000, .compute = 200000 },
		.a = { .run_id = RIG_RUN,
				.shell = true,
				.max_model_calls = 100,
				.model = { .id = "test/model",
						.upstream = "model-1",
						.any_address = true,
						.limit_param = LIMIT_MAX_COMPLETION_TOKENS,
						.max_output_tokens = 1000,
						.min_output_tokens = 16,
						.tokens_per_byte_milli = 1000,
						.overhead_tokens = 20,
						.call_timeout_ms = 8000 } } };
	r->a.cap_micros = 1000000;
}

static void open_on(struct model_rig *r, const struct upstream_options *given)
{
	struct upstream_options up = *given;
	struct model_options opt = { .a = &r->a,
		.key = RIG_KEY,
		.meter = &r->meter,
		.compute_ms = compute_ms,
		.time_left_ms = time_left,
		.meter_moved = moved,
		.on_reply = on_reply,
		.on_failed = on_failed,
		.arg = r };
	struct err e;

	r->began_ms = clock_boot_ms() - 1;
	opt.base = up.base = r->base = event_base_new();
	assert_ok(curlev_new(r->base, 4, &r->curl, &e));
	r->up = upstream_new(&up);
	if (r->a.model.base_url[0] == '\0')
		assert_true(text_fmt(r->a.model.base_url, sizeof(r->a.model.base_url), "%s://127.0.0.1:%d/v1",
				up.tls ? "https" : "http", upstream_port(r->up)));
	meter_init(&r->meter, &r->price, r->a.cap_micros);
	meter_start(&r->meter);
	opt.curl = r->curl;
	r->model = model_new(&opt);
	assert_non_null(r->model);
}

void rig_open(struct model_rig *r, const struct answer *script, int n, struct ssl_ctx_st *tls, bool at_head)
{
	struct upstream_options up = { .tls = tls, .at_head = at_head, .decide = decide, .arg = r };

	r->script = script;
	r->script_len = n;
	open_on(r, &up);
}

void rig_open_with(struct model_rig *r, bool (*decide_all)(void *arg, const struct asked *q, struct answer *out), void *arg)
{
	struct upstream_options up = { .decide = decide_all, .arg = arg };

	open_on(r, &up);
}

static void forget(struct model_rig *r)
{
	if (r->replied)
		model_reply_free(&r->reply);
	memset(&r->reply, 0, sizeof(r->reply));
	r->ended = r->replied = false;
	r->code = ERRCODE_NONE;
	r->text[0] = '\0';
	r->hold = 0;
}

void rig_close(struct model_rig *r)
{
	rig_no_key(r);
	assert_true(meter_spent(&r->meter, rig_now_ms(r)) <= r->a.cap_micros);
	forget(r);
	model_free(r->model);
	curlev_free(r->curl);
	upstream_free(r->up);
	event_base_free(r->base);
}

static bool is_ended(void *arg)
{
	return ((struct model_rig *)arg)->ended;
}

void rig_call(struct model_rig *r, const char *text)
{
	struct model_message *m = calloc(1, sizeof(*m));
	struct model_call call = { .call = ++r->calls, .tools = 1, .messages = m, .message_count = 1 };
	struct err e;

	m->role = ROLE_USER;
	m->content = strdup(text);
	m->tool_call_id = strdup("");
	forget(r);
	assert_ok(model_start(r->model, &call, &e));
	if (!loop_until(r->base, is_ended, r, CALL_MS))
		fail_msg("a call that does not end; log:\n%s", rig_log());
	assert_false(r->meter.open); /* every hold is closed when a call has ended */
}

void rig_one(struct model_rig *r, const struct answer *script, int n)
{
	rig_open(r, script, n, NULL, false);
	rig_call(r, "hi");
}

void rig_failed(const struct model_rig *r, enum errcode code, int requests, const char *const *words)
{
	if (r->replied)
		fail_msg("it was answered: %s", r->reply.content);
	if (r->code != code)
		fail_msg("ended as %s, not %s: %s", errcode_text(r->code), errcode_text(code), r->text);
	for (; *words; words++)
		if (!strstr(r->text, *words))
			fail_msg("\"%s\" is not in: %s", *words, r->text);
	if (upstream_counts(r->up)->requests != requests)
		fail_msg("%d requests, not %d: %s", upstream_counts(r->up)->requests, requests, r->text);
}
