/*
 * POST /v1/runs: the checks that need the database, the create, the answer. create.c reads the body, a large one on the worker's
 * thread; the store does the rest in one transaction. Runs on the loop, does not block.
 *
 *   body -> model and cap -> (with files: judge, then the files) -> create -> answer
 *              \-> no: judge, where there is a key: a repeated request gets its run whatever has changed since
 */
#include "create.h"

#include "common/log.h"
#include "common/price.h"
#include "common/text.h"
#include "proto/tools.h"

#include <inttypes.h>

#define PREFER_WAIT_MAX 60
#define QUEUE_FULL_RETRY_S 5
#define INLINE_BODY_MAX (64 * 1024) /* read on the loop: well below a millisecond */

/* Prefer is a wish: what cannot be read is ignored, as RFC 7240 says. */
static int64_t prefer_wait(const char *h)
{
	while (h && *h) {
		char number[8];
		size_t n;
		int64_t v;
		struct err e;

		h += strspn(h, " \t,;");
		if (strncasecmp(h, "wait", 4) == 0 && h[4 + strspn(h + 4, " \t")] == '=') {
			h += 4 + strspn(h + 4, " \t") + 1;
			h += strspn(h, " \t");
			n = strspn(h, "0123456789");
			if (n == 0 || n >= sizeof(number))
				return 0;
			memcpy(number, h, n);
			number[n] = '\0';
			if (text_i64(number, 0, 9999999, &v, &e) == -1)
				return 0;
			return v < PREFER_WAIT_MAX ? v : PREFER_WAIT_MAX;
		}
		h += strcspn(h, ",");
	}
	return 0;
}

/* --- the end: what the store says --------------------------------------------------------------------------------------- */

static void answer_created(struct api_req *r, const struct store_create *c)
{
	const struct creation *cr = r->state;
	char text[128];

	if (text_fmt(text, sizeof(text), "/v1/runs/%s", c->run_id))
		api_header(r, "Location", text);
	if (c->result == STORE_REPLAYED) {
		api_header(r, "Idempotency-Replayed", "true");
	} else {
		log_info("run created run=%s org=%s key=%s cap_micros=%" PRId64 " size=%s req=%s", c->run_id, r->who.org_id,
				r->who.key_id, cr->cap_micros, api_size_name(cr->rq->size), r->id);
		api_wake(r->api, API_WAKE_QUEUED, c->run_id);
	}
	if (cr->wait_seconds > 0) {
		if (text_fmt(text, sizeof(text), "wait=%" PRId64, cr->wait_seconds))
			api_header(r, "Preference-Applied", text);
		run_wait_answer(r, c->run_id, cr->wait_seconds, 201);
		return;
	}
	run_answer(r, c->run_id, 201);
}

static void answer_insufficient(struct api_req *r, const struct store_create *c)
{
	char needed[32], available[32];

	text_dollars(c->needed_micros, needed);
	text_dollars(c->available_micros, available);
	api_problem(r, PROBLEM_INSUFFICIENT_BALANCE,
			"This run reserves %s (%" PRId64 " micros), but %s (%" PRId64
			" micros) are free. Lower max_cost_micros, wait until running runs "
			"settle, or have the operator add credit: ephemeral admin org credit %s DOLLARS.",
			needed, c->needed_micros, available, c->available_micros, r->who.org_id);
}

/* The fields of draft-ietf-httpapi-ratelimit-headers: which quota, how large, what is left, when to come back. */
static void rate_limit(struct api_req *r, int64_t limit)
{
	char text[96];

	if (text_fmt(text, sizeof(text), "\"queued-runs\";q=%" PRId64, limit))
		api_header(r, "RateLimit-Policy", text);
	if (text_fmt(text, sizeof(text), "\"queued-runs\";r=0;t=%d", QUEUE_FULL_RETRY_S))
		api_header(r, "RateLimit", text);
}

