/*
 * read_file, write_file, list_files: each runs in a child that is user `worker`, so that the kernel decides what may be touched,
 * and a file that blocks or is endless costs a call and not the agent. The child writes the result to stdout and a remark or what
 * went wrong to stderr; exit code 0 says it was done.
 * Called by tools.c; blocks while the child runs, in exec.c's loop.
 */
#include "common/text.h"
#include "output.h"
#include "tools.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_JOB_LIMIT_MS 30000
#define LIST_MAX 1000
/* Of one entry: kind and size, a name of 255 bytes and 255 of a link's target, each byte escaped at worst. */
#define LIST_ENTRY_MAX 2112
#define REMARK_MAX 1024
/* A file with a NUL in its first bytes is no text. */
#define PROBE_BYTES 8192

struct file_job {
	const struct tool_args *args;
};

/* --- in the child: plain blocking calls, memory goes with the process ----------------------------------------------------------
 */

static int child_says(int code, const char *fmt, ...) EPH_PRINTF(2, 3);

static int child_says(int code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vdprintf(2, fmt, ap);
	va_end(ap);
	return code;
}

static const char *why(int error)
{
	switch (error) {
	case ENOSPC: return "no space left: the disk of this machine is small and goes with the run";
	case EACCES: return "permission denied: the agent is user worker";
	case ELOOP: return "too many symbolic links";
	default: return strerror(error);
	}
}

/* Opens a regular file; what would block or is no file is refused. */
static int child_open(const char *path, int flags, struct stat *st)
{
	int fd = open(path, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0644);

	if (fd < 0)
		return child_says(-1, "%s: %s", path, errno == EISDIR ? "this is a folder" : why(errno));
	if (fstat(fd, st) < 0)
		return child_says(-1, "%s: %s", path, why(errno));
	if (S_ISDIR(st->st_mode))
		return child_says(-1, "%s: this is a folder; list_files lists it", path);
	if (!S_ISREG(st->st_mode))
		return child_says(-1, "%s: this is not a regular file", path);
	return fd;
}

static bool child_write(const char *p, size_t n)
{
	while (n > 0) {
		ssize_t done = write(1, p, n);

		if (done < 0)
			return false;
		p += done;
		n -= (size_t)done;
	}
	return true;
}

static size_t child_read(int fd, char *p, size_t n, int64_t offset)
{
	size_t have = 0;

	while (have < n) {
		ssize_t got = pread(fd, p + have, n - have, offset + (int64_t)have);

		if (got <= 0)
			break;
		have += (size_t)got;
	}
	return have;
}

static int inner_read(void *arg)
{
	const struct tool_args *a = ((struct file_job *)arg)->args;
	static char p[READ_LIMIT_MAX + 1];
	size_t limit = (size_t)a->limit, have, show;
	struct stat st = { .st_size = 0 };
	int fd = child_open(a->path, O_RDONLY, &st);

	if (fd < 0)
		return 1;
	have = child_read(fd, p, limit + 1, a->offset);
	if (memchr(p, '\0', have < PROBE_BYTES ? have : PROBE_BYTES) != NULL)
		return child_says(1, "%s: this is not a text file (%" PRId64 " bytes)", a->path, (int64_t)st.st_size);
	show = have > limit ? text_utf8_border(p, limit) : have;
	if (show == 0 && have > 0)
		show = have < limit ? have : limit;
	if (!child_write(p, show))
		return 1;
	if (have > show)
		return child_says(0, "[bytes %" PRId64 " to %" PRId64 " of %" PRId64 "; go on with offset %" PRId64 "]", a->offset,
				a->offset + (int64_t)show, (int64_t)st.st_size, a->offset + (int64_t)show);
	if (have == 0 && a->offset > 0)
		return child_says(0, "[nothing at this offset: the file has %" PRId64 " bytes]", (int64_t)st.st_size);
	return have == 0 ? child_says(0, "[the file is empty]") : 0;
}

