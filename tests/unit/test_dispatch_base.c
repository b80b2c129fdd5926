/* controld's configuration, keyring and certificates, on files in a directory of the test's own. */
/* link: controld_base ephproto_link ephproto EPH::sodium EPH::crypto */
#include "common/text.h"
#include "controld/config.h"
#include "controld/files.h"
#include "controld/pki.h"
#include "controld/secrets.h"
#include "proto/link.h"

#include "unit.h"

#include <fcntl.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[64];

static int set_up(void **state)
{
	(void)state;
	(void)!text_copy(dir, sizeof(dir), "/tmp/eph-test-base-XXXXXX");
	return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
	char command[128];

	(void)state;
	return text_fmt(command, sizeof(command), "rm -rf %s", dir) ? system(command) : -1;
}

static const char *at(const char *name)
{
	static char path[64][256];
	static unsigned n;
	char *p = path[n++ % 64];

	assert_true(text_fmt(p, 256, "%s/%s", dir, name));
	return p;
}

static mode_t mode_of(const char *path)
{
	struct stat st;

	assert_int_equal(stat(path, &st), 0);
	return st.st_mode & 07777;
}

/* --- keyring ----------------------------------------------------------------------------------------------------------------- */

static struct secrets *load(const char *path)
{
	struct secrets *s;
	struct err e;

	if (secrets_load(path, &s, &e) != 0)
		fail_msg("%s", e.text);
	return s;
}

static void test_keyring_file(void **state)
{
	const char *path = at("keyring");
	struct secrets *s;
	struct err e;
	bool made;

	(void)state;
	assert_int_equal(secrets_load(path, &s, &e), -1);
	assert_int_equal(e.code, ERR_NOT_FOUND);
	assert_int_equal(secrets_create(path, &made, &e), 0);
	assert_true(made);
	assert_int_equal(mode_of(path), 0400);
	assert_int_equal(secrets_create(path, &made, &e), 0);
	assert_false(made);
	s = load(path);
	assert_int_equal(secrets_seal_id(s), 1);
	secrets_free(s);
	assert_int_equal(chmod(path, 0440), 0);
	assert_int_equal(secrets_load(path, &s, &e), -1);
	assert_int_equal(e.code, ERR_DENIED);
	assert_non_null(strstr(e.text, "chmod 0400"));
}

static void test_keyring_format(void **state)
{
	static const char key[] = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
	static const char *const bad[][2] = {
		{ "", "line 1" },
		{ "ephemeral keyring 2\n", "line 1" },
		{ "ephemeral keyring 1\nseal 1 K\n", "no hash key" },
		{ "ephemeral keyring 1\nhash 1 K\n", "no seal key" },
		{ "ephemeral keyring 1\nhash 1 K\nhash 2 K\n", "line 3" },
		{ "ephemeral keyring 1\nhash 1 K\nseal 1 K\nseal 1 K\n", "twice" },
		{ "ephemeral keyring 1\nhash 0 K\n", "key id" },
		{ "ephemeral keyring 1\nhash 1 short\n", "32 bytes" },
		{ "ephemeral keyring 1\nkeys 1 K\n", "unknown kind" },
		{ "ephemeral keyring 1\nhash 1\n", "expected" },
	};
	struct secrets *s;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct buf b = BUF_INIT(4096);
		const char *path = at("bad");

		for (const char *p = bad[i][0]; *p; p++)
			*p == 'K' ? buf_add_str(&b, key) : buf_add_char(&b, *p);
		assert_int_equal(file_write(path, b.data, b.len, 0400, true, &e), 0);
		buf_free(&b);
		assert_int_equal(secrets_load(path, &s, &e), -1);
		assert_non_null(strstr(e.text, bad[i][1]));
	}
}

static void test_hashes(void **state)
{
	uint8_t a[32], b[32], c[32];
	struct secrets *s = load(at("keyring2")), *same = load(at("keyring2")), *other = load(at("keyring3"));

	(void)state;
	secrets_key_hash(s, "eph_x", a);
	secrets_key_hash(same, "eph_x", b);
	assert_true(secrets_equal(a, b, 32));
	secrets_key_hash(s, "eph_y", b);
	assert_false(secrets_equal(a, b, 32));
	secrets_key_hash(other, "eph_x", b);
	assert_false(secrets_equal(a, b, 32));
	secrets_body_hash(s, "eph_x", 5, c);
	assert_false(secrets_equal(a, c, 32));
	secrets_free(s);
	secrets_free(same);
	secrets_free(other);
}