static void answer_result(struct api_req *r, const struct store_create *c)
{
	const struct creation *cr = r->state;

	switch (c->result) {
	case STORE_CREATED:
	case STORE_REPLAYED: answer_created(r, c); return;
	case STORE_IDEMPOTENCY_MISMATCH:
		api_problem(r, PROBLEM_IDEMPOTENCY_MISMATCH,
				"This Idempotency-Key was used within 24 hours with another body. Use a fresh key for a new "
				"run, or the same body for a retry.");
		return;
	case STORE_IN_PROGRESS:
		api_problem(r, PROBLEM_IDEMPOTENCY_IN_PROGRESS,
				"A request with this Idempotency-Key is still in progress; send it again.");
		return;
	case STORE_INSUFFICIENT: answer_insufficient(r, c); return;
	case STORE_TOO_MANY_QUEUED:
		api_retry_after(r, QUEUE_FULL_RETRY_S);
		rate_limit(r, c->limit);
		api_problem(r, PROBLEM_RATE_LIMITED,
				"Your organization has %" PRId64
				" runs queued, which is its limit. Try again when some have started.",
				c->limit);
		return;
	case STORE_NO_NODE:
		api_retry_after(r, 30);
		api_problem(r, PROBLEM_NO_NODE,
				"No host that your organization may use could ever run size %s (%u MiB, %u vCPU)%s. Ask for "
				"another size, or have the operator "
				"add a host (ephemeral admin node token)%s%s%s.",
				api_size_name(cr->rq->size), r->api->opt.sizes[cr->rq->size].memory_mib,
				r->api->opt.sizes[cr->rq->size].vcpus,
				r->who.allow_emulated ? "" : " with hardware isolation (KVM)",
				r->who.allow_emulated ? "" : " or allow your organization emulated ones (ephemeral admin org set ",
				r->who.allow_emulated ? "" : r->who.org_id, r->who.allow_emulated ? "" : " --allow-emulated yes)");
		return;
	case STORE_ORG_DISABLED:
		api_problem(r, PROBLEM_FORBIDDEN, "Your organization is disabled. Ask the operator of this service.");
		return;
	case STORE_ADMISSIBLE: break;
	}
	api_problem(r, PROBLEM_INTERNAL, "The service made a mistake. Tell the operator this request_id.");
}

/* --- the create --------------------------------------------------------------------------------------------------------- */

static void fill_lists(const struct run_request *rq, struct store_file *files, struct store_pair *pairs)
{
	size_t i;

	for (i = 0; i < rq->file_count; i++) {
		files[i] = (struct store_file){ .path = rq->files[i].path, .size = rq->files[i].size, .data = rq->files[i].data };
		memcpy(files[i].sha256, rq->files[i].sha256, sizeof(files[i].sha256));
	}
	for (i = 0; i < rq->metadata_count; i++)
		pairs[i] = (struct store_pair){ .key = rq->metadata[i].key, .value = rq->metadata[i].value };
}

/* What the store needs to judge a create; `create_now` adds what it needs to make one. */
static struct store_run_new what_is_asked(const struct api_req *r)
{
	const struct creation *cr = r->state;
	const struct run_request *rq = cr->rq;
	struct store_run_new n = {
		.org_id = r->who.org_id,
		.key_id = r->who.key_id,
		.member_id = r->who.member_id,
		.idempotency_key = rq->idempotency_key[0] ? rq->idempotency_key : NULL,
		.request_json = (const char *)cr->echo.data,
		.prompt = rq->prompt,
		.prompt_len = rq->prompt_len,
		.model = cr->model,
		.price = cr->price,
		.cap_micros = cr->cap_micros,
		.timeout_s = (uint32_t)rq->timeout_seconds,
		.max_model_calls = (uint32_t)rq->max_model_calls,
		.memory_mib = r->api->opt.sizes[rq->size].memory_mib,
		.vcpus = r->api->opt.sizes[rq->size].vcpus,
		.size = api_size_name(rq->size),
		.shell = rq->shell,
		.allow_emulated = r->who.allow_emulated,
	};

