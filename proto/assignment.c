/* Codecs of the assignment, its secrets and the end of a run (assignment.h). Pure. */
#include "assignment.h"

#include "common/wire.h"
#include "errcode.h"

#include <stdlib.h>
#include <string.h>

static void price_encode(const struct price *p, struct buf *out)
{
	const int64_t v[] = { p->run_fee, p->compute, p->input, p->cached_input, p->output, p->model_percent, p->web_request,
		p->web_search };

	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		wire_put_i64(out, v[i]);
}

static int64_t money_decode(struct wire_reader *r)
{
	int64_t v = wire_i64(r);

	if (v < 0 || v > PRICE_MICROS_MAX)
		wire_fail(r, "amount");
	return v;
}

static void price_decode(struct wire_reader *r, struct price *p)
{
	int64_t *const v[] = { &p->run_fee, &p->compute, &p->input, &p->cached_input, &p->output, &p->model_percent,
		&p->web_request, &p->web_search };

	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		*v[i] = money_decode(r);
}

static void model_spec_encode(const struct model_spec *m, struct buf *out)
{
	wire_put_str(out, m->id);
	wire_put_str(out, m->upstream);
	wire_put_str(out, m->base_url);
	wire_put_bool(out, m->any_address);
	wire_put_u8(out, (uint8_t)m->limit_param);
	wire_put_i64(out, m->max_output_tokens);
	wire_put_i64(out, m->min_output_tokens);
	wire_put_i64(out, m->tokens_per_byte_milli);
	wire_put_i64(out, m->overhead_tokens);
	wire_put_i64(out, m->call_timeout_ms);
}

static void model_spec_decode(struct wire_reader *r, struct model_spec *m)
{
	uint8_t limit;

	wire_str_fixed(r, m->id, sizeof(m->id));
	wire_str_fixed(r, m->upstream, sizeof(m->upstream));
	wire_str_fixed(r, m->base_url, sizeof(m->base_url));
	m->any_address = wire_bool(r);
	limit = wire_u8(r);
	if (limit != LIMIT_MAX_COMPLETION_TOKENS && limit != LIMIT_MAX_TOKENS)
		wire_fail(r, "limit parameter");
	m->limit_param = (enum limit_param)limit;
	m->max_output_tokens = money_decode(r);
	m->min_output_tokens = money_decode(r);
	m->tokens_per_byte_milli = money_decode(r);
	m->overhead_tokens = money_decode(r);
	m->call_timeout_ms = money_decode(r);
}

void assignment_encode(const struct assignment *a, struct buf *out)
{
	wire_put_str(out, a->run_id);
	wire_put_raw(out, a->token, TOKEN_LEN);
	wire_put_u32(out, a->attempt);
	wire_put_i64(out, a->queued_at_ms);
	wire_put_i64(out, a->age_ms);
	wire_put_u64(out, a->next_seq);
	wire_put_raw(out, a->prev_hash, EVENT_HASH_LEN);
	wire_put_raw(out, a->request_hash, SHA256_LEN);
	wire_put_u32(out, a->timeout_s);
	wire_put_u32(out, a->max_model_calls);
	wire_put_u32(out, a->memory_mib);
	wire_put_u32(out, a->vcpus);
	wire_put_bool(out, a->shell);
	wire_put_bool(out, a->zero_data_retention);
	wire_put_i64(out, a->cap_micros);
	price_encode(&a->price, out);
	model_spec_encode(&a->model, out);
	wire_put_str(out, a->prompt);
	wire_put_u32(out, a->file_count);
	for (uint32_t i = 0; i < a->file_count; i++) {
		wire_put_str(out, a->files[i].path);
		wire_put_u64(out, a->files[i].size);
		wire_put_raw(out, a->files[i].sha256, SHA256_LEN);
	}
}

static void files_decode(struct wire_reader *r, struct assignment *out)
{
	uint32_t count = wire_count(r, GUEST_FILES_MAX);

	if (r->failed || count == 0)
		return;
	out->files = calloc(count, sizeof(*out->files));
	if (!out->files) {
		wire_fail(r, "memory");
		return;
	}
	out->file_count = count;
	for (uint32_t i = 0; i < count && !r->failed; i++) {
		wire_str_fixed(r, out->files[i].path, sizeof(out->files[i].path));
		out->files[i].size = wire_u64(r);
		wire_raw(r, out->files[i].sha256, SHA256_LEN);
		if (!r->failed && (!guest_path_ok(out->files[i].path) || out->files[i].size > GUEST_FILE_MAX))
			wire_fail(r, "file");
	}
}

