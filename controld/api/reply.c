/* Asking the store and answering: the one place that ends a request. Called by every handler; runs on the loop. */
#include "api_internal.h"

#include "common/log.h"
#include "common/text.h"

#include <inttypes.h>
#include <stdlib.h>

#define PROBLEM_TEXT_MAX 1024

/* --- life ----------------------------------------------------------------------------------------------------------------------
 */

static void unlink_req(struct api_req *r)
{
	if (!r->prev)
		return;
	*r->prev = r->next;
	if (r->next)
		r->next->prev = r->prev;
	r->prev = NULL;
	r->api->request_count--;
}

static void free_if_done(struct api_req *r)
{
	if (r->http || r->holds)
		return;
	if (r->free_state)
		r->free_state(r->state);
	free(r);
}

void *api_hold(struct api_req *r)
{
	r->holds++;
	return r;
}

void api_asked(int rc, struct api_req *r, const struct err *e)
{
	if (rc == 0)
		return;
	r->holds--;
	api_error(r, e);
}

struct api_req *api_back(void *arg, const struct err *e)
{
	struct api_req *r = arg;

	r->holds--;
	if (!r->http) {
		free_if_done(r);
		return NULL;
	}
	if (e) {
		api_error(r, e);
		return NULL;
	}
	return r;
}

void api_set_state(struct api_req *r, void *state, void (*free_state)(void *state))
{
	check_abort(!r->state);
	r->state = state;
	r->free_state = free_state;
}

/* The client went away, or the api is freed: nobody is answered any more. */
void api_req_gone(struct api_req *r)
{
	r->http = NULL;
	unlink_req(r);
	if (r->on_gone)
		r->on_gone(r);
	free_if_done(r);
}

static void on_close(void *arg)
{
	api_req_gone(arg);
}

void api_req_start(struct api_req *r)
{
	struct api *a = r->api;

	r->next = a->requests;
	r->prev = &a->requests;
	if (r->next)
		r->next->prev = &r->next;
	a->requests = r;
	a->request_count++;
	id_make("req", r->id);
	http_on_close(r->http, on_close, r);
}

/* Ends the request: nothing of r may be used after the answer has been given to http. */
static struct http_req *detach(struct api_req *r)
{
	struct http_req *http = r->http;

	check_abort(http != NULL);
	http_on_close(http, NULL, NULL);
	r->http = NULL;
	unlink_req(r);
	return http;
}

struct http_req *api_take_http(struct api_req *r)
{
	struct http_req *http = detach(r);

	api_count(r->api, r->route, 200);
	free_if_done(r);
	return http;
}

/* --- answers ---------------------------------------------------------------------------------------------------------------------
 */

void api_common_headers(const struct api *a, struct http_req *http, const char *request_id)
{
	(void)a;
	http_reply_header(http, "Request-Id", request_id);
	http_reply_header(http, "Cache-Control", "no-store");
	http_reply_header(http, "X-Content-Type-Options", "nosniff");
}

void api_header(struct api_req *r, const char *name, const char *value)
{
	http_reply_header(r->http, name, value);
}

void api_retry_after(struct api_req *r, int seconds)
{
	char text[16];

	if (text_fmt(text, sizeof(text), "%d", seconds))
		api_header(r, "Retry-After", text);
}

static void finish(struct api_req *r, int status, const char *content_type, const void *body, size_t n)
{
	struct http_req *http = detach(r);

	api_count(r->api, r->route, status);
	log_debug("request req=%s method=%s path=%s status=%d bytes=%zu", r->id, http_method_name(http),
			r->route ? r->route->pattern : "-", status, n);
	api_common_headers(r->api, http, r->id);
	if (r->api->draining) /* the next request of this client goes to another controld */
		http_reply_header(http, "Connection", "close");
	http_reply(http, status, content_type, body, n);
	free_if_done(r);
}

void api_reply(struct api_req *r, int status, struct buf *json)
{
	if (json->failed) {
		log_error("answer req=%s route=%s does not fit or memory is short bytes=%zu", r->id,
				r->route ? r->route->pattern : "-", json->len);
		buf_free(json);
		api_problem(r, PROBLEM_INTERNAL, "The answer could not be made.");
		return;
	}
	finish(r, status, "application/json", json->data, json->len);
	buf_free(json);
}

