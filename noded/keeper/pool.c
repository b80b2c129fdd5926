/* The pool's arithmetic (pool.h). Pure. */
#include "keeper/pool.h"

#include <stddef.h>

void pool_init(struct pool *p, uint32_t min, uint32_t max, uint32_t memory_mib, uint32_t vcpus, int64_t now_ms)
{
	*p = (struct pool){ .min = min, .max = max > min ? max : min, .window_ms = now_ms };
	p->size[0] = (struct pool_size){ .memory_mib = memory_mib, .vcpus = vcpus };
}

static uint32_t demand(const struct pool_size *s)
{
	return s->came > s->before ? s->came : s->before;
}

static void turn_windows(struct pool *p, int64_t now_ms)
{
	int64_t turns = (now_ms - p->window_ms) / POOL_WINDOW_MS;

	if (turns <= 0)
		return;
	p->window_ms += turns * POOL_WINDOW_MS;
	for (int i = 0; i < POOL_SIZES; i++) {
		struct pool_size *s = &p->size[i];

		for (int64_t t = 0; t < turns && demand(s) > 0; t++) {
			s->before = s->came > s->before / 2 ? s->came : s->before / 2;
			s->came = 0;
		}
		if (i > 0 && demand(s) == 0)
			*s = (struct pool_size){ 0 };
	}
}

/* Its place, or one that nobody asks for any more; NULL when all others are asked for. */
static struct pool_size *place(struct pool *p, uint32_t memory_mib, uint32_t vcpus)
{
	struct pool_size *unused = NULL;

	for (int i = 0; i < POOL_SIZES; i++) {
		struct pool_size *s = &p->size[i];

		if (s->memory_mib == memory_mib && s->vcpus == vcpus)
			return s;
		if (!unused && s->memory_mib == 0)
			unused = s;
	}
	if (unused)
		*unused = (struct pool_size){ .memory_mib = memory_mib, .vcpus = vcpus };
	return unused;
}

void pool_demand(struct pool *p, uint32_t memory_mib, uint32_t vcpus, int64_t now_ms)
{
	struct pool_size *s;

	turn_windows(p, now_ms);
	p->came_ms = now_ms;
	s = place(p, memory_mib, vcpus);
	if (s && s->came < UINT32_MAX)
		s->came++;
}

void pool_targets(struct pool *p, int64_t now_ms, uint32_t target[POOL_SIZES])
{
	uint32_t left = p->max;

	turn_windows(p, now_ms);
	for (int i = 0; i < POOL_SIZES; i++) {
		uint32_t want = demand(&p->size[i]);

		if (i == 0 && want < p->min)
			want = p->min;
		target[i] = want < left ? want : left;
		left -= target[i];
	}
}

void pool_boot(struct pool *p, bool worked, int64_t now_ms)
{
	int64_t pause = POOL_PAUSE_FIRST_MS;

	if (worked) {
		p->failures = 0;
		p->pause_until_ms = 0;
		return;
	}
	for (uint32_t i = 0; i < p->failures && pause < POOL_PAUSE_MAX_MS; i++)
		pause *= 2;
	if (p->failures < UINT32_MAX)
		p->failures++;
	p->pause_until_ms = now_ms + (pause < POOL_PAUSE_MAX_MS ? pause : POOL_PAUSE_MAX_MS);
}

bool pool_may_boot(const struct pool *p, int64_t now_ms)
{
	return now_ms >= p->pause_until_ms;
}

int pool_defer_ms(struct pool *p, int64_t now_ms)
{
	int64_t left = p->came_ms + POOL_QUIET_MS - now_ms;

	if (p->came_ms == 0 || left <= 0) {
		p->deferred_ms = 0;
		return 0;
	}
	if (p->deferred_ms == 0)
		p->deferred_ms = now_ms;
	return now_ms - p->deferred_ms < POOL_DEFER_MS ? (int)left : 0;
}
