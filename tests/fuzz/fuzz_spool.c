/* link: ephproto ephproto_link EPH::sodium */
/* sources: noded/spool.c */
/* A spool file of any bytes behind a good head: it opens or is refused, what is read is chained, and writing goes on behind it. */
/* reads: noded/spool.c */
/* reached: 1 % of lines, 1 % of branches */
#include "noded/spool.h"

#include "common/text.h"
#include "fuzz.h"

#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
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
		return 0;
	if (fd < 0) {
		fd = memfd_create("spool", MFD_CLOEXEC);
		must(spool_format(fd, &head, &e) == 0);
	}
	/* First byte even: the bytes stand behind the head; odd: they are the head. */
	if (pwrite(fd, zeros, used < 600 ? 600 : used, 0) < 0 || spool_format(fd, &head, &e) < 0)
		return 0;
	used = sizeof(zeros);
	if (pwrite(fd, data + 1, size - 1, data[0] % 2 ? 0 : SPOOL_HEAD_BYTES) < 0)
		return 0;
	if (spool_open(dup(fd), true, &s, &e) < 0)
		return 0;
	spool_tail(s, &t);
	must(t.next_seq >= spool_head(s)->first_seq);
	for (uint64_t seq = spool_head(s)->first_seq; seq < t.next_seq; seq++)
		must(spool_read(s, seq, &rec, &e) == 1 && rec.len > 0);
	if (t.next_seq < INT64_MAX - 1 && spool_append(s, EVENT_HOST, EV_MODEL_CALL, 1, "{}", 2, 3, 4, NULL, &e) == 0)
		must(spool_read(s, t.next_seq, &rec, &e) == 1 && rec.spent == 3);
	spool_close(s);
	return 0;
}
