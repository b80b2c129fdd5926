/*
 * The CA, the link's certificate and the root key for nodes (pki.h says where they lie). pki_bootstrap is called by `controld
 * bootstrap`, pki_load by main.c at start and by -t; both block on files. Afterwards the loop only reads.
 *
 * OpenSSL's libcrypto makes X.509 and nothing else here; TLS itself is nng's affair. Errors of libcrypto become one err text.
 */
#include "pki.h"

#include "config.h"
#include "files.h"
#include "pki_internal.h"

#include "../common/text.h"

#include <fcntl.h>
#include <limits.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <sodium.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define RENEW_DAYS 30

struct pki {
	char ca_pem[PKI_PEM_MAX], server_pem[PKI_PEM_MAX], server_key[PKI_PEM_MAX];
	int64_t server_days;
	uint8_t root_public[crypto_sign_PUBLICKEYBYTES];
	uint8_t root_secret[crypto_sign_SECRETKEYBYTES];
};

int pki_crypto_error(struct err *e, const char *what)
{
	char text[160] = "no detail";
	unsigned long code = ERR_get_error();

	if (code)
		ERR_error_string_n(code, text, sizeof(text));
	ERR_clear_error();
	return err_set(e, ERR_INTERNAL, "%s: %s", what, text);
}

static int in_dir(const char *dir, const char *name, char out[PATH_MAX], struct err *e)
{
	if (!text_fmt(out, PATH_MAX, "%s/%s", dir, name))
		return err_set(e, ERR_LIMIT, "the path %s/%s is too long", dir, name);
	return 0;
}

static int read_pem(const char *dir, const char *name, bool secret, char out[PKI_PEM_MAX], struct err *e)
{
	char path[PATH_MAX];
	struct buf b = BUF_INIT(PKI_PEM_MAX - 1);
	int rc;

	if (in_dir(dir, name, path, e) != 0)
		return -1;
	rc = file_read(path, secret, &b, e);
	if (rc == 0 && (b.len == 0 || memchr(b.data, 0, b.len)))
		rc = err_set(e, ERR_INVALID, "%s is not PEM", path);
	if (rc == 0) {
		memcpy(out, b.data, b.len);
		out[b.len] = '\0';
	}
	if (b.data)
		sodium_memzero(b.data, b.cap);
	buf_free(&b);
	return rc;
}

static int read_cert(const char *dir, const char *name, char pem[PKI_PEM_MAX], X509 **out, struct err *e)
{
	BIO *bio;

	if (read_pem(dir, name, false, pem, e) != 0)
		return -1;
	bio = BIO_new_mem_buf(pem, -1);
	*out = bio ? PEM_read_bio_X509(bio, NULL, NULL, NULL) : NULL;
	BIO_free(bio);
	if (!*out) {
		pki_crypto_error(e, name);
		return err_wrap(e, "%s/%s is not a certificate", dir, name);
	}
	return 0;
}

static int read_key(const char *dir, const char *name, char pem[PKI_PEM_MAX], EVP_PKEY **out, struct err *e)
{
	BIO *bio;

	if (read_pem(dir, name, true, pem, e) != 0)
		return -1;
	bio = BIO_new_mem_buf(pem, -1);
	*out = bio ? PEM_read_bio_PrivateKey(bio, NULL, NULL, NULL) : NULL;
	BIO_free(bio);
	if (!*out) {
		pki_crypto_error(e, name);
		return err_wrap(e, "%s/%s is not a private key", dir, name);
	}
	return 0;
}

/* --- making what is missing -------------------------------------------------------------------------------------------- */

static int write_bio(const char *dir, const char *name, BIO *bio, mode_t mode, struct err *e)
{
	char path[PATH_MAX], *p;
	long n = BIO_get_mem_data(bio, &p);
	int rc;

	if (n <= 0 || n >= PKI_PEM_MAX)
		return err_set(e, ERR_LIMIT, "%s would not fit %d bytes: name fewer link_names", name, PKI_PEM_MAX);
	if (in_dir(dir, name, path, e) != 0)
		return -1;
	rc = file_write(path, p, (size_t)n, mode, true, e);
	sodium_memzero(p, (size_t)n);
	return rc;
}

/* The key goes first: a certificate without its key would look finished. */
static int write_pair(const char *dir, const char *cert_name, X509 *cert, const char *key_name, EVP_PKEY *key, struct err *e)
{
	BIO *key_bio = BIO_new(BIO_s_mem()), *cert_bio = BIO_new(BIO_s_mem());
	int rc = -1;

	if (!key_bio || !cert_bio || PEM_write_bio_PKCS8PrivateKey(key_bio, key, NULL, NULL, 0, NULL, NULL) != 1 ||
			PEM_write_bio_X509(cert_bio, cert) != 1)
		pki_crypto_error(e, "write PEM");
	else if (write_bio(dir, key_name, key_bio, 0400, e) == 0)
		rc = write_bio(dir, cert_name, cert_bio, 0444, e);
	BIO_free(key_bio);
	BIO_free(cert_bio);
	return rc;
}

