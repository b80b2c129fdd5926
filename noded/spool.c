/*
 * The spool's one implementation, shared by broker (writer), link (reader) and keeper (maker, and writer after a broker's death).
 * Owns the descriptor and one record's worth of memory. Used on the loop's thread of each; blocks on the disk only.
 */
#include "spool.h"

#include "common/text.h"
#include "common/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#define MAGIC "EPHSPOOL"
#define RECORDS_AT ((int64_t)SPOOL_HEAD_BYTES + 2 * SPOOL_SLOT_BYTES)
#define SLOT_CHECKED (SPOOL_SLOT_BYTES - 8)    /* its last 8 bytes are the check of these */
#define RECORD_CHECKED (SPOOL_RECORD_HEAD - 8) /* as above */
#define STRIDE 256                             /* one offset is remembered every STRIDE records */
#define STRIDES (EVENT_RUN_COUNT_MAX / STRIDE + 16)

struct spool {
	int fd;
	bool writable;
	struct spool_head head;
	struct spool_tail tail;
	int64_t end; /* offset of the next record */
	uint64_t slot_generation;
	int64_t compute_ms;       /* for the next slot */
	int64_t strides[STRIDES]; /* offset of record first_seq + i * STRIDE; 0 = not walked yet */
	uint64_t cursor_seq;      /* the record at cursor_at, for reading in order */
	int64_t cursor_at;
	struct buf scratch;
};

static int read_full(int fd, void *p, size_t n, int64_t at, struct err *e)
{
	uint8_t *out = p;

	while (n > 0) {
		ssize_t got = pread(fd, out, n, at);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return err_set_errno(e, "read the spool");
		if (got == 0) {
			memset(out, 0, n); /* past the end reads as "nothing written" */
			return 0;
		}
		out += got;
		at += got;
		n -= (size_t)got;
	}
	return 0;
}

static int write_full(int fd, const void *p, size_t n, int64_t at, struct err *e)
{
	ssize_t put;

	do {
		put = pwrite(fd, p, n, at);
	} while (put < 0 && errno == EINTR);
	if (put < 0)
		return err_set_errno(e, "write the spool");
	if ((size_t)put != n)
		return err_set(e, ERR_IO, "write the spool: only %zd of %zu bytes were taken", put, n);
	return 0;
}

/* --- head and meter slots ---------------------------------------------------------------------------------------------------- */

static void head_encode(const struct spool_head *h, struct buf *b)
{
	wire_put_raw(b, MAGIC, 8);
	wire_put_u32(b, SPOOL_VERSION);
	wire_put_str(b, h->run_id);
	wire_put_raw(b, h->token, sizeof(h->token));
	wire_put_u32(b, h->attempt);
	wire_put_i64(b, h->queued_at_ms);
	wire_put_i64(b, h->age_ms);
	wire_put_i64(b, h->received_boot_ns);
	wire_put_u64(b, h->first_seq);
	wire_put_raw(b, h->prev_hash, sizeof(h->prev_hash));
	wire_put_i64(b, h->cap_micros);
	wire_put_i64(b, h->run_fee);
	wire_put_i64(b, h->compute_price);
	wire_put_raw(b, h->request_hash, sizeof(h->request_hash));
}

static int head_decode(const uint8_t *p, size_t n, struct spool_head *h, struct err *e)
{
	struct wire_reader r;
	uint8_t magic[8];
	uint32_t version;

	wire_read_init(&r, p, n);
	wire_raw(&r, magic, sizeof(magic));
	version = wire_u32(&r);
	if (r.failed || memcmp(magic, MAGIC, sizeof(magic)) != 0)
		return err_set(e, ERR_INVALID, "this is no spool: it does not begin with %s", MAGIC);
	if (version != SPOOL_VERSION)
		return err_set(e, ERR_INVALID, "the spool's version is %u; this noded reads version %d", version, SPOOL_VERSION);
	wire_str_fixed(&r, h->run_id, sizeof(h->run_id));
	wire_raw(&r, h->token, sizeof(h->token));
	h->attempt = wire_u32(&r);
	h->queued_at_ms = wire_i64(&r);
	h->age_ms = wire_i64(&r);
	h->received_boot_ns = wire_i64(&r);
	h->first_seq = wire_u64(&r);
	wire_raw(&r, h->prev_hash, sizeof(h->prev_hash));
	h->cap_micros = wire_i64(&r);
	h->run_fee = wire_i64(&r);
	h->compute_price = wire_i64(&r);
	wire_raw(&r, h->request_hash, sizeof(h->request_hash));
	if (r.failed || h->first_seq == 0 || h->first_seq > INT64_MAX)
		return err_set(e, ERR_INVALID, "the spool's head is damaged");
	return 0;
}

