/*
 * Builds a jailed process' file tree and pivots into it (tree.h). Runs in the jail stage: root, one thread, its own mount and pid
 * namespaces. Every mount dies with the namespace; the host sees none of them.
 */
#include "jail/tree.h"

#include "common/text.h"
#include "roles.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define TREE_OPTIONS "size=256k,nr_inodes=256,mode=0755" /* names only: the content comes by binds */
#define SOCKETS_OPTIONS "size=64k,nr_inodes=16,mode=0700"
#define LISTEN_BACKLOG 16 /* a VMM may block in connect() while it is full, and one connection is taken */

/* root + path in the new tree. */
static int place(const struct jail_job *job, const char *path, char *out, size_t size, struct err *e)
{
	if (path[0] != '/' || strstr(path, "/../") != NULL)
		return err_set(e, ERR_INTERNAL, "path in the tree is not absolute: %s", path);
	if (!text_fmt(out, size, "%s%s", job->root, path))
		return err_set(e, ERR_INTERNAL, "path in the tree is too long: %s", path);
	return 0;
}

/* Makes the directories above `full`; what stands below job->root is ours, so links are of our own making. */
static int make_parents(const struct jail_job *job, char *full, struct err *e)
{
	for (char *p = full + strlen(job->root) + 1; (p = strchr(p, '/')) != NULL; p++) {
		*p = '\0';
		if (mkdir(full, 0755) != 0 && errno != EEXIST) {
			err_set_errno(e, "mkdir %s", full);
			*p = '/';
			return -1;
		}
		*p = '/';
	}
	return 0;
}

static int make_target(const char *full, bool directory, struct err *e)
{
	int fd;

	if (directory) {
		if (mkdir(full, 0755) != 0 && errno != EEXIST)
			return err_set_errno(e, "mkdir %s", full);
		return 0;
	}
	fd = open(full, O_CREAT | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0444);
	if (fd < 0)
		return err_set_errno(e, "create %s", full);
	close(fd);
	return 0;
}

/* No group of the host's has to be lent, and the host's own node may be closed to everybody but root. */
static int make_own_device(const struct jail_job *job, const struct jail_bind *b, const char *full, dev_t device, struct err *e)
{
	if (mknod(full, S_IFCHR | 0600, device) != 0 || chown(full, job->uid, job->gid) != 0)
		return err_set_errno(e, "make a node for %s", b->source);
	return 0;
}

static int bind_one(const struct jail_job *job, const struct jail_bind *b, struct err *e)
{
	unsigned long flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID;
	char full[2 * JAIL_PATH_MAX];
	struct stat st;

	if (place(job, b->target, full, sizeof(full), e))
		return -1;
	if (stat(b->source, &st) != 0) {
		if (b->flags & JAIL_BIND_OPTIONAL)
			return 0;
		return err_set_errno(e, "%s", b->source);
	}
	if (make_parents(job, full, e))
		return -1;
	if ((b->flags & JAIL_BIND_OWN) && S_ISCHR(st.st_mode))
		return make_own_device(job, b, full, st.st_rdev, e);
	if (make_target(full, S_ISDIR(st.st_mode), e))
		return -1;
	if (mount(b->source, full, NULL, MS_BIND, NULL) != 0)
		return err_set_errno(e, "bind %s", b->source);
	if (b->flags & JAIL_BIND_WRITE)
		flags = (flags & ~(unsigned long)MS_RDONLY) | MS_NOEXEC;
	if (!(b->flags & JAIL_BIND_DEVICE))
		flags |= MS_NODEV;
	if (mount(NULL, full, NULL, flags, NULL) != 0)
		return err_set_errno(e, "set the rights of %s", b->target);
	return 0;
}