static int make_ca(const char *dir, X509 **cert, EVP_PKEY **key, struct err *e)
{
	*key = pki_new_key(e);
	if (!*key)
		return -1;
	*cert = pki_new_ca(*key, e);
	if (!*cert)
		return -1;
	return write_pair(dir, "ca.pem", *cert, "ca.key", *key, e);
}

static int make_server(const char *dir, const char *names, X509 *ca, EVP_PKEY *ca_key, struct err *e)
{
	EVP_PKEY *key = pki_new_key(e);
	X509 *cert = key ? pki_new_server(key, names, ca, ca_key, e) : NULL;
	int rc = cert ? write_pair(dir, "server.pem", cert, "server.key", key, e) : -1;

	X509_free(cert);
	EVP_PKEY_free(key);
	return rc;
}

static int64_t days_left(const X509 *cert)
{
	int days = 0, seconds = 0;

	if (ASN1_TIME_diff(&days, &seconds, NULL, X509_get0_notAfter(cert)) != 1)
		return -1;
	return days;
}

/* Why the server's certificate must be made (again); NULL when it is fine. */
static const char *server_fault(const char *dir, const char *names, X509 *ca)
{
	char pem[PKI_PEM_MAX];
	X509 *cert = NULL;
	EVP_PKEY *key = NULL;
	struct err e;
	const char *fault = NULL;

	if (read_cert(dir, "server.pem", pem, &cert, &e) != 0 || read_key(dir, "server.key", pem, &key, &e) != 0)
		fault = "missing or unreadable";
	else if (X509_check_private_key(cert, key) != 1)
		fault = "not of its key";
	else if (X509_verify(cert, X509_get0_pubkey(ca)) != 1)
		fault = "not by this CA";
	else if (days_left(cert) < RENEW_DAYS)
		fault = "ends soon";
	else if (!pki_names_covered(cert, names))
		fault = "without all of link_names";
	sodium_memzero(pem, sizeof(pem));
	ERR_clear_error();
	X509_free(cert);
	EVP_PKEY_free(key);
	return fault;
}

static int make_root(const char *dir, bool *made, struct err *e)
{
	char path[PATH_MAX], text[2 * crypto_sign_SEEDBYTES + 2];
	uint8_t seed[crypto_sign_SEEDBYTES];
	int rc;

	if (in_dir(dir, "root.key", path, e) != 0)
		return -1;
	if (file_exists(path))
		return 0;
	randombytes_buf(seed, sizeof(seed));
	text_hex(seed, sizeof(seed), text);
	text[2 * sizeof(seed)] = '\n';
	rc = file_write(path, text, 2 * sizeof(seed) + 1, 0400, false, e);
	sodium_memzero(seed, sizeof(seed));
	sodium_memzero(text, sizeof(text));
	*made = rc == 0;
	return rc;
}

static int bootstrap_locked(const char *dir, const char *names, struct pki_made *made, struct err *e)
{
	char path[PATH_MAX], pem[PKI_PEM_MAX];
	X509 *ca = NULL;
	EVP_PKEY *ca_key = NULL;
	int rc = -1;

	if (in_dir(dir, "ca.pem", path, e) != 0)
		return -1;
	if (!file_exists(path)) {
		if (make_ca(dir, &ca, &ca_key, e) != 0)
			goto done;
		made->ca = true;
	} else if (read_cert(dir, "ca.pem", pem, &ca, e) != 0) {
		goto done;
	}
	if (server_fault(dir, names, ca)) {
		/* The CA's key is needed only here: a controld may live without it once its certificate is made. */
		if (!ca_key && read_key(dir, "ca.key", pem, &ca_key, e) != 0)
			goto done;
		if (make_server(dir, names, ca, ca_key, e) != 0)
			goto done;
		made->server = true;
	}
	rc = make_root(dir, &made->root, e);
done:
	sodium_memzero(pem, sizeof(pem));
	X509_free(ca);
	EVP_PKEY_free(ca_key);
	return rc;
}

int pki_bootstrap(const char *dir, const char *names, struct pki_made *made, struct err *e)
{
	int fd, rc;

	memset(made, 0, sizeof(*made));
	if (sodium_init() < 0)
		return err_set(e, ERR_INTERNAL, "libsodium did not start");
	if (file_mkdir(dir, e) != 0)
		return -1;
	fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return err_set_errno(e, "open %s", dir);
	rc = flock(fd, LOCK_EX) == 0 ? bootstrap_locked(dir, names, made, e) : err_set_errno(e, "lock %s", dir);
	close(fd);
	return rc;
}

