/* link: ephproto ephproto_link EPH::sodium */
/* sources: noded/spool.c */
/* The spool: what is written is read back in order and chained; a torn or damaged tail is cut at every byte; the meter survives. */
#include "noded/spool.h"

#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static struct spool_head head_of(void)
{
	struct spool_head h = { .run_id = "run_0123456789abcdef0123456789abcdef",
		.attempt = 2,
		.queued_at_ms = 1700000000000,
		.age_ms = 1500,
		.received_boot_ns = 77,
		.first_seq = 3,
		.cap_micros = 40000,
		.run_fee = 12 };

	memset(h.token, 7, sizeof(h.token));
	memset(h.prev_hash, 9, sizeof(h.prev_hash));
	memset(h.request_hash, 5, sizeof(h.request_hash));
	return h;
}

static int new_file(void)
{
	struct spool_head h = head_of();
	int fd = memfd_create("spool", MFD_CLOEXEC);
	struct err e;

	assert_true(fd >= 0);
	assert_int_equal(spool_format(fd, &h, &e), 0);
	return fd;
}

static struct spool *open_copy(int fd, bool writable)
{
	struct spool *s;
	struct err e;

	assert_int_equal(spool_open(dup(fd), writable, &s, &e), 0);
	return s;
}

static void append(struct spool *s, int64_t t, int64_t spent, int64_t held, const char *data)
{
	struct err e;

	assert_int_equal(spool_append(s, EVENT_HOST, EV_MODEL_CALL, t, data, strlen(data), spent, held, NULL, &e), 0);
}

static void test_head(void **state)
{
	struct spool_head want = head_of();
	int fd = new_file();
	struct spool *s = open_copy(fd, false);
	struct spool_tail t;

	(void)state;
	assert_string_equal(spool_head(s)->run_id, want.run_id);
	assert_memory_equal(spool_head(s)->token, want.token, TOKEN_LEN);
	assert_int_equal(spool_head(s)->cap_micros, 40000);
	assert_int_equal(spool_head(s)->first_seq, 3);
	assert_memory_equal(spool_head(s)->request_hash, want.request_hash, SHA256_LEN);
	spool_tail(s, &t);
	assert_int_equal(t.next_seq, 3);
	assert_memory_equal(t.hash, want.prev_hash, EVENT_HASH_LEN);
	assert_int_equal(t.last_type, EV_COUNT);
	spool_close(s);
	close(fd);
}

static void test_write_and_read(void **state)
{
	int fd = new_file();
	struct spool *w = open_copy(fd, true), *r = open_copy(fd, false);
	struct spool_record rec;
	uint8_t hash[EVENT_HASH_LEN], next[EVENT_HASH_LEN];
	enum event_type type;
	int64_t t_ms;
	struct err e;

	(void)state;
	memset(hash, 9, sizeof(hash));
	for (int i = 0; i < 1000; i++)
		append(w, 2000 + i, i, 1000 - i, i % 2 ? "{\"call\":1}" : "{}");
	for (uint64_t seq = 3; seq < 1003; seq++) {
		assert_int_equal(spool_read(r, seq, &rec, &e), 1);
		assert_int_equal(rec.seq, seq);
		assert_int_equal(rec.spent, (int64_t)seq - 3);
		event_hash(hash, rec.bytes, rec.len, next);
		assert_memory_equal(rec.hash, next, sizeof(next));
		memcpy(hash, next, sizeof(hash));
		assert_int_equal(event_check(rec.bytes, rec.len, spool_head(r)->run_id, seq, &type, &t_ms, &e), 0);
		assert_int_equal(t_ms, 2000 + (int64_t)seq - 3);
	}
	assert_int_equal(spool_read(r, 1003, &rec, &e), 0);
	assert_int_equal(spool_read(r, 2, &rec, &e), 0);
	for (uint64_t seq = 1002; seq >= 40; seq -= 37) { /* backwards too */
		assert_int_equal(spool_read(r, seq, &rec, &e), 1);
		assert_int_equal(rec.seq, seq);
	}
	append(w, 1, 5, 5, "{}"); /* time never goes back */
	assert_int_equal(spool_read(r, 1003, &rec, &e), 1);
	assert_int_equal(rec.t_ms, 2999);
	spool_close(w);
	spool_close(r);
	close(fd);
}

static void test_meter_alone(void **state)
{
	int fd = new_file();
	struct spool *w = open_copy(fd, true), *r;
	struct spool_tail t;
	uint8_t junk[SPOOL_SLOT_BYTES];
	struct err e;

	(void)state;
	append(w, 10, 100, 0, "{}");
	assert_int_equal(spool_meter(w, 100, 900, &e), 0);
	r = open_copy(fd, false);
	spool_tail(r, &t);
	assert_int_equal(t.spent, 100);
	assert_int_equal(t.held, 900);
	spool_close(r);
	/* The newer slot is torn: the older one counts. */
	memset(junk, 0xee, sizeof(junk));
	assert_int_equal(pwrite(fd, junk, 20, SPOOL_HEAD_BYTES), 20);
	r = open_copy(fd, true);
	spool_tail(r, &t);
	assert_int_equal(t.spent, 100);
	assert_true(t.held == 0 || t.held == 900);
	spool_compute(r, 77);
	assert_int_equal(spool_meter(r, 7, 8, &e), 0);
	spool_close(r);
	r = open_copy(fd, true);
	spool_tail(r, &t);
	assert_int_equal(t.spent, 7);
	assert_int_equal(t.held, 8);
	assert_int_equal(t.compute_ms, 77);
	append(r, 20, 9, 0, "{}"); /* who goes on with it keeps it */
	spool_close(r);
	r = open_copy(fd, false);
	spool_tail(r, &t);
	assert_int_equal(t.spent, 9);
	assert_int_equal(t.compute_ms, 77);
	spool_close(r);
	spool_close(w);
	close(fd);
}

