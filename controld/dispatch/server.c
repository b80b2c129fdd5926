/*
 * The node link's server: an nng REP socket over TLS, its contexts (request.c), a table of pipes (pipes.c). Owns all of these;
 * begins and ends them, and carries hints to the polls.
 *
 * Threads. nng calls back on threads of its own in three places, marked "nng thread" here and in request.c: a context's aio
 * completed, a pipe went away, and the closing thread at the end. The first two append to the inbox and return; everything else in
 * this folder runs on the loop. nng does not survive a fork, and nothing forks in this process.
 */
#include "internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>
#include <nng/protocol/reqrep0/rep.h>
#include <pthread.h>
#include <time.h>

#define FIRST_CONTEXTS 16
#define CLOSE_WAIT_S 2
#define PROBE_MS 10000
#define SWEEP_MS 1000

/* --- pipes that go away ---------------------------------------------------------------------------------------------------- */

struct pipe_item {
	struct item item;
	uint32_t id;
};

static void on_sweep(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	pipes_sweep(arg);
	strangers_sweep(arg);
}

/* nng thread. Without memory a new pipe is known at its first request, and a parked poll of one that is gone ends by its own time.
 */
static void on_pipe(nng_pipe p, nng_pipe_ev ev, void *arg)
{
	struct dispatch *d = arg;
	struct pipe_item *item = malloc(sizeof(*item));

	if (!item)
		return;
	item->item.kind = ev == NNG_PIPE_EV_ADD_POST ? ITEM_PIPE_NEW : ITEM_PIPE_GONE;
	item->id = (uint32_t)nng_pipe_id(p);
	inbox_post(d->inbox, &item->item.link);
}

static void on_item(void *arg, struct inbox_item *link)
{
	struct dispatch *d = arg;
	struct item *item = (struct item *)(void *)link;

	if (item->kind == ITEM_REQUEST) {
		request_completed((struct request *)(void *)item);
	} else {
		struct pipe_item *pipe = (struct pipe_item *)(void *)item;

		if (!d->closing && item->kind == ITEM_PIPE_NEW)
			pipe_make(d, pipe->id);
		else if (!d->closing)
			pipe_gone(d, pipe->id);
		free(pipe);
	}
}

/* --- wakes ------------------------------------------------------------------------------------------------------------------- */

void dispatch_wake_queued(struct dispatch *d, uint32_t memory_mib, uint32_t vcpus, bool allow_emulated, uint32_t count)
{
	next_wake_queued(d, memory_mib, vcpus, allow_emulated, count);
}

struct node_check {
	struct dispatch *d;
};

static void on_node_checked(void *arg, const struct store_nodes *n, const struct err *e)
{
	struct node_check *c = arg;

	if (!e && n->count > 0 && strcmp(n->nodes[0].state, "revoked") == 0) {
		log_warn("node was revoked: its connections are cut node=%s", n->nodes[0].id);
		dispatch_cut_node(c->d, n->nodes[0].id);
	}
	free(c);
}

void dispatch_wake_node(struct dispatch *d, const char *node_id)
{
	struct node_check *c = NULL;
	struct pipe *p;
	struct err e;
	bool here = false;

	for (size_t i = 0; i < DISPATCH_PIPE_BUCKETS; i++) {
		LIST_FOREACH(p, &d->pipes[i], entry)
		{
			if (!p->peer.known || strcmp(p->peer.node_id, node_id) != 0)
				continue;
			p->peer.stale = true;
			here = true;
		}
	}
	if (!here)
		return;
	next_wake_node(d, node_id);
	/* A node that sends nothing hears of its revocation by the end of its connections. */
	c = calloc(1, sizeof(*c));
	if (!c)
		return;
	c->d = d;
	if (store_node_get(d->store, node_id, on_node_checked, c, &e) != 0)
		free(c);
}

/* --- up and down ------------------------------------------------------------------------------------------------------------- */

const char *dispatch_address(const struct dispatch *d)
{
	return d->address;
}

bool dispatch_healthy(const struct dispatch *d, const char **why)
{
	*why = d->listener_down ? "the node link does not take connections" : NULL;
	return !d->listener_down;
}

void dispatch_figures(const struct dispatch *d, struct dispatch_figures *out)
{
	const struct request *r;

	*out = (struct dispatch_figures){
		.pipes = d->pipe_count, .working = d->working, .contexts = d->contexts, .contexts_max = d->contexts_max
	};
	memcpy(out->answered, d->answered, sizeof(out->answered));
	TAILQ_FOREACH(r, &d->polls, poll_entry)
	out->parked += r->state == REQUEST_PARKED;
}

void dispatch_drain(struct dispatch *d)
{
	d->draining = true;
	next_shed(d, UINT32_MAX);
}

