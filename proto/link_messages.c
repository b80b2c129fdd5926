/* Codecs of the node link's messages (link.h). Counts and strings are bounded before memory is taken. Pure. */
#include "link.h"

#include "common/wire.h"
#include "event.h"

#include <stdlib.h>
#include <string.h>

void link_challenge_reply_encode(const struct link_challenge_reply *m, struct buf *out)
{
	wire_put_raw(out, m->challenge, sizeof(m->challenge));
	wire_put_i64(out, m->server_time_ms);
}

int link_challenge_reply_decode(const void *p, size_t n, struct link_challenge_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_raw(&r, out->challenge, sizeof(out->challenge));
	out->server_time_ms = wire_i64(&r);
	return wire_end(&r, "challenge reply", e);
}

void link_enrol_encode(const struct link_enrol *m, struct buf *out)
{
	wire_put_str(out, m->secret);
	wire_put_str(out, m->name);
	wire_put_raw(out, m->sign_key, sizeof(m->sign_key));
	wire_put_raw(out, m->seal_key, sizeof(m->seal_key));
	wire_put_raw(out, m->receipt_key, sizeof(m->receipt_key));
	wire_put_raw(out, m->seal_sig, sizeof(m->seal_sig));
	wire_put_raw(out, m->receipt_sig, sizeof(m->receipt_sig));
	wire_put_raw(out, m->proof, sizeof(m->proof));
	wire_put_str(out, m->isolation);
	wire_put_str(out, m->labels);
}

int link_enrol_decode(const void *p, size_t n, struct link_enrol *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->secret, sizeof(out->secret));
	wire_str_fixed(&r, out->name, sizeof(out->name));
	wire_raw(&r, out->sign_key, sizeof(out->sign_key));
	wire_raw(&r, out->seal_key, sizeof(out->seal_key));
	wire_raw(&r, out->receipt_key, sizeof(out->receipt_key));
	wire_raw(&r, out->seal_sig, sizeof(out->seal_sig));
	wire_raw(&r, out->receipt_sig, sizeof(out->receipt_sig));
	wire_raw(&r, out->proof, sizeof(out->proof));
	wire_str_fixed(&r, out->isolation, sizeof(out->isolation));
	wire_str_fixed(&r, out->labels, sizeof(out->labels));
	return wire_end(&r, "enrol", e);
}

void link_enrol_reply_encode(const struct link_enrol_reply *m, struct buf *out)
{
	wire_put_str(out, m->node_id);
	wire_put_raw(out, m->certificate, sizeof(m->certificate));
	wire_put_raw(out, m->root_key, sizeof(m->root_key));
}

int link_enrol_reply_decode(const void *p, size_t n, struct link_enrol_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->node_id, sizeof(out->node_id));
	wire_raw(&r, out->certificate, sizeof(out->certificate));
	wire_raw(&r, out->root_key, sizeof(out->root_key));
	return wire_end(&r, "enrol reply", e);
}

void link_next_encode(const struct link_next *m, struct buf *out)
{
	wire_put_u64(out, m->epoch);
	wire_put_u32(out, m->free_memory_mib);
	wire_put_u32(out, m->free_vcpus);
	wire_put_u32(out, m->free_slots);
	wire_put_u32(out, m->total_memory_mib);
	wire_put_u32(out, m->total_vcpus);
	wire_put_u32(out, m->total_slots);
	wire_put_str(out, m->isolation);
	wire_put_bool(out, m->draining);
	wire_put_u64(out, m->last_command);
	wire_put_u32(out, m->wait_ms);
	wire_put_u32(out, m->held_count);
	for (uint32_t i = 0; i < m->held_count; i++) {
		wire_put_str(out, m->held[i].run_id);
		wire_put_raw(out, m->held[i].token, TOKEN_LEN);
		wire_put_i64(out, m->held[i].spent_micros);
		wire_put_i64(out, m->held[i].held_micros);
	}
}