static void test_equal_is_every_byte(void **state)
{
	uint8_t a[32] = { 0 }, b[32] = { 0 };

	(void)state;
	assert_true(secrets_equal(a, b, 32));
	for (size_t i = 0; i < 32; i++) {
		b[i] = 1;
		assert_false(secrets_equal(a, b, 32));
		b[i] = 0;
	}
}

static int make_keyrings(void **state)
{
	struct err e;
	bool made;

	return set_up(state) == 0 && secrets_create(at("keyring2"), &made, &e) == 0 &&
					       secrets_create(at("keyring3"), &made, &e) == 0
			       ? 0
			       : -1;
}

static void test_seal(void **state)
{
	struct secrets *s = load(at("keyring2")), *other = load(at("keyring3"));
	struct buf sealed = BUF_INIT(4096), plain = BUF_INIT(4096), again = BUF_INIT(4096);
	struct err e;

	(void)state;
	assert_int_equal(secrets_seal(s, "sk-secret", 9, "a|b", &sealed, &e), 0);
	assert_int_equal(sealed.len, 9 + SECRETS_SEAL_OVERHEAD);
	assert_null(memmem(sealed.data, sealed.len, "sk-secret", 9));
	assert_int_equal(secrets_seal(s, "sk-secret", 9, "a|b", &again, &e), 0);
	assert_memory_not_equal(sealed.data, again.data, sealed.len);
	assert_int_equal(secrets_open(s, sealed.data, sealed.len, "a|b", &plain, &e), 0);
	assert_int_equal(plain.len, 9);
	assert_memory_equal(plain.data, "sk-secret", 9);
	assert_int_equal(secrets_open(s, sealed.data, sealed.len, "a|c", &plain, &e), -1);
	assert_int_equal(e.code, ERR_DENIED);
	assert_int_equal(secrets_open(other, sealed.data, sealed.len, "a|b", &plain, &e), -1);
	for (size_t i = 0; i < sealed.len; i++) {
		sealed.data[i] ^= 1;
		assert_int_equal(secrets_open(s, sealed.data, sealed.len, "a|b", &plain, &e), -1);
		sealed.data[i] ^= 1;
		assert_int_equal(secrets_open(s, sealed.data, i, "a|b", &plain, &e), -1);
	}
	assert_int_equal(plain.len, 9); /* nothing was added by what failed */
	buf_reset(&sealed);
	buf_reset(&plain);
	assert_int_equal(secrets_seal_provider_key(s, "openai", "", &sealed, &e), 0);
	assert_int_equal(secrets_open_provider_key(s, "openai", sealed.data, sealed.len, &plain, &e), 0);
	assert_int_equal(plain.len, 0);
	assert_int_equal(secrets_open_provider_key(s, "other", sealed.data, sealed.len, &plain, &e), -1);
	secrets_wipe(&plain);
	buf_free(&sealed);
	buf_free(&again);
	secrets_free(s);
	secrets_free(other);
}

/* A key added later seals from then on; what older ones sealed still opens. */
static void test_rotation(void **state)
{
	struct buf text = BUF_INIT(4096), sealed = BUF_INIT(4096), plain = BUF_INIT(4096), fresh = BUF_INIT(4096);
	struct secrets *s = load(at("keyring2"));
	struct err e;

	(void)state;
	assert_int_equal(secrets_seal(s, "x", 1, "", &sealed, &e), 0);
	secrets_free(s);
	assert_int_equal(file_read(at("keyring2"), true, &text, &e), 0);
	buf_add_str(&text, "# added\nseal 7 AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n");
	assert_int_equal(file_write(at("rotated"), text.data, text.len, 0400, false, &e), 0);
	s = load(at("rotated"));
	assert_int_equal(secrets_seal_id(s), 7);
	assert_int_equal(secrets_open(s, sealed.data, sealed.len, "", &plain, &e), 0);
	assert_int_equal(secrets_seal(s, "x", 1, "", &fresh, &e), 0);
	secrets_free(s);
	s = load(at("keyring2"));
	assert_int_equal(secrets_open(s, fresh.data, fresh.len, "", &plain, &e), -1);
	assert_int_equal(e.code, ERR_NOT_FOUND);
	secrets_free(s);
	buf_free(&text);
	buf_free(&sealed);
	buf_free(&plain);
	buf_free(&fresh);
}

