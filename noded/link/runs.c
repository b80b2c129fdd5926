/* The states of a run towards controld (runs.h). Pure; called by requests.c and link.c on link's loop. */
#include "runs.h"

#include "common/text.h"

#define PATIENCE_MAX_MS 10000 /* beyond the parking, until the answer to a poll is given up */
#define STUCK_MAX 20          /* answers without progress before the run is given up as broken */

void link_run_init(struct link_run *r, const char *run_id, const uint8_t token[TOKEN_LEN])
{
	memset(r, 0, sizeof(*r));
	if (!text_copy(r->run_id, sizeof(r->run_id), run_id))
		r->run_id[0] = '\0';
	memcpy(r->token, token, TOKEN_LEN);
	buf_init(&r->finish, LINK_MESSAGE_MAX);
}

void link_run_free(struct link_run *r)
{
	buf_free(&r->finish);
}

static bool events_wanted(const struct link_run *r)
{
	return r->has_spool && r->next_send <= r->last_seq;
}

enum link_type link_run_want(const struct link_run *r, int64_t now_ms)
{
	if (r->over || r->under_way != 0 || now_ms < r->not_before_ms)
		return 0;
	if (r->refuse_due)
		return LINK_REFUSE;
	if (r->grant == GRANT_WANTED)
		return LINK_START;
	if (r->grant != GRANT_GIVEN)
		return 0;
	if (r->blob_due)
		return LINK_BLOB;
	if (events_wanted(r))
		return LINK_EVENTS;
	if (r->finish_due)
		return LINK_FINISH;
	return 0;
}

int64_t link_pause_ms(uint32_t failures)
{
	int64_t pause = 100;

	for (uint32_t i = 1; i < failures && pause < 5000; i++)
		pause *= 2;
	return failures == 0 ? 0 : pause < 5000 ? pause : 5000;
}

int64_t link_lease_deadline_ns(int64_t sent_ns, uint32_t lease_ms)
{
	return sent_ns + ((int64_t)lease_ms - (int64_t)lease_ms / 12) * 1000000;
}

uint32_t link_park_ms(uint32_t longest, uint32_t lease_ms)
{
	return lease_ms > 0 && lease_ms / 6 < longest ? lease_ms / 6 : longest;
}

uint32_t link_patience_ms(uint32_t park_ms, uint32_t lease_ms)
{
	return park_ms + (lease_ms > 0 && lease_ms / 3 < PATIENCE_MAX_MS ? lease_ms / 3 : PATIENCE_MAX_MS);
}

void link_run_failed(struct link_run *r, int64_t now_ms)
{
	r->under_way = 0;
	r->failures++;
	r->not_before_ms = now_ms + link_pause_ms(r->failures);
}

static void end_of_run(struct link_run *r, struct link_effect *out)
{
	r->over = true;
	out->done = true;
}

/* Which end a stale token makes depends on who waits: a broker that finishes hears so, any other is killed. */
static void fenced(struct link_run *r, uint8_t type, uint8_t fence, struct link_effect *out)
{
	out->fence = fence;
	if (type == LINK_START)
		out->started = true;
	if (type == LINK_FINISH)
		out->finished = true;
	else if (type != LINK_REFUSE)
		out->kill = true;
	end_of_run(r, out);
}

void link_run_rejected(struct link_run *r, struct link_effect *out)
{
	uint8_t type = r->under_way;

	*out = (struct link_effect){ .fence = 0 };
	r->under_way = 0;
	fenced(r, type, FENCE_UNKNOWN, out);
	out->kill = true;
}

/* What controld wants next, if the spool can give it. */
static bool seek(struct link_run *r, uint64_t expected)
{
	if (expected < r->first_seq || expected > r->last_seq + 1)
		return false;
	r->stuck = expected > r->next_send ? 0 : r->stuck + 1;
	r->next_send = expected;
	return r->stuck < STUCK_MAX;
}

static void events_answered(struct link_run *r, uint8_t fence, uint64_t expected, int64_t now_ms, struct link_effect *out)
{
	/* controld cannot be further than what was sent, or behind what this host began with. */
	if (!seek(r, expected)) {
		fenced(r, LINK_EVENTS, FENCE_UNKNOWN, out);
		return;
	}
	if (fence == FENCE_GAP || r->stuck > 0)
		r->not_before_ms = now_ms + link_pause_ms(r->stuck);
	else
		out->acked = r->next_send - 1;
}

static void finish_answered(struct link_run *r, uint8_t fence, uint64_t expected, int64_t now_ms, struct link_effect *out)
{
	if (fence == FENCE_GAP) {
		if (!seek(r, expected) || expected > r->finish_seq)
			fenced(r, LINK_FINISH, FENCE_UNKNOWN, out);
		else
			r->not_before_ms = now_ms + link_pause_ms(r->stuck);
		return;
	}
	out->fence = fence;
	out->finished = true;
	end_of_run(r, out);
}

void link_run_answered(struct link_run *r, uint8_t fence, uint64_t expected_seq, int64_t now_ms, struct link_effect *out)
{
	uint8_t type = r->under_way;

	*out = (struct link_effect){ .fence = fence };
	r->under_way = 0;
	r->failures = 0;
	r->not_before_ms = 0;
	if (fence < FENCE_APPLIED || fence > FENCE_GAP || fence == FENCE_STALE || fence == FENCE_UNKNOWN ||
			(fence == FENCE_GAP && type != LINK_EVENTS && type != LINK_FINISH)) {
		fenced(r, type, fence == FENCE_STALE ? FENCE_STALE : FENCE_UNKNOWN, out);
		return;
	}
	switch (type) {
	case LINK_START:
		r->grant = GRANT_GIVEN;
		out->started = true;
		break;
	case LINK_EVENTS: events_answered(r, fence, expected_seq, now_ms, out); break;
	case LINK_FINISH: finish_answered(r, fence, expected_seq, now_ms, out); break;
	case LINK_REFUSE: end_of_run(r, out); break;
	default: break;
	}
}

void link_run_blob_answered(struct link_run *r)
{
	r->under_way = 0;
	r->failures = 0;
	r->blob_due = false;
}
