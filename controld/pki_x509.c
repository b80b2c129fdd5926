/* Makes and reads the X.509 certificates of the link. Called by pki.c only; pure but for randomness and the wall clock. */
#include "pki_internal.h"

#include "config.h"

#include "../common/buf.h"
#include "../common/text.h"

#include <arpa/inet.h>
#include <openssl/rand.h>

#define CA_DAYS 3653 /* ten years */
#define NAMES_MAX 32

EVP_PKEY *pki_new_key(struct err *e)
{
	EVP_PKEY *key = EVP_EC_gen("P-256");

	if (!key)
		pki_crypto_error(e, "make a P-256 key");
	return key;
}

static int set_serial(X509 *cert)
{
	uint8_t raw[16];
	BIGNUM *n;
	int ok;

	if (RAND_bytes(raw, sizeof(raw)) != 1)
		return 0;
	raw[0] = (uint8_t)((raw[0] & 0x7f) | 0x40); /* positive and never short */
	n = BN_bin2bn(raw, sizeof(raw), NULL);
	ok = n && BN_to_ASN1_INTEGER(n, X509_get_serialNumber(cert));
	BN_free(n);
	return ok;
}

static int set_name(X509_NAME *name, const char *common)
{
	return X509_NAME_add_entry_by_txt(name, "O", MBSTRING_UTF8, (const unsigned char *)"Ephemeral", -1, -1, 0) == 1 &&
	       X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8, (const unsigned char *)common, -1, -1, 0) == 1;
}

static int add_ext(X509 *cert, X509 *issuer, int nid, const char *value)
{
	X509V3_CTX ctx;
	X509_EXTENSION *ext;
	int ok;

	X509V3_set_ctx_nodb(&ctx);
	X509V3_set_ctx(&ctx, issuer, cert, NULL, NULL, 0);
	ext = X509V3_EXT_conf_nid(NULL, &ctx, nid, value);
	ok = ext && X509_add_ext(cert, ext, -1) == 1;
	X509_EXTENSION_free(ext);
	return ok;
}

/* A day back: the hosts' clocks need not agree to the second. */
static int set_life(X509 *cert, const ASN1_TIME *not_after)
{
	if (!X509_gmtime_adj(X509_getm_notBefore(cert), -86400))
		return 0;
	if (not_after)
		return X509_set1_notAfter(cert, not_after);
	return X509_time_adj_ex(X509_getm_notAfter(cert), CA_DAYS, 0, NULL) != NULL;
}

X509 *pki_new_ca(EVP_PKEY *key, struct err *e)
{
	X509 *c = X509_new();

	if (c && X509_set_version(c, X509_VERSION_3) && set_serial(c) && set_life(c, NULL) && X509_set_pubkey(c, key) &&
			set_name(X509_get_subject_name(c), "Ephemeral node link CA") &&
			X509_set_issuer_name(c, X509_get_subject_name(c)) &&
			add_ext(c, c, NID_basic_constraints, "critical,CA:TRUE,pathlen:0") &&
			add_ext(c, c, NID_key_usage, "critical,keyCertSign,cRLSign") &&
			add_ext(c, c, NID_subject_key_identifier, "hash") && X509_sign(c, key, EVP_sha256()) > 0)
		return c;
	pki_crypto_error(e, "make the CA");
	X509_free(c);
	return NULL;
}

/* Each name of the list in turn, trimmed: false at the end. */
static bool next_name(const char **rest, char out[256])
{
	while (**rest == ',' || **rest == ' ')
		(*rest)++;
	size_t n = strcspn(*rest, ",");
	size_t used = n;

	while (used > 0 && (*rest)[used - 1] == ' ')
		used--;
	if (used == 0 || used > 255) {
		if (used > 0)
			out[0] = '\0';
		return used > 0;
	}
	memcpy(out, *rest, used);
	out[used] = '\0';
	*rest += n;
	return true;
}

static bool is_ip(const char *s)
{
	uint8_t raw[16];

	return inet_pton(AF_INET, s, raw) == 1 || inet_pton(AF_INET6, s, raw) == 1;
}

static bool is_dns(const char *s)
{
	size_t n = strlen(s);

	if (n == 0 || n > 253 || s[0] == '.' || s[0] == '-')
		return false;
	return strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.") == n;
}

/* "DNS:a,IP:1.2.3.4": the names are checked, so nothing in them can be read as another extension. */
static int alt_names(const char *names, struct buf *out, struct err *e)
{
	char name[256];
	size_t count = 0;

	if (!buf_add_str(out, "DNS:" LINK_TLS_NAME))
		return err_set(e, ERR_NOMEM, "no memory");
	while (next_name(&names, name)) {
		bool ip = is_ip(name);

		if (++count > NAMES_MAX)
			return err_set(e, ERR_LIMIT, "link_names: more than %d names", NAMES_MAX);
		if (!ip && !is_dns(name))
			return err_set(e, ERR_INVALID, "link_names: \"%.64s\" is neither a DNS name nor an IP address", name);
		if (!buf_printf(out, ",%s:%s", ip ? "IP" : "DNS", name))
			return err_set(e, ERR_LIMIT, "link_names: too long together");
	}
	return buf_cstr(out) ? 0 : err_set(e, ERR_NOMEM, "no memory");
}

X509 *pki_new_server(EVP_PKEY *key, const char *names, X509 *ca, EVP_PKEY *ca_key, struct err *e)
{
	struct buf san = BUF_INIT(8192);
	X509 *c = NULL;

	if (alt_names(names, &san, e) != 0)
		goto fail;
	c = X509_new();
	if (c && X509_set_version(c, X509_VERSION_3) && set_serial(c) && set_life(c, X509_get0_notAfter(ca)) &&
			X509_set_pubkey(c, key) && set_name(X509_get_subject_name(c), LINK_TLS_NAME) &&
			X509_set_issuer_name(c, X509_get_subject_name(ca)) &&
			add_ext(c, ca, NID_basic_constraints, "critical,CA:FALSE") &&
			add_ext(c, ca, NID_key_usage, "critical,digitalSignature") &&
			add_ext(c, ca, NID_ext_key_usage, "serverAuth") && add_ext(c, ca, NID_subject_key_identifier, "hash") &&
			add_ext(c, ca, NID_authority_key_identifier, "keyid:always") &&
			add_ext(c, ca, NID_subject_alt_name, (const char *)san.data) && X509_sign(c, ca_key, EVP_sha256()) > 0) {
		buf_free(&san);
		return c;
	}
	pki_crypto_error(e, "make the link's certificate");
fail:
	buf_free(&san);
	X509_free(c);
	return NULL;
}

bool pki_names_covered(X509 *cert, const char *names)
{
	char name[256];

	if (X509_check_host(cert, LINK_TLS_NAME, 0, 0, NULL) != 1)
		return false;
	while (next_name(&names, name)) {
		int ok = is_ip(name) ? X509_check_ip_asc(cert, name, 0)
				     : X509_check_host(cert, name, 0, X509_CHECK_FLAG_NEVER_CHECK_SUBJECT, NULL);

		if (ok != 1)
			return false;
	}
	return true;
}