static void held_decode(struct wire_reader *r, struct link_next *out)
{
	uint32_t count = wire_count(r, LINK_RUNS_MAX);

	if (r->failed || count == 0)
		return;
	out->held = calloc(count, sizeof(*out->held));
	if (!out->held) {
		wire_fail(r, "memory");
		return;
	}
	out->held_count = count;
	for (uint32_t i = 0; i < count && !r->failed; i++) {
		struct link_held *h = &out->held[i];

		wire_str_fixed(r, h->run_id, sizeof(h->run_id));
		wire_raw(r, h->token, TOKEN_LEN);
		h->spent_micros = wire_i64(r);
		h->held_micros = wire_i64(r);
		if (!r->failed && (!id_valid("run", h->run_id) || h->spent_micros < 0 || h->held_micros < 0))
			wire_fail(r, "held run");
	}
}

int link_next_decode(const void *p, size_t n, struct link_next *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct link_next){ .epoch = 0 };
	wire_read_init(&r, p, n);
	out->epoch = wire_u64(&r);
	out->free_memory_mib = wire_u32(&r);
	out->free_vcpus = wire_u32(&r);
	out->free_slots = wire_u32(&r);
	out->total_memory_mib = wire_u32(&r);
	out->total_vcpus = wire_u32(&r);
	out->total_slots = wire_u32(&r);
	wire_str_fixed(&r, out->isolation, sizeof(out->isolation));
	out->draining = wire_bool(&r);
	out->last_command = wire_u64(&r);
	out->wait_ms = wire_u32(&r);
	if (!r.failed && out->wait_ms > LINK_POLL_MS)
		wire_fail(&r, "wait");
	held_decode(&r, out);
	if (wire_end(&r, "next", e)) {
		link_next_free(out);
		return -1;
	}
	return 0;
}

void link_next_free(struct link_next *m)
{
	free(m->held);
	*m = (struct link_next){ .epoch = 0 };
}

void link_next_reply_encode(const struct link_next_reply *m, struct buf *out)
{
	wire_put_u32(out, m->lease_ms);
	wire_put_u32(out, m->assign_count);
	for (uint32_t i = 0; i < m->assign_count; i++) {
		wire_put_bytes(out, m->assigns[i].assignment, m->assigns[i].assignment_len);
		wire_put_bytes(out, m->assigns[i].sealed, m->assigns[i].sealed_len);
	}
	wire_put_u32(out, m->command_count);
	for (uint32_t i = 0; i < m->command_count; i++) {
		wire_put_u64(out, m->commands[i].id);
		wire_put_u8(out, m->commands[i].kind);
		wire_put_str(out, m->commands[i].run_id);
		wire_put_raw(out, m->commands[i].token, TOKEN_LEN);
	}
}

static void assigns_decode(struct wire_reader *r, struct link_next_reply *out)
{
	uint32_t count = wire_count(r, LINK_ASSIGN_MAX);

	if (r->failed || count == 0)
		return;
	out->assigns = calloc(count, sizeof(*out->assigns));
	if (!out->assigns) {
		wire_fail(r, "memory");
		return;
	}
	out->assign_count = count;
	for (uint32_t i = 0; i < count && !r->failed; i++) {
		out->assigns[i].assignment = wire_bytes_copy(r, ASSIGNMENT_MAX, &out->assigns[i].assignment_len);
		out->assigns[i].sealed = wire_bytes_copy(r, 8192, &out->assigns[i].sealed_len);
	}
}

static void commands_decode(struct wire_reader *r, struct link_next_reply *out)
{
	uint32_t count = wire_count(r, LINK_COMMANDS_MAX);

	if (r->failed || count == 0)
		return;
	out->commands = calloc(count, sizeof(*out->commands));
	if (!out->commands) {
		wire_fail(r, "memory");
		return;
	}
	out->command_count = count;
	for (uint32_t i = 0; i < count && !r->failed; i++) {
		struct link_command *c = &out->commands[i];

		c->id = wire_u64(r);
		c->kind = wire_u8(r);
		wire_str_fixed(r, c->run_id, sizeof(c->run_id));
		wire_raw(r, c->token, TOKEN_LEN);
	}
}

