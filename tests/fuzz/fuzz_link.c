/* link: controld_dispatch ephproto_link ephproto EPH::sodium */
/*
 * A node's request as controld reads it: the envelope, the signature check, then the body as if the signature had been good, judged
 * as dispatch/requests.c does. Also the other direction: an answer as a node reads it, and a join token.
 */
#include "controld/dispatch/check.h"
#include "controld/dispatch/peer.h"

#include "common/text.h"
#include "proto/link.h"

static void decode_body(const struct link_request *r)
{
	const void *p = r->body;
	size_t n = r->body_len;
	struct link_enrol enrol;
	struct link_next next;
	struct link_start start;
	struct link_events events;
	struct link_finish finish;
	struct link_refuse refuse;
	struct link_blob blob;
	struct err e;
	int64_t last;

	switch (r->type) {
	case LINK_ENROL: (void)!link_enrol_decode(p, n, &enrol, &e); break;
	case LINK_NEXT:
		if (link_next_decode(p, n, &next, &e) == 0) {
			(void)!check_next(&next, &e);
			link_next_free(&next);
		}
		break;
	case LINK_START:
		if (link_start_decode(p, n, &start, &e) == 0)
			(void)!check_run_id(start.run_id, &e);
		break;
	case LINK_EVENTS:
		if (link_events_decode(p, n, &events, &e) == 0) {
			(void)!check_events(&events, &last, &e);
			link_events_free(&events);
		}
		break;
	case LINK_FINISH:
		if (link_finish_decode(p, n, &finish, &e) == 0) {
			/* What passes is clean. */
			if (check_finish(&finish, &e) == 0 &&
					!text_utf8_clean((const char *)finish.end.output, finish.end.output_len))
				__builtin_trap();
			link_finish_free(&finish);
		}
		break;
	case LINK_REFUSE:
		if (link_refuse_decode(p, n, &refuse, &e) == 0)
			(void)!check_refuse(&refuse, &e);
		break;
	case LINK_BLOB:
		if (link_blob_decode(p, n, &blob, &e) == 0)
			(void)!check_blob(&blob, &e);
		break;
	default: break;
	}
}

static void decode_reply(const uint8_t *data, size_t size)
{
	struct link_reply reply;
	struct link_next_reply next;
	struct err e;

	if (link_reply_decode(data, size, &reply, &e) == 0 && link_next_reply_decode(reply.body, reply.body_len, &next, &e) == 0)
		link_next_reply_free(&next);
}

static void decode_token(const uint8_t *data, size_t size)
{
	struct join_token token;
	struct err e;
	char *s = malloc(size + 1);

	if (!s)
		return;
	memcpy(s, data, size);
	s[size] = '\0';
	(void)!join_token_parse(s, &token, &e);
	free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint8_t key[32] = { 1 };
	struct link_request r;
	struct peer peer;
	struct err e;

	if (link_request_decode(data, size, &r, &e) == 0) {
		peer_init(&peer, 1);
		peer_challenge(&peer);
		peer_set_node(&peer, r.node_id, key, key, false);
		/* Nobody knows the key that this would take. */
		if (peer_check(&peer, &r) == PEER_OK)
			__builtin_trap();
		decode_body(&r);
	}
	decode_reply(data, size);
	decode_token(data, size);
	/* Bodies without an envelope, so that the fuzzer need not find one. */
	for (uint8_t type = LINK_ENROL; size > 0 && type <= LINK_BLOB; type++) {
		struct link_request bare = { .type = type, .body = data, .body_len = size };

		decode_body(&bare);
	}
	return 0;
}
