/*
 * NEXT, a node's long poll: it renews the lease and brings work. When the store has nothing for the node the request is parked here
 * until a run that fits is queued, something waits for the node, or its time is over; then it is answered. On the loop's thread.
 *
 * A wake that comes while the store is being asked must not be lost: `again` makes the answer ask once more instead of parking. A
 * wake that is lost all the same (another controld's hint) costs at most the poll's length.
 */
#include "internal.h"

#include "assign.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>

#define WAKE_PASSES 64  /* nodes that one wake may go through */
#define REPLY_ROOM 4096 /* of LINK_MESSAGE_MAX, for envelope and commands' heads */

static void ask(struct request *r);

void next_forget(struct request *r)
{
	if (!r->polling)
		return;
	TAILQ_REMOVE(&r->d->polls, r, poll_entry);
	r->polling = false;
	r->again = false;
	if (r->park_timer)
		evtimer_del(r->park_timer);
	link_next_free(&r->next);
}

static void answer(struct request *r, const struct link_next_reply *reply)
{
	struct buf b = BUF_INIT(LINK_MESSAGE_MAX - 64);

	link_next_reply_encode(reply, &b);
	if (b.failed)
		request_refuse(r, LINK_BUSY, "the answer did not fit in memory");
	else
		request_reply(r, &b);
	buf_free(&b);
}

void next_answer_parked(struct request *r)
{
	struct link_next_reply empty = { .lease_ms = r->lease_ms };

	request_work(r);
	answer(r, &empty);
}

static void on_park_end(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	next_answer_parked(arg);
}

static void park(struct request *r)
{
	int64_t left = r->park_until_ms - clock_boot_ms();
	struct timeval tv;

	if (r->d->draining || left <= 0) {
		struct link_next_reply empty = { .lease_ms = r->lease_ms };

		answer(r, &empty);
		return;
	}
	if (!r->park_timer)
		r->park_timer = evtimer_new(r->d->base, on_park_end, r);
	if (!r->park_timer) {
		request_refuse(r, LINK_BUSY, "no memory");
		return;
	}
	tv.tv_sec = (time_t)(left / 1000);
	tv.tv_usec = (suseconds_t)(left % 1000 * 1000);
	request_park(r);
	evtimer_add(r->park_timer, &tv);
}

/* As many of the claims as the message has room for. What is left out stays claimed and comes with the node's next poll, because
 * the node does not say that it holds it. */
static uint32_t fill_assigns(struct request *r, const struct store_next *n, struct link_assign *out)
{
	size_t used = REPLY_ROOM + n->command_count * (sizeof(struct link_command) + 16);
	uint32_t count = 0;
	struct err e;

	for (size_t i = 0; i < n->assign_count && count < LINK_ASSIGN_MAX; i++) {
		if (assign_make(r->d->secrets, &n->assigns[i], r->seal_key, &out[count], &e) != 0) {
			/* The claim runs out with its lease and is tried again elsewhere; it must not keep the others back. */
			log_error("assignment could not be made run=%s node=%s reason=\"%s\"", n->assigns[i].a.run_id,
					r->head.node_id, e.text);
			continue;
		}
		used += out[count].assignment_len + out[count].sealed_len + 16;
		if (used > LINK_MESSAGE_MAX - 64) {
			assign_free(&out[count]);
			log_info("assignment waits for the next poll run=%s node=%s", n->assigns[i].a.run_id, r->head.node_id);
			break;
		}
		log_info("run handed out run=%s node=%s attempt=%u", n->assigns[i].a.run_id, r->head.node_id,
				n->assigns[i].a.attempt);
		count++;
	}
	return count;
}

/* False when there is nothing to say: an assignment that cannot be made is claimed until that runs out, and a node that were
 * answered for it would ask again at once, all that time. */
static bool deliver(struct request *r, const struct store_next *n)
{
	struct link_assign assigns[LINK_ASSIGN_MAX];
	struct link_next_reply reply = { .lease_ms = n->lease_ms, .assigns = assigns };

	reply.assign_count = fill_assigns(r, n, assigns);
	reply.commands = n->commands;
	reply.command_count = n->command_count > LINK_COMMANDS_MAX ? LINK_COMMANDS_MAX : (uint32_t)n->command_count;
	if (reply.assign_count + reply.command_count == 0)
		return false;
	answer(r, &reply);
	for (uint32_t i = 0; i < reply.assign_count; i++)
		assign_free(&assigns[i]);
	return true;
}

/* --- wakes that hit a node which cannot take the run (its labels, a run that failed there): the next one is asked. The store says
 * first whether anything waits at all: most wakes that find nothing came too late. */

static void wake(struct request *r, const struct wake *w);

static bool fits(const struct request *r, const struct wake *w)
{
	const struct link_next *n = &r->next;

	return !n->draining && n->free_slots > 0 && n->free_memory_mib >= w->memory_mib && n->free_vcpus >= w->vcpus &&
	       (w->allow_emulated || strcmp(n->isolation, "kvm") == 0);
}

static void ask_or_park(struct request *r)
{
	if (r->again)
		ask(r);
	else
		park(r);
}

