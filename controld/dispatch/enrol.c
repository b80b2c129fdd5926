/*
 * Enrolment: a host shows the secret of a join token and three keys; the store takes them and gives the node its id, the root key
 * certifies that id with the signing key. Runs on the loop; called by server.c for LINK_ENROL. All idempotent: the same signing key
 * with the same token gives the same node.
 */
#include "internal.h"

#include "common/log.h"
#include "common/text.h"

#include <sodium.h>

static void done(struct request *r, bool ok)
{
	struct buf b = BUF_INIT(256);
	struct link_enrol_reply reply;

	if (ok) {
		memset(&reply, 0, sizeof(reply));
		(void)!text_copy(reply.node_id, sizeof(reply.node_id), r->enrolled_id);
		pki_certify_node(r->d->pki, r->enrolled_id, r->enrol.sign_key, reply.certificate);
		pki_root_public(r->d->pki, reply.root_key);
		link_enrol_reply_encode(&reply, &b);
	}
	sodium_memzero(&r->enrol, sizeof(r->enrol));
	if (ok)
		request_reply(r, &b);
	buf_free(&b);
}

static void refuse(struct request *r, const char *text)
{
	struct buf name = BUF_INIT(512);

	text_safe(&name, r->enrol.name, strlen(r->enrol.name), false);
	log_warn("enrolment refused name=\"%s\" reason=\"%s\"", buf_cstr(&name) ? (const char *)name.data : "", text);
	buf_free(&name);
	dispatch_strike(r->d, r->pipe_id, "enrolment refused");
	done(r, false);
	request_refuse(r, LINK_UNAUTHENTIC, text);
}

static void on_certified(void *arg, const struct store_done *d, const struct err *e)
{
	struct request *r = arg;
	struct buf name = BUF_INIT(512);

	if (e || d->result != STORE_DONE) {
		done(r, false);
		if (e)
			request_store_error(r, e);
		else
			request_refuse(r, LINK_BUSY, "the node was removed while it enrolled; try again");
		return;
	}
	text_safe(&name, r->enrol.name, strlen(r->enrol.name), false);
	log_info("node enrolled node=%s name=\"%s\" isolation=%s", r->enrolled_id, buf_cstr(&name) ? (const char *)name.data : "",
			r->enrol.isolation);
	buf_free(&name);
	done(r, true);
}

static const char *why(enum store_enrol_result result)
{
	switch (result) {
	case STORE_ENROL_OK: break;
	case STORE_ENROL_UNKNOWN_TOKEN:
		return "this deployment has no such join token: make a new one with `ephemeral admin node token`";
	case STORE_ENROL_EXPIRED: return "the join token has expired: make a new one with `ephemeral admin node token`";
	case STORE_ENROL_USED_UP:
		return "the join token was used as often as it may be: make a new one with `ephemeral admin node token`";
	case STORE_ENROL_ISOLATION:
		return "the join token does not allow this node's isolation class: make one for it, or let the node claim less";
	case STORE_ENROL_KEY_REVOKED: return "this node's key was revoked: remove identity.key on the host to enrol as a new node";
	}
	return "refused";
}

static void on_enrolled(void *arg, const struct store_enrol *s, const struct err *e)
{
	struct request *r = arg;
	uint8_t certificate[64];
	struct err err;

	if (e) {
		done(r, false);
		request_store_error(r, e);
		return;
	}
	if (s->result != STORE_ENROL_OK || !text_copy(r->enrolled_id, sizeof(r->enrolled_id), s->node_id)) {
		refuse(r, why(s->result));
		return;
	}
	pki_certify_node(r->d->pki, r->enrolled_id, r->enrol.sign_key, certificate);
	if (store_node_certify(r->d->store, r->enrolled_id, certificate, on_certified, r, &err) != 0) {
		done(r, false);
		request_store_error(r, &err);
	}
}

static bool labels_ok(const char *s)
{
	for (; *s; s++) {
		if ((unsigned char)*s < 0x21 || (unsigned char)*s > 0x7e || *s == '"' || *s == '\\')
			return false;
	}
	return true;
}

void enrol_begin(struct request *r)
{
	struct pipe *p = dispatch_pipe(r->d, r->pipe_id);
	uint8_t hash[SECRETS_HASH_LEN];
	const char *fault;
	struct err e;

	if (link_enrol_decode(r->head.body, r->head.body_len, &r->enrol, &e) != 0) {
		sodium_memzero(&r->enrol, sizeof(r->enrol));
		dispatch_strike(r->d, r->pipe_id, "malformed enrolment");
		request_refuse(r, LINK_BAD, e.text);
		return;
	}
	fault = p ? peer_enrol_fault(&p->peer, &r->enrol) : "the connection is gone";
	if (!fault && !labels_ok(r->enrol.labels))
		fault = "labels must be visible ASCII without quotes and backslashes";
	if (fault) {
		refuse(r, fault);
		return;
	}
	secrets_key_hash(r->d->secrets, r->enrol.secret, hash);
	if (store_node_enrol(r->d->store, hash, &r->enrol, on_enrolled, r, &e) != 0) {
		done(r, false);
		request_store_error(r, &e);
	}
}
