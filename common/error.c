/*
 * Error values: filling them, adding context, naming their codes. Owns nothing, allocates nothing, never blocks; used by every
 * process and thread, so it touches no state beyond the caller's struct.
 */
#include "error.h"

#include "text.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Ends a text that fills its place in "...", at a character's border. */
static void mark_cut(struct err *e)
{
	size_t at = text_utf8_border(e->text, sizeof(e->text) - 4);

	memcpy(e->text + at, "...", 4);
}

/* Writes the message and marks a cut one by a final "...", so that nobody takes half a sentence for a whole one. */
static void EPH_PRINTF(2, 0) set_text(struct err *e, const char *fmt, va_list ap)
{
	int n = vsnprintf(e->text, sizeof(e->text), fmt, ap);

	if (n < 0)
		e->text[0] = '\0';
	else if ((size_t)n >= sizeof(e->text))
		mark_cut(e);
}

int err_set(struct err *e, enum err_code code, const char *fmt, ...)
{
	va_list ap;

	e->code = code;
	e->sys = 0;
	va_start(ap, fmt);
	set_text(e, fmt, ap);
	va_end(ap);
	return -1;
}

/* Appends as much of s as fits, with the mark of a cut. */
static void append_text(struct err *e, const char *s)
{
	size_t at = strlen(e->text), n = strlen(s);

	if (n < sizeof(e->text) - at) {
		memcpy(e->text + at, s, n + 1);
		return;
	}
	n = sizeof(e->text) - 1 - at;
	memcpy(e->text + at, s, n);
	mark_cut(e);
}

int err_set_errno(struct err *e, const char *fmt, ...)
{
	int sys = errno;
	char text[128];
	va_list ap;

	e->code = ERR_IO;
	e->sys = sys;
	va_start(ap, fmt);
	set_text(e, fmt, ap);
	va_end(ap);
	append_text(e, ": ");
	append_text(e, strerror_r(sys, text, sizeof(text)));
	return -1;
}

int err_wrap(struct err *e, const char *fmt, ...)
{
	char inner[ERR_TEXT_MAX];
	va_list ap;

	memcpy(inner, e->text, sizeof(inner));
	inner[sizeof(inner) - 1] = '\0';
	va_start(ap, fmt);
	set_text(e, fmt, ap);
	va_end(ap);
	append_text(e, ": ");
	append_text(e, inner);
	return -1;
}

const char *err_code_name(enum err_code code)
{
	switch (code) {
	case ERR_NONE: return "none";
	case ERR_INVALID: return "invalid";
	case ERR_LIMIT: return "limit";
	case ERR_NOT_FOUND: return "not_found";
	case ERR_CONFLICT: return "conflict";
	case ERR_DENIED: return "denied";
	case ERR_PROTOCOL: return "protocol";
	case ERR_TIMEOUT: return "timeout";
	case ERR_UNAVAILABLE: return "unavailable";
	case ERR_IO: return "io";
	case ERR_NOMEM: return "no_memory";
	case ERR_INTERNAL: return "internal";
	}
	return "unknown";
}
