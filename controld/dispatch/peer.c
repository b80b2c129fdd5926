/* Signatures, challenges and counters of the node link (peer.h). Pure but for randomness; called by server.c on the loop. */
#include "peer.h"

#include "common/text.h"

#include <sodium.h>

const char *peer_text(enum peer_result r)
{
	switch (r) {
	case PEER_OK: return "ok";
	case PEER_NEED_NODE: return "this node is not known here";
	case PEER_NO_CHALLENGE: return "no challenge was asked for on this connection";
	case PEER_OTHER_NODE: return "this connection belongs to another node";
	case PEER_SIGNATURE: return "the signature is not by this node's key over this connection's challenge";
	case PEER_REPLAY: return "the counter did not grow: this request was seen before";
	case PEER_CONTEXTS: return "too many contexts on one connection";
	case PEER_REVOKED: return "this node was revoked";
	}
	return "not authentic";
}

void peer_init(struct peer *p, uint32_t id)
{
	memset(p, 0, sizeof(*p));
	p->id = id;
}

const uint8_t *peer_challenge(struct peer *p)
{
	if (!p->challenged) {
		randombytes_buf(p->challenge, sizeof(p->challenge));
		p->challenged = true;
	}
	return p->challenge;
}

void peer_set_node(struct peer *p, const char *node_id, const uint8_t sign_key[32], const uint8_t seal_key[32], bool revoked)
{
	if (!text_copy(p->node_id, sizeof(p->node_id), node_id))
		return;
	memcpy(p->sign_key, sign_key, 32);
	memcpy(p->seal_key, seal_key, 32);
	p->known = true;
	p->stale = false;
	p->revoked = revoked;
}

/* The context's place in the table; NULL when it is new and the table is full. `fresh` says that it is new. */
static uint64_t *counter_of(struct peer *p, uint32_t context, bool *fresh)
{
	*fresh = false;
	for (uint32_t i = 0; i < p->seen_count; i++) {
		if (p->seen[i].context == context)
			return &p->seen[i].counter;
	}
	if (p->seen_count == PEER_CONTEXTS_MAX)
		return NULL;
	*fresh = true;
	p->seen[p->seen_count].context = context;
	p->seen[p->seen_count].counter = 0;
	return &p->seen[p->seen_count].counter;
}

enum peer_result peer_check(struct peer *p, const struct link_request *r)
{
	uint8_t message[256];
	uint64_t *counter;
	bool fresh;
	size_t n;

	if (!p->challenged)
		return PEER_NO_CHALLENGE;
	/* A node that only claimed to be another one has proven nothing, so it does not keep the pipe. */
	if (p->proven && strcmp(p->node_id, r->node_id) != 0)
		return PEER_OTHER_NODE;
	if (!p->known || p->stale || strcmp(p->node_id, r->node_id) != 0)
		return PEER_NEED_NODE;
	n = link_signed_message(r, p->challenge, message);
	if (n == 0 || crypto_sign_verify_detached(r->signature, message, n, p->sign_key) != 0)
		return PEER_SIGNATURE;
	/* Only to somebody who holds the key: else anybody could ask which nodes are revoked. */
	if (p->revoked)
		return PEER_REVOKED;
	counter = counter_of(p, r->context, &fresh);
	if (!counter)
		return PEER_CONTEXTS;
	if (!fresh && r->counter <= *counter)
		return PEER_REPLAY;
	*counter = r->counter;
	if (fresh)
		p->seen_count++;
	p->proven = true;
	return PEER_OK;
}

static bool signed_by(const uint8_t sign_key[32], const uint8_t sig[64], const char *label, const void *a, size_t a_len,
		const void *b, size_t b_len)
{
	struct buf m = BUF_INIT(512);
	bool ok = buf_add_str(&m, label) && buf_add(&m, a, a_len) && buf_add(&m, b, b_len) &&
		  crypto_sign_verify_detached(sig, m.data, m.len, sign_key) == 0;

	buf_free(&m);
	return ok;
}

const char *peer_enrol_fault(struct peer *p, const struct link_enrol *n)
{
	if (!p->challenged)
		return peer_text(PEER_NO_CHALLENGE);
	if (strcmp(n->isolation, "kvm") != 0 && strcmp(n->isolation, "emulated") != 0)
		return "isolation must be kvm or emulated";
	if (n->name[0] == '\0')
		return "the node's name is empty";
	if (strncmp(n->secret, "ephnt_", 6) != 0 || strlen(n->secret) != 49)
		return "the join token's secret must be ephnt_ and 43 characters";
	if (!signed_by(n->sign_key, n->seal_sig, "ephemeral/seal-key/1", n->seal_key, 32, "", 0))
		return "the sealing key is not signed by the node's key";
	if (!signed_by(n->sign_key, n->receipt_sig, "ephemeral/receipt-key/1", n->receipt_key, 32, "", 0))
		return "the receipt key is not signed by the node's key";
	if (!signed_by(n->sign_key, n->proof, "ephemeral/enrol/1", p->challenge, 32, n->secret, strlen(n->secret)))
		return "the proof is not by the node's key over this connection's challenge";
	return NULL;
}
