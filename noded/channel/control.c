/* Picks the control of the plan's driver and hands on to it (control.h). Pure. */
#include "channel/control.h"

#include <stdlib.h>

struct control {
	const struct control_driver *driver;
	void *state;
};

static const struct control_driver *driver_of(const struct vmm_plan *plan)
{
	return plan->kind == VMM_QEMU ? &control_qmp : &control_ch; /* the plan's reader knows no other */
}

struct control *control_new(const struct vmm_plan *plan, const struct control_ops *ops)
{
	struct control *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->driver = driver_of(plan);
	c->state = c->driver->make(plan, ops);
	if (!c->state) {
		free(c);
		return NULL;
	}
	return c;
}

void control_free(struct control *c)
{
	if (!c)
		return;
	c->driver->free(c->state);
	free(c);
}

int control_start(struct control *c, struct err *e)
{
	return c->driver->start(c->state, e);
}

int control_feed(struct control *c, const void *bytes, size_t n, struct err *e)
{
	return c->driver->feed(c->state, bytes, n, e);
}

void control_events(struct control *c, const void *bytes, size_t n)
{
	if (c->driver->events)
		c->driver->events(c->state, bytes, n);
}

void control_snapshot(struct control *c, const int *fds, size_t fd_count)
{
	c->driver->snapshot(c->state, fds, fd_count);
}

const char *control_quit(const struct control *c)
{
	return c->driver->quit;
}

const char *control_name(const struct control *c)
{
	return c->driver->name;
}
