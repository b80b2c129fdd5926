/* link: ephloop_curl EPH::test_tls */
/* sources: tests/unit/upstream.c */
/*
 * Connections that are used again: fewer handshakes, and no body that is sent twice, whatever moment the server chooses to close.
 * And TLS: whom we talk to at all. A server that cannot prove its name hears no byte of a request.
 */
#include "unit.h"

#include "curlev.h"
#include "loop.h"
#include "upstream.h"

#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <signal.h>

struct rig {
	struct event_base *base;
	struct curlev *curl;
	struct upstream *up;
	char url[100];
	const char *ca_file;
	enum { ANSWER, HANG_UP, HANG_UP_SECOND } what;
	int seen[64]; /* whole bodies by their first byte */
	bool done;
	int status;
	enum err_code code;
	char said[ERR_TEXT_MAX];
	char *body;
	size_t body_len;
};

static bool decide(void *arg, const struct asked *q, struct answer *out)
{
	struct rig *r = arg;

	if (q->body_len > 0)
		r->seen[(unsigned char)q->body[0] % 64]++;
	if (r->what == HANG_UP || (r->what == HANG_UP_SECOND && q->on_connection > 1))
		return false;
	*out = (struct answer){ .bytes = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", .after = AFTER_KEEP };
	return true;
}

static bool allow(void *arg, const struct sockaddr *sa, socklen_t len)
{
	(void)arg;
	(void)sa;
	(void)len;
	return true;
}

static bool on_data(void *arg, const uint8_t *p, size_t n)
{
	(void)arg;
	(void)p;
	(void)n;
	return true;
}

static void on_done(void *arg, int status, const struct err *e)
{
	struct rig *r = arg;

	r->done = true;
	r->status = status;
	r->code = e ? e->code : ERR_NONE;
	snprintf(r->said, sizeof(r->said), "%s", e ? e->text : "");
}

static bool is_done(void *arg)
{
	return ((struct rig *)arg)->done;
}

static void open_rig(struct rig *r, SSL_CTX *tls, bool at_head, const char *host, size_t body_len)
{
	struct upstream_options up = { .tls = tls, .at_head = at_head, .decide = decide, .arg = r };
	struct err e;

	memset(r, 0, sizeof(*r));
	up.base = r->base = event_base_new();
	r->up = upstream_new(&up);
	assert_ok(curlev_new(r->base, 4, &r->curl, &e));
	snprintf(r->url, sizeof(r->url), "%s://%s:%d/", tls ? "https" : "http", host, upstream_port(r->up));
	r->body = calloc(1, body_len + 1);
	memset(r->body, 'b', body_len);
	r->body_len = body_len;
}

static void close_rig(struct rig *r)
{
	curlev_free(r->curl);
	upstream_free(r->up);
	event_base_free(r->base);
	free(r->body);
}

/* number: what tells this body from others. */
static void start(struct rig *r, const char *method, int number)
{
	struct curl_request req = { .method = method,
		.url = r->url,
		.body = r->body,
		.body_len = r->body_len,
		.connect_timeout_ms = 3000,
		.timeout_ms = 10000,
		.max_body = 100000,
		.ca_file = r->ca_file,
		.allow_addr = allow,
		.on_data = on_data,
		.on_done = on_done,
		.arg = r };
	struct curl_call *call;
	struct err e;

	if (r->body_len > 0)
		r->body[0] = (char)number;
	r->done = false;
	assert_ok(curlev_start(r->curl, &req, &call, &e));
}

static void call(struct rig *r, const char *method, int number)
{
	start(r, method, number);
	assert_true(loop_until(r->base, is_done, r, 15000));
}

/* Lets the loop see what has happened on its sockets. */
static void look_around(struct rig *r)
{
	for (int i = 0; i < 5; i++)
		event_base_loop(r->base, EVLOOP_NONBLOCK);
}

/* --- kept connections ------------------------------------------------------------------------------------------------------------
 */

static void test_one_connection_for_many(void **state)
{
	struct rig r;

	(void)state;
	open_rig(&r, NULL, false, "127.0.0.1", 100000);
	for (int i = 1; i <= 10; i++) {
		call(&r, "POST", i);
		assert_int_equal(r.status, 200);
		assert_int_equal(r.seen[i], 1);
	}
	assert_int_equal(upstream_counts(r.up)->connections, 1);
	close_rig(&r);
}

/* What has no body cannot be held back by it: a connection of its own each time. */
static void test_no_body_no_reuse(void **state)
{
	static const char *const methods[] = { "POST", "DELETE", "PUT", "PATCH", "FOO" };
	struct rig r;

	(void)state;
	open_rig(&r, NULL, false, "127.0.0.1", 0);
	for (size_t i = 0; i < COUNT(methods); i++) {
		call(&r, methods[i], 0);
		assert_int_equal(r.status, 200);
	}
	assert_int_equal(upstream_counts(r.up)->connections, COUNT(methods));
	close_rig(&r);
}

/* Closed while nobody used it: the next call makes a new one. */
static void test_closed_while_idle(void **state)
{
	struct rig r;

	(void)state;
	for (int reset = 0; reset < 2; reset++) {
		open_rig(&r, NULL, false, "127.0.0.1", 5000);
		for (int i = 1; i <= 5; i++) {
			call(&r, "POST", i);
			assert_int_equal(r.status, 200);
			assert_int_equal(r.seen[i], 1);
			upstream_close_idle(r.up, reset);
			look_around(&r);
		}
		assert_int_equal(upstream_counts(r.up)->connections, 5);
		close_rig(&r);
	}
}

/* The server has the whole second request and closes without a word: it is not told again. */
static void test_closed_after_the_body(void **state)
{
	static const size_t sizes[] = { 1, 100, 5000, 1000000 };
	struct rig r;

	(void)state;
	for (size_t i = 0; i < COUNT(sizes); i++) {
		open_rig(&r, NULL, false, "127.0.0.1", sizes[i]);
		r.what = HANG_UP_SECOND;
		call(&r, "POST", 1);
		assert_int_equal(r.status, 200);
		call(&r, "POST", 2);
		assert_int_equal(r.status, 0);
		assert_int_equal(r.code, ERR_UNAVAILABLE);
		assert_int_equal(r.seen[2], 1);
		assert_int_equal(upstream_counts(r.up)->requests, 2);
		call(&r, "POST", 3); /* and the next one is as good as ever */
		assert_int_equal(r.status, 200);
		close_rig(&r);
	}
}

/* It closes when the head of the second request is there and its body is on the way: the rest is not sent to anybody. */
static void test_closed_in_the_body(void **state)
{
	struct rig r;

	(void)state;
	for (int i = 0; i < 10; i++) {
		open_rig(&r, NULL, true, "127.0.0.1", 8000000);
		r.what = HANG_UP_SECOND;
		r.body_len = 0;
		call(&r, "GET", 1);
		assert_int_equal(r.status, 200);
		r.body_len = 8000000;
		call(&r, "POST", 2);
		assert_int_equal(r.status, 0);
		assert_int_equal(r.code, ERR_UNAVAILABLE);
		assert_int_equal(upstream_counts(r.up)->requests, 2); /* no second head either: curl had taken of the body */
		close_rig(&r);
	}
}

/* The worst moment, as often as we like: the close races with the request, before, in and after its head and body. */
static void test_closed_at_any_moment(void **state)
{
	int failed = 0, fresh = 0, answered = 0;

	(void)state;
	for (int turn = 0; turn < 60; turn++) {
		struct rig r;
		int before;

		open_rig(&r, NULL, false, "127.0.0.1", turn % 3 == 0 ? 10 : turn % 3 == 1 ? 3000 : 3000000);
		call(&r, "POST", 1);
		assert_int_equal(r.status, 200);
		start(&r, "POST", 2);
		before = turn / 6;
		for (int i = 0; i < before && !r.done; i++)
			event_base_loop(r.base, EVLOOP_ONCE);
		upstream_close_idle(r.up, turn % 2);
		assert_true(loop_until(r.base, is_done, &r, 15000));
		if (r.seen[2] > 1)
			fail_msg("turn %d: a body came twice", turn);
		assert_true(r.status == 0 || r.seen[2] == 1);
		failed += r.status == 0;
		fresh += r.status == 200 && upstream_counts(r.up)->connections == 2;
		answered += r.status == 200 && upstream_counts(r.up)->connections == 1;
		close_rig(&r);
	}
	printf("of 60 closes %d ended the call, %d led to a new connection, %d came too late\n", failed, fresh, answered);
	assert_true(fresh > 0 && failed > 0);
}

/* --- TLS -------------------------------------------------------------------------------------------------------------------------
 */

static EVP_PKEY *new_key(void)
{
	return EVP_EC_gen("P-256");
}

/* issuer NULL: signed by itself. days < 0: over already. */
static X509 *new_cert(EVP_PKEY *key, const char *name, const char *alt, int days, X509 *issuer, EVP_PKEY *issuer_key)
{
	X509 *x = X509_new();
	X509_NAME *n = X509_get_subject_name(x);
	X509V3_CTX ctx;
	X509_EXTENSION *ext;

	X509_set_version(x, 2);
	ASN1_INTEGER_set(X509_get_serialNumber(x), (long)(clock_mono_ns() & 0xffffff) + 1);
	X509_gmtime_adj(X509_getm_notBefore(x), -86400L * 30);
	X509_gmtime_adj(X509_getm_notAfter(x), 86400L * days);
	X509_NAME_add_entry_by_txt(n, "CN", MBSTRING_ASC, (const unsigned char *)name, -1, -1, 0);
	X509_set_issuer_name(x, issuer ? X509_get_subject_name(issuer) : n);
	X509_set_pubkey(x, key);
	X509V3_set_ctx(&ctx, issuer ? issuer : x, x, NULL, NULL, 0);
	ext = X509V3_EXT_conf_nid(NULL, &ctx, alt ? NID_subject_alt_name : NID_basic_constraints, alt ? alt : "critical,CA:TRUE");
	X509_add_ext(x, ext, -1);
	X509_EXTENSION_free(ext);
	assert_true(X509_sign(x, issuer_key ? issuer_key : key, EVP_sha256()) > 0);
	return x;
}

static SSL_CTX *server(X509 *cert, EVP_PKEY *key)
{
	SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());

	assert_int_equal(SSL_CTX_use_certificate(ctx, cert), 1);
	assert_int_equal(SSL_CTX_use_PrivateKey(ctx, key), 1);
	return ctx;
}

