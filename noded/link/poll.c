/*
 * NEXT, the long poll: it renews the node's lease, states what is free and what is held, and brings assignments and commands. And
 * ENROL, once in a node's life. On link's loop.
 *
 * The lease of the brokers runs from when the granted request was *sent*, less a twelfth.
 */
#include "link_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#define NEWS_PAUSE_MS 20 /* between polls that only carry news */
#define EMPTY_SOON_NS (100 * INT64_C(1000000))
#define EMPTY_PAUSE_MS 250
#define REVOKED_PAUSE_MS 30000
#define BAD_PAUSE_MS 5000
#define ENROL_TIMEOUT_MS 20000
#define ENROL_PAUSE_MS 10000

void poll_news(struct link *l)
{
	l->news = true;
	link_pump_soon(l);
}

/* --- what is said ------------------------------------------------------------------------------------------------------------ */

static uint32_t less(uint32_t a, uint32_t b)
{
	return a > b ? a - b : 0;
}

static void fill_capacity(const struct link *l, struct link_next *m)
{
	const struct capacity *c = &l->capacity;

	m->free_memory_mib = c->free_memory_mib;
	m->free_vcpus = c->free_vcpus;
	m->free_slots = c->free_slots;
	m->total_memory_mib = c->total_memory_mib;
	m->total_vcpus = c->total_vcpus;
	m->total_slots = c->total_slots;
	for (const struct run_entry *r = l->runs; r != NULL; r = r->next) {
		if (!r->pending && !r->admitted)
			continue;
		m->free_memory_mib = less(m->free_memory_mib, r->memory_mib);
		m->free_vcpus = less(m->free_vcpus, r->vcpus);
		m->free_slots = less(m->free_slots, 1);
	}
}

static bool make_next(const struct link *l, struct buf *out)
{
	struct link_next m = { .epoch = l->init.epoch,
		.draining = l->draining,
		.last_command = l->last_command,
		/* The first poll is answered at once, so that the node has its lease (and says that it is ready) without waiting
		   for work. */
		.wait_ms = l->leased ? link_park_ms(l->init.poll_ms, l->lease_ms) : 0 };

	if (m.wait_ms > LINK_POLL_MS)
		m.wait_ms = LINK_POLL_MS;
	m.held = calloc(l->run_count + 1, sizeof(*m.held));
	if (m.held == NULL || !text_copy(m.isolation, sizeof(m.isolation), l->init.isolation)) {
		free(m.held);
		return false;
	}
	fill_capacity(l, &m);
	for (const struct run_entry *r = l->runs; r != NULL && m.held_count < LINK_RUNS_MAX; r = r->next) {
		struct link_held *h;

		if (r->run.over)
			continue;
		h = &m.held[m.held_count++];
		memcpy(h->run_id, r->run.run_id, sizeof(h->run_id));
		memcpy(h->token, r->run.token, TOKEN_LEN);
		h->spent_micros = r->run.spent;
		h->held_micros = r->run.held;
	}
	link_next_encode(&m, out);
	free(m.held);
	return !out->failed;
}

static bool may_poll(const struct link *l, int64_t now)
{
	if (l->node_id[0] == '\0' || !l->capacity.known || now < l->poll_after_ms)
		return false;
	return l->polls == 0 || (l->polls < POLLS_MAX && l->news && now >= l->news_after_ms);
}

void poll_pump(struct link *l)
{
	int64_t now = clock_boot_ms();
	struct buf body = BUF_INIT(LINK_MESSAGE_MAX - 1024);
	struct asked *a;

	if (!may_poll(l, now) || peers_free_slots(l->peers) == 0) {
		buf_free(&body);
		return;
	}
	a = calloc(1, sizeof(*a));
	if (a != NULL && make_next(l, &body)) {
		uint32_t park = link_park_ms(l->init.poll_ms, l->lease_ms);

		*a = (struct asked){ .type = LINK_NEXT, .sent_boot_ns = clock_boot_ns() };
		if (peers_send(l->peers, LINK_NEXT, body.data, body.len, (int)link_patience_ms(park, l->lease_ms), true, a)) {
			l->polls++;
			l->news = false;
			l->news_after_ms = now + NEWS_PAUSE_MS;
			a = NULL;
		}
	}
	free(a);
	buf_free(&body);
}

/* --- what comes back --------------------------------------------------------------------------------------------------------- */

static void take_lease(struct link *l, int64_t sent_ns, uint32_t lease_ms)
{
	struct buf body = BUF_INIT(16);

	if (lease_ms == 0)
		return;
	l->lease_deadline_boot_ns = link_lease_deadline_ns(sent_ns, lease_ms);
	wire_put_i64(&body, l->lease_deadline_boot_ns);
	(void)link_to_keeper(l, RF_KEEPER_LEASE, body.data, body.len);
	buf_free(&body);
}

