/*
 * The link process: the node's only speaker to controld, and without any right over a VM. It forwards: assignments and commands to
 * keeper, events out of the spools (read only) and ends to controld, answers to brokers (through keeper). It holds the node's
 * signing key and no other secret; assignments' secrets pass through sealed. When keeper goes away it ends; when it crashes keeper
 * starts another one, tells it again what lives and what its brokers said last.
 */
#include "link_internal.h"

#include "noded/roles.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <signal.h>
#include <sodium.h>
#include <sys/prctl.h>
#include <unistd.h>

#define KEEPER_QUEUE_MAX (64 * 1024 * 1024)

/* --- the pump: everything that wants to be asked, as far as slots go ---------------------------------------------------------- */

/* Everything that waits for a moment waits at most until then; peer.c's tick would find it too, but later. */
static void wake_at(int64_t at_ms, int64_t now, int64_t *left)
{
	if (at_ms > now && at_ms - now < *left)
		*left = at_ms - now;
}

static void schedule(struct link *l)
{
	int64_t now = clock_boot_ms(), left = INT64_MAX;
	struct timeval tv;

	if (l->polls == 0)
		wake_at(l->poll_after_ms, now, &left);
	else if (l->news && l->polls < POLLS_MAX)
		wake_at(l->news_after_ms, now, &left);
	for (const struct run_entry *r = l->runs; r != NULL; r = r->next)
		if (!r->run.over && r->run.under_way == 0)
			wake_at(r->run.not_before_ms, now, &left);
	wake_at(images_next_ms(l), now, &left);
	if (left == INT64_MAX)
		return;
	tv.tv_sec = left / 1000;
	tv.tv_usec = left % 1000 * 1000;
	event_add(l->pump_event, &tv);
}

static void pump(struct link *l)
{
	if (l->peers == NULL)
		return;
	enrol_pump(l);
	if (!l->bye_due)
		poll_pump(l);
	if (l->node_id[0] != '\0') {
		requests_pump(l);
		images_pump(l);
	}
	requests_reap(l);
	schedule(l);
}

static void on_pump(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	pump(arg);
}

void link_pump_soon(struct link *l)
{
	event_active(l->pump_event, EV_TIMEOUT, 0);
}

static void on_ready(void *arg)
{
	link_pump_soon(arg);
}

static void on_answer(void *arg, void *user, const struct link_reply *reply)
{
	struct link *l = arg;
	struct asked *a = user;

	link_metrics_answer(l, a->type, reply);
	if (a->type == LINK_NEXT)
		poll_answer(l, a, reply);
	else if (a->type == LINK_ENROL)
		enrol_answer(l, reply);
	else if (a->type == LINK_IMAGE || a->type == LINK_IMAGE_BLOB || a->type == LINK_BYE)
		images_answer(l, a, reply);
	else
		requests_answer(l, a, reply);
	free(a);
	link_pump_soon(l);
}

/* --- frames to keeper -------------------------------------------------------------------------------------------------------- */

bool link_to_keeper(struct link *l, uint8_t type, const void *body, size_t n)
{
	if (framed_send(l->keeper, type, body, n))
		return true;
	log_error("keeper does not take frames type=%u", type);
	return false;
}

void link_token_frame(struct link *l, uint8_t type, const uint8_t token[TOKEN_LEN])
{
	(void)link_to_keeper(l, type, token, TOKEN_LEN);
}

void link_to_broker(struct link *l, const uint8_t token[TOKEN_LEN], uint8_t type, const void *body, size_t n)
{
	struct buf frame = BUF_INIT(ROLE_FRAME_MAX);

	wire_put_raw(&frame, token, TOKEN_LEN);
	wire_put_u8(&frame, type);
	wire_put_raw(&frame, body, n);
	if (!frame.failed)
		(void)link_to_keeper(l, RF_KEEPER_TO_BROKER, frame.data, frame.len);
	buf_free(&frame);
}