	memcpy(n.idempotency_hash, cr->identity, sizeof(n.idempotency_hash));
	memcpy(n.request_hash, cr->request_hash, sizeof(n.request_hash));
	return n;
}

static void on_create(void *arg, const struct store_create *c, const struct err *e)
{
	struct api_req *r = arg;
	const struct creation *cr = r->state;

	if (e && e->code == ERR_CONFLICT && cr->rq->idempotency_key[0] && r->http) {
		/* Its row is locked by a request with the same key that takes long. */
		r = api_back(arg, NULL);
		if (r)
			api_problem(r, PROBLEM_IDEMPOTENCY_IN_PROGRESS,
					"A request with this Idempotency-Key is still in progress; send it again.");
		return;
	}
	r = api_back(arg, e);
	if (r)
		answer_result(r, c);
}

static void create_now(struct api_req *r)
{
	const struct run_request *rq = ((struct creation *)r->state)->rq;
	struct store_file files[RUN_FILES_MAX];
	struct store_pair pairs[RUN_METADATA_MAX];
	struct store_run_new n = what_is_asked(r);
	struct err e;

	n.metadata = pairs;
	n.metadata_count = rq->metadata_count;
	n.files = files;
	n.file_count = rq->file_count;
	fill_lists(rq, files, pairs);
	api_asked(store_run_create(r->api->opt.store, &n, on_create, api_hold(r), &e), r, &e);
}

/* --- asking the store before anything is stored or refused ---------------------------------------------------------------- */

/* The errors are the request's own and go with it: they are answered from a copy. */
static void answer_errors(struct api_req *r)
{
	struct creation *cr = r->state;
	struct field_errors fe = cr->errors;

	field_errors_init(&cr->errors);
	api_problem_fields(r, &fe);
}

static void on_judged(void *arg, const struct store_create *c, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	const struct creation *cr = r ? r->state : NULL;

	if (!r)
		return;
	if (cr->refused && c->result != STORE_REPLAYED && c->result != STORE_IDEMPOTENCY_MISMATCH)
		answer_errors(r);
	else if (c->result == STORE_ADMISSIBLE)
		create_now(r);
	else
		answer_result(r, c);
}

static void judge(struct api_req *r)
{
	struct store_run_new n = what_is_asked(r);
	struct err e;

	api_asked(store_run_judge(r->api->opt.store, &n, on_judged, api_hold(r), &e), r, &e);
}

static void refuse_at(struct api_req *r, const char *field, const char *fmt, ...) EPH_PRINTF(3, 4);

/* A 400 for one field that only the database could judge. What it says may have changed since a request was answered: one that is
 * repeated with its key gets its run, so the key is looked up first. */
static void refuse_at(struct api_req *r, const char *field, const char *fmt, ...)
{
	struct creation *cr = r->state;
	struct pointer at = { .up = NULL, .key = field };
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	if (vsnprintf(text, sizeof(text), fmt, ap) < 0)
		text[0] = '\0';
	va_end(ap);
	field_bad(&cr->errors, &at, "%s", text);
	cr->refused = true;
	if (cr->rq->idempotency_key[0])
		judge(r);
	else
		answer_errors(r);
}

/* --- the model ---------------------------------------------------------------------------------------------------------------- */

/* The first call must be payable, or the run would end before it began. */
static int64_t minimum_cap(const struct store_model *m, const struct run_request *rq)
{
	int64_t tokens = m->spec.overhead_tokens, per_byte = m->spec.tokens_per_byte_milli;
	int64_t bytes = (int64_t)rq->prompt_len + AGENT_REQUEST_BYTES;
	int64_t call_ms = (int64_t)rq->timeout_seconds * 1000;

	if (per_byte > 0 && per_byte <= 1000000)
		tokens += (bytes * per_byte + 999) / 1000;
	return price_min_cap(&m->price, tokens, m->spec.min_output_tokens,
			call_ms < m->spec.call_timeout_ms ? call_ms : m->spec.call_timeout_ms);
}

