/* What curlev.c (the loop) and curlev_call.c (one request: its options, its callbacks, its outcome) share. */
#ifndef EPH_CURLEV_INTERNAL_H
#define EPH_CURLEV_INTERNAL_H

#include "curlev.h"

#include <curl/curl.h>

struct curl_call {
	struct curl_call *prev, *next;
	struct curlev *c;
	CURL *easy;
	struct curl_slist *headers;
	void *body;              /* our copy; curl reads from it, once */
	size_t body_at;          /* of it, given to curl */
	struct curl_request req; /* callbacks, argument and limits only: its pointers to the caller's memory are cleared */
	struct err error;        /* what stopped the transfer on our side; code ERR_NONE otherwise */
	char curl_says[CURL_ERROR_SIZE];
	int status;         /* of the final head; 0 before */
	int64_t received;   /* body bytes */
	int64_t raw_before; /* bytes of its connection when the reply began; -1 = none yet */
	int fd;             /* curl's socket that it waits on; -1 = none yet */
	size_t head_bytes;
	bool head_over; /* the blank line of the final head was seen: later header lines are trailers */
	bool waiting;   /* not given to curl yet */
	bool added;
	bool cancelled; /* no callback any more; destroyed when curl is not busy */
	bool want_paused, is_paused, resume;
	bool refused; /* allow_addr said no to some address; the last is in refused_addr */
	char refused_addr[64];
};

int curl_call_make(const struct curl_request *req, struct curl_call **out, struct err *e) EPH_MUST_CHECK;
void curl_call_dispose(struct curl_call *call);
/* True when the transfer was not whole; *e then says why. */
bool curl_call_outcome(struct curl_call *call, CURLcode result, struct err *e);

#endif
