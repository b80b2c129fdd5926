/* Guest events as JSON (guest_json.h). Called by events.c on the broker's thread; owns nothing but what the caller gives. */
#include "guest_json.h"

#include "common/json.h"
#include "common/text.h"

/* "key": the text, or "key_base64": its bytes. Control characters grow sixfold in JSON, so a long text of them goes as bytes too.
 */
static void put_bytes(struct jw *w, const char *key, const char *key64, const uint8_t *p, size_t n)
{
	struct buf b64 = BUF_INIT(EVENT_BYTES_MAX);
	size_t odd = 0;

	for (size_t i = 0; i < n; i++)
		odd += p[i] < 0x20 && p[i] != '\n' && p[i] != '\t' && p[i] != '\r';
	if (text_utf8_clean((const char *)p, n) && n + odd * 5 <= (size_t)EVENT_BYTES_MAX / 2) {
		jw_kstrn(w, key, (const char *)p, n);
		return;
	}
	if (text_b64(&b64, p, n) && buf_cstr(&b64) != NULL)
		jw_kstrn(w, key64, (const char *)b64.data, b64.len);
	else
		w->failed = true;
	buf_free(&b64);
}

/* A short string of the guest's, shown safely whatever its bytes are. */
static void put_safe(struct jw *w, const char *key, const char *s)
{
	struct buf safe = BUF_INIT(8192);

	if (text_safe(&safe, s, strlen(s), false))
		jw_kstrn(w, key, safe.len > 0 ? (const char *)safe.data : "", safe.len);
	else
		jw_kstr(w, key, "");
	buf_free(&safe);
}

static void output_object(struct buf *data, const char *call_id, uint8_t stream, const uint8_t *p, size_t n, bool *failed)
{
	struct jw w;

	jw_init(&w, data);
	jw_object(&w);
	put_safe(&w, "call_id", call_id);
	jw_kstr(&w, "stream", stream == 2 ? "stderr" : "stdout");
	put_bytes(&w, "text", "base64", p, n);
	jw_close(&w);
	*failed = !jw_end(&w);
}

bool guest_json_ends_output(const struct guest_tails *t, const struct guest_event *g)
{
	if (t->len[1] == 0 && t->len[2] == 0)
		return false;
	return g->kind != GE_SHELL_OUTPUT || strcmp(g->call_id, t->call_id) != 0;
}

bool guest_json_tail(struct guest_tails *t, uint8_t stream, struct buf *data)
{
	uint8_t n = t->len[stream];
	bool failed;

	if (n == 0)
		return false;
	t->len[stream] = 0;
	output_object(data, t->call_id, stream, t->bytes[stream], n, &failed);
	return !failed;
}

static enum guest_json_result output(struct guest_tails *t, const struct guest_event *g, struct buf *data)
{
	struct buf whole = BUF_INIT(EVENT_TEXT_MAX + 8);
	uint8_t stream = g->stream == 2 ? 2 : 1;
	size_t border;
	bool failed;

	if (!text_copy(t->call_id, sizeof(t->call_id), g->call_id) || !buf_add(&whole, t->bytes[stream], t->len[stream]) ||
			!buf_add(&whole, g->text, g->text_len)) {
		buf_free(&whole);
		return GUEST_JSON_FAILED;
	}
	t->len[stream] = 0;
	border = text_utf8_border((const char *)whole.data, whole.len);
	/* Only a text is worth waiting for: of bytes that are none, all go out now. */
	if (border < whole.len && whole.len - border < sizeof(t->bytes[stream]) &&
			text_utf8_clean((const char *)whole.data, border)) {
		t->len[stream] = (uint8_t)(whole.len - border);
		memcpy(t->bytes[stream], whole.data + border, t->len[stream]);
		whole.len = border;
	}
	if (whole.len == 0) {
		buf_free(&whole);
		return GUEST_JSON_NOTHING;
	}
	output_object(data, g->call_id, stream, whole.data, whole.len, &failed);
	buf_free(&whole);
	return failed ? GUEST_JSON_FAILED : GUEST_JSON_EVENT;
}

static void exited(struct jw *w, const struct guest_event *g)
{
	if (g->has_signal)
		jw_kint(w, "signal", g->code);
	else
		jw_kint(w, "exit_code", g->code);
	jw_kint(w, "duration_ms", g->duration_ms);
	jw_kint(w, "cut_bytes", g->cut_bytes > INT64_MAX ? INT64_MAX : (int64_t)g->cut_bytes);
	if (g->timed_out)
		jw_kbool(w, "timed_out", true);
}

static void tool_called(struct jw *w, const struct guest_event *g)
{
	put_safe(w, "tool", g->name);
	if (g->path[0] != '\0')
		put_safe(w, "path", g->path);
	if (g->bytes >= 0)
		jw_kint(w, "bytes", g->bytes);
	if (g->text_len > 0)
		put_bytes(w, "error", "error_base64", g->text, g->text_len);
}

enum guest_json_result guest_json(struct guest_tails *t, const struct guest_event *g, enum event_type *type, struct buf *data)
{
	struct jw w;

	if (g->kind == GE_SHELL_OUTPUT) {
		*type = EV_SHELL_OUTPUT;
		return output(t, g, data);
	}
	jw_init(&w, data);
	jw_object(&w);
	if (g->kind != GE_NOTE)
		put_safe(&w, "call_id", g->call_id);
	switch (g->kind) {
	case GE_SHELL_STARTED:
		*type = EV_SHELL_STARTED;
		put_bytes(&w, "command", "command_base64", g->text, g->text_len);
		break;
	case GE_SHELL_EXITED:
		*type = EV_SHELL_EXITED;
		exited(&w, g);
		break;
	case GE_TOOL_CALLED:
		*type = EV_TOOL_CALLED;
		tool_called(&w, g);
		break;
	case GE_NOTE:
	case GE_SHELL_OUTPUT:
		*type = EV_WORKER_NOTE;
		put_bytes(&w, "text", "base64", g->text, g->text_len);
		break;
	}
	jw_close(&w);
	return jw_end(&w) ? GUEST_JSON_EVENT : GUEST_JSON_FAILED;
}
