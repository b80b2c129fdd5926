/*
 * The jail stage: `noded --role jail`. Born by keeper's clone3 in its namespaces and v2 cgroup, still root, one thread, one job
 * (job.h) on descriptor 3. It enters v1 cgroups, builds the tree, sets limits, drops every right, checks that it did, and execs.
 * What fails is written to the status pipe, which keeper reads; a successful exec closes it without a byte.
 *
 * Rights of root that are used here, and for what: mounts (tree), cgroup.procs (v1 limits), setgroups/setresuid/setresgid (own
 * uid), capset and the bounding set. After drop_rights() none is left.
 */
#include "jail/job.h"
#include "jail/landlock.h"
#include "jail/tree.h"
#include "roles.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIRST_FD 3       /* of the process that is exec'd */
#define KEEP_FD_HIGH 200 /* the status pipe waits here, above every descriptor that is moved; it is closed by exec */
#define NOFILE_MAX 65536

/* What the stage itself needs until it execs. */
struct jail_fds {
	int status;  /* pipe to keeper */
	int program; /* what is exec'd; -1 = by path */
};

static int read_job(struct jail_job *job, struct err *e)
{
	struct stat st;
	uint8_t *bytes;
	size_t len, got = 0;
	int rc;

	if (fstat(JAIL_FD_JOB, &st) != 0)
		return err_set_errno(e, "descriptor %d has no job (this role is started by noded itself)", JAIL_FD_JOB);
	if (!S_ISREG(st.st_mode) || st.st_size <= 0 || st.st_size > JAIL_JOB_MAX)
		return err_set(e, ERR_INVALID, "descriptor %d is no job description", JAIL_FD_JOB);
	len = (size_t)st.st_size;
	bytes = malloc(len);
	if (!bytes)
		return err_set(e, ERR_NOMEM, "no memory");
	while (got < len) {
		ssize_t n = pread(JAIL_FD_JOB, bytes + got, len - got, (off_t)got);

		if (n <= 0) {
			free(bytes);
			return err_set_errno(e, "read job");
		}
		got += (size_t)n;
	}
	rc = jail_job_decode(bytes, len, job, e);
	free(bytes);
	return rc;
}

static int enter_groups(const struct jail_job *job, struct err *e)
{
	for (uint32_t i = 0; i < job->group_count; i++) {
		int fd = open(job->groups[i], O_WRONLY | O_CLOEXEC);

		if (fd < 0)
			return err_set_errno(e, "open %s", job->groups[i]);
		if (write(fd, "0", 1) != 1) {
			err_set_errno(e, "enter %s", job->groups[i]);
			close(fd);
			return -1;
		}
		close(fd);
	}
	/* After entering: the namespace's root is where we stand now. */
	if (job->confined && unshare(CLONE_NEWCGROUP) != 0)
		return err_set_errno(e, "cgroup namespace");
	return 0;
}

/* A noded that its unit shields from the OOM killer would pass that on, and a group over its limit could not be brought below it.
 */
static int be_killable(struct err *e)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, "0", 1) == 1;

	if (!done)
		err_set_errno(e, "write /proc/self/oom_score_adj");
	if (fd >= 0)
		close(fd);
	return done ? 0 : -1;
}

static int limit(int what, const char *name, rlim_t value, struct err *e)
{
	struct rlimit r = { .rlim_cur = value, .rlim_max = value };

	if (setrlimit((__rlimit_resource_t)what, &r) != 0)
		return err_set_errno(e, "limit %s", name);
	return 0;
}

static int set_limits(const struct jail_job *job, struct err *e)
{
	if (limit(RLIMIT_CORE, "CORE", 0, e) || limit(RLIMIT_NOFILE, "NOFILE", job->nofile, e) ||
			limit(RLIMIT_FSIZE, "FSIZE", job->fsize, e) || limit(RLIMIT_MEMLOCK, "MEMLOCK", job->memlock, e) ||
			limit(RLIMIT_MSGQUEUE, "MSGQUEUE", 0, e))
		return -1;
	return 0;
}

/*
 * The filter allows one exec, of the descriptor whose number is the limit of descriptors: it is put there before the limit is set,
 * is closed by the exec, and nobody below the limit can have this number again.
 */
static int keep_program(const struct jail_job *job, struct jail_fds *keep, struct err *e)
{
	int fd = keep->program;

	if (fd < 0 && job->filter_len > 0) {
		fd = open(job->argv[0], O_PATH | O_CLOEXEC);
		if (fd < 0)
			return err_set_errno(e, "open %s", job->argv[0]);
	}
	if (fd < 0)
		return 0;
	if (job->nofile <= KEEP_FD_HIGH || job->nofile > NOFILE_MAX)
		return err_set(e, ERR_INTERNAL, "limit of %u descriptors", job->nofile);
	if (limit(RLIMIT_NOFILE, "NOFILE", job->nofile + 1, e))
		return -1;
	keep->program = dup3(fd, (int)job->nofile, O_CLOEXEC);
	return keep->program < 0 ? err_set_errno(e, "keep the program") : 0;
}

static bool close_between(unsigned int first, unsigned int last)
{
	return first > last || syscall(SYS_close_range, first, last, 0) == 0;
}