/* --- runs -------------------------------------------------------------------------------------------------------------------- */

struct run_entry *link_find(const struct link *l, const uint8_t token[TOKEN_LEN])
{
	for (struct run_entry *r = l->runs; r != NULL; r = r->next)
		if (memcmp(r->run.token, token, TOKEN_LEN) == 0 && !r->run.over)
			return r;
	return NULL;
}

struct run_entry *link_add(struct link *l, const char *run_id, const uint8_t token[TOKEN_LEN])
{
	struct run_entry *r = l->run_count < LINK_RUNS_MAX ? calloc(1, sizeof(*r)) : NULL;

	if (r == NULL) {
		log_error("no room for another run run=%s held=%u", run_id, l->run_count);
		return NULL;
	}
	link_run_init(&r->run, run_id, token);
	r->next = l->runs;
	l->runs = r;
	l->run_count++;
	return r;
}

void link_kill_all(struct link *l)
{
	for (struct run_entry *r = l->runs; r != NULL; r = r->next) {
		if (r->run.over)
			continue;
		r->run.over = true;
		link_token_frame(l, RF_KEEPER_KILL, r->run.token);
		link_token_frame(l, RF_KEEPER_DONE, r->run.token);
	}
}

/* --- frames from keeper ------------------------------------------------------------------------------------------------------ */

static int take_init(struct link *l, const uint8_t *body, size_t n, struct err *e)
{
	struct peers_options opt = { .base = l->base,
		.addresses = l->init.addresses,
		.ca_pem = l->init.ca_pem,
		.sign_secret = l->init.sign_secret,
		.node_id = l->node_id,
		.on_ready = on_ready,
		.arg = l };
	struct join_token token;

	if (l->peers != NULL)
		return err_set(e, ERR_PROTOCOL, "a second init");
	if (role_link_init_decode(body, n, &l->init, e) < 0)
		return -1;
	memcpy(l->node_id, l->init.node_id, sizeof(l->node_id));
	if (l->init.poll_ms == 0 || l->init.poll_ms > LINK_POLL_MS)
		l->init.poll_ms = LINK_POLL_MS;
	/* Before enrolment the join token is the only one that knows addresses and CA. */
	if (l->init.join_token[0] != '\0' && (l->init.addresses[0] == '\0' || l->init.ca_pem[0] == '\0')) {
		if (join_token_parse(l->init.join_token, &token, e) < 0)
			return -1;
		if (l->init.addresses[0] == '\0')
			memcpy(l->init.addresses, token.addresses, sizeof(l->init.addresses));
		if (l->init.ca_pem[0] == '\0')
			memcpy(l->init.ca_pem, token.ca_pem, sizeof(l->init.ca_pem));
		sodium_memzero(&token, sizeof(token));
	}
	return peers_new(&opt, on_answer, &l->peers, e);
}

/* Only microvm.ready is written before START is granted: more than that means that an earlier link process asked. */
static void infer_grant(struct run_entry *r)
{
	if (r->run.grant == GRANT_NONE && r->run.has_spool && r->run.last_seq > r->run.first_seq)
		r->run.grant = GRANT_GIVEN;
}

static void take_vm(struct link *l, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct run_entry *r;
	struct role_vm vm;
	struct spool_tail tail;
	struct err e;

	if (role_vm_decode(body, n, &vm, &e) < 0 || fd_count > 1) {
		log_error("frame about a VM malformed error=%s", fd_count > 1 ? "more than a spool with it" : e.text);
		for (size_t i = 0; i < fd_count; i++)
			close(fds[i]);
		return;
	}
	r = link_find(l, vm.token);
	if (r == NULL)
		r = link_add(l, vm.run_id, vm.token);
	if (r != NULL && r->run.grant == GRANT_NONE && vm.state != VM_STARTING)
		r->run.grant = GRANT_GIVEN;
	if (r == NULL || r->spool != NULL) {
		if (fd_count == 1)
			close(fds[0]);
		return;
	}
	r->admitted = r->pending;
	r->pending = false;
	if (fd_count == 0)
		return; /* nothing was written: only how it ended is left to say */
	if (spool_open(fds[0], false, &r->spool, &e) < 0) {
		log_error("spool not usable run=%s error=%s", vm.run_id, e.text);
		return;
	}
	spool_tail(r->spool, &tail);
	r->run.has_spool = true;
	r->run.first_seq = r->run.next_send = spool_head(r->spool)->first_seq;
	r->run.last_seq = tail.next_seq - 1;
	r->run.spent = tail.spent;
	r->run.held = tail.held;
	infer_grant(r);
}

