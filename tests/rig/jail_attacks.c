/*
 * What a process that an attacker has taken would try (jail_attacks.h). System calls are made by number: what a library does on the
 * way is not meant. Runs jailed, one thread, one attack a process.
 */
#include "jail_attacks.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define CALL(...) (syscall(__VA_ARGS__) >= 0 ? 0 : errno)
#define THREADS_TRIED 1000

static int dial(int family, const char *address, uint16_t port, int kind, int protocol)
{
	struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = (int)syscall(SYS_socket, family, kind | SOCK_NONBLOCK, protocol);
	const void *at = family == AF_INET ? (const void *)&in : &in6;
	socklen_t n = family == AF_INET ? sizeof(in) : sizeof(in6);

	if (fd < 0)
		return errno;
	if (inet_pton(family, address, family == AF_INET ? (void *)&in.sin_addr : &in6.sin6_addr) != 1)
		return EINVAL;
	if (kind == SOCK_DGRAM)
		return syscall(SYS_sendto, fd, "x", 1, 0, at, n) == 1 ? 0 : errno;
	if (syscall(SYS_connect, fd, at, n) == 0 || errno == EINPROGRESS || errno == ENETUNREACH || errno == EHOSTUNREACH)
		return 0; /* nobody forbade it */
	return errno;
}

static int loopback(uint16_t port)
{
	return dial(AF_INET, "127.0.0.1", (uint16_t)(port + 1), SOCK_STREAM, 0);
}

static int loopback_other(uint16_t port)
{
	return dial(AF_INET, "127.0.0.2", port, SOCK_STREAM, 0);
}

static int loopback6(uint16_t port)
{
	return dial(AF_INET6, "::1", port, SOCK_STREAM, 0);
}

static int mapped(uint16_t port)
{
	return dial(AF_INET6, "::ffff:127.0.0.1", (uint16_t)(port + 1), SOCK_STREAM, 0);
}

static int metadata(uint16_t port)
{
	(void)port;
	return dial(AF_INET, "169.254.169.254", 80, SOCK_STREAM, 0);
}

static int private_net(uint16_t port)
{
	(void)port;
	return dial(AF_INET, "10.0.0.1", 443, SOCK_STREAM, 0);
}

static int private_datagram(uint16_t port)
{
	(void)port;
	return dial(AF_INET, "192.168.0.1", 53, SOCK_DGRAM, 0);
}

static int loopback_datagram(uint16_t port)
{
	return dial(AF_INET, "127.0.0.1", (uint16_t)(port + 1), SOCK_DGRAM, 0);
}

static int mapped_datagram(uint16_t port)
{
	(void)port;
	return dial(AF_INET6, "::ffff:10.0.0.1", 123, SOCK_DGRAM, 0);
}

static int unique_local(uint16_t port)
{
	(void)port;
	return dial(AF_INET6, "fd00:ec2::254", 80, SOCK_STREAM, 0);
}

static int global_address(uint16_t port)
{
	(void)port;
	return dial(AF_INET, "8.8.8.8", 443, SOCK_STREAM, 0);
}

static int listed(uint16_t port)
{
	return dial(AF_INET, "127.0.0.1", port, SOCK_STREAM, 0);
}

static int multipath(uint16_t port)
{
	return dial(AF_INET, "127.0.0.1", (uint16_t)(port + 1), SOCK_STREAM, 262);
}

static int raw_socket(uint16_t port)
{
	(void)port;
	return CALL(SYS_socket, AF_INET, SOCK_RAW, IPPROTO_ICMP);
}

static int packet_socket(uint16_t port)
{
	(void)port;
	return CALL(SYS_socket, AF_PACKET, SOCK_RAW, 0);
}

static int bind_port(uint16_t port)
{
	struct sockaddr_in in = { .sin_family = AF_INET };
	int fd = (int)syscall(SYS_socket, AF_INET, SOCK_STREAM, 0);

	(void)port;
	if (fd < 0 || syscall(SYS_bind, fd, &in, sizeof(in)) != 0)
		return errno;
	return 0;
}

