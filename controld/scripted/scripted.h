/*
 * The scripted model provider: OpenAI-compatible on a listener of its own, behind a bearer token. It is a script, not a model, and
 * says so in every answer. It exists so that the broker's real path (HTTP, streaming, usage, prices) is exercised without a
 * provider. Made by main.c when scripted_listen is set; on controld's loop; never blocks after the start. README.md has the format
 * of prompts.
 */
#ifndef CONTROLD_SCRIPTED_H
#define CONTROLD_SCRIPTED_H

#include "common/error.h"

struct event_base;
struct scripted;

struct scripted_options {
	struct event_base *base;
	const char *listen;     /* host:port, port 0 allowed */
	const char *token_file; /* first line = the bearer; 0600 or stricter */
};

int scripted_start(const struct scripted_options *opt, struct scripted **out, struct err *e) EPH_MUST_CHECK;
/* For `-t`: whether the token file is usable. Blocks. */
int scripted_check_token(const char *token_file, struct err *e) EPH_MUST_CHECK;
const char *scripted_address(const struct scripted *s); /* host:port as bound */
void scripted_drain(struct scripted *s);
void scripted_free(struct scripted *s); /* ends what is under way; NULL is allowed */

#endif