static void test_tls(void **state)
{
	char ca_path[] = "/tmp/eph-ca-XXXXXX";
	int fd = mkstemp(ca_path);
	FILE *f = fdopen(fd, "w");
	EVP_PKEY *ca_key = new_key(), *key = new_key(), *other_key = new_key();
	X509 *ca = new_cert(ca_key, "test ca", NULL, 30, NULL, NULL);
	const struct {
		const char *what;
		X509 *cert;
		bool trusted; /* our call knows the CA */
		bool good;
		const char *says;
	} rows[] = {
		{ "right", new_cert(key, "x", "IP:127.0.0.1", 30, ca, ca_key), true, true, "" },
		{ "wrong name", new_cert(key, "x", "DNS:other.example", 30, ca, ca_key), true, false, "subject name" },
		{ "name in the CN only", new_cert(key, "127.0.0.1", "DNS:other.example", 30, ca, ca_key), true, false,
				"subject name" },
		{ "expired", new_cert(key, "x", "IP:127.0.0.1", -1, ca, ca_key), true, false, "expired" },
		{ "self-signed", new_cert(key, "x", "IP:127.0.0.1", 30, NULL, NULL), true, false, "self-signed" },
		{ "another's signature", new_cert(key, "x", "IP:127.0.0.1", 30, ca, other_key), true, false, "" },
		{ "unknown CA", new_cert(key, "x", "IP:127.0.0.1", 30, ca, ca_key), false, false, "certificate" },
	};

	(void)state;
	PEM_write_X509(f, ca);
	fclose(f);
	for (size_t i = 0; i < COUNT(rows); i++) {
		SSL_CTX *ctx = server(rows[i].cert, key);
		struct rig r;

		open_rig(&r, ctx, false, "127.0.0.1", 1000);
		r.ca_file = rows[i].trusted ? ca_path : NULL;
		for (int k = 1; k <= 3; k++)
			call(&r, "POST", k);
		if (rows[i].good) {
			assert_int_equal(r.status, 200);
			assert_int_equal(upstream_counts(r.up)->connections, 1); /* one handshake for three calls */
		} else {
			if ((r.code != ERR_DENIED && rows[i].says[0]) || r.status != 0 || !strstr(r.said, rows[i].says))
				fail_msg("%s: %s: %s", rows[i].what, err_code_name(r.code), r.said);
			assert_int_equal(upstream_counts(r.up)->requests, 0);
			assert_true(upstream_counts(r.up)->read == 0);
		}
		close_rig(&r);
		SSL_CTX_free(ctx);
		X509_free(rows[i].cert);
	}
	X509_free(ca);
	EVP_PKEY_free(key);
	EVP_PKEY_free(ca_key);
	EVP_PKEY_free(other_key);
	unlink(ca_path);
}

