/*
 * What the jail stage is told: a description of one process, as numbers and strings, written by keeper into a sealed memfd. The
 * stage does what it says and decides nothing, so this struct is the complete list of what a jailed process gets.
 *
 * Pure codec; used by keeper (encode) and by the jail stage (decode, as root, with bounds although the writer is ours).
 */
#ifndef NODED_JAIL_JOB_H
#define NODED_JAIL_JOB_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

#define JAIL_JOB_MAX (256 * 1024)
#define JAIL_BINDS_MAX 48
#define JAIL_LINKS_MAX 16
#define JAIL_ARGS_MAX 128
#define JAIL_ENV_MAX 16
#define JAIL_GROUPS_MAX 8
#define JAIL_LISTENS_MAX 2
#define JAIL_FDS_MAX 16
#define JAIL_PATH_MAX 1024
#define JAIL_ARG_MAX 4096
#define JAIL_FILTER_MAX (4096 * 8) /* a BPF program of 4096 instructions */

enum jail_bind_flags {
	JAIL_BIND_DEVICE = 1,   /* a device node; all else is mounted nodev */
	JAIL_BIND_OPTIONAL = 2, /* skipped when the source is not there */
	JAIL_BIND_OWN = 4,      /* with DEVICE: a new node of the same device that the process' uid alone may open */
	JAIL_BIND_WRITE = 8,    /* a directory that the process may write to as far as its owner and mode let it */
};

enum jail_landlock_flags {
	JAIL_LANDLOCK = 1,            /* where the kernel has it; without it the rest means nothing */
	JAIL_LANDLOCK_NO_BIND = 2,    /* no TCP port */
	JAIL_LANDLOCK_NO_CONNECT = 4, /* no TCP port */
	JAIL_LANDLOCK_EXEC = 8,       /* any program of the tree, not only the job's */
};

struct jail_bind {
	char *source; /* absolute; symbolic links are followed on the host's side */
	char *target; /* absolute, in the new tree; directories and files are made as needed */
	uint8_t flags;
};

struct jail_link {
	char *target;
	char *path;
};

/* A unix socket that others listen on, which the process may connect to: bound in its tree, before it is there. Its directory is a
 * small file system of its own, and the only place where the process may make names. */
struct jail_listen {
	uint32_t fd; /* which inherited descriptor, counted from 0: an unbound socket; closed by the exec */
	char *path;  /* absolute, in the new tree: "/v/vsock_1024"; all of a job's are in one directory */
};

struct jail_job {
	char name[64];            /* for error texts: "vmm vm_..." */
	char root[JAIL_PATH_MAX]; /* an empty directory, where the new tree is mounted over */
	uint64_t fsize;           /* bytes a file may grow to */
	uint32_t uid, gid;
	uint32_t group; /* one supplementary group (kvm); 0 = none */
	uint32_t nofile;
	uint32_t memlock;  /* bytes */
	int32_t stdio_fd;  /* which descriptor of the new process is also its stdout and stderr; -1: keeper's stderr */
	uint32_t fd_count; /* inherited descriptors, from JAIL_FD_FIRST */
	uint32_t bind_count, link_count, group_count, argc, env_count, filter_len, listen_count;
	struct jail_bind *binds;
	struct jail_link *links;
	struct jail_listen listens[JAIL_LISTENS_MAX];
	char **groups; /* files that put the writer into a v1 cgroup */
	char **argv;   /* argv[0] = path in the new tree, unless `self` */
	char **env;
	uint8_t *filter;  /* seccomp program, sock_filter array as bytes; filter_len 0 = none */
	uint8_t landlock; /* enum jail_landlock_flags */
	bool confined;    /* false: no tree of its own (insecure_no_jail); all else still holds */
	bool self;        /* exec noded itself, the very file that runs now, whatever stands at its path */
};

/* Builders: copy their strings; false when a bound is reached or memory ran out. */
bool jail_job_bind(struct jail_job *j, const char *source, const char *target, uint8_t flags) EPH_MUST_CHECK;
bool jail_job_link(struct jail_job *j, const char *target, const char *path) EPH_MUST_CHECK;
bool jail_job_listen(struct jail_job *j, uint32_t fd, const char *path) EPH_MUST_CHECK;
bool jail_job_group(struct jail_job *j, const char *path) EPH_MUST_CHECK;
bool jail_job_arg(struct jail_job *j, const char *arg) EPH_MUST_CHECK;
bool jail_job_env(struct jail_job *j, const char *env) EPH_MUST_CHECK;
void jail_job_free(struct jail_job *j);

void jail_job_encode(const struct jail_job *j, struct buf *out);
int jail_job_decode(const void *p, size_t n, struct jail_job *out, struct err *e) EPH_MUST_CHECK;

#endif