static void take_capacity(struct link *l, const uint8_t *body, size_t n)
{
	struct capacity c = { .known = true };
	struct wire_reader r;
	struct err e;

	wire_read_init(&r, body, n);
	c.free_memory_mib = wire_u32(&r);
	c.free_vcpus = wire_u32(&r);
	c.free_slots = wire_u32(&r);
	c.total_memory_mib = wire_u32(&r);
	c.total_vcpus = wire_u32(&r);
	c.total_slots = wire_u32(&r);
	if (wire_end(&r, "capacity", &e) < 0) {
		log_error("frame malformed error=%s", e.text);
		return;
	}
	if (c.free_slots > l->capacity.free_slots || c.free_memory_mib > l->capacity.free_memory_mib ||
			c.free_vcpus > l->capacity.free_vcpus)
		poll_news(l);
	l->capacity = c;
	for (struct run_entry *run = l->runs; run != NULL; run = run->next)
		run->admitted = false;
}

static void set_refusal(struct run_entry *r, struct wire_reader *rd)
{
	r->run.refuse_failed = wire_bool(rd);
	r->run.refuse_code = wire_u32(rd);
	wire_str_fixed(rd, r->run.refuse_reason, sizeof(r->run.refuse_reason));
	r->run.refuse_due = true;
	r->pending = false;
}

static void take_end(struct run_entry *r, const uint8_t *body, size_t n)
{
	struct run_end end;
	struct err e;

	if (r->run.finish_due)
		return;
	if (run_end_decode(body, n, &end, &e) < 0) {
		log_error("end of a run malformed run=%s error=%s", r->run.run_id, e.text);
		return;
	}
	if (r->run.grant == GRANT_NONE) {
		/* It never started for controld: that is a refusal, and counts as an attempt. */
		r->run.refuse_due = r->run.refuse_failed = true;
		r->run.refuse_code = end.code;
		if (!text_fmt(r->run.refuse_reason, sizeof(r->run.refuse_reason), "%.*s", 500, end.detail))
			r->run.refuse_reason[0] = '\0';
		r->run.refuse_reason[text_utf8_border(r->run.refuse_reason, strlen(r->run.refuse_reason))] = '\0';
	} else if (buf_add(&r->run.finish, body, n)) {
		r->run.finish_due = true;
		r->run.finish_seq = end.last_seq;
		if (end.last_seq > r->run.last_seq)
			r->run.last_seq = end.last_seq;
	}
	run_end_free(&end);
}

static void take_blob_wish(struct run_entry *r, struct wire_reader *rd)
{
	wire_raw(rd, r->run.blob_sha, SHA256_LEN);
	r->run.blob_offset = wire_u64(rd);
	r->run.blob_due = true;
	if (r->run.grant == GRANT_NONE)
		r->run.grant = GRANT_GIVEN; /* a broker asks for files only of a run that was granted; another link process asked */
}