/* A crash in the middle of a write leaves any prefix of the record: each is cut, and writing goes on there. */
static void test_torn_tail(void **state)
{
	const off_t records = SPOOL_HEAD_BYTES + 2 * SPOOL_SLOT_BYTES;
	int fd = new_file();
	struct spool *w = open_copy(fd, true);
	uint8_t whole[4096], zero[4096] = { 0 };
	struct spool_record rec;
	struct spool_tail t;
	size_t first, both;
	struct err e;

	(void)state;
	append(w, 10, 1, 0, "{\"a\":1}");
	assert_int_equal(spool_read(w, 3, &rec, &e), 1);
	first = SPOOL_RECORD_HEAD + rec.len;
	append(w, 11, 2, 0, "{\"a\":2}");
	assert_int_equal(spool_read(w, 4, &rec, &e), 1);
	both = first + SPOOL_RECORD_HEAD + rec.len;
	spool_close(w);
	assert_true(both < sizeof(whole));
	assert_int_equal(pread(fd, whole, both, records), (ssize_t)both);
	for (size_t cut = first; cut < both; cut++) {
		assert_int_equal(pwrite(fd, whole, cut, records), (ssize_t)cut);
		assert_int_equal(pwrite(fd, zero, both - cut, records + (off_t)cut), (ssize_t)(both - cut));
		w = open_copy(fd, true);
		spool_tail(w, &t);
		assert_int_equal(t.next_seq, 4);
		append(w, 12, 3, 0, "{}");
		spool_tail(w, &t);
		assert_int_equal(t.next_seq, 5);
		spool_close(w);
		w = open_copy(fd, false);
		spool_tail(w, &t);
		assert_int_equal(t.next_seq, 5);
		assert_int_equal(t.t_ms, 12);
		spool_close(w);
	}
	close(fd);
}

/* A byte that changed anywhere in a record ends the chain before it. */
static void test_damage(void **state)
{
	const off_t records = SPOOL_HEAD_BYTES + 2 * SPOOL_SLOT_BYTES;
	int fd = new_file();
	struct spool *w = open_copy(fd, true);
	struct spool_record rec;
	struct spool_tail t;
	uint8_t byte, other;
	struct err e;

	(void)state;
	append(w, 10, 1, 0, "{\"a\":1}");
	assert_int_equal(spool_read(w, 3, &rec, &e), 1);
	spool_close(w);
	for (off_t at = 0; at < SPOOL_RECORD_HEAD + (off_t)rec.len; at++) {
		assert_int_equal(pread(fd, &byte, 1, records + at), 1);
		other = byte ^ 0x41;
		assert_int_equal(pwrite(fd, &other, 1, records + at), 1);
		w = open_copy(fd, false);
		spool_tail(w, &t);
		assert_int_equal(t.next_seq, 3);
		spool_close(w);
		assert_int_equal(pwrite(fd, &byte, 1, records + at), 1);
	}
	close(fd);
}

static void test_full(void **state)
{
	int fd = new_file();
	struct spool *w = open_copy(fd, true);
	char *big = malloc(90 * 1024);
	struct spool_tail t;
	struct err e;
	int n = 0;

	(void)state;
	memset(big, 'x', 90 * 1024);
	memcpy(big, "{\"a\":\"", 6);
	memcpy(big + 90 * 1024 - 2, "\"}", 2);
	while (spool_append(w, EVENT_HOST, EV_MODEL_CALL, n, big, 90 * 1024, n, 0, NULL, &e) == 0)
		n++;
	assert_int_equal(e.code, ERR_LIMIT);
	assert_true(n > 180);
	spool_tail(w, &t);
	assert_int_equal(t.next_seq, 3 + (uint64_t)n);
	assert_int_equal(t.spent, n - 1);
	assert_int_equal(lseek(fd, 0, SEEK_END), SPOOL_BYTES); /* never grows */
	free(big);
	spool_close(w);
	close(fd);
}

static void test_no_spool(void **state)
{
	int fd = memfd_create("junk", MFD_CLOEXEC);
	struct spool *s;
	struct err e;

	(void)state;
	assert_int_equal(spool_open(dup(fd), false, &s, &e), -1); /* empty */
	assert_int_equal(e.code, ERR_INVALID);
	assert_int_equal(write(fd, "EPHSPOOL\1\0\0\0", 12), 12); /* an earlier version, of whose slots nothing is known */
	assert_int_equal(spool_open(dup(fd), false, &s, &e), -1);
	assert_non_null(strstr(e.text, "version"));
	close(fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_head),
		cmocka_unit_test(test_write_and_read),
		cmocka_unit_test(test_meter_alone),
		cmocka_unit_test(test_torn_tail),
		cmocka_unit_test(test_damage),
		cmocka_unit_test(test_full),
		cmocka_unit_test(test_no_spool),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
