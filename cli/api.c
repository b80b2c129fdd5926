/* Requests to the service: URL and key, retries, problems. Called by every verb that asks; blocks. Owns the HTTP handle of a
 * `struct api`. */
#include "api.h"

#include "cli.h"
#include "common/text.h"
#include "interrupt.h"
#include "term.h"

#include <unistd.h>

#define ASK_TIMEOUT_MS 30000
#define ATTEMPTS 5
#define WAIT_FIRST_MS 250
#define WAIT_MAX_MS 20000

static int use(const struct err *e)
{
	term_complain("%s", e->text);
	return CLI_USE;
}

static int open_http(struct api *api)
{
	struct err e;

	api->http = http_new(&e);
	if (api->http == NULL) {
		term_complain("%s", e.text);
		return CLI_ASK;
	}
	return CLI_OK;
}

/* A key is a bearer token: visible ASCII. */
static bool key_ok(const char *key)
{
	for (const char *p = key; *p != '\0'; p++)
		if (*p <= ' ' || *p > '~')
			return false;
	return key[0] != '\0';
}

static int set_key(struct api *api, const char *key, const char *from)
{
	if (key_ok(key) && text_copy(api->key, sizeof api->key, key))
		return CLI_OK;
	term_complain("%s is no API key: a key is at most %d visible characters", from, SAVED_KEY_MAX - 1);
	return CLI_USE;
}

/* The member URL: --url, EPHEMERAL_URL, the one logged in to, the default. */
static int member_url(struct api *api, const struct args *a, const struct saved *s)
{
	const char *url = args_value(a, "url");
	struct err e;

	if (url == NULL)
		url = getenv("EPHEMERAL_URL");
	if (url == NULL || url[0] == '\0')
		url = s->current[0] != '\0' ? s->current : API_DEFAULT_URL;
	return saved_url(url, api->url, &e) == 0 ? CLI_OK : use(&e);
}

int api_open_url(struct api *api, const struct args *a)
{
	struct saved s;
	struct err e;
	int rc;

	memset(api, 0, sizeof *api);
	api->json = args_flag(a, "json");
	if (saved_load(&s, &e) != 0)
		memset(&s, 0, sizeof s); /* a broken file does not keep anybody from logging in */
	rc = member_url(api, a, &s);
	return rc != CLI_OK ? rc : open_http(api);
}

int api_open(struct api *api, const struct args *a)
{
	const char *key = getenv("EPHEMERAL_API_KEY");
	struct saved s;
	struct err e = { .code = ERR_NONE };
	bool broken;
	int rc;

	memset(api, 0, sizeof *api);
	api->json = args_flag(a, "json");
	broken = saved_load(&s, &e) != 0;
	if (broken)
		memset(&s, 0, sizeof s);
	rc = member_url(api, a, &s);
	if (rc != CLI_OK)
		return rc;
	if (key != NULL && key[0] != '\0') {
		api->source = API_KEY_ENVIRONMENT;
		rc = set_key(api, key, "EPHEMERAL_API_KEY");
	} else {
		api->source = API_KEY_SAVED;
		key = saved_key(&s, api->url);
		if (key == NULL) {
			if (broken)
				term_complain("%s", e.text);
			term_complain("no API key for %s: run `ephemeral login --url %s`, or set EPHEMERAL_API_KEY", api->url,
					api->url);
			return CLI_ASK;
		}
		rc = set_key(api, key, "the saved key");
	}
	return rc != CLI_OK ? rc : open_http(api);
}

int api_open_operator(struct api *api, const struct args *a)
{
	const char *key = getenv("EPHEMERAL_OPERATOR_KEY"), *url = args_value(a, "operator-url");
	struct err e;
	int rc;

	memset(api, 0, sizeof *api);
	api->json = args_flag(a, "json");
	if (args_value(a, "url") != NULL && url == NULL) {
		term_complain("admin verbs talk to the operator listener: give --operator-url");
		return CLI_USE;
	}
	if (url == NULL)
		url = getenv("EPHEMERAL_OPERATOR_URL");
	if (url == NULL || url[0] == '\0')
		url = API_DEFAULT_OPERATOR_URL;
	if (saved_url(url, api->url, &e) != 0)
		return use(&e);
	if (key == NULL || key[0] == '\0') {
		term_complain("no operator key: set EPHEMERAL_OPERATOR_KEY (`controld bootstrap` shows it once)");
		return CLI_ASK;
	}
	api->source = API_KEY_ENVIRONMENT;
	rc = set_key(api, key, "EPHEMERAL_OPERATOR_KEY");
	return rc != CLI_OK ? rc : open_http(api);
}

