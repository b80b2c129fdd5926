/*
 * The one door from foreign threads (nng callbacks) into a libevent loop: append an item, wake the loop by eventfd, nothing else.
 * inbox_post may be called from any thread; the handler runs on the loop's thread, once per item, in order.
 */
#ifndef EPH_INBOX_H
#define EPH_INBOX_H

#include "error.h"

struct event_base;
struct inbox;

struct inbox_item {
	struct inbox_item *next; /* the inbox's own */
};

int inbox_new(struct event_base *base, void (*handle)(void *arg, struct inbox_item *item), void *arg, struct inbox **out,
		struct err *e) EPH_MUST_CHECK;
void inbox_post(struct inbox *in, struct inbox_item *item); /* item is embedded in the caller's struct and passes to the handler */
void inbox_free(struct inbox *in);                          /* only when no other thread can post any more */

#endif
