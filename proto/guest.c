/* Frames and messages of the guest channel (guest.h). Used by channel on the host and by guest-agent. Pure. */
#include "guest.h"

#include "common/text.h"
#include "common/wire.h"
#include "event.h"

#include <stdlib.h>
#include <string.h>

void guest_frame_put(struct buf *out, enum guest_frame type, uint32_t stream, const void *body, size_t n)
{
	if (n > GUEST_BODY_MAX) {
		out->failed = true;
		return;
	}
	wire_put_u32(out, (uint32_t)(n + 5));
	wire_put_u8(out, (uint8_t)type);
	wire_put_u32(out, stream);
	wire_put_raw(out, body, n);
}

int guest_frame_next(const void *p, size_t n, struct guest_frame_view *out, struct err *e)
{
	struct wire_reader r;
	uint32_t len;

	if (n < 4)
		return 0;
	wire_read_init(&r, p, n);
	len = wire_u32(&r);
	if (len < 5 || len > GUEST_FRAME_MAX)
		return err_set(e, ERR_PROTOCOL, "guest frame of length %u (allowed 5 to %d)", len, GUEST_FRAME_MAX);
	if (n - 4 < len)
		return 0;
	out->type = wire_u8(&r);
	out->stream = wire_u32(&r);
	out->body = r.p;
	out->n = len - 5;
	out->total = (size_t)len + 4;
	return 1;
}

void guest_hello_encode(const struct guest_hello *h, struct buf *out)
{
	wire_put_raw(out, h->nonce, GUEST_NONCE_LEN);
	wire_put_u32(out, h->protocol);
	wire_put_str(out, h->kernel);
	wire_put_str(out, h->agent);
	wire_put_u32(out, h->memory_mib);
}

int guest_hello_decode(const void *p, size_t n, struct guest_hello *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct guest_hello){ .protocol = 0 };
	wire_read_init(&r, p, n);
	wire_raw(&r, out->nonce, GUEST_NONCE_LEN);
	out->protocol = wire_u32(&r);
	wire_str_fixed(&r, out->kernel, sizeof(out->kernel));
	wire_str_fixed(&r, out->agent, sizeof(out->agent));
	out->memory_mib = wire_u32(&r);
	return wire_end(&r, "hello", e);
}

bool guest_path_ok(const char *path)
{
	size_t n = strlen(path);
	const char *p = path;

	if (n == 0 || n > GUEST_PATH_MAX || path[0] == '/' || !text_utf8_clean(path, n))
		return false;
	while (true) {
		size_t part = strcspn(p, "/");

		if (part == 0 || part > 255 || (part == 1 && p[0] == '.') || (part == 2 && p[0] == '.' && p[1] == '.'))
			return false;
		for (size_t i = 0; i < part; i++)
			if ((unsigned char)p[i] < 0x20 || p[i] == 0x7f)
				return false;
		if (p[part] == '\0')
			return true;
		p += part + 1;
	}
}

void guest_setup_encode(const struct guest_setup *s, struct buf *out)
{
	wire_put_i64(out, s->real_ns);
	wire_put_raw(out, s->entropy, GUEST_ENTROPY_LEN);
	wire_put_bool(out, s->shell);
	wire_put_u32(out, s->max_model_calls);
	wire_put_u32(out, s->tool_timeout_ms);
	wire_put_str(out, s->prompt);
	wire_put_u32(out, s->file_count);
	for (uint32_t i = 0; i < s->file_count; i++) {
		wire_put_str(out, s->files[i].path);
		wire_put_u64(out, s->files[i].size);
	}
}

static void setup_files_decode(struct wire_reader *r, struct guest_setup *out)
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
		if (!r->failed && (!guest_path_ok(out->files[i].path) || out->files[i].size > GUEST_FILE_MAX))
			wire_fail(r, "file");
	}
}

