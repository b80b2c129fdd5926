/*
 * The system calls that each kind of process may make, and why (seccomp.h). Found by tracing every kind under the whole test suite
 * and by reading what its libraries do when something goes wrong; what no reason could be given for is not here.
 *
 * Order matters where a call has several rows: the first that fits decides. Calls that are made often come first.
 */
#include "jail/seccomp.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define LINK SECCOMP_LINK
#define BROKER SECCOMP_BROKER
#define CHANNEL SECCOMP_CHANNEL
#define TCG SECCOMP_QEMU_TCG
#define KVM SECCOMP_QEMU_KVM
#define QEMU (TCG | KVM)
#define ROLES (LINK | BROKER | CHANNEL)
#define OUTWARD (LINK | BROKER)
#define ALL (ROLES | QEMU)

#define FULL UINT32_MAX
#define ROW(name, who_, why_, err_) .nr = SYS_##name, .who = (who_), .why = SECCOMP_##why_, .err = (err_)
#define ALLOW(name, who, why)                                                                                                      \
	{                                                                                                                          \
		ROW(name, who, why, 0)                                                                                             \
	}
#define ERRNO(name, who, number)                                                                                                   \
	{                                                                                                                          \
		ROW(name, who, REFUSED, number)                                                                                    \
	}
/* With one, two, three arguments: number, mask, value. */
#define ALLOW1(name, who, why, a, m, v)                                                                                            \
	{                                                                                                                          \
		ROW(name, who, why, 0), .tests = 1, .test = { { a, m, v } }                                                        \
	}
#define ALLOW2(name, who, why, a, m, v, b, n, w)                                                                                   \
	{                                                                                                                          \
		ROW(name, who, why, 0), .tests = 2, .test = { { a, m, v }, { b, n, w } }                                           \
	}
#define ALLOW3(name, who, why, a, m, v, b, n, w, c, o, x)                                                                          \
	{                                                                                                                          \
		ROW(name, who, why, 0), .tests = 3, .test = { { a, m, v }, { b, n, w }, { c, o, x } }                              \
	}
#define ERRNO1(name, who, number, a, m, v)                                                                                         \
	{                                                                                                                          \
		ROW(name, who, REFUSED, number), .tests = 1, .test = { { a, m, v } }                                               \
	}

#define SOCKET_KIND 0xfU /* without SOCK_NONBLOCK and SOCK_CLOEXEC */
#define SOCKET(family, kind, proto) ALLOW3(socket, OUTWARD, NET, 0, FULL, family, 1, SOCKET_KIND, kind, 2, FULL, proto)
#define OPTION(who, why, level, option) ALLOW2(setsockopt, who, why, 1, FULL, level, 2, FULL, option)
#define FCNTL(who, why, command) ALLOW1(fcntl, who, why, 1, FULL, command)
#define PRCTL(who, why, option) ALLOW1(prctl, who, why, 0, FULL, option)

#define WRITES (uint32_t)(O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | (O_TMPFILE & ~O_DIRECTORY))
#define X (uint32_t) PROT_EXEC
#define WX (uint32_t)(PROT_WRITE | PROT_EXEC)
#define THREAD (uint32_t)(CLONE_VM | CLONE_THREAD)
#define NAMESPACES                                                                                                                 \
	(uint32_t)(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)
#define KVM_IOCTLS 0xae00U /* the type of every ioctl of KVM */

