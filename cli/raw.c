/* A walk over JSON text that was found valid before. Called by cmd_events.c; pure, never reads past the end. */
#include "raw.h"

#include <string.h>

static size_t skip_space(const char *s, size_t n, size_t at)
{
	while (at < n && (s[at] == ' ' || s[at] == '\t' || s[at] == '\n' || s[at] == '\r'))
		at++;
	return at;
}

/* at stands on the opening quote; the result is past the closing one. */
static size_t skip_string(const char *s, size_t n, size_t at)
{
	for (at++; at < n && s[at] != '"'; at++)
		if (s[at] == '\\')
			at++;
	return at < n ? at + 1 : n;
}

/* Past the value that begins at `at`. */
static size_t skip_value(const char *s, size_t n, size_t at)
{
	size_t depth = 0;

	do {
		if (at >= n)
			return n;
		if (s[at] == '"') {
			at = skip_string(s, n, at);
			continue;
		}
		if (s[at] == '{' || s[at] == '[')
			depth++;
		else if (s[at] == '}' || s[at] == ']')
			depth--;
		else if (depth == 0) { /* a number or a word */
			while (at < n && strchr(",]} \t\r\n", s[at]) == NULL)
				at++;
			return at;
		}
		at++;
	} while (depth > 0);
	return at;
}

static bool each_element(const char *s, size_t n, size_t at, bool (*fn)(void *, const char *, size_t), void *arg)
{
	at = skip_space(s, n, at + 1);
	while (at < n && s[at] != ']') {
		size_t end = skip_value(s, n, at);

		if (end <= at || !fn(arg, s + at, end - at))
			return true;
		at = skip_space(s, n, end);
		if (at < n && s[at] == ',')
			at = skip_space(s, n, at + 1);
	}
	return true;
}

bool raw_member_array(const char *s, size_t n, const char *key, bool (*fn)(void *arg, const char *bytes, size_t n), void *arg)
{
	size_t at = skip_space(s, n, 0), key_len = strlen(key);

	if (at >= n || s[at] != '{')
		return false;
	at = skip_space(s, n, at + 1);
	while (at < n && s[at] == '"') {
		size_t end = skip_string(s, n, at);
		bool here = end - at == key_len + 2 && memcmp(s + at + 1, key, key_len) == 0;

		at = skip_space(s, n, end);
		if (at >= n || s[at] != ':')
			return false;
		at = skip_space(s, n, at + 1);
		if (here && at < n && s[at] == '[')
			return each_element(s, n, at, fn, arg);
		at = skip_space(s, n, skip_value(s, n, at));
		if (at < n && s[at] == ',')
			at = skip_space(s, n, at + 1);
	}
	return false;
}