int link_next_reply_decode(const void *p, size_t n, struct link_next_reply *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct link_next_reply){ .lease_ms = 0 };
	wire_read_init(&r, p, n);
	out->lease_ms = wire_u32(&r);
	assigns_decode(&r, out);
	commands_decode(&r, out);
	if (wire_end(&r, "next reply", e)) {
		link_next_reply_free(out);
		return -1;
	}
	return 0;
}

void link_next_reply_free(struct link_next_reply *m)
{
	for (uint32_t i = 0; i < m->assign_count; i++) {
		free(m->assigns[i].assignment);
		free(m->assigns[i].sealed);
	}
	free(m->assigns);
	free(m->commands);
	*m = (struct link_next_reply){ .lease_ms = 0 };
}

/* Every write for a run begins with the run and its token. */
static void run_encode(const char *run_id, const uint8_t token[TOKEN_LEN], struct buf *out)
{
	wire_put_str(out, run_id);
	wire_put_raw(out, token, TOKEN_LEN);
}

static void run_decode(struct wire_reader *r, char run_id[ID_MAX], uint8_t token[TOKEN_LEN])
{
	wire_str_fixed(r, run_id, ID_MAX);
	wire_raw(r, token, TOKEN_LEN);
	if (!r->failed && !id_valid("run", run_id))
		wire_fail(r, "run id");
}

static uint8_t fence_decode(struct wire_reader *r)
{
	uint8_t v = wire_u8(r);

	if (v < FENCE_APPLIED || v > FENCE_GAP)
		wire_fail(r, "fence");
	return v;
}

void link_start_encode(const struct link_start *m, struct buf *out)
{
	run_encode(m->run_id, m->token, out);
}

int link_start_decode(const void *p, size_t n, struct link_start *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	run_decode(&r, out->run_id, out->token);
	return wire_end(&r, "start", e);
}

void link_start_reply_encode(const struct link_start_reply *m, struct buf *out)
{
	wire_put_u8(out, m->fence);
}

int link_start_reply_decode(const void *p, size_t n, struct link_start_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	out->fence = fence_decode(&r);
	return wire_end(&r, "start reply", e);
}

void link_events_encode(const struct link_events *m, struct buf *out)
{
	run_encode(m->run_id, m->token, out);
	wire_put_i64(out, m->spent_micros);
	wire_put_i64(out, m->held_micros);
	wire_put_u64(out, m->first_seq);
	wire_put_u32(out, m->record_count);
	for (uint32_t i = 0; i < m->record_count; i++) {
		wire_put_u16(out, m->records[i].type);
		wire_put_bytes(out, m->records[i].bytes, m->records[i].len);
	}
}

static void records_decode(struct wire_reader *r, struct link_events *out)
{
	uint32_t count = wire_count(r, LINK_EVENTS_MAX);

	if (r->failed || count == 0)
		return;
	out->records = calloc(count, sizeof(*out->records));
	if (!out->records) {
		wire_fail(r, "memory");
		return;
	}
	out->record_count = count;
	for (uint32_t i = 0; i < count && !r->failed; i++) {
		size_t len;

		out->records[i].type = wire_u16(r);
		out->records[i].bytes = wire_bytes(r, EVENT_BYTES_MAX, &len);
		out->records[i].len = (uint32_t)len;
	}
}

