/* link: noded_broker EPH::test_tls */
/* sources: tests/unit/model_rig.c tests/unit/upstream.c */
/*
 * A provider whose connection misbehaves: silent, slow, endless, cut, framed wrong. Each ends in time, with a message that says
 * what was wrong, with the charge that the head decides (no 2xx head: nothing), and in bounded memory.
 */
#include "model_rig.h"

#include "common/clock.h"
#include "loop.h"

#include <malloc.h>
#include <openssl/ssl.h>
#include <signal.h>

/* Freed memory is not kept back for long, so that resident memory means something. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "quarantine_size_mb=1:malloc_context_size=1";
}

static long resident_kib(void)
{
	FILE *f = fopen("/proc/self/status", "r");
	char line[256];
	long kib = 0;

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "VmRSS: %ld", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib;
}

enum charge { NOTHING, HOLD, USED };

static void charged(const struct model_rig *r, enum charge kind, int times)
{
	int64_t spent = meter_spent(&r->meter, 0) - r->price.run_fee, unmetered = r->meter.usage.unmetered_model_micros;

	assert_int_equal(r->report.cost_micros, spent);
	if (kind == NOTHING)
		assert_int_equal(spent, 0);
	else if (kind == USED)
		assert_int_equal(spent, GOOD_MICROS);
	else
		assert_true(spent == unmetered && spent > 15000 * times && spent <= r->hold * times);
	assert_int_equal(r->meter.usage.model_calls, kind == NOTHING ? 0 : 1);
}

/* --- no answer -----------------------------------------------------------------------------------------------------------------
 */

static void test_never_answers(void **state)
{
	struct answer silent = { .after = AFTER_HANG };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	r.a.model.call_timeout_ms = 400;
	rig_one(&r, &silent, 1);
	FAILED(&r, ERRCODE_MODEL_ERROR, 1, "did not answer", "400 ms");
	assert_true(r.report.duration_ms >= 390);
	charged(&r, NOTHING, 0);
	rig_close(&r);
}

static void test_nobody_listens(void **state)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	socklen_t len = sizeof(a);
	struct model_rig r;

	(void)state;
	/* Bound but not listening: refused, and nobody else can take the port meanwhile. */
	assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
	rig_init(&r);
	assert_true(text_fmt(r.a.model.base_url, sizeof(r.a.model.base_url), "http://127.0.0.1:%d/v1", ntohs(a.sin_port)));
	rig_one(&r, NULL, 0);
	FAILED(&r, ERRCODE_MODEL_ERROR, 0, "gave no answer after 4 attempts", "base URL");
	assert_true(r.report.duration_ms >= 1700); /* 250 + 500 + 1000 ms between them */
	charged(&r, NOTHING, 0);
	rig_close(&r);
	close(fd);
}

static void test_no_such_name(void **state)
{
	struct model_rig r;

	(void)state;
	rig_init(&r);
	/* A label of 64 letters: no resolver asks anybody for it. */
	assert_true(text_fmt(r.a.model.base_url, sizeof(r.a.model.base_url), "http://%064d.example/v1", 0));
	rig_one(&r, NULL, 0);
	FAILED(&r, ERRCODE_MODEL_ERROR, 0, "gave no answer", "resolve", "base URL");
	charged(&r, NOTHING, 0);
	rig_close(&r);
}

/* An address that only the operator may allow: not called, not asked again, the key does not leave. */
static void test_private_address(void **state)
{
	struct answer good = { .bytes = GOOD };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	r.a.model.any_address = false;
	rig_one(&r, &good, 1);
	FAILED(&r, ERRCODE_MODEL_ERROR, 0, "127.0.0.1", "may not be called", "after 1 attempt");
	assert_int_equal(upstream_counts(r.up)->connections, 0);
	rig_close(&r);
}

/* Whom nobody vouches for is not told the key. More kinds in test_curlev_reuse.c. */
static void test_untrusted_certificate(void **state)
{
	SSL_CTX *tls = upstream_self_signed();
	struct answer good = { .bytes = GOOD };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	rig_open(&r, &good, 1, tls, false);
	rig_call(&r, "hi");
	FAILED(&r, ERRCODE_MODEL_ERROR, 0, "certificate", "after 1 attempt", "base URL");
	assert_true(upstream_counts(r.up)->read == 0);
	charged(&r, NOTHING, 0);
	rig_close(&r);
	SSL_CTX_free(tls);
}

