/* Node link: images of guests, and goodbye (link.h). Pure. */
#include "link.h"

#include "common/text.h"
#include "common/wire.h"

#include <sodium.h>

void link_image_hash(const uint8_t sha256[LINK_IMAGE_FILES][SHA256_LEN], uint8_t out[SHA256_LEN])
{
	static const char *const names[LINK_IMAGE_FILES] = { "kernel ", "initramfs ", "rootfs " };
	crypto_hash_sha256_state state;
	char hex[2 * SHA256_LEN + 1];

	crypto_hash_sha256_init(&state);
	for (int i = 0; i < LINK_IMAGE_FILES; i++) {
		text_hex(sha256[i], SHA256_LEN, hex);
		crypto_hash_sha256_update(&state, (const uint8_t *)names[i], strlen(names[i]));
		crypto_hash_sha256_update(&state, (const uint8_t *)hex, strlen(hex));
		crypto_hash_sha256_update(&state, (const uint8_t *)"\n", 1);
	}
	crypto_hash_sha256_final(&state, out);
}

size_t link_image_message(const char *node_id, const uint8_t hash[SHA256_LEN], uint8_t out[128])
{
	char text[128 - SHA256_LEN + 1];
	size_t n;

	if (!text_fmt(text, sizeof(text), "ephemeral/image/1%s", node_id))
		return 0;
	n = strlen(text);
	memcpy(out, text, n);
	memcpy(out + n, hash, SHA256_LEN);
	return n + SHA256_LEN;
}

void link_image_encode(const struct link_image *m, struct buf *out)
{
	wire_put_str(out, m->current);
	wire_put_str(out, m->state);
	wire_put_str(out, m->note);
}

int link_image_decode(const void *p, size_t n, struct link_image *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->current, sizeof(out->current));
	wire_str_fixed(&r, out->state, sizeof(out->state));
	wire_str_fixed(&r, out->note, sizeof(out->note));
	return wire_end(&r, "image", e);
}

void link_image_reply_encode(const struct link_image_reply *m, struct buf *out)
{
	wire_put_bool(out, m->wanted);
	for (int i = 0; i < LINK_IMAGE_FILES; i++) {
		wire_put_raw(out, m->sha256[i], SHA256_LEN);
		wire_put_u64(out, m->size[i]);
	}
	wire_put_raw(out, m->signature, sizeof(m->signature));
}

int link_image_reply_decode(const void *p, size_t n, struct link_image_reply *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	out->wanted = wire_bool(&r);
	for (int i = 0; i < LINK_IMAGE_FILES; i++) {
		wire_raw(&r, out->sha256[i], SHA256_LEN);
		out->size[i] = wire_u64(&r);
		if (out->size[i] > LINK_IMAGE_BYTES_MAX || (out->wanted && out->size[i] == 0))
			wire_fail(&r, "size");
	}
	wire_raw(&r, out->signature, sizeof(out->signature));
	return wire_end(&r, "image reply", e);
}

void link_image_blob_encode(const struct link_image_blob *m, struct buf *out)
{
	wire_put_raw(out, m->sha256, SHA256_LEN);
	wire_put_u64(out, m->offset);
}

int link_image_blob_decode(const void *p, size_t n, struct link_image_blob *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_raw(&r, out->sha256, SHA256_LEN);
	out->offset = wire_u64(&r);
	if (out->offset % LINK_BLOB_MAX != 0 || out->offset >= LINK_IMAGE_BYTES_MAX)
		wire_fail(&r, "offset");
	return wire_end(&r, "image blob", e);
}

void link_bye_encode(const struct link_bye *m, struct buf *out)
{
	wire_put_u64(out, m->epoch);
}

int link_bye_decode(const void *p, size_t n, struct link_bye *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	out->epoch = wire_u64(&r);
	return wire_end(&r, "bye", e);
}
