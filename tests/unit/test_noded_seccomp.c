/*
 * The system call filters: the programs are run by an interpreter of the few instructions that they use, and once each by the
 * kernel itself.
 */
/* link: noded_core */
#include "unit.h"

#include "jail/seccomp.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NOFILE 256

static const enum seccomp_who all[] = { SECCOMP_LINK, SECCOMP_BROKER, SECCOMP_CHANNEL, SECCOMP_QEMU_TCG, SECCOMP_QEMU_KVM };
#define ALL (sizeof(all) / sizeof(all[0]))

/* What the kernel would do with a classic program. */
static uint32_t run(const struct jail_job *job, const struct seccomp_data *data)
{
	const struct sock_filter *p = (const void *)job->filter;
	uint32_t a = 0, n = job->filter_len / (uint32_t)sizeof(*p);

	for (uint32_t pc = 0; pc < n; pc++) {
		switch (p[pc].code) {
		case BPF_LD | BPF_W | BPF_ABS:
			assert_true(p[pc].k + 4 <= sizeof(*data) && p[pc].k % 4 == 0);
			memcpy(&a, (const uint8_t *)data + p[pc].k, sizeof(a));
			break;
		case BPF_ALU | BPF_AND | BPF_K: a &= p[pc].k; break;
		case BPF_JMP | BPF_JEQ | BPF_K: pc += a == p[pc].k ? p[pc].jt : p[pc].jf; break;
		case BPF_JMP | BPF_JGE | BPF_K: pc += a >= p[pc].k ? p[pc].jt : p[pc].jf; break;
		case BPF_RET | BPF_K: return p[pc].k;
		default: fail_msg("instruction %x", p[pc].code);
		}
	}
	fail_msg("the program ends without a word");
	return 0;
}

static void make(struct jail_job *job, enum seccomp_who who, bool log)
{
	struct err e;

	*job = (struct jail_job){ .stdio_fd = -1, .nofile = NOFILE };
	assert_int_equal(seccomp_fill(job, who, log, &e), 0);
	assert_true(job->filter_len > 0 && job->filter_len <= JAIL_FILTER_MAX);
}

static uint32_t ask(enum seccomp_who who, long nr, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t f)
{
	struct seccomp_data data = { .nr = (int)nr, .arch = AUDIT_ARCH_X86_64, .args = { a, b, c, d, f } };
	struct jail_job job;
	uint32_t action;

	make(&job, who, false);
	action = run(&job, &data);
	jail_job_free(&job);
	return action;
}

#define KILLED(who, nr, ...) assert_int_equal(ask(who, nr, __VA_ARGS__), SECCOMP_RET_KILL_PROCESS)
#define ALLOWED(who, nr, ...) assert_int_equal(ask(who, nr, __VA_ARGS__), SECCOMP_RET_ALLOW)
#define REFUSED(who, nr, number, ...) assert_int_equal(ask(who, nr, __VA_ARGS__), SECCOMP_RET_ERRNO | (number))

/* Every row does what it says in the process that has it, and nothing in another. */
static void every_row(void **state)
{
	(void)state;
	for (size_t w = 0; w < ALL; w++) {
		struct jail_job job;

		make(&job, all[w], false);
		for (size_t i = 0; i < seccomp_row_count; i++) {
			const struct seccomp_row *r = &seccomp_rows[i];
			struct seccomp_data data = { .nr = r->nr, .arch = AUDIT_ARCH_X86_64 };
			uint32_t action;

			assert_string_not_equal(seccomp_reason_text(r->why), "?");
			for (uint8_t t = 0; t < r->tests; t++)
				data.args[r->test[t].arg] |= r->test[t].value;
			if (r->why == SECCOMP_EXEC)
				data.args[0] = NOFILE;
			action = run(&job, &data);
			if (!(r->who & all[w]))
				continue;
			/* A row of the same call above it may have said something else, but a call with a row is never the end. */
			assert_int_not_equal(action, SECCOMP_RET_KILL_PROCESS);
			if (r->tests > 0)
				assert_int_equal(action, r->err ? SECCOMP_RET_ERRNO | r->err : SECCOMP_RET_ALLOW);
		}
		jail_job_free(&job);
	}
}

