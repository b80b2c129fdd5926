/*
 * What vm.c and vm_snapshot.c share, and nobody else looks at.
 */
#ifndef STANDIN_VM_INTERNAL_H
#define STANDIN_VM_INTERNAL_H

#include "machine.h"
#include "vm.h"

#include <stdint.h>

struct field;

enum vm_state { VM_CREATED, VM_RUNNING, VM_PAUSED };

struct vm {
	struct json *config; /* filled; NULL: there is no VM */
	struct machine *machine;
	enum vm_state state;
	int console_fd;
	bool activated;      /* the guest's drivers were reported */
	uint32_t early_port; /* a port that the guest opened while the machine was being made */
	int64_t booted_ms;
};

extern struct vm vm;

/* A request's body, checked and filled. */
int vm_read(const struct field *fields, const char *body, size_t n, struct json **out, struct err *e) EPH_MUST_CHECK;
/* What vm.create does with a filled configuration, which it takes over. */
int vm_take_config(struct json *config, struct err *e) EPH_MUST_CHECK;
int vm_start_machine(bool incoming, struct err *e) EPH_MUST_CHECK;
void vm_stop_machine(void);

#endif
