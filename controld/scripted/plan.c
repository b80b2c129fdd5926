/* Decides what to answer (plan.h): a turns block, the sample, sh blocks, or how to use this. Pure. */
#include "plan.h"

#include "common/json.h"
#include "common/text.h"

int64_t plan_attempt(const char *request_id)
{
	const char *dash = request_id ? strrchr(request_id, '-') : NULL;
	struct err e;
	int64_t n;

	if (!dash || text_i64(dash + 1, 1, 1000000, &n, &e) != 0)
		return 1;
	return n;
}

void plan_free(struct plan *p)
{
	for (size_t i = 0; i < p->call_count; i++) {
		free(p->calls[i].id);
		free(p->calls[i].name);
		free(p->calls[i].arguments);
	}
	free(p->calls);
	free(p->http_body);
	free(p->raw);
	free(p->text);
	free(p->usage);
	memset(p, 0, sizeof(*p));
}

int plan_add_call(struct plan *p, const char *id, const char *name, const char *arguments, struct err *e)
{
	struct plan_call *call;

	if (p->call_count == PLAN_CALLS_MAX)
		return err_set(e, ERR_LIMIT, "more than %d tool calls in one reply", PLAN_CALLS_MAX);
	if (!p->calls)
		p->calls = calloc(PLAN_CALLS_MAX, sizeof(*p->calls));
	if (!p->calls)
		return err_set(e, ERR_NOMEM, "no memory");
	call = &p->calls[p->call_count++];
	call->id = strdup(id);
	call->name = strdup(name);
	call->arguments = strdup(arguments);
	return call->id && call->name && call->arguments ? 0 : err_set(e, ERR_NOMEM, "no memory");
}

int plan_add_shell(struct plan *p, size_t turn, const char *command, size_t n, struct err *e)
{
	struct buf b = BUF_INIT(PLAN_TEXT_MAX);
	char id[64];
	struct jw w;
	int rc = -1;

	jw_init(&w, &b);
	jw_object(&w);
	jw_kstrn(&w, "command", command, n);
	jw_close(&w);
	if (!jw_end(&w) || !buf_cstr(&b) || !text_fmt(id, sizeof(id), "call_%zu_%zu", turn + 1, p->call_count + 1))
		err_set(e, ERR_NOMEM, "no memory");
	else
		rc = plan_add_call(p, id, "shell", (const char *)b.data, e);
	buf_free(&b);
	return rc;
}

/* --- fenced blocks ----------------------------------------------------------------------------------------------------------- */

/* A fence line at s: up to three spaces, three or more backticks. Returns their number, 0 = none; *info is what follows. */
static size_t fence_line(const char *s, const char **info)
{
	size_t spaces = strspn(s, " "), ticks;

	if (spaces > 3)
		return 0;
	ticks = strspn(s + spaces, "`");
	*info = s + spaces + ticks;
	return ticks >= 3 ? ticks : 0;
}

static size_t line_len(const char *s)
{
	return strcspn(s, "\n");
}

static bool closes(const char *line, size_t open_ticks)
{
	const char *rest;

	if (fence_line(line, &rest) < open_ticks)
		return false;
	rest += strspn(rest, " \t\r");
	return *rest == '\n' || *rest == '\0';
}

bool fence_next(const char *s, size_t *at, struct fence *out)
{
	const char *p = s + *at, *info;
	size_t ticks;

	for (;; p += line_len(p) + 1) {
		ticks = fence_line(p, &info);
		/* An info string may hold no backtick: that is inline code. */
		if (ticks && !memchr(info, '`', line_len(info)))
			break;
		if (p[line_len(p)] == '\0') {
			*at = (size_t)(p + line_len(p) - s);
			return false;
		}
	}
	info += strspn(info, " \t");
	out->info = info;
	out->info_len = strcspn(info, " \t\r\n");
	p += line_len(p);
	if (*p == '\n')
		p++;
	out->body = p;
	while (*p && !closes(p, ticks)) {
		p += line_len(p);
		if (*p == '\n')
			p++;
	}
	out->body_len = (size_t)(p - out->body);
	if (out->body_len > 0 && out->body[out->body_len - 1] == '\n')
		out->body_len--;
	if (*p)
		p += line_len(p);
	if (*p == '\n')
		p++;
	*at = (size_t)(p - s);
	return true;
}

bool fence_is(const struct fence *f, const char *info)
{
	return f->info_len == strlen(info) && memcmp(f->info, info, f->info_len) == 0;
}

/* --- the decision ------------------------------------------------------------------------------------------------------------ */

/* Bytes / 4, rounded up, never none and never over what was allowed: so the broker's bound holds for it. */
static void count_tokens(const struct chat *c, struct plan *p)
{
	size_t bytes = p->text ? strlen(p->text) : 0;

	for (size_t i = 0; i < p->call_count; i++)
		bytes += strlen(p->calls[i].name) + strlen(p->calls[i].arguments);
	p->completion_tokens = (int64_t)(bytes / 4 + (bytes % 4 != 0));
	if (p->completion_tokens == 0)
		p->completion_tokens = 1;
	if (c->limit > 0 && p->completion_tokens > c->limit)
		p->completion_tokens = c->limit;
}

static bool find_turns(const char *prompt, struct fence *out)
{
	size_t at = 0;

	while (fence_next(prompt, &at, out)) {
		if (fence_is(out, "turns"))
			return true;
	}
	return false;
}

/* A script keeps its limit as a model does: what does not fit is not said, and the reason is "length". */
static void keep_limit(const struct chat *c, struct plan *p)
{
	size_t room = c->limit > 0 && c->limit < PLAN_TEXT_MAX / 4 ? (size_t)c->limit * 4 : PLAN_TEXT_MAX;
	size_t used = p->text ? strlen(p->text) : 0, keep = 0;

	if (used > room) {
		p->text[text_utf8_border(p->text, room)] = '\0';
		used = room;
		(void)!text_copy(p->finish, sizeof(p->finish), "length");
	}
	for (; keep < p->call_count; keep++) {
		size_t n = strlen(p->calls[keep].name) + strlen(p->calls[keep].arguments);

		if (n > room - used)
			break;
		used += n;
	}
	if (keep == p->call_count)
		return;
	(void)!text_copy(p->finish, sizeof(p->finish), "length");
	for (size_t i = keep; i < p->call_count; i++) {
		free(p->calls[i].id);
		free(p->calls[i].name);
		free(p->calls[i].arguments);
	}
	p->call_count = keep;
}

int plan_make(const struct chat *c, int64_t attempt, struct plan *out, struct err *e)
{
	struct fence turns;
	int rc;

	memset(out, 0, sizeof(*out));
	out->stream = c->stream;
	out->cut_after = -1;
	if (find_turns(c->prompt, &turns)) {
		/* A test decides for itself, limits included. */
		rc = plan_turns(c, attempt, turns.body, turns.body_len, out, e);
	} else {
		rc = sample_is(c->prompt) ? plan_sample(c, out, e) : plan_auto(c, out, e);
		if (rc == 0)
			keep_limit(c, out);
	}
	if (rc != 0) {
		plan_free(out);
		return -1;
	}
	count_tokens(c, out);
	return 0;
}
