/* Shared by the files of doctor. */
#ifndef NODED_DOCTOR_INTERNAL_H
#define NODED_DOCTOR_INTERNAL_H

#include "doctor/doctor.h"
#include "keeper/host.h"

#define DOCTOR_ITEMS_MAX 64

enum finding { FINDING_OK, FINDING_WARN, FINDING_FAIL };

struct doctor {
	const struct noded_config *config;
	struct host host;
	bool noded_runs; /* another process holds the lock of state_dir */
	size_t count;
	struct doctor_item {
		const char *name; /* static */
		enum finding finding;
		char found[600];
		char mend[600]; /* "" where nothing is to be done */
	} items[DOCTOR_ITEMS_MAX];
};

/* Adds an item; mend may be NULL where it is ok. What is too long is cut. */
void doctor_say(struct doctor *d, const char *name, enum finding finding, const char *mend, const char *fmt, ...) EPH_PRINTF(5, 6);

void doctor_look_at_kernel(struct doctor *d);  /* kernel.c: KVM, kill by group, seccomp, Landlock, connect filter, sysctl, limits */
void doctor_look_at_disk(struct doctor *d);    /* disk.c: state_dir, run_dir, who works on them, user ids */
void doctor_look_at_control(struct doctor *d); /* control.c: clock, enrolment, each controld */

#endif
