/* Judges messages of nodes (check.h). Pure. */
#include "check.h"

#include "common/price.h"
#include "common/text.h"
#include "proto/errcode.h"

#include <inttypes.h>
#include <limits.h>

#define T_MS_MAX (INT64_C(400) * 86400 * 1000) /* no run is this old */

int check_run_id(const char *run_id, struct err *e)
{
	if (!id_valid("run", run_id))
		return err_set(e, ERR_INVALID, "run_id is not a run's id");
	return 0;
}

static int check_meter(int64_t spent, int64_t held, struct err *e)
{
	if (spent < 0 || held < 0 || spent > PRICE_MICROS_MAX || held > PRICE_MICROS_MAX)
		return err_set(e, ERR_INVALID, "the meter (%" PRId64 " spent, %" PRId64 " held) is out of range", spent, held);
	return 0;
}

int check_events(const struct link_events *ev, int64_t *last_t_ms, struct err *e)
{
	*last_t_ms = 0;
	if (check_run_id(ev->run_id, e) != 0 || check_meter(ev->spent_micros, ev->held_micros, e) != 0)
		return -1;
	if (ev->first_seq < 1 || ev->first_seq > INT32_MAX)
		return err_set(e, ERR_INVALID, "first_seq is out of range");
	for (uint32_t i = 0; i < ev->record_count; i++) {
		const struct link_record *r = &ev->records[i];
		enum event_type type;
		int64_t t_ms;

		if (event_check(r->bytes, r->len, ev->run_id, ev->first_seq + i, &type, &t_ms, e) != 0)
			return err_wrap(e, "record %" PRIu32, i);
		if ((uint16_t)type != r->type)
			return err_set(e, ERR_INVALID, "record %" PRIu32 ": its type is not the one in its header", i);
		if (t_ms < 0 || t_ms > T_MS_MAX)
			return err_set(e, ERR_INVALID, "record %" PRIu32 ": t is out of range", i);
		if (t_ms > *last_t_ms)
			*last_t_ms = t_ms;
	}
	return 0;
}

/* Ends that only controld can know of. */
static bool node_may_end_with(enum errcode c)
{
	return c != ERRCODE_NO_CAPACITY && c != ERRCODE_NODE_LOST && c != ERRCODE_ZDR_KEY_LOST && c != ERRCODE_OUTPUT_INVALID &&
	       c < ERRCODE_COUNT;
}

/* Length of the character at p, 0 when its bytes are no clean UTF-8. */
static size_t char_at(const uint8_t *p, size_t left)
{
	size_t n = p[0] < 0x80 ? 1 : p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;

	return n <= left && text_utf8_clean((const char *)p, n) ? n : 0;
}

static int clean_output(struct run_end *end, struct err *e)
{
	struct buf b = BUF_INIT(GUEST_RESULT_MAX + 4);
	size_t i = 0, n;
	bool ok = true;

	while (ok && i < end->output_len) {
		size_t len = char_at(end->output + i, end->output_len - i);

		ok = len ? buf_add(&b, end->output + i, len) : buf_add(&b, "\xef\xbf\xbd", 3);
		i += len ? len : 1;
	}
	if (!ok && b.len <= GUEST_RESULT_MAX) {
		/* It grew over the bound while it was mended: one byte more than allowed says so. */
		uint8_t *p = buf_reserve(&b, GUEST_RESULT_MAX + 1 - b.len);

		if (p) {
			memset(p, ' ', GUEST_RESULT_MAX + 1 - b.len);
			buf_commit(&b, GUEST_RESULT_MAX + 1 - b.len);
			ok = true;
		}
	} else if (!ok && b.len > GUEST_RESULT_MAX) {
		ok = true;
	}
	if (!ok) {
		buf_free(&b);
		return err_set(e, ERR_NOMEM, "no memory for the output");
	}
	free(end->output);
	end->output = (uint8_t *)buf_steal(&b, &n);
	end->output_len = (uint32_t)n;
	return 0;
}