int link_events_decode(const void *p, size_t n, struct link_events *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct link_events){ .first_seq = 0 };
	wire_read_init(&r, p, n);
	run_decode(&r, out->run_id, out->token);
	out->spent_micros = wire_i64(&r);
	out->held_micros = wire_i64(&r);
	if (!r.failed && (out->spent_micros < 0 || out->held_micros < 0))
		wire_fail(&r, "meter");
	out->first_seq = wire_u64(&r);
	records_decode(&r, out);
	if (wire_end(&r, "events", e)) {
		link_events_free(out);
		return -1;
	}
	return 0;
}

void link_events_free(struct link_events *m)
{
	free(m->records);
	*m = (struct link_events){ .first_seq = 0 };
}

void link_events_reply_encode(const struct link_events_reply *m, struct buf *out)
{
	wire_put_u8(out, m->fence);
	wire_put_u64(out, m->expected_seq);
}

int link_events_reply_decode(const void *p, size_t n, struct link_events_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	out->fence = fence_decode(&r);
	out->expected_seq = wire_u64(&r);
	return wire_end(&r, "events reply", e);
}

void link_finish_encode(const struct link_finish *m, struct buf *out)
{
	run_encode(m->run_id, m->token, out);
	run_end_encode(&m->end, out);
}

int link_finish_decode(const void *p, size_t n, struct link_finish *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct link_finish){ .run_id = "" };
	wire_read_init(&r, p, n);
	run_decode(&r, out->run_id, out->token);
	if (r.failed)
		return wire_end(&r, "finish", e);
	return run_end_decode(r.p, r.left, &out->end, e) ? err_wrap(e, "finish") : 0;
}

void link_finish_free(struct link_finish *m)
{
	run_end_free(&m->end);
}

void link_finish_reply_encode(const struct link_finish_reply *m, struct buf *out)
{
	wire_put_u8(out, m->fence);
	wire_put_u64(out, m->expected_seq);
}

int link_finish_reply_decode(const void *p, size_t n, struct link_finish_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	out->fence = fence_decode(&r);
	out->expected_seq = wire_u64(&r);
	return wire_end(&r, "finish reply", e);
}

void link_refuse_encode(const struct link_refuse *m, struct buf *out)
{
	run_encode(m->run_id, m->token, out);
	wire_put_bool(out, m->failed);
	wire_put_u32(out, m->code);
	wire_put_str(out, m->reason);
}

int link_refuse_decode(const void *p, size_t n, struct link_refuse *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	run_decode(&r, out->run_id, out->token);
	out->failed = wire_bool(&r);
	out->code = wire_u32(&r);
	wire_str_fixed(&r, out->reason, sizeof(out->reason));
	return wire_end(&r, "refuse", e);
}

void link_refuse_reply_encode(const struct link_refuse_reply *m, struct buf *out)
{
	wire_put_u8(out, m->fence);
}

int link_refuse_reply_decode(const void *p, size_t n, struct link_refuse_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	out->fence = fence_decode(&r);
	return wire_end(&r, "refuse reply", e);
}

void link_blob_encode(const struct link_blob *m, struct buf *out)
{
	run_encode(m->run_id, m->token, out);
	wire_put_raw(out, m->sha256, SHA256_LEN);
	wire_put_u64(out, m->offset);
}

int link_blob_decode(const void *p, size_t n, struct link_blob *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	run_decode(&r, out->run_id, out->token);
	wire_raw(&r, out->sha256, SHA256_LEN);
	out->offset = wire_u64(&r);
	return wire_end(&r, "blob", e);
}

void link_blob_reply_encode(const struct link_blob_reply *m, struct buf *out)
{
	wire_put_u64(out, m->total);
	wire_put_bytes(out, m->bytes, m->len);
}

int link_blob_reply_decode(const void *p, size_t n, struct link_blob_reply *out, struct err *e)
{
	struct wire_reader r;
	size_t len;

	wire_read_init(&r, p, n);
	out->total = wire_u64(&r);
	out->bytes = wire_bytes(&r, LINK_BLOB_MAX, &len);
	out->len = (uint32_t)len;
	return wire_end(&r, "blob reply", e);
}
