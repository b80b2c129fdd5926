/* What metrics count of this run: calls by result, denials, attempts, money lost. Told to keeper, which adds it up for the host. */
#include "broker_internal.h"

#include <string.h>

void tally_call(struct broker *b, const struct model_report *r, enum stats_call_result result)
{
	b->tally.calls[STATS_CALL_MODEL][result]++;
	if (r->attempts > 1)
		b->tally.model_attempts_again += r->attempts - 1;
	b->tally.unmetered += r->unmetered;
	b->tally.over_hold += r->over_hold;
	b->tally.over_hold_micros += (uint64_t)r->over_hold_micros;
}

void tally_tell(struct broker *b)
{
	static const struct stats_broker nothing;
	struct buf body = BUF_INIT(sizeof(b->tally) + 64);

	if (b->keeper == NULL || memcmp(&b->tally, &nothing, sizeof(nothing)) == 0)
		return;
	stats_broker_encode(&b->tally, &body);
	if (!body.failed && framed_send(b->keeper, RF_KEEPER_STATS, body.data, body.len))
		b->tally = nothing;
	buf_free(&body);
}