/* --- certificates ------------------------------------------------------------------------------------------------------------ */

static X509 *cert(const char *name)
{
	FILE *f = fopen(at(name), "r");
	X509 *x;

	assert_non_null(f);
	x = PEM_read_X509(f, NULL, NULL, NULL);
	fclose(f);
	assert_non_null(x);
	return x;
}

/* As `openssl verify -x509_strict -purpose sslserver -verify_hostname NAME -CAfile ca.pem server.pem` does. */
static void verify(const char *host)
{
	X509 *ca = cert("tls/ca.pem"), *server = cert("tls/server.pem");
	X509_STORE *store = X509_STORE_new();
	X509_STORE_CTX *ctx = X509_STORE_CTX_new();

	assert_int_equal(X509_STORE_add_cert(store, ca), 1);
	assert_int_equal(X509_STORE_CTX_init(ctx, store, server, NULL), 1);
	X509_STORE_CTX_set_flags(ctx, X509_V_FLAG_X509_STRICT);
	X509_STORE_CTX_set_purpose(ctx, X509_PURPOSE_SSL_SERVER);
	X509_VERIFY_PARAM_set1_host(X509_STORE_CTX_get0_param(ctx), host, 0);
	if (X509_verify_cert(ctx) != 1)
		fail_msg("%s", X509_verify_cert_error_string(X509_STORE_CTX_get_error(ctx)));
	X509_STORE_CTX_free(ctx);
	X509_STORE_free(store);
	X509_free(ca);
	X509_free(server);
}

static void test_pki(void **state)
{
	const char *tls = at("tls");
	uint8_t message[128];
	size_t n;
	struct pki_made made;
	struct pki *p;
	struct err e;
	uint8_t root[32], certificate[64], key[32] = { 7 };

	(void)state;
	assert_int_equal(pki_load(tls, &p, &e), -1);
	assert_int_equal(e.code, ERR_NOT_FOUND);
	if (pki_bootstrap(tls, "control.example.org, 192.0.2.7", &made, &e) != 0)
		fail_msg("%s", e.text);
	assert_true(made.ca && made.server && made.root);
	assert_int_equal(mode_of(at("tls/ca.key")), 0400);
	assert_int_equal(mode_of(at("tls/server.key")), 0400);
	assert_int_equal(mode_of(at("tls/root.key")), 0400);
	assert_int_equal(mode_of(at("tls/ca.pem")), 0444);
	assert_int_equal(mode_of(tls), 0700);
	verify(LINK_TLS_NAME);
	verify("control.example.org");
	assert_int_equal(pki_bootstrap(tls, "control.example.org,192.0.2.7", &made, &e), 0);
	assert_false(made.ca || made.server || made.root);
	assert_int_equal(pki_bootstrap(tls, "", &made, &e), 0);
	assert_false(made.server); /* a name more does no harm */
	assert_int_equal(pki_bootstrap(tls, "other.example.org", &made, &e), 0);
	assert_true(made.server && !made.ca && !made.root);
	verify("other.example.org");
	assert_int_equal(pki_bootstrap(tls, "a,DNS:evil\ncritical", &made, &e), -1);
	assert_non_null(strstr(e.text, "link_names"));

	assert_int_equal(pki_load(tls, &p, &e), 0);
	assert_true(pki_server_days(p) > 3640);
	pki_root_public(p, root);
	pki_certify_node(p, "node_1", key, certificate);
	assert_true(pki_node_certified(root, "node_1", key, certificate));
	assert_false(pki_node_certified(root, "node_2", key, certificate));
	key[0]++;
	assert_false(pki_node_certified(root, "node_1", key, certificate));
	/* An image that is meant for one node is so for no other, and no certificate is one. */
	n = link_image_message("node_1", key, message);
	pki_root_sign(p, message, n, certificate);
	assert_int_equal(crypto_sign_verify_detached(certificate, message, n, root), 0);
	n = link_image_message("node_2", key, message);
	assert_int_not_equal(crypto_sign_verify_detached(certificate, message, n, root), 0);
	assert_false(pki_node_certified(root, "node_1", key, certificate));
	pki_free(p);
}

