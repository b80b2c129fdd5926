/*
 * The two listeners and the way of a request up to its handler: route, key, body, query. Owns struct api and all requests in it.
 * Called by controld's main and, for each request, by httpd; runs on the loop, does not block.
 */
#include "api_internal.h"

#include "common/log.h"
#include "common/netlisten.h"
#include "common/text.h"
#include "common/worker.h"
#include "create.h"
#include "secrets.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/resource.h>

#define HEADERS_MAX (32 * 1024)
#define CONNECTIONS_DEFAULT 12000
#define BODY_BUDGET_DEFAULT_MIB 256
#define DEADLINE_DEFAULT_S 30
#define IDLE_DEFAULT_S 75

/* --- before the handler ------------------------------------------------------------------------------------------------- */

/* The parameter at p, up to the next semicolon: true unless it is a charset other than UTF-8. */
static bool charset_is_fine(const char *p)
{
	size_t n;
	bool quoted;

	if (strncasecmp(p, "charset", 7) != 0)
		return true;
	if (p[7] != '=')
		return false;
	p += 8;
	quoted = *p == '"';
	p += quoted;
	if (strncasecmp(p, "utf-8", 5) != 0 || (quoted && p[5] != '"'))
		return false;
	p += quoted ? 6 : 5;
	n = strspn(p, " \t");
	return p[n] == ';' || p[n] == '\0';
}

/* `application/json`, where a charset may say UTF-8 and nothing else: JSON has no other (RFC 8259). */
static bool is_json_type(const char *type)
{
	size_t n = strcspn(type, "; \t");

	if (n != 16 || strncasecmp(type, "application/json", 16) != 0)
		return false;
	for (type += n; *type; type += strcspn(type, ";")) {
		type += strspn(type, "; \t");
		if (!charset_is_fine(type))
			return false;
	}
	return true;
}

static bool is_bytes_type(const char *type)
{
	return strcasecmp(type, "application/octet-stream") == 0;
}

/* True when the headers that say what the body is are there once and right; else r is answered. */
static bool type_is_fine(struct api_req *r)
{
	const char *type = http_header(r->http, "Content-Type"), *coding = http_header(r->http, "Content-Encoding");

	if (http_header_count(r->http, "Content-Type") > 1 || http_header_count(r->http, "Content-Encoding") > 1) {
		api_problem(r, PROBLEM_UNSUPPORTED_MEDIA_TYPE,
				"Content-Type or Content-Encoding stands there more than once; send `Content-Type: "
				"application/json` once.");
	} else if (r->route->content == CONTENT_BYTES) {
		if (type && is_bytes_type(type) && !coding)
			return true;
		api_problem(r, PROBLEM_UNSUPPORTED_MEDIA_TYPE,
				"The body is %s%.100s; send the bytes as they are, with `Content-Type: application/octet-stream`.",
				type ? "of type " : "without a Content-Type", type ? type : "");
	} else if (!type || !is_json_type(type)) {
		api_problem(r, PROBLEM_UNSUPPORTED_MEDIA_TYPE,
				"The body is %s%.100s; send JSON in UTF-8 with `Content-Type: application/json`.",
				type ? "of type " : "without a Content-Type", type ? type : "");
	} else if (coding && strcasecmp(coding, "identity") != 0) {
		api_problem(r, PROBLEM_UNSUPPORTED_MEDIA_TYPE, "The body has Content-Encoding %.60s; send it uncompressed.",
				coding);
	} else {
		return true;
	}
	return false;
}

/* True when the body is of the size and kind that the route takes; else r is answered. */
static bool body_is_fine(struct api_req *r)
{
	const size_t n = http_body_size(r->http);

	if (r->route->content == CONTENT_NONE) {
		if (n == 0)
			return true;
		api_problem(r, PROBLEM_INVALID_REQUEST, "This call takes no body, but %zu bytes came with it; send none.", n);
		return false;
	}
	if (n > r->route->body_max) {
		api_problem(r, PROBLEM_TOO_LARGE, "The body has %zu bytes; this call takes at most %zu.", n, r->route->body_max);
		return false;
	}
	if (n == 0 && (r->route->content == CONTENT_JSON_OR_EMPTY || !http_header(r->http, "Content-Type")))
		return true; /* a body that must be there is missed by its reader, which can say what belongs into it */
	return type_is_fine(r);
}

