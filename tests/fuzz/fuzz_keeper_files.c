/*
 * What keeper reads from its disk and its kernel: journal entries, identity, the image's description, /proc texts. First byte:
 * which.
 *
 * 0 a journal entry with its check made right here, 1 as it is: what decodes has one encoding. 2 state_dir/node, 3 identity.key: a
 * node that counts as enrolled has an id. 4 image.json beside three files: nothing passes but with their true hashes. 5 the texts
 * of cgroups and mounts, 6 of /proc/PID/stat and status.
 */
/* link: noded_core */
/* reads: noded/keeper/journal.c noded/keeper/identity.c noded/keeper/image.c noded/jail/cgroup_parse.c */
/* reached: 69 % of lines, 67 % of branches; the rest makes and stores keys, enrols, signs; processes that live */
#include "fuzz_dir.h"

#include "common/log.h"
#include "common/text.h"
#include "keeper/host_internal.h"
#include "keeper/identity.h"
#include "keeper/journal.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>

static void put(const char *name, const void *p, size_t n)
{
	char path[128];
	int fd;

	must(text_fmt(path, sizeof(path), "%s/%s", fuzz_dir, name));
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	must(fd >= 0 && write(fd, p, n) == (ssize_t)n);
	close(fd);
}

static void drop(const char *name)
{
	char path[128];

	must(text_fmt(path, sizeof(path), "%s/%s", fuzz_dir, name));
	(void)unlink(path);
}

static void prepare(void)
{
	log_init("fuzz", LOG_LEVEL_ERROR + 1, false);
	must(sodium_init() >= 0);
	put("vmlinux", "kernel", 6);
	put("initramfs.cpio", "initramfs", 9);
	put("rootfs.sqfs", "rootfs", 6);
}

static void journal(const uint8_t *p, size_t n, bool mend)
{
	struct buf in = BUF_INIT(JOURNAL_MAX), again = BUF_INIT(JOURNAL_MAX);
	uint8_t check[16];
	struct journal j;
	struct err e;

	must(n + sizeof(check) > JOURNAL_MAX || buf_add(&in, p, n));
	if (mend && in.len == n) {
		crypto_generichash(check, sizeof(check), p, n, NULL, 0);
		must(buf_add(&in, check, sizeof(check)));
	}
	if (journal_decode(in.data, in.len, &j, &e) == 0) {
		must(id_valid("vm", j.vm) && (j.kind == JOURNAL_RUN ? id_valid("run", j.run_id) : j.run_id[0] == '\0'));
		journal_encode(&j, &again);
		if (in.data[4] == JOURNAL_VERSION)
			must(again.len == in.len && memcmp(again.data, in.data, in.len) == 0);
	}
	buf_free(&in);
	buf_free(&again);
}

/* A good key file, so that the node's is reached. */
static void identity(const uint8_t *p, size_t n, bool node)
{
	static const uint8_t key[6 + 96] = { 'E', 'P', 'H', 'K', 1 };
	static struct role_link_init init;
	struct identity *id;
	struct err e;

	put("identity.key", node ? key : p, node ? sizeof(key) : n);
	drop("node");
	if (node)
		put("node", p, n);
	if (identity_open(fuzz_dir, &id, &e) == 0) {
		must(!identity_enrolled(id) || id_valid("node", identity_node_id(id)));
		identity_fill(id, &init);
		must(strlen(init.addresses) < sizeof(init.addresses) && strlen(init.ca_pem) < sizeof(init.ca_pem));
		identity_free(id);
	} else {
		must(*e.text && text_utf8_valid(e.text, strlen(e.text)));
	}
}

static void image(const uint8_t *p, size_t n)
{
	static const char *const texts[] = { "kernel", "initramfs", "rootfs" };
	static struct host h;
	struct err e;

	memset(&h, 0, sizeof(h));
	for (int i = 0; i < IMAGE_FILES; i++)
		h.image_fd[i] = -1;
	put("image.json", p, n);
	if (host_open_image(&h, fuzz_dir, &e) == 0) {
		for (int i = 0; i < IMAGE_FILES; i++) {
			char hex[2 * SHA256_LEN + 1];
			uint8_t hash[SHA256_LEN];

			crypto_hash_sha256(hash, (const uint8_t *)texts[i], strlen(texts[i]));
			text_hex(hash, sizeof(hash), hex);
			must(memmem(p, n, hex, strlen(hex)) != NULL);
		}
		must(strlen(h.image_name) == 2 * SHA256_LEN && memmem(p, n, h.image_name, 2 * SHA256_LEN));
	} else {
		must(*e.text && text_utf8_valid(e.text, strlen(e.text)));
	}
	for (int i = 0; i < IMAGE_FILES; i++)
		if (h.image_fd[i] >= 0)
			close(h.image_fd[i]);
}

static void cgroups(const char *text)
{
	static const char *const controllers[] = { "", "memory", "pids" };
	char path[64], point[64], root[64], all[160];

	for (size_t i = 0; i < sizeof(controllers) / sizeof(controllers[0]); i++) {
		path[0] = '\0';
		if (cgroup_parse_self(text, controllers[i], path, sizeof(path)))
			must(strlen(path) < sizeof(path) && strstr(text, path) && !strchr(path, '\n'));
		if (!cgroup_parse_mount(text, controllers[i], point, root, sizeof(point)))
			continue;
		must(strlen(point) < sizeof(point) && strlen(root) < sizeof(root));
		if (cgroup_join(point, root, path, all, sizeof(all)))
			must(strncmp(all, point, strlen(point)) == 0);
	}
}

static void processes(const char *text)
{
	uint64_t start;
	uint32_t uid;
	char state;

	if (journal_parse_stat(text, &start, &state))
		must(state != '\0');
	if (slots_parse_status(text, &uid, &state))
		must(state != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	char *text;

	if (fuzz_dir_made())
		prepare();
	if (n < 1)
		return 0;
	switch (p[0] % 8) {
	case 0: journal(p + 1, n - 1, true); return 0;
	case 1: journal(p + 1, n - 1, false); return 0;
	case 2: identity(p + 1, n - 1, true); return 0;
	case 3: identity(p + 1, n - 1, false); return 0;
	case 4: image(p + 1, n - 1); return 0;
	default: break;
	}
	text = strndup((const char *)p + 1, n - 1);
	must(text);
	if (p[0] % 8 == 5)
		cgroups(text);
	else
		processes(text);
	free(text);
	return 0;
}
