/*
 * What fuzz_api plays around the public interface: an HTTP server that is a struct instead of a socket (api_http.c), and a store
 * that answers by a script (api_store.c). Both check what they are given: nothing that a client said may reach them unchecked.
 */
#ifndef EPH_API_PLAY_H
#define EPH_API_PLAY_H

#include "common/httpd.h"
#include "common/ids.h"
#include "controld/secrets.h"
#include "fuzz.h"

#include <stdbool.h>

#define PLAY_PAIRS 64

struct play_pair {
	char *name, *value;
};

/* One exchange. Texts are owned. */
struct play {
	enum http_method method;
	char *path;
	struct play_pair query[PLAY_PAIRS], header[PLAY_PAIRS];
	size_t query_count, header_count;
	const uint8_t *body;
	size_t body_len;
	/* What came back. */
	unsigned answers;
	int status;
	bool streaming, ended;
	char *type; /* NULL = none */
	struct buf reply;
	struct play_pair out[PLAY_PAIRS];
	size_t out_count;
	void (*on_close)(void *arg);
	void *on_close_arg;
};

/* Reads a request: line, headers, empty line, body. False: httpd would have refused it. The body is a view into p. */
bool play_read(struct play *r, const uint8_t *p, size_t n);
void play_free(struct play *r);
const char *play_answered(const struct play *r, const char *header); /* value of an answer's header, or NULL */
void play_hand(struct play *r, bool operator_listener);              /* to the handler that api_start gave */

/* The store: what it does next is told by characters, one for each call: see api_store.c. */
void store_play_begin(const char *script, const struct secrets *secrets);
bool store_play_step(void);  /* delivers one outstanding answer; false when there is none */
void store_play_hints(void); /* "something changed" to every subscriber */
void store_play_end(void);   /* nothing may be left */
struct store_played {
	unsigned changes;    /* that were done */
	bool failed, broken; /* an answer said unavailable or conflict; internal */
};
const struct store_played *store_played(void);

#endif
