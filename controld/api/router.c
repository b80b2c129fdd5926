/* Matching a path with the route table. Pure; api.c calls it once for each request. */
#include "router.h"

#include "common/text.h"

/* One part of the pattern against one part of the path; parts end at '/' or at the end. */
static bool part_matches(const char *pattern, size_t pn, const char *path, size_t n, struct route_params *out, size_t *taken)
{
	if (pn < 2 || pattern[0] != '{')
		return pn == n && memcmp(pattern, path, n) == 0;
	if (n == 0 || n >= ROUTE_PARAM_SIZE || *taken == ROUTE_PARAMS_MAX)
		return false;
	memcpy(out->value[*taken], path, n);
	out->value[*taken][n] = '\0';
	(*taken)++;
	return true;
}

static bool is_rest(const char *pattern, size_t pn)
{
	return pn > 5 && pattern[0] == '{' && memcmp(pattern + pn - 4, "...}", 4) == 0;
}

static bool path_matches(const char *pattern, const char *path, struct route_params *out)
{
	size_t taken = 0;

	for (;;) {
		size_t pn = strcspn(pattern, "/"), n = strcspn(path, "/");

		if (is_rest(pattern, pn))
			n = strlen(path);
		if (!part_matches(pattern, pn, path, n, out, &taken))
			return false;
		pattern += pn;
		path += n;
		if (*pattern == '\0' || *path == '\0')
			return *pattern == *path;
		pattern++;
		path++;
	}
}

void route_find(const struct route *table, size_t count, enum api_listener listener, enum http_method method, const char *path,
		struct route_match *out)
{
	enum http_method as = method == HTTP_HEAD ? HTTP_GET : method;
	size_t i;

	out->route = NULL;
	out->allowed = 0;
	out->other_listener = false;
	for (i = 0; i < count; i++) {
		struct route_params params;

		if (!path_matches(table[i].pattern, path, &params))
			continue;
		if (!(table[i].listeners & listener)) {
			out->other_listener = true;
			continue;
		}
		out->allowed |= (unsigned)table[i].method;
		if (table[i].method == HTTP_GET)
			out->allowed |= HTTP_HEAD;
		if (table[i].method == as && !out->route) {
			out->route = &table[i];
			out->params = params;
		}
	}
	if (out->allowed)
		out->allowed |= HTTP_OPTIONS;
}

bool route_allow(unsigned allowed, struct buf *out)
{
	static const struct {
		unsigned bit;
		const char *name;
	} methods[] = {
		{ HTTP_GET, "GET" },
		{ HTTP_HEAD, "HEAD" },
		{ HTTP_POST, "POST" },
		{ HTTP_PUT, "PUT" },
		{ HTTP_PATCH, "PATCH" },
		{ HTTP_DELETE, "DELETE" },
		{ HTTP_OPTIONS, "OPTIONS" },
	};
	bool first = true;
	size_t i;

	for (i = 0; i < sizeof(methods) / sizeof(methods[0]); i++) {
		if (!(allowed & methods[i].bit))
			continue;
		buf_printf(out, "%s%s", first ? "" : ", ", methods[i].name);
		first = false;
	}
	return !out->failed;
}

bool route_knows_query(const struct route *r, const char *name)
{
	const char *p = r->query;

	while (*p) {
		size_t n = strcspn(p, " ");

		if (n > 2 && p[n - 1] == '*') {
			if (strncmp(p, name, n - 1) == 0 && name[n - 1] != '\0')
				return true;
		} else if (strlen(name) == n && memcmp(p, name, n) == 0) {
			return true;
		}
		p += n;
		p += strspn(p, " ");
	}
	return false;
}

const char *api_need_name(enum api_need n)
{
	switch (n) {
	case NEED_VIEWER: return "viewer";
	case NEED_MEMBER: return "member";
	case NEED_ADMIN: return "admin";
	case NEED_OPERATOR: return "operator";
	case NEED_NONE: break;
	}
	return "none";
}
