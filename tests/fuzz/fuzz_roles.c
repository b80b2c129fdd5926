/* link: ephproto ephproto_link EPH::sodium */
/* sources: controld/api/stream_step.c */
/*
 * Messages between processes of ours and from nodes: the first byte picks the decoder. What decodes must encode to the same bytes.
 * An event that is taken is found to be of the same type by those who read its bytes without a parser.
 */
/* reads: proto/adopt.c proto/assignment.c proto/event.c proto/link.c proto/link_messages.c proto/role.c */
/* reached: 89 % of lines, 76 % of branches; the rest is memory */
#include "controld/api/stream_step.h"
#include "fuzz.h"
#include "proto/adopt.h"
#include "proto/assignment.h"
#include "proto/event.h"
#include "proto/link.h"
#include "proto/role.h"

#define NO_FREE(m) ((void)(m))
#define TRY(type, prefix, freeing)                                                                                                 \
	do {                                                                                                                       \
		struct type m;                                                                                                     \
		struct buf again = BUF_INIT(8 * 1024 * 1024);                                                                      \
		memset(&m, 0, sizeof(m));                                                                                          \
		if (prefix##_decode(data, size, &m, &e) == 0) {                                                                    \
			prefix##_encode(&m, &again);                                                                               \
			must(again.len == size && memcmp(again.data, data, size) == 0);                                            \
			freeing(&m);                                                                                               \
		}                                                                                                                  \
		buf_free(&again);                                                                                                  \
	} while (0)

static void try_link(uint8_t which, const uint8_t *data, size_t size)
{
	struct err e;

	switch (which) {
	case 0: TRY(link_next, link_next, link_next_free); break;
	case 1: TRY(link_events, link_events, link_events_free); break;
	case 2: TRY(link_finish, link_finish, link_finish_free); break;
	case 3: TRY(link_refuse, link_refuse, NO_FREE); break;
	case 4: TRY(link_blob, link_blob, NO_FREE); break;
	case 5: TRY(link_enrol, link_enrol, NO_FREE); break;
	case 6: TRY(link_start, link_start, NO_FREE); break;
	case 7: TRY(link_request, link_request, NO_FREE); break;
	case 8: TRY(link_next_reply, link_next_reply, link_next_reply_free); break;
	case 9: TRY(link_reply, link_reply, NO_FREE); break;
	case 10: TRY(link_challenge_reply, link_challenge_reply, NO_FREE); break;
	case 11: TRY(link_enrol_reply, link_enrol_reply, NO_FREE); break;
	case 12: TRY(link_events_reply, link_events_reply, NO_FREE); break;
	case 13: TRY(link_finish_reply, link_finish_reply, NO_FREE); break;
	case 14: TRY(link_blob_reply, link_blob_reply, NO_FREE); break;
	default: TRY(link_start_reply, link_start_reply, NO_FREE); break;
	}
}

static void try_event(const uint8_t *data, size_t size)
{
	enum event_type type;
	char found[64];
	struct err e;
	int64_t t;

	if (event_check(data, size, "run_0123456789abcdef0123456789abcdef", 1, &type, &t, &e) == 0)
		must(t >= 0 && stream_event_type(data, size, found, sizeof(found)) && strcmp(found, event_type_text(type)) == 0);
}

/* What begins with another version is taken, and nothing behind it is read. */
static void try_other_version(const uint8_t *data, size_t size)
{
	struct role_adopted m;
	struct err e;

	must(role_adopted_decode(data, size, &m, &e) == 0 && m.version != ADOPT_VERSION && m.vm[0] == '\0');
}

static void try_adopt(const uint8_t *data, size_t size)
{
	struct err e;
	uint8_t which;

	if (size == 0)
		return;
	which = *data++ % 3;
	size--;
	if (size >= 2 && ((unsigned int)data[0] | (unsigned int)data[1] << 8) != ADOPT_VERSION) {
		try_other_version(data, size);
		return;
	}
	switch (which) {
	case 0: TRY(role_identity, role_identity, NO_FREE); break;
	case 1: TRY(role_adopt, role_adopt, NO_FREE); break;
	default: TRY(role_adopted, role_adopted, NO_FREE); break;
	}
}

static void try_role(uint8_t which, const uint8_t *data, size_t size)
{
	struct err e;

	switch (which) {
	case 0: TRY(assignment, assignment, assignment_free); break;
	case 1: TRY(run_end, run_end, run_end_free); break;
	case 2: TRY(role_vm, role_vm, NO_FREE); break;
	case 3: TRY(role_broker_assign, role_broker_assign, role_broker_assign_free); break;
	case 4: TRY(run_secrets, run_secrets, NO_FREE); break;
	case 5: TRY(role_link_init, role_link_init, NO_FREE); break;
	case 6: TRY(link_refuse_reply, link_refuse_reply, NO_FREE); break;
	case 7: try_adopt(data, size); break;
	default: try_event(data, size); break;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint8_t which;

	if (size == 0)
		return 0;
	which = data[0];
	if (which & 0x80)
		try_role(which & 0x07, data + 1, size - 1);
	else
		try_link(which & 0x0f, data + 1, size - 1);
	return 0;
}
