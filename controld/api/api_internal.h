/*
 * What the files of this folder share: the api, a request on its way, how a handler asks the store and how it answers.
 *
 * The life of a request: httpd calls api.c, which finds the route, asks who it is (auth.c), checks body, type and query and calls
 * the handler. A handler asks the store with api_hold(r) as the argument and returns; in the callback api_back gives the request
 * back, or NULL when there is nobody to answer any more. Every way ends in exactly one answer (api_reply, api_problem, ...), and
 * after it r must not be touched.
 */
#ifndef CONTROLD_API_INTERNAL_H
#define CONTROLD_API_INTERNAL_H

#include "api.h"
#include "auth.h"
#include "common/httpd.h"
#include "common/ids.h"
#include "common/json.h"
#include "problem.h"
#include "router.h"
#include "run_request.h"
#include "store/store.h"

#include <stdbool.h>
#include <stdint.h>

#define API_REPLY_MAX                                                                                                              \
	(24 * 1024 * 1024) /* one JSON answer: 1 MiB of output may grow sixfold in escapes, a page of events 4 MiB                 \
			    */
#define API_PUBLIC_URL_MAX 513
#define API_STREAMS_MAX 10000 /* event streams and waits of one process where the configuration says nothing */

struct api {
	struct api_options opt;
	struct httpd *member, *operator_;
	char public_url[API_PUBLIC_URL_MAX];
	char address[300], operator_address[300];
	struct run_limits limits;
	struct auth_cache *auth;
	struct api_req *requests; /* all that are not answered */
	size_t request_count;
	size_t stream_count; /* event streams and waits; at most stream_max, more are told to come back */
	size_t stream_max;
	struct event_stream *streams;
	struct run_wait *waits;
	struct worker *worker;  /* reads large bodies */
	struct creation *large; /* creates under way that have one: create.c */
	size_t large_max;       /* bytes of large bodies of all creates under way: half of what may be held of bodies */
	uint64_t answered[API_CLASSES][API_CODES];
	bool draining;
};

struct api_req {
	struct api *api;
	struct http_req *http;        /* NULL once it is answered or the client is gone */
	struct api_req *next, **prev; /* in api->requests; prev NULL when out of it */
	const struct route *route;
	enum api_listener listener;
	struct route_params params;
	struct store_principal who; /* set before the handler when the route needs a key */
	uint8_t key_hash[SECRETS_HASH_LEN];
	char id[ID_MAX]; /* answered as Request-Id and request_id */
	unsigned holds;  /* store callbacks that are still to come */
	void *state;     /* the handler's own; freed with the request */
	void (*free_state)(void *state);
	struct run_wait *wait;   /* runs_wait.c's, while it waits */
	char waited_for[ID_MAX]; /* and what it answers with afterwards */
	int waited_status;
	void (*on_gone)(struct api_req *r); /* the client went away; may be NULL */
};

/* --- api.c only ----------------------------------------------------------------------------------------------------------------
 */
void api_req_start(struct api_req *r); /* http and api are set */
void api_enter(struct api_req *r);     /* we know who asks: body, query, then the handler */
void api_req_gone(struct api_req *r);

void api_count(struct api *a, const struct route *route, int status); /* route NULL: none was found */

/* --- asking ------------------------------------------------------------------------------------------------------------- */
/* The argument for a store callback: r stays until the callback has run. */
void *api_hold(struct api_req *r);
/* After the call: on -1 the callback never comes, and the request is answered with what `e` says. */
void api_asked(int rc, struct api_req *r, const struct err *e);
/* In the callback: r, or NULL when the client is gone (r may be freed then) or when `e` says that it failed (answered here). */
struct api_req *api_back(void *arg, const struct err *e) EPH_MUST_CHECK;
void api_set_state(struct api_req *r, void *state, void (*free_state)(void *state));

/* --- answering; r is gone after each ------------------------------------------------------------------------------------ */
void api_header(struct api_req *r, const char *name, const char *value);
/* Takes the bytes of `json` (freed here). A buffer that failed becomes a 500. */
void api_reply(struct api_req *r, int status, struct buf *json);
void api_reply_empty(struct api_req *r, int status);
void api_reply_text(struct api_req *r, int status, const char *text);
void api_problem(struct api_req *r, enum problem p, const char *fmt, ...) EPH_PRINTF(3, 4);
/* Answers 400 with all of `fe` and frees it. */
void api_problem_fields(struct api_req *r, struct field_errors *fe);
/* Translates an error of store or library. */
void api_error(struct api_req *r, const struct err *e);
void api_retry_after(struct api_req *r, int seconds); /* before the answer */
/* Hands the connection over to a stream: r is gone, *http is the caller's (with no close callback set). */
struct http_req *api_take_http(struct api_req *r);
/* The headers that every answer has, for streams. */
void api_common_headers(const struct api *a, struct http_req *http, const char *request_id);
/* The answer to what store_done says, where it is not STORE_DONE. `what` names the thing ("organization"). */
void api_done_problem(struct api_req *r, const struct store_done *d, const char *what);

