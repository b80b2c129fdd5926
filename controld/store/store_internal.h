/*
 * What the files of store/ share: the struct, parameter lists, calls under way, and the parts' own entry points. Nothing outside of
 * this folder includes it.
 */
#ifndef CONTROLD_STORE_INTERNAL_H
#define CONTROLD_STORE_INTERNAL_H

#include "common/buf.h"
#include "common/pgev.h"
#include "common/text.h"
#include "proto/event.h"
#include "store/figures.h"
#include "store/store.h"

#include <stddef.h>

struct event_base;
struct hub;
struct creates;
struct batches;
struct settler;
struct catalog;
struct figures;
struct page_read;

#define STORE_BINARY 1     /* grows when a contracting migration must not meet this binary: compared with min_binary */
#define STORE_LOCK_MS 2000 /* a lock that is not had by then: ERR_CONFLICT */
#define STORE_SWEEP_ROWS 500

struct store {
	struct event_base *base;
	struct store_options opt;
	char *conninfo;
	char instance[17]; /* this process, in hints and in `binaries` */
	struct pgev *events, *money, *reads, *listen;
	struct store_hooks hooks;
	struct hub *hub;
	struct creates *creates;
	struct batches *batches;
	struct settler *settler;
	struct catalog *catalog;
	struct figures *figures;
	struct page_read *page_reads; /* outstanding pages of events, to be shared */
	struct health_reader *health; /* who waits for the statement that is under way; NULL = none is */
};

/* ---- parameters ----------------------------------------------------------------------------------------------------------- */

#define PARAMS_MAX 24

/* Parameters of one statement, in order. Texts and bytes are views until the statement was queued; numbers are kept here. */
struct params {
	struct pg_param p[PARAMS_MAX];
	char number[PARAMS_MAX][24];
	int n;
};

void params_text(struct params *p, const char *s); /* NULL: SQL NULL */
void params_i64(struct params *p, int64_t v);
void params_i64_or_null(struct params *p, int64_t v, int64_t null_value);
void params_bool(struct params *p, bool v);
void params_bool_or_null(struct params *p, int v);                /* -1: NULL */
void params_bytes(struct params *p, const void *bytes, size_t n); /* NULL bytes: SQL NULL */

/* Array literals, written element by element: array_begin, array_*..., array_end. Texts must be ids or type names: nothing in them
 * is quoted, and one with a character that would need it makes the buffer fail. */
void array_begin(struct buf *b);
void array_text(struct buf *b, const char *s);
void array_i64(struct buf *b, int64_t v);
void array_end(struct buf *b);

/* Reads {1,2,3} into out; false unless there are exactly n numbers. */
bool array_read_i64(const char *s, int64_t *out, size_t n) EPH_MUST_CHECK;

/* ---- calls ----------------------------------------------------------------------------------------------------------------- */

/* One statement under way for a caller. Freed by whoever handles its answer. */
struct call {
	struct store *s;
	void *arg;
	union {
		store_done_cb done;
		store_auth_cb auth;
		store_me_cb me;
		store_keys_cb keys;
		store_members_cb members;
		store_orgs_cb orgs;
		store_credit_cb credit;
		store_providers_cb providers;
		store_models_cb models;
		store_runs_cb runs;
		store_create_cb create;
		store_cancel_cb cancel;
		store_receipt_cb receipt;
		store_enrol_cb enrol;
		store_nodes_cb nodes;
		store_images_cb images;
		store_next_cb next;
		store_fence_cb fence;
		store_blob_cb blob;
		store_setting_cb setting;
		store_health_cb health;
		store_swept_cb swept;
	} cb;
	char id[ID_MAX]; /* what the call makes or is about */
	char text[STORE_NAME_MAX];
	int limit; /* of a list */
	int kind;
};

