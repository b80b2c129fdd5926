/* Cancelling. A queued run ends here and now; one that a host holds gets a command for that host, kept until it is done with.
 * Called by api on the loop's thread; does not block. */
#include "store_internal.h"

#include "common/text.h"

static const struct pg_stmt stmt_cancel = {
	.name = "run_cancel",
	.sql = "SELECT result, coalesce(node_id, '') FROM eph_cancel($1, $2)",
	.nparams = 2,
};

static void on_cancel(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_cancel out = { .result = STORE_CANCEL_ALREADY };
	const char *text;

	(void)sqlstate;
	if (e) {
		c->cb.cancel(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	text = pg_text(rows, 0, 0);
	if (strcmp(text, "requested") == 0)
		out.result = STORE_CANCEL_REQUESTED;
	else if (strcmp(text, "ended") == 0)
		out.result = STORE_CANCEL_ENDED;
	else if (strcmp(text, "not_found") == 0)
		out.result = STORE_CANCEL_NOT_FOUND;
	if (out.result == STORE_CANCEL_REQUESTED) {
		hub_run_changed(c->s, c->id);
		hub_node_changed(c->s, pg_text(rows, 0, 1));
	} else if (out.result == STORE_CANCEL_ENDED) {
		hub_run_changed(c->s, c->id);
		settle_soon(c->s, c->id);
	}
	c->cb.cancel(c->arg, &out, NULL);
	free(c);
}

int store_run_cancel(struct store *s, const char *org_id, const char *run_id, store_cancel_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.cancel = cb;
	if (!text_copy(c->id, sizeof(c->id), run_id)) {
		free(c);
		return err_set(e, ERR_INVALID, "that is no run id");
	}
	params_text(&p, org_id);
	params_text(&p, c->id);
	return call_exec(c, s->events, &stmt_cancel, &p, on_cancel, e);
}
