/*
 * The scripted provider's listener: checks the bearer, asks plan.c what to answer, and answers it, with the delays, cuts and errors
 * that a plan may hold. Owns the listener and the answers under way. On controld's loop; nothing waits but by timer.
 */
#include "scripted.h"

#include "plan.h"

#include "files.h"

#include "common/clock.h"
#include "common/httpd.h"
#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>
#include <sodium.h>
#include <sys/queue.h>

#define BODY_MAX (16 * 1024 * 1024)
#define JOBS_MAX 512            /* answers under way */
#define QUEUED_MAX (256 * 1024) /* unsent bytes of one stream before it waits */
#define DRAIN_TRY_MS 5
#define STALL_MS 60000 /* a reader that takes nothing for so long is cut */
#define TOKEN_MIN 16

struct scripted {
	struct event_base *base;
	struct httpd *httpd;
	uint8_t token_hash[crypto_generichash_BYTES];
	char address[320];
	LIST_HEAD(, job) jobs;
	uint32_t job_count;
};

/* One answer under way. Freed by its end or by the client's. */
struct job {
	struct scripted *s;
	struct http_req *req;
	struct chat chat;
	struct plan plan;
	struct render render;
	char request_id[200];
	size_t next;        /* chunk */
	int64_t sent;       /* body bytes */
	bool started;       /* the head is out */
	bool cut;           /* all that may go out is written: abort when it is sent */
	int64_t stalled_ms; /* boot clock since when nothing was taken; 0 = not */
	struct event *timer;
	LIST_ENTRY(job) entry;
};

static void free_job(struct job *j)
{
	LIST_REMOVE(j, entry);
	j->s->job_count--;
	if (j->timer)
		event_free(j->timer);
	chat_free(&j->chat);
	plan_free(&j->plan);
	render_free(&j->render);
	free(j);
}

static void mark(struct http_req *req)
{
	http_reply_header(req, "X-Scripted", PLAN_IS_A_SCRIPT);
}

static void answer_error(struct http_req *req, int status, const char *type, const char *message)
{
	struct buf b = BUF_INIT(4096);
	struct jw w;

	jw_init(&w, &b);
	jw_object(&w);
	jw_kobject(&w, "error");
	jw_kstr(&w, "message", message);
	jw_kstr(&w, "type", type);
	jw_knull(&w, "param");
	jw_knull(&w, "code");
	jw_close(&w);
	jw_close(&w);
	mark(req);
	if (status == 401)
		http_reply_header(req, "WWW-Authenticate", "Bearer");
	http_reply(req, status, "application/json", b.data, jw_end(&w) ? b.len : 0);
	buf_free(&b);
}

/*
 * What this provider would bill, by its own count, whatever it says as usage: nothing without a 2xx head, all that it worked with
 * one, also when the connection is cut later. One line when the head leaves; tests add them up and compare with what a run was
 * charged.
 */
static void tally(const struct job *j, int status)
{
	bool worked = status >= 200 && status <= 299;

	log_debug("scripted tally request=\"%s\" status=%d input_tokens=%lld output_tokens=%lld limit=%lld", j->request_id, status,
			worked ? (long long)j->chat.prompt_tokens : 0, worked ? (long long)j->plan.completion_tokens : 0,
			(long long)j->chat.limit);
}

/* --- carrying a plan out ----------------------------------------------------------------------------------------------------- */

static void wait_ms(struct job *j, int64_t ms)
{
	struct timeval tv = { .tv_sec = (time_t)(ms / 1000), .tv_usec = (suseconds_t)(ms % 1000 * 1000) };

	evtimer_add(j->timer, &tv);
}

static void answer_http(struct job *j)
{
	const struct plan *p = &j->plan;
	const char *type = p->http_json ? "application/json" : "text/plain; charset=utf-8";

	tally(j, p->http_status);
	mark(j->req);
	for (size_t i = 0; i < p->header_count; i++) {
		if (strcasecmp(p->headers[i].name, "Content-Type") == 0)
			type = p->headers[i].value;
		else
			http_reply_header(j->req, p->headers[i].name, p->headers[i].value);
	}
	http_reply(j->req, p->http_status, type, p->http_body, p->http_body ? strlen(p->http_body) : 0);
	free_job(j);
}

static void answer_whole(struct job *j)
{
	const struct buf *b = &j->render.chunks[0];

	tally(j, 200);
	mark(j->req);
	http_reply(j->req, 200, "application/json", b->data, b->len);
	free_job(j);
}

/* Writes the next chunk, or what a cut leaves of it. */
static void write_chunk(struct job *j)
{
	const struct buf *b = &j->render.chunks[j->next++];
	size_t n = b->len;

	if (j->plan.cut_after >= 0 && j->sent + (int64_t)n > j->plan.cut_after) {
		n = (size_t)(j->plan.cut_after - j->sent);
		j->cut = true;
	}
	if (n > 0)
		http_stream_write(j->req, b->data, n);
	j->sent += (int64_t)n;
}

