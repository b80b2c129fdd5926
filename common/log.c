/*
 * Log lines on stderr. Thread-safe: the settings are written once before threads start, the allowances have a lock, and a line is
 * one write(2), which the kernel keeps whole for a pipe or file up to 4 KiB. Blocks only as long as stderr does.
 */
#include "log.h"

#include "buf.h"
#include "clock.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOG_LINE_MAX 4096 /* PIPE_BUF: a longer write may be torn by another process' */

static struct {
	const char *role;
	enum log_level min;
	bool json;
} settings = { .role = "ephemeral", .min = LOG_LEVEL_INFO, .json = false };

/*
 * A bound for each place that logs (its format string is its name), so that no client or guest fills the disk by what it makes us
 * say: LINES_BURST lines, then LINES_PER_SECOND; what is left out is counted and said. Guarded by `lock`.
 */
#define LINES_BURST 200
#define LINES_PER_SECOND 10
#define DEBUG_FACTOR 20 /* debug is asked for: each request has a line there */
#define SAY_AFTER_MS 2000
#define SITES_MAX 256 /* more than any program of ours has */

struct site {
	const char *fmt;     /* NULL = free */
	int64_t milli;       /* thousandths of a line that may be written now; -1 = not used yet */
	int64_t at_ms;       /* when that was so */
	int64_t since_ms;    /* the first line that was left out */
	uint64_t suppressed; /* since then */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct site sites[SITES_MAX];
static bool suppressing; /* some site has lines to tell of */

static const char *const level_names[] = {
	[LOG_LEVEL_DEBUG] = "debug",
	[LOG_LEVEL_INFO] = "info",
	[LOG_LEVEL_WARN] = "warn",
	[LOG_LEVEL_ERROR] = "error",
};

void log_init(const char *role, enum log_level min, bool json)
{
	settings.role = role;
	settings.min = min;
	settings.json = json;
}

bool log_level_parse(const char *s, enum log_level *out)
{
	for (size_t i = 0; i < sizeof(level_names) / sizeof(level_names[0]); i++) {
		if (strcmp(s, level_names[i]) == 0) {
			*out = (enum log_level)i;
			return true;
		}
	}
	return false;
}

bool log_enabled(enum log_level level)
{
	return level >= settings.min;
}

static size_t put(char *line, size_t at, const char *s, size_t n)
{
	if (n > LOG_LINE_MAX - 1 - at) /* the last byte is the newline's */
		n = LOG_LINE_MAX - 1 - at;
	memcpy(line + at, s, n);
	return at + n;
}

static size_t put_str(char *line, size_t at, const char *s)
{
	return put(line, at, s, strlen(s));
}

/* The text line: what a caller forgot to pass through text_safe must still not forge a second line or move a cursor. */
static size_t put_plain(char *line, size_t at, const char *s)
{
	size_t n = strlen(s);
	char shown[16];

	while (n > 0) {
		size_t len = text_safe_char(s, n, false, shown), wide = strlen(shown);

		if (wide > LOG_LINE_MAX - 1 - at) /* never half a character */
			break;
		at = put(line, at, shown, wide);
		s += len;
		n -= len;
	}
	return at;
}

/* The JSON string: always valid UTF-8 with escapes, and never cut inside an escape (room for 6 plus the closing `"}`). */
static size_t put_json(char *line, size_t at, const char *s)
{
	size_t n = strlen(s), i = 0;

	while (i < n && at + 6 + 3 <= LOG_LINE_MAX) {
		unsigned char c = (unsigned char)s[i];
		size_t take = 1;

		while (i + take < n && take < 4 && ((unsigned char)s[i + take] & 0xc0) == 0x80)
			take++;
		if (c == '"' || c == '\\') {
			line[at++] = '\\';
			line[at++] = (char)c;
			take = 1;
		} else if (c < 0x20 || !text_utf8_valid(s + i, take)) {
			static const char digits[] = "0123456789abcdef";
			char esc[6] = { '\\', 'u', '0', '0', digits[c >> 4], digits[c & 15] };

			at = put(line, at, esc, sizeof(esc));
			take = 1;
		} else {
			at = put(line, at, s + i, take);
		}
		i += take;
	}
	return at;
}

static void emit(enum log_level level, const char *message)
{
	char line[LOG_LINE_MAX], when[32];
	size_t n = 0;

	text_time_ms(clock_real_ms(), when);
	if (settings.json) {
		n = put_str(line, n, "{\"at\":\"");
		n = put_str(line, n, when);
		n = put_str(line, n, "\",\"level\":\"");
		n = put_str(line, n, level_names[level]);
		n = put_str(line, n, "\",\"role\":\"");
		n = put_str(line, n, settings.role);
		n = put_str(line, n, "\",\"message\":\"");
		n = put_json(line, n, message);
		n = put_str(line, n, "\"}");
	} else {
		n = put_str(line, n, when);
		n = put_str(line, n, " ");
		n = put_str(line, n, level_names[level]);
		n = put_str(line, n, " ");
		n = put_str(line, n, settings.role);
		n = put_str(line, n, ": ");
		n = put_plain(line, n, message);
	}
	line[n++] = '\n';
	/* A log that cannot be written has nowhere to say so. */
	while (write(STDERR_FILENO, line, n) < 0 && errno == EINTR)
		;
}

/* The site of fmt: its own, a free one, or one that all share that find none. */
static struct site *site_of(const char *fmt)
{
	size_t at = (size_t)(((uintptr_t)fmt >> 3) * UINT64_C(0x9e3779b97f4a7c15) >> 32) % SITES_MAX;

