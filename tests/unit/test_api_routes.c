/* link: controld_api controld_store controld_base ephproto */
/* What must be true of every row of the real route table: operator calls on the operator's listener only, nothing open by mistake.
 */
#include "controld/api/router.h"

#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static const char *const open_paths[] = { "/healthz", "/readyz", "/problems/{name}" };

static bool is_open(const char *pattern)
{
	size_t i;

	for (i = 0; i < sizeof(open_paths) / sizeof(open_paths[0]); i++)
		if (strcmp(open_paths[i], pattern) == 0)
			return true;
	return false;
}

static void test_who_and_where(void **state)
{
	size_t i;

	(void)state;
	for (i = 0; i < api_route_count; i++) {
		const struct route *r = &api_routes[i];
		bool is_operator = strncmp(r->pattern, "/v1/operator/", 13) == 0;

		if ((r->need == NEED_OPERATOR) != is_operator || (r->listeners == LISTENER_OPERATOR) != is_operator)
			fail_msg("%s: operator key, listener and path must agree", r->pattern);
		if ((r->need == NEED_NONE) != is_open(r->pattern))
			fail_msg("%s: open to everybody?", r->pattern);
		if (r->method != HTTP_GET && r->need == NEED_VIEWER)
			fail_msg("%s: a viewer must not change anything", r->pattern);
		if (r->method == HTTP_GET && r->content != CONTENT_NONE)
			fail_msg("%s: a GET with a body", r->pattern);
		if (r->body_max > 64 * 1024 && strcmp(r->pattern, "/v1/runs") != 0 && r->content != CONTENT_BYTES)
			fail_msg("%s: a large body", r->pattern);
		assert_non_null(r->handle);
	}
}

static void test_no_row_hides_another(void **state)
{
	size_t i, k;

	(void)state;
	for (i = 0; i < api_route_count; i++) {
		struct route_match m;
		char path[256];
		size_t o = 0;
		const char *p;

		/* Each parameter gets a value that no fixed part has. */
		for (p = api_routes[i].pattern; *p && o < sizeof(path) - 2; p++) {
			if (*p == '{') {
				path[o++] = '~';
				p = strchr(p, '}');
				assert_non_null(p);
			} else {
				path[o++] = *p;
			}
		}
		path[o] = '\0';
		route_find(api_routes, api_route_count,
				api_routes[i].listeners & LISTENER_MEMBER ? LISTENER_MEMBER : LISTENER_OPERATOR,
				api_routes[i].method, path, &m);
		if (m.route != &api_routes[i])
			fail_msg("%s is not reached", api_routes[i].pattern);
		for (k = 0; k < i; k++)
			if (api_routes[k].method == api_routes[i].method &&
					strcmp(api_routes[k].pattern, api_routes[i].pattern) == 0)
				fail_msg("%s stands twice", api_routes[i].pattern);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_who_and_where),
		cmocka_unit_test(test_no_row_hides_another),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
