/*
 * Reads a program's configuration by its key table. Called at start, by -t and at a reload, on the main thread, and may block on
 * the file. Owns nothing after it returns: strings belong to the caller's struct until config_free.
 */
#include "config.h"

#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CONFIG_FILE_MAX (256 * 1024)
#define CONFIG_KEYS_MAX 512
#define CONFIG_STRING_MAX 1024
#define HELP_WIDTH 80

/* Where a value came from, for the error text. line 0: an override or a default. */
struct source {
	const char *path;
	int line;
};

static int fail_at(const struct source *src, struct err *e)
{
	if (src->line > 0)
		return err_wrap(e, "%s:%d", src->path, src->line);
	return err_wrap(e, "%s", src->path);
}

static size_t max_of(size_t a, size_t b)
{
	return a > b ? a : b;
}

/* Edits (insert, delete, change) between two short names. Longer ones are simply far apart. */
static size_t distance(const char *a, const char *b)
{
	size_t row[65], n = strlen(a), m = strlen(b);

	if (n > 64 || m > 64)
		return max_of(n, m);
	for (size_t j = 0; j <= m; j++)
		row[j] = j;
	for (size_t i = 1; i <= n; i++) {
		size_t corner = row[0];

		row[0] = i;
		for (size_t j = 1; j <= m; j++) {
			size_t best = corner + (a[i - 1] == b[j - 1] ? 0 : 1);

			corner = row[j];
			if (row[j] + 1 < best)
				best = row[j] + 1;
			if (row[j - 1] + 1 < best)
				best = row[j - 1] + 1;
			row[j] = best;
		}
	}
	return row[m];
}

static int unknown_key(const struct config_key *keys, size_t count, const char *name, struct err *e)
{
	const char *near = NULL;
	size_t best = SIZE_MAX;

	for (size_t i = 0; i < count; i++) {
		size_t d = distance(name, keys[i].name);

		if (d < best) {
			best = d;
			near = keys[i].name;
		}
	}
	if (near && best <= max_of(2, strlen(near) / 3))
		return err_set(e, ERR_INVALID, "unknown key \"%.64s\"; did you mean \"%s\"?", name, near);
	return err_set(e, ERR_INVALID, "unknown key \"%.64s\"; `help config` lists all keys", name);
}

static int set_string(const struct config_key *k, char **field, const char *value, struct err *e)
{
	size_t max = k->max > 0 ? (size_t)k->max : CONFIG_STRING_MAX, n = strlen(value);
	char *copy;

	if (n > max)
		return err_set(e, ERR_LIMIT, "%s is %zu bytes long; at most %zu are allowed", k->name, n, max);
	if ((int64_t)n < k->min)
		return err_set(e, ERR_INVALID, "%s needs at least %" PRId64 " bytes; give it a value or remove the line", k->name,
				k->min);
	copy = strdup(value);
	if (!copy)
		return err_set(e, ERR_NOMEM, "%s: no memory", k->name);
	free(*field);
	*field = copy;
	return 0;
}

static int set_bool(const struct config_key *k, bool *field, const char *value, struct err *e)
{
	static const char *const yes[] = { "true", "on", "yes" }, *const no[] = { "false", "off", "no" };

	for (size_t i = 0; i < 3; i++) {
		if (strcmp(value, yes[i]) == 0 || strcmp(value, no[i]) == 0) {
			*field = strcmp(value, yes[i]) == 0;
			return 0;
		}
	}
	return err_set(e, ERR_INVALID, "%s must be on or off (true/false and yes/no will do)", k->name);
}

static int set_enum(const struct config_key *k, int64_t *field, const char *value, struct err *e)
{
	const char *p = k->choices;
	size_t n = strlen(value);

	for (int64_t i = 0; p && *p; i++) {
		size_t len = strcspn(p, "|");

		if (len == n && n > 0 && memcmp(p, value, n) == 0) {
			*field = i;
			return 0;
		}
		p += len + (p[len] == '|' ? 1 : 0);
	}
	return err_set(e, ERR_INVALID, "%s must be one of %s", k->name, k->choices);
}

