/* Readers of a provider's refusals (model_error.h). Called by the model's files on the broker's thread; owns nothing. */
#include "model_error.h"

#include "model_request.h"

#include "common/clock.h"
#include "common/text.h"

#include <time.h>

#define SHOWN_MAX 300
#define KEY_MAX 512 /* the longest key: so much more is looked at than is shown, or half of one could stand at the cut */

bool model_hide_key(char *text, size_t n, const char *key)
{
	size_t len = key != NULL ? strlen(key) : 0;
	bool found = false;
	char *at;

	if (len < MODEL_KEY_HIDE_MIN)
		return false;
	while ((at = memmem(text, n, key, len)) != NULL) {
		memset(at, '*', len);
		n -= (size_t)(at - text) + len;
		text = at + len;
		found = true;
	}
	return found;
}

const char *model_error_message(const struct json *v)
{
	const struct json *error = json_get(v, "error");
	const char *text = json_get_text(error, "message");

	if (text != NULL)
		return text;
	return error != NULL && json_type(error) == JSON_STRING ? json_as_text(error) : json_get_text(v, "message");
}

void model_error_show(const char *text, size_t n, const char *key, char out[321])
{
	static const size_t tries[] = { SHOWN_MAX, 180, 70 }; /* escaping may make four of each byte */
	char copy[SHOWN_MAX + KEY_MAX];

	if (n > sizeof(copy))
		n = sizeof(copy);
	if (n > 0)
		memcpy(copy, text, n);
	(void)model_hide_key(copy, n, key);
	out[0] = '\0';
	for (size_t i = 0; i < sizeof(tries) / sizeof(tries[0]) && n > 0 && out[0] == '\0'; i++) {
		struct buf safe = BUF_INIT(320);
		size_t take = text_utf8_border(copy, n < tries[i] ? n : tries[i]);

		if (!text_safe(&safe, copy, take > 0 ? take : 1, false) || buf_cstr(&safe) == NULL ||
				!text_copy(out, 321, buf_cstr(&safe)))
			out[0] = '\0';
		buf_free(&safe);
	}
	if (out[0] == '\0' && !text_copy(out, 321, "no message"))
		out[0] = '\0';
}

void model_error_text(const char *body, size_t n, const char *key, char out[321], char param[65])
{
	struct json *v = NULL;
	const char *text = NULL;
	struct err e;

	if (param != NULL)
		param[0] = '\0';
	if (n > 0 && json_parse(body, n, &v, &e) == 0) {
		const char *p = json_get_text(json_get(v, "error"), "param");

		text = model_error_message(v);
		if (param != NULL && p != NULL && !text_copy(param, 65, p))
			param[0] = '\0';
	}
	model_error_show(text != NULL ? text : body, text != NULL ? strlen(text) : n, key, out);
	json_free(v);
}

const char *model_error_hint(int status)
{
	switch (status) {
	case 401:
	case 403: return "The operator can check the provider's key.";
	case 402: return "The operator can check the account at the provider.";
	case 404:
	case 405: return "The operator can check the provider's base URL and the model's upstream name.";
	case 408: return "The provider was too slow; try again later.";
	case 413: return "The conversation is too long for this provider.";
	case 429: return "The provider limits how much it is called; try again later.";
	default:
		return status >= 300 && status < 400 ? "Redirects are not followed; the operator can set the final base URL."
		       : status >= 500               ? "The provider has trouble; try again later."
						     : "The operator can check the model's settings.";
	}
}

bool model_error_wants_other_limit(const char *body, size_t n, const char *param, enum limit_param used)
{
	enum limit_param other = used == LIMIT_MAX_TOKENS ? LIMIT_MAX_COMPLETION_TOKENS : LIMIT_MAX_TOKENS;
	const char *name = model_limit_name(other);

	return strcmp(param, model_limit_name(used)) == 0 || (n > 0 && memmem(body, n, name, strlen(name)) != NULL);
}

/* "Sun, 06 Nov 1994 08:49:37 GMT", the one form that may be sent today. */
static int64_t until_date_ms(const char *value)
{
	struct tm tm = { 0 };
	const char *end = strptime(value, "%a, %d %b %Y %H:%M:%S GMT", &tm);
	int64_t left;

	if (end == NULL || *end != '\0')
		return -1;
	left = (int64_t)timegm(&tm) * 1000 - clock_real_ms();
	return left > 0 ? left : 0;
}

int64_t model_retry_after_ms(const char *value, size_t n)
{
	char text[64];
	int64_t ms = 0;

	if (n == 0)
		return -1;
	if (value[0] < '0' || value[0] > '9') {
		if (n >= sizeof(text))
			return -1;
		memcpy(text, value, n);
		text[n] = '\0';
		ms = until_date_ms(text);
		return ms < MODEL_RETRY_AFTER_MAX_MS ? ms : MODEL_RETRY_AFTER_MAX_MS;
	}
	for (size_t i = 0; i < n; i++) {
		if (value[i] < '0' || value[i] > '9')
			return -1;
		if (ms < MODEL_RETRY_AFTER_MAX_MS)
			ms = ms * 10 + (int64_t)(value[i] - '0') * 1000;
	}
	return ms < MODEL_RETRY_AFTER_MAX_MS ? ms : MODEL_RETRY_AFTER_MAX_MS;
}
