/* The route table: everything that this service answers, in one place. */
#include "api_internal.h"

#define SMALL_BODY (64 * 1024)
#define IMAGE_BODY_MAX (4 * 1024 * 1024) /* a piece of an image: sixteen chunks */
#define NO_BODY 1                        /* CONTENT_NONE refuses any byte; the column must still be set */

/* clang-format off */
const struct route api_routes[] = {
	/*    method       path                                        listener           needs          body          content                query                                   handler */
	ROUTE(HTTP_GET,    "/healthz",                                 LISTENER_BOTH,     NEED_NONE,     NO_BODY,      CONTENT_NONE,          "",                                     health_live),
	ROUTE(HTTP_GET,    "/readyz",                                  LISTENER_BOTH,     NEED_NONE,     NO_BODY,      CONTENT_NONE,          "",                                     health_ready),
	ROUTE(HTTP_GET,    "/problems/{name}",                         LISTENER_BOTH,     NEED_NONE,     NO_BODY,      CONTENT_NONE,          "",                                     problems_page),

	ROUTE(HTTP_POST,   "/v1/runs",                                 LISTENER_MEMBER,   NEED_MEMBER,   RUN_BODY_MAX, CONTENT_JSON,          "",                                     runs_create),
	ROUTE(HTTP_GET,    "/v1/runs",                                 LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "limit cursor status workflow metadata.*", runs_list),
	ROUTE(HTTP_GET,    "/v1/runs/{id}",                            LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "",                                     runs_get),
	ROUTE(HTTP_POST,   "/v1/runs/{id}/cancel",                     LISTENER_MEMBER,   NEED_MEMBER,   SMALL_BODY,   CONTENT_JSON_OR_EMPTY, "",                                     runs_cancel),
	ROUTE(HTTP_GET,    "/v1/runs/{id}/wait",                       LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "timeout_seconds",                      runs_wait),
	ROUTE(HTTP_GET,    "/v1/runs/{id}/events",                     LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "after cursor limit",                   runs_events),
	ROUTE(HTTP_GET,    "/v1/runs/{id}/receipt",                    LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "",                                     runs_receipt),
	ROUTE(HTTP_GET,    "/v1/me",                                   LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "",                                     me_get),
	ROUTE(HTTP_GET,    "/v1/models",                               LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "",                                     models_list),
	ROUTE(HTTP_GET,    "/v1/keys",                                 LISTENER_MEMBER,   NEED_ADMIN,    NO_BODY,      CONTENT_NONE,          "limit cursor",                         keys_list),
	ROUTE(HTTP_POST,   "/v1/keys",                                 LISTENER_MEMBER,   NEED_ADMIN,    SMALL_BODY,   CONTENT_JSON,          "",                                     keys_create),
	ROUTE(HTTP_DELETE, "/v1/keys/{id}",                            LISTENER_MEMBER,   NEED_ADMIN,    NO_BODY,      CONTENT_NONE,          "",                                     keys_revoke),
	ROUTE(HTTP_GET,    "/v1/members",                              LISTENER_MEMBER,   NEED_VIEWER,   NO_BODY,      CONTENT_NONE,          "limit cursor",                         members_list),
	ROUTE(HTTP_POST,   "/v1/members",                              LISTENER_MEMBER,   NEED_ADMIN,    SMALL_BODY,   CONTENT_JSON,          "",                                     members_create),
	ROUTE(HTTP_PATCH,  "/v1/members/{id}",                         LISTENER_MEMBER,   NEED_ADMIN,    SMALL_BODY,   CONTENT_JSON,          "",                                     members_update),
	ROUTE(HTTP_DELETE, "/v1/members/{id}",                         LISTENER_MEMBER,   NEED_ADMIN,    NO_BODY,      CONTENT_NONE,          "",                                     members_remove),

	ROUTE(HTTP_POST,   "/v1/operator/orgs",                        LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON,          "",                                     operator_org_create),
	ROUTE(HTTP_GET,    "/v1/operator/orgs",                        LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "limit cursor",                         operator_org_list),
	ROUTE(HTTP_GET,    "/v1/operator/orgs/{id}",                   LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "",                                     operator_org_get),
	ROUTE(HTTP_PATCH,  "/v1/operator/orgs/{id}",                   LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON,          "",                                     operator_org_update),
	ROUTE(HTTP_POST,   "/v1/operator/orgs/{id}/credit",            LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON,          "",                                     operator_credit),
	ROUTE(HTTP_POST,   "/v1/operator/orgs/{id}/keys",              LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON,          "",                                     operator_key_create),
	ROUTE(HTTP_GET,    "/v1/operator/orgs/{id}/keys",              LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "limit cursor",                         operator_key_list),
	ROUTE(HTTP_DELETE, "/v1/operator/orgs/{id}/keys/{key}",        LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "",                                     operator_key_revoke),
	ROUTE(HTTP_POST,   "/v1/operator/orgs/{id}/members",           LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON,          "",                                     operator_member_create),
	ROUTE(HTTP_GET,    "/v1/operator/orgs/{id}/members",           LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "limit cursor",                         operator_member_list),
	ROUTE(HTTP_PUT,    "/v1/operator/providers/{name}",            LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON,          "",                                     operator_provider_put),
	ROUTE(HTTP_GET,    "/v1/operator/providers",                   LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "",                                     operator_provider_list),
	ROUTE(HTTP_PUT,    "/v1/operator/models/{provider}/{model...}", LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,  CONTENT_JSON_OR_EMPTY, "",                                     operator_model_put),
	ROUTE(HTTP_GET,    "/v1/operator/models",                      LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "",                                     operator_model_list),
	ROUTE(HTTP_PUT,    "/v1/operator/prices",                      LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON,          "",                                     operator_price_common_put),
	ROUTE(HTTP_PUT,    "/v1/operator/prices/{provider}/{model...}", LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,  CONTENT_JSON,          "",                                     operator_price_put),
	ROUTE(HTTP_POST,   "/v1/operator/node-tokens",                 LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON_OR_EMPTY, "",                                     operator_token_create),
	ROUTE(HTTP_GET,    "/v1/operator/http_sd",                     LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "",                                     operator_http_sd),
	ROUTE(HTTP_GET,    "/v1/operator/nodes",                       LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "limit cursor",                         operator_node_list),
	ROUTE(HTTP_POST,   "/v1/operator/nodes/{id}/drain",            LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON_OR_EMPTY, "",                                     operator_node_drain),
	ROUTE(HTTP_POST,   "/v1/operator/nodes/{id}/undrain",          LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON_OR_EMPTY, "",                                     operator_node_undrain),
	ROUTE(HTTP_POST,   "/v1/operator/nodes/{id}/revoke",           LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,   CONTENT_JSON_OR_EMPTY, "",                                     operator_node_revoke),
	ROUTE(HTTP_DELETE, "/v1/operator/nodes/{id}",                  LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,      CONTENT_NONE,          "",                                     operator_node_remove),
	ROUTE(HTTP_POST,  "/v1/operator/images",                       LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,    CONTENT_JSON,          "",                                      operator_image_begin),
	ROUTE(HTTP_GET,   "/v1/operator/images",                       LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,       CONTENT_NONE,          "",                                      operator_image_list),
	ROUTE(HTTP_POST,  "/v1/operator/images/rollback",              LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,    CONTENT_JSON_OR_EMPTY, "",                                      operator_image_rollback),
	ROUTE(HTTP_GET,   "/v1/operator/images/{hash}",                LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,       CONTENT_NONE,          "",                                      operator_image_get),
	ROUTE(HTTP_DELETE,"/v1/operator/images/{hash}",                LISTENER_OPERATOR, NEED_OPERATOR, NO_BODY,       CONTENT_NONE,          "",                                      operator_image_remove),
	ROUTE(HTTP_PUT,   "/v1/operator/images/{hash}/{file}",         LISTENER_OPERATOR, NEED_OPERATOR, IMAGE_BODY_MAX,CONTENT_BYTES,         "offset",                                operator_image_put),
	ROUTE(HTTP_POST,  "/v1/operator/images/{hash}/complete",       LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,    CONTENT_JSON_OR_EMPTY, "",                                      operator_image_complete),
	ROUTE(HTTP_POST,  "/v1/operator/images/{hash}/use",            LISTENER_OPERATOR, NEED_OPERATOR, SMALL_BODY,    CONTENT_JSON_OR_EMPTY, "",                                      operator_image_use),
};
/* clang-format on */
const size_t api_route_count = sizeof(api_routes) / sizeof(api_routes[0]);