static int set_value(const struct config_key *k, void *config, const char *value, struct err *e)
{
	char *field = (char *)config + k->offset;

	switch (k->type) {
	case CONFIG_STRING:
	case CONFIG_LIST: return set_string(k, (char **)(void *)field, value, e);
	case CONFIG_INT:
		if (text_i64(value, k->min, k->max, (int64_t *)(void *)field, e) != 0)
			return err_wrap(e, "%s", k->name);
		return 0;
	case CONFIG_BOOL: return set_bool(k, (bool *)(void *)field, value, e);
	case CONFIG_ENUM: return set_enum(k, (int64_t *)(void *)field, value, e);
	}
	return err_set(e, ERR_INTERNAL, "%s has no type", k->name);
}

static char *trim(char *s)
{
	size_t n;

	s += strspn(s, " \t\r");
	n = strlen(s);
	while (n > 0 && strchr(" \t\r", s[n - 1]))
		s[--n] = '\0';
	return s;
}

/* One "key = value"; line is cut up. seen[] holds the line at which each key stood already. */
static int set_line(const struct config_key *keys, size_t count, void *config, char *line, int *seen, const struct source *src,
		struct err *e)
{
	char *equals = strchr(line, '='), *name;

	if (!equals) {
		err_set(e, ERR_INVALID, "\"%.64s\" is not `key = value`", line);
		return fail_at(src, e);
	}
	*equals = '\0';
	name = trim(line);
	for (size_t i = 0; i < count; i++) {
		if (strcmp(keys[i].name, name) != 0)
			continue;
		if (src->line > 0 && seen[i] > 0) {
			err_set(e, ERR_INVALID, "%s stands in line %d already; remove one of them", name, seen[i]);
			return fail_at(src, e);
		}
		seen[i] = src->line > 0 ? src->line : -1;
		return set_value(&keys[i], config, trim(equals + 1), e) == 0 ? 0 : fail_at(src, e);
	}
	unknown_key(keys, count, name, e);
	return fail_at(src, e);
}

static int read_file(const char *path, struct buf *text, struct err *e)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = 0;

	if (fd < 0)
		return err_set_errno(e, "config %s", path);
	for (;;) {
		uint8_t *room = buf_reserve(text, 4096);

		if (!room)
			break;
		n = read(fd, room, 4096);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		buf_commit(text, (size_t)n);
	}
	if (n < 0)
		err_set_errno(e, "config %s", path);
	close(fd);
	if (n < 0)
		return -1;
	if (text->failed)
		return err_set(e, ERR_LIMIT, "config %s is larger than %d bytes", path, CONFIG_FILE_MAX - 4096);
	return 0;
}

static int load_file(const struct config_key *keys, size_t count, void *config, const char *path, int *seen, struct err *e)
{
	struct buf text = BUF_INIT(CONFIG_FILE_MAX);
	struct source src = { .path = path, .line = 0 };
	char *at;
	int rc = read_file(path, &text, e);

	if (rc == 0 && !text_utf8_clean((const char *)text.data, text.len))
		rc = err_set(e, ERR_INVALID, "config %s is not plain UTF-8 text (it holds a NUL or a broken character)", path);
	if (rc == 0 && !buf_cstr(&text))
		rc = err_set(e, ERR_NOMEM, "config %s: no memory", path);
	at = (char *)text.data;
	while (rc == 0 && at && *at) {
		char *next = strchr(at, '\n');
		char *line;

		if (next)
			*next = '\0';
		src.line++;
		line = trim(at);
		if (*line && *line != '#')
			rc = set_line(keys, count, config, line, seen, &src, e);
		at = next ? next + 1 : NULL;
	}
	if (text.data)
		explicit_bzero(text.data, text.cap); /* a config may hold secrets */
	buf_free(&text);
	return rc;
}

static int load_override(const struct config_key *keys, size_t count, void *config, const char *text, int *seen, struct err *e)
{
	struct source src = { .path = "command line", .line = 0 };
	char *copy = strdup(text);
	int rc;

	if (!copy)
		return err_set(e, ERR_NOMEM, "command line: no memory");
	rc = set_line(keys, count, config, copy, seen, &src, e);
	explicit_bzero(copy, strlen(text));
	free(copy);
	return rc;
}