/* True when the reader has fallen behind and the job waits for it, or was cut because of it. */
static bool wait_for_reader(struct job *j, size_t most)
{
	int64_t now = clock_boot_ms();

	if (http_stream_queued(j->req) <= most) {
		j->stalled_ms = 0;
		return false;
	}
	if (!j->stalled_ms)
		j->stalled_ms = now;
	if (now - j->stalled_ms > STALL_MS) {
		http_stream_abort(j->req);
		free_job(j);
	} else {
		wait_ms(j, DRAIN_TRY_MS);
	}
	return true;
}

static void go_on(struct job *j)
{
	if (j->plan.http_status) {
		answer_http(j);
		return;
	}
	if (!j->plan.stream && j->plan.cut_after < 0) {
		answer_whole(j);
		return;
	}
	if (!j->started) {
		tally(j, 200);
		mark(j->req);
		http_stream_start(j->req, 200, j->plan.stream ? "text/event-stream" : "application/json");
		j->started = true;
	}
	while (!j->cut && j->next < j->render.count) {
		if (wait_for_reader(j, QUEUED_MAX))
			return;
		write_chunk(j);
		if (j->plan.chunk_delay_ms > 0 && !j->cut && j->next < j->render.count) {
			wait_ms(j, j->plan.chunk_delay_ms);
			return;
		}
	}
	if (!j->cut) {
		http_stream_end(j->req);
		free_job(j);
	} else if (!wait_for_reader(j, 0)) {
		http_stream_abort(j->req);
		free_job(j);
	}
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	go_on(arg);
}

static void on_client_gone(void *arg)
{
	free_job(arg);
}

/* --- requests ---------------------------------------------------------------------------------------------------------------- */

static int prepare(struct job *j, struct err *e)
{
	const char *id = http_header(j->req, "X-Request-Id");
	const uint8_t *body;
	size_t n;

	if (id && strlen(id) < sizeof(j->request_id) && text_utf8_clean(id, strlen(id)))
		(void)!text_copy(j->request_id, sizeof(j->request_id), id);
	body = http_body(j->req, &n);
	if (chat_parse(body, n, &j->chat, e) != 0 || plan_make(&j->chat, plan_attempt(j->request_id), &j->plan, e) != 0)
		return -1;
	if (j->plan.http_status)
		return 0;
	return render_reply(&j->chat, &j->plan, j->request_id, clock_real_ms() / 1000, &j->render, e);
}

static void complete(struct scripted *s, struct http_req *req)
{
	struct job *j = s->job_count < JOBS_MAX ? calloc(1, sizeof(*j)) : NULL;
	struct err e;

	if (!j) {
		http_reply_header(req, "Retry-After", "1");
		answer_error(req, 503, "server_error", "too many answers are under way; try again");
		return;
	}
	j->s = s;
	j->req = req;
	LIST_INSERT_HEAD(&s->jobs, j, entry);
	s->job_count++;
	j->timer = evtimer_new(s->base, on_timer, j);
	if (!j->timer)
		err_set(&e, ERR_NOMEM, "no memory");
	if (!j->timer || prepare(j, &e) != 0) {
		int status = e.code == ERR_NOMEM || e.code == ERR_INTERNAL ? 500 : e.code == ERR_NOT_FOUND ? 404 : 400;

		free_job(j);
		answer_error(req, status, status == 500 ? "server_error" : "invalid_request_error", e.text);
		return;
	}
	log_debug("scripted answer request=\"%s\" model=%s turn=%zu calls=%zu", j->request_id, j->chat.model, j->chat.turn,
			j->plan.call_count);
	http_on_close(req, on_client_gone, j);
	if (j->plan.delay_ms > 0)
		wait_ms(j, j->plan.delay_ms);
	else
		go_on(j);
}

static void list_models(struct http_req *req)
{
	static const char body[] = "{\"object\":\"list\",\"data\":["
				   "{\"id\":\"auto\",\"object\":\"model\",\"created\":0,\"owned_by\":\"" PLAN_IS_A_SCRIPT "\"},"
				   "{\"id\":\"shell\",\"object\":\"model\",\"created\":0,\"owned_by\":\"" PLAN_IS_A_SCRIPT "\"}]}";

	mark(req);
	http_reply(req, 200, "application/json", body, sizeof(body) - 1);
}

