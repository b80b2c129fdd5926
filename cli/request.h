/*
 * The body of POST /v1/runs from the command line: the fields of --request, overridden by the other options. Reads the files it
 * names; sends nothing. Used by cmd_run.c.
 */
#ifndef CLI_REQUEST_H
#define CLI_REQUEST_H

#include "args.h"
#include "common/buf.h"
#include "common/error.h"
#include "common/json.h"

#define REQUEST_BODY_MAX ((size_t)12 * 1024 * 1024) /* the service's own bound */

/* What the run may do, as far as the request says it: for the line at the start. */
struct request_permissions {
	bool shell, web;
};

int request_build(const struct args *a, struct buf *body, struct request_permissions *p, struct err *e) EPH_MUST_CHECK;

#endif
