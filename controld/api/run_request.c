/* The body of POST /v1/runs: one table of fields, one reader each. Pure; runs.c calls it, the fuzzer too. */
#include "run_request.h"

#include "common/text.h"

#include <inttypes.h>
#include <stdlib.h>

struct reading {
	struct run_request *rq;
	const struct run_limits *limits;
	struct field_errors *errors;
	bool has_workflow;
	bool has_body_key; /* idempotency_key stands in the body */
};

struct field {
	const char *name;
	void (*read)(struct reading *r, const struct json *v, const struct pointer *at);
};

/* --- small readers ------------------------------------------------------------------------------------------------------ */

static bool want_type(struct reading *r, const struct json *v, enum json_type type, const struct pointer *at, const char *what)
{
	if (json_type(v) == type)
		return true;
	field_bad(r->errors, at, "is of type %s, but must be %s", json_type_name(json_type(v)), what);
	return false;
}

const char *api_size_name(enum api_size s)
{
	static const char *const names[API_SIZE_COUNT] = { "small", "standard", "large" };

	return s < API_SIZE_COUNT ? names[s] : "?";
}

enum api_size api_size_parse(const char *s)
{
	int i;

	for (i = 0; i < API_SIZE_COUNT; i++)
		if (strcmp(s, api_size_name((enum api_size)i)) == 0)
			return (enum api_size)i;
	return API_SIZE_COUNT;
}

bool idempotency_key_read(const char *s, char out[RUN_IDEMPOTENCY_MAX + 1])
{
	size_t n = strlen(s), i, o = 0;
	bool quoted = n >= 2 && s[0] == '"' && s[n - 1] == '"';

	out[0] = '\0';
	if (quoted) {
		s++;
		n -= 2;
	}
	for (i = 0; i < n; i++) {
		/* Inside quotes a structured-field string may escape `"` and `\`. */
		if (quoted && s[i] == '\\' && i + 1 < n && (s[i + 1] == '"' || s[i + 1] == '\\'))
			i++;
		if (s[i] < 0x21 || s[i] > 0x7e || o == RUN_IDEMPOTENCY_MAX) {
			out[0] = '\0';
			return false;
		}
		out[o++] = s[i];
	}
	out[o] = '\0';
	return o > 0;
}

/* --- fields ------------------------------------------------------------------------------------------------------------- */

static void read_prompt(struct reading *r, const struct json *v, const struct pointer *at)
{
	const char *s;

	if (!want_type(r, v, JSON_STRING, at, "a string"))
		return;
	s = json_as_text(v);
	if (s[strspn(s, " \t\r\n")] == '\0')
		field_bad(r->errors, at, "is empty, but must say what the agent should do");
	else if (json_len(v) > RUN_PROMPT_MAX)
		field_bad(r->errors, at,
				"has %zu bytes, but at most %d (128 KiB) of UTF-8 are taken; put long material into `files`",
				json_len(v), RUN_PROMPT_MAX);
	r->rq->prompt = s;
	r->rq->prompt_len = json_len(v);
}

static void read_shell(struct reading *r, const struct json *v, const struct pointer *at)
{
	if (want_type(r, v, JSON_BOOL, at, "true or false"))
		r->rq->shell = json_as_bool(v);
}

static void read_files(struct reading *r, const struct json *v, const struct pointer *at)
{
	if (want_type(r, v, JSON_ARRAY, at, "an array of files"))
		run_files_parse(r->rq, v, at, r->errors);
}

static void read_model(struct reading *r, const struct json *v, const struct pointer *at)
{
	const char *s;

	if (!want_type(r, v, JSON_STRING, at, "a string with a model's id"))
		return;
	s = json_as_text(v);
	if (json_len(v) > RUN_MODEL_MAX || !strchr(s, '/') || s[0] == '/' || s[json_len(v) - 1] == '/')
		field_bad(r->errors, at, "must be an id like provider/model of at most %d bytes, as listed by GET /v1/models",
				RUN_MODEL_MAX);
	else
		r->rq->model = s;
}

static void read_timeout(struct reading *r, const struct json *v, const struct pointer *at)
{
	field_int(r->errors, at, v, 1, r->limits->max_timeout_seconds, &r->rq->timeout_seconds);
}

static void read_max_cost(struct reading *r, const struct json *v, const struct pointer *at)
{
	field_int(r->errors, at, v, 1, r->limits->max_cost_micros, &r->rq->max_cost_micros);
}

static void read_max_model_calls(struct reading *r, const struct json *v, const struct pointer *at)
{
	field_int(r->errors, at, v, 1, RUN_MODEL_CALLS_MAX, &r->rq->max_model_calls);
}

static void read_size(struct reading *r, const struct json *v, const struct pointer *at)
{
	enum api_size s;

	if (!want_type(r, v, JSON_STRING, at, "a string"))
		return;
	s = api_size_parse(json_as_text(v));
	if (s == API_SIZE_COUNT)
		field_bad(r->errors, at, "must be \"small\", \"standard\" or \"large\"");
	else
		r->rq->size = s;
}

