/* link: ephproto */
/* sources: noded/broker/model_stream.c noded/broker/model_request.c noded/broker/model_error.c */
/* A provider's reply, streamed or whole, fed in pieces: first byte = size of a piece. Cutting must not change what comes out. */
/* reads: noded/broker/model_stream.c */
/* reached: 91 % of lines, 78 % of branches; the rest is memory and replies of megabytes */
#include "noded/broker/model_error.h"
#include "noded/broker/model_stream.h"

#include "common/text.h"
#include "fuzz.h"

struct outcome {
	int rc;
	bool has_usage;
	struct meter_tokens usage;
	struct model_reply reply;
};

static struct outcome run(const uint8_t *p, size_t n, size_t piece)
{
	struct outcome o = { .rc = 0 };
	struct model_stream *s = model_stream_new(NULL);
	struct err e;

	if (s == NULL)
		return o;
	for (size_t at = 0; at < n && o.rc == 0; at += piece)
		o.rc = model_stream_feed(s, p + at, n - at < piece ? n - at : piece, &e);
	if (o.rc == 0)
		o.rc = model_stream_end(s, &e);
	o.has_usage = model_stream_usage(s, &o.usage);
	if (o.rc == 0)
		o.rc = model_stream_take(s, 1, &o.reply, &e);
	model_stream_free(s);
	return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char text[321], param[65];
	struct outcome a, b;

	if (size == 0)
		return 0;
	a = run(data + 1, size - 1, size);
	b = run(data + 1, size - 1, data[0] % 64 + 1u);
	must(a.rc == b.rc);
	if (a.rc == 0) {
		must(a.has_usage == b.has_usage && a.reply.call_count == b.reply.call_count && a.reply.finish == b.reply.finish);
		must(strcmp(a.reply.content, b.reply.content) == 0);
		for (uint32_t i = 0; i < a.reply.call_count; i++)
			must(strcmp(a.reply.calls[i].arguments, b.reply.calls[i].arguments) == 0);
	}
	model_reply_free(&a.reply);
	model_reply_free(&b.reply);
	model_error_text((const char *)data + 1, size - 1, "\"choices\":", text, param);
	must(text_utf8_clean(text, strlen(text)));
	return 0;
}
