/*
 * One Postgres connection on the loop. Owns the PGconn, its events and every statement until its callback. One thread; nothing
 * blocks but PQconnectStart's look-up of a host name (use a socket directory, hostaddr or a name in /etc/hosts).
 *
 *        start             connected                 lost, or pgev_free
 *   IDLE ------> CONNECTING --------> READY ------------------------------> IDLE, and again after a backoff
 *                          ---------------------> (failed, or 10 s)
 *
 * READY ends as well when the server is silent for longer than a statement may take: the host may be gone without a word, and TCP
 * would notice after a quarter of an hour or not at all.
 *
 * Statements wait in `waiting` until the connection is READY (2 s at most), then move to `sent`. The server answers in order, so
 * the head of `sent` owns the next result. Callbacks run from the loop only, and may call anything here, pgev_free too.
 */
#include "pgev.h"

#include "clock.h"
#include "ids.h"
#include "log.h"
#include "pgev_internal.h"
#include "text.h"

#include <event2/event.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define BACKOFF_MIN_MS 100
#define BACKOFF_MAX_MS 5000
#define CONNECT_MS 10000
#define WAIT_MS 2000
#define ANSWER_GRACE_MS 5000 /* beyond the statement timeout, which the server keeps */
#define RESULTS_PER_TURN 256

enum pg_state { PG_IDLE, PG_CONNECTING, PG_READY };

struct pgev {
	struct event_base *base;
	struct pgev_options opt;
	char *conninfo, *class_name, *search_path;
	enum pg_state state;
	PGconn *conn;
	struct event *io; /* NULL when there is no socket */
	short io_mask;
	struct event *timer;  /* IDLE: try again; CONNECTING: give up; READY with statements sent: the server is silent */
	struct event *expire; /* head of `waiting` is too old */
	struct event *work;   /* output to flush, statements to send, a failure to act on */
	int backoff_ms;
	bool pipeline; /* not for LISTEN connections */
	bool failed;   /* libpq refused a send: act on it from the loop */
	struct pg_list waiting, sent;
	int outstanding;
	struct pg_prepared prepared; /* on this connection */
	int depth;
	bool freed;
};

static void try_connect(struct pgev *pg);
static void on_io(evutil_socket_t fd, short what, void *arg);

/* --- ends ---------------------------------------------------------------------------------------------------------------- */

static void lose(struct pgev *pg, struct pg_list *l, const char *why)
{
	struct pg_list taken;
	struct pg_job *job;

	pg_list_init(&taken);
	while ((job = pg_list_take(l)) != NULL)
		pg_list_put(&taken, job);
	while ((job = pg_list_take(&taken)) != NULL) {
		pg->outstanding--;
		pg_job_lost(job, pg->class_name, why);
	}
}

static void close_connection(struct pgev *pg)
{
	if (pg->io)
		event_free(pg->io);
	pg->io = NULL;
	PQfinish(pg->conn);
	pg->conn = NULL;
	pg->failed = false;
	pg_prepared_forget(&pg->prepared);
	pg->state = PG_IDLE;
}

static void destroy(struct pgev *pg)
{
	if (pg->timer)
		event_free(pg->timer);
	if (pg->expire)
		event_free(pg->expire);
	if (pg->work)
		event_free(pg->work);
	free(pg->conninfo);
	free(pg->class_name);
	free(pg->search_path);
	free(pg);
}

static void leave(struct pgev *pg)
{
	if (--pg->depth == 0 && pg->freed)
		destroy(pg);
}

static void add_timer(struct event *timer, int64_t ms)
{
	struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = (ms % 1000) * 1000 };

	event_add(timer, &tv);
}

/* Doubles up to the maximum; the half that is random keeps many processes from coming back at once. */
static int next_backoff(struct pgev *pg)
{
	uint16_t r;
	int ms = pg->backoff_ms;

	random_bytes(&r, sizeof(r));
	pg->backoff_ms = ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : ms * 2;
	return ms / 2 + (int)r % (ms / 2 + 1);
}

