/* Counts answers by class of route and of status, for metrics. On the loop. */
#include "api_internal.h"

#include <string.h>

const char *const api_class_names[API_CLASSES] = { "create", "run", "runs", "events", "account", "operator", "health", "none" };

static enum api_class class_of(const struct route *route)
{
	const char *p = route->pattern;

	if (route->need == NEED_OPERATOR)
		return API_CLASS_OPERATOR;
	if (strcmp(p, "/v1/runs") == 0)
		return route->method == HTTP_POST ? API_CLASS_CREATE : API_CLASS_RUNS;
	if (strcmp(p, "/v1/runs/{id}/events") == 0)
		return API_CLASS_EVENTS;
	if (strncmp(p, "/v1/runs/", 9) == 0)
		return API_CLASS_RUN;
	return strncmp(p, "/v1/", 4) == 0 ? API_CLASS_ACCOUNT : API_CLASS_HEALTH;
}

void api_count(struct api *a, const struct route *route, int status)
{
	const int code = status / 100 - 2;

	if (code >= 0 && code < API_CODES)
		a->answered[route ? class_of(route) : API_CLASS_NONE][code]++;
}

void api_figures(const struct api *a, struct api_figures *out)
{
	*out = (struct api_figures){
		.under_way = a->request_count,
		.streams = a->stream_count,
		.streams_max = a->stream_max,
		.connections = (uint64_t)(httpd_connections(a->member) + httpd_connections(a->operator_)),
		.body_bytes = httpd_bytes_held(a->member) + httpd_bytes_held(a->operator_),
	};
	memcpy(out->requests, a->answered, sizeof(out->requests));
}
