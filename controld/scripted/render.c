/* Turns a plan into the bytes of a chat completion: one JSON body, or a list of server-sent events (plan.h). Pure. */
#include "plan.h"

#include "common/text.h"

#define PIECES 32    /* a text goes out in about so many deltas ... */
#define PIECE_MIN 12 /* ... but not smaller than this */

struct writer {
	const struct chat *c;
	const struct plan *p;
	char id[160];
	int64_t created;
	struct render *out;
	size_t cap;
	bool failed;
};

static const char *finish_of(const struct plan *p)
{
	return p->finish[0] ? p->finish : p->call_count > 0 ? "tool_calls" : "stop";
}

static struct buf *new_chunk(struct writer *w)
{
	struct render *r = w->out;

	if (r->count == w->cap) {
		size_t cap = w->cap ? w->cap * 2 : 64;
		struct buf *more = realloc(r->chunks, cap * sizeof(*more));

		if (!more) {
			w->failed = true;
			return NULL;
		}
		r->chunks = more;
		w->cap = cap;
	}
	buf_init(&r->chunks[r->count], PLAN_TEXT_MAX * 6);
	return &r->chunks[r->count++];
}

static void put_usage(const struct writer *w, struct jw *j)
{
	const struct plan *p = w->p;

	if (p->usage) {
		jw_key(j, "usage");
		jw_raw(j, p->usage, strlen(p->usage));
		return;
	}
	jw_kobject(j, "usage");
	jw_kint(j, "prompt_tokens", w->c->prompt_tokens);
	jw_kint(j, "completion_tokens", p->completion_tokens);
	jw_kint(j, "total_tokens", w->c->prompt_tokens + p->completion_tokens);
	jw_kobject(j, "prompt_tokens_details");
	jw_kint(j, "cached_tokens", 0);
	jw_close(j);
	jw_close(j);
}

static void begin_object(const struct writer *w, struct jw *j, const char *object)
{
	jw_object(j);
	jw_kstr(j, "id", w->id);
	jw_kstr(j, "object", object);
	jw_kint(j, "created", w->created);
	jw_kstr(j, "model", w->c->model);
	jw_kstr(j, "system_fingerprint", PLAN_IS_A_SCRIPT);
}

/* --- one body ---------------------------------------------------------------------------------------------------------------- */

static void put_calls(const struct plan *p, struct jw *j)
{
	jw_karray(j, "tool_calls");
	for (size_t i = 0; i < p->call_count; i++) {
		jw_object(j);
		jw_kstr(j, "id", p->calls[i].id);
		jw_kstr(j, "type", "function");
		jw_kobject(j, "function");
		jw_kstr(j, "name", p->calls[i].name);
		jw_kstr(j, "arguments", p->calls[i].arguments);
		jw_close(j);
		jw_close(j);
	}
	jw_close(j);
}

static void write_whole(struct writer *w)
{
	struct buf *b = new_chunk(w);
	struct jw j;

	if (!b)
		return;
	jw_init(&j, b);
	begin_object(w, &j, "chat.completion");
	jw_karray(&j, "choices");
	jw_object(&j);
	jw_kint(&j, "index", 0);
	jw_kobject(&j, "message");
	jw_kstr(&j, "role", "assistant");
	jw_kstr(&j, "content", w->p->text);
	if (w->p->call_count > 0)
		put_calls(w->p, &j);
	jw_close(&j);
	jw_kstr(&j, "finish_reason", finish_of(w->p));
	jw_close(&j);
	jw_close(&j);
	if (!w->p->no_usage)
		put_usage(w, &j);
	jw_close(&j);
	if (!jw_end(&j))
		w->failed = true;
}

/* --- a stream ---------------------------------------------------------------------------------------------------------------- */

/* One event around the choices: `put` writes the delta's members, finish the reason. */
static void event_begin(struct writer *w, struct buf *b, struct jw *j)
{
	buf_add_str(b, "data: ");
	jw_init(j, b);
	begin_object(w, j, "chat.completion.chunk");
	jw_karray(j, "choices");
}

static void event_end(struct writer *w, struct buf *b, struct jw *j)
{
	jw_close(j);
	if (!jw_end(j) || !buf_add_str(b, "\n\n"))
		w->failed = true;
}

static void delta_begin(struct writer *w, struct buf *b, struct jw *j)
{
	event_begin(w, b, j);
	jw_object(j);
	jw_kint(j, "index", 0);
	jw_kobject(j, "delta");
}

