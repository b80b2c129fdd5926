/*
 * What the script will answer: a pure function from a request to a plan. The server (server.c) only carries it out. auto.c,
 * sample.c and turns.c fill plans; render.c turns one into bytes.
 */
#ifndef CONTROLD_SCRIPTED_PLAN_H
#define CONTROLD_SCRIPTED_PLAN_H

#include "chat.h"

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

#define PLAN_CALLS_MAX 256 /* tool calls in one reply; over the broker's own bound, so that a test can pass it */
#define PLAN_HEADERS_MAX 16
#define PLAN_TEXT_MAX (8 * 1024 * 1024) /* of any one string */
#define PLAN_DELAY_MAX_MS 600000
#define PLAN_IS_A_SCRIPT "scripted: a script, not a model"

struct plan_call {
	char *id, *name, *arguments; /* owned */
};

struct plan_header {
	char name[65], value[257];
};

struct plan {
	/* An error or another answer instead of a completion; 0 = a completion. */
	int http_status;
	struct plan_header headers[PLAN_HEADERS_MAX];
	size_t header_count;
	char *http_body; /* owned; may be NULL */
	bool http_json;

	char *raw;               /* owned: sent as the body, whatever it is; NULL = none */
	char *text;              /* owned; NULL = none */
	struct plan_call *calls; /* owned array */
	size_t call_count;
	char finish[33]; /* "" = tool_calls when there are calls, else stop */
	bool no_usage;
	char *usage;               /* owned JSON; NULL = counted */
	int64_t completion_tokens; /* counted */
	bool stream;               /* as asked, unless the turn says otherwise */
	int64_t delay_ms;          /* before the head */
	int64_t chunk_delay_ms;    /* before each chunk but the first */
	int64_t cut_after;         /* bytes of the body, then the connection is cut; -1 = whole */
};

/* attempt: 1.. of this call, from the request's X-Request-Id. ERR_INVALID: the prompt's turns are wrong (answered with 400). */
int plan_make(const struct chat *c, int64_t attempt, struct plan *out, struct err *e) EPH_MUST_CHECK;
void plan_free(struct plan *p);
/* "<run>-<call>-<attempt>" -> attempt; 1 when it is anything else. */
int64_t plan_attempt(const char *request_id);

/* Between the files of this folder. */
int plan_add_call(struct plan *p, const char *id, const char *name, const char *arguments, struct err *e) EPH_MUST_CHECK;
int plan_add_shell(struct plan *p, size_t turn, const char *command, size_t n, struct err *e) EPH_MUST_CHECK;
int plan_auto(const struct chat *c, struct plan *out, struct err *e) EPH_MUST_CHECK; /* auto.c */
bool sample_is(const char *prompt);                                                  /* sample.c */
int plan_sample(const struct chat *c, struct plan *out, struct err *e) EPH_MUST_CHECK;
int plan_turns(const struct chat *c, int64_t attempt, const char *block, size_t n, struct plan *out,
		struct err *e) EPH_MUST_CHECK; /* turns.c */

/* A fenced block of a prompt: ``` or more, an info word, lines, the same fence. */
struct fence {
	const char *info;
	size_t info_len;
	const char *body; /* without the last newline */
	size_t body_len;
};
/* The next block at or after *at (an offset into s), which moves behind it. False at the end. An open block runs to the end. */
bool fence_next(const char *s, size_t *at, struct fence *out);
bool fence_is(const struct fence *f, const char *info);

/* render.c: bytes of one reply. */
struct render {
	struct buf *chunks; /* owned array: server-sent events, or one whole body */
	size_t count;
};
int render_reply(const struct chat *c, const struct plan *p, const char *request_id, int64_t created, struct render *out,
		struct err *e) EPH_MUST_CHECK;
void render_free(struct render *r);

#endif
