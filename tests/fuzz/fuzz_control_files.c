/*
 * Files that controld starts with: the keyring, and the five of tls_dir. First byte: which of them is replaced by the rest. A
 * keyring that is taken opens what it seals and nothing else; a tls_dir that is taken has an identity that certifies nodes.
 */
/* link: controld_base EPH::sodium EPH::crypto */
/* reads: controld/secrets.c controld/pki.c controld/pki_x509.c */
/* reached: 84 % of lines, 59 % of branches; the rest makes keys and certificates */
#include "fuzz_dir.h"

#include "common/log.h"
#include "common/text.h"
#include "controld/files.h"
#include "controld/pki.h"
#include "controld/secrets.h"

#include <fcntl.h>
#include <sys/stat.h>

static const char *const names[] = { "keyring", "ca.pem", "ca.key", "server.pem", "server.key", "root.key" };
#define NAMES (sizeof(names) / sizeof(names[0]))

static struct buf good[NAMES];

static void path_of(size_t which, char path[128])
{
	must(text_fmt(path, 128, "%s/%s", fuzz_dir, names[which]));
}

static void put(size_t which, const void *p, size_t n)
{
	char path[128];
	int fd;

	path_of(which, path);
	fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
	must(fd >= 0 && write(fd, p, n) == (ssize_t)n);
	close(fd);
}

static void prepare(void)
{
	struct pki_made made;
	char path[128];
	struct err e;
	bool new;

	log_init("fuzz", LOG_LEVEL_ERROR + 1, false);
	must(pki_bootstrap(fuzz_dir, "localhost,127.0.0.1", &made, &e) == 0);
	path_of(0, path);
	must(secrets_create(path, &new, &e) == 0);
	for (size_t i = 0; i < NAMES; i++) {
		path_of(i, path);
		buf_init(&good[i], 65536);
		must(chmod(path, 0600) == 0 && file_read(path, true, &good[i], &e) == 0);
	}
}

static void keyring(void)
{
	struct buf sealed = BUF_INIT(1024), plain = BUF_INIT(1024);
	struct secrets *s = NULL;
	uint8_t a[SECRETS_HASH_LEN], b[SECRETS_HASH_LEN];
	char path[128];
	struct err e;

	path_of(0, path);
	if (secrets_load(path, &s, &e) != 0) {
		must(*e.text && text_utf8_valid(e.text, strlen(e.text)));
		return;
	}
	secrets_key_hash(s, "eph_x", a);
	secrets_body_hash(s, "eph_x", 5, b);
	must(!secrets_equal(a, b, sizeof(a)));
	must(secrets_seal(s, "secret", 6, "aad", &sealed, &e) == 0 && sealed.len == 6 + SECRETS_SEAL_OVERHEAD);
	must(secrets_open(s, sealed.data, sealed.len, "aad", &plain, &e) == 0 && plain.len == 6 &&
			memcmp(plain.data, "secret", 6) == 0);
	must(secrets_open(s, sealed.data, sealed.len, "other", &plain, &e) != 0);
	sealed.data[sealed.len / 2] ^= 1;
	must(secrets_open(s, sealed.data, sealed.len, "aad", &plain, &e) != 0);
	buf_free(&sealed);
	buf_free(&plain);
	secrets_free(s);
}

/* Any bytes as what Postgres holds. */
static void sealed_bytes(const uint8_t *p, size_t n)
{
	struct buf plain = BUF_INIT(65536);
	struct secrets *s = NULL;
	char path[128];
	struct err e;

	path_of(0, path);
	must(secrets_load(path, &s, &e) == 0);
	must(secrets_open_provider_key(s, "p", p, n, &plain, &e) != 0 && plain.len == 0);
	buf_free(&plain);
	secrets_free(s);
}

static void tls(void)
{
	static const uint8_t key[32] = { 7 };
	uint8_t root[32], certificate[64];
	struct pki *p = NULL;
	struct err e;

	if (pki_load(fuzz_dir, &p, &e) != 0) {
		must(*e.text && text_utf8_valid(e.text, strlen(e.text)));
		return;
	}
	must(pki_server_days(p) >= 0 && strlen(pki_ca_pem(p)) <= PKI_PEM_MAX && strstr(pki_server_pem(p), "BEGIN CERTIFICATE"));
	pki_root_public(p, root);
	pki_certify_node(p, "node_1", key, certificate);
	must(pki_node_certified(root, "node_1", key, certificate) && !pki_node_certified(root, "node_2", key, certificate));
	pki_free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	size_t which;

	if (fuzz_dir_made())
		prepare();
	if (n < 1)
		return 0;
	which = p[0] % (NAMES + 1);
	if (which == NAMES) {
		sealed_bytes(p + 1, n - 1);
		return 0;
	}
	put(which, p + 1, n - 1);
	if (which == 0)
		keyring();
	else
		tls();
	put(which, good[which].data, good[which].len);
	return 0;
}
