/*
 * The table of pipes: who is at the other end of each (peer.c), how often it misbehaved, when it is to be cut. Owned by server.c's
 * dispatch; on the loop. nng says when a pipe went away (server.c); the sweep finds what it did not say.
 */
#include "internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"

#define STRIKES_MAX 8
#define UNPROVEN_MS 30000 /* a pipe that never showed a good signature is cut */
#define CUT_DELAY_MS 1000
#define PIPES_PER_CONTEXT 4

static struct pipe_list *bucket(struct dispatch *d, uint32_t id)
{
	return &d->pipes[(id * UINT32_C(2654435761)) % DISPATCH_PIPE_BUCKETS];
}

struct pipe *dispatch_pipe(struct dispatch *d, uint32_t id)
{
	struct pipe *p;

	LIST_FOREACH(p, bucket(d, id), entry)
	{
		if (p->peer.id == id)
			return p;
	}
	return NULL;
}

/* Made when a pipe comes, or at its first request if that is here sooner. NULL when there are too many, or no memory: the pipe is
 * closed then. */
struct pipe *pipe_make(struct dispatch *d, uint32_t id)
{
	struct pipe *p = dispatch_pipe(d, id);

	if (p)
		return p;
	p = d->pipe_count < d->contexts_max * PIPES_PER_CONTEXT ? calloc(1, sizeof(*p)) : NULL;
	if (!p) {
		nng_pipe which = { .id = id };

		nng_pipe_close(which);
		return NULL;
	}
	peer_init(&p->peer, id);
	p->opened_ms = clock_boot_ms();
	p->has_far = strangers_far_end((nng_pipe){ .id = id }, p->far);
	LIST_INSERT_HEAD(bucket(d, id), p, entry);
	d->pipe_count++;
	return p;
}

void pipe_drop(struct dispatch *d, struct pipe *p)
{
	if (p->peer.proven)
		log_info("node disconnected node=%s", p->peer.node_id);
	LIST_REMOVE(p, entry);
	d->pipe_count--;
	free(p);
}

void dispatch_strike(struct dispatch *d, uint32_t pipe_id, const char *why)
{
	struct pipe *p = dispatch_pipe(d, pipe_id);

	if (!p || ++p->strikes < STRIKES_MAX || p->cut_at_ms)
		return;
	log_warn("link connection is cut node=%s reason=\"%s, %d times\"", p->peer.known ? p->peer.node_id : "-", why, STRIKES_MAX);
	p->cut_at_ms = clock_boot_ms() + CUT_DELAY_MS;
}

void dispatch_cut_node(struct dispatch *d, const char *node_id)
{
	struct pipe *p;

	for (size_t i = 0; i < DISPATCH_PIPE_BUCKETS; i++) {
		LIST_FOREACH(p, &d->pipes[i], entry)
		{
			if (!p->peer.known || strcmp(p->peer.node_id, node_id) != 0)
				continue;
			p->peer.revoked = true;
			if (!p->cut_at_ms)
				p->cut_at_ms = clock_boot_ms() + CUT_DELAY_MS;
		}
	}
}

/* Each second. Closing makes nng tell us that the pipe is gone; the entry goes here all the same, so that none stays for good. */
void pipes_sweep(struct dispatch *d)
{
	int64_t now = clock_boot_ms();
	struct pipe *p, *next;

	for (size_t i = 0; i < DISPATCH_PIPE_BUCKETS; i++) {
		for (p = LIST_FIRST(&d->pipes[i]); p; p = next) {
			nng_pipe which = { .id = p->peer.id };

			next = LIST_NEXT(p, entry);
			if (!(p->cut_at_ms && p->cut_at_ms <= now) && (p->peer.proven || now - p->opened_ms < UNPROVEN_MS))
				continue;
			nng_pipe_close(which);
			pipe_drop(d, p);
		}
	}
}

/* Whose poll is parked on a pipe that is gone? Its context is wanted back. */
void pipe_gone(struct dispatch *d, uint32_t id)
{
	struct pipe *p = dispatch_pipe(d, id);
	struct request *r, *next;

	if (p)
		pipe_drop(d, p);
	for (r = TAILQ_FIRST(&d->polls); r; r = next) {
		next = TAILQ_NEXT(r, poll_entry);
		if (r->pipe_id == id && r->state == REQUEST_PARKED)
			next_answer_parked(r);
	}
}
