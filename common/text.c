/*
 * Strings, strict UTF-8, strict numbers, money and time as text, and escaping for terminals. Pure and thread-safe; owns nothing.
 * Called from everywhere, also from the static guest agent.
 */
#include "text.h"

#include "price.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

bool text_fmt(char *out, size_t size, const char *fmt, ...)
{
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(out, size, fmt, ap);
	va_end(ap);
	if (n >= 0 && (size_t)n < size)
		return true;
	if (size > 0)
		out[0] = '\0';
	return false;
}

bool text_copy(char *out, size_t size, const char *s)
{
	size_t n = strlen(s);

	if (n < size) {
		memcpy(out, s, n + 1);
		return true;
	}
	if (size > 0)
		out[0] = '\0';
	return false;
}

/* Bytes that a lead byte announces, and the range of the second byte, which is where overlong forms and surrogates show. */
static size_t utf8_expect(uint8_t lead, uint8_t *low, uint8_t *high)
{
	*low = 0x80;
	*high = 0xbf;
	if (lead < 0x80)
		return 1;
	if (lead >= 0xc2 && lead <= 0xdf)
		return 2;
	if (lead >= 0xe0 && lead <= 0xef) {
		if (lead == 0xe0)
			*low = 0xa0;
		if (lead == 0xed)
			*high = 0x9f;
		return 3;
	}
	if (lead >= 0xf0 && lead <= 0xf4) {
		if (lead == 0xf0)
			*low = 0x90;
		if (lead == 0xf4)
			*high = 0x8f;
		return 4;
	}
	return 0;
}

/* How many of the n bytes at s can stand at the start of one character; *whole is the length it announces (0: no lead byte). */
static size_t utf8_prefix(const uint8_t *s, size_t n, size_t *whole)
{
	uint8_t low, high;
	size_t i;

	*whole = n > 0 ? utf8_expect(s[0], &low, &high) : 0;
	if (*whole == 0)
		return 0;
	for (i = 1; i < *whole && i < n; i++) {
		if (s[i] < low || s[i] > high)
			break;
		low = 0x80;
		high = 0xbf;
	}
	return i;
}

/* Length of the valid character at s (0 when there is none), and its code point. */
static size_t utf8_char(const uint8_t *s, size_t n, uint32_t *point)
{
	static const uint8_t lead_mask[5] = { 0, 0x7f, 0x1f, 0x0f, 0x07 };
	size_t whole;

	if (utf8_prefix(s, n, &whole) != whole || whole == 0)
		return 0;
	*point = s[0] & lead_mask[whole];
	for (size_t i = 1; i < whole; i++)
		*point = *point << 6 | (s[i] & 0x3f);
	return whole;
}

static bool utf8_check(const char *s, size_t n, bool nul_allowed)
{
	const uint8_t *p = (const uint8_t *)s;
	uint32_t point;

	while (n > 0) {
		size_t len;

		if (*p < 0x80) { /* nearly all text */
			if (*p == 0 && !nul_allowed)
				return false;
			len = 1;
		} else {
			len = utf8_char(p, n, &point);
		}
		if (len == 0)
			return false;
		p += len;
		n -= len;
	}
	return true;
}

bool text_utf8_valid(const char *s, size_t n)
{
	return utf8_check(s, n, true);
}

bool text_utf8_clean(const char *s, size_t n)
{
	return utf8_check(s, n, false);
}

size_t text_utf8_border(const char *s, size_t n)
{
	const uint8_t *p = (const uint8_t *)s;

	for (size_t back = 1; back <= 3 && back <= n; back++) {
		size_t whole, have = utf8_prefix(p + n - back, back, &whole);

		if (whole == 0)
			continue; /* a continuation byte, or one that starts nothing: look further back */
		return have == back && whole > back ? n - back : n;
	}
	return n;
}

int text_i64(const char *s, int64_t min, int64_t max, int64_t *out, struct err *e)
{
	bool negative = s[0] == '-' && min < 0;
	const char *p = s + (negative ? 1 : 0);
	int64_t v = 0;
	bool good = *p != '\0';

	for (; good && *p; p++) {
		good = *p >= '0' && *p <= '9' && !__builtin_mul_overflow(v, 10, &v);
		/* Counting down reaches INT64_MIN, which has no positive twin. */
		good = good && (negative ? !__builtin_sub_overflow(v, *p - '0', &v) : !__builtin_add_overflow(v, *p - '0', &v));
	}
	if (!good || v < min || v > max)
		return err_set(e, ERR_INVALID, "must be a whole number from %" PRId64 " to %" PRId64, min, max);
	*out = v;
	return 0;
}

int text_micros(const char *dollars, int64_t *micros, struct err *e)
{
	const char *p = dollars;
	int64_t v = 0;
	int decimals = -1; /* -1: before the point */
	bool good = *p >= '0' && *p <= '9';

	for (; good && *p; p++) {
		if (*p == '.' && decimals < 0) {
			decimals = 0;
			good = p[1] != '\0';
			continue;
		}
		if (decimals >= 0)
			decimals++;
		good = *p >= '0' && *p <= '9' && decimals <= 6 && !__builtin_mul_overflow(v, 10, &v) &&
		       !__builtin_add_overflow(v, *p - '0', &v);
	}
	for (int i = decimals < 0 ? 0 : decimals; good && i < 6; i++)
		good = !__builtin_mul_overflow(v, 10, &v);
	if (!good || v > PRICE_MICROS_MAX)
		return err_set(e, ERR_INVALID, "must be dollars like 0.05 with at most 6 decimals, up to %" PRId64,
				PRICE_MICROS_MAX / 1000000);
	*micros = v;
	return 0;
}

