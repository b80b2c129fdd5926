/* link: ephproto */
/* The guest channel as the host reads it: a stream of frames, each body given to the decoder of its type. */
#include "proto/guest.h"
#include "proto/model.h"

static void decode(const struct guest_frame_view *v)
{
	struct err e;
	struct guest_hello hello;
	struct guest_setup setup;
	struct guest_setup_ack ack;
	struct guest_event event;
	struct model_call call;
	struct model_reply reply;

	switch (v->type) {
	case GF_HELLO: (void)!guest_hello_decode(v->body, v->n, &hello, &e); break;
	case GF_SETUP:
		if (guest_setup_decode(v->body, v->n, &setup, &e) == 0)
			guest_setup_free(&setup);
		break;
	case GF_SETUP_ACK: (void)!guest_setup_ack_decode(v->body, v->n, &ack, &e); break;
	case GF_EVENT: (void)!guest_event_decode(v->body, v->n, &event, &e); break;
	case GF_CALL_DATA:
		if (model_call_decode(v->body, v->n, &call, &e) == 0)
			model_call_free(&call);
		break;
	case GF_REPLY_DATA:
		if (model_reply_decode(v->body, v->n, &reply, &e) == 0)
			model_reply_free(&reply);
		break;
	default: break;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct guest_frame_view v;
	struct err e;

	while (guest_frame_next(data, size, &v, &e) == 1) {
		decode(&v);
		data += v.total;
		size -= v.total;
	}
	return 0;
}