static void slot_encode(uint64_t generation, int64_t spent, int64_t held, int64_t compute_ms, struct buf *b)
{
	uint8_t check[EVENT_HASH_LEN];
	static const uint8_t zero[EVENT_HASH_LEN];

	wire_put_u64(b, generation);
	wire_put_i64(b, spent);
	wire_put_i64(b, held);
	wire_put_i64(b, compute_ms);
	event_hash(zero, b->data, b->len, check);
	wire_put_raw(b, check, 8);
}

/* Takes over the newer of the two slots; a torn one fails its check and is passed over. */
static int slots_read(struct spool *s, struct err *e)
{
	uint8_t raw[2 * SPOOL_SLOT_BYTES], check[EVENT_HASH_LEN];
	static const uint8_t zero[EVENT_HASH_LEN];

	if (read_full(s->fd, raw, sizeof(raw), SPOOL_HEAD_BYTES, e) < 0)
		return -1;
	for (int i = 0; i < 2; i++) {
		const uint8_t *p = raw + (ptrdiff_t)i * SPOOL_SLOT_BYTES;
		struct wire_reader r;
		uint64_t generation;
		int64_t spent, held, compute_ms;

		wire_read_init(&r, p, SLOT_CHECKED);
		generation = wire_u64(&r);
		spent = wire_i64(&r);
		held = wire_i64(&r);
		compute_ms = wire_i64(&r);
		event_hash(zero, p, SLOT_CHECKED, check);
		if (generation <= s->slot_generation || memcmp(check, p + SLOT_CHECKED, 8) != 0)
			continue;
		s->slot_generation = generation;
		s->tail.spent = spent;
		s->tail.held = held;
		s->tail.compute_ms = s->compute_ms = compute_ms;
	}
	return 0;
}

int spool_format(int fd, const struct spool_head *head, struct err *e)
{
	struct buf b = BUF_INIT(SPOOL_HEAD_BYTES);
	uint8_t raw[SPOOL_HEAD_BYTES + 2 * SPOOL_SLOT_BYTES] = { 0 };
	int rc = posix_fallocate(fd, 0, SPOOL_BYTES);

	if (rc != 0) {
		errno = rc;
		return err_set_errno(e, "allocate %lld bytes for a run's spool", (long long)SPOOL_BYTES);
	}
	head_encode(head, &b);
	if (b.failed) {
		buf_free(&b);
		return err_set(e, ERR_INTERNAL, "the spool's head does not fit");
	}
	memcpy(raw, b.data, b.len);
	buf_free(&b);
	return write_full(fd, raw, sizeof(raw), 0, e);
}

/* --- walking ----------------------------------------------------------------------------------------------------------------- */

struct record_head {
	uint32_t len;
	uint16_t type;
	uint64_t seq;
	int64_t t_ms, spent, held;
	uint8_t hash[EVENT_HASH_LEN];
};

/* False when it is not as it was written: the chain is over the event's bytes only. */
static bool record_head_decode(const uint8_t *p, struct record_head *h)
{
	static const uint8_t zero[EVENT_HASH_LEN];
	uint8_t check[EVENT_HASH_LEN];
	struct wire_reader r;

	wire_read_init(&r, p, RECORD_CHECKED);
	h->len = wire_u32(&r);
	h->type = wire_u16(&r);
	h->seq = wire_u64(&r);
	h->t_ms = wire_i64(&r);
	h->spent = wire_i64(&r);
	h->held = wire_i64(&r);
	wire_raw(&r, h->hash, sizeof(h->hash));
	event_hash(zero, p, RECORD_CHECKED, check);
	return memcmp(check, p + RECORD_CHECKED, 8) == 0;
}

/* Reads the record at `at` into scratch: 1 whole, 0 nothing or damaged there, -1 the disk failed. */
static int record_at(struct spool *s, int64_t at, uint64_t seq, struct record_head *h, struct err *e)
{
	uint8_t raw[SPOOL_RECORD_HEAD];
	uint8_t *p;

	if (at + SPOOL_RECORD_HEAD > SPOOL_BYTES)
		return 0;
	if (read_full(s->fd, raw, sizeof(raw), at, e) < 0)
		return -1;
	if (!record_head_decode(raw, h) || h->len == 0 || h->len > EVENT_BYTES_MAX || h->seq != seq || h->type >= EV_COUNT ||
			at + SPOOL_RECORD_HEAD + (int64_t)h->len > SPOOL_BYTES)
		return 0;
	buf_reset(&s->scratch);
	p = buf_reserve(&s->scratch, h->len);
	if (p == NULL)
		return err_set(e, ERR_NOMEM, "no memory for a spool record of %u bytes", h->len);
	if (read_full(s->fd, p, h->len, at + SPOOL_RECORD_HEAD, e) < 0)
		return -1;
	buf_commit(&s->scratch, h->len);
	return 1;
}

