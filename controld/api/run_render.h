/*
 * A run as clients see it: from the store's row to JSON. Pure, so that every rule (what a cost is before it is final, what lists
 * leave out) is tested by table.
 */
#ifndef CONTROLD_API_RUN_RENDER_H
#define CONTROLD_API_RUN_RENDER_H

#include "common/json.h"
#include "controld/store/store.h"

#include <stdbool.h>

#define RUN_LIST_PROMPT_MAX 200 /* characters of a prompt in a list */

struct run_view {
	const char *public_url;
	bool hide_node;
	bool in_list; /* no output, files, request; the prompt cut */
};

/* Writes one object. */
void run_render(struct jw *w, const struct store_run *run, const struct run_view *view);

/* What `cost` shows: the charge once the run has ended, before that the reservation split as a run of full length would use it, so
 * that it is never below the final cost and its parts add up. */
struct cost run_shown_cost(const struct store_run *run);
/* Appends p as clean UTF-8: bytes that are none, and NUL, become U+FFFD. */
bool utf8_mend(struct buf *out, const uint8_t *p, size_t n);

#endif
