/* Where Prometheus finds nodes (http_sd_configs): those with a label metrics=HOST:PORT. On operator_listen only; runs on the loop.
 */
#include "api_internal.h"

#include <stdlib.h>
#include <string.h>

#define TARGETS_BYTES_MAX (4 * 1024 * 1024)

struct discovery {
	struct buf out;
	struct jw w;
};

static void discovery_free(void *state)
{
	struct discovery *d = state;

	buf_free(&d->out);
	free(d);
}

/* The value of a label in "a=b,c=d"; n = 0: it is not there. */
static const char *label_value(const char *labels, const char *name, size_t *n)
{
	size_t len = strlen(name);

	while (*labels) {
		size_t part = strcspn(labels, ",");

		if (part > len && strncmp(labels, name, len) == 0 && labels[len] == '=') {
			*n = part - len - 1;
			return labels + len + 1;
		}
		labels += part;
		labels += *labels == ',';
	}
	*n = 0;
	return labels;
}

/* Nodes that are lost stay: that they cannot be scraped is what somebody must hear of. */
static void put_target(struct jw *w, const struct store_node *node)
{
	size_t n;
	const char *address = label_value(node->labels, "metrics", &n);

	if (n == 0 || strcmp(node->state, "revoked") == 0)
		return;
	jw_object(w);
	jw_karray(w, "targets");
	jw_strn(w, address, n);
	jw_close(w);
	jw_kobject(w, "labels");
	jw_kstr(w, "node", node->name);
	jw_kstr(w, "isolation", node->isolation);
	jw_close(w);
	jw_close(w);
}

static void on_nodes(void *arg, const struct store_nodes *nodes, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct discovery *d = r ? r->state : NULL;
	struct err again;
	struct buf out;

	if (!r)
		return;
	for (size_t i = 0; i < nodes->count; i++)
		put_target(&d->w, &nodes->nodes[i]);
	if (nodes->next_cursor && !d->out.failed) {
		api_asked(store_node_list(r->api->opt.store, nodes->next_cursor, STORE_LIST_MAX, on_nodes, api_hold(r), &again), r,
				&again);
		return;
	}
	jw_close(&d->w);
	out = d->out; /* the answer takes the bytes, and d goes with the request */
	out.failed |= !jw_end(&d->w);
	buf_init(&d->out, 0);
	api_reply(r, 200, &out);
}

void operator_http_sd(struct api_req *r)
{
	struct discovery *d = calloc(1, sizeof(*d));
	struct err e;

	if (!d) {
		api_problem(r, PROBLEM_UNAVAILABLE, "There is no memory at the moment. Send the request again.");
		return;
	}
	buf_init(&d->out, TARGETS_BYTES_MAX);
	jw_init(&d->w, &d->out);
	jw_array(&d->w);
	api_set_state(r, d, discovery_free);
	api_asked(store_node_list(r->api->opt.store, NULL, STORE_LIST_MAX, on_nodes, api_hold(r), &e), r, &e);
}