int assignment_decode(const void *p, size_t n, struct assignment *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct assignment){ .attempt = 0 };
	if (n > ASSIGNMENT_MAX)
		return err_set(e, ERR_LIMIT, "assignment: %zu bytes, the limit is %d", n, ASSIGNMENT_MAX);
	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->run_id, sizeof(out->run_id));
	wire_raw(&r, out->token, TOKEN_LEN);
	out->attempt = wire_u32(&r);
	out->queued_at_ms = money_decode(&r);
	out->age_ms = money_decode(&r);
	out->next_seq = wire_u64(&r);
	wire_raw(&r, out->prev_hash, EVENT_HASH_LEN);
	wire_raw(&r, out->request_hash, SHA256_LEN);
	out->timeout_s = wire_u32(&r);
	out->max_model_calls = wire_u32(&r);
	out->memory_mib = wire_u32(&r);
	out->vcpus = wire_u32(&r);
	out->shell = wire_bool(&r);
	out->zero_data_retention = wire_bool(&r);
	out->cap_micros = money_decode(&r);
	price_decode(&r, &out->price);
	model_spec_decode(&r, &out->model);
	out->prompt = wire_str(&r, GUEST_PROMPT_MAX);
	files_decode(&r, out);
	if (!r.failed && !id_valid("run", out->run_id))
		wire_fail(&r, "run id");
	if (!r.failed &&
			(out->next_seq == 0 || out->attempt == 0 || out->timeout_s == 0 || out->memory_mib == 0 || out->vcpus == 0))
		wire_fail(&r, "zero where a number is needed");
	if (wire_end(&r, "assignment", e)) {
		assignment_free(out);
		return -1;
	}
	return 0;
}

void assignment_free(struct assignment *a)
{
	free(a->prompt);
	free(a->files);
	*a = (struct assignment){ .attempt = 0 };
}

void run_secrets_encode(const struct run_secrets *s, struct buf *out)
{
	wire_put_str(out, s->model_key);
}

int run_secrets_decode(const void *p, size_t n, struct run_secrets *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->model_key, sizeof(out->model_key));
	return wire_end(&r, "run secrets", e);
}

static void usage_encode(const struct usage *u, struct buf *out)
{
	const int64_t v[] = { u->model_calls, u->input_tokens, u->cached_input_tokens, u->output_tokens, u->web_requests,
		u->web_searches, u->compute_ms, u->unmetered_model_micros };

	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		wire_put_i64(out, v[i]);
}

static void usage_decode(struct wire_reader *r, struct usage *u)
{
	int64_t *const v[] = { &u->model_calls, &u->input_tokens, &u->cached_input_tokens, &u->output_tokens, &u->web_requests,
		&u->web_searches, &u->compute_ms, &u->unmetered_model_micros };

	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		*v[i] = money_decode(r);
}

void run_end_encode(const struct run_end *x, struct buf *out)
{
	wire_put_u32(out, x->code);
	wire_put_str(out, x->detail);
	usage_encode(&x->usage, out);
	wire_put_i64(out, x->cost.run_fee);
	wire_put_i64(out, x->cost.compute);
	wire_put_i64(out, x->cost.model);
	wire_put_i64(out, x->cost.web);
	wire_put_i64(out, x->cost.total);
	wire_put_u64(out, x->last_seq);
	wire_put_raw(out, x->last_hash, EVENT_HASH_LEN);
	wire_put_i64(out, x->worker_started_t_ms);
	wire_put_raw(out, x->image_hash, SHA256_LEN);
	wire_put_str(out, x->isolation);
	wire_put_raw(out, x->receipt_signature, sizeof(x->receipt_signature));
	wire_put_bytes(out, x->output, x->output_len);
}

static void cost_decode(struct wire_reader *r, struct cost *c)
{
	c->run_fee = money_decode(r);
	c->compute = money_decode(r);
	c->model = money_decode(r);
	c->web = money_decode(r);
	c->total = money_decode(r);
	if (!r->failed && c->run_fee + c->compute + c->model + c->web != c->total)
		wire_fail(r, "cost parts that do not add up");
}

int run_end_decode(const void *p, size_t n, struct run_end *out, struct err *e)
{
	struct wire_reader r;
	const uint8_t *bytes;
	size_t len = 0;

	*out = (struct run_end){ .code = 0 };
	wire_read_init(&r, p, n);
	out->code = wire_u32(&r);
	if (out->code >= ERRCODE_COUNT)
		wire_fail(&r, "code");
	wire_str_fixed(&r, out->detail, sizeof(out->detail));
	usage_decode(&r, &out->usage);
	cost_decode(&r, &out->cost);
	out->last_seq = wire_u64(&r);
	wire_raw(&r, out->last_hash, EVENT_HASH_LEN);
	out->worker_started_t_ms = wire_i64(&r);
	wire_raw(&r, out->image_hash, SHA256_LEN);
	wire_str_fixed(&r, out->isolation, sizeof(out->isolation));
	wire_raw(&r, out->receipt_signature, sizeof(out->receipt_signature));
	bytes = wire_bytes(&r, GUEST_RESULT_MAX, &len);
	if (wire_end(&r, "run end", e))
		return -1;
	out->output = malloc(len + 1);
	if (!out->output)
		return err_set(e, ERR_NOMEM, "run end: no memory for %zu bytes of output", len);
	if (len > 0)
		memcpy(out->output, bytes, len);
	out->output[len] = '\0';
	out->output_len = (uint32_t)len;
	return 0;
}

void run_end_free(struct run_end *x)
{
	free(x->output);
	*x = (struct run_end){ .code = 0 };
}