static void read_metadata(struct reading *r, const struct json *v, const struct pointer *at)
{
	size_t i, n;

	if (!want_type(r, v, JSON_OBJECT, at, "an object of strings"))
		return;
	n = json_len(v);
	if (n > RUN_METADATA_MAX) {
		field_bad(r->errors, at, "has %zu pairs, but at most %d are taken", n, RUN_METADATA_MAX);
		n = RUN_METADATA_MAX;
	}
	for (i = 0; i < n; i++) {
		const struct json *value = json_at(v, i);
		struct pointer here = { .up = at, .key = json_key(v, i) };
		size_t key_len = text_utf8_length(here.key, strlen(here.key));

		if (key_len < 1 || key_len > RUN_METADATA_KEY_MAX)
			field_bad(r->errors, &here, "has a key of %zu characters, but 1 to %d are taken", key_len,
					RUN_METADATA_KEY_MAX);
		if (!want_type(r, value, JSON_STRING, &here, "a string"))
			continue;
		if (text_utf8_length(json_as_text(value), json_len(value)) > RUN_METADATA_VALUE_MAX)
			field_bad(r->errors, &here, "has %zu characters, but at most %d are taken",
					text_utf8_length(json_as_text(value), json_len(value)), RUN_METADATA_VALUE_MAX);
		r->rq->metadata[r->rq->metadata_count++] = (struct run_pair){ .key = here.key, .value = json_as_text(value) };
	}
}

static void read_idempotency_key(struct reading *r, const struct json *v, const struct pointer *at)
{
	if (!want_type(r, v, JSON_STRING, at, "a string"))
		return;
	r->has_body_key = true;
	if (!idempotency_key_read(json_as_text(v), r->rq->idempotency_key))
		field_bad(r->errors, at, "must be 1 to %d visible ASCII characters", RUN_IDEMPOTENCY_MAX);
}

/* --- fields whose feature comes later: their default is taken, anything else is refused by name ----------------------------------
 */

static void later(struct reading *r, const struct pointer *at, const char *instead)
{
	field_later(r->errors, at, "is not available in this version; %s", instead);
}

static void later_unless_null(struct reading *r, const struct json *v, const struct pointer *at)
{
	if (json_type(v) != JSON_NULL)
		later(r, at, "leave it out");
}

static void later_unless_empty(struct reading *r, const struct json *v, const struct pointer *at)
{
	enum json_type t = json_type(v);

	if (t != JSON_NULL && !((t == JSON_OBJECT || t == JSON_ARRAY) && json_len(v) == 0))
		later(r, at, "leave it out");
}

static void read_workflow(struct reading *r, const struct json *v, const struct pointer *at)
{
	r->has_workflow = json_type(v) != JSON_NULL;
	if (r->has_workflow)
		later(r, at, "put the workflow's text into `prompt`");
}

static void read_web(struct reading *r, const struct json *v, const struct pointer *at)
{
	if (json_type(v) != JSON_BOOL && json_type(v) != JSON_OBJECT)
		field_bad(r->errors, at,
				"is of type %s, but must be false, true or {\"allow_domains\": [...]}; only false is available in "
				"this "
				"version",
				json_type_name(json_type(v)));
	else if (json_type(v) == JSON_OBJECT || json_as_bool(v))
		later(r, at, "send false or leave it out");
}

static void read_zero_data_retention(struct reading *r, const struct json *v, const struct pointer *at)
{
	if (want_type(r, v, JSON_BOOL, at, "true or false") && json_as_bool(v))
		later(r, at, "send false or leave it out; the record is then kept for the retention period");
}

/* Every field of a run. A name that is not here is refused. */
static const struct field fields[] = {
	{ "prompt", read_prompt },
	{ "workflow", read_workflow },
	{ "input", later_unless_empty },
	{ "web", read_web },
	{ "shell", read_shell },
	{ "files", read_files },
	{ "connections", later_unless_empty },
	{ "model", read_model },
	{ "timeout_seconds", read_timeout },
	{ "max_cost_micros", read_max_cost },
	{ "output_schema", later_unless_null },
	{ "zero_data_retention", read_zero_data_retention },
	{ "callback_url", later_unless_null },
	{ "metadata", read_metadata },
	{ "idempotency_key", read_idempotency_key },
	{ "size", read_size },
	{ "max_model_calls", read_max_model_calls },
	{ "outputs", later_unless_empty },
};
#define FIELD_COUNT (sizeof(fields) / sizeof(fields[0]))

/* --- the whole ---------------------------------------------------------------------------------------------------------- */

static void unknown_field(struct reading *r, const struct pointer *at)
{
	struct buf names = BUF_INIT(1024);
	size_t i;

	for (i = 0; i < FIELD_COUNT; i++)
		buf_printf(&names, "%s%s", i ? ", " : "", fields[i].name);
	field_bad(r->errors, at, "is not a field of a run; the fields are %s",
			names.failed ? "in the API reference" : buf_cstr(&names));
	buf_free(&names);
}