static void delta_end(struct writer *w, struct buf *b, struct jw *j, const char *finish)
{
	jw_close(j);
	jw_kstr(j, "finish_reason", finish);
	jw_close(j);
	jw_close(j);
	event_end(w, b, j);
}

static void write_role(struct writer *w)
{
	struct buf *b = new_chunk(w);
	struct jw j;

	if (!b)
		return;
	delta_begin(w, b, &j);
	jw_kstr(&j, "role", "assistant");
	jw_kstr(&j, "content", w->p->text ? "" : NULL);
	delta_end(w, b, &j, NULL);
}

static void write_text(struct writer *w, const char *s)
{
	size_t left = strlen(s), piece = left / PIECES > PIECE_MIN ? left / PIECES : PIECE_MIN;
	struct buf *b;
	struct jw j;

	while (left > 0 && !w->failed && (b = new_chunk(w)) != NULL) {
		size_t n = left <= piece ? left : text_utf8_border(s, piece);

		delta_begin(w, b, &j);
		jw_kstrn(&j, "content", s, n);
		delta_end(w, b, &j, NULL);
		s += n;
		left -= n;
	}
}

static void write_call_piece(struct writer *w, size_t i, bool head, const char *s, size_t n)
{
	const struct plan_call *call = &w->p->calls[i];
	struct buf *b = new_chunk(w);
	struct jw j;

	if (!b)
		return;
	delta_begin(w, b, &j);
	jw_karray(&j, "tool_calls");
	jw_object(&j);
	jw_kint(&j, "index", (int64_t)i);
	if (head) {
		jw_kstr(&j, "id", call->id);
		jw_kstr(&j, "type", "function");
	}
	jw_kobject(&j, "function");
	if (head)
		jw_kstr(&j, "name", call->name);
	jw_kstrn(&j, "arguments", s, n);
	jw_close(&j);
	jw_close(&j);
	jw_close(&j);
	delta_end(w, b, &j, NULL);
}

static void write_call(struct writer *w, size_t i)
{
	const char *s = w->p->calls[i].arguments;
	size_t n = strlen(s), half = n > 1 ? text_utf8_border(s, n / 2) : n;

	write_call_piece(w, i, true, "", 0);
	if (half > 0)
		write_call_piece(w, i, false, s, half);
	if (n > half)
		write_call_piece(w, i, false, s + half, n - half);
}

static void write_finish(struct writer *w)
{
	struct buf *b = new_chunk(w);
	struct jw j;

	if (!b)
		return;
	delta_begin(w, b, &j);
	delta_end(w, b, &j, finish_of(w->p));
}

static void write_usage_event(struct writer *w)
{
	struct buf *b = new_chunk(w);
	struct jw j;

	if (!b)
		return;
	event_begin(w, b, &j);
	jw_close(&j);
	put_usage(w, &j);
	event_end(w, b, &j);
}

static void write_stream(struct writer *w)
{
	struct buf *b;

	write_role(w);
	if (w->p->text)
		write_text(w, w->p->text);
	for (size_t i = 0; i < w->p->call_count; i++)
		write_call(w, i);
	write_finish(w);
	if (w->c->include_usage && !w->p->no_usage)
		write_usage_event(w);
	b = new_chunk(w);
	if (b && !buf_add_str(b, "data: [DONE]\n\n"))
		w->failed = true;
}

static void write_raw(struct writer *w)
{
	struct buf *b = new_chunk(w);

	if (b && !buf_add_str(b, w->p->raw))
		w->failed = true;
}

int render_reply(const struct chat *c, const struct plan *p, const char *request_id, int64_t created, struct render *out,
		struct err *e)
{
	struct writer w = { .c = c, .p = p, .created = created, .out = out };

	memset(out, 0, sizeof(*out));
	if (!text_fmt(w.id, sizeof(w.id), "chatcmpl-%.120s", request_id && *request_id ? request_id : "scripted"))
		return err_set(e, ERR_INTERNAL, "id");
	if (p->raw)
		write_raw(&w);
	else if (p->stream)
		write_stream(&w);
	else
		write_whole(&w);
	for (size_t i = 0; i < out->count; i++)
		w.failed = w.failed || out->chunks[i].failed;
	if (!w.failed)
		return 0;
	render_free(out);
	return err_set(e, ERR_NOMEM, "the reply does not fit");
}

void render_free(struct render *r)
{
	for (size_t i = 0; i < r->count; i++)
		buf_free(&r->chunks[i]);
	free(r->chunks);
	memset(r, 0, sizeof(*r));
}
