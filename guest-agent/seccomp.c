/*
 * The seccomp filter of user processes: a small table turned into BPF once. Pure but for seccomp_install, which acts on the calling
 * process: the child between fork and exec.
 */
#include "seccomp.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

/* First number of the x32 calls, a second way to make each call. */
#define X32_BIT 0x40000000u

/* A call and what it gives instead of running. family >= 0: only for that first argument. */
static const struct denied {
	unsigned int nr;
	int family;
	unsigned int error;
} denied[] = {
	{ SYS_socket, AF_VSOCK, EAFNOSUPPORT },
	{ SYS_socketpair, AF_VSOCK, EAFNOSUPPORT },
	{ SYS_socket, AF_PACKET, EPERM },
	{ SYS_socket, AF_ALG, EAFNOSUPPORT },
	{ SYS_io_uring_setup, -1, ENOSYS },
	{ SYS_io_uring_enter, -1, ENOSYS },
	{ SYS_io_uring_register, -1, ENOSYS },
	{ SYS_bpf, -1, EPERM },
	{ SYS_perf_event_open, -1, EPERM },
	{ SYS_userfaultfd, -1, EPERM },
	{ SYS_add_key, -1, EPERM },
	{ SYS_request_key, -1, EPERM },
	{ SYS_keyctl, -1, EPERM },
	{ SYS_kexec_load, -1, EPERM },
	{ SYS_kexec_file_load, -1, EPERM },
	{ SYS_init_module, -1, EPERM },
	{ SYS_finit_module, -1, EPERM },
	{ SYS_open_by_handle_at, -1, EPERM },
	/*
	 * Access lists of files in memory: 64 KiB of the kernel's for each of 60,000 files, counted against no group and by no
	 * quota, and they outlive every process. What else these calls could set, such a file cannot have.
	 */
	{ SYS_setxattr, -1, EOPNOTSUPP },
	{ SYS_lsetxattr, -1, EOPNOTSUPP },
	{ SYS_fsetxattr, -1, EOPNOTSUPP },
};

#define DENIED_COUNT (sizeof denied / sizeof denied[0])
#define PROGRAM_MAX (8 + 5 * DENIED_COUNT)

#define LOAD(field) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned int)offsetof(struct seccomp_data, field))
#define RETURN(value) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, (value))
/* Goes on when equal (or at least, for JUMP_GE), else skips n instructions. */
#define UNLESS_EQUAL(value, n) (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), 0, (n))
#define UNLESS_AT_LEAST(value, n) (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (value), 0, (n))

const struct sock_filter *seccomp_program(unsigned short *n)
{
	static struct sock_filter program[PROGRAM_MAX];
	unsigned short at = 0;

	/* Calls of another architecture have other numbers: none of them is offered. */
	program[at++] = LOAD(arch);
	program[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
	program[at++] = RETURN(SECCOMP_RET_ERRNO | ENOSYS);
	program[at++] = LOAD(nr);
	program[at++] = UNLESS_AT_LEAST(X32_BIT, 1);
	program[at++] = RETURN(SECCOMP_RET_ERRNO | ENOSYS);
	for (size_t i = 0; i < DENIED_COUNT; i++) {
		const struct denied *d = &denied[i];

		if (d->family < 0) {
			program[at++] = UNLESS_EQUAL(d->nr, 1);
			program[at++] = RETURN(SECCOMP_RET_ERRNO | d->error);
			continue;
		}
		/* The kernel takes the family as an int: the low half of the argument (little endian). */
		program[at++] = UNLESS_EQUAL(d->nr, 4);
		program[at++] = LOAD(args[0]);
		program[at++] = UNLESS_EQUAL((unsigned int)d->family, 1);
		program[at++] = RETURN(SECCOMP_RET_ERRNO | d->error);
		program[at++] = LOAD(nr);
	}
	program[at++] = RETURN(SECCOMP_RET_ALLOW);
	*n = at;
	return program;
}

int seccomp_install(struct err *e)
{
	struct sock_fprog prog;

	prog.filter = (struct sock_filter *)seccomp_program(&prog.len);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog, 0, 0) < 0)
		return err_set_errno(e, "install the seccomp filter");
	return 0;
}
