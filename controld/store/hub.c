/*
 * Hints that something about a run changed. Owns the subscriptions of this process (SSE and wait clients), the payloads that are to
 * go out, and a tick. Called by all of store/ and by api; on the loop's thread; does not block.
 *
 * A hint is never the only way: once a second the heads of the runs that have subscribers are read, and after every (re)connect of
 * the LISTEN connection all of them are told. NOTIFY takes a lock of the whole cluster at commit, so it is never part of another
 * transaction: what changed within 5 ms goes out as one, 200 ids a payload, and its commit is not waited for.
 *
 * Payload: instance of the sender, then words: run_..., node_..., or q<memory>,<vcpus>,<emulated>,<count>.
 */
#include "store_internal.h"

#include "common/log.h"
#include "common/text.h"

#include <event2/event.h>
#include <inttypes.h>

#define BUCKETS 4096
#define SUBS_MAX 20000
#define PAYLOAD_MAX 7800 /* Postgres takes 7999 bytes */
#define WORDS_MAX 200
#define PENDING_MAX 64 /* payloads that wait; more are dropped: the tick makes up for it */
#define TICK_RUNS 1000

struct topic {
	struct topic *next; /* in its bucket */
	struct topic *dirty_next;
	char run_id[ID_MAX];
	struct store_sub *subs;
	int64_t seq; /* head at the last tick; -1 = not read yet */
	char state[24];
	bool dirty;
};

struct store_sub {
	struct store_sub *next, **link;
	struct topic *topic;
	struct hub *hub;
	store_sub_cb cb;
	void *arg;
};

struct hub {
	struct store *s;
	struct topic *buckets[BUCKETS];
	struct topic *dirty; /* to be told in the next turn */
	size_t sub_count;
	struct event *turn, *tick, *flush;
	struct buf out; /* the payload that is being filled */
	unsigned words;
	int sending;        /* payloads under way */
	size_t tick_bucket; /* where the last tick ended */
	bool ticking;
	struct store_sub *next; /* to be told after the one that is being told */
};

static unsigned bucket_of(const char *run_id)
{
	uint32_t h = 2166136261u;

	for (; *run_id; run_id++)
		h = (h ^ (uint8_t)*run_id) * 16777619u;
	return h % BUCKETS;
}

static struct topic *topic_find(struct hub *h, const char *run_id)
{
	struct topic *t = h->buckets[bucket_of(run_id)];

	while (t && strcmp(t->run_id, run_id) != 0)
		t = t->next;
	return t;
}

/* ---- to subscribers here
 * ---------------------------------------------------------------------------------------------------------- */

static void topic_mark(struct hub *h, struct topic *t)
{
	const struct timeval now = { 0, 0 };

	if (t->dirty)
		return;
	t->dirty = true;
	t->dirty_next = h->dirty;
	h->dirty = t;
	event_add(h->turn, &now);
}

static void topic_drop(struct hub *h, struct topic *t)
{
	struct topic **at = &h->buckets[bucket_of(t->run_id)];

	while (*at != t)
		at = &(*at)->next;
	*at = t->next;
	free(t);
}

/* A callback may free any subscription (that moves `next` along) and make new ones (they come in front and are not told). */
static void topic_tell(struct hub *h, struct topic *t)
{
	struct store_sub *sub;

	for (sub = t->subs; sub; sub = h->next) {
		h->next = sub->next;
		sub->cb(sub->arg);
	}
	h->next = NULL;
}

static void on_turn(evutil_socket_t fd, short what, void *arg)
{
	struct hub *h = arg;

	(void)fd;
	(void)what;
	while (h->dirty) {
		struct topic *t = h->dirty;

		h->dirty = t->dirty_next;
		topic_tell(h, t);
		t->dirty = false;
		if (!t->subs)
			topic_drop(h, t);
	}
}

struct store_sub *store_hub_subscribe(struct store *s, const char *run_id, store_sub_cb cb, void *arg)
{
	struct hub *h = s->hub;
	struct topic *t;
	struct store_sub *sub;

	if (h->sub_count >= SUBS_MAX || strlen(run_id) >= ID_MAX)
		return NULL;
	sub = calloc(1, sizeof(*sub));
	if (!sub)
		return NULL;
	t = topic_find(h, run_id);
	if (!t) {
		t = calloc(1, sizeof(*t));
		if (!t || !text_copy(t->run_id, sizeof(t->run_id), run_id)) {
			free(t);
			free(sub);
			return NULL;
		}
		t->seq = -1;
		t->next = h->buckets[bucket_of(run_id)];
		h->buckets[bucket_of(run_id)] = t;
	}
	sub->hub = h;
	sub->topic = t;
	sub->cb = cb;
	sub->arg = arg;
	sub->next = t->subs;
	sub->link = &t->subs;
	if (sub->next)
		sub->next->link = &sub->next;
	t->subs = sub;
	h->sub_count++;
	return sub;
}