static void read_object(struct reading *r, const struct json *doc)
{
	size_t i, k;

	for (i = 0; i < json_len(doc); i++) {
		struct pointer at = { .up = NULL, .key = json_key(doc, i) };

		for (k = 0; k < FIELD_COUNT && strcmp(fields[k].name, at.key) != 0; k++)
			continue;
		if (k < FIELD_COUNT)
			fields[k].read(r, json_at(doc, i), &at);
		else
			unknown_field(r, &at);
	}
	if (!json_get(doc, "prompt") && !r->has_workflow) {
		struct pointer at = { .up = NULL, .key = "prompt" };

		field_bad(r->errors, &at, "is missing; it must say what the agent should do (a string of at most 128 KiB)");
	}
}

static void read_key_header(struct reading *r, const char *header)
{
	char key[RUN_IDEMPOTENCY_MAX + 1];

	if (!header)
		return;
	if (!idempotency_key_read(header, key)) {
		header_bad(r->errors, "Idempotency-Key", "must be 1 to %d visible ASCII characters, bare or in double quotes",
				RUN_IDEMPOTENCY_MAX);
		return;
	}
	if (r->has_body_key && strcmp(key, r->rq->idempotency_key) != 0) {
		struct pointer at = { .up = NULL, .key = "idempotency_key" };

		field_bad(r->errors, &at, "differs from the Idempotency-Key header; send one of them, or the same in both");
		return;
	}
	if (!text_copy(r->rq->idempotency_key, sizeof(r->rq->idempotency_key), key))
		r->rq->idempotency_key[0] = '\0';
}

int run_request_parse(const void *body, size_t n, const char *key_header, const struct run_limits *limits, struct run_request **out,
		struct field_errors *errors)
{
	struct run_request *rq = calloc(1, sizeof(*rq));
	struct reading r = { .rq = rq, .limits = limits, .errors = errors };
	struct err e;

	if (!rq) {
		field_bad(errors, NULL, "could not be read: memory is short; send it again");
		return -1;
	}
	rq->size = API_SIZE_STANDARD;
	rq->timeout_seconds = limits->default_timeout_seconds;
	rq->max_model_calls = RUN_MODEL_CALLS_DEFAULT;
	if (n == 0)
		field_bad(errors, NULL, "is empty, but must be a JSON object with at least `prompt`");
	else if (json_parse(body, n, &rq->doc, &e) == -1)
		field_bad(errors, NULL, "could not be read as JSON: %s", e.text);
	else if (json_type(rq->doc) != JSON_OBJECT)
		field_bad(errors, NULL, "is of type %s, but must be an object", json_type_name(json_type(rq->doc)));
	else
		read_object(&r, rq->doc);
	read_key_header(&r, key_header);
	if (field_errors_any(errors)) {
		run_request_free(rq);
		return -1;
	}
	*out = rq;
	return 0;
}

void run_request_free(struct run_request *rq)
{
	size_t i;

	if (!rq)
		return;
	for (i = 0; i < rq->file_count; i++)
		free(rq->files[i].data);
	json_free(rq->doc);
	free(rq);
}

/* --- one spelling ------------------------------------------------------------------------------------------------------- */

static void echo_files(const struct run_request *rq, struct buf *out)
{
	char hex[65];
	struct jw w;
	size_t i;

	jw_init(&w, out);
	jw_array(&w);
	for (i = 0; i < rq->file_count; i++) {
		text_hex(rq->files[i].sha256, sizeof(rq->files[i].sha256), hex);
		jw_object(&w);
		jw_kstr(&w, "path", rq->files[i].path);
		jw_kstr(&w, "sha256", hex);
		jw_kint(&w, "size", (int64_t)rq->files[i].size);
		jw_close(&w);
	}
	jw_close(&w);
	if (!jw_end(&w))
		out->failed = true;
}

/* Members in byte order of their names (which `fields` bounds: unknown names were refused), without idempotency_key. */
static bool members(const struct run_request *rq, bool files_by_hash, struct buf *out)
{
	const char *last = "";
	bool first = true;

	buf_add_char(out, '{');
	for (;;) {
		const char *next = NULL;
		size_t i;

		for (i = 0; i < json_len(rq->doc); i++) {
			const char *key = json_key(rq->doc, i);

			if (strcmp(key, last) > 0 && (!next || strcmp(key, next) < 0))
				next = key;
		}
		if (!next)
			break;
		last = next;
		if (strcmp(next, "idempotency_key") == 0)
			continue;
		buf_printf(out, "%s\"%s\":", first ? "" : ",", next);
		first = false;
		if (files_by_hash && strcmp(next, "files") == 0)
			echo_files(rq, out);
		else if (!json_canonical(json_get(rq->doc, next), out))
			out->failed = true;
	}
	return buf_add_char(out, '}') && !out->failed;
}

bool run_request_identity(const struct run_request *rq, struct buf *out)
{
	return members(rq, false, out);
}

bool run_request_echo(const struct run_request *rq, struct buf *out)
{
	return members(rq, true, out);
}
