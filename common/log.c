/*
 * Log lines on stderr. Thread-safe: the settings are written once before threads start, and a line is one write(2), which the
 * kernel keeps whole for a pipe or file up to 4 KiB. Blocks only as long as stderr does.
 */
#include "log.h"

#include "buf.h"
#include "clock.h"
#include "text.h"

#include <errno.h>
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
	for (; *s && at < LOG_LINE_MAX - 1; s++) {
		unsigned char c = (unsigned char)*s;

		line[at++] = c < 0x20 || c == 0x7f ? '?' : (char)c;
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

void log_at(enum log_level level, const char *fmt, ...)
{
	char message[LOG_LINE_MAX];
	int saved = errno;
	va_list ap;

	if (!log_enabled(level))
		return;
	va_start(ap, fmt);
	if (vsnprintf(message, sizeof(message), fmt, ap) < 0)
		message[0] = '\0';
	va_end(ap);
	emit(level, message);
	errno = saved;
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