static void tail_advance(struct spool *s, const struct record_head *h, int64_t at)
{
	uint64_t n = h->seq - s->head.first_seq;

	if (n % STRIDE == 0 && n / STRIDE < STRIDES)
		s->strides[n / STRIDE] = at;
	memcpy(s->tail.hash, h->hash, sizeof(s->tail.hash));
	s->tail.next_seq = h->seq + 1;
	s->tail.t_ms = h->t_ms;
	s->tail.bytes += h->len;
	s->tail.last_type = h->type;
	s->end = at + SPOOL_RECORD_HEAD + (int64_t)h->len;
}

int spool_refresh(struct spool *s, struct err *e)
{
	for (;;) {
		struct record_head h;
		uint8_t hash[EVENT_HASH_LEN];
		int rc = record_at(s, s->end, s->tail.next_seq, &h, e);

		if (rc < 0)
			return -1;
		if (rc == 0)
			break;
		event_hash(s->tail.hash, s->scratch.data, s->scratch.len, hash);
		if (memcmp(hash, h.hash, sizeof(hash)) != 0)
			break;
		tail_advance(s, &h, s->end);
	}
	return slots_read(s, e);
}

int spool_open(int fd, bool writable, struct spool **out, struct err *e)
{
	static const uint8_t zero[SPOOL_RECORD_HEAD];
	uint8_t raw[SPOOL_HEAD_BYTES];
	struct spool *s = calloc(1, sizeof(*s));

	*out = NULL;
	if (s == NULL) {
		close(fd);
		return err_set(e, ERR_NOMEM, "no memory for a spool");
	}
	s->fd = fd;
	s->writable = writable;
	buf_init(&s->scratch, EVENT_BYTES_MAX + 2 * SPOOL_RECORD_HEAD);
	if (read_full(fd, raw, sizeof(raw), 0, e) < 0 || head_decode(raw, sizeof(raw), &s->head, e) < 0)
		goto fail;
	s->tail.next_seq = s->head.first_seq;
	s->tail.last_type = EV_COUNT;
	memcpy(s->tail.hash, s->head.prev_hash, sizeof(s->tail.hash));
	s->end = RECORDS_AT;
	s->cursor_seq = s->head.first_seq;
	s->cursor_at = RECORDS_AT;
	if (spool_refresh(s, e) < 0)
		goto fail;
	if (writable && s->end + SPOOL_RECORD_HEAD <= SPOOL_BYTES && write_full(fd, zero, sizeof(zero), s->end, e) < 0)
		goto fail;
	*out = s;
	return 0;
fail:
	spool_close(s);
	return -1;
}

void spool_close(struct spool *s)
{
	if (s == NULL)
		return;
	close(s->fd);
	buf_free(&s->scratch);
	free(s);
}

int spool_descriptor(const struct spool *s)
{
	return s->fd;
}

const struct spool_head *spool_head(const struct spool *s)
{
	return &s->head;
}

void spool_tail(const struct spool *s, struct spool_tail *out)
{
	*out = s->tail;
}

/* --- writing ----------------------------------------------------------------------------------------------------------------- */

void spool_compute(struct spool *s, int64_t compute_ms)
{
	s->compute_ms = compute_ms;
}

int spool_meter(struct spool *s, int64_t spent, int64_t held, struct err *e)
{
	uint8_t memory[SPOOL_SLOT_BYTES];
	struct buf b = BUF_INIT(SPOOL_SLOT_BYTES);
	uint64_t generation = s->slot_generation + 1;
	int64_t at = SPOOL_HEAD_BYTES + (int64_t)(generation % 2) * SPOOL_SLOT_BYTES;

	if (spent == s->tail.spent && held == s->tail.held && s->compute_ms == s->tail.compute_ms && s->slot_generation > 0)
		return 0;
	slot_encode(generation, spent, held, s->compute_ms, &b);
	if (b.failed) {
		buf_free(&b);
		return err_set(e, ERR_NOMEM, "no memory for a spool slot");
	}
	memcpy(memory, b.data, sizeof(memory));
	buf_free(&b);
	if (write_full(s->fd, memory, sizeof(memory), at, e) < 0)
		return -1;
	s->slot_generation = generation;
	s->tail.spent = spent;
	s->tail.held = held;
	s->tail.compute_ms = s->compute_ms;
	return 0;
}

/* Into an empty buffer. */
static void record_head_encode(const struct record_head *h, struct buf *b)
{
	static const uint8_t zero[EVENT_HASH_LEN];
	uint8_t check[EVENT_HASH_LEN];

	wire_put_u32(b, h->len);
	wire_put_u16(b, h->type);
	wire_put_u64(b, h->seq);
	wire_put_i64(b, h->t_ms);
	wire_put_i64(b, h->spent);
	wire_put_i64(b, h->held);
	wire_put_raw(b, h->hash, sizeof(h->hash));
	event_hash(zero, b->data, b->len, check);
	wire_put_raw(b, check, 8);
}

