/* Queues of statements, and the table of those that the server knows by name. Owned by one pgev; loop thread, never blocks. */
#include "pgev_internal.h"

#include "log.h"

#include <string.h>

void pg_list_init(struct pg_list *l)
{
	l->head = NULL;
	l->tail = &l->head;
}

void pg_list_put(struct pg_list *l, struct pg_job *job)
{
	job->next = NULL;
	*l->tail = job;
	l->tail = &job->next;
}

struct pg_job *pg_list_take(struct pg_list *l)
{
	struct pg_job *job = l->head;

	if (job) {
		l->head = job->next;
		if (!l->head)
			l->tail = &l->head;
	}
	return job;
}

/* Where st stands or would stand. The table is never more than half full. */
static size_t slot_of(const struct pg_prepared *p, const struct pg_stmt *st)
{
	size_t size = sizeof(p->slots) / sizeof(p->slots[0]);
	size_t i = ((uintptr_t)st >> 3) * 2654435761u % size;

	while (p->slots[i].st && p->slots[i].st != st)
		i = (i + 1) % size;
	return i;
}

bool pg_prepared_need(struct pg_prepared *p, const struct pg_stmt *st)
{
	size_t i = slot_of(p, st);

	if (p->slots[i].st && p->slots[i].parsed)
		return false;
	if (!p->slots[i].st) {
		check_abort(p->count < PG_PREPARED_MAX); /* statements are static structs: the program fixes their number */
		p->count++;
	}
	p->slots[i].st = st;
	p->slots[i].parsed = true;
	return true;
}

bool pg_prepared_drop(struct pg_prepared *p, const struct pg_stmt *st)
{
	size_t i = slot_of(p, st);
	bool was = p->slots[i].st && p->slots[i].parsed;

	p->slots[i].parsed = false;
	return was;
}

void pg_prepared_forget(struct pg_prepared *p)
{
	memset(p, 0, sizeof(*p));
}
