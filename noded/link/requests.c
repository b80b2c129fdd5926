/*
 * What runs ask of controld: START, EVENTS, FINISH, REFUSE, BLOB. runs.c decides which; here the message is made (events out of the
 * spool), sent, and its answer carried to broker and keeper. On link's loop.
 */
#include "link_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <stdlib.h>
#include <string.h>

#define ANSWER_TIMEOUT_MS 20000
#define EVENTS_ROOM 8192 /* of LINK_EVENTS_BYTES_MAX, for heads */

/* --- messages ---------------------------------------------------------------------------------------------------------------- */

/* Events from next_send on, as many as one request may hold. False: the spool cannot be read. */
static bool make_events(struct run_entry *r, struct buf *out)
{
	struct link_record *records = calloc(LINK_EVENTS_MAX, sizeof(*records));
	struct buf bytes = BUF_INIT(LINK_EVENTS_BYTES_MAX);
	size_t offsets[LINK_EVENTS_MAX] = { 0 };
	struct link_events m = {
		.spent_micros = r->run.spent, .held_micros = r->run.held, .first_seq = r->run.next_send, .records = records
	};
	struct spool_record record;
	struct err e;
	int rc = 0;

	memcpy(m.token, r->run.token, TOKEN_LEN);
	if (records == NULL || !text_copy(m.run_id, sizeof(m.run_id), r->run.run_id)) {
		free(records);
		return false;
	}
	while (m.record_count < LINK_EVENTS_MAX && m.first_seq + m.record_count <= r->run.last_seq) {
		rc = spool_read(r->spool, m.first_seq + m.record_count, &record, &e);
		if (rc != 1 || bytes.len + record.len + EVENTS_ROOM > LINK_EVENTS_BYTES_MAX)
			break;
		offsets[m.record_count] = bytes.len;
		records[m.record_count].type = record.type;
		records[m.record_count].len = record.len;
		if (!buf_add(&bytes, record.bytes, record.len))
			break;
		m.record_count++;
	}
	if (rc < 0)
		log_error("spool not readable run=%s error=%s", r->run.run_id, e.text);
	for (uint32_t i = 0; i < m.record_count; i++)
		records[i].bytes = bytes.data + offsets[i];
	if (m.record_count > 0)
		link_events_encode(&m, out);
	r->run.sent_last = m.first_seq + m.record_count - 1;
	free(records);
	buf_free(&bytes);
	return m.record_count > 0 && !out->failed;
}

/* str run_id, token, then what the caller has encoded already: the head that these messages share. */
static bool make_finish(const struct run_entry *r, struct buf *out)
{
	struct link_finish m = { .run_id = "" };
	struct err e;
	bool ok;

	memcpy(m.token, r->run.token, TOKEN_LEN);
	if (!text_copy(m.run_id, sizeof(m.run_id), r->run.run_id) ||
			run_end_decode(r->run.finish.data, r->run.finish.len, &m.end, &e) < 0)
		return false;
	link_finish_encode(&m, out);
	ok = !out->failed;
	link_finish_free(&m);
	return ok;
}

static bool make_refuse(const struct run_entry *r, struct buf *out)
{
	struct link_refuse m = { .failed = r->run.refuse_failed, .code = r->run.refuse_code };

	memcpy(m.token, r->run.token, TOKEN_LEN);
	if (!text_copy(m.run_id, sizeof(m.run_id), r->run.run_id) || !text_copy(m.reason, sizeof(m.reason), r->run.refuse_reason))
		return false;
	link_refuse_encode(&m, out);
	return !out->failed;
}

static bool make_blob(const struct run_entry *r, struct buf *out)
{
	struct link_blob m = { .offset = r->run.blob_offset };

	memcpy(m.token, r->run.token, TOKEN_LEN);
	memcpy(m.sha256, r->run.blob_sha, SHA256_LEN);
	if (!text_copy(m.run_id, sizeof(m.run_id), r->run.run_id))
		return false;
	link_blob_encode(&m, out);
	return !out->failed;
}

static bool make_start(const struct run_entry *r, struct buf *out)
{
	struct link_start m = { .run_id = "" };

	memcpy(m.token, r->run.token, TOKEN_LEN);
	if (!text_copy(m.run_id, sizeof(m.run_id), r->run.run_id))
		return false;
	link_start_encode(&m, out);
	return !out->failed;
}

static bool make(struct run_entry *r, enum link_type type, struct buf *out)
{
	switch (type) {
	case LINK_START: return make_start(r, out);
	case LINK_EVENTS: return make_events(r, out);
	case LINK_FINISH: return make_finish(r, out);
	case LINK_REFUSE: return make_refuse(r, out);
	case LINK_BLOB: return make_blob(r, out);
	default: return false;
	}
}

/* --- sending ----------------------------------------------------------------------------------------------------------------- */

/* True when a request went out. */
static bool send_for(struct link *l, struct run_entry *r, enum link_type type)
{
	struct buf body = BUF_INIT(LINK_MESSAGE_MAX - 1024);
	struct asked *a = calloc(1, sizeof(*a));
	bool sent = false;

	if (a != NULL && make(r, type, &body)) {
		*a = (struct asked){ .type = (uint8_t)type, .run = r, .sent_boot_ns = clock_boot_ns() };
		sent = peers_send(l->peers, (uint8_t)type, body.data, body.len, ANSWER_TIMEOUT_MS, true, a);
	} else {
		log_error("request not made run=%s type=%d", r->run.run_id, (int)type);
	}
	buf_free(&body);
	if (sent) {
		r->run.under_way = (uint8_t)type;
	} else {
		free(a);
		link_run_failed(&r->run, clock_boot_ms());
	}
	return sent;
}