/* Not on any list, whatever the arguments. */
static void never(void **state)
{
	static const long calls[] = { SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_bpf, SYS_mount, SYS_umount2,
		SYS_pivot_root, SYS_chroot, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_userfaultfd, SYS_io_uring_enter,
		SYS_io_uring_register, SYS_perf_event_open, SYS_unshare, SYS_setns, SYS_execve, SYS_fork, SYS_vfork, SYS_kill,
		SYS_tkill, SYS_pidfd_open, SYS_pidfd_getfd, SYS_kexec_load, SYS_init_module, SYS_finit_module,
		SYS_open_by_handle_at, SYS_name_to_handle_at, SYS_setuid, SYS_setresuid, SYS_capset, SYS_personality,
		SYS_modify_ldt, SYS_iopl, SYS_ioperm, SYS_move_mount, SYS_fsopen, SYS_fsconfig, SYS_mount_setattr, SYS_open_tree,
		SYS_shmget, SYS_msgget, SYS_semget, SYS_mq_open, SYS_acct, SYS_swapon, SYS_reboot, SYS_syslog, SYS_quotactl,
		SYS_fanotify_init, SYS_inotify_init1, SYS_mkdir, SYS_mknod, SYS_unlink, SYS_rename, SYS_symlink, SYS_link,
		SYS_chmod, SYS_chown, SYS_pkey_mprotect, SYS_remap_file_pages, SYS_vmsplice, SYS_splice, SYS_tee, SYS_kcmp,
		SYS_clock_settime, SYS_settimeofday, SYS_sethostname, SYS_landlock_create_ruleset, SYS_sched_setscheduler,
		SYS_sched_setattr, SYS_setpriority, SYS_migrate_pages };

	(void)state;
	for (size_t w = 0; w < ALL; w++)
		for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
			uint32_t action = ask(all[w], calls[i], 0, 0, 0, 0, 0);

			if (action != SECCOMP_RET_KILL_PROCESS)
				fail_msg("who %d may make call %ld: %x", all[w], calls[i], action);
		}
	for (long nr = 440; nr < 600; nr++) /* what newer kernels bring */
		for (size_t w = 0; w < ALL; w++)
			KILLED(all[w], nr, 0, 0, 0, 0, 0);
}

static void other_architectures(void **state)
{
	struct seccomp_data x32 = { .nr = 0x40000000 | SYS_read, .arch = AUDIT_ARCH_X86_64 };
	struct seccomp_data i386 = { .nr = 3, .arch = AUDIT_ARCH_I386 };

	(void)state;
	for (size_t w = 0; w < ALL; w++)
		for (int log = 0; log < 2; log++) {
			struct jail_job job;

			make(&job, all[w], log == 1);
			assert_int_equal(run(&job, &x32), SECCOMP_RET_KILL_PROCESS);
			assert_int_equal(run(&job, &i386), SECCOMP_RET_KILL_PROCESS);
			jail_job_free(&job);
		}
}

static void sockets(void **state)
{
	const enum seccomp_who mute[] = { SECCOMP_CHANNEL, SECCOMP_QEMU_TCG, SECCOMP_QEMU_KVM };

	(void)state;
	for (size_t i = 0; i < 3; i++)
		for (int family = 0; family < 46; family++)
			KILLED(mute[i], SYS_socket, (uint64_t)family, SOCK_STREAM, 0, 0, 0);
	ALLOWED(SECCOMP_BROKER, SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP, 0, 0);
	ALLOWED(SECCOMP_BROKER, SYS_socket, AF_INET6, SOCK_DGRAM, 0, 0, 0);
	REFUSED(SECCOMP_BROKER, SYS_socket, EAFNOSUPPORT, AF_UNIX, SOCK_STREAM, 0, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_socket, AF_INET, SOCK_STREAM, 262 /* MPTCP goes round the connect filter */, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_socket, AF_INET, SOCK_RAW, IPPROTO_ICMP, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_socket, AF_INET, SOCK_SEQPACKET, IPPROTO_SCTP, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_socket, AF_PACKET, SOCK_RAW, 0, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_socket, AF_VSOCK, SOCK_STREAM, 0, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_socket, AF_ALG, SOCK_SEQPACKET, 0, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_socket, AF_NETLINK, SOCK_RAW, 12 /* netfilter */, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_listen, 5, 1, 0, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_setsockopt, 5, IPPROTO_TCP, TCP_ULP, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_setsockopt, 5, SOL_SOCKET, SO_ATTACH_FILTER, 0, 0);
	ALLOWED(SECCOMP_BROKER, SYS_setsockopt, 5, IPPROTO_TCP, TCP_NODELAY, 0, 0);
	KILLED(SECCOMP_CHANNEL, SYS_connect, 5, 0, 0, 0, 0);
}