bool dispatch_idle(const struct dispatch *d)
{
	const struct request *r;

	LIST_FOREACH(r, &d->all, all_entry)
	{
		if (r->state == REQUEST_SENDING || r->state == REQUEST_WORKING)
			return false;
	}
	return true;
}

int dispatch_start(const struct dispatch_options *opt, struct dispatch **out, struct err *e)
{
	struct dispatch *d = calloc(1, sizeof(*d));
	int sweep_ms = opt->sweep_ms > 0 ? opt->sweep_ms : SWEEP_MS;
	struct timeval pause = { .tv_sec = sweep_ms / 1000, .tv_usec = sweep_ms % 1000 * 1000 };
	int rv;

	if (!d)
		return err_set(e, ERR_NOMEM, "no memory for the node link");
	d->base = opt->base;
	d->store = opt->store;
	d->secrets = opt->secrets;
	d->pki = opt->pki;
	d->contexts_max = (uint32_t)opt->contexts_max;
	d->poll_ms = opt->poll_ms;
	d->probe_ms = opt->probe_ms > 0 ? opt->probe_ms : PROBE_MS;
	LIST_INIT(&d->all);
	TAILQ_INIT(&d->polls);
	if (!text_copy(d->listen, sizeof(d->listen), opt->listen)) {
		err_set(e, ERR_LIMIT, "link_listen is too long");
		goto fail;
	}
	if (inbox_new(opt->base, on_item, d, &d->inbox, e) != 0)
		goto fail;
	rv = nng_rep0_open(&d->socket);
	if (rv != 0) {
		err_set(e, ERR_INTERNAL, "open the link's socket: %s", nng_strerror(rv));
		goto fail;
	}
	d->socket_open = true;
	nng_pipe_notify(d->socket, NNG_PIPE_EV_ADD_POST, on_pipe, d);
	nng_pipe_notify(d->socket, NNG_PIPE_EV_REM_POST, on_pipe, d);
	for (int i = 0; i < FIRST_CONTEXTS; i++) {
		if (!request_add(d)) {
			err_set(e, ERR_NOMEM, "no memory for the link's contexts");
			goto fail;
		}
	}
	d->sweep = event_new(opt->base, -1, EV_PERSIST, on_sweep, d);
	if (!d->sweep || event_add(d->sweep, &pause) != 0) {
		err_set(e, ERR_NOMEM, "no memory for the node link");
		goto fail;
	}
	if (listener_start(d, e) != 0 || watchdog_start(d, e) != 0)
		goto fail;
	log_info("node link listens address=%s", d->address);
	*out = d;
	return 0;
fail:
	dispatch_free(d);
	return err_wrap(e, "link_listen %s", opt->listen);
}

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
/* nng 1.5.2 forgets a TLS connection whose handshake is under way when its socket closes: seen once in ten ends on a busy machine.
 */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
	return "leak:libnng.so\n";
}
#endif

static void *close_socket(void *arg)
{
	struct dispatch *d = arg;

	nng_close(d->socket);
	return NULL;
}

/* nng_close may hang (a known fault of 1.5.2), and a process must end: a thread of its own closes, and is left behind if it takes
 * too long. False then: nothing that nng's threads may touch can be freed. */
static bool close_in_time(struct dispatch *d)
{
	struct timespec until;
	pthread_t closer;

	if (!d->socket_open)
		return true;
	if (pthread_create(&closer, NULL, close_socket, d) != 0)
		return false;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += CLOSE_WAIT_S;
	if (pthread_timedjoin_np(closer, NULL, &until) != 0) {
		pthread_detach(closer);
		log_warn("node link did not close in time; leaving it behind");
		return false;
	}
	return true;
}

void dispatch_free(struct dispatch *d)
{
	struct request *r, *next;
	struct pipe *p;

	if (!d)
		return;
	d->closing = true;
	watchdog_stop(d);
	strangers_free(d);
	if (d->sweep)
		event_free(d->sweep);
	d->sweep = NULL;
	if (!close_in_time(d))
		return;
	for (r = LIST_FIRST(&d->all); r; r = next) {
		next = LIST_NEXT(r, all_entry);
		nng_aio_stop(r->aio);
	}
	/* Nobody posts any more: the loop handles what was posted, then the requests can go. */
	if (d->inbox) {
		event_base_loop(d->base, EVLOOP_NONBLOCK);
		inbox_free(d->inbox);
	}
	for (r = LIST_FIRST(&d->all); r; r = next) {
		next = LIST_NEXT(r, all_entry);
		request_free(r);
	}
	for (size_t i = 0; i < DISPATCH_PIPE_BUCKETS; i++) {
		while ((p = LIST_FIRST(&d->pipes[i])) != NULL)
			pipe_drop(d, p);
	}
	free(d);
}