static bool query_is_fine(struct api_req *r)
{
	struct field_errors fe;
	size_t i;

	field_errors_init(&fe);
	for (i = 0; i < http_query_size(r->http); i++) {
		const char *name, *value;
		int count;

		http_query_at(r->http, i, &name, &value);
		http_query(r->http, name, &count);
		if (!route_knows_query(r->route, name))
			query_bad(&fe, name, "is not known here; %s%s", *r->route->query ? "there are: " : "this call takes none",
					r->route->query);
		else if (count > 1)
			query_bad(&fe, name, "stands there %d times; send it once", count);
		else if (!text_utf8_clean(name, strlen(name)) || !text_utf8_clean(value, strlen(value)))
			query_bad(&fe, name, "is not UTF-8");
	}
	if (!field_errors_any(&fe))
		return true;
	api_problem_fields(r, &fe);
	return false;
}

void api_enter(struct api_req *r)
{
	if (body_is_fine(r) && query_is_fine(r))
		r->route->handle(r);
}

static void no_route(struct api_req *r, const struct route_match *m)
{
	struct buf allow = BUF_INIT(256);
	const char *list;

	if (!m->allowed) {
		api_problem(r, PROBLEM_NOT_FOUND,
				m->other_listener ? "This path is on the other listener of this service."
						  : "There is no such path here.");
		return;
	}
	list = route_allow(m->allowed, &allow) ? buf_cstr(&allow) : NULL;
	if (list)
		api_header(r, "Allow", list);
	if (http_method(r->http) == HTTP_OPTIONS)
		api_reply_empty(r, 204);
	else
		api_problem(r, PROBLEM_METHOD_NOT_ALLOWED, "%s is not allowed here; there are: %s.", http_method_name(r->http),
				list ? list : "-");
	buf_free(&allow);
}

static void handle(struct api *a, enum api_listener listener, struct http_req *http)
{
	struct api_req *r = calloc(1, sizeof(*r));
	struct route_match m;

	if (!r) {
		http_reply(http, 503, NULL, NULL, 0);
		return;
	}
	r->api = a;
	r->http = http;
	r->listener = listener;
	api_req_start(r);
	route_find(api_routes, api_route_count, listener, http_method(http), http_path(http), &m);
	if (!m.route) {
		no_route(r, &m);
		return;
	}
	r->route = m.route;
	r->params = m.params;
	if (r->route->need == NEED_NONE)
		api_enter(r);
	else
		auth_check(r);
}

static void handle_member(void *arg, struct http_req *http)
{
	handle(arg, LISTENER_MEMBER, http);
}

static void handle_operator(void *arg, struct http_req *http)
{
	handle(arg, LISTENER_OPERATOR, http);
}

/* What httpd refuses by itself looks like every other problem. */
static void refuse(void *arg, struct http_req *http, int status, const char *detail)
{
	struct api *a = arg;
	struct buf out = BUF_INIT(16 * 1024);
	char id[ID_MAX];

	api_count(a, NULL, status);
	id_make("req", id);
	api_common_headers(a, http, id);
	if (!problem_render_as(&out, a->public_url, problem_of_status(status), status, detail, id, NULL))
		buf_reset(&out);
	http_reply(http, status, "application/problem+json", out.data, out.len);
	buf_free(&out);
}

/* --- start and end ------------------------------------------------------------------------------------------------------ */

static size_t body_budget(const struct api_options *o)
{
	return (size_t)(o->http_body_budget_mib ? o->http_body_budget_mib : BODY_BUDGET_DEFAULT_MIB) * 1024 * 1024;
}

static int open_listener(struct api *a, const char *listen, void (*handler)(void *, struct http_req *), struct httpd **out,
		char address[300], struct err *e)
{
	const struct api_options *o = &a->opt;
	struct httpd_options h = {
		.listen = listen,
		.max_headers = HEADERS_MAX,
		.max_body = RUN_BODY_MAX,
		.body_budget = body_budget(o),
		.request_deadline_ms = (int)(o->http_deadline_seconds ? o->http_deadline_seconds : DEADLINE_DEFAULT_S) * 1000,
		.idle_timeout_ms = (int)(o->http_idle_seconds ? o->http_idle_seconds : IDLE_DEFAULT_S) * 1000,
		.max_connections = (int)(o->http_connections ? o->http_connections : CONNECTIONS_DEFAULT),
		.handler = handler,
		.refuse = refuse,
		.arg = a,
	};

	if (httpd_new(o->base, &h, out, e) == -1)
		return -1;
	return net_listen_text(listen, httpd_port(*out), address, 300, e);
}