/* A name without a file, which a process in the same network namespace could listen on. */
static int abstract_socket(uint16_t port)
{
	struct sockaddr_un un = { .sun_family = AF_UNIX, .sun_path = "\0ephemeral-jail-try" };
	int fd = (int)syscall(SYS_socket, AF_UNIX, SOCK_STREAM, 0);

	(void)port;
	if (fd < 0 || syscall(SYS_connect, fd, &un, offsetof(struct sockaddr_un, sun_path) + 19) != 0)
		return errno;
	return 0;
}

static int trace(uint16_t port)
{
	(void)port;
	return CALL(SYS_ptrace, PTRACE_SEIZE, 1, 0, 0);
}

static int mount_something(uint16_t port)
{
	(void)port;
	return CALL(SYS_mount, "x", "/proc", "tmpfs", 0, NULL);
}

static int load_bpf(uint16_t port)
{
	union bpf_attr attr = { .map_type = BPF_MAP_TYPE_ARRAY, .key_size = 4, .value_size = 8, .max_entries = 1 };

	(void)port;
	return CALL(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof(attr));
}

static int ring(uint16_t port)
{
	uint8_t params[120] = { 0 };

	(void)port;
	return CALL(SYS_io_uring_setup, 4, params);
}

static int key(uint16_t port)
{
	(void)port;
	return CALL(SYS_add_key, "user", "x", "y", 1, -4);
}

static int user_namespace(uint16_t port)
{
	(void)port;
	return CALL(SYS_unshare, CLONE_NEWUSER);
}

static int mount_namespace(uint16_t port)
{
	(void)port;
	return CALL(SYS_unshare, CLONE_NEWNS);
}

static int become_root(uint16_t port)
{
	(void)port;
	return CALL(SYS_setuid, 0);
}

static int more_descriptors(uint16_t port)
{
	struct rlimit r = { 100000, 100000 };

	(void)port;
	return CALL(SYS_prlimit64, 0, RLIMIT_NOFILE, &r, NULL);
}

static int make_file(uint16_t port)
{
	(void)port;
	return CALL(SYS_openat, AT_FDCWD, "/new", O_CREAT | O_WRONLY, 0600);
}

static int write_library(uint16_t port)
{
	(void)port;
	return CALL(SYS_openat, AT_FDCWD, "/lib64/ld-linux-x86-64.so.2", O_WRONLY);
}

static int write_cache(uint16_t port)
{
	(void)port;
	return CALL(SYS_openat, AT_FDCWD, "/etc/ld.so.cache", O_RDWR);
}

static int host_settings(uint16_t port)
{
	(void)port;
	return CALL(SYS_openat, AT_FDCWD, "/proc/sys/kernel/core_pattern", O_RDONLY);
}

static int host_files(uint16_t port)
{
	(void)port;
	return CALL(SYS_openat, AT_FDCWD, "/etc/passwd", O_RDONLY);
}

/* The first process that it sees is itself. */
static int first_process(uint16_t port)
{
	struct stat mine, first;

	(void)port;
	if (stat("/proc/self", &mine) != 0 || stat("/proc/1", &first) != 0)
		return errno;
	return mine.st_ino == first.st_ino ? ESRCH : 0;
}

static int signal_others(uint16_t port)
{
	(void)port;
	return CALL(SYS_kill, -1, 0);
}

static int second_program(uint16_t port)
{
	char *const argv[] = { (char *)"x", NULL };

	(void)port;
	return CALL(SYS_execve, "/lib64/ld-linux-x86-64.so.2", argv, NULL);
}

static int second_by_descriptor(uint16_t port)
{
	char *const argv[] = { (char *)"x", NULL };
	int fd = open("/lib64/ld-linux-x86-64.so.2", O_RDONLY);
	struct rlimit r;

	(void)port;
	if (fd < 0 || getrlimit(RLIMIT_NOFILE, &r) != 0)
		return errno;
	/* The number that the filter lets through. */
	if (fcntl(fd, F_DUPFD_CLOEXEC, (int)r.rlim_max) < 0)
		return errno;
	return CALL(SYS_execveat, (int)r.rlim_max, "", argv, NULL, AT_EMPTY_PATH);
}

