/*
 * Model calls (model.h): begin, try again, answer, fail. One attempt:
 *
 *     plan (meter) -> hold -> spool -> curl -> head -> body -> settle or release -> answer | retry | failure
 *
 * The exchange itself is in model_send.c, what it costs in model_charge.c. Owns the key, the body of the call under way and its
 * reader. A provider's error text is shown to the client that pays for it, bounded and made safe; it is never logged.
 */
#include "model.h"

#include "model_error.h"
#include "model_internal.h"
#include "model_request.h"

#include "common/clock.h"
#include "common/ids.h"
#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>
#include <sodium.h>

static void attempt_start(struct model *m);

static void on_retry_timer(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	attempt_start(arg);
}

struct model *model_new(const struct model_options *opt)
{
	struct model *m = calloc(1, sizeof(*m));
	struct err e;

	if (m == NULL)
		return NULL;
	m->opt = *opt;
	m->limit_param = opt->a->model.limit_param;
	m->known_tokens = -1;
	m->own_known = net_own_read(&m->own, &e) == 0;
	if (!m->own_known)
		log_warn("only a listed provider can be dialled error=\"%s\"", e.text);
	m->timer = event_new(opt->base, -1, 0, on_retry_timer, m);
	m->linger = event_new(opt->base, -1, 0, model_on_linger, m);
	buf_init(&m->body, MODEL_REQUEST_MAX);
	buf_init(&m->error_body, MODEL_ERROR_BODY_MAX);
	if (m->timer == NULL || m->linger == NULL || !text_copy(m->key, sizeof(m->key), opt->key)) {
		model_free(m);
		return NULL;
	}
	return m;
}

void model_free(struct model *m)
{
	if (m == NULL)
		return;
	if (m->http != NULL)
		curl_call_cancel(m->http);
	if (m->timer != NULL)
		event_free(m->timer);
	if (m->linger != NULL)
		event_free(m->linger);
	model_stream_free(m->stream);
	buf_free(&m->body);
	buf_free(&m->error_body);
	sodium_memzero(m->key, sizeof(m->key));
	free(m);
}

bool model_busy(const struct model *m)
{
	return m->busy;
}

/* --- ends of a call ---------------------------------------------------------------------------------------------------------- */

static void report_fill(struct model *m, const char *finish)
{
	m->report.finish = finish;
	m->report.duration_ms = clock_boot_ms() - m->started_ms;
}

static void attempt_clear(struct model *m)
{
	m->http = NULL;
	event_del(m->linger);
	model_stream_free(m->stream);
	m->stream = NULL;
	buf_reset(&m->error_body);
}

static void call_clear(struct model *m)
{
	event_del(m->timer);
	attempt_clear(m);
	buf_free(&m->body);
	m->busy = false;
}

static void fail_call(struct model *m, enum errcode code, const char *fmt, ...) EPH_PRINTF(3, 4);
static void fail_call(struct model *m, enum errcode code, const char *fmt, ...)
{
	char text[ERR_TEXT_MAX];
	struct model_report report;
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	(void)model_hide_key(text, strlen(text), m->key);
	report_fill(m, "error");
	report = m->report;
	call_clear(m);
	m->opt.on_failed(m->opt.arg, code, text, &report);
}

static void out_of_money(struct model *m, const struct meter_plan *p)
{
	char cap[32], spent[32], needed[32];

	text_dollars(m->opt.meter->cap, cap);
	text_dollars(meter_spent(m->opt.meter, p->now_ms), spent);
	text_dollars(p->needed, needed);
	fail_call(m, ERRCODE_BUDGET_EXCEEDED, "The limit is %s, %s is spent, and model call %u needs at least %s more.", cap, spent,
			m->report.call, p->needed == INT64_MAX ? "the price of more tokens than there are" : needed);
}

/* --- one attempt ------------------------------------------------------------------------------------------------------------- */

static void attempt_start(struct model *m)
{
	struct meter_plan p;
	struct err e;

	if (!model_plan(m, &p)) {
		out_of_money(m, &p);
		return;
	}
	if (!model_lay_body(m, &p)) {
		fail_call(m, ERRCODE_INTERNAL, "No memory for a model call.");
		return;
	}
	m->report.attempts++;
	m->plan = p;
	meter_hold(m->opt.meter, &p);
	if (!m->opt.meter_moved(m->opt.arg)) {
		meter_release(m->opt.meter);
		if (m->busy)
			fail_call(m, ERRCODE_INTERNAL, "The hold of a model call could not be written.");
		return;
	}
	if (model_send(m, p.deadline_ms - p.now_ms, &e) < 0) {
		meter_release(m->opt.meter);
		log_warn("model call not sent run=%s call=%u error=%s", m->opt.a->run_id, m->report.call, e.text);
		fail_call(m, ERRCODE_MODEL_ERROR, "The provider cannot be called: %s", e.text);
	}
}