/* --- loading ----------------------------------------------------------------------------------------------------------------- */

static int load_root(const char *dir, struct pki *p, struct err *e)
{
	char text[PKI_PEM_MAX];
	uint8_t seed[crypto_sign_SEEDBYTES];
	int rc = read_pem(dir, "root.key", true, text, e);

	if (rc == 0) {
		text[strcspn(text, "\n")] = '\0';
		if (!text_unhex(text, seed, sizeof(seed)))
			rc = err_set(e, ERR_INVALID, "%s/root.key must hold 64 lower-case hexadecimal digits", dir);
	}
	if (rc == 0)
		crypto_sign_seed_keypair(p->root_public, p->root_secret, seed);
	sodium_memzero(seed, sizeof(seed));
	sodium_memzero(text, sizeof(text));
	return rc;
}

static int load_checked(const char *dir, struct pki *p, X509 **ca, X509 **cert, EVP_PKEY **key, struct err *e)
{
	if (read_cert(dir, "ca.pem", p->ca_pem, ca, e) != 0 || read_cert(dir, "server.pem", p->server_pem, cert, e) != 0 ||
			read_key(dir, "server.key", p->server_key, key, e) != 0)
		return -1;
	if (X509_check_private_key(*cert, *key) != 1)
		return err_set(e, ERR_INVALID, "%s: server.key is not the key of server.pem", dir);
	if (X509_verify(*cert, X509_get0_pubkey(*ca)) != 1)
		return err_set(e, ERR_INVALID,
				"%s: server.pem is not by the CA in ca.pem: remove server.pem and run bootstrap again", dir);
	p->server_days = days_left(*cert);
	if (p->server_days < 0 || X509_cmp_current_time(X509_get0_notAfter(*cert)) < 0)
		return err_set(e, ERR_INVALID, "%s: the link's certificate has ended: run bootstrap again", dir);
	return load_root(dir, p, e);
}

int pki_load(const char *dir, struct pki **out, struct err *e)
{
	struct pki *p;
	X509 *ca = NULL, *cert = NULL;
	EVP_PKEY *key = NULL;
	int rc;

	if (sodium_init() < 0)
		return err_set(e, ERR_INTERNAL, "libsodium did not start");
	p = sodium_malloc(sizeof(*p));
	if (!p)
		return err_set(e, ERR_NOMEM, "no memory for the link's keys");
	memset(p, 0, sizeof(*p));
	rc = load_checked(dir, p, &ca, &cert, &key, e);
	ERR_clear_error();
	X509_free(ca);
	X509_free(cert);
	EVP_PKEY_free(key);
	if (rc != 0) {
		sodium_free(p);
		return err_wrap(e, "tls_dir");
	}
	*out = p;
	return 0;
}

void pki_free(struct pki *p)
{
	if (p)
		sodium_free(p);
}

const char *pki_ca_pem(const struct pki *p)
{
	return p->ca_pem;
}

const char *pki_server_pem(const struct pki *p)
{
	return p->server_pem;
}

const char *pki_server_key(const struct pki *p)
{
	return p->server_key;
}

int64_t pki_server_days(const struct pki *p)
{
	return p->server_days;
}

void pki_root_public(const struct pki *p, uint8_t out[32])
{
	memcpy(out, p->root_public, 32);
}

/* "ephemeral/node/1" || node_id || sign_key */
static size_t node_message(const char *node_id, const uint8_t sign_key[32], uint8_t out[128])
{
	struct buf b = BUF_INIT(128);
	size_t n = 0;

	if (buf_add_str(&b, "ephemeral/node/1") && buf_add_str(&b, node_id) && buf_add(&b, sign_key, 32)) {
		memcpy(out, b.data, b.len);
		n = b.len;
	}
	buf_free(&b);
	return n;
}

void pki_certify_node(const struct pki *p, const char *node_id, const uint8_t sign_key[32], uint8_t certificate[64])
{
	uint8_t message[128];
	size_t n = node_message(node_id, sign_key, message);

	crypto_sign_detached(certificate, NULL, message, n, p->root_secret);
}

void pki_root_sign(const struct pki *p, const uint8_t *message, size_t n, uint8_t signature[64])
{
	crypto_sign_detached(signature, NULL, message, n, p->root_secret);
}

bool pki_node_certified(const uint8_t root_key[32], const char *node_id, const uint8_t sign_key[32], const uint8_t certificate[64])
{
	uint8_t message[128];
	size_t n = node_message(node_id, sign_key, message);

	return n > 0 && crypto_sign_verify_detached(certificate, message, n, root_key) == 0;
}