void store_hub_unsubscribe(struct store_sub *sub)
{
	struct topic *t;

	if (!sub)
		return;
	t = sub->topic;
	if (sub->hub->next == sub)
		sub->hub->next = sub->next;
	*sub->link = sub->next;
	if (sub->next)
		sub->next->link = sub->link;
	sub->hub->sub_count--;
	if (!t->subs && !t->dirty)
		topic_drop(sub->hub, t);
	free(sub);
}

/* ---- to other controlds
 * --------------------------------------------------------------------------------------------------------------- */

static const struct pg_stmt stmt_notify = {
	.name = "notify",
	.sql = "SELECT pg_notify('ephemeral', $1)",
	.nparams = 1,
};

static void on_sent(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct store *s = arg;

	(void)rows;
	(void)sqlstate;
	s->hub->sending--;
	if (e && e->code == ERR_INTERNAL)
		log_error("store: %s", e->text);
}

static void flush(struct hub *h)
{
	struct err e;
	const char *payload = buf_cstr(&h->out);

	if (h->words > 0 && payload && h->s->listen && h->sending < PENDING_MAX) {
		struct pg_param p = PG_TEXT(payload);

		if (pgev_exec(h->s->listen, &stmt_notify, &p, on_sent, h->s, &e) == 0)
			h->sending++;
	}
	buf_reset(&h->out);
	h->words = 0;
}

static void on_flush(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	flush(arg);
}

static void put_word(struct hub *h, const char *word)
{
	const struct timeval soon = { 0, 5000 };

	if (h->words == 0) {
		buf_add_str(&h->out, h->s->instance);
		event_add(h->flush, &soon);
	}
	buf_add_char(&h->out, ' ');
	buf_add_str(&h->out, word);
	if (++h->words >= WORDS_MAX || h->out.len > PAYLOAD_MAX - 64)
		flush(h);
}

void hub_run_changed(struct store *s, const char *run_id)
{
	struct topic *t = topic_find(s->hub, run_id);

	if (t)
		topic_mark(s->hub, t);
	put_word(s->hub, run_id);
}

void hub_node_changed(struct store *s, const char *node_id)
{
	put_word(s->hub, node_id);
	if (s->hooks.on_node)
		s->hooks.on_node(s->hooks.arg, node_id);
}

void hub_queued(struct store *s, uint32_t memory_mib, uint32_t vcpus, bool emulated, uint32_t count)
{
	char word[64];

	if (text_fmt(word, sizeof(word), "q%" PRIu32 ",%" PRIu32 ",%d,%" PRIu32, memory_mib, vcpus, emulated ? 1 : 0, count))
		put_word(s->hub, word);
	if (s->hooks.on_queued)
		s->hooks.on_queued(s->hooks.arg, memory_mib, vcpus, emulated, count);
}

/* ---- from other controlds
 * --------------------------------------------------------------------------------------------------------------- */

/* q<memory>,<vcpus>,<emulated>,<count> */
static void take_queued(struct store *s, const char *word)
{
	char numbers[64];
	int64_t v[4];

	if (!s->hooks.on_queued || !text_fmt(numbers, sizeof(numbers), "{%s}", word + 1) || !array_read_i64(numbers, v, 4))
		return;
	for (int i = 0; i < 4; i++) {
		if (v[i] < 0 || v[i] > INT32_MAX)
			return;
	}
	s->hooks.on_queued(s->hooks.arg, (uint32_t)v[0], (uint32_t)v[1], v[2] != 0, (uint32_t)v[3]);
}

static void take_word(struct store *s, const char *word)
{
	struct topic *t;

	if (strncmp(word, "run_", 4) == 0) {
		t = topic_find(s->hub, word);
		if (t)
			topic_mark(s->hub, t);
	} else if (strncmp(word, "node_", 5) == 0) {
		if (s->hooks.on_node)
			s->hooks.on_node(s->hooks.arg, word);
	} else if (word[0] == 'q') {
		take_queued(s, word);
	}
}

void hub_on_notify(void *arg, const char *channel, const char *payload)
{
	struct store *s = arg;
	char word[64];
	size_t len = strcspn(payload, " ");

	if (strcmp(channel, "ephemeral") != 0 || (len == strlen(s->instance) && strncmp(payload, s->instance, len) == 0))
		return;
	for (payload += len; *payload == ' '; payload += len) {
		payload++;
		len = strcspn(payload, " ");
		if (len >= sizeof(word))
			continue;
		memcpy(word, payload, len);
		word[len] = '\0';
		take_word(s, word);
	}
}