struct call *call_new(struct store *s, void *arg, struct err *e); /* NULL: no memory, e is set */
/* Queues the statement for `c`; on failure frees `c`. cb gets `c` as its argument. */
int call_exec(struct call *c, struct pgev *pg, const struct pg_stmt *st, const struct params *p, pg_cb cb,
		struct err *e) EPH_MUST_CHECK;
/* Logs what is our own mistake. Returns e. */
const struct err *call_error(const struct err *e);
/* Answers rows of (result, detail) where the result is one of done, not_found, conflict, limit; `id` is c->id when done. */
void call_done_rows(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e);

/* Copies a column into a bounded text; what does not fit (our own tables are bounded) is left empty. */
void col_text(const struct pg_rows *r, int row, int col, char *out, size_t size);
/* Exactly n bytes; zeroes when the column has another length or is NULL. True when it had them. */
bool col_bytes(const struct pg_rows *r, int row, int col, uint8_t *out, size_t n);

/* ---- between the parts --------------------------------------------------------------------------------------------------------
 */

/* hub.c: hints. They are collected and go out once a turn to subscribers here and every 5 ms to other controlds. */
int hub_new(struct store *s, struct hub **out, struct err *e) EPH_MUST_CHECK;
void hub_free(struct hub *h);
void hub_on_listen_connect(void *arg, struct pgev *pg);
void hub_on_notify(void *arg, const char *channel, const char *payload);
void hub_run_changed(struct store *s, const char *run_id);
void hub_node_changed(struct store *s, const char *node_id);
void hub_queued(struct store *s, uint32_t memory_mib, uint32_t vcpus, bool emulated, uint32_t count);

/* run_create.c */
int creates_new(struct store *s, struct creates **out, struct err *e) EPH_MUST_CHECK;
void creates_free(
		struct creates *c); /* what waits is answered ERR_UNAVAILABLE; what was sent was answered by its connection's end */

/* run_judge.c: columns from `at` on: result, run_id, created_at_ms, needed, available, lim */
void create_result_read(const struct pg_rows *rows, int row, int at, struct store_create *out);

/* run_events.c */
int batches_new(struct store *s, struct batches **out, struct err *e) EPH_MUST_CHECK;
void batches_free(struct batches *b);

/* run_node.c: what the SQL functions answer; FENCE_UNKNOWN for anything else */
enum fence fence_parse(const char *s);

/* settle.c */
int settler_new(struct store *s, struct settler **out, struct err *e) EPH_MUST_CHECK;
void settler_free(struct settler *t);
void settle_soon(struct store *s, const char *run_id);
int settle_sweep(struct store *s, struct call *c, struct err *e) EPH_MUST_CHECK; /* takes c */

/* model.c */
int catalog_new(struct store *s, struct catalog **out, struct err *e) EPH_MUST_CHECK;
void catalog_free(struct catalog *c);

/* figures.c: what metrics count */
int figures_new(struct store *s, struct figures **out, struct err *e) EPH_MUST_CHECK;
void figures_free(struct figures *g); /* NULL allowed */
void figures_created(struct store *s, const struct store_create *c, const struct err *e);
void figures_claimed(struct store *s, const struct assignment *a);
void figures_requeued(struct store *s, enum figures_requeue why);
void figures_lost(struct store *s);
void figures_event(struct store *s, const char *run_id, int64_t seq, enum event_type type, const uint8_t *bytes, size_t n);
void figures_settled(struct store *s, const char *run_id);

/* chunk.c: stores one file's content, once. cb as a store_done_cb. */
int chunk_put(struct store *s, const char *org_id, const struct store_file *f, store_done_cb cb, void *arg,
		struct err *e) EPH_MUST_CHECK;
/* A row of total and bytes, to the call's blob callback; no row, or no bytes of a file that has some: not found. */
void chunk_on_blob(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e);

/* run_read.c: lines of "size sha256 path" as the queries give files. Paths are views that end at a newline or the end. -1:
 * malformed. */
int files_read(const char *text, struct store_file *out, size_t max);

#endif
