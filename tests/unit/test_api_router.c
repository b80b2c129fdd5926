/* sources: controld/api/router.c */
/* Matching paths with a route table, and what a table's columns say about query parameters. */
#include "controld/api/router.h"

#include "common/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void one(struct api_req *r)
{
	(void)r;
}

static void two(struct api_req *r)
{
	(void)r;
}

static const struct route table[] = {
	ROUTE(HTTP_GET, "/healthz", LISTENER_BOTH, NEED_NONE, 1, CONTENT_NONE, "", one),
	ROUTE(HTTP_GET, "/v1/runs", LISTENER_MEMBER, NEED_VIEWER, 1, CONTENT_NONE, "limit cursor metadata.*", one),
	ROUTE(HTTP_POST, "/v1/runs", LISTENER_MEMBER, NEED_MEMBER, 100, CONTENT_JSON, "", two),
	ROUTE(HTTP_GET, "/v1/runs/{id}", LISTENER_MEMBER, NEED_VIEWER, 1, CONTENT_NONE, "", one),
	ROUTE(HTTP_DELETE, "/v1/runs/{id}", LISTENER_MEMBER, NEED_VIEWER, 1, CONTENT_NONE, "", two),
	ROUTE(HTTP_GET, "/v1/runs/{id}/events", LISTENER_MEMBER, NEED_VIEWER, 1, CONTENT_NONE, "", one),
	ROUTE(HTTP_PUT, "/v1/operator/models/{provider}/{model...}", LISTENER_OPERATOR, NEED_OPERATOR, 1, CONTENT_JSON, "", two),
};
#define COUNT (sizeof(table) / sizeof(table[0]))

struct look {
	enum api_listener listener;
	enum http_method method;
	const char *path;
	int index; /* -1 = none */
	const char *allow, *first, *second;
};

static const struct look looks[] = {
	{ LISTENER_MEMBER, HTTP_GET, "/healthz", 0, "GET, HEAD, OPTIONS", "", "" },
	{ LISTENER_OPERATOR, HTTP_HEAD, "/healthz", 0, "GET, HEAD, OPTIONS", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/v1/runs", 1, "GET, HEAD, POST, OPTIONS", "", "" },
	{ LISTENER_MEMBER, HTTP_POST, "/v1/runs", 2, "GET, HEAD, POST, OPTIONS", "", "" },
	{ LISTENER_MEMBER, HTTP_DELETE, "/v1/runs", -1, "GET, HEAD, POST, OPTIONS", "", "" },
	{ LISTENER_MEMBER, HTTP_OPTIONS, "/v1/runs", -1, "GET, HEAD, POST, OPTIONS", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/v1/runs/", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/v1/runs/x", 3, "GET, HEAD, DELETE, OPTIONS", "x", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/v1/runs/x/", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/v1/runs/x/events", 5, "GET, HEAD, OPTIONS", "x", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/v1/runs//events", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/v1/runs/x/nothing", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "/V1/runs", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_GET, "//v1/runs", -1, "", "", "" },
	{ LISTENER_OPERATOR, HTTP_GET, "/v1/runs", -1, "", "", "" },
	{ LISTENER_MEMBER, HTTP_PUT, "/v1/operator/models/a/b", -1, "", "", "" },
	{ LISTENER_OPERATOR, HTTP_PUT, "/v1/operator/models/a/b", 6, "PUT, OPTIONS", "a", "b" },
	{ LISTENER_OPERATOR, HTTP_PUT, "/v1/operator/models/a/b/c-1:x", 6, "PUT, OPTIONS", "a", "b/c-1:x" },
	{ LISTENER_OPERATOR, HTTP_PUT, "/v1/operator/models/a/", -1, "", "", "" },
	{ LISTENER_OPERATOR, HTTP_PUT, "/v1/operator/models/a", -1, "", "", "" },
};

static void test_find(void **state)
{
	size_t i;

	(void)state;
	for (i = 0; i < sizeof(looks) / sizeof(looks[0]); i++) {
		const struct look *l = &looks[i];
		struct buf allow = BUF_INIT(256);
		struct route_match m;

		route_find(table, COUNT, l->listener, l->method, l->path, &m);
		if (m.route != (l->index < 0 ? NULL : &table[l->index]))
			fail_msg("%s", l->path);
		assert_true(route_allow(m.allowed, &allow));
		assert_string_equal(buf_cstr(&allow), l->allow);
		buf_free(&allow);
		if (m.route && *l->first)
			assert_string_equal(m.params.value[0], l->first);
		if (m.route && *l->second)
			assert_string_equal(m.params.value[1], l->second);
	}
}

static void test_other_listener(void **state)
{
	struct route_match m;

	(void)state;
	route_find(table, COUNT, LISTENER_OPERATOR, HTTP_GET, "/v1/runs", &m);
	assert_true(m.other_listener);
	route_find(table, COUNT, LISTENER_OPERATOR, HTTP_GET, "/v1/nothing", &m);
	assert_false(m.other_listener);
}

static void test_long_part(void **state)
{
	char path[600] = "/v1/runs/";
	struct route_match m;

	(void)state;
	memset(path + 9, 'x', ROUTE_PARAM_SIZE - 1);
	route_find(table, COUNT, LISTENER_MEMBER, HTTP_GET, path, &m);
	assert_ptr_equal(m.route, &table[3]);
	assert_int_equal(strlen(m.params.value[0]), ROUTE_PARAM_SIZE - 1);
	path[9 + ROUTE_PARAM_SIZE - 1] = 'x';
	route_find(table, COUNT, LISTENER_MEMBER, HTTP_GET, path, &m);
	assert_null(m.route);
}

static void test_query(void **state)
{
	(void)state;
	assert_true(route_knows_query(&table[1], "limit"));
	assert_true(route_knows_query(&table[1], "cursor"));
	assert_true(route_knows_query(&table[1], "metadata.team"));
	assert_false(route_knows_query(&table[1], "metadata."));
	assert_false(route_knows_query(&table[1], "metadata"));
	assert_false(route_knows_query(&table[1], "limi"));
	assert_false(route_knows_query(&table[1], "limits"));
	assert_false(route_knows_query(&table[1], "limit cursor"));
	assert_false(route_knows_query(&table[1], ""));
	assert_false(route_knows_query(&table[2], "limit"));
	assert_false(route_knows_query(&table[2], ""));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_find),
		cmocka_unit_test(test_other_listener),
		cmocka_unit_test(test_long_part),
		cmocka_unit_test(test_query),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