int guest_setup_decode(const void *p, size_t n, struct guest_setup *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct guest_setup){ .real_ns = 0 };
	wire_read_init(&r, p, n);
	out->real_ns = wire_i64(&r);
	wire_raw(&r, out->entropy, GUEST_ENTROPY_LEN);
	out->shell = wire_bool(&r);
	out->max_model_calls = wire_u32(&r);
	out->tool_timeout_ms = wire_u32(&r);
	out->prompt = wire_str(&r, GUEST_PROMPT_MAX);
	setup_files_decode(&r, out);
	if (wire_end(&r, "setup", e)) {
		guest_setup_free(out);
		return -1;
	}
	return 0;
}

void guest_setup_free(struct guest_setup *s)
{
	free(s->prompt);
	free(s->files);
	*s = (struct guest_setup){ .real_ns = 0 };
}

void guest_setup_ack_encode(const struct guest_setup_ack *a, struct buf *out)
{
	wire_put_bool(out, a->reseeded);
	wire_put_bool(out, a->clock_set);
	wire_put_str(out, a->workdir);
	wire_put_str(out, a->boot_id);
}

/* What our agent writes and the timeline shows as the host's: nothing but these characters, and not nothing. */
static bool made_of(const char *text, const char *allowed)
{
	return *text != '\0' && text[strspn(text, allowed)] == '\0';
}

int guest_setup_ack_decode(const void *p, size_t n, struct guest_setup_ack *out, struct err *e)
{
	static const char path[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-";
	struct wire_reader r;

	*out = (struct guest_setup_ack){ .reseeded = false };
	wire_read_init(&r, p, n);
	out->reseeded = wire_bool(&r);
	out->clock_set = wire_bool(&r);
	wire_str_fixed(&r, out->workdir, sizeof(out->workdir));
	wire_str_fixed(&r, out->boot_id, sizeof(out->boot_id));
	if (!r.failed && (out->workdir[0] != '/' || !made_of(out->workdir, path)))
		wire_fail(&r, "workdir");
	if (!r.failed && !made_of(out->boot_id, "0123456789abcdef-"))
		wire_fail(&r, "boot_id");
	return wire_end(&r, "setup_ack", e);
}

void guest_event_encode(const struct guest_event *ev, struct buf *out)
{
	wire_put_u8(out, (uint8_t)ev->kind);
	wire_put_str(out, ev->call_id);
	wire_put_bytes(out, ev->text, ev->text_len);
	wire_put_u8(out, ev->stream);
	wire_put_str(out, ev->name);
	wire_put_str(out, ev->path);
	wire_put_i64(out, ev->bytes);
	wire_put_bool(out, ev->has_signal);
	wire_put_bool(out, ev->timed_out);
	wire_put_u32(out, (uint32_t)ev->code);
	wire_put_u32(out, ev->duration_ms);
	wire_put_u64(out, ev->cut_bytes);
}

int guest_event_decode(const void *p, size_t n, struct guest_event *out, struct err *e)
{
	struct wire_reader r;
	uint8_t kind;

	*out = (struct guest_event){ .bytes = -1 };
	wire_read_init(&r, p, n);
	kind = wire_u8(&r);
	if (kind < GE_SHELL_STARTED || kind > GE_NOTE)
		wire_fail(&r, "kind");
	out->kind = (enum guest_event_kind)kind;
	wire_str_fixed(&r, out->call_id, sizeof(out->call_id));
	out->text = wire_bytes(&r, EVENT_TEXT_MAX, &out->text_len);
	out->stream = wire_u8(&r);
	if (kind == GE_SHELL_OUTPUT && out->stream != 1 && out->stream != 2)
		wire_fail(&r, "stream");
	wire_str_fixed(&r, out->name, sizeof(out->name));
	wire_str_fixed(&r, out->path, sizeof(out->path));
	out->bytes = wire_i64(&r);
	out->has_signal = wire_bool(&r);
	out->timed_out = wire_bool(&r);
	out->code = (int32_t)wire_u32(&r);
	out->duration_ms = wire_u32(&r);
	out->cut_bytes = wire_u64(&r);
	if (out->code < 0 || out->code > 255)
		wire_fail(&r, "code");
	return wire_end(&r, "guest event", e);
}