static int check_usage(const struct usage *u, struct err *e)
{
	const int64_t values[] = { u->model_calls, u->input_tokens, u->cached_input_tokens, u->output_tokens, u->web_requests,
		u->web_searches, u->compute_ms, u->unmetered_model_micros };

	for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
		if (values[i] < 0 || values[i] > PRICE_MICROS_MAX)
			return err_set(e, ERR_INVALID, "usage is out of range");
	}
	if (u->cached_input_tokens > u->input_tokens)
		return err_set(e, ERR_INVALID, "usage has more cached than input tokens");
	return 0;
}

int check_finish(struct link_finish *f, struct err *e)
{
	struct run_end *end = &f->end;

	if (check_run_id(f->run_id, e) != 0 || check_usage(&end->usage, e) != 0)
		return -1;
	if (!node_may_end_with((enum errcode)end->code))
		return err_set(e, ERR_INVALID, "a node does not end runs with code %" PRIu32, end->code);
	if (strcmp(end->isolation, "kvm") != 0 && strcmp(end->isolation, "emulated") != 0)
		return err_set(e, ERR_INVALID, "isolation must be kvm or emulated");
	if (!text_utf8_clean(end->detail, strlen(end->detail)))
		return err_set(e, ERR_INVALID, "detail is not UTF-8");
	if (end->output_len > 0 && !text_utf8_clean((const char *)end->output, end->output_len))
		return clean_output(end, e);
	return 0;
}

int check_refuse(const struct link_refuse *r, struct err *e)
{
	if (check_run_id(r->run_id, e) != 0)
		return -1;
	/* No room after all, or draining: no failed start, and no end of the run. */
	if (!r->failed && r->code == ERRCODE_NO_CAPACITY)
		return 0;
	if (!node_may_end_with((enum errcode)r->code))
		return err_set(e, ERR_INVALID, "a node does not refuse runs with code %" PRIu32, r->code);
	return 0;
}

int check_next(const struct link_next *n, struct err *e)
{
	if (strcmp(n->isolation, "kvm") != 0 && strcmp(n->isolation, "emulated") != 0)
		return err_set(e, ERR_INVALID, "isolation must be kvm or emulated");
	if (n->free_memory_mib > n->total_memory_mib || n->free_vcpus > n->total_vcpus || n->free_slots > n->total_slots)
		return err_set(e, ERR_INVALID, "more capacity is free than there is");
	if (n->total_memory_mib > INT32_MAX || n->total_vcpus > INT32_MAX || n->total_slots > INT32_MAX)
		return err_set(e, ERR_INVALID, "the capacity is out of range");
	if (n->epoch > INT64_MAX || n->last_command > INT64_MAX)
		return err_set(e, ERR_INVALID, "epoch or last_command is out of range");
	for (uint32_t i = 0; i < n->held_count; i++) {
		if (check_run_id(n->held[i].run_id, e) != 0 || check_meter(n->held[i].spent_micros, n->held[i].held_micros, e) != 0)
			return err_wrap(e, "held %" PRIu32, i);
	}
	return 0;
}

int check_blob(const struct link_blob *b, struct err *e)
{
	if (check_run_id(b->run_id, e) != 0)
		return -1;
	if (b->offset % LINK_BLOB_MAX != 0 || b->offset > GUEST_FILE_MAX)
		return err_set(e, ERR_INVALID, "offset must be a multiple of %d below the size", LINK_BLOB_MAX);
	return 0;
}

int check_image(const struct link_image *m, struct err *e)
{
	static const char *const states[] = { "ready", "fetching", "failed", "none", "local" };
	size_t i;

	for (i = 0; i < sizeof(states) / sizeof(states[0]); i++)
		if (strcmp(m->state, states[i]) == 0)
			break;
	if (i == sizeof(states) / sizeof(states[0]))
		return err_set(e, ERR_INVALID, "an image is ready, fetching, failed, none or local");
	if (m->current[0] != '\0' &&
			(strlen(m->current) != 2 * SHA256_LEN || strspn(m->current, "0123456789abcdef") != 2 * SHA256_LEN))
		return err_set(e, ERR_INVALID, "the image's name is no hash");
	if (!text_utf8_clean(m->note, strlen(m->note)))
		return err_set(e, ERR_INVALID, "the note is not UTF-8");
	return 0;
}
