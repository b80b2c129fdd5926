/* link: ephproto ephproto_link EPH::sodium */
/* sources: noded/spool.c */
/*
 * A spool file. First byte below 128: of any bytes behind a good head: it opens or is refused, what is read is chained, and writing
 * goes on behind it. From 128 on: operations of three bytes, of a writer, a reader beside it, and damage: what was written is read
 * as long as no byte of it was changed, and what is behind a damage is gone as if it had never been written.
 */
/* reads: noded/spool.c */
/* reached: 83 % of lines, 55 % of branches; the rest is disks that fail, memory, a full spool */
#include "noded/spool.h"

#include "common/text.h"
#include "fuzz.h"

#include <sys/mman.h>
#include <unistd.h>

static void foreign(const uint8_t *data, size_t size)
{
	static int fd = -1;
	const struct spool_head head = { .run_id = "run_0123456789abcdef0123456789abcdef", .first_seq = 3 };
	static size_t used;
	static uint8_t zeros[1 << 16];
	struct spool_record rec;
	struct spool_tail t;
	struct spool *s;
	struct err e;

	if (size > sizeof(zeros) - 512 || size < 1)
		return;
	if (fd < 0) {
		fd = memfd_create("spool", MFD_CLOEXEC);
		must(spool_format(fd, &head, &e) == 0);
	}
	/* First byte even: the bytes stand behind the head; odd: they are the head. */
	if (pwrite(fd, zeros, used < 600 ? 600 : used, 0) < 0 || spool_format(fd, &head, &e) < 0)
		return;
	used = sizeof(zeros);
	if (pwrite(fd, data + 1, size - 1, data[0] % 2 ? 0 : SPOOL_HEAD_BYTES) < 0)
		return;
	if (spool_open(dup(fd), true, &s, &e) < 0)
		return;
	spool_tail(s, &t);
	must(t.next_seq >= spool_head(s)->first_seq);
	for (uint64_t seq = spool_head(s)->first_seq; seq < t.next_seq; seq++)
		must(spool_read(s, seq, &rec, &e) == 1 && rec.len > 0);
	if (t.next_seq < INT64_MAX - 1 && spool_append(s, EVENT_HOST, EV_MODEL_CALL, 1, "{}", 2, 3, 4, NULL, &e) == 0)
		must(spool_read(s, t.next_seq, &rec, &e) == 1 && rec.spent == 3);
	spool_close(s);
}

/* --- a writer, a reader, and damage
 * ---------------------------------------------------------------------------------------------------- */

#define MOST 200

struct writing {
	struct spool *s;
	int fd;
	uint8_t type[MOST]; /* what was written */
	size_t count;
	int64_t spent;
	bool damaged; /* the meter may be an older one */
};

static void reopen(struct writing *w)
{
	struct spool_tail t;
	struct err e;

	spool_close(w->s);
	must(spool_open(dup(w->fd), true, &w->s, &e) == 0);
	spool_tail(w->s, &t);
	must(t.next_seq <= 3 + w->count && (w->damaged || (t.next_seq == 3 + w->count && t.spent == w->spent)));
	w->count = t.next_seq - 3;
	w->spent = t.spent;
	w->damaged = false;
}

static void check_reader(const struct writing *w, uint64_t seq)
{
	struct spool_record rec;
	struct spool_tail t;
	struct spool *r;
	struct err e;

	must(spool_open(dup(w->fd), false, &r, &e) == 0 && spool_refresh(r, &e) == 0);
	spool_tail(r, &t);
	must(t.next_seq == 3 + w->count);
	must(spool_read(r, seq, &rec, &e) == (seq >= 3 && seq < t.next_seq));
	for (size_t i = 0; i < w->count; i++)
		must(spool_read(r, 3 + i, &rec, &e) == 1 && rec.type == w->type[i] && rec.seq == 3 + i);
	spool_close(r);
}

static void operate(struct writing *w, uint8_t what, uint8_t a, uint8_t b)
{
	static const enum event_type types[] = { EV_MODEL_CALL, EV_DENIED, EV_MICROVM_READY, EV_MICROVM_DESTROYED };
	struct err e;
	uint8_t byte;
	char data[80];

	switch (what % 6) {
	case 0:
	case 1:
		if (w->count == MOST || w->damaged)
			break;
		must(text_fmt(data, sizeof(data), "{\"a\":\"%0*d\"}", 1 + a % 50, b));
		w->type[w->count] = (uint8_t)types[b % 4];
		w->spent += a;
		must(spool_append(w->s, EVENT_HOST, types[b % 4], a, data, strlen(data), w->spent, b, NULL, &e) == 0);
		w->count++;
		break;
	case 2:
		w->spent += b;
		must(w->damaged || spool_meter(w->s, w->spent, a, &e) == 0);
		break;
	case 3: reopen(w); break;
	case 4:
		if (!w->damaged)
			check_reader(w, a);
		break;
	default: /* one byte behind the head is another now */
		must(pread(w->fd, &byte, 1, SPOOL_HEAD_BYTES + (a | b << 8)) == 1);
		byte ^= (uint8_t)(what | 1);
		must(pwrite(w->fd, &byte, 1, SPOOL_HEAD_BYTES + (a | b << 8)) == 1);
		w->damaged = true;
		break;
	}
}

static void writing(const uint8_t *p, size_t n)
{
	const struct spool_head head = { .run_id = "run_0123456789abcdef0123456789abcdef", .first_seq = 3 };
	static const uint8_t zeros[1 << 17];
	static struct writing w = { .fd = -1 };
	struct err e;

	if (w.fd < 0)
		w.fd = memfd_create("spool", MFD_CLOEXEC);
	must(w.fd >= 0 && pwrite(w.fd, zeros, sizeof(zeros), 0) == sizeof(zeros) && spool_format(w.fd, &head, &e) == 0);
	must(spool_open(dup(w.fd), true, &w.s, &e) == 0);
	w.count = 0;
	w.spent = 0;
	w.damaged = false;
	for (size_t at = 0; at + 3 <= n; at += 3)
		operate(&w, p[at], p[at + 1], p[at + 2]);
	reopen(&w);
	check_reader(&w, 3);
	spool_close(w.s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size > 0 && data[0] >= 128)
		writing(data + 1, size - 1);
	else
		foreign(data, size);
	return 0;
}
