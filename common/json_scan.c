/*
 * The first look at JSON text, before yajl sees it. yajl turns a lone surrogate escape into '?', lets \u0000 through, takes
 * overlong UTF-8, and a vertical tab or form feed for white space; here they are refused with their byte offset. Pure; one pass,
 * nothing allocated.
 */
#include "json_internal.h"

#include "text.h"

/* Four hex digits at s; -1 when they are not (yajl then says so in its own words). */
static int32_t hex4(const char *s, size_t n)
{
	int32_t v = 0;

	if (n < 4)
		return -1;
	for (int i = 0; i < 4; i++) {
		char c = s[i];
		int d;

		if (c >= '0' && c <= '9')
			d = c - '0';
		else if (c >= 'a' && c <= 'f')
			d = c - 'a' + 10;
		else if (c >= 'A' && c <= 'F')
			d = c - 'A' + 10;
		else
			return -1;
		v = v << 4 | d;
	}
	return v;
}

/* The escape that begins at s[i] with a backslash; *i moves past it. */
static int scan_escape(const char *s, size_t n, size_t *i, struct err *e)
{
	size_t at = *i;
	int32_t high, low;

	*i += 2;
	if (at + 1 >= n || s[at + 1] != 'u')
		return 0;
	high = hex4(s + at + 2, n - at - 2);
	if (high < 0)
		return 0;
	*i += 4;
	if (high == 0)
		return err_set(e, ERR_INVALID, "byte %zu: \\u0000 is not allowed in a string; remove it", at);
	if (high < 0xd800 || high > 0xdfff)
		return 0;
	low = at + 7 < n && s[at + 6] == '\\' && s[at + 7] == 'u' ? hex4(s + at + 8, n - at - 8) : -1;
	if (high >= 0xdc00 || low < 0xdc00 || low > 0xdfff)
		return err_set(e, ERR_INVALID,
				"byte %zu: \\u%04x is half of a surrogate pair; write both halves or the character itself", at,
				(unsigned)high);
	*i += 6;
	return 0;
}

/* Where strict UTF-8 breaks, found again only to name the offset. */
static int bad_bytes(const char *s, size_t n, struct err *e)
{
	size_t low = 0, high = n;

	/* A prefix is clean up to the first bad character; search the border. A cut character at the border is stepped over. */
	while (high - low > 1) {
		size_t mid = low + (high - low) / 2;
		size_t whole = mid - (mid - text_utf8_border(s, mid));

		if (text_utf8_clean(s, whole))
			low = mid;
		else
			high = mid;
	}
	low = text_utf8_border(s, low);
	if (low < n && s[low] == '\0')
		return err_set(e, ERR_INVALID, "byte %zu: a NUL byte is not allowed", low);
	return err_set(e, ERR_INVALID, "byte %zu: not valid UTF-8; send the text as UTF-8", low);
}

static bool is_white(char c)
{
	return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t digits(const char *s, size_t n)
{
	size_t i = 0;

	while (i < n && s[i] >= '0' && s[i] <= '9')
		i++;
	return i;
}

static bool is_number(const char *s, size_t n)
{
	size_t i = n > 0 && s[0] == '-', whole = digits(s + i, n - i);

	if (whole == 0 || (whole > 1 && s[i] == '0'))
		return false;
	i += whole;
	if (i < n && s[i] == '.') {
		size_t part = digits(s + i + 1, n - i - 1);

		if (part == 0)
			return false;
		i += 1 + part;
	}
	if (i < n && (s[i] == 'e' || s[i] == 'E')) {
		i += i + 1 < n && (s[i + 1] == '+' || s[i + 1] == '-') ? 2 : 1;
		return i < n && digits(s + i, n - i) == n - i;
	}
	return i == n;
}

static bool is_word(const char *s, size_t n)
{
	return (n == 4 && (memcmp(s, "true", 4) == 0 || memcmp(s, "null", 4) == 0)) || (n == 5 && memcmp(s, "false", 5) == 0);
}

struct scan {
	bool in_string;
	bool over; /* the document's one value has ended: yajl does not see a token that begins behind it and is cut by the end */
	size_t depth;
};

/* One character or, at the top, one number or word outside of strings; *i moves past it. */
static int scan_outside(struct scan *t, const char *s, size_t n, size_t *i, struct err *e)
{
	size_t at = *i, len = 1;

	if (s[at] == '\v' || s[at] == '\f')
		return err_set(e, ERR_INVALID, "byte %zu: only blanks, tabs and line ends may stand between values", at);
	if (is_white(s[at])) {
		*i += 1;
		return 0;
	}
	if (t->over)
		return err_set(e, ERR_INVALID, "byte %zu: the document has ended before it; remove what follows", at);
	switch (s[at]) {
	case '"': t->in_string = true; break;
	case '{':
	case '[': t->depth++; break;
	case '}':
	case ']':
		t->depth -= t->depth > 0;
		t->over = t->depth == 0;
		break;
	default:
		if (t->depth > 0)
			break;
		if (s[at] == '/')
			return err_set(e, ERR_INVALID, "byte %zu: JSON has no comments", at);
		while (at + len < n && !is_white(s[at + len]) && !strchr("\"{}[],:", s[at + len]))
			len++;
		if (!is_word(s + at, len) && !is_number(s + at, len))
			return err_set(e, ERR_INVALID, "byte %zu: this begins no JSON value", at);
		t->over = true;
	}
	*i += len;
	return 0;
}

int json_scan(const char *s, size_t n, struct err *e)
{
	struct scan t = { .depth = 0 };
	size_t i = 0;

	if (!text_utf8_clean(s, n))
		return bad_bytes(s, n, e);
	while (i < n) {
		if (!t.in_string) {
			if (scan_outside(&t, s, n, &i, e) != 0)
				return -1;
		} else if (s[i] == '\\') {
			if (scan_escape(s, n, &i, e) != 0)
				return -1;
		} else {
			t.in_string = s[i] != '"';
			t.over = !t.in_string && t.depth == 0;
			i++;
		}
	}
	return 0;
}
