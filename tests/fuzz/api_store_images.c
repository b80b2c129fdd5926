/* Images that fuzz_api's store is asked about: the operator's alone, and what comes must fit. */
#include "api_store.h"

#include "proto/link.h"

const char *const store_image_files[STORE_IMAGE_FILES] = { "kernel", "initramfs", "rootfs" };

ANSWER(image_rows, store_images, store_images_cb)
{
	static struct store_image m[2];

	for (int i = 0; i < 2; i++) {
		m[i].note = NASTY;
		m[i].used_by = i ? "-" : ",pool=blue";
		m[i].previous_of = i ? "" : "-";
		COPY(m[i].hash, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef");
		COPY(m[i].kernel_version, NASTY);
		m[i].files[0].size = UINT64_C(1) << 62;
	}
	r->images = m;
	r->count = rows(o);
}

ANSWER(image_done, store_done, store_done_cb)
{
	r->result = o->what >= '1' && o->what <= '3' ? (enum store_done_result)(o->what - '0') : STORE_DONE;
	r->id = o->id;
	r->detail = o->what == '2' ? NASTY : "";
	played.changes += r->result == STORE_DONE;
}

static void hash_fits(const char *hash)
{
	operator_only();
	must(strlen(hash) == STORE_IMAGE_HASH_MAX - 1 && strspn(hash, "0123456789abcdef") == STORE_IMAGE_HASH_MAX - 1);
}

int store_image_list(struct store *s, const char *hash, store_images_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	if (hash)
		hash_fits(hash);
	return OWE(image_rows, "", 0);
}

int store_image_begin(struct store *s, const struct store_image *m, store_done_cb cb, void *arg, struct err *e)
{
	uint8_t all[LINK_IMAGE_FILES][SHA256_LEN], name[SHA256_LEN];
	char hex[STORE_IMAGE_HASH_MAX];

	(void)s;
	hash_fits(m->hash);
	for (int i = 0; i < STORE_IMAGE_FILES; i++) {
		within((int64_t)m->files[i].size, 1, STORE_IMAGE_FILE_BYTES_MAX);
		memcpy(all[i], m->files[i].sha256, SHA256_LEN);
	}
	link_image_hash((const uint8_t(*)[SHA256_LEN])all, name);
	text_hex(name, sizeof(name), hex);
	must(strcmp(hex, m->hash) == 0);
	text_fits(m->note, 0, 200);
	text_fits(m->kernel_version, 0, sizeof(m->kernel_version) - 1);
	return OWE(image_done, "", 0);
}

int store_image_put(struct store *s, const char *hash, const char *file, uint64_t offset, const void *data, size_t len,
		store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	(void)data;
	hash_fits(hash);
	text_fits(file, 1, 1024);
	must(offset % STORE_FILE_CHUNK == 0 && offset <= (uint64_t)STORE_IMAGE_FILE_BYTES_MAX && len > 0 && len <= 4 * 1024 * 1024);
	return OWE(image_done, "", 0);
}

int store_image_complete(struct store *s, const char *hash, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	hash_fits(hash);
	return OWE(image_done, "", 0);
}

int store_image_use(struct store *s, const char *label, const char *hash, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	operator_only();
	if (hash)
		hash_fits(hash);
	text_fits(label, 0, STORE_SELECTOR_MAX - 1);
	must(!*label || (strchr(label, '=') && !strpbrk(label, ", \"\\\n")));
	return OWE(image_done, "", 0);
}

int store_image_remove(struct store *s, const char *hash, store_done_cb cb, void *arg, struct err *e)
{
	(void)s;
	hash_fits(hash);
	return OWE(image_done, "", 0);
}
