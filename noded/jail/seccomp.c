/*
 * Makes a BPF program of the rows of a process (seccomp.h). Keeper's, pure but for the check of the host, which asks the kernel
 * once at start.
 */
#include "jail/seccomp.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define X32_BIT 0x40000000U
/* A row is at most: compare the number, three tests of three each, return, load the number again. */
#define ROW_MAX (1 + 3 * SECCOMP_TESTS_MAX + 2)
#define PROGRAM_MAX (JAIL_FILTER_MAX / sizeof(struct sock_filter))

struct program {
	struct sock_filter at[PROGRAM_MAX];
	uint32_t len;
};

static void put(struct program *p, uint16_t code, uint32_t k, uint8_t yes, uint8_t no)
{
	p->at[p->len++] = (struct sock_filter){ code, yes, no, k };
}

static void load(struct program *p, uint32_t offset)
{
	put(p, BPF_LD | BPF_W | BPF_ABS, offset, 0, 0);
}

static void give(struct program *p, uint32_t action)
{
	put(p, BPF_RET | BPF_K, action, 0, 0);
}

static uint32_t arg_offset(uint8_t arg)
{
	return (uint32_t)offsetof(struct seccomp_data, args) + 8U * arg; /* little endian: the low half comes first */
}

static void put_row(struct program *p, const struct seccomp_row *r, uint32_t exec_fd)
{
	uint32_t begin = p->len, last, action = r->err ? SECCOMP_RET_ERRNO | r->err : SECCOMP_RET_ALLOW;
	uint32_t fails[SECCOMP_TESTS_MAX + 1], fail_count = 0;
	bool exec = r->why == SECCOMP_EXEC;

	put(p, BPF_JMP | BPF_JEQ | BPF_K, r->nr, 0, 0);
	for (uint8_t i = 0; i < r->tests; i++) {
		load(p, arg_offset(r->test[i].arg));
		if (r->test[i].mask != UINT32_MAX)
			put(p, BPF_ALU | BPF_AND | BPF_K, r->test[i].mask, 0, 0);
		fails[fail_count++] = p->len;
		put(p, BPF_JMP | BPF_JEQ | BPF_K, exec && i == 0 ? exec_fd : r->test[i].value, 0, 0);
	}
	give(p, action);
	last = p->len;
	for (uint32_t i = 0; i < fail_count; i++)
		p->at[fails[i]].jf = (uint8_t)(last - fails[i] - 1);
	if (r->tests > 0)
		load(p, (uint32_t)offsetof(struct seccomp_data, nr));
	p->at[begin].jf = (uint8_t)(p->len - begin - 1);
}

int seccomp_fill(struct jail_job *job, enum seccomp_who who, bool log, struct err *e)
{
	struct program *p = calloc(1, sizeof(*p));

	if (!p)
		return err_set(e, ERR_NOMEM, "no memory");
	/* Only calls of x86-64 as they are: the numbers of i386 and of x32 mean something else. */
	load(p, (uint32_t)offsetof(struct seccomp_data, arch));
	put(p, BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
	give(p, SECCOMP_RET_KILL_PROCESS);
	load(p, (uint32_t)offsetof(struct seccomp_data, nr));
	put(p, BPF_JMP | BPF_JGE | BPF_K, X32_BIT, 0, 1);
	give(p, SECCOMP_RET_KILL_PROCESS);
	for (size_t i = 0; i < seccomp_row_count; i++) {
		if (!(seccomp_rows[i].who & who))
			continue;
		if (p->len + ROW_MAX + 1 > PROGRAM_MAX) {
			free(p);
			return err_set(e, ERR_LIMIT, "the system call filter is too long");
		}
		put_row(p, &seccomp_rows[i], job->nofile);
	}
	give(p, log ? SECCOMP_RET_LOG : SECCOMP_RET_KILL_PROCESS);
	free(job->filter);
	job->filter_len = (uint32_t)(p->len * sizeof(struct sock_filter));
	job->filter = malloc(job->filter_len);
	if (job->filter)
		memcpy(job->filter, p->at, job->filter_len);
	else
		job->filter_len = 0;
	free(p);
	return job->filter ? 0 : err_set(e, ERR_NOMEM, "no memory");
}

int seccomp_check_host(struct err *e)
{
	static const uint32_t needed[] = { SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO, SECCOMP_RET_LOG };

	for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++)
		if (syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &needed[i]) != 0)
			return err_set_errno(e, "this kernel filters no system calls (CONFIG_SECCOMP_FILTER, Linux 4.14 or newer, "
						"is needed)");
	return 0;
}