static void from_broker(struct link *l, const uint8_t *body, size_t n)
{
	struct run_entry *r;
	struct wire_reader rd;
	uint8_t token[TOKEN_LEN], type;
	uint64_t last;

	wire_read_init(&rd, body, n);
	wire_raw(&rd, token, sizeof(token));
	type = wire_u8(&rd);
	r = rd.failed ? NULL : link_find(l, token);
	if (r == NULL)
		return;
	switch (type) {
	case RF_BL_START:
		r->run.grant = GRANT_WANTED; /* also when it was given before: the broker did not hear of it */
		break;
	case RF_BL_EVENTS:
		last = wire_u64(&rd);
		r->run.spent = wire_i64(&rd);
		r->run.held = wire_i64(&rd);
		if (last > r->run.last_seq)
			r->run.last_seq = last;
		infer_grant(r);
		break;
	case RF_BL_FINISH:
		if (r->run.grant == GRANT_NONE)
			r->run.grant = GRANT_GIVEN; /* a broker finishes only what was started; another link process asked */
		take_end(r, rd.p, rd.left);
		return;
	case RF_BL_REFUSE: set_refusal(r, &rd); break;
	case RF_BL_BLOB: take_blob_wish(r, &rd); break;
	default: log_warn("broker frame of unknown type run=%s type=%u", r->run.run_id, type); break;
	}
	if (rd.failed)
		log_error("broker frame malformed run=%s type=%u", r->run.run_id, type);
}

static void take_refused(struct link *l, const uint8_t *body, size_t n)
{
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	struct run_entry *r;
	struct wire_reader rd;

	wire_read_init(&rd, body, n);
	wire_str_fixed(&rd, run_id, sizeof(run_id));
	wire_raw(&rd, token, sizeof(token));
	if (rd.failed) {
		log_error("frame about a refusal malformed");
		return;
	}
	r = link_find(l, token);
	if (r == NULL)
		r = link_add(l, run_id, token);
	if (r != NULL)
		set_refusal(r, &rd);
}

static void take_ended(struct link *l, const uint8_t *body, size_t n)
{
	struct run_entry *r = n > TOKEN_LEN ? link_find(l, body) : NULL;
	struct spool_tail tail;
	struct err e;

	if (r == NULL)
		return;
	if (r->spool != NULL && spool_refresh(r->spool, &e) == 0) {
		spool_tail(r->spool, &tail);
		r->run.last_seq = tail.next_seq - 1;
		r->run.spent = tail.spent;
		r->run.held = tail.held;
	}
	take_end(r, body + TOKEN_LEN, n - TOKEN_LEN);
}

/* Also one that is over, until it is reaped: keeper hears of its end in a moment. */
static bool holds(const struct link *l, const uint8_t token[TOKEN_LEN])
{
	for (const struct run_entry *r = l->runs; r != NULL; r = r->next)
		if (memcmp(r->run.token, token, TOKEN_LEN) == 0)
			return true;
	return false;
}

static bool named(const uint8_t *tokens, uint32_t count, const uint8_t token[TOKEN_LEN])
{
	for (uint32_t i = 0; i < count; i++)
		if (memcmp(tokens + (size_t)i * TOKEN_LEN, token, TOKEN_LEN) == 0)
			return true;
	return false;
}

/* Nothing is left to say of it, and keeper has not named it twice: one list may have crossed with an assignment. */
static uint32_t drop_astray(struct link *l, const uint8_t *tokens, uint32_t count)
{
	uint32_t dropped = 0;

	for (struct run_entry *r = l->runs; r != NULL; r = r->next) {
		bool busy = r->run.over || r->run.under_way != 0 || r->run.refuse_due || r->run.finish_due;
		bool before = r->astray;

		r->astray = !busy && !named(tokens, count, r->run.token);
		if (!r->astray || !before)
			continue;
		log_error("a run is held that is not here: dropped run=%s", r->run.run_id);
		r->run.over = true;
		dropped++;
	}
	return dropped;
}