static void take_assign(struct link *l, const struct link_assign *as)
{
	struct buf body = BUF_INIT(ROLE_FRAME_MAX);
	struct run_entry *r;
	struct assignment a;
	struct err e;

	if (assignment_decode(as->assignment, as->assignment_len, &a, &e) < 0) {
		log_error("assignment malformed error=%s", e.text);
		return;
	}
	if (link_find(l, a.token) != NULL) {
		assignment_free(&a);
		return; /* it crossed with our saying that we hold it */
	}
	r = link_add(l, a.run_id, a.token);
	if (r != NULL) {
		r->pending = true;
		r->memory_mib = a.memory_mib;
		r->vcpus = a.vcpus;
		wire_put_bytes(&body, as->assignment, as->assignment_len);
		wire_put_bytes(&body, as->sealed, as->sealed_len);
		wire_put_i64(&body, clock_boot_ns());
		if (body.failed || !link_to_keeper(l, RF_KEEPER_ASSIGN, body.data, body.len)) {
			log_error("assignment not handed over run=%s", a.run_id);
			r->run.over = true; /* not held: controld sends it again */
		} else {
			log_info("run assigned run=%s attempt=%u", a.run_id, a.attempt);
		}
	}
	buf_free(&body);
	assignment_free(&a);
}

static void take_command(struct link *l, const struct link_command *c)
{
	struct run_entry *r = link_find(l, c->token);
	uint8_t drain = c->kind == LINK_CMD_DRAIN;
	struct buf id = BUF_INIT(16);

	switch (c->kind) {
	case LINK_CMD_CANCEL: link_to_broker(l, c->token, RF_LB_CANCEL, NULL, 0); break;
	case LINK_CMD_KILL:
		log_warn("controld orders a kill run=%s", c->run_id);
		link_token_frame(l, RF_KEEPER_KILL, c->token);
		if (r != NULL) {
			r->run.over = true;
			link_token_frame(l, RF_KEEPER_DONE, c->token);
		}
		break;
	case LINK_CMD_DRAIN:
	case LINK_CMD_UNDRAIN:
		l->draining = drain;
		(void)link_to_keeper(l, RF_KEEPER_DRAIN, &drain, 1);
		break;
	default: log_warn("command of unknown kind id=%llu kind=%u", (unsigned long long)c->id, c->kind); break;
	}
	if (c->id == 0) {
		poll_news(l); /* about a run that controld does not know: it is said again until it is gone */
		return;
	}
	wire_put_u64(&id, c->id);
	if (!id.failed)
		(void)link_to_keeper(l, RF_KEEPER_COMMAND, id.data, id.len);
	buf_free(&id);
	if (c->id > l->told_command)
		l->told_command = c->id;
}

void poll_obeyed(struct link *l, uint64_t id)
{
	if (id <= l->last_command || id > l->told_command)
		return;
	l->last_command = id;
	if (l->last_command == l->told_command)
		l->poll_after_ms = 0;
	poll_news(l);
}

static void take_next(struct link *l, const struct asked *a, const struct link_reply *reply)
{
	struct link_next_reply m;
	bool waited = l->leased;
	struct err e;

	if (link_next_reply_decode(reply->body, reply->body_len, &m, &e) < 0) {
		log_error("answer to a poll malformed error=%s", e.text);
		l->poll_after_ms = clock_boot_ms() + link_pause_ms(++l->poll_failures);
		return;
	}
	l->poll_failures = 0;
	l->polled_boot_ns = clock_boot_ns();
	l->leased = l->leased || m.lease_ms > 0;
	if (m.lease_ms > 0) {
		l->lease_ms = m.lease_ms;
		peers_lease(l->peers, m.lease_ms);
	}
	take_lease(l, a->sent_boot_ns, m.lease_ms);
	for (uint32_t i = 0; i < m.command_count; i++)
		take_command(l, &m.commands[i]);
	for (uint32_t i = 0; i < m.assign_count; i++)
		take_assign(l, &m.assigns[i]);
	/* Until keeper has obeyed, controld says the same again at once: not asked in a circle either. */
	if (l->told_command > l->last_command)
		l->poll_after_ms = clock_boot_ms() + EMPTY_PAUSE_MS;
	/* An empty answer at once means that controld does not park now: it is not asked in a circle. */
	if ((waited || m.lease_ms == 0) && m.command_count + m.assign_count == 0 && l->polls == 0 &&
			clock_boot_ns() - a->sent_boot_ns < EMPTY_SOON_NS)
		l->poll_after_ms = clock_boot_ms() + EMPTY_PAUSE_MS;
	link_next_reply_free(&m);
}

/* Why controld does not take our poll, in its own words. */
static void log_refusal(const struct link *l, const char *what, const struct link_reply *reply)
{
	struct buf text = BUF_INIT(2048);
	struct wire_reader r;
	const uint8_t *reason;
	size_t n;

	wire_read_init(&r, reply->body, reply->body_len);
	reason = wire_bytes(&r, 512, &n);
	if (reason != NULL && text_safe(&text, (const char *)reason, n, false) && buf_cstr(&text) != NULL)
		log_error("controld refuses %s node=%s reason=\"%s\"", what, l->node_id, buf_cstr(&text));
	else
		log_error("controld refuses %s node=%s", what, l->node_id);
	buf_free(&text);
}

