/* link: ephproto EPH::sodium */
/* sources: controld/api/run_request.c controld/api/run_files.c controld/api/problem.c */
/*
 * POST /v1/runs as anybody may send it: a line for the Idempotency-Key header, then the body. What is taken must be within its
 * limits and have one spelling that is taken again; what is refused must say so in a problem that is JSON.
 */
/* reads: controld/api/run_request.c controld/api/run_files.c controld/api/problem.c */
/* reached: 85 % of lines, 70 % of branches; the rest is memory and bodies of megabytes */
#include "common/text.h"
#include "controld/api/run_request.h"
#include "fuzz.h"

static void check_taken(struct run_request *rq, const struct run_limits *limits)
{
	struct buf identity = BUF_INIT(64 * 1024 * 1024), again = BUF_INIT(64 * 1024 * 1024), echo = BUF_INIT(64 * 1024 * 1024);
	struct run_request *second = NULL;
	struct field_errors fe;
	struct json *doc;
	struct err e;
	size_t i;

	must(rq->prompt_len > 0 && rq->prompt_len <= RUN_PROMPT_MAX && text_utf8_clean(rq->prompt, rq->prompt_len));
	must(rq->timeout_seconds >= 1 && rq->timeout_seconds <= limits->max_timeout_seconds);
	must(rq->file_count <= RUN_FILES_MAX && rq->metadata_count <= RUN_METADATA_MAX);
	for (i = 0; i < rq->file_count; i++)
		must(guest_path_ok(rq->files[i].path) && rq->files[i].data && rq->files[i].size <= RUN_INLINE_MAX);
	must(run_request_identity(rq, &identity) && run_request_echo(rq, &echo));
	must(json_parse((const char *)echo.data, echo.len, &doc, &e) == 0);
	json_free(doc);
	field_errors_init(&fe);
	must(run_request_parse(identity.data, identity.len, NULL, limits, &second, &fe) == 0);
	must(run_request_identity(second, &again) && again.len == identity.len &&
			memcmp(again.data, identity.data, again.len) == 0);
	run_request_free(second);
	buf_free(&identity);
	buf_free(&again);
	buf_free(&echo);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	static const struct run_limits limits = {
		.default_timeout_seconds = 300, .max_timeout_seconds = 3600, .max_cost_micros = 1000000
	};
	const uint8_t *line = n ? memchr(p, '\n', n) : NULL;
	struct run_request *rq = NULL;
	struct field_errors fe;
	struct buf out = BUF_INIT(1024 * 1024);
	char *header = NULL;
	struct json *doc;
	struct err e;

	if (line && line > p) {
		header = strndup((const char *)p, (size_t)(line - p));
		must(header != NULL);
	}
	if (line) {
		n -= (size_t)(line + 1 - p);
		p = line + 1;
	}
	field_errors_init(&fe);
	if (run_request_parse(p, n, header, &limits, &rq, &fe) == 0) {
		check_taken(rq, &limits);
		run_request_free(rq);
	} else {
		must(field_errors_any(&fe));
		must(problem_render(&out, "http://localhost", field_errors_problem(&fe), "several", "req_1", &fe));
		must(json_parse((const char *)out.data, out.len, &doc, &e) == 0);
		json_free(doc);
	}
	field_errors_free(&fe);
	buf_free(&out);
	free(header);
	return 0;
}