void api_close(struct api *api)
{
	http_free(api->http);
	api->http = NULL;
	explicit_bzero(api->key, sizeof api->key);
}

int api_headers(const struct api *api, struct api_headers *h, const char *accept, struct err *e)
{
	size_t n = 0;

	memset(h, 0, sizeof *h);
	if (!text_fmt(h->bearer, sizeof h->bearer, "Authorization: Bearer %s", api->key))
		return err_set(e, ERR_LIMIT, "the key is too long");
	h->list[n++] = h->bearer;
	h->list[n++] = accept;
	h->list[n] = NULL;
	return 0;
}

static bool retry_helps(const struct api_call *call, const struct http_response *r)
{
	if (r->status == 429 || r->status == 502 || r->status == 503 || r->status == 504)
		return true;
	/* The first request with this key is still at work: it will have an answer soon. */
	return r->status == 409 && call->idempotency_key != NULL;
}

static int send_once(struct api *api, const struct api_call *call, struct http_response *out, struct err *e)
{
	struct api_headers h;
	struct buf url = BUF_INIT((size_t)16 * 1024);
	struct http_request req = { .method = call->method,
		.timeout_ms = call->timeout_ms > 0 ? call->timeout_ms : ASK_TIMEOUT_MS };
	size_t n = 2;
	int rc = -1;

	if (api_headers(api, &h, "Accept: application/json", e) != 0)
		return -1;
	if (call->body != NULL && call->type == NULL)
		h.list[n++] = "Content-Type: application/json";
	if (call->body != NULL && call->type != NULL) {
		if (!text_fmt(h.more[1], sizeof h.more[1], "Content-Type: %s", call->type))
			return err_set(e, ERR_INVALID, "the body's type is too long");
		h.list[n++] = h.more[1];
	}
	if (call->idempotency_key != NULL) {
		if (!text_fmt(h.more[0], sizeof h.more[0], "Idempotency-Key: %s", call->idempotency_key))
			return err_set(e, ERR_INVALID, "the idempotency key is longer than 255 characters");
		h.list[n++] = h.more[0];
	}
	h.list[n] = NULL;
	req.headers = h.list;
	if (call->body != NULL) {
		req.body = call->body->data;
		req.body_len = call->body->len;
	} else if (strcmp(call->method, "POST") == 0) {
		req.body = "";
	}
	if (buf_add_str(&url, api->url) && buf_add_str(&url, call->path) && (req.url = buf_cstr(&url)) != NULL)
		rc = http_send(api->http, &req, out, e);
	else
		(void)err_set(e, ERR_LIMIT, "the request's URL is too long");
	buf_free(&url);
	return rc;
}

/* One exchange, repeated while that is safe and may help. */
static int exchange(struct api *api, const struct api_call *call, struct http_response *out, struct err *e)
{
	bool safe = call->safe || strcmp(call->method, "POST") != 0 || call->idempotency_key != NULL;
	int64_t wait_ms = WAIT_FIRST_MS;

	for (int attempt = 1;; attempt++) {
		int rc;

		http_response_init(out);
		rc = send_once(api, call, out, e);
		if (!safe || attempt == ATTEMPTS || (rc == 0 && !retry_helps(call, out)) ||
				(rc != 0 && e->code != ERR_UNAVAILABLE && e->code != ERR_TIMEOUT))
			return rc;
		if (rc == 0 && out->retry_after_s >= 0)
			wait_ms = out->retry_after_s * 1000;
		if (wait_ms > WAIT_MAX_MS)
			return rc; /* whoever asks should decide about so long a wait */
		if (!interrupt_sleep_ms(wait_ms)) {
			if (rc == 0)
				return 0;
			return err_set(e, ERR_CONFLICT, "interrupted");
		}
		wait_ms = wait_ms < WAIT_FIRST_MS ? WAIT_FIRST_MS : wait_ms * 2;
		http_response_free(out);
	}
}

/* Whether an answer can be a service's: each of them has one of these members. */
static bool ours(const struct json *v)
{
	static const struct {
		const char *name;
		enum json_type type;
	} members[] = {
		{ "id", JSON_STRING },
		{ "name", JSON_STRING },
		{ "organization_id", JSON_STRING },
		{ "organization", JSON_OBJECT },
		{ "data", JSON_ARRAY },
	};

	for (size_t i = 0; i < sizeof members / sizeof members[0]; i++) {
		const struct json *m = json_get(v, members[i].name);

		if (m != NULL && json_type(m) == members[i].type)
			return true;
	}
	return false;
}