/* --- reading the request -------------------------------------------------------------------------------------------------------
 */
static inline const char *api_param(const struct api_req *r, size_t i)
{
	return r->params.value[i];
}
/* ?limit= within 1..max; adds a query error when it is not. */
int api_query_int(struct api_req *r, const char *name, int64_t min, int64_t max, int64_t fallback, int64_t *out,
		struct field_errors *fe);
bool api_wants_sse(const struct api_req *r); /* Accept names text/event-stream */

/* A JSON body with few fields (operator and key calls). */
struct body {
	struct json *doc; /* owned; NULL when there is none */
	bool broken;      /* no object: nothing is said to be missing in it */
	struct field_errors errors;
};
/* Parses; `known` lists the field names separated by blanks, another one is an error. Then the readers, then body_ok. */
void body_open(struct body *b, struct api_req *r, const char *known);
/* True: use the values, then body_free. False: r is answered with all errors, b is freed. */
bool body_ok(struct body *b, struct api_req *r) EPH_MUST_CHECK;
void body_free(struct body *b);
bool body_has(const struct body *b, const char *name); /* there and not null */
/* NULL when absent. `min` bytes 0 allows "". */
const char *body_text(struct body *b, const char *name, size_t min, size_t max, bool required);
int64_t body_int(struct body *b, const char *name, int64_t min, int64_t max, int64_t fallback, bool required);
int body_flag(struct body *b, const char *name); /* -1 absent, 0, 1 */
/* RFC 3339, in the future; 0 when absent. */
int64_t body_future(struct body *b, const char *name);
enum store_role body_role(struct body *b, const char *name);         /* required */
void labels_check(struct body *b, const char *field, const char *s); /* "a=b,c=d" (operator_nodes.c) */

/* Writes "name": time or null. */
void json_time(struct jw *w, const char *name, int64_t unix_ms);
/* Starts {"data":[ and ends ],"next_cursor":..} of a list. */
void list_begin(struct jw *w, struct buf *out);
void list_end(struct jw *w, const char *next_cursor);

/* --- shared by handlers ----------------------------------------------------------------------------------------------------------
 */
/* Answers r with the run as it is now. `status` 200 or 201. */
void run_answer(struct api_req *r, const char *run_id, int status);
/* Answers when the run is settled or the time is over (runs_wait.c). */
void run_wait_answer(struct api_req *r, const char *run_id, int64_t seconds, int status);
void run_waits_end(struct api *a);     /* answers all now */
void event_streams_end(struct api *a); /* ends all now: clients resume elsewhere */
void api_wake(struct api *a, enum api_wake what, const char *id);

/* Handlers, by file. */
void runs_create(struct api_req *r);
void runs_list(struct api_req *r);
void runs_get(struct api_req *r);
void runs_cancel(struct api_req *r);
void runs_wait(struct api_req *r);
void runs_events(struct api_req *r);
void runs_receipt(struct api_req *r);
void me_get(struct api_req *r);
void models_list(struct api_req *r);
void keys_list(struct api_req *r);
void keys_create(struct api_req *r);
void keys_revoke(struct api_req *r);
void members_list(struct api_req *r);
void members_create(struct api_req *r);
void members_update(struct api_req *r);
void members_remove(struct api_req *r);
void health_live(struct api_req *r);
void health_ready(struct api_req *r);
void problems_page(struct api_req *r);
void operator_org_create(struct api_req *r);
void operator_org_list(struct api_req *r);
void operator_org_get(struct api_req *r);
void operator_org_update(struct api_req *r);
void operator_credit(struct api_req *r);
void operator_key_create(struct api_req *r);
void operator_key_list(struct api_req *r);
void operator_key_revoke(struct api_req *r);
void operator_member_create(struct api_req *r);
void operator_member_list(struct api_req *r);
void operator_provider_put(struct api_req *r);
void operator_provider_list(struct api_req *r);
void operator_model_put(struct api_req *r);
void operator_model_list(struct api_req *r);
void operator_price_put(struct api_req *r);
void operator_price_common_put(struct api_req *r);
void operator_token_create(struct api_req *r);
void operator_http_sd(struct api_req *r);
void operator_node_list(struct api_req *r);
void operator_node_drain(struct api_req *r);
void operator_node_undrain(struct api_req *r);
void operator_node_revoke(struct api_req *r);
void operator_node_remove(struct api_req *r);
void operator_image_begin(struct api_req *r);
void operator_image_list(struct api_req *r);
void operator_image_get(struct api_req *r);
void operator_image_put(struct api_req *r);
void operator_image_complete(struct api_req *r);
void operator_image_use(struct api_req *r);
void operator_image_rollback(struct api_req *r);
void operator_image_remove(struct api_req *r);

#endif
