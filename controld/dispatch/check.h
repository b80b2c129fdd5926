/*
 * What a node says is hostile until it was looked at: these functions judge decoded messages before the store sees them. Pure;
 * called by requests.c, by tests and by the fuzz target.
 */
#ifndef CONTROLD_DISPATCH_CHECK_H
#define CONTROLD_DISPATCH_CHECK_H

#include "common/error.h"
#include "proto/link.h"

/* Every record of the batch: whole JSON of this run with the next seq, a type that its source may write, the type that the envelope
 * says. *last_t_ms is the greatest t (0 when there is no record). */
int check_events(const struct link_events *ev, int64_t *last_t_ms, struct err *e) EPH_MUST_CHECK;
/* Codes that a node may report, numbers that make sense, output made clean UTF-8 (bytes that are not become U+FFFD; more than
 * GUEST_RESULT_MAX bytes then is one byte over, which the store calls output_too_large). */
int check_finish(struct link_finish *f, struct err *e) EPH_MUST_CHECK;
int check_refuse(const struct link_refuse *r, struct err *e) EPH_MUST_CHECK;
int check_next(const struct link_next *n, struct err *e) EPH_MUST_CHECK;
int check_blob(const struct link_blob *b, struct err *e) EPH_MUST_CHECK;
int check_image(const struct link_image *m, struct err *e) EPH_MUST_CHECK;
/* "run_" + 32 hex. */
int check_run_id(const char *run_id, struct err *e) EPH_MUST_CHECK;

#endif