static void on_waits(void *arg, const struct store_done *found, const struct err *e)
{
	struct request *r = arg, *next = r;
	struct wake w = r->wake;

	if (!r->again) /* else it is the wake that came meanwhile */
		r->wake.passes = 0;
	if (!e && found->result == STORE_DONE) {
		w.passes--;
		do
			next = TAILQ_NEXT(next, poll_entry);
		while (next && !(next->state == REQUEST_PARKED && fits(next, &w)));
		if (next)
			wake(next, &w);
	}
	ask_or_park(r);
}

static void on_next(void *arg, const struct store_next *n, const struct err *e)
{
	struct request *r = arg;
	struct err failed;

	if (e) {
		request_store_error(r, e);
		return;
	}
	switch (n->result) {
	case STORE_NEXT_OK: break;
	case STORE_NEXT_UNKNOWN_NODE:
	case STORE_NEXT_REVOKED:
		dispatch_cut_node(r->d, r->head.node_id);
		request_refuse(r, LINK_REVOKED, peer_text(PEER_REVOKED));
		return;
	case STORE_NEXT_OLD_EPOCH:
		log_warn("poll of an older process refused node=%s epoch=%llu", r->head.node_id, (unsigned long long)r->next.epoch);
		request_refuse(r, LINK_BAD, "a newer process of this node has taken over: stop this one");
		return;
	}
	r->lease_ms = n->lease_ms;
	if (deliver(r, n))
		return;
	if (r->again || r->wake.passes == 0)
		ask_or_park(r);
	else if (store_somebody_waits(r->d->store, on_waits, r, &failed) != 0)
		park(r);
}

static void ask(struct request *r)
{
	uint32_t most = r->next.free_slots < STORE_CLAIM_MAX ? r->next.free_slots : STORE_CLAIM_MAX;
	struct err e;

	r->again = false;
	if (r->next.draining || r->d->draining)
		most = 0;
	if (store_next(r->d->store, r->head.node_id, &r->next, most, on_next, r, &e) != 0)
		request_store_error(r, &e);
}

/* A node has one poll: a second one means that it gave up the first (lost connection, newer capacity). */
static void replace_older(struct request *r)
{
	struct request *other, *next;

	for (other = TAILQ_FIRST(&r->d->polls); other; other = next) {
		next = TAILQ_NEXT(other, poll_entry);
		if (other != r && other->state == REQUEST_PARKED && strcmp(other->head.node_id, r->head.node_id) == 0)
			next_answer_parked(other);
	}
}

void next_begin(struct request *r)
{
	struct pipe *p = dispatch_pipe(r->d, r->pipe_id);
	uint32_t wait_ms = r->next.wait_ms < (uint32_t)r->d->poll_ms ? r->next.wait_ms : (uint32_t)r->d->poll_ms;

	if (!p) {
		link_next_free(&r->next);
		request_refuse(r, LINK_UNAUTHENTIC, "the connection is gone");
		return;
	}
	memcpy(r->seal_key, p->peer.seal_key, sizeof(r->seal_key));
	r->park_until_ms = clock_boot_ms() + wait_ms;
	r->lease_ms = 0;
	r->wake.passes = 0;
	r->polling = true;
	TAILQ_INSERT_TAIL(&r->d->polls, r, poll_entry);
	replace_older(r);
	ask(r);
}

static void wake(struct request *r, const struct wake *w)
{
	if (w)
		r->wake = *w;
	if (r->state == REQUEST_PARKED) {
		evtimer_del(r->park_timer);
		request_work(r);
		ask(r);
	} else if (r->state == REQUEST_WORKING) {
		r->again = true;
	}
}

void next_wake_queued(struct dispatch *d, uint32_t memory_mib, uint32_t vcpus, bool allow_emulated, uint32_t count)
{
	const struct wake w = { .memory_mib = memory_mib, .vcpus = vcpus, .allow_emulated = allow_emulated, .passes = WAKE_PASSES };
	struct request *r, *next;

	for (r = TAILQ_FIRST(&d->polls); r && count > 0; r = next) {
		next = TAILQ_NEXT(r, poll_entry);
		if (!fits(r, &w))
			continue;
		/* One with the store may see the run or may not: it asks again, and does not use the wake up. */
		if (r->state == REQUEST_PARKED)
			count--;
		wake(r, &w);
	}
}

void next_wake_node(struct dispatch *d, const char *node_id)
{
	struct request *r, *next;

	for (r = TAILQ_FIRST(&d->polls); r; r = next) {
		next = TAILQ_NEXT(r, poll_entry);
		if (strcmp(r->head.node_id, node_id) == 0)
			wake(r, NULL);
	}
}

void next_answer_node(struct dispatch *d, const char *node_id)
{
	struct request *r, *next;

	for (r = TAILQ_FIRST(&d->polls); r; r = next) {
		next = TAILQ_NEXT(r, poll_entry);
		if (r->state == REQUEST_PARKED && strcmp(r->head.node_id, node_id) == 0)
			next_answer_parked(r);
	}
}

void next_shed(struct dispatch *d, uint32_t count)
{
	struct request *r, *next;

	for (r = TAILQ_FIRST(&d->polls); r && count > 0; r = next) {
		next = TAILQ_NEXT(r, poll_entry);
		if (r->state != REQUEST_PARKED)
			continue;
		next_answer_parked(r);
		count--;
	}
}
