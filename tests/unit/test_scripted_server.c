/* The scripted provider over real sockets: bearer, streams, errors, delays, cuts, clients that leave, the end. */
/* link: controld_scripted controld_base ephloop_http EPH::sodium EPH::crypto */
#include "unit.h"

#include "common/log.h"
#include "common/text.h"
#include "controld/files.h"
#include "controld/scripted/scripted.h"
#include "loop.h"

#include <sys/stat.h>

#define TOKEN "scripted-token-0123456789"
#define WAIT_MS 10000

static struct {
	struct event_base *base;
	struct scripted *s;
	char dir[64], token[128];
	uint16_t port;
} t;

static struct raw_client client;

static int set_up(void **state)
{
	struct scripted_options opt;
	struct err e;
	int64_t port;

	(void)state;
	log_init("test", LOG_LEVEL_ERROR, false);
	t.base = event_base_new();
	assert_true(text_copy(t.dir, sizeof(t.dir), "/tmp/eph-test-scripted-XXXXXX"));
	assert_non_null(mkdtemp(t.dir));
	assert_true(text_fmt(t.token, sizeof(t.token), "%s/token", t.dir));
	assert_ok(file_write(t.token, TOKEN "\n", sizeof(TOKEN), 0600, false, &e));
	opt = (struct scripted_options){ .base = t.base, .listen = "127.0.0.1:0", .token_file = t.token };
	assert_ok(scripted_start(&opt, &t.s, &e));
	assert_ok(text_i64(strrchr(scripted_address(t.s), ':') + 1, 1, 65535, &port, &e));
	t.port = (uint16_t)port;
	return 0;
}

static int tear_down(void **state)
{
	char command[128];

	(void)state;
	scripted_free(t.s);
	event_base_loop(t.base, EVLOOP_NONBLOCK);
	event_base_free(t.base);
	return text_fmt(command, sizeof(command), "rm -rf %s", t.dir) ? system(command) : -1;
}

static const char *request(const char *method, const char *path, const char *token, const char *id, const char *body)
{
	static char out[65536];

	assert_true(text_fmt(out, sizeof(out),
			"%s %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nX-Request-Id: %s\r\nContent-Type: "
			"application/json\r\n"
			"Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
			method, path, token, id, strlen(body), body));
	return out;
}

static const char *chat(bool stream, const char *turns)
{
	static char out[16384], quoted[8192];
	size_t n = 0;

	for (const char *p = turns; *p; p++) {
		if (*p == '"' || *p == '\\')
			quoted[n++] = '\\';
		quoted[n++] = *p;
	}
	quoted[n] = '\0';
	assert_true(text_fmt(out, sizeof(out),
			"{\"model\":\"auto\",\"stream\":%s,\"stream_options\":{\"include_usage\":true},"
			"\"messages\":[{\"role\":\"user\",\"content\":\"```turns\\n%s\\n```\"}]}",
			stream ? "true" : "false", quoted));
	return out;
}

/* Sends, and waits until the server closed. */
static const char *talk(const char *bytes)
{
	raw_open(&client, t.port);
	assert_true(raw_talk(t.base, &client, bytes, strlen(bytes), NULL, WAIT_MS));
	close(client.fd);
	return client.got;
}

static const char *complete(bool stream, const char *id, const char *turns)
{
	return talk(request("POST", "/v1/chat/completions", TOKEN, id, chat(stream, turns)));
}

static void test_token(void **state)
{
	struct err e;

	(void)state;
	assert_non_null(strstr(talk(request("GET", "/v1/models", "wrong-token-0123456789", "x", "")), " 401 "));
	assert_non_null(strstr(client.got, "WWW-Authenticate: Bearer"));
	assert_non_null(strstr(talk("GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"), " 401 "));
	assert_non_null(strstr(talk(request("GET", "/v1/models", TOKEN, "x", "")), "\"id\":\"auto\""));
	assert_non_null(strstr(client.got, "X-Scripted: "));
	assert_non_null(strstr(talk(request("GET", "/v1/other", TOKEN, "x", "")), " 404 "));
	assert_ok(scripted_check_token(t.token, &e));
	assert_int_equal(chmod(t.token, 0644), 0);
	assert_int_equal(scripted_check_token(t.token, &e), -1);
	assert_int_equal(chmod(t.token, 0600), 0);
	assert_ok(file_write(t.token, "short\n", 6, 0600, true, &e));
	assert_int_equal(scripted_check_token(t.token, &e), -1);
}

