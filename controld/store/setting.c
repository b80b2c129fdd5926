/* Settings by name: text that operators change while controlds run. Called by api and main on the loop's thread; does not block. */
#include "store_internal.h"

#include "common/text.h"

static const struct pg_stmt stmt_setting_get = {
	.name = "setting_get",
	.sql = "SELECT value FROM settings WHERE name = $1",
	.nparams = 1,
};

static const struct pg_stmt stmt_setting_put = {
	.name = "setting_put",
	.sql = "INSERT INTO settings (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value "
	       "RETURNING 'done', ''",
	.nparams = 2,
};

static void on_setting(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	struct call *c = arg;
	struct store_setting v;

	(void)sqlstate;
	if (e) {
		c->cb.setting(c->arg, NULL, call_error(e));
	} else {
		v.found = pg_nrows(rows) == 1;
		v.value = pg_text(rows, 0, 0);
		c->cb.setting(c->arg, &v, NULL);
	}
	free(c);
}

int store_setting_get(struct store *s, const char *name, store_setting_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.setting = cb;
	params_text(&p, name);
	return call_exec(c, s->reads, &stmt_setting_get, &p, on_setting, e);
}

int store_setting_put(struct store *s, const char *name, const char *value, store_done_cb cb, void *arg, struct err *e)
{
	struct call *c = call_new(s, arg, e);
	struct params p = { .n = 0 };

	if (!c)
		return -1;
	c->cb.done = cb;
	if (!text_copy(c->id, sizeof(c->id), name))
		c->id[0] = '\0';
	params_text(&p, name);
	params_text(&p, value);
	return call_exec(c, s->money, &stmt_setting_put, &p, call_done_rows, e);
}