void requests_pump(struct link *l)
{
	int64_t now = clock_boot_ms();
	struct run_entry **at = &l->runs, *served = NULL, **served_tail = &served;

	while (*at != NULL) {
		struct run_entry *r = *at;
		enum link_type type = link_run_want(&r->run, now);

		if (type == 0) {
			at = &r->next;
			continue;
		}
		/* Polls renew the lease: they always find a slot. */
		if (peers_free_slots(l->peers) <= (uint32_t)(POLLS_MAX - l->polls))
			break;
		(void)send_for(l, r, type);
		*at = r->next; /* to the end of the list: the next one is served first */
		r->next = NULL;
		*served_tail = r;
		served_tail = &r->next;
	}
	while (*at != NULL)
		at = &(*at)->next;
	*at = served;
}

/* --- answers ----------------------------------------------------------------------------------------------------------------- */

static void carry_out(struct link *l, struct run_entry *r, const struct link_effect *f)
{
	struct buf acked = BUF_INIT(16);

	if (f->acked != 0) {
		wire_put_u64(&acked, f->acked);
		link_to_broker(l, r->run.token, RF_LB_ACKED, acked.data, acked.len);
	}
	buf_free(&acked);
	if (f->started)
		link_to_broker(l, r->run.token, RF_LB_STARTED, &f->fence, 1);
	if (f->finished)
		link_to_broker(l, r->run.token, RF_LB_FINISHED, &f->fence, 1);
	if (f->kill) {
		log_warn("run is fenced run=%s fence=%u", r->run.run_id, f->fence);
		link_token_frame(l, RF_KEEPER_KILL, r->run.token);
	}
	if (f->done) {
		link_token_frame(l, RF_KEEPER_DONE, r->run.token);
		poll_news(l);
	}
}

/* The two kinds of answer: a fence alone, or a fence and what is expected next. */
static bool read_fence(uint8_t type, const struct link_reply *reply, uint8_t *fence, uint64_t *expected)
{
	struct link_start_reply one;
	struct link_events_reply two;
	struct err e;

	*expected = 0;
	if (type == LINK_EVENTS || type == LINK_FINISH) {
		if (link_events_reply_decode(reply->body, reply->body_len, &two, &e) < 0)
			return false;
		*fence = two.fence;
		*expected = two.expected_seq;
		return true;
	}
	if (link_start_reply_decode(reply->body, reply->body_len, &one, &e) < 0)
		return false;
	*fence = one.fence;
	return true;
}

static bool blob_answer(struct link *l, struct run_entry *r, const struct link_reply *reply)
{
	struct link_blob_reply b;
	struct buf body = BUF_INIT(LINK_BLOB_MAX + 64);
	struct err e;

	if (link_blob_reply_decode(reply->body, reply->body_len, &b, &e) < 0 || b.len > LINK_BLOB_MAX)
		return false;
	link_run_blob_answered(&r->run);
	wire_put_u64(&body, b.total);
	wire_put_bytes(&body, b.bytes, b.len);
	link_to_broker(l, r->run.token, RF_LB_BLOB, body.data, body.len);
	buf_free(&body);
	return true;
}

static void refused(struct link *l, struct run_entry *r, const struct link_reply *reply)
{
	struct link_effect f;
	char text[257];
	struct wire_reader rd;

	wire_read_init(&rd, reply->body, reply->body_len);
	wire_str_fixed(&rd, text, sizeof(text));
	log_error("controld refused a request run=%s type=%u result=%u text=\"%s\"", r->run.run_id, reply->type, reply->result,
			rd.failed ? "" : text);
	link_run_rejected(&r->run, &f);
	carry_out(l, r, &f);
}

void requests_answer(struct link *l, struct asked *a, const struct link_reply *reply)
{
	struct run_entry *r = a->run;
	struct link_effect f;
	uint64_t expected;
	uint8_t fence;

	if (r->run.over) {
		r->run.under_way = 0; /* killed meanwhile */
		return;
	}
	if (reply == NULL || reply->result == LINK_BUSY || reply->result == LINK_UNAUTHENTIC) {
		link_run_failed(&r->run, clock_boot_ms());
		return;
	}
	if (reply->result == LINK_REVOKED) {
		link_run_failed(&r->run, clock_boot_ms());
		link_kill_all(l);
		return;
	}
	if (reply->result != LINK_OK) {
		refused(l, r, reply);
		return;
	}
	if (a->type == LINK_BLOB) {
		if (!blob_answer(l, r, reply))
			link_run_failed(&r->run, clock_boot_ms());
		return;
	}
	if (!read_fence(a->type, reply, &fence, &expected)) {
		log_warn("controld's answer is malformed run=%s type=%u", r->run.run_id, a->type);
		link_run_failed(&r->run, clock_boot_ms());
		return;
	}
	link_run_answered(&r->run, fence, expected, clock_boot_ms(), &f);
	carry_out(l, r, &f);
}

void requests_reap(struct link *l)
{
	struct run_entry **at = &l->runs;

	while (*at != NULL) {
		struct run_entry *r = *at;

		if (!r->run.over || r->run.under_way != 0) {
			at = &r->next;
			continue;
		}
		*at = r->next;
		l->run_count--;
		spool_close(r->spool);
		link_run_free(&r->run);
		free(r);
	}
}