int spool_append(struct spool *s, enum event_source source, enum event_type type, int64_t t_ms, const void *data, size_t data_len,
		int64_t spent, int64_t held, size_t *bytes_written, struct err *e)
{
	static const uint8_t zero[SPOOL_RECORD_HEAD];
	struct buf event = BUF_INIT(EVENT_BYTES_MAX);
	struct record_head h = { .type = (uint16_t)type, .seq = s->tail.next_seq, .spent = spent, .held = held };
	struct event_head eh = { .run_id = s->head.run_id,
		.seq = s->tail.next_seq,
		.queued_at_ms = s->head.queued_at_ms,
		.source = source,
		.type = type };
	int rc = -1;

	h.t_ms = eh.t_ms = t_ms > s->tail.t_ms ? t_ms : s->tail.t_ms;
	if (!event_make(&event, &eh, data, data_len)) {
		err_set(e, ERR_LIMIT, "a %s event with %zu bytes of data is over the %d bytes of one event", event_type_text(type),
				data_len, EVENT_BYTES_MAX);
		goto out;
	}
	h.len = (uint32_t)event.len;
	if (s->end + 2 * SPOOL_RECORD_HEAD + (int64_t)h.len > SPOOL_BYTES) {
		err_set(e, ERR_LIMIT, "the spool of %lld bytes is full", (long long)SPOOL_BYTES);
		goto out;
	}
	event_hash(s->tail.hash, event.data, event.len, h.hash);
	buf_reset(&s->scratch);
	record_head_encode(&h, &s->scratch);
	/* With the end behind it, so that what an earlier writer left there never goes on from this event. */
	if (!buf_add(&s->scratch, event.data, event.len) || !buf_add(&s->scratch, zero, sizeof(zero))) {
		err_set(e, ERR_NOMEM, "no memory for an event of %u bytes", h.len);
		goto out;
	}
	/* The meter first: a crash between the two leaves a meter that is newer than the last event, never an older one. */
	if (spool_meter(s, spent, held, e) < 0 || write_full(s->fd, s->scratch.data, s->scratch.len, s->end, e) < 0)
		goto out;
	tail_advance(s, &h, s->end);
	if (bytes_written != NULL)
		*bytes_written = h.len;
	rc = 0;
out:
	buf_free(&event);
	return rc;
}

/* --- reading ----------------------------------------------------------------------------------------------------------------- */

/* Puts the cursor on or before seq, as near as is known. */
static void cursor_seek(struct spool *s, uint64_t seq)
{
	uint64_t i = (seq - s->head.first_seq) / STRIDE;

	if (s->cursor_seq <= seq && seq - s->cursor_seq < STRIDE)
		return;
	while (i > 0 && (i >= STRIDES || s->strides[i] == 0))
		i--;
	s->cursor_seq = s->head.first_seq + i * STRIDE;
	s->cursor_at = i == 0 ? RECORDS_AT : s->strides[i];
}

int spool_read(struct spool *s, uint64_t seq, struct spool_record *out, struct err *e)
{
	struct record_head h;
	uint8_t raw[SPOOL_RECORD_HEAD];
	int rc;

	if (seq < s->head.first_seq)
		return 0;
	if (seq >= s->tail.next_seq && spool_refresh(s, e) < 0)
		return -1;
	if (seq >= s->tail.next_seq)
		return 0;
	cursor_seek(s, seq);
	while (s->cursor_seq < seq) { /* all of these were checked by the walk: only lengths are needed */
		if (read_full(s->fd, raw, sizeof(raw), s->cursor_at, e) < 0)
			return -1;
		if (!record_head_decode(raw, &h))
			return err_set(e, ERR_INTERNAL, "record %llu of the spool changed under its reader",
					(unsigned long long)s->cursor_seq);
		s->cursor_at += SPOOL_RECORD_HEAD + (int64_t)h.len;
		s->cursor_seq++;
	}
	rc = record_at(s, s->cursor_at, seq, &h, e);
	if (rc < 0)
		return -1;
	if (rc == 0)
		return err_set(e, ERR_INTERNAL, "record %llu of the spool changed under its reader", (unsigned long long)seq);
	*out = (struct spool_record){ .type = h.type,
		.seq = h.seq,
		.t_ms = h.t_ms,
		.spent = h.spent,
		.held = h.held,
		.bytes = s->scratch.data,
		.len = h.len };
	memcpy(out->hash, h.hash, sizeof(out->hash));
	s->cursor_at += SPOOL_RECORD_HEAD + (int64_t)h.len;
	s->cursor_seq++;
	return 1;
}