/* Where links in answers point to when the operator gave nothing: a name that at least works on this machine. */
static int choose_public_url(struct api *a, struct err *e)
{
	const char *given = a->opt.public_url;
	const char *address = a->address;
	size_t n;

	if (given && *given) {
		n = strlen(given);
		while (n > 0 && given[n - 1] == '/')
			n--;
		if (n >= sizeof(a->public_url))
			return err_set(e, ERR_LIMIT, "public_url is longer than %zu bytes", sizeof(a->public_url) - 1);
		memcpy(a->public_url, given, n);
		a->public_url[n] = '\0';
		return 0;
	}
	if (strncmp(address, "0.0.0.0:", 8) == 0 || address[0] == ':' || strncmp(address, "[::]:", 5) == 0) {
		if (text_fmt(a->public_url, sizeof(a->public_url), "http://127.0.0.1:%u", httpd_port(a->member)))
			return 0;
	} else if (text_fmt(a->public_url, sizeof(a->public_url), "http://%s", address)) {
		return 0;
	}
	return err_set(e, ERR_LIMIT, "listen address is too long");
}

/* Streams need a descriptor each: ask for as many as the system lets us have. */
static void raise_descriptors(void)
{
	struct rlimit lim;

	if (getrlimit(RLIMIT_NOFILE, &lim) == -1 || lim.rlim_cur == lim.rlim_max)
		return;
	lim.rlim_cur = lim.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &lim) == -1)
		log_warn("descriptor limit could not be raised");
}

int api_start(const struct api_options *opt, struct api **out, struct err *e)
{
	struct api *a = calloc(1, sizeof(*a));

	if (!a)
		return err_set(e, ERR_NOMEM, "memory is short");
	a->opt = *opt;
	a->limits.default_timeout_seconds = opt->default_timeout_seconds;
	a->limits.max_timeout_seconds = opt->max_timeout_seconds;
	a->limits.max_cost_micros = opt->max_cost_micros;
	a->stream_max = opt->stream_clients > 0 ? (size_t)opt->stream_clients : API_STREAMS_MAX;
	raise_descriptors();
	a->auth = auth_cache_new();
	if (!a->auth) {
		err_set(e, ERR_NOMEM, "memory is short");
		goto fail;
	}
	a->large_max = body_budget(opt) / 2 > RUN_BODY_MAX ? body_budget(opt) / 2 : RUN_BODY_MAX;
	if (worker_new(opt->base, a->large_max, &a->worker, e) == -1)
		goto fail;
	if (open_listener(a, opt->listen, handle_member, &a->member, a->address, e) == -1) {
		err_wrap(e, "listen");
		goto fail;
	}
	if (open_listener(a, opt->operator_listen, handle_operator, &a->operator_, a->operator_address, e) == -1) {
		err_wrap(e, "operator_listen");
		goto fail;
	}
	if (choose_public_url(a, e) == -1)
		goto fail;
	log_info("api listens listen=%s operator=%s url=%s", a->address, a->operator_address, a->public_url);
	*out = a;
	return 0;

fail:
	api_free(a);
	return -1;
}

uint16_t api_port(const struct api *a)
{
	return httpd_port(a->member);
}

uint16_t api_operator_port(const struct api *a)
{
	return httpd_port(a->operator_);
}

const char *api_address(const struct api *a)
{
	return a->address;
}

const char *api_operator_address(const struct api *a)
{
	return a->operator_address;
}

void api_drain(struct api *a)
{
	if (a->draining)
		return;
	a->draining = true;
	httpd_stop_accepting(a->member);
	httpd_stop_accepting(a->operator_);
	event_streams_end(a);
	run_waits_end(a);
}

bool api_idle(const struct api *a)
{
	return a->request_count == 0 && a->stream_count == 0 && httpd_sending(a->member) == 0 && httpd_sending(a->operator_) == 0;
}

void api_free(struct api *a)
{
	if (!a)
		return;
	a->draining = true;
	event_streams_end(a);
	run_waits_end(a);
	if (a->member)
		httpd_free(a->member);
	if (a->operator_)
		httpd_free(a->operator_); /* both told each open request that its client is gone */
	worker_free(a->worker);           /* what it held was of requests that are gone */
	creations_forget(a);
	check_warn(a->requests == NULL);
	auth_cache_free(a->auth);
	free(a);
}