/* Old protocol versions, no TLS at all, and TLS where plain HTTP was to be. */
static void test_tls_is_asked_for(void **state)
{
	EVP_PKEY *key = new_key();
	X509 *cert = new_cert(key, "x", "IP:127.0.0.1", 30, NULL, NULL);
	SSL_CTX *ctx = server(cert, key);
	struct rig r;

	(void)state;
	SSL_CTX_set_security_level(ctx, 0);
	SSL_CTX_set_min_proto_version(ctx, TLS1_VERSION);
	SSL_CTX_set_max_proto_version(ctx, TLS1_1_VERSION);
	open_rig(&r, ctx, false, "127.0.0.1", 1000);
	call(&r, "POST", 1);
	assert_int_equal(r.status, 0);
	assert_int_equal(upstream_counts(r.up)->requests, 0);
	close_rig(&r);
	open_rig(&r, NULL, false, "127.0.0.1", 1000);
	snprintf(r.url, sizeof(r.url), "https://127.0.0.1:%d/", upstream_port(r.up));
	r.what = HANG_UP;
	start(&r, "POST", 1);
	/* A plain server waits for the end of a head that is none: it is closed from its side. */
	for (int i = 0; i < 50 && upstream_counts(r.up)->connections == 0; i++)
		event_base_loop(r.base, EVLOOP_ONCE);
	look_around(&r);
	upstream_close_idle(r.up, false);
	assert_true(loop_until(r.base, is_done, &r, 15000));
	assert_int_equal(r.status, 0);
	assert_int_equal(r.seen[1], 0);
	close_rig(&r);
	SSL_CTX_free(ctx);
	X509_free(cert);
	EVP_PKEY_free(key);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_one_connection_for_many),
		cmocka_unit_test(test_no_body_no_reuse),
		cmocka_unit_test(test_closed_while_idle),
		cmocka_unit_test(test_closed_after_the_body),
		cmocka_unit_test(test_closed_in_the_body),
		cmocka_unit_test(test_closed_at_any_moment),
		cmocka_unit_test(test_tls),
		cmocka_unit_test(test_tls_is_asked_for),
	};

	(void)signal(SIGPIPE, SIG_IGN); /* the TLS server's */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