/* Makes the folders above a file. */
static bool child_make_parents(const char *path)
{
	char copy[ARG_PATH_MAX + 1];

	if (!text_copy(copy, sizeof copy, path))
		return false;
	for (char *slash = strchr(copy + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		if (mkdir(copy, 0755) < 0 && errno != EEXIST) {
			child_says(1, "the folder %s cannot be made: %s", copy, why(errno));
			return false;
		}
		*slash = '/';
	}
	return true;
}

static int inner_write(void *arg)
{
	const struct tool_args *a = ((struct file_job *)arg)->args;
	size_t done = 0;
	struct stat st;
	int fd;

	if (!child_make_parents(a->path))
		return 1;
	fd = child_open(a->path, O_WRONLY | O_CREAT | O_TRUNC, &st);
	if (fd < 0)
		return 1;
	while (done < a->content_len) {
		ssize_t n = write(fd, a->content + done, a->content_len - done);

		if (n <= 0)
			return child_says(
					1, "%s: only %zu of %zu bytes are written: %s", a->path, done, a->content_len, why(errno));
		done += (size_t)n;
	}
	if (close(fd) < 0)
		return child_says(1, "%s: %s", a->path, why(errno));
	return 0;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void list_entry(int dir, const char *name, struct buf *out)
{
	char target[255]; /* the front of it is enough to know it by */
	struct stat st;
	ssize_t n;

	if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return;
	if (S_ISDIR(st.st_mode))
		buf_add_str(out, "folder - ");
	else if (S_ISREG(st.st_mode))
		buf_printf(out, "file %" PRId64 " ", (int64_t)st.st_size);
	else
		buf_printf(out, "%s - ", S_ISLNK(st.st_mode) ? "link" : "special");
	text_safe(out, name, strlen(name), false);
	n = S_ISLNK(st.st_mode) ? readlinkat(dir, name, target, sizeof target) : 0;
	if (n > 0) {
		buf_add_str(out, " -> ");
		text_safe(out, target, (size_t)n, false);
		if ((size_t)n == sizeof target)
			buf_add_str(out, "...");
	}
	buf_add_char(out, '\n');
}

static int inner_list(void *arg)
{
	const struct tool_args *a = ((struct file_job *)arg)->args;
	static char *names[LIST_MAX];
	struct buf out = BUF_INIT(LIST_MAX * LIST_ENTRY_MAX);
	size_t count = 0, more = 0;
	struct dirent *ent;
	DIR *d = opendir(a->path);

	if (d == NULL)
		return child_says(1, "%s: %s", a->path, errno == ENOTDIR ? "this is not a folder" : why(errno));
	while ((ent = readdir(d)) != NULL) {
		if (strcmp(ent->d_name, ".") == 0 || strcmp(ent->d_name, "..") == 0)
			continue;
		if (count < LIST_MAX && (names[count] = strdup(ent->d_name)) != NULL)
			count++;
		else
			more++;
	}
	qsort(names, count, sizeof names[0], by_name);
	for (size_t i = 0; i < count; i++)
		list_entry(dirfd(d), names[i], &out);
	if (!child_write((const char *)out.data, out.len))
		return 1;
	if (more > 0)
		return child_says(0, "[%zu more entries are not shown]", more);
	return count == 0 ? child_says(0, "[the folder is empty]") : 0;
}

/* --- in the agent ---------------------------------------------------------------------------------------------------------------
 */

struct collected {
	struct keep out;
	struct buf remark;
};

static void on_output(void *ctx, int stream, const uint8_t *p, size_t n)
{
	struct collected *c = ctx;

	if (stream == 1) {
		keep_add(&c->out, p, n);
	} else {
		size_t room = c->remark.max - c->remark.len;

		buf_add(&c->remark, p, n < room ? n : room);
	}
}

static const char *outcome(const struct job_end *end, struct collected *c, struct buf *clean)
{
	const char *text = NULL;

	if (!end->started)
		return end->why.text;
	if (end->timed_out)
		return "it took too long and was stopped";
	if (end->has_signal)
		return end->out_of_memory ? "it was killed because memory is used up" : "it was killed";
	if (c->remark.len > 0 && output_clean(clean, c->remark.data, c->remark.len))
		text = buf_cstr(clean);
	return text == NULL ? "" : text;
}

static void report(const struct tools *t, enum tool which, const char *call_id, const struct tool_args *a,
		const struct job_end *end, struct collected *c, struct buf *result)
{
	struct buf clean = BUF_INIT(3 * REMARK_MAX);
	const char *remark = outcome(end, c, &clean);
	bool done = end->started && !end->timed_out && !end->has_signal && end->code == 0;
	int64_t bytes = which == TOOL_WRITE_FILE ? (int64_t)a->content_len : which == TOOL_READ_FILE ? (int64_t)c->out.total : -1;

	if (!done) {
		const char *text = remark[0] == '\0' ? "it failed" : remark;

		tools_event(t, call_id, tool_info(which)->name, a->path, -1, text);
		buf_printf(result, "Not done: %s", text);
		buf_free(&clean);
		return;
	}
	tools_event(t, call_id, tool_info(which)->name, a->path, bytes, "");
	if (which == TOOL_WRITE_FILE)
		buf_printf(result, "Wrote %zu bytes to %s.", a->content_len, a->path);
	keep_render(&c->out, result);
	if (remark[0] != '\0')
		buf_printf(result, "%s%s", result->len > 0 && result->data[result->len - 1] != '\n' ? "\n" : "", remark);
	buf_free(&clean);
}

int tool_files(const struct tools *t, enum tool which, const char *call_id, const struct tool_args *a, struct buf *result,
		struct err *e)
{
	static job_inner_fn *const inner[TOOL_COUNT] = {
		[TOOL_READ_FILE] = inner_read,
		[TOOL_WRITE_FILE] = inner_write,
		[TOOL_LIST_FILES] = inner_list,
	};
	struct file_job arg = { .args = a };
	struct collected c;
	struct job job = {
		.inner = inner[which],
		.inner_arg = &arg,
		.cwd = t->workdir,
		.on_output = on_output,
		.ctx = &c,
		.limit_ms = t->limit_ms < FILE_JOB_LIMIT_MS ? t->limit_ms : FILE_JOB_LIMIT_MS,
	};
	struct job_end end;
	int rc;

	keep_init(&c.out);
	buf_init(&c.remark, REMARK_MAX);
	rc = job_run(t->ch, t->sigchld_fd, &job, &end, e);
	if (rc == 0)
		report(t, which, call_id, a, &end, &c, result);
	keep_free(&c.out);
	buf_free(&c.remark);
	return rc;
}