static void processes_and_code(void **state)
{
	const uint64_t thread = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS;

	(void)state;
	for (size_t w = 0; w < ALL; w++) {
		ALLOWED(all[w], SYS_clone, thread, 0, 0, 0, 0);
		KILLED(all[w], SYS_clone, SIGCHLD, 0, 0, 0, 0);
		KILLED(all[w], SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
		KILLED(all[w], SYS_clone, thread | CLONE_NEWUSER, 0, 0, 0, 0);
		REFUSED(all[w], SYS_clone3, ENOSYS, 0, 0, 0, 0, 0);
		ALLOWED(all[w], SYS_execveat, NOFILE, 0, 0, 0, AT_EMPTY_PATH);
		KILLED(all[w], SYS_execveat, NOFILE - 1, 0, 0, 0, AT_EMPTY_PATH);
		KILLED(all[w], SYS_execveat, (uint32_t)AT_FDCWD, 0, 0, 0, 0);
		ALLOWED(all[w], SYS_mmap, 0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, 0);
		if (all[w] == SECCOMP_QEMU_TCG)
			continue;
		KILLED(all[w], SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE, 0);
		KILLED(all[w], SYS_mmap, 0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, 0);
		KILLED(all[w], SYS_mprotect, 0, 4096, PROT_READ | PROT_EXEC, 0, 0);
	}
	REFUSED(SECCOMP_QEMU_KVM, SYS_madvise, EINVAL, 0, 4096, MADV_MERGEABLE, 0, 0);
	ALLOWED(SECCOMP_QEMU_KVM, SYS_ioctl, 5, 0xae80 /* KVM_RUN */, 0, 0, 0);
	KILLED(SECCOMP_QEMU_TCG, SYS_ioctl, 5, 0xae80, 0, 0, 0);
	KILLED(SECCOMP_QEMU_KVM, SYS_ioctl, 5, 0x5412 /* TIOCSTI */, 0, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
	KILLED(SECCOMP_BROKER, SYS_prctl, PR_SET_MM, 0, 0, 0, 0);
}

static void files(void **state)
{
	(void)state;
	ALLOWED(SECCOMP_CHANNEL, SYS_openat, 0, 0, O_RDONLY | O_CLOEXEC | O_DIRECTORY, 0, 0);
	REFUSED(SECCOMP_CHANNEL, SYS_openat, EACCES, 0, 0, O_RDWR, 0, 0);
	REFUSED(SECCOMP_CHANNEL, SYS_openat, EACCES, 0, 0, O_WRONLY | O_CREAT, 0600, 0);
	REFUSED(SECCOMP_BROKER, SYS_openat, EACCES, 0, 0, O_TMPFILE | O_RDWR, 0600, 0);
	ALLOWED(SECCOMP_QEMU_KVM, SYS_openat, 0, 0, O_RDWR, 0, 0);
	REFUSED(SECCOMP_QEMU_KVM, SYS_openat, EACCES, 0, 0, O_RDWR | O_CREAT, 0, 0);
	KILLED(SECCOMP_CHANNEL, SYS_pwrite64, 0, 0, 0, 0, 0);
	ALLOWED(SECCOMP_BROKER, SYS_pwrite64, 0, 0, 0, 0, 0);
}

/* --- by the kernel ------------------------------------------------------------------------------------------------------------ */

static int in_child(enum seccomp_who who, bool log, void (*what)(void))
{
	int status;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		struct jail_job job;
		struct sock_fprog prog;

		make(&job, who, log);
		prog = (struct sock_fprog){ (unsigned short)(job.filter_len / sizeof(struct sock_filter)), (void *)job.filter };
		if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog, 0, 0) != 0)
			syscall(SYS_exit_group, 99);
		what();
		syscall(SYS_exit_group, 7);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return status;
}

static void do_nothing(void)
{
}

static void do_kill(void)
{
	syscall(SYS_kill, getpid(), 0);
}

static void do_unix(void)
{
	if (syscall(SYS_socket, AF_UNIX, SOCK_STREAM, 0) != -1 || errno != EAFNOSUPPORT)
		syscall(SYS_exit_group, 8);
}

static void by_the_kernel(void **state)
{
	(void)state;
	for (size_t w = 0; w < ALL; w++) {
		int status = in_child(all[w], false, do_nothing);

		assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
		status = in_child(all[w], false, do_kill);
		assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS);
		status = in_child(all[w], true, do_kill);
		assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
	}
	assert_int_equal(WEXITSTATUS(in_child(SECCOMP_BROKER, false, do_unix)), 7);
}

static void host_is_asked(void **state)
{
	struct err e;

	(void)state;
	assert_int_equal(seccomp_check_host(&e), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_row),
		cmocka_unit_test(never),
		cmocka_unit_test(other_architectures),
		cmocka_unit_test(sockets),
		cmocka_unit_test(processes_and_code),
		cmocka_unit_test(files),
		cmocka_unit_test(by_the_kernel),
		cmocka_unit_test(host_is_asked),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
