/*
 * QEMU's command line for a configuration of Cloud Hypervisor's. Used by machine.c alone; blocks for 50 ms, in which the host's
 * time stamp counter is measured.
 */
#ifndef STANDIN_MACHINE_ARGS_H
#define STANDIN_MACHINE_ARGS_H

#include "common/error.h"
#include "common/json.h"

#include <stdbool.h>
#include <stdint.h>

#define MACHINE_ARGS_MAX 80

struct machine_args {
	char *argv[MACHINE_ARGS_MAX + 1]; /* each owned */
	int argc;
	bool failed;
	char preload[4200];  /* LD_PRELOAD=...; "": none */
	uint32_t vsock_port; /* of the kernel's command line; 0: none */
};

/* Free it also after an error. */
int machine_args_make(struct machine_args *a, const struct json *config, bool console, bool incoming, int qmp_fd, int guest_fd,
		struct err *e) EPH_MUST_CHECK;
void machine_args_free(struct machine_args *a);

#endif