/* Moves descriptors JAIL_FD_FIRST + i to 3 + i; everything else but stdio is closed, the status pipe and the program at exec. */
static int place_fds(const struct jail_job *job, struct jail_fds *keep, struct err *e)
{
	unsigned int n = job->fd_count, program;

	keep->status = dup3(JAIL_FD_STATUS, KEEP_FD_HIGH, O_CLOEXEC);
	if (keep->status < 0)
		return err_set_errno(e, "keep the status pipe");
	if (keep_program(job, keep, e))
		return -1;
	program = keep->program >= 0 ? (unsigned int)keep->program : KEEP_FD_HIGH + 1;
	for (unsigned int i = 0; i < n; i++)
		if (dup2(JAIL_FD_FIRST + (int)i, FIRST_FD + (int)i) < 0)
			return err_set_errno(e, "descriptor %u was not inherited", JAIL_FD_FIRST + i);
	for (uint32_t i = 0; i < job->listen_count; i++)
		if (fcntl(FIRST_FD + (int)job->listens[i].fd, F_SETFD, FD_CLOEXEC) != 0)
			return err_set_errno(e, "descriptor of a listener");
	if (job->stdio_fd >= 0 && (dup2(job->stdio_fd, 1) < 0 || dup2(job->stdio_fd, 2) < 0))
		return err_set_errno(e, "stdio");
	if (keep->program < 0)
		close((int)program);
	if (!close_between(FIRST_FD + n, KEEP_FD_HIGH - 1) || !close_between(KEEP_FD_HIGH + 1, program - 1) ||
			!close_between(program + 1, ~0U))
		return err_set_errno(e, "close what is not meant for the jail");
	return 0;
}

static int drop_capabilities(struct err *e)
{
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[2] = { { 0 }, { 0 } };

	if (syscall(SYS_capset, &head, none) != 0)
		return err_set_errno(e, "drop capabilities");
	if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) != 0)
		return err_set_errno(e, "drop ambient capabilities");
	return 0;
}

static int drop_rights(const struct jail_job *job, struct err *e)
{
	gid_t group = job->group;
	uid_t uid[3];
	gid_t gid[3];

	for (int cap = 0; cap < 64; cap++)
		if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) != 0) {
			if (errno == EINVAL && cap > 0)
				break;
			return err_set_errno(e, "drop capability %d from the bounding set", cap);
		}
	if (setgroups(group != 0, &group) != 0)
		return err_set_errno(e, "setgroups");
	if (setresgid(job->gid, job->gid, job->gid) != 0 || setresuid(job->uid, job->uid, job->uid) != 0)
		return err_set_errno(e, "become uid %u gid %u", job->uid, job->gid);
	if (drop_capabilities(e))
		return -1;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0)
		return err_set_errno(e, "prctl");
	/* Not believed until seen: a process that kept a right must not meet a guest. */
	if (getresuid(&uid[0], &uid[1], &uid[2]) != 0 || getresgid(&gid[0], &gid[1], &gid[2]) != 0)
		return err_set_errno(e, "read back ids");
	for (int i = 0; i < 3; i++)
		if (uid[i] != job->uid || gid[i] != job->gid)
			return err_set(e, ERR_INTERNAL, "ids were not dropped");
	if (setuid(0) == 0 || setgid(0) == 0)
		return err_set(e, ERR_INTERNAL, "root could be taken back");
	return 0;
}

static int install_filter(const struct jail_job *job, struct err *e)
{
	struct sock_fprog prog;

	if (job->filter_len == 0)
		return 0;
	prog = (struct sock_fprog){ .len = (unsigned short)(job->filter_len / sizeof(struct sock_filter)),
		.filter = (void *)job->filter };
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog, 0, 0) != 0)
		return err_set_errno(e, "seccomp filter");
	return 0;
}

static void reset_signals(void)
{
	sigset_t none;

	for (int s = 1; s < SIGRTMIN; s++)
		signal(s, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Before the host's tree is out of reach. A mount of it would belong to another namespace, so the file is exec'd by descriptor. */
static int open_self(const struct jail_job *job, struct err *e)
{
	int fd;

	if (!job->self)
		return -1;
	fd = open("/proc/self/exe", O_PATH | O_CLOEXEC);
	if (fd < 0)
		err_set_errno(e, "open noded itself");
	return fd;
}

static int enter(const struct jail_job *job, struct jail_fds *keep, struct err *e)
{
	keep->program = open_self(job, e);
	if ((job->self && keep->program < 0) || enter_groups(job, e) || be_killable(e))
		return -1;
	if (setsid() < 0)
		return err_set_errno(e, "setsid");
	if (job->confined && sethostname("vm", 2) != 0)
		return err_set_errno(e, "sethostname");
	umask(022); /* the tree is for another uid to walk */
	if (job->confined && jail_tree_enter(job, e))
		return -1;
	umask(077);
	/* Limits last: the status pipe waits at a number that NOFILE may forbid. */
	if (place_fds(job, keep, e) || set_limits(job, e) || drop_rights(job, e))
		return -1;
	reset_signals();
	if (landlock_enter(job, keep->program, e))
		return -1;
	return install_filter(job, e);
}

int jail_main(void)
{
	static char *no_env[] = { NULL };
	struct jail_fds keep = { .status = JAIL_FD_STATUS, .program = -1 };
	struct jail_job job = { .stdio_fd = -1 };
	struct err e = { .code = ERR_NONE };

	if (read_job(&job, &e) == 0 && enter(&job, &keep, &e) == 0) {
		char **env = job.env ? job.env : no_env;

		if (keep.program >= 0)
			syscall(SYS_execveat, keep.program, "", job.argv, env, AT_EMPTY_PATH);
		else if (job.argv)
			execve(job.argv[0], job.argv, env);
		err_set_errno(&e, "exec %s", job.argv ? job.argv[0] : "nothing");
	}
	if (job.name[0])
		err_wrap(&e, "jail of %s", job.name);
	/* A pipe holds this much at once; if even that fails the exit status is all that keeper gets. */
	if (write(keep.status, e.text, strlen(e.text)) < 0)
		return 126;
	return 125;
}
