/*
 * Restricts the jail stage, and so what it execs, by Landlock (landlock.h): read the tree, write to devices and to what the job
 * says, execute the program and the linker, bind and connect no TCP port where the job says so, reach no abstract socket and signal
 * no process outside. Root no more, one thread. Numbers are the kernel's interface; the headers of a build host may be older than
 * the kernel that it is built for.
 */
#include "jail/landlock.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SYS_CREATE_RULESET 444
#define SYS_ADD_RULE 445
#define SYS_RESTRICT_SELF 446
#define CREATE_RULESET_VERSION 1U
#define RULE_PATH_BENEATH 1
#define LOADER "/lib64/ld-linux-x86-64.so.2"
#define FIRST_FD 3

enum fs_right {
	FS_EXECUTE = 1 << 0,
	FS_WRITE_FILE = 1 << 1,
	FS_READ_FILE = 1 << 2,
	FS_READ_DIR = 1 << 3,
	FS_ALL_1 = (1 << 13) - 1, /* ABI 1: and making and removing names of every kind */
	FS_REFER = 1 << 13,       /* ABI 2 */
	FS_TRUNCATE = 1 << 14,    /* ABI 3 */
	FS_IOCTL_DEV = 1 << 15,   /* ABI 5 */
};
enum net_right { NET_BIND_TCP = 1, NET_CONNECT_TCP = 2 };        /* ABI 4 */
enum scope { SCOPE_ABSTRACT_UNIX_SOCKET = 1, SCOPE_SIGNAL = 2 }; /* ABI 6 */

struct ruleset_attr {
	uint64_t fs, net, scoped;
};
struct path_beneath_attr {
	uint64_t allowed;
	int32_t parent_fd;
} __attribute__((packed));

int landlock_abi(void)
{
	long abi = syscall(SYS_CREATE_RULESET, NULL, 0, CREATE_RULESET_VERSION);

	return abi > 0 ? (int)abi : 0;
}

static uint64_t handled_fs(int abi)
{
	uint64_t fs = FS_ALL_1;

	if (abi >= 2)
		fs |= FS_REFER;
	if (abi >= 3)
		fs |= FS_TRUNCATE;
	if (abi >= 5)
		fs |= FS_IOCTL_DEV;
	return fs;
}

/* Takes the descriptor. Of a file only what a file has may be said. */
static int allow_fd(int ruleset, uint64_t handled, int fd, uint64_t rights, const char *what, struct err *e)
{
	const uint64_t of_files = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE | FS_IOCTL_DEV;
	struct path_beneath_attr rule = { .parent_fd = fd };
	struct stat st;
	int rc = 0;

	if (fd < 0)
		return errno == ENOENT ? 0 : err_set_errno(e, "landlock: open %s", what);
	if (fstat(fd, &st) != 0) {
		rc = err_set_errno(e, "landlock: look at %s", what);
	} else {
		rule.allowed = rights & handled & (S_ISDIR(st.st_mode) ? UINT64_MAX : of_files);
		/* EBADFD: a file that no path leads to, which needs no rule. */
		if (syscall(SYS_ADD_RULE, ruleset, RULE_PATH_BENEATH, &rule, 0) != 0 && errno != EBADFD)
			rc = err_set_errno(e, "landlock: rule of %s", what);
	}
	close(fd);
	return rc;
}

static int allow(int ruleset, uint64_t handled, const char *path, uint64_t rights, struct err *e)
{
	return allow_fd(ruleset, handled, open(path, O_PATH | O_CLOEXEC), rights, path, e);
}

/* Directories that the job lets it write to. */
static int allow_writes(int ruleset, uint64_t handled, const struct jail_job *job, struct err *e)
{
	const uint64_t rights = ~(uint64_t)(FS_EXECUTE | FS_IOCTL_DEV);
	char dir[JAIL_PATH_MAX];

	for (uint32_t i = 0; i < job->bind_count; i++)
		if ((job->binds[i].flags & JAIL_BIND_WRITE) && allow(ruleset, handled, job->binds[i].target, rights, e))
			return -1;
	if (job->listen_count == 0)
		return 0;
	if (!text_fmt(dir, sizeof(dir), "%.*s", (int)(strrchr(job->listens[0].path, '/') - job->listens[0].path),
			    job->listens[0].path))
		return err_set(e, ERR_INTERNAL, "path of a socket is too long");
	return allow(ruleset, handled, dir, rights, e);
}

/* Files that are inherited may be opened again by /proc/self/fd/N, to be read. */
static int allow_inherited(int ruleset, uint64_t handled, const struct jail_job *job, struct err *e)
{
	for (uint32_t i = 0; i < job->fd_count; i++) {
		int fd = FIRST_FD + (int)i;
		struct stat st;

		if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
			continue;
		if (allow_fd(ruleset, handled, fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FD), FS_READ_FILE, "an inherited file", e))
			return -1;
	}
	return 0;
}

static int fill(int ruleset, uint64_t handled, const struct jail_job *job, int program, struct err *e)
{
	uint64_t tree = FS_READ_FILE | FS_READ_DIR | (job->landlock & JAIL_LANDLOCK_EXEC ? (uint64_t)FS_EXECUTE : 0);

	if (allow(ruleset, handled, "/", tree, e) ||
			allow(ruleset, handled, "/dev", FS_READ_FILE | FS_READ_DIR | FS_WRITE_FILE | FS_IOCTL_DEV, e) ||
			allow(ruleset, handled, LOADER, FS_READ_FILE | FS_EXECUTE, e))
		return -1;
	if (program >= 0 ? allow_fd(ruleset, handled, fcntl(program, F_DUPFD_CLOEXEC, FIRST_FD), FS_READ_FILE | FS_EXECUTE,
					   "the program", e)
			 : allow(ruleset, handled, job->argv[0], FS_READ_FILE | FS_EXECUTE, e))
		return -1;
	return allow_writes(ruleset, handled, job, e) || allow_inherited(ruleset, handled, job, e) ? -1 : 0;
}

int landlock_enter(const struct jail_job *job, int program, struct err *e)
{
	int abi = landlock_abi(), ruleset, rc;
	struct ruleset_attr attr = { .fs = handled_fs(abi) };
	size_t size = sizeof(attr.fs);

	if (abi == 0 || !(job->landlock & JAIL_LANDLOCK))
		return 0;
	if (abi >= 4) {
		size += sizeof(attr.net);
		attr.net = (job->landlock & JAIL_LANDLOCK_NO_BIND ? (uint64_t)NET_BIND_TCP : 0) |
			   (job->landlock & JAIL_LANDLOCK_NO_CONNECT ? (uint64_t)NET_CONNECT_TCP : 0);
	}
	if (abi >= 6) {
		size += sizeof(attr.scoped);
		attr.scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL;
	}
	ruleset = (int)syscall(SYS_CREATE_RULESET, &attr, size, 0);
	if (ruleset < 0)
		return err_set_errno(e, "landlock: rules");
	rc = fill(ruleset, attr.fs, job, program, e);
	if (rc == 0 && syscall(SYS_RESTRICT_SELF, ruleset, 0) != 0)
		rc = err_set_errno(e, "landlock: enter");
	close(ruleset);
	return rc;
}