/* False: r is answered, or will be. */
static bool model_is_fine(struct api_req *r, const struct store_models *models)
{
	const struct creation *cr = r->state;
	const struct store_model *m = &models->models[0];
	int64_t minimum;

	if (models->count == 0) {
		refuse_at(r, "model", "is %.128s, which is no model here; GET /v1/models lists them", cr->model);
		return false;
	}
	if (!m->priced) {
		refuse_at(r, "model",
				"is %.128s, which has no price yet, so nothing can be reserved for it; choose another or ask the "
				"operator",
				cr->model);
		return false;
	}
	minimum = minimum_cap(m, cr->rq);
	if (cr->cap_micros < minimum) {
		refuse_at(r, "max_cost_micros",
				"is %" PRId64 "%s, but one call of %.128s with this prompt needs at least %" PRId64
				"; raise it or choose a cheaper model",
				cr->cap_micros, cr->rq->max_cost_micros ? "" : " (the default)", cr->model, minimum);
		return false;
	}
	return true;
}

static void on_model(void *arg, const struct store_models *models, const struct err *e)
{
	struct api_req *r = api_back(arg, e);
	struct creation *cr = r ? r->state : NULL;

	if (!r || !model_is_fine(r, models))
		return;
	cr->price = models->models[0].price;
	if (cr->rq->file_count > 0)
		judge(r); /* so that what is refused leaves no files behind */
	else
		create_now(r);
}

/* --- from the body on --------------------------------------------------------------------------------------------------- */

static void go_on(struct api_req *r)
{
	struct creation *cr = r->state;
	const char *model;
	struct err e;

	if (field_errors_any(&cr->errors)) {
		answer_errors(r);
		return;
	}
	if (cr->no_memory) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
		return;
	}
	cr->wait_seconds = prefer_wait(http_header(r->http, "Prefer"));
	cr->cap_micros = cr->rq->max_cost_micros      ? cr->rq->max_cost_micros
			 : r->who.default_cost_micros ? r->who.default_cost_micros
						      : r->api->opt.default_cost_micros;
	model = cr->rq->model ? cr->rq->model : r->who.default_model;
	if (!*model || !text_copy(cr->model, sizeof(cr->model), model)) {
		refuse_at(r, "model", "is missing, and your organization has no default; GET /v1/models lists them");
		return;
	}
	api_asked(store_model_get(r->api->opt.store, cr->model, on_model, api_hold(r), &e), r, &e);
}

static void read_there(struct worker_item *it)
{
	creation_read((struct creation *)(void *)it);
}

static void on_read(struct worker_item *it, bool ran)
{
	struct api_req *r = api_back(((struct creation *)(void *)it)->r, NULL);

	(void)ran; /* when the worker ended before, the api has, and nobody is there to be answered */
	if (r)
		go_on(r);
}

/* On the worker's thread, because the loop would stand still for as long as it takes. */
static void read_elsewhere(struct api_req *r, size_t size)
{
	struct creation *cr = r->state;
	struct api *a = r->api;

	if (creations_bytes(a) + size <= a->large_max) {
		cr->item = (struct worker_item){ .weight = size, .run = read_there, .done = on_read };
		creation_count(cr, size);
		api_hold(r);
		if (worker_post(a->worker, &cr->item))
			return;
		r->holds--;
	}
	api_problem(r, PROBLEM_UNAVAILABLE,
			"This server reads as many large requests as it may (%zu MiB together). Send it again in a moment.",
			a->large_max / 1024 / 1024);
}

void runs_create(struct api_req *r)
{
	const size_t size = http_body_size(r->http);
	struct creation *cr = creation_new(r);

	if (!cr) {
		api_problem(r, PROBLEM_UNAVAILABLE, "Memory is short; send the request again.");
		return;
	}
	if (http_header_count(r->http, "Idempotency-Key") > 1)
		header_bad(&cr->errors, "Idempotency-Key", "stands there more than once; send it once");
	if (size > INLINE_BODY_MAX) {
		read_elsewhere(r, size);
		return;
	}
	creation_read(cr);
	go_on(r);
}
