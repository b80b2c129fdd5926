/* The store as far as dispatch sees it (dispatch_rig.h): each call is answered in the next turn of the loop. */
#include "dispatch_rig.h"

struct dispatch_rig rig;

struct later {
	void (*run)(struct later *l);
	void *cb, *arg;
	struct event *ev;
};

static void on_later(evutil_socket_t fd, short what, void *arg)
{
	struct later *l = arg;

	(void)fd;
	(void)what;
	event_free(l->ev);
	l->run(l);
	free(l);
}

static int call_later(void (*run)(struct later *), void *cb, void *arg, struct err *e)
{
	struct later *l;
	struct timeval now = { 0, 0 };

	if (rig.unavailable)
		return err_set(e, ERR_UNAVAILABLE, "full");
	l = calloc(1, sizeof(*l));
	l->run = run;
	l->cb = cb;
	l->arg = arg;
	l->ev = evtimer_new(rig.base, on_later, l);
	event_add(l->ev, &now);
	return 0;
}

static void run_node(struct later *l)
{
	struct store_nodes n = { .nodes = &rig.node, .count = 1 };

	(void)!text_copy(rig.node.state, sizeof(rig.node.state), rig.revoked ? "revoked" : "active");
	((store_nodes_cb)l->cb)(l->arg, &n, NULL);
}

static void run_no_node(struct later *l)
{
	struct store_nodes n = { .count = 0 };

	((store_nodes_cb)l->cb)(l->arg, &n, NULL);
}

int store_node_get(struct store *s, const char *node_id, store_nodes_cb cb, void *arg, struct err *e)
{
	(void)s;
	return call_later(strcmp(node_id, NODE) == 0 ? run_node : run_no_node, (void *)cb, arg, e);
}

void answer_next(store_next_cb cb, void *arg)
{
	struct store_assign assigns[STORE_CLAIM_MAX];
	struct store_next n = { .result = rig.revoked ? STORE_NEXT_REVOKED : STORE_NEXT_OK, .lease_ms = 60000, .assigns = assigns };

	memset(assigns, 0, sizeof(assigns));
	for (; rig.waiting_assigns > 0; rig.waiting_assigns--) {
		struct store_assign *a = &assigns[n.assign_count++];

		assert_true(text_copy(a->a.run_id, sizeof(a->a.run_id), RUN));
		a->a.prompt = (char *)(uintptr_t) "hello";
		a->a.attempt = 1;
		assert_true(text_copy(a->provider, sizeof(a->provider), "openai"));
		a->sealed_key = rig.sealed_key;
		a->sealed_key_len = rig.sealed_len;
	}
	n.waiting = n.assign_count == 0;
	cb(arg, &n, NULL);
}

static void run_next(struct later *l)
{
	answer_next((store_next_cb)l->cb, l->arg);
}

int store_next(struct store *s, const char *node_id, const struct link_next *n, uint32_t max_claims, store_next_cb cb, void *arg,
		struct err *e)
{
	(void)s;
	(void)n;
	(void)max_claims;
	assert_string_equal(node_id, NODE);
	rig.next_calls++;
	if (rig.hold_next) {
		rig.held_cb = cb;
		rig.held_arg = arg;
		return 0;
	}
	return call_later(run_next, (void *)cb, arg, e);
}

static void run_enrol(struct later *l)
{
	struct store_enrol r = { .result = STORE_ENROL_OK };

	assert_true(text_copy(r.node_id, sizeof(r.node_id), NODE));
	((store_enrol_cb)l->cb)(l->arg, &r, NULL);
}

static void run_enrol_unknown(struct later *l)
{
	struct store_enrol r = { .result = STORE_ENROL_UNKNOWN_TOKEN };

	((store_enrol_cb)l->cb)(l->arg, &r, NULL);
}

int store_node_enrol(struct store *s, const uint8_t secret_hash[32], const struct link_enrol *n, store_enrol_cb cb, void *arg,
		struct err *e)
{
	uint8_t hash[32];

	(void)s;
	secrets_key_hash(rig.secrets, SECRET, hash);
	memcpy(rig.node.sign_key, n->sign_key, 32);
	memcpy(rig.node.seal_key, n->seal_key, 32);
	return call_later(memcmp(hash, secret_hash, 32) == 0 ? run_enrol : run_enrol_unknown, (void *)cb, arg, e);
}

static void run_done(struct later *l)
{
	struct store_done d = { .result = STORE_DONE, .id = "", .detail = "" };

	((store_done_cb)l->cb)(l->arg, &d, NULL);
}

int store_node_certify(
		struct store *s, const char *node_id, const uint8_t certificate[64], store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)certificate;
	rig.certify_calls++;
	return call_later(run_done, (void *)cb, arg, e);
}

static void run_fence(struct later *l)
{
	struct store_fence f = { .fence = FENCE_APPLIED, .expected_seq = 7 };

	((store_fence_cb)l->cb)(l->arg, &f, NULL);
}

int store_run_start(struct store *s, const char *node_id, const char *run_id, const uint8_t token[TOKEN_LEN], store_fence_cb cb,
		void *arg, struct err *e)
{
	(void)s;
	(void)token;
	assert_string_equal(node_id, NODE);
	assert_string_equal(run_id, RUN);
	rig.start_calls++;
	return call_later(run_fence, (void *)cb, arg, e);
}

int store_run_events(struct store *s, const char *node_id, const struct link_events *ev, int64_t last_t_ms, store_fence_cb cb,
		void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)ev;
	rig.events_calls++;
	rig.last_t_ms = last_t_ms;
	return call_later(run_fence, (void *)cb, arg, e);
}

int store_run_finish(struct store *s, const char *node_id, const struct link_finish *f, store_fence_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)f;
	return call_later(run_fence, (void *)cb, arg, e);
}

int store_run_refuse(struct store *s, const char *node_id, const struct link_refuse *r, store_fence_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)r;
	return call_later(run_fence, (void *)cb, arg, e);
}

static void run_blob(struct later *l)
{
	struct store_blob b = { .found = true, .total = 5, .bytes = (const uint8_t *)"bytes", .len = 5 };

	((store_blob_cb)l->cb)(l->arg, &b, NULL);
}

int store_blob(struct store *s, const char *node_id, const struct link_blob *b, store_blob_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)b;
	return call_later(run_blob, (void *)cb, arg, e);
}

static void run_no_image(struct later *l)
{
	struct store_images m = { .count = 0 };

	((store_images_cb)l->cb)(l->arg, &m, NULL);
}

int store_image_wanted(
		struct store *s, const char *node_id, const struct link_image *m, store_images_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)m;
	return call_later(run_no_image, (void *)cb, arg, e);
}

int store_image_blob(struct store *s, const struct link_image_blob *b, store_blob_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)b;
	return call_later(run_blob, (void *)cb, arg, e);
}

static void run_none(struct later *l)
{
	struct store_done d = { .result = STORE_DONE_NOT_FOUND, .id = "", .detail = "" };

	((store_done_cb)l->cb)(l->arg, &d, NULL);
}

int store_node_bye(struct store *s, const char *node_id, uint64_t epoch, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)node_id;
	(void)epoch;
	return call_later(run_none, (void *)cb, arg, e);
}

int store_somebody_waits(struct store *s, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	return call_later(run_none, (void *)cb, arg, e);
}