static void test_answers(void **state)
{
	(void)state;
	complete(true, "run-1-1", "[{\"text\":\"hello\"}]");
	assert_non_null(strstr(client.got, " 200 "));
	assert_non_null(strstr(client.got, "text/event-stream"));
	assert_non_null(strstr(client.got, "\"content\":\"hello\""));
	assert_non_null(strstr(client.got, "\"usage\":{"));
	assert_non_null(strstr(client.got, "data: [DONE]\n\n"));
	complete(false, "run-1-1", "[{\"text\":\"hello\"}]");
	assert_non_null(strstr(client.got, "application/json"));
	assert_non_null(strstr(client.got, "\"object\":\"chat.completion\""));
	complete(true, "run-1-1", "[{\"raw\":\"data: nonsense\"}]");
	assert_non_null(strstr(client.got, "data: nonsense"));
	complete(true, "run-1-1", "[{\"txet\":1}]");
	assert_non_null(strstr(client.got, " 400 "));
	assert_non_null(strstr(client.got, "turns[0]: txet"));
	assert_non_null(strstr(
			talk(request("POST", "/v1/chat/completions", TOKEN, "x", "{\"model\":\"gpt\",\"messages\":[]}")), " 404 "));
	assert_non_null(strstr(talk(request("POST", "/v1/chat/completions", TOKEN, "x", "{")), " 400 "));
}

static void test_errors_by_attempt(void **state)
{
	static const char turns[] = "[{\"http\":{\"status\":429,\"headers\":{\"Retry-After\":\"7\",\"Content-Type\":\"text/"
				    "x\"},\"body\":\"slow down\",\"attempts\":[1]},\"text\":\"fine\"}]";

	(void)state;
	complete(true, "run_1-1-1", turns);
	assert_non_null(strstr(client.got, " 429 "));
	assert_non_null(strstr(client.got, "Retry-After: 7"));
	assert_non_null(strstr(client.got, "text/x"));
	assert_non_null(strstr(client.got, "slow down"));
	complete(true, "run_1-1-2", turns);
	assert_non_null(strstr(client.got, " 200 "));
	assert_non_null(strstr(client.got, "fine"));
}

static void test_delays_and_cuts(void **state)
{
	int64_t begin = clock_mono_ns();

	(void)state;
	complete(true, "x", "[{\"text\":\"hello\",\"delay_ms\":60,\"chunk_delay_ms\":30}]");
	assert_true((clock_mono_ns() - begin) / 1000000 >= 60 + 3 * 30);
	assert_non_null(strstr(client.got, "[DONE]"));
	complete(true, "x", "[{\"text\":\"hello\",\"cut_after_bytes\":30}]");
	assert_non_null(strstr(client.got, " 200 "));
	assert_non_null(strstr(client.got, "data: {\"id\":"));
	assert_null(strstr(client.got, "hello"));
	assert_null(strstr(client.got, "\r\n0\r\n")); /* a chunked body without its end */
	complete(false, "x", "[{\"text\":\"hello\",\"cut_after_bytes\":10}]");
	assert_non_null(strstr(client.got, "{\"id\":\"cha"));
	assert_null(strstr(client.got, "hello"));
}

/* A client that leaves in the middle, one that never reads, and the end with answers under way: nothing is left, nothing is touched
 * after its end (the sanitizers watch). */
static void test_leaving(void **state)
{
	struct raw_client other;
	const char *bytes = request("POST", "/v1/chat/completions", TOKEN, "x",
			chat(true, "[{\"text\":\"hello and more of it\",\"chunk_delay_ms\":50}]"));

	(void)state;
	raw_open(&client, t.port);
	assert_true(raw_talk(t.base, &client, bytes, strlen(bytes), "\"role\"", WAIT_MS));
	close(client.fd);
	raw_open(&other, t.port);
	assert_true(raw_talk(t.base, &other, bytes, strlen(bytes), "\"role\"", WAIT_MS));
	bytes = request("POST", "/v1/chat/completions", TOKEN, "x", chat(true, "[{\"text\":\"late\",\"delay_ms\":60000}]"));
	raw_open(&client, t.port);
	assert_false(raw_talk(t.base, &client, bytes, strlen(bytes), NULL, 60));
	scripted_free(t.s);
	t.s = NULL;
	assert_true(loop_until(t.base, raw_step, &other, WAIT_MS));
	assert_null(strstr(other.got, "[DONE]"));
	close(other.fd);
	close(client.fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_token, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_answers, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_errors_by_attempt, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_delays_and_cuts, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_leaving, set_up, tear_down),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