void poll_answer(struct link *l, struct asked *a, const struct link_reply *reply)
{
	int64_t now = clock_boot_ms();

	l->polls--;
	if (reply == NULL || reply->result == LINK_BUSY || reply->result == LINK_UNAUTHENTIC) {
		/* The first retry is at once: another controld may be there. */
		l->poll_after_ms = now + link_pause_ms(l->poll_failures++);
	} else if (reply->result == LINK_REVOKED) {
		log_error("this node is revoked: every run here is killed node=%s", l->node_id);
		link_kill_all(l);
		l->poll_after_ms = now + REVOKED_PAUSE_MS;
	} else if (reply->result != LINK_OK) {
		log_refusal(l, "this node's poll", reply);
		l->poll_after_ms = now + BAD_PAUSE_MS;
	} else {
		take_next(l, a, reply);
	}
}

/* --- enrolment --------------------------------------------------------------------------------------------------------------- */

static bool make_enrol(const struct link *l, struct link_enrol *m, const uint8_t challenge[32])
{
	struct join_token token;
	struct buf proof = BUF_INIT(256);
	struct err e;
	bool ok;

	memset(m, 0, sizeof(*m));
	if (join_token_parse(l->init.join_token, &token, &e) < 0) {
		log_error("join token not usable error=%s", e.text);
		return false;
	}
	ok = text_copy(m->secret, sizeof(m->secret), token.secret) && text_copy(m->name, sizeof(m->name), l->init.name) &&
	     text_copy(m->isolation, sizeof(m->isolation), l->init.isolation) &&
	     text_copy(m->labels, sizeof(m->labels), l->init.labels);
	memcpy(m->sign_key, l->init.sign_secret + 32, 32); /* libsodium keeps the public half there */
	memcpy(m->seal_key, l->init.seal_public, 32);
	memcpy(m->receipt_key, l->init.receipt_public, 32);
	memcpy(m->seal_sig, l->init.seal_sig, 64);
	memcpy(m->receipt_sig, l->init.receipt_sig, 64);
	wire_put_raw(&proof, "ephemeral/enrol/1", 17);
	wire_put_raw(&proof, challenge, 32);
	wire_put_raw(&proof, token.secret, strlen(token.secret));
	ok = ok && !proof.failed && crypto_sign_detached(m->proof, NULL, proof.data, proof.len, l->init.sign_secret) == 0;
	if (proof.data != NULL)
		sodium_memzero(proof.data, proof.len);
	buf_free(&proof);
	sodium_memzero(&token, sizeof(token));
	return ok;
}

void enrol_pump(struct link *l)
{
	struct buf body = BUF_INIT(4096);
	struct link_enrol m;
	uint8_t challenge[32];
	struct asked *a;

	if (l->node_id[0] != '\0' || l->enrolling || clock_boot_ms() < l->enrol_after_ms || !peers_challenge(l->peers, challenge))
		return;
	l->enrol_after_ms = clock_boot_ms() + ENROL_PAUSE_MS;
	if (!make_enrol(l, &m, challenge))
		return;
	link_enrol_encode(&m, &body);
	sodium_memzero(&m, sizeof(m));
	a = calloc(1, sizeof(*a));
	if (a != NULL && !body.failed) {
		*a = (struct asked){ .type = LINK_ENROL, .sent_boot_ns = clock_boot_ns() };
		l->enrolling = peers_send(l->peers, LINK_ENROL, body.data, body.len, ENROL_TIMEOUT_MS, false, a);
	}
	if (!l->enrolling)
		free(a);
	if (body.data != NULL)
		sodium_memzero(body.data, body.len);
	buf_free(&body);
}

void enrol_answer(struct link *l, const struct link_reply *reply)
{
	struct link_enrol_reply m;
	struct err e;

	l->enrolling = false;
	if (reply == NULL || reply->result == LINK_BUSY) {
		l->enrol_after_ms = clock_boot_ms() + 1000;
		return;
	}
	if (reply->result != LINK_OK) {
		log_refusal(l, "this node's enrolment (a new join token comes from `ephemeral admin node token`)", reply);
		return;
	}
	if (link_enrol_reply_decode(reply->body, reply->body_len, &m, &e) < 0 || !id_valid("node", m.node_id)) {
		log_error("enrolment answer malformed");
		return;
	}
	memcpy(l->node_id, m.node_id, sizeof(l->node_id));
	(void)link_to_keeper(l, RF_KEEPER_ENROLLED, reply->body, reply->body_len);
	log_info("enrolled node=%s", l->node_id);
	sodium_memzero(l->init.join_token, sizeof(l->init.join_token));
}
