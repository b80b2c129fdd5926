/*
 * The system calls that no user process may make. A deny list: it closes the few doors that need no privilege in Linux and lead
 * past the limits of a run (the guest channel's address family, io_uring, which gets round this very filter) or deep into the
 * kernel without a use here.
 */
#ifndef GUEST_SECCOMP_H
#define GUEST_SECCOMP_H

#include "common/error.h"

#include <linux/filter.h>

/* The filter program, and its length in *n. Static storage. */
const struct sock_filter *seccomp_program(unsigned short *n);
/* Installs it for this process and all that it starts. Needs no_new_privs. */
int seccomp_install(struct err *e) EPH_MUST_CHECK;

#endif
