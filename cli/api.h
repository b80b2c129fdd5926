/*
 * A conversation with the service: which URL and which key, requests with safe retries, problems shown to people. A member's key
 * goes to EPHEMERAL_URL's listener, an operator's to the operator listener; neither is ever sent anywhere else.
 */
#ifndef CLI_API_H
#define CLI_API_H

#include "args.h"
#include "common/json.h"
#include "http.h"
#include "saved.h"

#define API_DEFAULT_URL "http://127.0.0.1:8080"
#define API_DEFAULT_OPERATOR_URL "http://127.0.0.1:8081"

enum api_key_source { API_KEY_NONE, API_KEY_ENVIRONMENT, API_KEY_SAVED };

struct api {
	struct http *http;
	char url[SAVED_URL_MAX];
	char key[SAVED_KEY_MAX];
	enum api_key_source source;
	bool json; /* --json: problems also go to standard output as they came */
};

/* Each returns 0, or an exit status after it complained. */
int api_open(struct api *api, const struct args *a); /* member */
int api_open_operator(struct api *api, const struct args *a);
int api_open_url(struct api *api, const struct args *a); /* the member URL, no key yet (login) */
void api_close(struct api *api);

struct api_call {
	const char *method;
	const char *path;            /* from /v1 on, with query */
	const struct buf *body;      /* or NULL */
	const char *type;            /* of the body; NULL = JSON */
	const char *idempotency_key; /* NULL = none */
	int64_t timeout_ms;          /* 0 = 30 s */
	bool safe;                   /* a POST that may be repeated without a key */
};

struct answer {
	struct http_response raw;
	struct json *json; /* the body, NULL when it is empty */
};
void answer_free(struct answer *a);
/* Complains of an answer that is well formed but none of an Ephemeral service's; CLI_ASK. */
int api_stranger(const struct api *api);

/* Asks, again where that is safe (GET, PUT, DELETE, or with an idempotency key) and may help. CLI_OK with a 2xx answer whose body
 * is JSON, else an exit status after it complained; `out` is to be freed either way. */
int api_ask(struct api *api, const struct api_call *call, struct answer *out);
/* The exit status for an answer that is no 2xx, after the problem was shown. */
int api_problem(const struct api *api, const struct http_response *r);
/* The exit status for an error of http_send, after it was shown. */
int api_failed(const struct api *api, const struct err *e);
/* Asks and prints the body as it came; for --json. */
int api_print_json(const struct answer *a);
/* Headers of a request: bearer, accept, and up to three more; `store` keeps their text. */
struct api_headers {
	char bearer[SAVED_KEY_MAX + 32];
	char more[2][320];
	const char *list[8];
};
int api_headers(const struct api *api, struct api_headers *h, const char *accept, struct err *e);

/* Appends s percent-encoded as a query value. */
void api_query(struct buf *b, const char *s);

#endif
