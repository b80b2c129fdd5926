/*
 * The timeline's writer on a host (events.h). Called by session.c; owns the token bucket, the counts and the few bytes of
 * characters that a chunk of output broke off.
 */
#include "events.h"

#include "guest_json.h"

#include "common/clock.h"
#include "common/json.h"
#include "common/log.h"
#include "common/text.h"

#define NS_PER_S INT64_C(1000000000)
/* Kept free of guest events: for the host's own, and of that a part for the end. */
#define RESERVE_COUNT 1024
#define RESERVE_BYTES (1024 * 1024)
#define LAST_COUNT 8
#define LAST_BYTES (16 * 1024)

struct events {
	struct events_options opt;
	int64_t tokens_ns;      /* bucket as time: an event takes NS_PER_S / EVENT_RATE_PER_SECOND of it */
	int64_t filled_boot_ns; /* when it was last filled */
	uint64_t dropped_events, dropped_bytes;
	bool truncated_said;
	struct guest_tails tails;
};

struct events *events_new(const struct events_options *opt)
{
	struct events *ev = calloc(1, sizeof(*ev));

	if (ev == NULL)
		return NULL;
	ev->opt = *opt;
	ev->tokens_ns = NS_PER_S;
	ev->filled_boot_ns = clock_boot_ns();
	return ev;
}

void events_free(struct events *ev)
{
	free(ev);
}

uint64_t events_dropped(const struct events *ev)
{
	return ev->dropped_events;
}

int64_t events_t_ms(const struct events *ev, int64_t boot_ns)
{
	int64_t t = ev->opt.age_ms + (boot_ns - ev->opt.received_boot_ns) / 1000000;

	return t > 0 ? t : 0;
}

/* Room for an event of about n bytes when `keep_count` and `keep_bytes` must stay free after it. */
static bool fits(const struct events *ev, size_t n, uint64_t keep_count, uint64_t keep_bytes)
{
	struct spool_tail t;

	spool_tail(ev->opt.spool, &t);
	return t.next_seq + keep_count <= EVENT_RUN_COUNT_MAX && t.bytes + n + keep_bytes <= EVENT_RUN_BYTES_MAX;
}

static int append(struct events *ev, enum event_source source, enum event_type type, const struct buf *data, int64_t boot_ns,
		struct err *e)
{
	int64_t spent, held;
	struct spool_tail t;

	if (data->failed)
		return err_set(e, ERR_LIMIT, "the data of a %s event does not fit", event_type_text(type));
	ev->opt.meter(ev->opt.arg, &spent, &held);
	if (spool_append(ev->opt.spool, source, type, events_t_ms(ev, boot_ns), data->data, data->len, spent, held, NULL, e) < 0)
		return -1;
	spool_tail(ev->opt.spool, &t);
	ev->opt.appended(ev->opt.arg, t.next_seq - 1);
	return 0;
}

int events_host(struct events *ev, enum event_type type, const struct buf *data, struct err *e)
{
	if (!fits(ev, data->len, LAST_COUNT, LAST_BYTES))
		return err_set(e, ERR_LIMIT, "the run's record of %d events and %d bytes is full", EVENT_RUN_COUNT_MAX,
				EVENT_RUN_BYTES_MAX);
	return append(ev, EVENT_HOST, type, data, clock_boot_ns(), e);
}

static int truncated(struct events *ev, struct err *e)
{
	struct buf data = BUF_INIT(256);
	struct jw w;
	int rc;

	jw_init(&w, &data);
	jw_object(&w);
	jw_kint(&w, "dropped_events", (int64_t)ev->dropped_events);
	jw_kint(&w, "dropped_bytes", (int64_t)ev->dropped_bytes);
	jw_close(&w);
	rc = append(ev, EVENT_HOST, EV_EVENTS_TRUNCATED, &data, clock_boot_ns(), e);
	buf_free(&data);
	return rc;
}

/* --- guest events ------------------------------------------------------------------------------------------------------------ */

bool events_ready(struct events *ev, int64_t boot_ns, int64_t *wait_ms)
{
	const int64_t each = NS_PER_S / EVENT_RATE_PER_SECOND;
	int64_t passed = boot_ns - ev->filled_boot_ns;

	if (passed > 0) {
		ev->tokens_ns = passed >= NS_PER_S || ev->tokens_ns + passed > NS_PER_S ? NS_PER_S : ev->tokens_ns + passed;
		ev->filled_boot_ns = boot_ns;
	}
	if (ev->tokens_ns >= each)
		return true;
	*wait_ms = (each - ev->tokens_ns) / 1000000 + 1;
	return false;
}

static int keep_or_count(struct events *ev, enum event_type type, struct buf *data, int64_t boot_ns, struct err *e)
{
	if (fits(ev, data->len + 256, RESERVE_COUNT, RESERVE_BYTES)) {
		ev->tokens_ns -= NS_PER_S / EVENT_RATE_PER_SECOND;
		return append(ev, EVENT_GUEST, type, data, boot_ns, e);
	}
	ev->dropped_events++;
	ev->dropped_bytes += data->len;
	if (ev->truncated_said)
		return 0;
	ev->truncated_said = true;
	return truncated(ev, e);
}

/* The broken-off character of a stream goes out as bytes when nothing can complete it any more. */
static int flush_tails(struct events *ev, int64_t boot_ns, struct err *e)
{
	struct buf data = BUF_INIT(1024);
	int rc = 0;

	for (int stream = 1; stream <= 2 && rc == 0; stream++) {
		buf_reset(&data);
		if (guest_json_tail(&ev->tails, (uint8_t)stream, &data))
			rc = keep_or_count(ev, EV_SHELL_OUTPUT, &data, boot_ns, e);
	}
	buf_free(&data);
	return rc;
}

int events_guest(struct events *ev, const struct guest_event *g, int64_t boot_ns, struct err *e)
{
	struct buf data = BUF_INIT(EVENT_BYTES_MAX - 512); /* room for the event's head */
	enum event_type type;
	int rc = 0;

	if (guest_json_ends_output(&ev->tails, g))
		rc = flush_tails(ev, boot_ns, e);
	if (rc == 0) {
		switch (guest_json(&ev->tails, g, &type, &data)) {
		case GUEST_JSON_EVENT: rc = keep_or_count(ev, type, &data, boot_ns, e); break;
		case GUEST_JSON_NOTHING: break;
		case GUEST_JSON_FAILED: rc = err_set(e, ERR_NOMEM, "no memory for a guest's event"); break;
		}
	}
	buf_free(&data);
	return rc;
}

int events_last(struct events *ev, const struct buf *destroyed, struct err *e)
{
	struct err ignored;

	if (flush_tails(ev, clock_boot_ns(), &ignored) < 0 || (ev->dropped_events > 0 && truncated(ev, &ignored) < 0))
		log_warn("timeline end incomplete error=%s", ignored.text);
	return append(ev, EVENT_HOST, EV_MICROVM_DESTROYED, destroyed, clock_boot_ns(), e);
}
