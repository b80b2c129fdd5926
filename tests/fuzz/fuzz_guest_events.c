/* link: ephproto */
/* sources: noded/broker/guest_json.c */
/* Guest events one after the other: whatever decodes must become an object of strict JSON that fits an event. First byte of each =
 * length of the next message / 4. */
/* reads: noded/broker/guest_json.c */
/* reached: 93 % of lines, 80 % of branches; the rest is memory and texts that no decoder lets through */
#include "noded/broker/guest_json.h"

#include "common/json.h"
#include "common/text.h"
#include "fuzz.h"

static void is_object(const struct buf *data)
{
	struct json *v;
	struct err e;

	must(json_parse((const char *)data->data, data->len, &v, &e) == 0);
	must(json_type(v) == JSON_OBJECT);
	json_free(v);
}

static void one(struct guest_tails *t, const uint8_t *p, size_t n)
{
	struct buf data = BUF_INIT(EVENT_BYTES_MAX - 512);
	struct guest_event g;
	enum event_type type;
	struct err e;

	if (guest_event_decode(p, n, &g, &e) < 0)
		return;
	for (uint8_t stream = 1; stream <= 2 && guest_json_ends_output(t, &g); stream++) {
		buf_reset(&data);
		if (guest_json_tail(t, stream, &data))
			is_object(&data);
	}
	buf_reset(&data);
	switch (guest_json(t, &g, &type, &data)) {
	case GUEST_JSON_EVENT:
		must(event_type_allows(type, EVENT_GUEST));
		is_object(&data);
		break;
	case GUEST_JSON_NOTHING: break;
	case GUEST_JSON_FAILED: must(false); break;
	}
	buf_free(&data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct guest_tails t = { .call_id = "" };

	while (size > 1) {
		size_t n = (size_t)data[0] * 4 + 1;

		if (n > size - 1)
			n = size - 1;
		one(&t, data + 1, n);
		data += 1 + n;
		size -= 1 + n;
	}
	return 0;
}
