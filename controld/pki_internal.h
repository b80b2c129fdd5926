/* Between pki.c (files) and pki_x509.c (certificates). */
#ifndef CONTROLD_PKI_INTERNAL_H
#define CONTROLD_PKI_INTERNAL_H

#include "../common/error.h"

#include <openssl/evp.h>
#include <openssl/x509v3.h>
#include <stdbool.h>

int pki_crypto_error(struct err *e, const char *what);
EVP_PKEY *pki_new_key(struct err *e);
X509 *pki_new_ca(EVP_PKEY *key, struct err *e);
/* Ends with the CA. */
X509 *pki_new_server(EVP_PKEY *key, const char *names, X509 *ca, EVP_PKEY *ca_key, struct err *e);
bool pki_names_covered(X509 *cert, const char *names);

#endif
