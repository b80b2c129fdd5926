/* link: ephproto */
/*
 * The guest channel, both directions: a stream of frames, each body given to the decoder of its type. What decodes has one
 * encoding, and so has the frame; each path of a setup may be made below the working directory.
 */
/* reads: proto/guest.c proto/model.c */
/* reached: 94 % of lines, 84 % of branches; the rest is memory */
#include "fuzz.h"
#include "proto/guest.h"
#include "proto/model.h"

static void same(const struct buf *again, const uint8_t *p, size_t n)
{
	must(again->len == n && memcmp(again->data, p, n) == 0);
}

static void check_paths(const struct guest_setup *s)
{
	for (uint32_t i = 0; i < s->file_count; i++) {
		const char *path = s->files[i].path;

		must(*path && *path != '/' && !strstr(path, "//") && strcmp(path, "..") != 0 && strncmp(path, "../", 3) != 0);
		must(!strstr(path, "/../") && path[strlen(path) - 1] != '/' &&
				(strlen(path) < 3 || strcmp(path + strlen(path) - 3, "/..")));
	}
}

static void decode(const struct guest_frame_view *v)
{
	struct buf again = BUF_INIT(MODEL_CALL_BYTES_MAX);
	struct err e;
	struct guest_hello hello;
	struct guest_setup setup;
	struct guest_setup_ack ack;
	struct guest_event event;
	struct model_call call;
	struct model_reply reply;

	switch (v->type) {
#define TRY(prefix, m, freeing)                                                                                                    \
	if (prefix##_decode(v->body, v->n, &m, &e) == 0) {                                                                         \
		prefix##_encode(&m, &again);                                                                                       \
		same(&again, v->body, v->n);                                                                                       \
		freeing;                                                                                                           \
	}                                                                                                                          \
	break

	case GF_HELLO: TRY(guest_hello, hello, );
	case GF_SETUP:
		TRY(guest_setup, setup, {
			check_paths(&setup);
			guest_setup_free(&setup);
		});
	case GF_SETUP_ACK: TRY(guest_setup_ack, ack, );
	case GF_EVENT: TRY(guest_event, event, );
	case GF_CALL_DATA: TRY(model_call, call, model_call_free(&call));
	case GF_REPLY_DATA: TRY(model_reply, reply, model_reply_free(&reply));
	default: break;
	}
	buf_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct guest_frame_view v;
	struct err e;

	while (guest_frame_next(data, size, &v, &e) == 1) {
		struct buf frame = BUF_INIT(GUEST_FRAME_MAX + GUEST_FRAME_HEAD);

		guest_frame_put(&frame, (enum guest_frame)v.type, v.stream, v.body, v.n);
		same(&frame, data, v.total);
		buf_free(&frame);
		decode(&v);
		data += v.total;
		size -= v.total;
	}
	return 0;
}