int config_load(const struct config_key *keys, size_t count, void *config, const char *path, const char *const *overrides,
		size_t override_count, struct err *e)
{
	int seen[CONFIG_KEYS_MAX] = { 0 };

	if (count > CONFIG_KEYS_MAX)
		return err_set(e, ERR_INTERNAL, "a config table has at most %d keys", CONFIG_KEYS_MAX);
	for (size_t i = 0; i < count; i++) {
		if (keys[i].fallback && set_value(&keys[i], config, keys[i].fallback, e) != 0)
			return err_wrap(e, "default");
	}
	if (path && load_file(keys, count, config, path, seen, e) != 0)
		return -1;
	for (size_t i = 0; i < override_count; i++) {
		if (load_override(keys, count, config, overrides[i], seen, e) != 0)
			return -1;
	}
	for (size_t i = 0; i < count; i++) {
		if (!keys[i].fallback && !keys[i].optional && seen[i] == 0)
			return err_set(e, ERR_INVALID, "%s: %s is missing and has no default; add `%s = ...` (%s)",
					path ? path : "command line", keys[i].name, keys[i].name, keys[i].help);
	}
	return 0;
}

void config_free(const struct config_key *keys, size_t count, void *config)
{
	for (size_t i = 0; i < count; i++) {
		char **field = (char **)(void *)((char *)config + keys[i].offset);

		if (keys[i].type != CONFIG_STRING && keys[i].type != CONFIG_LIST)
			continue;
		if (*field && keys[i].secret)
			explicit_bzero(*field, strlen(*field));
		free(*field);
		*field = NULL;
	}
}

void config_help(const struct config_key *keys, size_t count, struct buf *out)
{
	for (size_t i = 0; i < count; i++) {
		const struct config_key *k = &keys[i];
		struct buf about = BUF_INIT(2 * CONFIG_STRING_MAX);

		buf_printf(&about, "%s\n", k->help);
		switch (k->type) {
		case CONFIG_INT: buf_printf(&about, "number from %" PRId64 " to %" PRId64, k->min, k->max); break;
		case CONFIG_BOOL: buf_add_str(&about, "on or off"); break;
		case CONFIG_ENUM: buf_printf(&about, "one of %s", k->choices); break;
		case CONFIG_STRING:
			buf_printf(&about, "text, at most %" PRId64 " bytes", k->max > 0 ? k->max : CONFIG_STRING_MAX);
			break;
		case CONFIG_LIST: buf_add_str(&about, "list, comma separated"); break;
		}
		if (k->fallback)
			buf_printf(&about, "; default: %s", k->secret ? "(secret)" : *k->fallback ? k->fallback : "(empty)");
		else
			buf_add_str(&about, k->optional ? "; optional" : "; required");
		buf_add_str(&about, k->reloadable ? "; read again at a reload" : "; needs a restart");
		buf_printf(out, "%s\n    ", k->name);
		(void)text_wrap(out, buf_cstr(&about) ? buf_cstr(&about) : "", 4, 4, HELP_WIDTH);
		buf_add_str(out, "\n\n");
		buf_free(&about);
	}
}

int config_addr(const char *s, char *host, size_t host_size, uint16_t *port, struct err *e)
{
	const char *colon = strrchr(s, ':');
	const char *from = s;
	size_t n;
	int64_t number;

	host[0] = '\0';
	if (!colon)
		return err_set(e, ERR_INVALID, "\"%.64s\" is not an address; write host:port, [ipv6]:port or :port", s);
	n = (size_t)(colon - s);
	if (n >= 2 && s[0] == '[' && s[n - 1] == ']') {
		from++;
		n -= 2;
	} else if (memchr(s, ':', n)) {
		return err_set(e, ERR_INVALID, "\"%.64s\": an IPv6 address stands in brackets, [::1]:8080", s);
	}
	if (n >= host_size)
		return err_set(e, ERR_LIMIT, "the host of an address has at most %zu characters", host_size - 1);
	if (memchr(from, '[', n) || memchr(from, ']', n) || memchr(from, ' ', n) || memchr(from, '/', n))
		return err_set(e, ERR_INVALID, "\"%.64s\" is not an address; write host:port, [ipv6]:port or :port", s);
	if (text_i64(colon + 1, 0, 65535, &number, e) != 0)
		return err_wrap(e, "port of \"%.64s\"", s);
	memcpy(host, from, n);
	host[n] = '\0';
	*port = (uint16_t)number;
	return 0;
}