const struct seccomp_row seccomp_rows[] = {
	/* Bytes and waiting: nearly all of what these processes do. */
	ALLOW(read, ALL, BYTES),
	ALLOW(write, ALL, BYTES),
	ALLOW(readv, ALL, BYTES),
	ALLOW(writev, ALL, BYTES),
	ALLOW(epoll_wait, ALL, WAIT),
	ALLOW(epoll_pwait, ALL, WAIT),
	ALLOW(ppoll, ALL, WAIT),
	ALLOW(poll, ALL, WAIT),
	ALLOW(epoll_ctl, ALL, WAIT),
	ALLOW(futex, ALL, THREADS),
	ALLOW(recvmsg, ALL, BYTES),
	ALLOW(sendmsg, ALL, BYTES),
	ALLOW(recvfrom, ROLES, BYTES),
	ALLOW(sendto, ROLES, BYTES),
	ALLOW(close, ALL, BYTES),
	ALLOW(lseek, ALL, BYTES),
	ALLOW(pread64, ALL, BYTES),
	ALLOW(shutdown, ALL, BYTES),
	ALLOW(pipe2, ALL, BYTES),
	ALLOW1(ioctl, ALL, BYTES, 1, FULL, FIONREAD),
	ALLOW1(ioctl, ALL, BYTES, 1, FULL, FIONBIO),
	ALLOW1(ioctl, ALL, BYTES, 1, FULL, TCGETS), /* is it a terminal? */
	FCNTL(ALL, BYTES, F_GETFL),
	FCNTL(ALL, BYTES, F_SETFL),
	FCNTL(ALL, BYTES, F_GETFD),
	FCNTL(ALL, BYTES, F_SETFD),
	FCNTL(ALL, BYTES, F_DUPFD_CLOEXEC),
	ALLOW(dup, QEMU, BYTES),
	ALLOW(epoll_create1, ALL, WAIT),
	ALLOW(eventfd2, ALL, WAIT),
	ALLOW(timerfd_create, ROLES, WAIT),
	ALLOW(timerfd_settime, ROLES, WAIT),
	/* Clocks are mostly read without a call, but not on every host. */
	ALLOW(clock_gettime, ALL, WAIT),
	ALLOW(clock_getres, ALL, WAIT),
	ALLOW(gettimeofday, ALL, WAIT),
	ALLOW(time, ALL, WAIT),
	ALLOW(clock_nanosleep, ALL, WAIT),
	ALLOW(nanosleep, ALL, WAIT),
	ALLOW(restart_syscall, ALL, WAIT),

	/* Memory. Translated code is written and executed; nothing else ever is. */
	ALLOW(mmap, TCG, GUEST),
	ALLOW(mprotect, TCG, GUEST),
	ALLOW1(mmap, ALL, MEMORY, 2, X, 0),
	ALLOW2(mmap, ALL, LOAD, 2, WX, X, 3, MAP_ANONYMOUS, 0),
	ALLOW1(mprotect, ALL, MEMORY, 2, X, 0),
	ALLOW(munmap, ALL, MEMORY),
	ALLOW(mremap, ALL, MEMORY),
	ALLOW(brk, ALL, MEMORY),
	ERRNO1(madvise, QEMU, EINVAL, 2, FULL, MADV_MERGEABLE), /* pages shared between VMs tell one of the other */
	ALLOW(madvise, ALL, MEMORY),
	ALLOW(memfd_create, QEMU, GUEST),
	ALLOW(fadvise64, QEMU, GUEST), /* reads the state of a snapshot */
	ALLOW(ftruncate, QEMU, GUEST),
	ALLOW(fallocate, QEMU, GUEST),

	/* Threads, which the kernel is asked for by flags that a filter can see. */
	ERRNO(clone3, ALL, ENOSYS),
	ALLOW1(clone, ALL, THREADS, 0, THREAD | NAMESPACES, THREAD),
	ALLOW(set_robust_list, ALL, THREADS),
	ALLOW(rseq, ALL, THREADS),
	ALLOW(set_tid_address, ALL, THREADS),
	ALLOW(gettid, ALL, THREADS),
	ALLOW(sched_yield, ALL, THREADS),
	ALLOW(sched_getaffinity, ALL, THREADS),
	ALLOW(rt_sigprocmask, ALL, THREADS),
	ALLOW(getcpu, QEMU, THREADS),

	/* The tree: to be read. QEMU opens devices for both, and nobody makes a file. */
	ALLOW1(openat, ROLES, FILES, 2, WRITES, 0),
	ALLOW1(open, ROLES, FILES, 1, WRITES, 0),
	ALLOW1(openat, QEMU, FILES, 2, O_CREAT | O_TRUNC, 0),
	ALLOW1(open, QEMU, FILES, 1, O_CREAT | O_TRUNC, 0),
	ERRNO(openat, ALL, EACCES),
	ERRNO(open, ALL, EACCES),
	ALLOW(newfstatat, ALL, FILES),
	ALLOW(fstat, ALL, FILES),
	ALLOW(stat, ALL, FILES),
	ALLOW(lstat, ALL, FILES),
	ALLOW(statx, ALL, FILES),
	ALLOW(access, ALL, FILES),
	ALLOW(faccessat2, ALL, FILES),
	ALLOW(readlink, ALL, FILES),
	ALLOW(readlinkat, ALL, FILES),
	ALLOW(getdents64, OUTWARD | QEMU, FILES),
	ALLOW(statfs, QEMU, FILES),
	ALLOW(fchdir, QEMU, FILES), /* a library that walks through /sys, where there is one */
	ALLOW(fstatfs, QEMU, FILES),

	/* What is inherited to be written: the spool; images that come in. */
	ALLOW(pwrite64, OUTWARD, STORE),
	ALLOW(pwritev, OUTWARD, STORE),
	ALLOW(fdatasync, OUTWARD, STORE),
	ALLOW(fsync, OUTWARD, STORE),
	ALLOW(ftruncate, OUTWARD, STORE),
	ALLOW(fallocate, OUTWARD, STORE),

	/* TCP, and UDP and netlink (which addresses has this host?) for look-ups. No other protocol, so none that goes round the
	 * connect filter; no unix sockets, whose abstract names are the host's. */
	SOCKET(AF_INET, SOCK_STREAM, 0),
	SOCKET(AF_INET, SOCK_STREAM, IPPROTO_TCP),
	SOCKET(AF_INET6, SOCK_STREAM, 0),
	SOCKET(AF_INET6, SOCK_STREAM, IPPROTO_TCP),
	SOCKET(AF_INET, SOCK_DGRAM, 0),
	SOCKET(AF_INET, SOCK_DGRAM, IPPROTO_UDP),
	SOCKET(AF_INET6, SOCK_DGRAM, 0),
	SOCKET(AF_INET6, SOCK_DGRAM, IPPROTO_UDP),
	SOCKET(AF_NETLINK, SOCK_RAW, 0),
	ERRNO1(socket, OUTWARD, EAFNOSUPPORT, 0, FULL, AF_UNIX), /* the name service cache, which is not in the tree */
	ALLOW1(socketpair, OUTWARD, WAIT, 0, FULL, AF_UNIX),
	ALLOW(connect, OUTWARD, NET),
	ALLOW(bind, OUTWARD, NET),
	ALLOW(getsockname, ALL, NET),
	ALLOW(getpeername, ALL, NET),
	ALLOW(getsockopt, ALL, NET),
	ALLOW(sendmmsg, OUTWARD, NET),
	ALLOW(recvmmsg, OUTWARD, NET),
	OPTION(OUTWARD, NET, IPPROTO_TCP, TCP_NODELAY),
	OPTION(OUTWARD, NET, IPPROTO_TCP, TCP_KEEPIDLE),
	OPTION(OUTWARD, NET, IPPROTO_TCP, TCP_KEEPINTVL),
	OPTION(OUTWARD, NET, IPPROTO_TCP, TCP_KEEPCNT),
	OPTION(OUTWARD, NET, IPPROTO_TCP, TCP_USER_TIMEOUT),
	OPTION(OUTWARD, NET, IPPROTO_TCP, TCP_QUICKACK),
	OPTION(OUTWARD, NET, SOL_SOCKET, SO_KEEPALIVE),
	OPTION(OUTWARD, NET, SOL_SOCKET, SO_SNDBUF),
	OPTION(OUTWARD, NET, SOL_SOCKET, SO_RCVBUF),
	OPTION(OUTWARD, NET, SOL_SOCKET, SO_LINGER),
	OPTION(OUTWARD, NET, IPPROTO_IP, IP_RECVERR),
	OPTION(OUTWARD, NET, IPPROTO_IP, IP_MTU_DISCOVER),
	OPTION(OUTWARD, NET, IPPROTO_IP, IP_TOS),
	OPTION(OUTWARD, NET, IPPROTO_IPV6, IPV6_RECVERR),
	OPTION(OUTWARD, NET, IPPROTO_IPV6, IPV6_V6ONLY),
	OPTION(OUTWARD, NET, IPPROTO_IPV6, IPV6_MTU_DISCOVER),
	OPTION(OUTWARD, NET, IPPROTO_IPV6, IPV6_TCLASS),
	OPTION(LINK, SERVE, SOL_SOCKET, SO_REUSEADDR),
	ALLOW(listen, LINK, SERVE),
	ALLOW(accept4, ROLES, LISTEN),
	ALLOW(accept, ROLES, LISTEN),
	ERRNO(setsockopt, QEMU, ENOPROTOOPT),

	/* The VMM: KVM, threads that are woken by signals, locks of the image, its own sandbox on top of this. */
	ALLOW1(ioctl, KVM, GUEST, 1, 0xff00U, KVM_IOCTLS),
	ALLOW1(ioctl, QEMU, GUEST, 1, FULL, TCSETS),
	FCNTL(QEMU, GUEST, F_OFD_GETLK),
	FCNTL(QEMU, GUEST, F_OFD_SETLK),
	FCNTL(QEMU, GUEST, F_GETLK),
	FCNTL(QEMU, GUEST, F_SETLK),
	ALLOW(preadv, QEMU, GUEST),
	ALLOW(pwritev, QEMU, GUEST),
	ALLOW(pwrite64, QEMU, GUEST),
	ALLOW(fdatasync, QEMU, GUEST),
	ALLOW(signalfd4, QEMU, GUEST),
	ALLOW(rt_sigtimedwait, QEMU, GUEST),
	ALLOW(rt_sigpending, QEMU, GUEST),
	ALLOW(membarrier, QEMU, GUEST),
	ALLOW(seccomp, QEMU, SELF),
	PRCTL(QEMU, SELF, PR_SET_NO_NEW_PRIVS),
	PRCTL(QEMU, SELF, PR_SET_SECCOMP),
	PRCTL(QEMU, SELF, PR_GET_SECCOMP),
	PRCTL(QEMU, SELF, PR_SET_TIMERSLACK),
	PRCTL(QEMU, SELF, PR_MCE_KILL),
	PRCTL(QEMU, SELF, PR_CAPBSET_READ),
	ERRNO(io_uring_setup, QEMU, ENOSYS),
	ERRNO(get_mempolicy, QEMU, ENOSYS),
	ERRNO(set_mempolicy, QEMU, ENOSYS),
	ERRNO(getpriority, QEMU, ENOSYS),

	/* Who am I; fewer rights still. */
	PRCTL(ALL, SELF, PR_SET_NAME),
	PRCTL(ALL, SELF, PR_GET_NAME),
	PRCTL(ALL, SELF, PR_GET_DUMPABLE),
	ALLOW2(prctl, ALL, SELF, 0, FULL, PR_SET_DUMPABLE, 1, FULL, 0),
	ALLOW(getpid, ALL, SELF),
	ALLOW(getppid, ALL, SELF),
	ALLOW(getuid, ALL, SELF),
	ALLOW(geteuid, ALL, SELF),
	ALLOW(getgid, ALL, SELF),
	ALLOW(getegid, ALL, SELF),
	ALLOW(uname, ALL, SELF),
	ALLOW(sysinfo, ALL, SELF),
	ALLOW(prlimit64, ALL, SELF), /* of itself: another process would have to have its uid */
	ALLOW(getrlimit, ALL, SELF),
	ALLOW(getrusage, ALL, SELF),
	ALLOW(umask, ALL, SELF),
	ALLOW(getrandom, ALL, LOAD),
	ALLOW(arch_prctl, ALL, LOAD),

	ALLOW(rt_sigaction, ALL, DEATH),
	ALLOW(rt_sigreturn, ALL, DEATH),
	ALLOW(sigaltstack, ALL, DEATH),
	ALLOW(tgkill, ALL, DEATH), /* abort, and threads that are woken; who else there is has another uid */
	ALLOW(exit, ALL, DEATH),
	ALLOW(exit_group, ALL, DEATH),

	/* The descriptor's number is put in when the program is made. */
	ALLOW2(execveat, ALL, EXEC, 0, FULL, 0, 4, FULL, 0x1000U /* AT_EMPTY_PATH */),
};
const size_t seccomp_row_count = sizeof(seccomp_rows) / sizeof(seccomp_rows[0]);

const char *seccomp_reason_text(enum seccomp_reason why)
{
	static const char *const texts[SECCOMP_REASONS] = { "exec", "load", "memory", "threads", "wait", "bytes", "files", "store",
		"net", "listen", "serve", "guest", "self", "death", "sanitizer", "refused" };

	return (unsigned int)why < SECCOMP_REASONS ? texts[why] : "?";
}