int api_ask(struct api *api, const struct api_call *call, struct answer *out)
{
	struct err e;

	out->json = NULL;
	if (exchange(api, call, &out->raw, &e) != 0)
		return api_failed(api, &e);
	if (out->raw.status < 200 || out->raw.status > 299)
		return api_problem(api, &out->raw);
	if (out->raw.body.len == 0)
		return CLI_OK;
	if (json_parse((const char *)out->raw.body.data, out->raw.body.len, &out->json, &e) != 0) {
		term_complain("%s answers what is no JSON (%s): is this the URL of an Ephemeral service?", api->url, e.text);
		return CLI_ASK;
	}
	return json_type(out->json) == JSON_OBJECT && ours(out->json) ? CLI_OK : api_stranger(api);
}

int api_stranger(const struct api *api)
{
	term_complain("%s answers, but not as an Ephemeral service does: is this its URL?", api->url);
	return CLI_ASK;
}

void answer_free(struct answer *a)
{
	json_free(a->json);
	a->json = NULL;
	http_response_free(&a->raw);
}

int api_failed(const struct api *api, const struct err *e)
{
	if (e->code == ERR_CONFLICT)
		return CLI_DETACHED;
	term_complain("%s", e->text);
	if (e->code == ERR_UNAVAILABLE)
		term_note("Is the service running, and is %s its URL? Set it by --url or EPHEMERAL_URL.", api->url);
	return e->code == ERR_INVALID ? CLI_USE : CLI_ASK;
}

static int status_exit(long status)
{
	switch (status) {
	case 400:
	case 404:
	case 413:
	case 415:
	case 422: return CLI_USE;
	default: return CLI_ASK;
	}
}

static void field_error(const struct json *v, const char *said)
{
	const char *pointer = json_get_text(v, "pointer"), *detail = json_get_text(v, "detail");

	if (detail != NULL && said != NULL && strcmp(detail, said) == 0)
		return;
	if (detail != NULL && pointer != NULL && pointer[0] != '\0')
		term_note("  %s: %s", pointer[0] == '#' ? pointer + 1 : pointer, detail);
	else if (detail != NULL)
		term_note("  %s", detail);
}

int api_problem(const struct api *api, const struct http_response *r)
{
	struct json *problem = NULL;
	struct err e;
	const char *title, *detail;
	const struct json *errors;

	if (r->body.len == 0 || json_parse((const char *)r->body.data, r->body.len, &problem, &e) != 0) {
		term_complain("%s answers %ld without saying why: is this the URL of an Ephemeral service?", api->url, r->status);
		return status_exit(r->status);
	}
	if (api->json) {
		fwrite(r->body.data, 1, r->body.len, stdout);
		fputc('\n', stdout);
	}
	title = json_get_text(problem, "title");
	detail = json_get_text(problem, "detail");
	if (detail != NULL)
		term_complain("%s", detail);
	else
		term_complain("%s (%ld)", title != NULL ? title : "refused", r->status);
	errors = json_get(problem, "errors");
	for (size_t i = 0; errors != NULL && json_type(errors) == JSON_ARRAY && i < json_len(errors); i++)
		field_error(json_at(errors, i), detail);
	if (r->status == 401)
		term_note("The key was not accepted: %s.", api->source == API_KEY_SAVED ? "run `ephemeral login` again"
							   : api->source == API_KEY_ENVIRONMENT
									   ? "check the environment variable it came from"
									   : "check it, and the URL");
	if (r->retry_after_s >= 0)
		term_note("Try again in %lld s.", (long long)r->retry_after_s);
	json_free(problem);
	return status_exit(r->status);
}

int api_print_json(const struct answer *a)
{
	if (a->raw.body.len == 0)
		fputs("{}", stdout); /* done, and nothing to say: still one JSON document */
	else
		fwrite(a->raw.body.data, 1, a->raw.body.len, stdout);
	if (a->raw.body.len == 0 || a->raw.body.data[a->raw.body.len - 1] != '\n')
		fputc('\n', stdout);
	return CLI_OK;
}

void api_query(struct buf *b, const char *s)
{
	static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~";

	for (; *s != '\0'; s++) {
		if (strchr(plain, *s) != NULL)
			buf_add_char(b, *s);
		else
			buf_printf(b, "%%%02X", (unsigned)(unsigned char)*s);
	}
}