/* The connection is gone. What was sent has an unknown outcome; what waits goes on waiting for the next one. */
static void disconnect(struct pgev *pg, const char *what)
{
	const char *said = pg->conn ? PQerrorMessage(pg->conn) : "";
	struct buf safe = BUF_INIT(400);
	int wait_ms = next_backoff(pg);
	bool was_ready = pg->state == PG_READY;

	text_safe(&safe, said, strcspn(said, "\n") < 200 ? strcspn(said, "\n") : 200, false);
	log_warn("postgres class=%s %s: %.*s; trying again in %d ms", pg->class_name, what, (int)safe.len,
			safe.data ? (const char *)safe.data : "", wait_ms);
	buf_free(&safe);
	close_connection(pg);
	add_timer(pg->timer, wait_ms);
	for (struct pg_job *job = pg->waiting.head; was_ready && job; job = job->next)
		job->deadline_ms = clock_mono_ns() / 1000000 +
				   WAIT_MS; /* until now they waited for their turn, not for a connection */
	if (was_ready && pg->waiting.head)
		add_timer(pg->expire, WAIT_MS);
	lose(pg, &pg->sent, "the connection was lost; the outcome is unknown");
}

/* --- sending ------------------------------------------------------------------------------------------------------------- */

static bool watch(struct pgev *pg, short mask)
{
	if (pg->io && pg->io_mask == mask && event_get_fd(pg->io) == PQsocket(pg->conn))
		return true;
	if (pg->io)
		event_free(pg->io);
	pg->io = event_new(pg->base, PQsocket(pg->conn), mask | EV_PERSIST, on_io, pg);
	pg->io_mask = mask;
	return pg->io && event_add(pg->io, NULL) == 0;
}

static void flush(struct pgev *pg)
{
	int rc = PQflush(pg->conn);

	if (rc < 0 || !watch(pg, (short)(EV_READ | (rc == 1 ? EV_WRITE : 0))))
		disconnect(pg, "lost while sending");
}

/* Moves what waits into libpq's output. Outside of a pipeline one statement at a time. */
static void send_waiting(struct pgev *pg)
{
	while (pg->state == PG_READY && !pg->failed && pg->waiting.head && (pg->pipeline || !pg->sent.head)) {
		struct pg_job *job = pg_list_take(&pg->waiting);

		job->parsed_here = pg->pipeline && job->st && pg_prepared_need(&pg->prepared, job->st);
		pg_list_put(&pg->sent, job);
		if (!pg_job_send(job, pg->conn, pg->pipeline))
			pg->failed = true;
	}
}

/* Each statement ends by its timeout, so while any is sent the server says something that often. `heard`: it just did. */
static void expect_answer(struct pgev *pg, bool heard)
{
	if (pg->state != PG_READY || pg->opt.statement_timeout_ms <= 0)
		return;
	if (!pg->sent.head)
		event_del(pg->timer);
	else if (heard || !event_pending(pg->timer, EV_TIMEOUT, NULL))
		add_timer(pg->timer, (int64_t)pg->opt.statement_timeout_ms + ANSWER_GRACE_MS);
}

static void do_work(struct pgev *pg)
{
	if (pg->state != PG_READY)
		return;
	send_waiting(pg);
	if (pg->failed)
		disconnect(pg, "refused a statement");
	else
		flush(pg);
	expect_answer(pg, false);
}

static void on_work(evutil_socket_t fd, short what, void *arg)
{
	struct pgev *pg = arg;

	(void)fd;
	(void)what;
	pg->depth++;
	do_work(pg);
	leave(pg);
}

/* --- receiving ----------------------------------------------------------------------------------------------------------- */

static void send_now(struct pgev *pg, struct pg_job *job)
{
	pg_list_put(&pg->sent, job);
	if (!pg_job_send(job, pg->conn, true))
		pg->failed = true;
}