static int link_one(const struct jail_job *job, const struct jail_link *l, struct err *e)
{
	char full[2 * JAIL_PATH_MAX];

	if (place(job, l->path, full, sizeof(full), e) || make_parents(job, full, e))
		return -1;
	if (symlink(l->target, full) != 0)
		return err_set_errno(e, "link %s", l->path);
	return 0;
}

/* The directory of the job's sockets: names only, and few of them. */
static int mount_sockets(const struct jail_job *job, struct err *e)
{
	char full[2 * JAIL_PATH_MAX], options[128], *name;

	if (job->listen_count == 0)
		return 0;
	if (place(job, job->listens[0].path, full, sizeof(full), e) || make_parents(job, full, e))
		return -1;
	name = strrchr(full, '/');
	*name = '\0';
	if (!text_fmt(options, sizeof(options), SOCKETS_OPTIONS ",uid=%u,gid=%u", job->uid, job->gid))
		return err_set(e, ERR_INTERNAL, "mount options are too long");
	if (mount("sockets", full, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options) != 0)
		return err_set_errno(e, "mount the directory of sockets");
	return 0;
}

/* In the new tree already: the whole path of a socket has to fit into 107 bytes. */
static int bind_listens(const struct jail_job *job, struct err *e)
{
	for (uint32_t i = 0; i < job->listen_count; i++) {
		const struct jail_listen *l = &job->listens[i];
		struct sockaddr_un at = { .sun_family = AF_UNIX };

		if (!text_copy(at.sun_path, sizeof(at.sun_path), l->path))
			return err_set(e, ERR_INTERNAL, "path of a socket is too long: %s", l->path);
		if (bind(JAIL_FD_FIRST + (int)l->fd, (const struct sockaddr *)&at, sizeof(at)) != 0 ||
				chown(l->path, job->uid, job->gid) != 0)
			return err_set_errno(e, "bind %s", l->path);
		if (listen(JAIL_FD_FIRST + (int)l->fd, LISTEN_BACKLOG) != 0)
			return err_set_errno(e, "listen on %s", l->path);
	}
	return 0;
}

static int mount_proc(const struct jail_job *job, struct err *e)
{
	char full[2 * JAIL_PATH_MAX];

	if (place(job, "/proc", full, sizeof(full), e) || make_target(full, true, e))
		return -1;
	/* Only the processes of the jail's own pid namespace, and nothing about the machine. */
	if (mount("proc", full, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid") != 0)
		return err_set_errno(e, "mount proc subset=pid (Linux 5.8 or newer is needed)");
	return 0;
}

int jail_tree_enter(const struct jail_job *job, struct err *e)
{
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
		return err_set_errno(e, "make mounts private");
	/* Devices are allowed for the nodes that are made here; afterwards nobody in the jail can write to it or has the right to.
	 */
	if (mount("tree", job->root, "tmpfs", MS_NOSUID, TREE_OPTIONS) != 0)
		return err_set_errno(e, "mount the tree over %s", job->root);
	for (uint32_t i = 0; i < job->link_count; i++)
		if (link_one(job, &job->links[i], e))
			return -1;
	for (uint32_t i = 0; i < job->bind_count; i++)
		if (bind_one(job, &job->binds[i], e))
			return -1;
	if (mount_proc(job, e) || mount_sockets(job, e))
		return -1;
	if (mount(NULL, job->root, NULL, MS_REMOUNT | MS_RDONLY | MS_NOSUID, TREE_OPTIONS) != 0)
		return err_set_errno(e, "make the tree read-only");
	/* The old root ends up stacked below the new one at the same place, and is let go there. */
	if (chdir(job->root) != 0)
		return err_set_errno(e, "chdir %s", job->root);
	if (syscall(SYS_pivot_root, ".", ".") != 0)
		return err_set_errno(e, "pivot_root");
	if (umount2(".", MNT_DETACH) != 0)
		return err_set_errno(e, "let go of the host's tree");
	if (chdir("/") != 0)
		return err_set_errno(e, "chdir /");
	return bind_listens(job, e);
}
