/*
 * Our own system call filters: for each kind of process a list of what it may ask of the kernel, everything else ends it. The list
 * is a table (seccomp_table.c), each row with its reason; from it a classic BPF program is made, which the jail stage installs
 * last.
 *
 * Pure; keeper builds the program and puts it into a job. The filter is there before the exec that ends the jail stage, so one exec
 * has to be allowed: of the descriptor whose number is the process' own limit of descriptors, which nobody can ever have again.
 *
 * Arguments are compared by their low 32 bits. That is enough for all that are compared: the kernel takes no more of them (int,
 * unsigned int), or knows no bit above (flags of mmap, mprotect and clone, which are only ever allowed when bits are absent or are
 * exactly these).
 */
#ifndef NODED_JAIL_SECCOMP_H
#define NODED_JAIL_SECCOMP_H

#include "jail/job.h"

#include <stddef.h>

enum seccomp_who {
	SECCOMP_LINK = 1,
	SECCOMP_BROKER = 2,
	SECCOMP_CHANNEL = 4,
	SECCOMP_QEMU_TCG = 8, /* translates the guest's code, so it writes what it executes */
	SECCOMP_QEMU_KVM = 16,
};

/* Why a call is on a list. */
enum seccomp_reason {
	SECCOMP_EXEC,    /* the one exec at the end of the jail stage */
	SECCOMP_LOAD,    /* dynamic linker and start of the C library */
	SECCOMP_MEMORY,  /* allocation; never writable and executable at once, but for translated code */
	SECCOMP_THREADS, /* threads of this process; never another process */
	SECCOMP_WAIT,    /* event loop, timers, clocks */
	SECCOMP_BYTES,   /* reading and writing what is open */
	SECCOMP_FILES,   /* opening and looking at files of the tree */
	SECCOMP_STORE,   /* the spool, images: files that are inherited and written to */
	SECCOMP_NET,     /* TCP and look-ups of names */
	SECCOMP_LISTEN,  /* taking a connection on an inherited socket */
	SECCOMP_SERVE,   /* link's own metrics port */
	SECCOMP_GUEST,   /* what a VMM does for its guest */
	SECCOMP_SELF,    /* who am I, dropping more rights, names of threads */
	SECCOMP_DEATH,   /* exit, abort, handlers */
	SECCOMP_SANITIZER,
	SECCOMP_REFUSED, /* answered with an error instead of the end: libraries try it and do without */
	SECCOMP_REASONS
};

#define SECCOMP_TESTS_MAX 3

struct seccomp_test {
	uint8_t arg; /* 0.. */
	uint32_t mask, value;
};

struct seccomp_row {
	uint16_t nr;
	uint8_t who; /* bits of seccomp_who */
	uint8_t why; /* seccomp_reason */
	uint8_t err; /* 0 = allowed, else this errno */
	uint8_t tests;
	struct seccomp_test test[SECCOMP_TESTS_MAX]; /* all must hold; the first row that fits decides */
};

extern const struct seccomp_row seccomp_rows[];
extern const size_t seccomp_row_count;
/* A word for each reason, as in RIGHTS.md. */
const char *seccomp_reason_text(enum seccomp_reason why);

/* Sets job->filter. nofile of the job must be set: it is the number of the descriptor that is exec'd. `log`: what is not listed is
 * written to the kernel's log and done, instead of killed; for finding what a list lacks. */
int seccomp_fill(struct jail_job *job, enum seccomp_who who, bool log, struct err *e) EPH_MUST_CHECK;

/* Has this kernel what is needed? */
int seccomp_check_host(struct err *e) EPH_MUST_CHECK;

#endif