/* --- after an attempt -------------------------------------------------------------------------------------------------------- */

static int64_t backoff_ms(const struct model *m)
{
	uint32_t attempt = m->report.attempts < 6 ? m->report.attempts : 6;
	int64_t base = INT64_C(250) << (attempt - 1);
	uint8_t jitter;

	if (m->retry_after_ms >= 0)
		return m->retry_after_ms;
	random_bytes(&jitter, 1);
	if (base > 8000)
		base = 8000;
	return base + base * jitter / 1024; /* up to a quarter more */
}

/* Another attempt after a pause, if attempts and time are left. */
static bool retry(struct model *m)
{
	int64_t pause = backoff_ms(m), left = m->deadline_ms - clock_boot_ms(), run_left = m->opt.time_left_ms(m->opt.arg);
	struct timeval tv = { .tv_sec = pause / 1000, .tv_usec = pause % 1000 * 1000 };

	if (m->report.attempts >= MODEL_ATTEMPTS || pause >= left || pause >= run_left)
		return false;
	attempt_clear(m);
	event_add(m->timer, &tv);
	return true;
}

/* What the provider says goes into the guest: never its key. */
static void hide_key(struct model *m, struct model_reply *reply)
{
	bool found = model_hide_key(reply->content, strlen(reply->content), m->key);

	for (uint32_t i = 0; i < reply->call_count; i++) {
		struct model_tool_call *c = &reply->calls[i];

		found |= model_hide_key(c->id, strlen(c->id), m->key);
		found |= model_hide_key(c->name, strlen(c->name), m->key);
		found |= model_hide_key(c->arguments, strlen(c->arguments), m->key);
	}
	if (!found)
		return;
	log_warn("provider's reply holds its key run=%s call=%u", m->opt.a->run_id, m->report.call);
	model_note(m, "The provider's reply held its own key: it was blanked out.");
}

static void answer(struct model *m)
{
	struct model_reply reply;
	struct model_report report;
	struct err e;

	model_learn(m);
	if (model_stream_take(m->stream, m->report.call, &reply, &e) < 0) {
		fail_call(m, ERRCODE_INTERNAL, "%s", e.text);
		return;
	}
	hide_key(m, &reply);
	report_fill(m, model_finish_text(reply.finish));
	report = m->report;
	call_clear(m);
	m->opt.on_reply(m->opt.arg, &reply, &report);
}

/* The call's own time, its compute money or the run's timeout is over: says which. */
static void out_of_time(struct model *m)
{
	struct meter_plan p = m->plan;

	p.now_ms = m->opt.compute_ms(m->opt.arg);
	if (m->opt.time_left_ms(m->opt.arg) <= 20)
		fail_call(m, ERRCODE_TIMED_OUT, "The run's time was over in the middle of a model call.");
	else if (m->plan.deadline_by_money)
		out_of_money(m, &p);
	else
		fail_call(m, ERRCODE_MODEL_ERROR, "The provider did not answer model call %u within %lld ms.", m->report.call,
				(long long)m->opt.a->model.call_timeout_ms);
}

static void after_reply(struct model *m, const struct err *e)
{
	char broke[160]; /* how the connection broke */
	struct err why;
	int whole;

	if (e != NULL && m->stream_error.code == ERR_NONE && !model_stream_done(m->stream))
		m->stream_error = *e; /* the transfer broke; its last bytes may still have been whole */
	whole = m->stream_error.code == ERR_PROTOCOL || m->stream_error.code == ERR_LIMIT ? -1 : model_stream_end(m->stream, &why);
	if (m->stream_error.code == ERR_PROTOCOL || m->stream_error.code == ERR_LIMIT)
		why = m->stream_error;
	if (!model_settle(m))
		return;
	if (whole == 0) {
		answer(m);
		return;
	}
	if (e != NULL && e->code == ERR_TIMEOUT) {
		out_of_time(m);
		return;
	}
	if (!m->half_retried && why.code != ERR_LIMIT) {
		m->half_retried = true;
		if (retry(m))
			return;
	}
	if (e == NULL || e->code == why.code || model_stream_done(m->stream) ||
			!text_fmt(broke, sizeof(broke), " (%.150s)", e->text))
		broke[0] = '\0';
	fail_call(m, ERRCODE_MODEL_ERROR, "The provider's answer to model call %u is not usable after %u attempt%s: %s%s. %s",
			m->report.call, m->report.attempts, m->report.attempts == 1 ? "" : "s", why.text, broke,
			"The operator can check the provider's base URL and the model's settings.");
}

