/* The journal's codec and files (journal.h). Keeper's thread; a store is two fsyncs. */
#include "keeper/journal.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "keeper/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sodium.h>
#include <string.h>
#include <unistd.h>

#define MAGIC UINT32_C(0x4a485045) /* "EPHJ" */
#define VERSION_OLD 1
#define CHECK_BYTES 16

void journal_encode(const struct journal *j, struct buf *out)
{
	uint8_t check[CHECK_BYTES];

	wire_put_u32(out, MAGIC);
	wire_put_u16(out, JOURNAL_VERSION);
	wire_put_str(out, j->vm);
	wire_put_str(out, j->run_id);
	wire_put_raw(out, j->token, TOKEN_LEN);
	wire_put_u32(out, j->attempt);
	wire_put_u8(out, (uint8_t)j->state);
	wire_put_u32(out, j->slot);
	wire_put_u32(out, j->memory_mib);
	wire_put_u32(out, j->vcpus);
	wire_put_i64(out, j->admitted_real_ms);
	wire_put_u64(out, j->first_seq);
	wire_put_raw(out, j->image_hash, SHA256_LEN);
	wire_put_bool(out, j->spool_is_memfd);
	wire_put_str(out, j->boot_id);
	for (int i = 0; i < SLOT_ROLES; i++) {
		wire_put_u32(out, (uint32_t)j->process[i].pid);
		wire_put_u64(out, j->process[i].start_time);
		wire_put_str(out, j->cgroup[i]);
	}
	wire_put_u8(out, (uint8_t)j->kind);
	wire_put_u8(out, (uint8_t)j->start_mode);
	wire_put_raw(out, j->ctl_nonce, JOURNAL_NONCE);
	wire_put_str(out, j->vmm);
	if (!out->failed)
		crypto_generichash(check, sizeof(check), out->data, out->len, NULL, 0);
	wire_put_raw(out, check, sizeof(check));
}

/* What version 2 added. */
static void read_kind(struct wire_reader *r, struct journal *out)
{
	uint8_t kind = wire_u8(r), start = wire_u8(r);

	if (kind < JOURNAL_RUN || kind > JOURNAL_GOLDEN)
		wire_fail(r, "kind");
	if (start < JOURNAL_COLD || start > JOURNAL_FROM_WARM)
		wire_fail(r, "start mode");
	out->kind = (enum journal_kind)kind;
	out->start_mode = (enum journal_start)start;
	wire_raw(r, out->ctl_nonce, JOURNAL_NONCE);
	wire_str_fixed(r, out->vmm, sizeof(out->vmm));
}

static bool ids_good(const struct journal *j)
{
	return id_valid("vm", j->vm) && (j->kind == JOURNAL_RUN ? id_valid("run", j->run_id) : j->run_id[0] == '\0');
}

int journal_decode(const void *p, size_t n, struct journal *out, struct err *e)
{
	struct wire_reader r;
	uint8_t check[CHECK_BYTES], state;
	uint16_t version;

	*out = (struct journal){ .kind = JOURNAL_RUN, .start_mode = JOURNAL_COLD };
	if (n < CHECK_BYTES)
		return err_set(e, ERR_INVALID, "journal entry is too short");
	crypto_generichash(check, sizeof(check), p, n - CHECK_BYTES, NULL, 0);
	if (memcmp(check, (const uint8_t *)p + n - CHECK_BYTES, CHECK_BYTES) != 0)
		return err_set(e, ERR_INVALID, "journal entry is damaged");
	wire_read_init(&r, p, n - CHECK_BYTES);
	if (wire_u32(&r) != MAGIC)
		wire_fail(&r, "magic");
	version = wire_u16(&r);
	if (version != JOURNAL_VERSION && version != VERSION_OLD)
		wire_fail(&r, "version");
	wire_str_fixed(&r, out->vm, sizeof(out->vm));
	wire_str_fixed(&r, out->run_id, sizeof(out->run_id));
	wire_raw(&r, out->token, TOKEN_LEN);
	out->attempt = wire_u32(&r);
	state = wire_u8(&r);
	if (state < JOURNAL_ADMITTED || state > JOURNAL_GONE)
		wire_fail(&r, "state");
	out->state = (enum journal_state)state;
	out->slot = wire_u32(&r);
	out->memory_mib = wire_u32(&r);
	out->vcpus = wire_u32(&r);
	out->admitted_real_ms = wire_i64(&r);
	out->first_seq = wire_u64(&r);
	wire_raw(&r, out->image_hash, SHA256_LEN);
	out->spool_is_memfd = wire_bool(&r);
	wire_str_fixed(&r, out->boot_id, sizeof(out->boot_id));
	for (int i = 0; i < SLOT_ROLES; i++) {
		out->process[i].pid = (int32_t)wire_u32(&r);
		out->process[i].start_time = wire_u64(&r);
		wire_str_fixed(&r, out->cgroup[i], sizeof(out->cgroup[i]));
	}
	if (version != VERSION_OLD)
		read_kind(&r, out);
	if (!r.failed && !ids_good(out))
		wire_fail(&r, "id");
	return wire_end(&r, "journal entry", e);
}

