/*
 * The VM behind the API: its configuration, its state, and what each call does in which state. One per process, as with the real
 * one.
 */
#ifndef STANDIN_VM_H
#define STANDIN_VM_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>

/* How a call ended, as the API tells it apart. */
enum vm_result {
	VM_OK,
	VM_ABSENT,  /* there is no VM: 404 */
	VM_FAILED,  /* anything else: 500 */
	VM_INVALID, /* the body is no JSON of the right shape: 400 */
};

enum vm_result vm_create(const char *body, size_t n, struct err *e);
enum vm_result vm_boot(struct err *e);
enum vm_result vm_info(struct buf *out, struct err *e);
enum vm_result vm_counters(struct buf *out, struct err *e);
enum vm_result vm_pause(struct err *e);
enum vm_result vm_resume(struct err *e);
enum vm_result vm_reboot(struct err *e);
enum vm_result vm_shutdown(struct err *e);
enum vm_result vm_delete(struct err *e);
enum vm_result vm_snapshot(const char *body, size_t n, struct err *e);
enum vm_result vm_restore(const char *body, size_t n, struct err *e);

/* Descriptors to wait for, and what to do when they are ready. -1: this process ends, with status *status. */
struct pollfd;
#define VM_FDS 16
size_t vm_poll(struct pollfd *out);
int vm_ready(const struct pollfd *fds, size_t n, int *status);
/* Guest and sockets gone; for every end of this process. */
void vm_end(void);

#endif