static void take_runs(struct link *l, const uint8_t *body, size_t n)
{
	struct buf answer = BUF_INIT(LINK_RUNS_MAX * TOKEN_LEN + 16), unknown = BUF_INIT(LINK_RUNS_MAX * TOKEN_LEN);
	struct wire_reader r;
	uint32_t count, missing = 0;

	wire_read_init(&r, body, n);
	count = wire_count(&r, LINK_RUNS_MAX);
	if (r.failed || r.left != (size_t)count * TOKEN_LEN) {
		log_error("list of runs malformed");
		return;
	}
	wire_put_u32(&answer, drop_astray(l, r.p, count));
	for (uint32_t i = 0; i < count; i++)
		if (!holds(l, r.p + (size_t)i * TOKEN_LEN)) {
			wire_put_raw(&unknown, r.p + (size_t)i * TOKEN_LEN, TOKEN_LEN);
			missing++;
		}
	wire_put_u32(&answer, missing);
	wire_put_raw(&answer, unknown.data, unknown.len);
	if (!answer.failed && !unknown.failed)
		(void)link_to_keeper(l, RF_KEEPER_RUNS, answer.data, answer.len);
	buf_free(&answer);
	buf_free(&unknown);
}

static void take_obeyed(struct link *l, const uint8_t *body, size_t n)
{
	struct wire_reader r;
	uint64_t id;
	struct err e;

	wire_read_init(&r, body, n);
	id = wire_u64(&r);
	if (wire_end(&r, "obeyed", &e) < 0)
		log_error("frame malformed error=%s", e.text);
	else
		poll_obeyed(l, id);
}

static void on_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct link *l = arg;
	struct err e;

	if (type != RF_LINK_VM && type != RF_LINK_HOST)
		for (size_t i = 0; i < fd_count; i++)
			close(fds[i]);
	switch (type) {
	case RF_LINK_INIT:
		if (take_init(l, body, n, &e) < 0) {
			log_error("link does not start error=%s", e.text);
			_exit(1);
		}
		break;
	case RF_LINK_VM: take_vm(l, body, n, fds, fd_count); break;
	case RF_LINK_HOST: link_metrics_host(l, body, n, fds, fd_count); return;
	case RF_LINK_STATS: link_metrics_stats(l, body, n); return;
	case RF_LINK_CAPACITY: take_capacity(l, body, n); break;
	case RF_LINK_FROM_BROKER: from_broker(l, body, n); break;
	case RF_LINK_REFUSED: take_refused(l, body, n); break;
	case RF_LINK_ENDED: take_ended(l, body, n); break;
	case RF_LINK_IMAGE: images_state(l, body, n); break;
	case RF_LINK_IMAGE_ASK: images_ask(l, body, n); break;
	case RF_LINK_BYE: l->bye_due = true; break;
	case RF_LINK_OBEYED: take_obeyed(l, body, n); break;
	case RF_LINK_RUNS: take_runs(l, body, n); break;
	case RF_LINK_GONE: break; /* what is still to be said of the run is said out of its spool */
	default: log_warn("keeper frame of unknown type type=%u", type); break;
	}
	link_pump_soon(l);
}

static void on_end(void *arg, const struct err *e)
{
	(void)arg;
	log_info("keeper is gone error=%s", e != NULL ? e->text : "");
	_exit(0); /* nng's own exit handlers may hang */
}

int link_main(void)
{
	struct link l = { .node_id = "" };
	struct framed_options opt = { .fd = LINK_FD_KEEPER,
		.max_frame = ROLE_FRAME_MAX,
		.max_queued = KEEPER_QUEUE_MAX,
		.on_frame = on_frame,
		.on_end = on_end,
		.arg = &l };
	struct err e;

	(void)signal(SIGPIPE, SIG_IGN);
	(void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* the node's signing key must never reach a core file */
	l.base = event_base_new();
	if (l.base != NULL)
		l.pump_event = event_new(l.base, -1, 0, on_pump, &l);
	if (sodium_init() < 0 || l.base == NULL || l.pump_event == NULL) {
		log_error("link does not start error=no memory");
		return 1;
	}
	if (framed_new(l.base, &opt, &l.keeper, &e) < 0) {
		log_error("link does not start error=%s", e.text);
		return 1;
	}
	event_base_dispatch(l.base);
	_exit(1);
}
