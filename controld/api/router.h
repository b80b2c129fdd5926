/*
 * Which handler answers a method and a path on a listener. The table is in routes.c; each column decides something before the
 * handler runs (who may, how large the body may be, what it must be, which query parameters there are), so that no handler can
 * forget it: ROUTE has no defaults, and a zero column does not compile. Pure.
 */
#ifndef CONTROLD_API_ROUTER_H
#define CONTROLD_API_ROUTER_H

#include "common/buf.h"
#include "common/httpd.h"

#include <stdbool.h>
#include <stddef.h>

#define ROUTE_PARAMS_MAX 2
#define ROUTE_PARAM_SIZE 256 /* a longer part of a path matches nothing */

enum api_listener { LISTENER_MEMBER = 1, LISTENER_OPERATOR = 2, LISTENER_BOTH = 3 };

/* Who may call. Each member role includes those before it; NEED_OPERATOR is an operator key and nothing else. */
enum api_need { NEED_NONE = 1, NEED_VIEWER, NEED_MEMBER, NEED_ADMIN, NEED_OPERATOR };

enum api_content {
	CONTENT_NONE = 1, /* takes no body: one that is not empty is refused */
	CONTENT_JSON,     /* application/json, must be there */
	CONTENT_JSON_OR_EMPTY,
	CONTENT_BYTES, /* application/octet-stream */
};

struct api_req;

struct route {
	const char *pattern; /* "/v1/runs/{id}/events"; "{name...}" at the end takes the rest of the path */
	const char *query;   /* parameters that it knows, separated by blanks; "metadata.*" = any that begins so; "" = none */
	void (*handle)(struct api_req *r);
	size_t body_max;         /* bytes; 1 or more even where no body is taken */
	enum http_method method; /* GET answers HEAD as well */
	enum api_listener listeners;
	enum api_need need;
	enum api_content content;
};

#define ROUTE_SET(x) ((x) + 0 * sizeof(char[(x) ? 1 : -1]))
#define ROUTE(m, p, l, n, max, c, q, fn)                                                                                           \
	{                                                                                                                          \
		.method = ROUTE_SET(m), .pattern = (p), .listeners = ROUTE_SET(l), .need = ROUTE_SET(n),                           \
		.body_max = ROUTE_SET(max), .content = ROUTE_SET(c), .query = (q), .handle = (fn)                                  \
	}

struct route_params {
	char value[ROUTE_PARAMS_MAX][ROUTE_PARAM_SIZE];
};

struct route_match {
	const struct route *route; /* NULL: see `allowed` */
	unsigned allowed;          /* methods (enum http_method bits) of this path on this listener; 0 = no such path */
	bool other_listener;       /* no such path here, but on the other listener */
	struct route_params params;
};

void route_find(const struct route *table, size_t count, enum api_listener listener, enum http_method method, const char *path,
		struct route_match *out);
/* "GET, HEAD, OPTIONS" for Allow. */
bool route_allow(unsigned allowed, struct buf *out);
bool route_knows_query(const struct route *r, const char *name);
/* "viewer", "member", "admin", "operator". */
const char *api_need_name(enum api_need n);

extern const struct route api_routes[];
extern const size_t api_route_count;

#endif
