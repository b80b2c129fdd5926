/*
 * Events of a run's timeline: the table of types (who may write each), the exact bytes, the hash chain.
 *
 * An event is one JSON object, keys in this order, compact:
 *   {"run_id":"run_..","seq":1,"at":"2026-11-30T12:00:00.123Z","t":0.000,"source":"host","type":"microvm.ready","data":{..}}
 * `t` is seconds since the run was created, three decimals; at = queued_at + t. The bytes are made once, by the writer, and stored
 * and served unchanged. hash(n) = SHA-256(hash(n-1) || bytes(n)), hash(0) = 32 zero bytes.
 *
 * One writer at a time: control until the claim, then the holder of the claim token, control again after `finish` or fencing.
 */
#ifndef PROTO_EVENT_H
#define PROTO_EVENT_H

#include "common/buf.h"
#include "common/error.h"
#include "common/ids.h"

#include <stdbool.h>
#include <stdint.h>

#define EVENT_HASH_LEN 32
#define EVENT_BYTES_MAX (100 * 1024) /* one event: EVENT_TEXT_MAX, every byte escaped as \u00NN, and its envelope */
#define EVENT_RUN_COUNT_MAX 20000    /* events of a run; control's own always pass */
#define EVENT_RUN_BYTES_MAX (16 * 1024 * 1024)
#define EVENT_RATE_PER_SECOND 200
#define EVENT_TEXT_MAX (16 * 1024) /* text of one shell.output */

enum event_source { EVENT_CONTROL = 1, EVENT_HOST = 2, EVENT_GUEST = 4 };

/* name, text, sources that may write it, data (documentation; `?` = may be absent) */
#define EVENT_TABLE(X)                                                                                                             \
	X(RUN_QUEUED, "run.queued", EVENT_CONTROL, "reserved_micros, model, isolation?")                                           \
	X(RUN_CLAIMED, "run.claimed", EVENT_CONTROL, "node, attempt")                                                              \
	X(RUN_REQUEUED, "run.requeued", EVENT_CONTROL, "node, attempt, reason")                                                    \
	X(RUN_CANCEL_REQUESTED, "run.cancel_requested", EVENT_CONTROL, "")                                                         \
	X(MICROVM_READY, "microvm.ready", EVENT_HOST, "boot_ms, vmm, isolation, kernel, jail")                                     \
	X(WORKER_STARTED, "worker.started", EVENT_HOST, "shell, web, connections, start_mode, image, workdir, boot_id")            \
	X(MODEL_CALL, "model.call", EVENT_HOST,                                                                                    \
			"call, attempts, model, input_tokens, cached_input_tokens, output_tokens, cost_micros, finish, "           \
			"duration_ms, note?")                                                                                      \
	X(SHELL_STARTED, "shell.started", EVENT_GUEST, "call_id, command")                                                         \
	X(SHELL_OUTPUT, "shell.output", EVENT_GUEST, "call_id, stream, text | base64")                                             \
	X(SHELL_EXITED, "shell.exited", EVENT_GUEST, "call_id, exit_code | signal, duration_ms, cut_bytes, timed_out?")            \
	X(TOOL_CALLED, "tool.called", EVENT_GUEST, "call_id, tool, path?, bytes?, error?")                                         \
	X(WORKER_NOTE, "worker.note", EVENT_GUEST, "text")                                                                         \
	X(CONNECTION_CALL, "connection.call", EVENT_HOST, "call_id, connection, method, path, status, bytes, duration_ms")         \
	X(WEB_REQUEST, "web.request", EVENT_HOST, "call_id, method, host, status, bytes, duration_ms")                             \
	X(DENIED, "denied", EVENT_HOST, "rule, what")                                                                              \
	X(EVENTS_TRUNCATED, "events.truncated", EVENT_HOST, "dropped_events, dropped_bytes")                                       \
	X(MICROVM_DESTROYED, "microvm.destroyed", EVENT_HOST, "reason, lifetime_ms, gone_ms")                                      \
	X(RUN_SUCCEEDED, "run.succeeded", EVENT_CONTROL, "usage")                                                                  \
	X(RUN_FAILED, "run.failed", EVENT_CONTROL, "error, usage")                                                                 \
	X(RUN_CANCELLED, "run.cancelled", EVENT_CONTROL, "error, usage")                                                           \
	X(RUN_TIMED_OUT, "run.timed_out", EVENT_CONTROL, "error, usage")                                                           \
	X(RUN_INTERRUPTED, "run.interrupted", EVENT_CONTROL, "error, usage")                                                       \
	X(RUN_SETTLED, "run.settled", EVENT_CONTROL, "charged_micros, released_micros, parts")

enum event_type {
#define X(name, text, sources, data) EV_##name,
	EVENT_TABLE(X)
#undef X
			EV_COUNT
};

const char *event_type_text(enum event_type t);
enum event_type event_type_parse(const char *text); /* EV_COUNT when unknown */
bool event_type_allows(enum event_type t, enum event_source s);
const char *event_source_text(enum event_source s);

struct event_head {
	const char *run_id;
	uint64_t seq;
	int64_t queued_at_ms; /* Unix ms, the run's created_at */
	int64_t t_ms;         /* since queued_at */
	enum event_source source;
	enum event_type type;
};

/* Appends the event's bytes; `data` is a whole JSON object that we made. False when it does not fit EVENT_BYTES_MAX. */
bool event_make(struct buf *out, const struct event_head *head, const void *data, size_t data_len);
/* next = SHA-256(prev || bytes) */
void event_hash(const uint8_t prev[EVENT_HASH_LEN], const void *bytes, size_t n, uint8_t next[EVENT_HASH_LEN]);

/* What controld checks of an event from a node (hostile): whole JSON, key order, run_id, seq, source not control, type allowed
 * for it. Fills type and t_ms. */
int event_check(const void *bytes, size_t n, const char *run_id, uint64_t seq, enum event_type *type, int64_t *t_ms,
		struct err *e) EPH_MUST_CHECK;

#endif
