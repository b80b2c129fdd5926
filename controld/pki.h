/*
 * The deployment's own keys for hosts: a CA (ECDSA P-256, X.509, ten years) that signs the link's server certificate, and an
 * Ed25519 root key that certifies each node's signing key. All in tls_dir:
 *
 *   ca.pem 0444, ca.key 0400, server.pem 0444, server.key 0400, root.key 0400 (32 bytes as hex)
 *
 * pki_bootstrap and pki_load block on files and run before the loop; the rest is pure.
 */
#ifndef CONTROLD_PKI_H
#define CONTROLD_PKI_H

#include "../common/error.h"

#include <stdbool.h>
#include <stdint.h>

#define PKI_PEM_MAX 4096

struct pki;

struct pki_made {
	bool ca, server, root; /* what this call made */
};

/*
 * Makes what is missing in dir (and dir itself, 0700). The server certificate is made again when it does not carry all of `names`
 * (comma separated DNS names and IP addresses, "" = none), is not by this CA, or ends within 30 days. Two at once are safe.
 */
int pki_bootstrap(const char *dir, const char *names, struct pki_made *made, struct err *e) EPH_MUST_CHECK;
/* Reads and checks: the keys belong to the certificates, the certificate is by this CA and has not ended. */
int pki_load(const char *dir, struct pki **out, struct err *e) EPH_MUST_CHECK;
void pki_free(struct pki *p); /* zeroes the keys */

const char *pki_ca_pem(const struct pki *p); /* goes into join tokens */
const char *pki_server_pem(const struct pki *p);
const char *pki_server_key(const struct pki *p); /* secret */
int64_t pki_server_days(const struct pki *p);    /* left until the certificate ends */

/* A node's certificate: Ed25519 by the root key over "ephemeral/node/1" || node_id || sign_key. */
void pki_certify_node(const struct pki *p, const char *node_id, const uint8_t sign_key[32], uint8_t certificate[64]);
void pki_root_public(const struct pki *p, uint8_t out[32]);
/* By the root key. A message begins with what it is for (link_image_message), so that none is taken for another. */
void pki_root_sign(const struct pki *p, const uint8_t *message, size_t n, uint8_t signature[64]);
/* What a client does with a node's certificate. */
bool pki_node_certified(const uint8_t root_key[32], const char *node_id, const uint8_t sign_key[32], const uint8_t certificate[64]);

#endif
