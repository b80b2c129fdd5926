/*
 * The machine behind the API: a QEMU microvm that boots the same kernel, initramfs and disks. What Cloud Hypervisor is and QEMU is
 * not is bridged here: PCI becomes MMIO, and the vsock connection becomes a virtio serial port (README.md says so loudly).
 *
 * One at a time; a child of this process that dies with it. Calls block until QEMU has answered, with a deadline.
 */
#ifndef STANDIN_MACHINE_H
#define STANDIN_MACHINE_H

#include "common/buf.h"
#include "common/error.h"
#include "common/json.h"

#include <stdbool.h>

enum machine_end {
	MACHINE_RUNS = 0,
	MACHINE_POWER_OFF, /* the guest's wish */
	MACHINE_RESET,     /* the same, or its panic, or a triple fault */
	MACHINE_LOST,      /* QEMU ended by itself or was killed */
};

struct machine;

struct machine_ops {
	/* The guest's process opened or closed the port that stands for a connection to vsock port `port`. */
	void (*on_port)(void *arg, uint32_t port, bool open);
	void *arg;
};

/* Boots, or with `incoming` waits for machine_load. console_fd (or -1) is where the console goes; it stays the caller's. */
int machine_start(const struct json *config, int console_fd, bool incoming, const struct machine_ops *ops, struct machine **out,
		struct err *e) EPH_MUST_CHECK;
/* Kills QEMU and waits for its end. NULL is fine. */
void machine_free(struct machine *m);

/* For poll: when readable, call machine_read. */
int machine_fd(const struct machine *m);
enum machine_end machine_read(struct machine *m);
/* Our end of the guest's byte stream; -1 when the VM has no vsock or the stream was closed. */
int machine_guest_fd(const struct machine *m);
void machine_guest_close(struct machine *m);

int machine_pause(struct machine *m, struct err *e) EPH_MUST_CHECK;
int machine_resume(struct machine *m, struct err *e) EPH_MUST_CHECK;
/* State of the paused machine, memory too unless it is in a shared file. */
int machine_save(struct machine *m, struct buf *state, struct err *e) EPH_MUST_CHECK;
int machine_load(struct machine *m, const struct buf *state, struct err *e) EPH_MUST_CHECK;
/* Of the first disk. */
int machine_counters(struct machine *m, int64_t out[4], struct err *e) EPH_MUST_CHECK;

/* Is the memory of this configuration in a file that snapshots leave out? */
bool machine_memory_in_file(const struct json *config);

#endif
