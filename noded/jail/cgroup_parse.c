/*
 * Where this process stands in each cgroup hierarchy: reads the texts of /proc/self/cgroup and /proc/self/mountinfo. Pure
 * functions, called by cgroup.c and by tests; nothing here blocks or keeps state.
 */
#include "jail/cgroup.h"

#include "common/text.h"

#include <string.h>

/* Is `word` one of the comma separated words in s[0..n)? */
static bool has_word(const char *s, size_t n, const char *word)
{
	size_t len = strlen(word);

	while (n > 0) {
		const char *comma = memchr(s, ',', n);
		size_t part = comma ? (size_t)(comma - s) : n;

		if (part == len && memcmp(s, word, len) == 0)
			return true;
		if (!comma)
			return false;
		s += part + 1;
		n -= part + 1;
	}
	return false;
}

/* Line "4:memory:/a/b" or, for v2, "0::/a/b". */
bool cgroup_parse_self(const char *text, const char *controller, char *out, size_t size)
{
	for (const char *line = text; *line;) {
		const char *end = strchrnul(line, '\n');
		const char *first = memchr(line, ':', (size_t)(end - line));
		const char *second = first ? memchr(first + 1, ':', (size_t)(end - first - 1)) : NULL;

		if (second) {
			size_t names = (size_t)(second - first - 1);
			bool match = *controller ? has_word(first + 1, names, controller) : names == 0;

			if (match)
				return text_fmt(out, size, "%.*s", (int)(end - second - 1), second + 1);
		}
		line = *end ? end + 1 : end;
	}
	return false;
}

static bool is_octal(char c)
{
	return c >= '0' && c <= '7';
}

/* Undoes mountinfo's \040 escapes. False when it does not fit into size; with out NULL it only looks whether it would. */
static bool unescape(const char *s, size_t n, char *out, size_t size)
{
	size_t len = 0;

	for (size_t i = 0; i < n; i++) {
		char c = s[i];

		if (c == '\\' && n - i >= 4 && s[i + 1] >= '0' && s[i + 1] <= '3' && is_octal(s[i + 2]) && is_octal(s[i + 3])) {
			c = (char)((s[i + 1] - '0') * 64 + (s[i + 2] - '0') * 8 + (s[i + 3] - '0'));
			i += 3;
		}
		if (len + 1 >= size)
			return false;
		if (out)
			out[len] = c;
		len++;
	}
	if (out)
		out[len] = '\0';
	return true;
}

#define MOUNT_FIELDS 16

/* Splits a line at spaces; false when it has more fields than a mount line may have. */
static size_t split(const char *line, size_t n, const char **field, size_t *len)
{
	size_t count = 0, i = 0;

	while (i < n) {
		size_t start = i;

		while (i < n && line[i] != ' ')
			i++;
		if (count == MOUNT_FIELDS)
			return 0;
		field[count] = line + start;
		len[count++] = i - start;
		i += i < n;
	}
	return count;
}

static bool field_is(const char *f, size_t n, const char *word)
{
	return n == strlen(word) && memcmp(f, word, n) == 0;
}

/* "36 35 98:0 /root /point rw,noatime master:1 - cgroup cgroup rw,memory": the part after " - " is type, source, super options. */
bool cgroup_parse_mount(const char *text, const char *controller, char *point, char *root, size_t size)
{
	bool found = false;

	for (const char *line = text; *line;) {
		const char *end = strchrnul(line, '\n');
		const char *field[MOUNT_FIELDS];
		size_t len[MOUNT_FIELDS], dash = 6, count = split(line, (size_t)(end - line), field, len);

		line = *end ? end + 1 : end;
		while (dash < count && !field_is(field[dash], len[dash], "-"))
			dash++;
		if (count < 10 || dash + 3 >= count)
			continue;
		if (*controller ? !field_is(field[dash + 1], len[dash + 1], "cgroup") ||
								!has_word(field[dash + 3], len[dash + 3], controller)
				: !field_is(field[dash + 1], len[dash + 1], "cgroup2"))
			continue;
		/* Both or neither: a line that does not fit leaves what an earlier one said. */
		if (unescape(field[4], len[4], NULL, size) && unescape(field[3], len[3], NULL, size))
			found = unescape(field[4], len[4], point, size) && unescape(field[3], len[3], root, size);
	}
	return found;
}

bool cgroup_join(const char *point, const char *root, const char *path, char *out, size_t size)
{
	size_t n = strlen(root);

	/* The mount may show a subtree: what is above it cannot be reached, and is not ours. */
	if (strcmp(root, "/") != 0 && strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == '\0'))
		path += n;
	else if (strcmp(root, "/") != 0 || strncmp(path, "/..", 3) == 0)
		path = "";
	if (strcmp(path, "/") == 0)
		path = "";
	return text_fmt(out, size, "%s%s", point, path);
}