void text_dollars(int64_t micros, char out[32])
{
	uint64_t v = micros < 0 ? 0 - (uint64_t)micros : (uint64_t)micros;
	int n = snprintf(out, 32, "%s$%" PRIu64 ".%06" PRIu64, micros < 0 ? "-" : "", v / 1000000, v % 1000000);

	for (int cut = 0; cut < 4 && n > 0 && out[n - 1] == '0'; cut++)
		out[--n] = '\0';
}

void text_time_ms(int64_t unix_ms, char out[32])
{
	int64_t sec = unix_ms / 1000, ms = unix_ms % 1000;
	struct tm tm = { 0 };
	time_t t;

	if (ms < 0) {
		ms += 1000;
		sec--;
	}
	t = (time_t)sec;
	if (!gmtime_r(&t, &tm) || !text_fmt(out, 32, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", tm.tm_year + 1900, tm.tm_mon + 1,
						  tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, (int)ms))
		memcpy(out, "9999-12-31T23:59:59.999Z", 25);
}

/* n digits at *p, then the character `then`; moves *p past both. */
static bool digits(const char **p, int n, char then, int *out)
{
	*out = 0;
	for (int i = 0; i < n; i++) {
		char c = (*p)[0];

		if (c < '0' || c > '9')
			return false;
		*out = *out * 10 + (c - '0');
		(*p)++;
	}
	if (then && *(*p)++ != then)
		return false;
	return true;
}

static int month_days(int year, int month)
{
	static const int days[] = { 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 };
	bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;

	return days[month - 1] + (month == 2 && leap ? 1 : 0);
}

bool text_parse_time_ms(const char *s, int64_t *unix_ms)
{
	int year, month, day, hour, minute, second, ms = 0, scale = 100;
	struct tm tm = { 0 };
	const char *p = s;

	if (!digits(&p, 4, '-', &year) || !digits(&p, 2, '-', &month) || !digits(&p, 2, 'T', &day) || !digits(&p, 2, ':', &hour) ||
			!digits(&p, 2, ':', &minute) || !digits(&p, 2, '\0', &second))
		return false;
	if (year < 1 || month < 1 || month > 12 || day < 1 || day > month_days(year, month) || hour > 23 || minute > 59 ||
			second > 59)
		return false;
	if (*p == '.') {
		int d, count = 0;

		for (p++; *p >= '0' && *p <= '9' && count < 9; p++, count++) {
			d = *p - '0';
			ms += d * scale;
			scale /= 10; /* digits finer than milliseconds fall away */
		}
		if (count == 0)
			return false;
	}
	if (p[0] != 'Z' || p[1] != '\0')
		return false;
	tm = (struct tm){
		.tm_year = year - 1900, .tm_mon = month - 1, .tm_mday = day, .tm_hour = hour, .tm_min = minute, .tm_sec = second
	};
	*unix_ms = (int64_t)timegm(&tm) * 1000 + ms;
	return true;
}

/* Code points that change what a reader sees of the others: controls, line separators, direction, invisible tags. */
static bool unsafe_point(uint32_t c)
{
	static const struct {
		uint32_t first, last;
	} ranges[] = {
		{ 0x0000, 0x001f },
		{ 0x007f, 0x009f },
		{ 0x061c, 0x061c },
		{ 0x200e, 0x200f },
		{ 0x2028, 0x202e },
		{ 0x2066, 0x2069 },
		{ 0xfeff, 0xfeff },
		{ 0xfff9, 0xfffb },
		{ 0xe0000, 0xe007f },
	};

	for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
		if (c >= ranges[i].first && c <= ranges[i].last)
			return true;
	}
	return false;
}

size_t text_safe_char(const char *s, size_t n, bool lines, char out[16])
{
	const uint8_t *p = (const uint8_t *)s;
	uint32_t point = 0;
	size_t len = utf8_char(p, n, &point);

	if (len == 0) {
		(void)snprintf(out, 16, "\\x%02x", (unsigned)*p);
		return 1;
	}
	if (unsafe_point(point) && !(lines && (point == '\n' || point == '\t'))) {
		(void)snprintf(out, 16, point < 0x80 ? "\\x%02x" : "\\u{%x}", (unsigned)point);
		return len;
	}
	memcpy(out, s, len);
	out[len] = '\0';
	return len;
}

bool text_safe(struct buf *b, const char *s, size_t n, bool lines)
{
	char shown[16];
	bool ok = true;

	while (n > 0 && ok) {
		size_t len = text_safe_char(s, n, lines, shown);

		ok = buf_add_str(b, shown);
		s += len;
		n -= len;
	}
	return ok;
}

size_t text_utf8_length(const char *s, size_t n)
{
	size_t count = 0;

	for (size_t i = 0; i < n; i++)
		count += ((unsigned char)s[i] & 0xc0) != 0x80 ? 1 : 0;
	return count;
}

bool text_wrap(struct buf *b, const char *s, size_t at, size_t indent, size_t width)
{
	bool blank = false; /* a blank is due before the next word of this line */
	bool ok = true;

	while (*s && ok) {
		size_t n = strcspn(s, " \n"), wide = text_utf8_length(s, n);

		if (n > 0 && blank && at + 1 + wide > width) {
			ok = buf_printf(b, "\n%*s", (int)indent, "");
			at = indent;
		} else if (n > 0 && blank) {
			ok = buf_add_char(b, ' ');
			at++;
		}
		ok = ok && buf_add(b, s, n);
		at += wide;
		blank = n > 0 || (blank && s[n] == ' ');
		s += n;
		if (*s == '\n') {
			ok = ok && buf_printf(b, "\n%*s", s[1] ? (int)indent : 0, "");
			at = indent;
			blank = false;
		}
		s += *s ? 1 : 0;
	}
	return ok;
}