	for (size_t tries = 0; tries < SITES_MAX; tries++, at = (at + 1) % SITES_MAX) {
		if (sites[at].fmt == fmt)
			return &sites[at];
		if (sites[at].fmt == NULL) {
			sites[at] = (struct site){ .fmt = fmt, .milli = -1 };
			return &sites[at];
		}
	}
	return &sites[at];
}

/* Takes one line from a site's allowance; false when there is none. */
static bool allowed(struct site *s, enum log_level level, int64_t now_ms)
{
	int64_t factor = level == LOG_LEVEL_DEBUG ? DEBUG_FACTOR : 1, full = factor * LINES_BURST * 1000;

	if (s->milli < 0) {
		s->milli = full;
	} else if (now_ms > s->at_ms) {
		int64_t gone = now_ms - s->at_ms < 3600000 ? now_ms - s->at_ms : 3600000;

		s->milli += gone * factor * LINES_PER_SECOND;
		s->milli = s->milli > full ? full : s->milli;
	}
	s->at_ms = now_ms;
	if (s->milli < 1000) {
		s->since_ms = s->suppressed == 0 ? now_ms : s->since_ms;
		s->suppressed++;
		suppressing = true;
		return false;
	}
	s->milli -= 1000;
	return true;
}

/* Says what was left out, at the soonest SAY_AFTER_MS after the first line of it. */
static void say_suppressed(int64_t now_ms)
{
	if (!suppressing)
		return;
	suppressing = false;
	for (size_t i = 0; i < SITES_MAX; i++) {
		struct site *s = &sites[i];
		char message[256];

		if (s->suppressed == 0)
			continue;
		if (now_ms - s->since_ms < SAY_AFTER_MS) {
			suppressing = true;
			continue;
		}
		(void)snprintf(message, sizeof(message), "log: %" PRIu64 " more suppressed in %" PRId64 " s, like: %.160s",
				s->suppressed, (now_ms - s->since_ms) / 1000, s->fmt);
		s->suppressed = 0;
		emit(LOG_LEVEL_WARN, message);
	}
}

void log_at(enum log_level level, const char *fmt, ...)
{
	char message[LOG_LINE_MAX];
	int64_t now_ms = clock_mono_ns() / 1000000;
	int saved = errno;
	bool pass;
	va_list ap;

	if (!log_enabled(level))
		return;
	(void)pthread_mutex_lock(&lock);
	say_suppressed(now_ms);
	pass = allowed(site_of(fmt), level, now_ms);
	(void)pthread_mutex_unlock(&lock);
	if (pass) {
		va_start(ap, fmt);
		if (vsnprintf(message, sizeof(message), fmt, ap) < 0)
			message[0] = '\0';
		va_end(ap);
		emit(level, message);
	}
	errno = saved;
}

void log_descriptors(void)
{
	/* Opened in this order, each gets the lowest free number: its own. */
	static const struct {
		const char *path;
		int flags;
	} instead[] = { { "/dev/null", O_RDONLY }, { "/dev/full", O_WRONLY }, { "/dev/null", O_WRONLY } };

	for (int fd = 0; fd <= 2; fd++) {
		if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open(instead[fd].path, instead[fd].flags) < 0)
			abort(); /* no /dev: nothing here can be trusted to land where it should */
	}
}

void log_abort(const char *what, const char *file, int line)
{
	log_error("broken invariant: %s at=%s:%d", what, file, line);
	abort();
}

void log_odd(const char *what, const char *file, int line)
{
	log_warn("odd: %s at=%s:%d", what, file, line);
}