void api_reply_empty(struct api_req *r, int status)
{
	finish(r, status, NULL, NULL, 0);
}

void api_reply_text(struct api_req *r, int status, const char *text)
{
	finish(r, status, "text/plain; charset=utf-8", text, strlen(text));
}

static void answer_problem(struct api_req *r, enum problem p, const char *detail, const struct field_errors *fe)
{
	struct buf out = BUF_INIT(256 * 1024);

	if (p == PROBLEM_UNAVAILABLE || p == PROBLEM_IDEMPOTENCY_IN_PROGRESS)
		api_retry_after(r, 1);
	if (!problem_render(&out, r->api->public_url, p, detail, r->id, fe)) {
		buf_reset(&out);
		if (!problem_render(&out, r->api->public_url, p, "The full explanation did not fit.", r->id, NULL))
			buf_reset(&out);
	}
	finish(r, problem_status(p), "application/problem+json", out.data, out.len);
	buf_free(&out);
}

void api_problem(struct api_req *r, enum problem p, const char *fmt, ...)
{
	char text[PROBLEM_TEXT_MAX];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	answer_problem(r, p, n < 0 ? problem_title(p) : text, NULL);
}

void api_problem_fields(struct api_req *r, struct field_errors *fe)
{
	char text[64];
	size_t n = fe->count + fe->more;

	if (!text_fmt(text, sizeof(text), "%zu things are to be mended; errors lists them.", n))
		text[0] = '\0';
	answer_problem(r, field_errors_problem(fe), n == 1 && fe->count == 1 ? fe->list[0].detail : text, fe);
	field_errors_free(fe);
}

void api_error(struct api_req *r, const struct err *e)
{
	enum problem p = problem_of_err(e);

	switch (p) {
	case PROBLEM_INTERNAL:
		log_error("request req=%s route=%s failed code=%s: %s", r->id, r->route ? r->route->pattern : "-",
				err_code_name(e->code), e->text);
		api_problem(r, p, "The service made a mistake. Tell the operator this request_id.");
		return;
	case PROBLEM_UNAVAILABLE:
		log_warn("request req=%s route=%s unavailable: %s", r->id, r->route ? r->route->pattern : "-", e->text);
		api_problem(r, p, "The database does not answer at the moment. Send the request again.");
		return;
	case PROBLEM_CONFLICT: /* a lock that was not had in time: again, not for the client to mend */
		api_problem(r, PROBLEM_UNAVAILABLE,
				"Too much is going on with the same thing at the moment. Send the request again.");
		return;
	default: api_problem(r, p, "%s", e->text); return;
	}
}

void api_done_problem(struct api_req *r, const struct store_done *d, const char *what)
{
	switch (d->result) {
	case STORE_DONE_NOT_FOUND:
		if (*d->detail)
			api_problem(r, PROBLEM_NOT_FOUND, "%s", d->detail);
		else
			api_problem(r, PROBLEM_NOT_FOUND, "There is no such %s.", what);
		return;
	case STORE_DONE_CONFLICT:
		api_problem(r, PROBLEM_CONFLICT, "%s", *d->detail ? d->detail : "This conflicts with the present state.");
		return;
	case STORE_DONE_LIMIT:
		api_problem(r, PROBLEM_CONFLICT, "%s",
				*d->detail ? d->detail : "There are as many as are allowed; remove some first.");
		return;
	case STORE_DONE: break;
	}
	api_problem(r, PROBLEM_INTERNAL, "The service made a mistake. Tell the operator this request_id.");
}

void api_wake(struct api *a, enum api_wake what, const char *id)
{
	if (a->opt.wake)
		a->opt.wake(a->opt.arg, what, id);
}

/* --- JSON helpers ------------------------------------------------------------------------------------------------------- */

void json_time(struct jw *w, const char *name, int64_t unix_ms)
{
	char text[32];

	if (unix_ms <= 0) {
		jw_knull(w, name);
		return;
	}
	text_time_ms(unix_ms, text);
	jw_kstr(w, name, text);
}

void list_begin(struct jw *w, struct buf *out)
{
	jw_init(w, out);
	jw_object(w);
	jw_karray(w, "data");
}

void list_end(struct jw *w, const char *next_cursor)
{
	jw_close(w);
	jw_kstr(w, "next_cursor", next_cursor);
	jw_close(w);
	if (!jw_end(w))
		w->b->failed = true;
}
