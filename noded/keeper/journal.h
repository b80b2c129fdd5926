/*
 * The journal: what must be known of a VM after this process died, one file a VM, state_dir/journal/<vm>. Written whole (temporary
 * file, fsync, rename) before the thing it speaks of exists. Never a prompt, never a secret of a run (ctl_nonce is this host's
 * own).
 *
 * Format, little endian: magic "EPHJ", u16 version, fields as coded below, 16 bytes BLAKE2b over all before it. Version 1, without
 * kind, start mode, nonce and VMM, is still read: its VM was a run that booted cold and that nobody can adopt.
 */
#ifndef NODED_KEEPER_JOURNAL_H
#define NODED_KEEPER_JOURNAL_H

#include "common/buf.h"
#include "common/error.h"
#include "common/ids.h"
#include "keeper/slots.h"
#include "proto/assignment.h"

#include <stdbool.h>
#include <stdint.h>

#define JOURNAL_VERSION 2
#define JOURNAL_NONCE 16
#define JOURNAL_MAX 8192
#define BOOT_ID_MAX 40

enum journal_state {
	JOURNAL_ADMITTED = 1, /* nothing was said to controld but that we have it */
	JOURNAL_ASKED,        /* START was asked for: from here on controld may hold the run for running */
	JOURNAL_GONE,         /* nothing of the VM is left; the end is to be reported */
};

enum journal_kind {
	JOURNAL_RUN = 1,
	JOURNAL_WARM,   /* booted ahead of any run: no run id, token, spool; becomes a RUN before its broker hears of one */
	JOURNAL_GOLDEN, /* its snapshot is being made: no run ever */
};

enum journal_start { JOURNAL_COLD = 1, JOURNAL_CLONE, JOURNAL_FROM_WARM };

struct journal_process {
	int32_t pid;         /* 0 = not started */
	uint64_t start_time; /* clock ticks since boot, /proc/PID/stat */
};

struct journal {
	char vm[ID_MAX], run_id[ID_MAX]; /* run_id "" unless kind is RUN */
	enum journal_kind kind;
	enum journal_start start_mode;
	uint8_t ctl_nonce[JOURNAL_NONCE]; /* who knows it may adopt the broker; zeros = nobody */
	char vmm[65];                     /* name and version, "qemu 7.2.22" */
	uint8_t token[TOKEN_LEN];
	uint32_t attempt;
	enum journal_state state;
	uint32_t slot;
	uint32_t memory_mib, vcpus; /* as reserved */
	int64_t admitted_real_ms;
	uint64_t first_seq;
	uint8_t image_hash[SHA256_LEN];
	bool spool_is_memfd;       /* it died with us */
	char boot_id[BOOT_ID_MAX]; /* of the host: pids of another boot mean nothing */
	struct journal_process process[SLOT_ROLES];
	char cgroup[SLOT_ROLES][96]; /* group names; "" = none */
};

void journal_encode(const struct journal *j, struct buf *out);
int journal_decode(const void *p, size_t n, struct journal *out, struct err *e) EPH_MUST_CHECK;

int journal_store(const char *dir, const struct journal *j, struct err *e) EPH_MUST_CHECK;
int journal_remove(const char *dir, const char *vm, struct err *e) EPH_MUST_CHECK;
/* Calls back for each entry, and removes what an earlier process had begun to write. A file that cannot be read or decoded is
 * logged and set aside as <name>.bad. */
int journal_each(const char *dir, void (*fn)(void *arg, const struct journal *j), void *arg, struct err *e) EPH_MUST_CHECK;

/* Boot id of this host. */
int journal_boot_id(char out[BOOT_ID_MAX], struct err *e) EPH_MUST_CHECK;
/* Start time of a live process; 0 when there is none (a zombie counts as none). */
uint64_t journal_start_time(int32_t pid);
/* Pure: start time and state from the text of /proc/PID/stat. */
bool journal_parse_stat(const char *text, uint64_t *start_time, char *state);

#endif
