/*
 * Makes, kills and removes control groups (cgroup.h). Keeper's, root, one thread; every read and write is on cgroupfs or proc.
 */
#include "jail/cgroup_internal.h"

#include "common/log.h"
#include "common/text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct cgroup {
	char dir[CGROUP_DIRS_MAX][CGROUP_PATH_MAX]; /* [0] is v2 */
	int ctl[CGROUP_DIRS_MAX];                   /* enum cgroup_ctl of a v1 directory; -1 for v2 */
	size_t count;
	int fd; /* of dir[0]; -1 = adopted */
	bool memory_on_v2;
};

bool cgroup_read(const char *path, char *out, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t len = 0;

	out[0] = '\0';
	if (fd < 0)
		return false;
	while (len + 1 < size) {
		ssize_t n = read(fd, out + len, size - 1 - len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		len += (size_t)n;
	}
	out[len] = '\0';
	close(fd);
	return true;
}

int cgroup_write(const char *dir, const char *file, const char *value, struct err *e)
{
	char path[CGROUP_PATH_MAX + 64];
	size_t len = strlen(value);
	int fd;

	if (!text_fmt(path, sizeof(path), "%s/%s", dir, file))
		return err_set(e, ERR_INTERNAL, "cgroup path is too long: %s", dir);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return err_set_errno(e, "open %s", path);
	if (write(fd, value, len) != (ssize_t)len) {
		err_set_errno(e, "write \"%s\" to %s", value, path);
		close(fd);
		return -1;
	}
	close(fd);
	return 0;
}

/* As write_text, but a file that is not there (an option of the kernel) is fine. */
static int write_optional(const char *dir, const char *file, const char *value, struct err *e)
{
	if (cgroup_write(dir, file, value, e) == 0 || e->sys == ENOENT)
		return 0;
	return -1;
}

/* A file with one number; "max", or no such file, is no limit. */
static uint32_t limit_in(const char *path)
{
	char text[64];
	unsigned long long n;

	if (!cgroup_read(path, text, sizeof(text)) || text[0] < '0' || text[0] > '9')
		return UINT32_MAX;
	n = strtoull(text, NULL, 10);
	return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

static uint32_t least(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

uint32_t cgroups_pids(const struct cgroups *c)
{
	uint32_t pids = least(limit_in("/proc/sys/kernel/pid_max"), limit_in("/proc/sys/kernel/threads-max"));
	char dir[CGROUP_PATH_MAX], path[CGROUP_PATH_MAX + 32], *slash = dir;

	if (!text_copy(dir, sizeof(dir), c->on_v2[CGROUP_PIDS] ? c->v2 : c->v1[CGROUP_PIDS]))
		return pids;
	/* Up to the root of the hierarchy, above which there is no such file. */
	while (slash && text_fmt(path, sizeof(path), "%s/cgroup.procs", dir) && access(path, F_OK) == 0) {
		if (text_fmt(path, sizeof(path), "%s/pids.max", dir))
			pids = least(pids, limit_in(path));
		slash = strrchr(dir, '/');
		if (slash)
			*slash = '\0';
	}
	return pids;
}

/* Proves at start, not at the first run, that groups can be made here. */
static int probe(struct cgroups *c, struct err *e)
{
	struct cgroup_limits limits = { .memory_bytes = UINT64_C(64) << 20, .pids = 16 };
	struct cgroup *g = NULL;
	char name[CGROUP_NAME_MAX];
	int fd;

	if (!text_fmt(name, sizeof(name), "ephemeral-check-%d", (int)getpid()))
		return err_set(e, ERR_INTERNAL, "name");
	if (cgroup_make(c, name, &limits, &g, e) || !g)
		return err_wrap(e, "cgroups must be writable for noded");
	fd = cgroup_open_kill(g, e);
	if (fd < 0)
		err_wrap(e, "cgroup.kill is needed (Linux 5.14 or newer)");
	else
		close(fd);
	if (cgroup_remove(g, &(struct err){ 0 }) != 0)
		log_warn("cgroup of the start check stays behind name=%s", name);
	cgroup_free(g);
	return fd < 0 ? -1 : 0;
}

int cgroups_open(const char *parent, struct cgroups **out, struct err *e)
{
	struct cgroups *c = calloc(1, sizeof(*c));

	*out = NULL;
	if (!c)
		return err_set(e, ERR_NOMEM, "no memory");
	if (parent && *parent && *parent != '/') {
		free(c);
		return err_set(e, ERR_INVALID, "cgroup_parent must begin with /");
	}
	if (cgroup_find(c, parent, e) || probe(c, e)) {
		free(c);
		return -1;
	}
	*out = c;
	return 0;
}

void cgroups_free(struct cgroups *c)
{
	free(c);
}

const char *cgroups_text(const struct cgroups *c)
{
	return c->text;
}

static void each_in(const char *path, const char *prefix, void (*fn)(void *arg, const char *name), void *arg)
{
	DIR *d = opendir(path);
	struct dirent *entry;

	if (!d)
		return;
	while ((entry = readdir(d)) != NULL)
		if (entry->d_type == DT_DIR && strncmp(entry->d_name, prefix, strlen(prefix)) == 0)
			fn(arg, entry->d_name);
	closedir(d);
}

void cgroups_each(const struct cgroups *c, const char *prefix, void (*fn)(void *arg, const char *name), void *arg)
{
	each_in(c->v2, prefix, fn, arg);
	for (int i = 0; i < CGROUP_CTL_COUNT; i++)
		if (c->v1[i][0])
			each_in(c->v1[i], prefix, fn, arg);
}

/* --- one group ---------------------------------------------------------------------------------------------------------------- */

static bool add_dir(struct cgroup *g, const char *parent, const char *name, int ctl)
{
	if (!text_fmt(g->dir[g->count], CGROUP_PATH_MAX, "%s/%s", parent, name))
		return false;
	g->ctl[g->count++] = ctl;
	return true;
}

struct cgroup *cgroup_adopt(struct cgroups *c, const char *name)
{
	struct cgroup *g = calloc(1, sizeof(*g));
	bool ok;

	if (!g)
		return NULL;
	g->fd = -1;
	g->memory_on_v2 = c->on_v2[CGROUP_MEMORY];
	ok = add_dir(g, c->v2, name, -1);
	for (int i = 0; ok && i < CGROUP_CTL_COUNT; i++)
		if (c->v1[i][0])
			ok = add_dir(g, c->v1[i], name, i);
	if (ok)
		return g;
	free(g);
	return NULL;
}

static int limit_memory(const char *dir, bool v2, uint64_t bytes, struct err *e)
{
	char text[24];

	if (bytes == 0)
		return 0;
	if (!text_fmt(text, sizeof(text), "%" PRIu64, bytes))
		return err_set(e, ERR_INTERNAL, "number");
	if (v2)
		return cgroup_write(dir, "memory.max", text, e) || write_optional(dir, "memory.swap.max", "0", e) ||
						       write_optional(dir, "memory.oom.group", "1", e)
				       ? -1
				       : 0;
	return cgroup_write(dir, "memory.limit_in_bytes", text, e) || write_optional(dir, "memory.memsw.limit_in_bytes", text, e) ||
					       write_optional(dir, "memory.swappiness", "0", e)
			       ? -1
			       : 0;
}

static int limit_pids(const char *dir, uint32_t pids, struct err *e)
{
	char text[24];

	if (pids == 0)
		return 0;
	if (!text_fmt(text, sizeof(text), "%" PRIu32, pids))
		return err_set(e, ERR_INTERNAL, "number");
	return cgroup_write(dir, "pids.max", text, e);
}

static int limit_cpu(const char *dir, bool v2, uint32_t percent, struct err *e)
{
	char text[48];
	const uint32_t period_us = 100000;

	if (percent == 0)
		return 0;
	if (v2) {
		if (!text_fmt(text, sizeof(text), "%" PRIu32 " %" PRIu32, percent * (period_us / 100), period_us))
			return err_set(e, ERR_INTERNAL, "number");
		return cgroup_write(dir, "cpu.max", text, e);
	}
	if (!text_fmt(text, sizeof(text), "%" PRIu32, percent * (period_us / 100)))
		return err_set(e, ERR_INTERNAL, "number");
	return write_optional(dir, "cpu.cfs_quota_us", text, e);
}

static int apply_limits(const struct cgroups *c, const struct cgroup *g, const struct cgroup_limits *l, struct err *e)
{
	for (size_t i = 0; i < g->count; i++) {
		bool v2 = g->ctl[i] < 0;
		const char *dir = g->dir[i];

		if ((v2 ? c->on_v2[CGROUP_MEMORY] : g->ctl[i] == CGROUP_MEMORY) && limit_memory(dir, v2, l->memory_bytes, e))
			return -1;
		if ((v2 ? c->on_v2[CGROUP_PIDS] : g->ctl[i] == CGROUP_PIDS) && limit_pids(dir, l->pids, e))
			return -1;
		if ((v2 ? c->on_v2[CGROUP_CPU] : g->ctl[i] == CGROUP_CPU) && limit_cpu(dir, v2, l->cpu_percent, e))
			return -1;
	}
	return 0;
}

int cgroup_make(struct cgroups *c, const char *name, const struct cgroup_limits *limits, struct cgroup **out, struct err *e)
{
	struct cgroup *g = cgroup_adopt(c, name);
	size_t made = 0;

	*out = NULL;
	if (!g)
		return err_set(e, ERR_NOMEM, "no memory, or the cgroup name %s is too long", name);
	for (; made < g->count; made++)
		if (mkdir(g->dir[made], 0755) != 0) {
			err_set_errno(e, "make cgroup %s", g->dir[made]);
			goto undo;
		}
	if (apply_limits(c, g, limits, e))
		goto undo;
	g->fd = open(g->dir[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (g->fd < 0) {
		err_set_errno(e, "open cgroup %s", g->dir[0]);
		goto undo;
	}
	*out = g;
	return 0;
undo:
	while (made > 0)
		rmdir(g->dir[--made]);
	cgroup_free(g);
	return -1;
}

void cgroup_free(struct cgroup *g)
{
	if (!g)
		return;
	if (g->fd >= 0)
		close(g->fd);
	free(g);
}

int cgroup_dir_fd(const struct cgroup *g)
{
	return g->fd;
}

size_t cgroup_dirs(const struct cgroup *g)
{
	return g->count;
}

const char *cgroup_dir(const struct cgroup *g, size_t i)
{
	return g->dir[i];
}

int cgroup_open_kill(const struct cgroup *g, struct err *e)
{
	char path[CGROUP_PATH_MAX + 32];
	int fd;

	if (!text_fmt(path, sizeof(path), "%s/cgroup.kill", g->dir[0]))
		return err_set(e, ERR_INTERNAL, "cgroup path is too long");
	fd = open(path, O_WRONLY | O_CLOEXEC);
	return fd < 0 ? err_set_errno(e, "open %s", path) : fd;
}

void cgroup_kill(const struct cgroup *g)
{
	struct err e;

	if (cgroup_write(g->dir[0], "cgroup.kill", "1", &e) && e.sys != ENOENT)
		log_error("cgroup kill failed error=\"%s\"", e.text);
}

/* Value after `key ` in a flat keyed file; 0 when it is not there. */
static uint64_t keyed(const char *dir, const char *file, const char *key)
{
	char path[CGROUP_PATH_MAX + 64], text[4096];
	size_t n = strlen(key);

	if (!text_fmt(path, sizeof(path), "%s/%s", dir, file) || !cgroup_read(path, text, sizeof(text)))
		return 0;
	for (const char *line = text; *line;) {
		const char *end = strchrnul(line, '\n');

		if ((size_t)(end - line) > n && strncmp(line, key, n) == 0 && line[n] == ' ')
			return strtoull(line + n + 1, NULL, 10);
		line = *end ? end + 1 : end;
	}
	return 0;
}

bool cgroup_populated(const struct cgroup *g)
{
	/* Everything is cloned into the v2 group, so that one speaks for all; v1 directories show themselves by EBUSY at rmdir. */
	return keyed(g->dir[0], "cgroup.events", "populated") != 0;
}

int cgroup_remove(struct cgroup *g, struct err *e)
{
	bool busy = false;

	for (size_t i = g->count; i > 0; i--) {
		if (rmdir(g->dir[i - 1]) == 0 || errno == ENOENT)
			continue;
		if (errno != EBUSY)
			return err_set_errno(e, "remove cgroup %s", g->dir[i - 1]);
		busy = true;
	}
	return busy ? 1 : 0;
}

static const char *memory_dir(const struct cgroup *g)
{
	if (g->memory_on_v2)
		return g->dir[0];
	for (size_t i = 0; i < g->count; i++)
		if (g->ctl[i] == CGROUP_MEMORY)
			return g->dir[i];
	return NULL;
}

uint64_t cgroup_oom_kills(const struct cgroup *g)
{
	const char *dir = memory_dir(g);

	if (!dir)
		return 0;
	return keyed(dir, g->memory_on_v2 ? "memory.events" : "memory.oom_control", "oom_kill");
}

static uint64_t memory_figure(const struct cgroup *g, const char *v2, const char *v1)
{
	const char *dir = memory_dir(g);
	char path[CGROUP_PATH_MAX + 64], text[64];

	if (!dir || !text_fmt(path, sizeof(path), "%s/%s", dir, g->memory_on_v2 ? v2 : v1) ||
			!cgroup_read(path, text, sizeof(text)))
		return 0;
	return strtoull(text, NULL, 10);
}

uint64_t cgroup_memory_peak(const struct cgroup *g)
{
	return memory_figure(g, "memory.peak", "memory.max_usage_in_bytes");
}

uint64_t cgroup_memory_now(const struct cgroup *g)
{
	return memory_figure(g, "memory.current", "memory.usage_in_bytes");
}

/* Version 2 counts it in every group, whether or not its cpu controller is there. */
uint64_t cgroup_cpu_us(const struct cgroup *g)
{
	return g->count > 0 ? keyed(g->dir[0], "cpu.stat", "usage_usec") : 0;
}