void hub_on_listen_connect(void *arg, struct pgev *pg)
{
	struct store *s = arg;
	struct err e;

	if (pgev_sql(pg, "SET synchronous_commit = off", NULL, NULL, &e) != 0 ||
			pgev_sql(pg, "LISTEN ephemeral", NULL, NULL, &e) != 0)
		log_warn("store: listen: %s", e.text);
	/* Hints may have been missed. */
	for (size_t i = 0; i < BUCKETS; i++) {
		for (struct topic *t = s->hub->buckets[i]; t; t = t->next)
			topic_mark(s->hub, t);
	}
}

/* ---- the tick
 * ------------------------------------------------------------------------------------------------------------------------------ */

static const struct pg_stmt stmt_heads = {
	.name = "heads",
	.sql = "SELECT t.id, coalesce(l.seq, 0), coalesce(l.state, '') FROM unnest($1::text[]) AS t(id) LEFT JOIN run_live l ON "
	       "l.run_id = t.id",
	.nparams = 1,
};

static void on_heads(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct store *s = arg;

	(void)sqlstate;
	s->hub->ticking = false;
	if (e) {
		call_error(e);
		return;
	}
	for (int i = 0; i < pg_nrows(rows); i++) {
		struct topic *t = topic_find(s->hub, pg_text(rows, i, 0));

		if (!t || (t->seq == pg_i64(rows, i, 1) && strcmp(t->state, pg_text(rows, i, 2)) == 0))
			continue;
		t->seq = pg_i64(rows, i, 1);
		col_text(rows, i, 2, t->state, sizeof(t->state));
		topic_mark(s->hub, t);
	}
}

/* At most TICK_RUNS runs a second, each in its turn. */
static void on_tick(evutil_socket_t fd, short what, void *arg)
{
	struct hub *h = arg;
	struct buf ids = BUF_INIT(ID_MAX * (TICK_RUNS + 64));
	struct params p = { .n = 0 };
	size_t count = 0;
	struct err e;

	(void)fd;
	(void)what;
	if (h->sub_count == 0 || h->ticking || !h->s->reads)
		return;
	array_begin(&ids);
	for (size_t i = 0; i < BUCKETS && count < TICK_RUNS; i++) {
		h->tick_bucket = (h->tick_bucket + 1) % BUCKETS;
		for (struct topic *t = h->buckets[h->tick_bucket]; t && count < TICK_RUNS; t = t->next, count++)
			array_text(&ids, t->run_id);
	}
	array_end(&ids);
	params_text(&p, buf_cstr(&ids));
	if (ids.failed)
		log_odd("an id that is no id has a subscriber", __FILE__, __LINE__);
	else if (pgev_exec(h->s->reads, &stmt_heads, p.p, on_heads, h->s, &e) == 0)
		h->ticking = true;
	buf_free(&ids);
}

int hub_new(struct store *s, struct hub **out, struct err *e)
{
	struct hub *h = calloc(1, sizeof(*h));
	const struct timeval second = { 1, 0 };

	if (!h)
		return err_set(e, ERR_NOMEM, "no memory for the hub");
	h->s = s;
	buf_init(&h->out, PAYLOAD_MAX);
	h->turn = evtimer_new(s->base, on_turn, h);
	h->flush = evtimer_new(s->base, on_flush, h);
	h->tick = event_new(s->base, -1, EV_PERSIST, on_tick, h);
	if (!h->turn || !h->flush || !h->tick || event_add(h->tick, &second) != 0) {
		hub_free(h);
		return err_set(e, ERR_NOMEM, "no memory for the hub");
	}
	*out = h;
	return 0;
}

/* Subscriptions that are left are the caller's mistake; they are not called any more. */
void hub_free(struct hub *h)
{
	if (!h)
		return;
	check_warn(h->sub_count == 0);
	for (size_t i = 0; i < BUCKETS; i++) {
		while (h->buckets[i]) {
			struct topic *t = h->buckets[i];

			h->buckets[i] = t->next;
			while (t->subs) {
				struct store_sub *sub = t->subs;

				t->subs = sub->next;
				free(sub);
			}
			free(t);
		}
	}
	if (h->turn)
		event_free(h->turn);
	if (h->flush)
		event_free(h->flush);
	if (h->tick)
		event_free(h->tick);
	buf_free(&h->out);
	free(h);
}