int journal_store(const char *dir, const struct journal *j, struct err *e)
{
	struct buf b = BUF_INIT(JOURNAL_MAX);
	int rc;

	journal_encode(j, &b);
	rc = b.failed ? err_set(e, ERR_INTERNAL, "journal entry is too long") : files_store(dir, j->vm, b.data, b.len, 0600, e);
	buf_free(&b);
	return rc;
}

int journal_remove(const char *dir, const char *vm, struct err *e)
{
	return files_remove(dir, vm, e);
}

static void set_aside(const char *path, const char *why)
{
	char bad[1024];

	if (!text_fmt(bad, sizeof(bad), "%s.bad", path) || rename(path, bad) != 0)
		bad[0] = '\0';
	log_error("journal entry cannot be used path=%s kept=%s error=\"%s\"", path, bad, why);
}

static void read_one(const char *dir, const char *name, void (*fn)(void *arg, const struct journal *j), void *arg)
{
	struct buf b = BUF_INIT(JOURNAL_MAX);
	struct journal j;
	char path[1024];
	struct err e;

	if (!text_fmt(path, sizeof(path), "%s/%s", dir, name))
		return;
	if (files_load(path, &b, &e) || journal_decode(b.data, b.len, &j, &e))
		set_aside(path, e.text);
	else if (strcmp(j.vm, name) != 0)
		set_aside(path, "it belongs to another VM");
	else
		fn(arg, &j);
	buf_free(&b);
}

/* ".NAME.tmp": what files_store had begun when its process was killed. */
static bool is_half_made(const char *name)
{
	size_t n = strlen(name);
	char id[ID_MAX];

	return n > 5 && name[0] == '.' && strcmp(name + n - 4, ".tmp") == 0 &&
	       text_fmt(id, sizeof(id), "%.*s", (int)(n - 5), name + 1) && id_valid("vm", id);
}

int journal_each(const char *dir, void (*fn)(void *arg, const struct journal *j), void *arg, struct err *e)
{
	DIR *d = opendir(dir);
	struct dirent *entry;

	if (!d)
		return err_set_errno(e, "open %s", dir);
	while ((entry = readdir(d)) != NULL)
		if (id_valid("vm", entry->d_name))
			read_one(dir, entry->d_name, fn, arg);
		else if (is_half_made(entry->d_name))
			unlinkat(dirfd(d), entry->d_name, 0);
	closedir(d);
	return 0;
}

int journal_boot_id(char out[BOOT_ID_MAX], struct err *e)
{
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, out, BOOT_ID_MAX - 1);

	if (n <= 0) {
		err_set_errno(e, "read the host's boot id");
		if (fd >= 0)
			close(fd);
		return -1;
	}
	close(fd);
	out[n] = '\0';
	out[strcspn(out, "\n")] = '\0';
	return 0;
}

/* "pid (name) state ppid ..."; the name may hold anything, so the last ')' is what counts. Start time is field 22. */
bool journal_parse_stat(const char *text, uint64_t *start_time, char *state)
{
	const char *p = strrchr(text, ')');

	if (!p || p[1] != ' ' || p[2] == '\0')
		return false;
	*state = p[2];
	p += 2;
	for (int i = 3; i < 22; i++) {
		p = strchr(p, ' ');
		if (!p)
			return false;
		p++;
	}
	if (*p < '0' || *p > '9')
		return false;
	*start_time = strtoull(p, NULL, 10);
	return true;
}

uint64_t journal_start_time(int32_t pid)
{
	char path[64], text[2048], state;
	uint64_t start = 0;
	ssize_t n;
	int fd;

	if (pid <= 0 || !text_fmt(path, sizeof(path), "/proc/%d/stat", pid))
		return 0;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = '\0';
	if (!journal_parse_stat(text, &start, &state) || state == 'Z' || state == 'X')
		return 0;
	return start;
}