/* A table changed under a prepared statement: the server's copy has to go before it can be parsed anew. */
static void drop_prepared(struct pgev *pg, const struct pg_stmt *st)
{
	struct pg_job *job;
	char sql[128];

	if (!pg_prepared_drop(&pg->prepared, st) || !text_fmt(sql, sizeof(sql), "DEALLOCATE \"%s\"", st->name))
		return;
	job = pg_job_make(NULL, sql, NULL, NULL, NULL);
	if (job) {
		pg->outstanding++;
		send_now(pg, job);
	} else {
		pg->failed = true;
	}
}

/* The head of `sent` is complete. */
static void finish_head(struct pgev *pg)
{
	struct pg_job *job = pg_list_take(&pg->sent);
	enum pg_retry retry = pg_job_retry(job);

	if (job->parsed_here && job->good_results == 0 && job->has_error)
		pg_prepared_drop(&pg->prepared, job->st); /* its Parse failed, so the name does not exist */
	if (retry != PG_RETRY_NO) {                       /* it never ran, so it may be sent again */
		if (retry == PG_RETRY_STALE)
			drop_prepared(pg, job->st);
		pg_job_rewind(job);
		job->parsed_here = pg_prepared_need(&pg->prepared, job->st);
		send_now(pg, job);
		return;
	}
	pg->outstanding--;
	pg_job_done(job, pg->class_name);
}

/* False when the connection cannot go on. */
static bool read_results(struct pgev *pg)
{
	int nothing = 0, i;

	for (i = 0; pg->sent.head && !PQisBusy(pg->conn) && i < RESULTS_PER_TURN; i++) {
		PGresult *res = PQgetResult(pg->conn);

		if (PQstatus(pg->conn) == CONNECTION_BAD) {
			PQclear(res);
			return false;
		}
		if (!res) { /* in a pipeline it only separates; otherwise it is the end of the statement */
			if (!pg->pipeline)
				finish_head(pg);
			else if (++nothing > 2)
				break;
		} else if (PQresultStatus(res) == PGRES_PIPELINE_SYNC) {
			nothing = 0;
			PQclear(res);
			finish_head(pg);
		} else {
			nothing = 0;
			if (!pg_job_result(pg->sent.head, res))
				return false;
		}
		if (pg->freed || pg->state != PG_READY)
			return true;
	}
	if (i == RESULTS_PER_TURN)
		event_active(pg->io, EV_READ, 0); /* the rest in the next turn */
	return true;
}

static void read_notifies(struct pgev *pg)
{
	PGnotify *n;

	while (!pg->freed && pg->conn && (n = PQnotifies(pg->conn)) != NULL) {
		if (pg->opt.on_notify)
			pg->opt.on_notify(pg->opt.arg, n->relname, n->extra);
		PQfreemem(n);
	}
}

static void serve(struct pgev *pg, short what)
{
	if ((what & EV_READ) && !PQconsumeInput(pg->conn)) {
		/* A last result may be there, but without its Sync nobody knows whether it was committed. */
		disconnect(pg, "lost");
		return;
	}
	if (!read_results(pg)) {
		disconnect(pg, "lost");
		return;
	}
	if (pg->freed || pg->state != PG_READY)
		return;
	read_notifies(pg);
	if (!pg->freed && pg->state == PG_READY)
		do_work(pg);
	if (!pg->freed)
		expect_answer(pg, (what & EV_READ) != 0);
}

/* --- connecting ---------------------------------------------------------------------------------------------------------- */

static void drop_notice(void *arg, const char *message)
{
	struct pgev *pg = arg;
	struct buf safe = BUF_INIT(600);

	if (!log_enabled(LOG_LEVEL_DEBUG))
		return;
	text_safe(&safe, message, strcspn(message, "\n") < 300 ? strcspn(message, "\n") : 300, false);
	log_debug("postgres class=%s notice: %.*s", pg->class_name, (int)safe.len, safe.data ? (const char *)safe.data : "");
	buf_free(&safe);
}