static int fork_process(uint16_t port)
{
	long pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);

	(void)port;
	if (pid == 0)
		_exit(0);
	return pid > 0 ? 0 : errno;
}

static void *wait_for_ever(void *arg)
{
	for (;;)
		poll(NULL, 0, -1);
	return arg;
}

static int many_threads(uint16_t port)
{
	pthread_attr_t attr;

	(void)port;
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 65536);
	for (int i = 0; i < THREADS_TRIED; i++) {
		pthread_t thread;
		int rc = pthread_create(&thread, &attr, wait_for_ever, NULL);

		if (rc != 0)
			return rc;
	}
	return 0;
}

static int new_code(uint16_t port)
{
	void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)port;
	return p == MAP_FAILED ? errno : 0;
}

static int other_numbers(uint16_t port)
{
	(void)port;
	return CALL(0x40000000 | SYS_getpid);
}

static int dumpable(uint16_t port)
{
	(void)port;
	return CALL(SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
}

static int look_at_itself(uint16_t port)
{
	char text[64];
	int fd = open("/proc/self/status", O_RDONLY);

	(void)port;
	return fd >= 0 && read(fd, text, sizeof(text)) > 0 ? 0 : errno;
}

const struct attack attacks[] = {
	{ "look at itself", AT_ALL, false, true, look_at_itself },
	{ "dial what is listed", AT_BROKER, false, true, listed },
	{ "dial a global address", AT_BROKER, false, true, global_address },
	{ "dial loopback", AT_ALL, true, false, loopback },
	{ "dial loopback by another address", AT_ALL, true, false, loopback_other },
	{ "dial loopback over IPv6", AT_ALL, true, false, loopback6 },
	{ "dial loopback as IPv4 in IPv6", AT_ALL, true, false, mapped },
	{ "dial the metadata service", AT_BROKER, true, false, metadata },
	{ "dial a private network", AT_BROKER, true, false, private_net },
	{ "dial a unique local address", AT_BROKER, true, false, unique_local },
	{ "datagram to a private network", AT_BROKER, true, false, private_datagram },
	{ "datagram to loopback", AT_BROKER, true, false, loopback_datagram },
	{ "datagram as IPv4 in IPv6", AT_BROKER, true, false, mapped_datagram },
	{ "multipath TCP", AT_BROKER, false, false, multipath },
	{ "raw socket", AT_ALL, true, false, raw_socket },
	{ "packet socket", AT_ALL, true, false, packet_socket },
	{ "bind a TCP port", AT_ALL, false, false, bind_port },
	{ "abstract unix socket", AT_ALL, true, false, abstract_socket },
	{ "ptrace", AT_ALL, true, false, trace },
	{ "mount", AT_ALL, true, false, mount_something },
	{ "bpf", AT_ALL, false, false, load_bpf },
	{ "io_uring", AT_ALL, false, false, ring },
	{ "add_key", AT_ALL, false, false, key },
	{ "user namespace", AT_ALL, false, false, user_namespace },
	{ "mount namespace", AT_ALL, true, false, mount_namespace },
	{ "become root", AT_ALL, true, false, become_root },
	{ "more descriptors", AT_ALL, true, false, more_descriptors },
	{ "make a file", AT_ALL, true, false, make_file },
	{ "write to a library", AT_ALL, true, false, write_library },
	{ "write to the linker's cache", AT_ALL, true, false, write_cache },
	{ "read the host's settings", AT_ALL, true, false, host_settings },
	{ "read the host's files", AT_ALL, true, false, host_files },
	{ "see another process", AT_ALL, true, false, first_process },
	{ "signal others", AT_ALL, true, false, signal_others },
	{ "second program", AT_ALL, false, false, second_program },
	{ "second program by descriptor", AT_ALL, true, false, second_by_descriptor },
	{ "fork", AT_ALL, false, false, fork_process },
	{ "threads without end", AT_ALL, true, false, many_threads },
	{ "new code", AT_BROKER | AT_CHANNEL, false, false, new_code },
	{ "system calls by other numbers", AT_ALL, true, false, other_numbers },
	{ "become dumpable", AT_ALL, false, false, dumpable },
};
const size_t attack_count = sizeof(attacks) / sizeof(attacks[0]);