/* A server's key that is not its certificate's, or a certificate by another CA, must not go unnoticed. */
static void test_pki_mixed(void **state)
{
	struct pki_made made;
	struct pki *p;
	struct err e;

	(void)state;
	assert_int_equal(pki_bootstrap(at("tls1"), "", &made, &e), 0);
	assert_int_equal(pki_bootstrap(at("tls2"), "", &made, &e), 0);
	assert_int_equal(rename(at("tls2/server.key"), at("tls1/server.key")), 0);
	assert_int_equal(pki_load(at("tls1"), &p, &e), -1);
	assert_non_null(strstr(e.text, "not the key"));
	assert_int_equal(pki_bootstrap(at("tls1"), "", &made, &e), 0);
	assert_true(made.server);
	assert_int_equal(pki_load(at("tls1"), &p, &e), 0);
	pki_free(p);
	assert_int_equal(rename(at("tls2/ca.pem"), at("tls1/ca.pem")), 0);
	assert_int_equal(pki_load(at("tls1"), &p, &e), -1);
	assert_non_null(strstr(e.text, "not by the CA"));
}

/* --- configuration ----------------------------------------------------------------------------------------------------------- */

static void test_config(void **state)
{
	static const char *const over[] = { "listen=[::1]:0", "size_large=4096,4", "lease_seconds=6", "lease_renew_seconds=1" };
	struct config c, fresh;
	struct err e;
	struct buf b = BUF_INIT(1 << 20);
	static const char *const changed[] = { "log_level=debug", "listen=127.0.0.1:1" };
	size_t kept;

	(void)state;
	if (config_read(&c, NULL, over, 4, &e) != 0)
		fail_msg("%s", e.text);
	assert_string_equal(c.listen, "[::1]:0");
	assert_int_equal(c.large.memory_mib, 4096);
	assert_int_equal(c.large.vcpus, 4);
	assert_int_equal(c.small.memory_mib, 256);
	assert_string_equal(c.link_listen, ":7443");
	assert_null(c.public_url);
	assert_int_equal(config_read(&fresh, NULL, changed, 2, &e), 0);
	config_reload(&c, &fresh, &kept);
	config_release(&fresh);
	assert_int_equal(c.log_level, 0);
	assert_string_equal(c.listen, "[::1]:0");
	assert_int_equal(kept, 4); /* listen, size_large, both leases */
	config_release(&c);
	config_print_help(&b);
	assert_non_null(strstr(buf_cstr(&b), "lease_renew_seconds"));
	buf_free(&b);
}

static void test_config_wrong(void **state)
{
	static const char *const bad[][2] = {
		{ "nonsense=1", "nonsense" },
		{ "listen=8080", "listen" },
		{ "lease_renew_seconds=30", "lease_renew_seconds" },
		{ "default_timeout_seconds=7200", "max_timeout_seconds" },
		{ "default_cost_micros=900000000", "max_cost_micros" },
		{ "size_small=512", "size_small" },
		{ "size_small=64,1", "memory" },
		{ "size_small=512,0", "CPUs" },
		{ "scripted_listen=127.0.0.1:0", "scripted_token_file" },
		{ "public_url=ftp://x.example", "public_url" },
		{ "public_url=https://x.example/", "slash" },
		{ "link_addresses=a.example:7443,b.example", "link_addresses" },
		{ "log_level=loud", "log_level" },
	};
	struct config c;
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		assert_int_equal(config_read(&c, NULL, &bad[i][0], 1, &e), -1);
		if (!strstr(e.text, bad[i][1]))
			fail_msg("%s: %s", bad[i][0], e.text);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_keyring_file, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_keyring_format, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_hashes, make_keyrings, tear_down),
		cmocka_unit_test(test_equal_is_every_byte),
		cmocka_unit_test_setup_teardown(test_seal, make_keyrings, tear_down),
		cmocka_unit_test_setup_teardown(test_rotation, make_keyrings, tear_down),
		cmocka_unit_test_setup_teardown(test_pki, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_pki_mixed, set_up, tear_down),
		cmocka_unit_test(test_config),
		cmocka_unit_test(test_config_wrong),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
