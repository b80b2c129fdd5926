/* What httpd.c (server), httpd_conn.c (connections), httpd_req.c (requests and replies) and httpd_scan.c (framing) share. */
#ifndef EPH_HTTPD_INTERNAL_H
#define EPH_HTTPD_INTERNAL_H

#include "httpd.h"
#include "httpd_scan.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>

#define HTTP_QUERY_MAX 64

/*
 *            bytes break a rule, or are too many, while no request is being answered
 *   OPEN -------------------------------------------------------------------------> CONDEMNED: our own answer, then closed
 *    |  \
 *    |   the same behind requests that were good ---> LAST: those are answered, then closed
 *    |
 *    evhttp let go of it (any state) --> GONE: released at the end of the turn
 */
enum conn_state { CONN_OPEN, CONN_LAST, CONN_CONDEMNED, CONN_GONE };

struct http_conn {
	struct http_conn *prev, *next, *next_todo;
	struct httpd *h;
	struct bufferevent *bev;         /* with a reference of our own, so that it never dangles */
	struct evhttp_connection *evcon; /* NULL until its first request was whole */
	struct evhttp_request *ev;       /* being answered */
	struct http_req *req;            /* what the handler holds; NULL once it was answered */
	struct http_scan scan;
	enum conn_state state;
	bool todo, kill;
	uint64_t handled;               /* requests given to the handler */
	size_t held;                    /* bytes of requests in memory, as counted in httpd.held */
	int64_t started_ms;             /* first byte of the unfinished request; 0 when there is none */
	int64_t condemned_ms, reply_ms; /* 0: not */
	struct {
		bufferevent_data_cb read, write;
		bufferevent_event_cb event;
		void *arg;
	} evhttp; /* its callbacks while the connection is CONDEMNED */
};

struct http_pair {
	const char *name, *value;
};

struct http_req {
	struct http_conn *conn;    /* NULL: the client has gone */
	struct evhttp_request *ev; /* NULL in an answer to broken bytes */
	bool raw;                  /* such an answer */
	bool streaming;
	bool wants_close;
	enum http_method method;
	char *path;  /* decoded */
	char *query; /* decoded in place; pairs point into it */
	struct http_pair pairs[HTTP_QUERY_MAX];
	size_t pair_count;
	char peer[64];
	struct evbuffer *raw_head; /* headers of a raw answer */
	void *user;
	void (*free_user)(void *user);
	void (*on_close)(void *arg);
	void *on_close_arg;
};

struct httpd {
	struct httpd *next; /* of this thread */
	struct event_base *base;
	struct httpd_options opt;
	struct evhttp *http;
	struct evconnlistener *listener;
	struct evhttp_bound_socket *bound; /* NULL: accepts no more */
	uint16_t port;
	struct event *sweep, *later;
	struct http_conn *conns, *todo;
	struct http_conn **by_fd;
	size_t by_fd_size;
	int count;
	size_t held;
	bool full; /* the listener sleeps because of max_connections */
};

/* httpd_conn.c */
struct bufferevent *http_conn_make(struct event_base *base, void *arg); /* evhttp's bevcb; arg is the httpd */
struct http_conn *http_conn_find(struct httpd *h, struct bufferevent *bev);
void http_conn_attach(struct http_conn *c, struct evhttp_request *ev); /* a whole request came */
void http_conn_todo(struct http_conn *c);
void http_conn_work(struct httpd *h); /* what was noted during the turn */
void http_conn_sweep(struct httpd *h);
void http_conn_release(struct http_conn *c);
void http_conn_watch(struct http_conn *c); /* learn of a client that goes away while nothing is sent */
void http_conn_replying(struct http_conn *c, bool streaming);
bool http_conn_closing(const struct http_conn *c); /* the reply under way is the last one */

/* httpd_req.c */
int http_req_make(struct http_conn *c, struct evhttp_request *ev, struct http_req **out, const char **problem);
void http_req_refuse(struct httpd *h, struct http_req *r, int status, const char *detail);
void http_req_gone(struct http_req *r, struct evhttp_request *owned); /* the client went away */

#endif