static bool authorized(const struct scripted *s, const struct http_req *req)
{
	const char *header = http_header(req, "Authorization");
	uint8_t hash[crypto_generichash_BYTES];

	if (!header || http_header_count(req, "Authorization") != 1 || strncasecmp(header, "Bearer ", 7) != 0)
		return false;
	header += 7 + strspn(header + 7, " ");
	crypto_generichash(hash, sizeof(hash), (const uint8_t *)header, strlen(header), NULL, 0);
	return sodium_memcmp(hash, s->token_hash, sizeof(hash)) == 0;
}

static void handle(void *arg, struct http_req *req)
{
	struct scripted *s = arg;
	const char *path = http_path(req);

	if (!authorized(s, req))
		answer_error(req, 401, "invalid_request_error", "a valid bearer token is needed (scripted_token_file)");
	else if (strcmp(path, "/v1/models") == 0 && http_method(req) == HTTP_GET)
		list_models(req);
	else if (strcmp(path, "/v1/chat/completions") == 0 && http_method(req) == HTTP_POST)
		complete(s, req);
	else
		answer_error(req, 404, "invalid_request_error", "there are POST /v1/chat/completions and GET /v1/models here");
}

static void refuse(void *arg, struct http_req *req, int status, const char *detail)
{
	(void)arg;
	answer_error(req, status, status >= 500 ? "server_error" : "invalid_request_error", detail);
}

/* --- up and down ------------------------------------------------------------------------------------------------------------- */

static int load_token(const char *path, uint8_t hash[crypto_generichash_BYTES], struct err *e)
{
	struct buf b = BUF_INIT(4096);
	int rc = -1;

	if (sodium_init() < 0)
		return err_set(e, ERR_INTERNAL, "libsodium did not start");
	if (file_read(path, true, &b, e) == 0) {
		size_t n = 0;

		while (n < b.len && b.data[n] > ' ' && b.data[n] < 0x7f)
			n++;
		if (n < TOKEN_MIN || (n < b.len && b.data[n] != '\n'))
			err_set(e, ERR_INVALID, "%s must hold one line of at least %d visible characters", path, TOKEN_MIN);
		else
			rc = crypto_generichash(hash, crypto_generichash_BYTES, b.data, n, NULL, 0);
	}
	if (b.data)
		sodium_memzero(b.data, b.cap);
	buf_free(&b);
	return rc == 0 ? 0 : err_wrap(e, "scripted_token_file");
}

int scripted_check_token(const char *token_file, struct err *e)
{
	uint8_t hash[crypto_generichash_BYTES];

	return load_token(token_file, hash, e);
}

int scripted_start(const struct scripted_options *opt, struct scripted **out, struct err *e)
{
	struct scripted *s = calloc(1, sizeof(*s));
	struct httpd_options http = {
		.listen = opt->listen,
		.max_headers = 16384,
		.max_body = BODY_MAX,
		.body_budget = 4 * BODY_MAX,
		.request_deadline_ms = 30000,
		.idle_timeout_ms = 75000,
		.max_connections = 1024,
		.handler = handle,
		.refuse = refuse,
		.arg = s,
	};
	const char *colon = strrchr(opt->listen, ':');

	if (!s)
		return err_set(e, ERR_NOMEM, "no memory for the scripted provider");
	s->base = opt->base;
	LIST_INIT(&s->jobs);
	if (load_token(opt->token_file, s->token_hash, e) != 0)
		goto fail;
	if (httpd_new(opt->base, &http, &s->httpd, e) != 0) {
		err_wrap(e, "scripted_listen %s", opt->listen);
		goto fail;
	}
	if (!colon || !text_fmt(s->address, sizeof(s->address), "%.*s:%u", colon == opt->listen ? 7 : (int)(colon - opt->listen),
				      colon == opt->listen ? "0.0.0.0" : opt->listen, (unsigned)httpd_port(s->httpd))) {
		err_set(e, ERR_INVALID, "scripted_listen must be host:port");
		goto fail;
	}
	log_info("scripted provider listens: a script, not a model address=%s", s->address);
	*out = s;
	return 0;
fail:
	scripted_free(s);
	return -1;
}

const char *scripted_address(const struct scripted *s)
{
	return s->address;
}

void scripted_drain(struct scripted *s)
{
	httpd_stop_accepting(s->httpd);
}

void scripted_free(struct scripted *s)
{
	struct job *j, *next;

	if (!s)
		return;
	for (j = LIST_FIRST(&s->jobs); j; j = next) {
		struct http_req *req = j->req;
		bool started = j->started;

		next = LIST_NEXT(j, entry);
		http_on_close(req, NULL, NULL);
		free_job(j);
		if (started)
			http_stream_abort(req);
		else
			answer_error(req, 503, "server_error", "the scripted provider is stopping");
	}
	if (s->httpd)
		httpd_free(s->httpd);
	sodium_memzero(s->token_hash, sizeof(s->token_hash));
	free(s);
}