static void connected(struct pgev *pg)
{
	if (PQsetnonblocking(pg->conn, 1) != 0 || (pg->pipeline && !PQenterPipelineMode(pg->conn)) || !watch(pg, EV_READ)) {
		disconnect(pg, "could not be set up");
		return;
	}
	event_del(pg->timer);
	event_del(pg->expire);
	PQsetNoticeProcessor(pg->conn, drop_notice, pg);
	pg->state = PG_READY;
	pg->backoff_ms = BACKOFF_MIN_MS;
	log_info("postgres class=%s connected server=%d pid=%d", pg->class_name, PQserverVersion(pg->conn), PQbackendPID(pg->conn));
	if (pg->opt.on_connect)
		pg->opt.on_connect(pg->opt.arg, pg);
	if (!pg->freed && pg->state == PG_READY)
		do_work(pg);
}

/* One step of the hand-shake. The socket may be another one after each, when there are several addresses. */
static void step(struct pgev *pg)
{
	bool ok = true;

	switch (PQconnectPoll(pg->conn)) {
	case PGRES_POLLING_OK: connected(pg); return;
	case PGRES_POLLING_READING:
		pg->io_mask = 0; /* a new socket may have the old number: make the event anew */
		ok = watch(pg, EV_READ);
		break;
	case PGRES_POLLING_WRITING:
		pg->io_mask = 0;
		ok = watch(pg, EV_WRITE);
		break;
	default: ok = false; break;
	}
	if (!ok)
		disconnect(pg, "cannot connect");
}

static void on_io(evutil_socket_t fd, short what, void *arg)
{
	struct pgev *pg = arg;

	(void)fd;
	pg->depth++;
	if (pg->state == PG_CONNECTING)
		step(pg);
	else if (pg->state == PG_READY)
		serve(pg, what);
	leave(pg);
}

static void try_connect(struct pgev *pg)
{
	struct err e;

	pg->conn = pg_connect_start(&pg->opt, &e);
	pg->state = PG_CONNECTING;
	add_timer(pg->timer, CONNECT_MS);
	if (!pg->conn) {
		log_error("%s", e.text);
		disconnect(pg, "cannot start");
	} else if (PQstatus(pg->conn) == CONNECTION_BAD || PQsocket(pg->conn) < 0 || !watch(pg, EV_WRITE)) {
		disconnect(pg, "cannot connect");
	}
}

/* Who stood still may have been this process: SIGCONT ends the loop's wait, and timers come before sockets then. */
static bool has_answered(const struct pgev *pg)
{
	struct pollfd p = { .fd = PQsocket(pg->conn), .events = POLLIN };

	return poll(&p, 1, 0) == 1;
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct pgev *pg = arg;

	(void)fd;
	(void)what;
	pg->depth++;
	if (pg->state == PG_READY && pg->sent.head && has_answered(pg))
		serve(pg, EV_READ);
	else if (pg->state == PG_CONNECTING || (pg->state == PG_READY && pg->sent.head))
		disconnect(pg, "did not answer in time");
	else if (pg->state == PG_IDLE)
		try_connect(pg);
	leave(pg);
}

static void on_expire(evutil_socket_t fd, short what, void *arg)
{
	struct pgev *pg = arg;
	int64_t now = clock_mono_ns() / 1000000;

	(void)fd;
	(void)what;
	pg->depth++;
	while (!pg->freed && pg->state != PG_READY && pg->waiting.head && pg->waiting.head->deadline_ms <= now) {
		struct pg_job *job = pg_list_take(&pg->waiting);

		pg->outstanding--;
		pg_job_lost(job, pg->class_name, "there is no connection; nothing was sent");
	}
	if (!pg->freed && pg->state != PG_READY && pg->waiting.head)
		add_timer(pg->expire, pg->waiting.head->deadline_ms - now + 1);
	leave(pg);
}

/* --- the calls ----------------------------------------------------------------------------------------------------------- */