/* --- one connection ------------------------------------------------------------------------------------------------------------
 */

#define KEPT                                                                                                                       \
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"                                                                    \
	"c1\r\ndata: "                                                                                                             \
	"{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":"  \
	"20,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\n" DONE "\r\n0\r\n\r\n"

/* Calls go over one connection while the provider keeps it; when it closes it, at whatever moment, no call is worked twice. */
static void test_calls_share_a_connection(void **state)
{
	struct answer kept = { .bytes = KEPT, .after = AFTER_KEEP }, hang_up = { .n = 0, .after = AFTER_CLOSE };
	struct answer all[] = { kept, kept, kept, hang_up, kept, kept };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	rig_open(&r, all, 6, NULL, false);
	for (int i = 0; i < 3; i++) {
		rig_call(&r, "hi");
		assert_true(r.replied && r.report.attempts == 1 && r.report.cost_micros == GOOD_MICROS);
	}
	assert_int_equal(upstream_counts(r.up)->connections, 1);
	rig_call(&r, "hi"); /* the fourth request is read whole and not answered */
	assert_true(r.replied && r.report.attempts == 2 && r.report.cost_micros == GOOD_MICROS);
	assert_string_equal(r.request_id[3], RIG_RUN "-4-1");
	assert_string_equal(r.request_id[4], RIG_RUN "-4-2"); /* an attempt of its own, with a hold of its own */
	upstream_close_idle(r.up, true);
	rig_call(&r, "hi");
	assert_true(r.replied && r.report.attempts == 1);
	assert_int_equal(upstream_counts(r.up)->bodies, 6);
	rig_close(&r);
}

/* --- slow ----------------------------------------------------------------------------------------------------------------------
 */

static void test_trickles(void **state)
{
	static const struct {
		const char *bytes;
		enum charge charge;
	} rows[] = {
		{ "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", NOTHING }, /* the head is not through in time */
		{ GOOD, HOLD },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct answer a = { .bytes = rows[i].bytes, .trickle_ms = i == 0 ? 40 : 5 };
		struct model_rig r;

		rig_init(&r);
		r.a.model.call_timeout_ms = i == 0 ? 500 : 900;
		rig_one(&r, &a, 1);
		FAILED(&r, ERRCODE_MODEL_ERROR, 1, "did not answer", " ms");
		charged(&r, rows[i].charge, 1);
		rig_close(&r);
	}
}

/* A provider that is slow but done in time is none of our business. */
static void test_slow_is_not_wrong(void **state)
{
	struct answer a = { .bytes = GOOD, .trickle_ms = 1 };
	struct model_rig r;

	(void)state;
	rig_init(&r);
	r.a.model.call_timeout_ms = 25000;
	rig_one(&r, &a, 1);
	assert_true(r.replied);
	assert_string_equal(r.reply.content, "hello");
	charged(&r, USED, 1);
	rig_close(&r);
}

/* --- a gigabyte -------------------------------------------------------------------------------------------------------------- */

#define GIB ((size_t)1 << 30)

static void test_floods(void **state)
{
	static char word[65537];
	char event[66000];
	const struct {
		const char *what, *first, *flood, *says;
		enum charge charge;
		int times;
	} rows[] = {
		{ "events", REPLY_HEAD, event, "over", HOLD, 1 },
		{ "one line", REPLY_HEAD "data: ", word, "line", HOLD, 1 },
		{ "blank lines", REPLY_HEAD, "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n", "larger than 8388608", HOLD, 1 },
		{ "comments", REPLY_HEAD, ": still here\n\n: still here\n\n: still here\n\n", "larger than 8388608", HOLD, 1 },
		{ "one object", "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{\"choices\":\"", word, "8", HOLD, 1 },
		{ "said length", "HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n", word, "larger than 8388608", HOLD, 1 },
		{ "compressed", "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08", word, "line", HOLD, 1 },
		{ "header lines", "HTTP/1.1 200 OK\r\n", "X-Filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n", "head",
				HOLD, 1 },
		{ "header line", "HTTP/1.1 200 OK\r\nX-Filler: ", word, "head", HOLD, 1 },
		{ "provisional", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\n", "head", NOTHING, 1 },
		{ "status line", "HTTP/1.1 200 ", word, "head", NOTHING, 1 },
		{ "trailers", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
				"X-Filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n", "head", HOLD, 1 },
		{ "chunk extension", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=", word, "as it is sent", HOLD, 1 },
		{ "an error", "HTTP/1.1 403 No\r\n\r\n", word, "403", NOTHING, 1 },
	};

	(void)state;
	memset(word, 'a', sizeof(word) - 1);
	snprintf(event, sizeof(event), "data: {\"choices\":[{\"delta\":{\"content\":\"%.60000s\"}}]}\n\n", word);
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct answer a = { .bytes = rows[i].first, .flood = rows[i].flood, .flood_total = GIB };
		struct answer twice[] = { a, a, a, a };
		struct model_rig r;
		long before;

		rig_init(&r);
		r.a.model.call_timeout_ms = 20000;
		rig_open(&r, twice, 4, NULL, false);
		malloc_trim(0);
		before = resident_kib();
		rig_call(&r, "hi");
		if (r.replied || !strstr(r.text, rows[i].says))
			fail_msg("%s: %s", rows[i].what, r.replied ? "answered" : r.text);
		if (resident_kib() - before > 64 * 1024)
			fail_msg("%s: %ld KiB more than before", rows[i].what, resident_kib() - before);
		if (upstream_counts(r.up)->flooded > 64 * 1024 * 1024)
			fail_msg("%s: %zu bytes were taken", rows[i].what, (size_t)upstream_counts(r.up)->flooded);
		assert_true(r.report.duration_ms < 15000); /* by its bound, not by its time */
		charged(&r, rows[i].charge, upstream_counts(r.up)->requests);
		rig_close(&r);
	}
}

/* --- framing -------------------------------------------------------------------------------------------------------------------
 */

#define OK_HEAD "HTTP/1.1 200 OK\r\n"
#define CHUNKED OK_HEAD "Transfer-Encoding: chunked\r\n\r\n"

static void test_answers_in_other_shapes(void **state)
{
	static const char body[] = CHUNK("hel") CHUNK("lo") FINISH("stop") USAGE DONE;
	char chunked[2000], sized[2000], pieces[4000];
	size_t at;
	const char *rows[] = {
		chunked,
		sized,
		pieces,
		"HTTP/1.0 200 OK\r\n\r\n" CHUNK("hel") CHUNK("lo") FINISH("stop") USAGE DONE,
		"HTTP/1.1 100 Continue\r\n\r\n" GOOD,
		"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" GOOD,
		"HTTP/1.1 200\r\n\r\n" CHUNK("hello") FINISH("stop") USAGE DONE,
		"HTTP/1.1 201 Created\r\n\r\n" CHUNK("hello") FINISH("stop") USAGE DONE,
		"HTTP/1.1 200 OK\nContent-Type: x\n\n" CHUNK("hello") FINISH("stop") USAGE DONE, /* bare newlines */
		"HTTP/1.1 200 OK\r\nRetry-After: 5\r\n\r\n" CHUNK("hello") FINISH("stop") USAGE DONE,
		"HTTP/1.1 200 OK\r\n\r\n" CHUNK("hello") FINISH("stop") USAGE, /* no [DONE]: the end of the connection will do */
		"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n\xef\xbb\xbf" CHUNK("hello") FINISH("stop") USAGE DONE,
	};

	(void)state;
	snprintf(chunked, sizeof(chunked), CHUNKED "%zx\r\n%s\r\n0\r\n\r\n", sizeof(body) - 1, body);
	snprintf(sized, sizeof(sized), OK_HEAD "Content-Length: %zu\r\n\r\n%s", sizeof(body) - 1, body);
	at = (size_t)snprintf(pieces, sizeof(pieces), CHUNKED);
	for (size_t i = 0; i < sizeof(body) - 1; i++)
		at += (size_t)snprintf(pieces + at, sizeof(pieces) - at, "1;a=b\r\n%c\r\n", body[i]);
	snprintf(pieces + at, sizeof(pieces) - at, "0\r\nX-Trailer: y\r\n\r\n");
	for (size_t i = 0; i < COUNT(rows); i++)
		for (int keep = 0; keep < 2; keep++) {
			struct answer a = { .bytes = rows[i], .after = keep ? AFTER_HANG : AFTER_CLOSE };
			struct model_rig r;

			if (keep && !strstr(rows[i], "[DONE]"))
				continue; /* nobody could know that it is over */
			rig_init(&r);
			rig_one(&r, &a, 1);
			if (!r.replied)
				fail_msg("row %zu: %s", i, r.text);
			assert_string_equal(r.reply.content, "hello");
			charged(&r, USED, 1);
			assert_true(r.report.duration_ms < 5000);
			rig_close(&r);
		}
}

static void test_broken_framing(void **state)
{
	static const struct {
		const char *bytes;
		enum charge charge;
		int requests;
		const char *says;
	} rows[] = {
		{ CHUNKED "zz\r\nabc\r\n0\r\n\r\n", HOLD, 2, "hexadecimal" },
		{ CHUNKED "-5\r\nabcde\r\n", HOLD, 2, "hexadecimal" },
		{ CHUNKED "FFFFFFFFFFFFFFFFFF\r\nabc", HOLD, 2, "hexadecimal" },
		{ CHUNKED "5\r\nabcdefgh\r\n0\r\n\r\n", HOLD, 2, "Malformed" },
		{ CHUNKED "40\r\n" CHUNK("x"), HOLD, 2, "Malformed" },
		{ CHUNKED "\r\n\r\n", HOLD, 2, "hexadecimal" },
		{ CHUNKED, HOLD, 2, "is empty (transfer closed" },
		{ OK_HEAD "Content-Length: 5000\r\n\r\n" CHUNK("hal"), HOLD, 2,
				"cut off before its finish reason (transfer closed" },
		{ OK_HEAD "Content-Length: 0\r\n\r\n", HOLD, 2, "is empty" },
		{ OK_HEAD "Content-Length: 20\r\n\r\n" CHUNK("hello") FINISH("stop") USAGE DONE, HOLD, 2, "no chat completion" },
		{ "HTTP/1.1 204 No Content\r\n\r\n", HOLD, 2, "is empty" },
		{ "HTTP/1.1 200 OK\r\n\r\n", HOLD, 2, "is empty" },
		{ "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08nonsense", HOLD, 2, "no chat completion" },
		{ OK_HEAD "\r\n<!DOCTYPE html><html><body>Welcome</body></html>", HOLD, 2, "no chat completion" },
		{ "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n\x81\x05hello", NOTHING, 4, "another protocol" },
		{ "HTTP/1.1 20", NOTHING, 4, "Empty reply" },
		{ "ICY 200 OK\r\n\r\n", NOTHING, 1, "HTTP/0.9" }, /* it will not learn HTTP */
		{ "SSH-2.0-OpenSSH_9.2\r\n", NOTHING, 1, "HTTP/0.9" },
		{ "data: {\"choices\":[]}\n\n", NOTHING, 1, "HTTP/0.9" },
		{ "HTTP/9.9 200 OK\r\n\r\n", NOTHING, 1, "HTTP version (9.9)" },
		{ "HTTP/1.1 999999 OK\r\n\r\n", NOTHING, 1, "response code" },
		{ "\x15\x03\x03\x00\x02\x02\x46\r\n", NOTHING, 1, "HTTP/0.9" },
		{ "", NOTHING, 4, "Empty reply" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct answer a = { .bytes = rows[i].bytes }, all[] = { a, a, a, a, a };
		struct model_rig r;

		rig_init(&r);
		rig_one(&r, all, COUNT(all));
		FAILED(&r, ERRCODE_MODEL_ERROR, rows[i].requests, rows[i].says, "The operator can check the provider's base URL");
		charged(&r, rows[i].charge, rows[i].requests);
		rig_close(&r);
	}
}

/* Cut at every interesting place; then whole at the second attempt: each cut 2xx head costs a hold, the rest nothing more. */
static void test_cuts(void **state)
{
	static const char whole[] = REPLY_HEAD CHUNK("hel")
			CALLS("{\"index\":0,\"id\":\"c1\",\"function\":{\"name\":\"shell\",\"arguments\":\"{\\\"command\\\":\"}}")
					CALLS("{\"index\":0,\"function\":{\"arguments\":\"\\\"ls\\\"}\"}}") FINISH("tool_calls")
							USAGE DONE;
	const size_t finish = (size_t)(strstr(whole, "tool_calls\"}]}") - whole) + strlen("tool_calls\"}]}");
	static const char *const places[] = { "OK", "\r\n\r\ndata", "hel\"", "c1", "command", "ls", "\"tool_calls\"}]}",
		"prompt_tokens", "[DONE" };

	(void)state;
	for (size_t i = 0; i < COUNT(places); i++)
		for (int reset = 0; reset < 2; reset++) {
			size_t cut = (size_t)(strstr(whole, places[i]) - whole) + 2;
			struct answer a[] = { { .bytes = whole, .n = cut, .after = reset ? AFTER_RESET : AFTER_CLOSE },
				{ .bytes = GOOD } };
			struct model_rig r;
			int64_t first;

			rig_init(&r);
			rig_one(&r, a, 2);
			if (!r.replied)
				fail_msg("cut in %s: %s", places[i], r.text);
			first = r.report.cost_micros - GOOD_MICROS;
			if (upstream_counts(r.up)->requests == 1) { /* the finish reason had come: it is an answer */
				assert_true(cut > finish);
				assert_string_equal(r.reply.calls[0].arguments, "{\"command\":\"ls\"}");
				assert_true(first == 0 || r.meter.usage.unmetered_model_micros == r.report.cost_micros);
			} else {
				assert_string_equal(r.reply.content, "hello");
				assert_true(first == 0 ? cut < strlen("HTTP/1.1 200 OK\r\n")
						       : r.meter.usage.unmetered_model_micros == first);
			}
			rig_close(&r);
		}
}

/* It answers before it has read what it was asked: the answer counts all the same. */
static void test_answers_early(void **state)
{
	const size_t big = 1024 * 1024;
	char *text = malloc(big + 1);
	static const struct answer good = { .bytes = GOOD }, no = { .bytes = ERROR("401 No", "", "early") },
				   cut = { .bytes = "HTTP/1.1 200 OK\r\n\r\n", .after = AFTER_RESET };
	const struct answer *rows[] = { &good, &no, &cut };

	(void)state;
	memset(text, 't', big);
	text[big] = '\0';
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct answer all[] = { *rows[i], *rows[i], *rows[i], *rows[i] };
		struct model_rig r;

		rig_init(&r);
		r.a.cap_micros = 100000000;
		rig_open(&r, all, 4, NULL, true);
		rig_call(&r, text);
		if (i == 0) {
			assert_true(r.replied);
			assert_int_equal(r.report.cost_micros, GOOD_MICROS);
		} else {
			FAILED(&r, ERRCODE_MODEL_ERROR, upstream_counts(r.up)->requests, "provider");
			assert_true(i == 2 || (strstr(r.text, "401") && r.report.cost_micros == 0));
		}
		rig_close(&r);
	}
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_never_answers),
		cmocka_unit_test(test_nobody_listens),
		cmocka_unit_test(test_no_such_name),
		cmocka_unit_test(test_private_address),
		cmocka_unit_test(test_untrusted_certificate),
		cmocka_unit_test(test_calls_share_a_connection),
		cmocka_unit_test(test_trickles),
		cmocka_unit_test(test_slow_is_not_wrong),
		cmocka_unit_test(test_floods),
		cmocka_unit_test(test_answers_in_other_shapes),
		cmocka_unit_test(test_broken_framing),
		cmocka_unit_test(test_cuts),
		cmocka_unit_test(test_answers_early),
	};

	rig_log_start();
	(void)signal(SIGPIPE, SIG_IGN); /* the TLS server's */
	return rig_log_end(cmocka_run_group_tests(tests, NULL, NULL));
}
