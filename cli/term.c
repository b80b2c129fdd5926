/* The terminal: width, colour, escaping. Used by every verb; owns nothing; writes may block. */
#include "term.h"

#include "common/text.h"

#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

#define LINE_MAX_BYTES ((size_t)8192)
#define TEXT_MAX_BYTES ((size_t)32 * 1024 * 1024)

bool term_is_terminal(FILE *f)
{
	return isatty(fileno(f)) == 1;
}

bool term_reader_gone(void)
{
	struct pollfd p = { .fd = STDOUT_FILENO, .events = POLLOUT };

	return poll(&p, 1, 0) == 1 && (p.revents & (POLLERR | POLLHUP)) != 0;
}

bool term_colour(FILE *f)
{
	const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");

	if (no_color != NULL && no_color[0] != '\0')
		return false;
	return term_is_terminal(f) && (term == NULL || strcmp(term, "dumb") != 0);
}

size_t term_width(FILE *f)
{
	struct winsize w;
	const char *columns = getenv("COLUMNS");
	int64_t n = 0;
	struct err e;

	if (ioctl(fileno(f), TIOCGWINSZ, &w) == 0 && w.ws_col >= 20)
		return w.ws_col;
	if (columns != NULL && text_i64(columns, 20, 1000, &n, &e) == 0)
		return (size_t)n;
	return 120;
}

const char *term_begin(enum term_style s, bool colour)
{
	static const char *const codes[] = {
		[TERM_PLAIN] = "",
		[TERM_BOLD] = "\033[1m",
		[TERM_DIM] = "\033[2m",
		[TERM_GREEN] = "\033[32m",
		[TERM_RED] = "\033[31m",
		[TERM_YELLOW] = "\033[33m",
		[TERM_CYAN] = "\033[36m",
	};

	return colour ? codes[s] : "";
}

const char *term_end(bool colour)
{
	return colour ? "\033[0m" : "";
}

static void EPH_PRINTF(4, 0) line(FILE *f, const char *prefix, bool lines, const char *fmt, va_list ap)
{
	char text[LINE_MAX_BYTES];
	struct buf safe = BUF_INIT(6 * LINE_MAX_BYTES);
	int n = vsnprintf(text, sizeof text, fmt, ap); /* NOLINT(clang-analyzer-valist.Uninitialized): started by the caller */
	size_t len = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;

	if (text_safe(&safe, text, text_utf8_border(text, len), lines))
		fprintf(f, "%s%.*s\n", prefix, (int)safe.len, safe.data != NULL ? (const char *)safe.data : "");
	buf_free(&safe);
}

void term_say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	line(stdout, "", false, fmt, ap);
	va_end(ap);
}

void term_note(const char *fmt, ...)
{
	va_list ap;

	fflush(stdout); /* what was said before stands before, also where both go to one file */
	va_start(ap, fmt);
	line(stderr, "", true, fmt, ap);
	va_end(ap);
}

void term_complain(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	line(stderr, "ephemeral: ", true, fmt, ap);
	va_end(ap);
}

void term_text(FILE *f, const char *s, size_t n)
{
	struct buf safe = BUF_INIT(TEXT_MAX_BYTES);

	if (!text_safe(&safe, s, n, true))
		fputs("(the text is too long to be shown safely; use --json)", f);
	else if (safe.len > 0)
		fwrite(safe.data, 1, safe.len, f);
	if (safe.len == 0 || safe.data[safe.len - 1] != '\n')
		fputc('\n', f);
	buf_free(&safe);
}

bool term_buf(FILE *f, const struct buf *b)
{
	if (b->failed)
		return false;
	return b->len == 0 || fwrite(b->data, 1, b->len, f) == b->len;
}

/* Columns of the character at s, *bytes = its length. The text is UTF-8 that text_safe let through. */
static size_t columns_of(const char *s, size_t n, size_t *bytes)
{
	unsigned char c = (unsigned char)s[0];
	size_t len = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
	wchar_t w;
	int columns;

	*bytes = len <= n ? len : n;
	if (len == 1)
		return 1;
	w = len == 2 ? c & 0x1f : len == 3 ? c & 0x0f : c & 0x07;
	for (size_t i = 1; i < *bytes; i++)
		w = (w << 6) | ((unsigned char)s[i] & 0x3f);
	columns = wcwidth(w);
	return columns < 0 ? 1 : (size_t)columns;
}

void term_cell(struct buf *b, const char *s, size_t n, size_t width, bool pad)
{
	struct buf safe = BUF_INIT(TEXT_MAX_BYTES);
	size_t used = 0, at = 0, keep = 0, total = 0;

	if (!text_safe(&safe, s, n, false)) {
		b->failed = true;
		buf_free(&safe);
		return;
	}
	while (at < safe.len && total <= width) {
		size_t bytes, columns = columns_of((const char *)safe.data + at, safe.len - at, &bytes);

		total += columns;
		at += bytes;
		if (total + 1 <= width) { /* leaves a column for the mark of a cut */
			keep = at;
			used = total;
		}
	}
	if (total <= width) {
		buf_add(b, safe.data, safe.len);
		used = total;
	} else if (width > 0) {
		buf_add(b, safe.data, keep);
		buf_add_str(b, "…");
		used++;
	}
	for (; pad && used < width; used++)
		buf_add_char(b, ' ');
	buf_free(&safe);
}