/* A 400 that asks for the other name of the output limit is learned, once a run. */
static bool learn_limit(struct model *m, const char *param)
{
	const struct buf *body = &m->error_body;

	if (m->limit_learned || m->status != 400 ||
			!model_error_wants_other_limit((const char *)body->data, body->len, param, m->limit_param))
		return false;
	m->limit_learned = true;
	m->limit_param = m->limit_param == LIMIT_MAX_TOKENS ? LIMIT_MAX_COMPLETION_TOKENS : LIMIT_MAX_TOKENS;
	log_info("provider wants %s run=%s model=%s", model_limit_name(m->limit_param), m->opt.a->run_id, m->opt.a->model.id);
	return true;
}

/* The pause that the provider asked for, when that is why it is not asked again. */
static void too_long_a_pause(const struct model *m, char out[100])
{
	bool too_long = m->retry_after_ms > 0 && m->report.attempts < MODEL_ATTEMPTS &&
			m->retry_after_ms >= m->deadline_ms - clock_boot_ms();

	if (!too_long || !text_fmt(out, 100, " It asks to wait %lld s, longer than this call may take.",
					 (long long)((m->retry_after_ms + 999) / 1000)))
		out[0] = '\0';
}

static void after_refusal(struct model *m)
{
	bool again = m->status == 429 || m->status == 408 || m->status >= 500;
	char text[321], param[65], wait[100] = "";
	struct timeval now = { 0, 0 };
	size_t len;

	model_error_text((const char *)m->error_body.data, m->error_body.len, m->key, text, param);
	len = strlen(text);
	if (len > 0 && text[len - 1] == '.') /* the sentence goes on */
		text[len - 1] = '\0';
	log_info("provider refused run=%s call=%u attempt=%u status=%d", m->opt.a->run_id, m->report.call, m->report.attempts,
			m->status);
	if (learn_limit(m, param)) {
		attempt_clear(m);
		event_add(m->timer, &now);
		return;
	}
	if (again && retry(m))
		return;
	if (again)
		too_long_a_pause(m, wait);
	fail_call(m, ERRCODE_MODEL_ERROR, "The provider answered %d after %u attempt%s: %s.%s %s", m->status, m->report.attempts,
			m->report.attempts == 1 ? "" : "s", text, wait, model_error_hint(m->status));
}

void model_attempt_done(void *arg, int status, const struct err *e)
{
	struct model *m = arg;

	m->http = NULL;
	m->status = status;
	if (status >= 200 && status <= 299) {
		after_reply(m, e);
		return;
	}
	if (!model_release(m))
		return;
	if (status != 0) {
		after_refusal(m);
		return;
	}
	log_info("provider not reached run=%s call=%u attempt=%u error=%s", m->opt.a->run_id, m->report.call, m->report.attempts,
			e != NULL ? err_code_name(e->code) : "none");
	if (e != NULL && e->code == ERR_TIMEOUT && m->deadline_ms - clock_boot_ms() <= 20) {
		out_of_time(m);
		return;
	}
	if (e != NULL && e->code == ERR_TIMEOUT && (m->plan.deadline_by_money || m->opt.time_left_ms(m->opt.arg) <= 20)) {
		out_of_time(m);
		return;
	}
	if ((e == NULL || e->code == ERR_UNAVAILABLE || e->code == ERR_TIMEOUT) && retry(m))
		return;
	fail_call(m, ERRCODE_MODEL_ERROR, "The provider gave no answer after %u attempt%s: %s. %s", m->report.attempts,
			m->report.attempts == 1 ? "" : "s", e != NULL ? e->text : "it speaks another protocol",
			"The operator can check the provider's base URL.");
}

/* --- calls ------------------------------------------------------------------------------------------------------------------- */

int model_start(struct model *m, struct model_call *call, struct err *e)
{
	const struct assignment *a = m->opt.a;
	struct timeval now = { 0, 0 };
	int rc;

	check_abort(!m->busy);
	buf_reset(&m->body);
	rc = model_request_prefix(&a->model, call->tools & model_tools_allowed(a), call, &m->body, e);
	m->prefix_len = m->body.len;
	m->wish_tokens = call->wish_tokens;
	m->report = (struct model_report){ .call = call->call };
	model_call_free(call);
	if (rc < 0) {
		buf_free(&m->body);
		return -1;
	}
	m->busy = true;
	m->half_retried = false;
	m->counted = false;
	m->started_ms = clock_boot_ms();
	m->deadline_ms = m->started_ms + (a->model.call_timeout_ms > 0 ? a->model.call_timeout_ms : 60000);
	event_add(m->timer, &now);
	return 0;
}

bool model_cancel(struct model *m, struct model_report *report)
{
	if (!m->busy)
		return false;
	if (m->http != NULL) {
		curl_call_cancel(m->http);
		m->http = NULL;
		if (m->status >= 200 && m->status <= 299)
			(void)model_settle(m);
		else
			(void)model_release(m);
	}
	report_fill(m, "error");
	model_note(m, "The run ended before the provider's answer was whole.");
	*report = m->report;
	call_clear(m);
	return true;
}
