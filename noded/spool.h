/*
 * The spool of one run: every event its host wrote, in order, hashed, with the run's meter beside it. One file (or memfd) a run,
 * allocated to its bound when it is made, so that a full disk can only stop a run from starting.
 *
 * Writers: keeper makes the file (spool_format); the broker appends; after a broker's death keeper goes on with the chain. Only
 * one of them writes at a time. Reader: link, by a read-only descriptor, up to the seq that the broker named. The format's own
 * fields are ours; `bytes` of a record are opaque here. Nothing blocks but on the disk; nothing is fsynced: a host that loses power
 * is a lost node, and is charged what controld has.
 *
 * File, little endian:
 *   head, SPOOL_HEAD_BYTES: magic, version, struct spool_head, zeros
 *   two meter slots of SPOOL_SLOT_BYTES: u64 generation, i64 spent, i64 held, i64 compute_ms, 8 bytes check; the valid one with the
 * higher generation counts. A hold is written here before the first byte of its request leaves. records: u32 len, u16 type, u64
 * seq, i64 t_ms, i64 spent, i64 held, hash[32], 8 bytes check of these, bytes[len]; len 0 = end
 */
#ifndef NODED_SPOOL_H
#define NODED_SPOOL_H

#include "proto/assignment.h"
#include "proto/event.h"

#include <stdbool.h>
#include <stdint.h>

#define SPOOL_VERSION 3
#define SPOOL_HEAD_BYTES 512
#define SPOOL_SLOT_BYTES 40
#define SPOOL_RECORD_HEAD 78
/* Room for all that a run may write, and for ends that must always fit. */
#define SPOOL_RESERVE_BYTES (512 * 1024)
#define SPOOL_BYTES                                                                                                                \
	((int64_t)SPOOL_HEAD_BYTES + 2 * SPOOL_SLOT_BYTES + EVENT_RUN_BYTES_MAX +                                                  \
			(int64_t)EVENT_RUN_COUNT_MAX * SPOOL_RECORD_HEAD + SPOOL_RESERVE_BYTES)

/* What whoever goes on with a run after its broker must know. */
struct spool_head {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	uint32_t attempt;
	int64_t queued_at_ms;     /* Unix ms */
	int64_t age_ms;           /* of the run when the assignment was made */
	int64_t received_boot_ns; /* CLOCK_BOOTTIME of its arrival; t = age_ms + time since (same boot only) */
	uint64_t first_seq;
	uint8_t prev_hash[EVENT_HASH_LEN]; /* of seq first_seq - 1 */
	int64_t cap_micros;
	int64_t run_fee;
	int64_t compute_price; /* micros per million milliseconds */
	uint8_t request_hash[SHA256_LEN];
};

/* Where the chain stands. */
struct spool_tail {
	uint64_t next_seq;
	uint8_t hash[EVENT_HASH_LEN]; /* of seq next_seq - 1 */
	int64_t t_ms;                 /* of that event; 0 when none was written here */
	int64_t spent, held;          /* newest meter, with or without an event; spent + held is the charge if the broker died */
	int64_t compute_ms;           /* what of the two is compute, as time: see spool_compute */
	uint64_t bytes;               /* of events in this spool */
	uint16_t last_type;           /* enum event_type of the last record; EV_COUNT when there is none */
};

struct spool_record {
	uint16_t type; /* enum event_type */
	uint64_t seq;
	int64_t t_ms, spent, held;
	uint8_t hash[EVENT_HASH_LEN];
	const uint8_t *bytes; /* view, valid until the next call on this spool */
	uint32_t len;
};

struct spool;

/* Allocates the file behind fd to SPOOL_BYTES and writes the head. The descriptor stays the caller's. */
int spool_format(int fd, const struct spool_head *head, struct err *e) EPH_MUST_CHECK;
/* Takes fd over (closed by spool_close, also when opening fails). Reads the head, walks the records and checks the chain. A torn or
 * damaged tail ends the walk; with `writable` it is cut off, so that the next append stands there. */
int spool_open(int fd, bool writable, struct spool **out, struct err *e) EPH_MUST_CHECK;
void spool_close(struct spool *s);

const struct spool_head *spool_head(const struct spool *s);
int spool_descriptor(const struct spool *s); /* the spool's own; for handing it on */
void spool_tail(const struct spool *s, struct spool_tail *out);

/* Makes the event (seq = next_seq; t_ms is raised to the last one's), chains and writes it with one pwrite. -1: ERR_LIMIT when the
 * event or the file is full, ERR_IO. On -1 nothing was written. `bytes_written` (may be NULL) is the event's length. */
int spool_append(struct spool *s, enum event_source source, enum event_type type, int64_t t_ms, const void *data, size_t data_len,
		int64_t spent, int64_t held, size_t *bytes_written, struct err *e) EPH_MUST_CHECK;
/* How much compute the meter pays for that is written next (spent and held together), so that whoever goes on with the run can book
 * it as what it is. Kept until it is set anew. */
void spool_compute(struct spool *s, int64_t compute_ms);
/* The meter alone, when no event is due. */
int spool_meter(struct spool *s, int64_t spent, int64_t held, struct err *e) EPH_MUST_CHECK;

/* Reader: walks on over what was written since (checking the chain), so that spool_tail is up to date. */
int spool_refresh(struct spool *s, struct err *e) EPH_MUST_CHECK;
/* The record with this seq: 1 found, 0 not there (yet), -1 error. Reading in order is cheap. */
int spool_read(struct spool *s, uint64_t seq, struct spool_record *out, struct err *e) EPH_MUST_CHECK;

#endif
