/*
 * What a model call costs: the plan of an attempt, its settlement or release, and what the provider's count teaches about the next
 * request. Between model.c, which knows when, and meter.c, which knows how much. On the broker's thread; blocks only for the
 * spool's write.
 */
#include "model_internal.h"
#include "model_request.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"

#include <sodium.h>

/* Bytes since the request whose usage is known, or -1 when this one does not begin with it. */
static int64_t bytes_since_known(const struct model *m)
{
	uint8_t hash[crypto_hash_sha256_BYTES];

	/* A longer one must go on with a comma: else its last message would only look alike. */
	if (m->known_tokens < 0 || m->known_len > m->prefix_len ||
			(m->prefix_len > m->known_len && m->body.data[m->known_len] != ','))
		return -1;
	crypto_hash_sha256(hash, m->body.data, m->known_len);
	if (sodium_memcmp(hash, m->known_hash, sizeof(hash)) != 0)
		return -1;
	return (int64_t)(m->prefix_len - m->known_len) + MODEL_TAIL_MAX;
}

bool model_plan(struct model *m, struct meter_plan *p)
{
	const struct model_spec *spec = &m->opt.a->model;
	int64_t since = bytes_since_known(m), call_left = m->deadline_ms - clock_boot_ms();

	*p = (struct meter_plan){ .now_ms = m->opt.compute_ms(m->opt.arg),
		.time_left_ms = m->opt.time_left_ms(m->opt.arg),
		.wish_tokens = m->wish_tokens };
	if (p->time_left_ms > call_left)
		p->time_left_ms = call_left;
	if (p->time_left_ms < 1)
		p->time_left_ms = 1;
	p->input_tokens = meter_input_bound(
			spec, m->prefix_len + MODEL_TAIL_MAX, since >= 0 ? m->known_tokens : -1, since >= 0 ? (uint64_t)since : 0);
	return meter_plan(m->opt.meter, spec, p);
}

void model_note(struct model *m, const char *text)
{
	if (m->report.note[0] == '\0' && !text_copy(m->report.note, sizeof(m->report.note), text))
		m->report.note[0] = '\0';
}

/* What usage beyond a hold costs more than it; a figure that no price can be made of says nothing. */
static int64_t beyond(const struct model *m, const struct meter_tokens *t, int64_t hold)
{
	int64_t micros, sum = m->report.over_hold_micros;

	if (!price_model(&m->opt.meter->price, t->input, t->cached, t->output, &micros) || micros <= hold ||
			micros > PRICE_MICROS_MAX || sum > PRICE_MICROS_MAX)
		return 0;
	return micros - hold;
}

bool model_settle(struct model *m)
{
	struct meter_tokens t;
	bool has = model_stream_usage(m->stream, &t);
	int64_t micros = 0;

	if (!m->counted)
		m->opt.meter->usage.model_calls++;
	m->counted = true;
	switch (meter_settle(m->opt.meter, has ? &t : NULL, &micros)) {
	case METER_CHARGED:
		m->report.tokens.input += t.input;
		m->report.tokens.cached += t.cached;
		m->report.tokens.output += t.output;
		break;
	case METER_UNMETERED:
		m->report.unmetered++;
		log_warn("model reply without usage run=%s call=%u attempt=%u charged_micros=%lld", m->opt.a->run_id,
				m->report.call, m->report.attempts, (long long)micros);
		model_note(m, "The provider's reply carried no usage: the hold was charged.");
		break;
	case METER_OVER_HOLD:
		m->report.over_hold++;
		m->report.over_hold_micros += beyond(m, &t, micros);
		log_warn("model usage above its hold run=%s call=%u attempt=%u input=%lld output=%lld hold_micros=%lld",
				m->opt.a->run_id, m->report.call, m->report.attempts, (long long)t.input, (long long)t.output,
				(long long)micros);
		model_note(m, "The provider counted more than this call could cost: the hold was charged.");
		break;
	}
	m->report.cost_micros += micros;
	(void)m->opt.meter_moved(m->opt.arg);
	return m->busy;
}

bool model_release(struct model *m)
{
	meter_release(m->opt.meter);
	(void)m->opt.meter_moved(m->opt.arg);
	return m->busy;
}

void model_learn(struct model *m)
{
	struct meter_tokens t;

	m->known_tokens = -1;
	if (!model_stream_usage(m->stream, &t) || t.input < 0 || t.cached < 0 || t.cached > t.input || t.output < 0)
		return;
	m->known_tokens = t.input;
	m->known_len = m->prefix_len;
	crypto_hash_sha256(m->known_hash, m->body.data, m->prefix_len);
}