int pgev_new(struct event_base *base, const struct pgev_options *opt, struct pgev **out, struct err *e)
{
	char *said = NULL;
	PQconninfoOption *parsed = PQconninfoParse(opt->conninfo, &said);
	struct pgev *pg;

	*out = NULL;
	if (!parsed) {
		err_set(e, ERR_INVALID, "postgres %s: connection string: %s", opt->class_name, said ? said : "no memory");
		PQfreemem(said);
		return -1;
	}
	PQconninfoFree(parsed);
	pg = calloc(1, sizeof(*pg));
	if (!pg)
		return err_set(e, ERR_NOMEM, "postgres %s: no memory", opt->class_name);
	pg->base = base;
	pg->opt = *opt;
	pg->opt.conninfo = pg->conninfo = strdup(opt->conninfo);
	pg->opt.class_name = pg->class_name = strdup(opt->class_name);
	pg->opt.search_path = pg->search_path = opt->search_path ? strdup(opt->search_path) : NULL;
	pg->pipeline = opt->on_notify == NULL;
	pg->backoff_ms = BACKOFF_MIN_MS;
	pg_list_init(&pg->waiting);
	pg_list_init(&pg->sent);
	pg->timer = event_new(base, -1, 0, on_timer, pg);
	pg->expire = event_new(base, -1, 0, on_expire, pg);
	pg->work = event_new(base, -1, 0, on_work, pg);
	if (!pg->conninfo || !pg->class_name || (opt->search_path && !pg->search_path) || !pg->timer || !pg->expire || !pg->work) {
		destroy(pg);
		return err_set(e, ERR_NOMEM, "postgres %s: no memory", opt->class_name);
	}
	event_active(pg->timer, EV_TIMEOUT, 0); /* connects from the loop */
	*out = pg;
	return 0;
}

void pgev_free(struct pgev *pg)
{
	if (!pg || pg->freed)
		return;
	pg->freed = true; /* from here on pgev_exec refuses, also from the callbacks below */
	event_del(pg->timer);
	event_del(pg->expire);
	event_del(pg->work);
	pg->depth++;
	close_connection(pg);
	lose(pg, &pg->sent, "shutting down; the outcome is unknown");
	lose(pg, &pg->waiting, "shutting down; nothing was sent");
	leave(pg);
}

static int queue(struct pgev *pg, struct pg_job *job, struct err *e)
{
	if (!job)
		return err_set(e, ERR_NOMEM, "postgres %s: no memory for a statement", pg->class_name);
	job->deadline_ms = clock_mono_ns() / 1000000 + WAIT_MS;
	if (pg->state != PG_READY && !pg->waiting.head)
		add_timer(pg->expire, WAIT_MS);
	pg_list_put(&pg->waiting, job);
	pg->outstanding++;
	if (pg->state == PG_READY)
		event_active(pg->work, EV_TIMEOUT, 0);
	return 0;
}

static int has_room(const struct pgev *pg, struct err *e)
{
	if (pg->freed)
		return err_set(e, ERR_UNAVAILABLE, "postgres %s: shutting down", pg->class_name);
	if (pg->outstanding >= pg->opt.max_outstanding)
		return err_set(e, ERR_UNAVAILABLE, "postgres %s: %d statements are outstanding already", pg->class_name,
				pg->outstanding);
	return 0;
}

int pgev_exec(struct pgev *pg, const struct pg_stmt *st, const struct pg_param *params, pg_cb cb, void *arg, struct err *e)
{
	if (has_room(pg, e) != 0)
		return -1;
	return queue(pg, pg_job_make(st, NULL, params, cb, arg), e);
}

int pgev_sql(struct pgev *pg, const char *sql, pg_cb cb, void *arg, struct err *e)
{
	if (has_room(pg, e) != 0)
		return -1;
	return queue(pg, pg_job_make(NULL, sql, NULL, cb, arg), e);
}

bool pgev_connected(const struct pgev *pg)
{
	return pg->state == PG_READY;
}

int pgev_outstanding(const struct pgev *pg)
{
	return pg->outstanding;
}
