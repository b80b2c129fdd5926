/*
 * Assembles the final root: squashfs from the virtio disk, a bounded tmpfs over it, then /proc, /sys, /dev and the rest.
 * Owns the layout below /m of the initramfs, which nobody can reach once the root was switched. Runs once, may block.
 */
#include "mounts.h"

#include "common/clock.h"
#include "common/text.h"
#include "fsutil.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

/* The writable layer, /tmp included, may take this part of the memory. */
#define OVERLAY_PERCENT 25
#define DISK_WAIT_MS 5000
#define SHM_OPTIONS "mode=1777,size=16m,nr_inodes=4k"
/* Terminals hold memory that counts against no cgroup: 64 of them are few MiB. */
#define PTS_OPTIONS "newinstance,mode=0620,ptmxmode=0666,max=64"

/* Name of the first virtio disk, waiting for its driver. */
static int find_disk(char *out, size_t size, struct err *e)
{
	int64_t deadline = clock_boot_ms() + DISK_WAIT_MS;
	const struct timespec pause_2ms = { .tv_sec = 0, .tv_nsec = 2000000 };

	for (;;) {
		DIR *d = opendir("/sys/block");
		struct dirent *ent;
		bool found = false;

		if (d == NULL)
			return err_set_errno(e, "open /sys/block");
		while (!found && (ent = readdir(d)) != NULL)
			found = strncmp(ent->d_name, "vd", 2) == 0 && text_fmt(out, size, "/dev/%s", ent->d_name);
		closedir(d);
		if (found && access(out, R_OK) == 0)
			return 0;
		if (clock_boot_ms() >= deadline)
			return err_set(e, ERR_TIMEOUT, "no virtio disk with the root file system came up in %d ms", DISK_WAIT_MS);
		nanosleep(&pause_2ms, NULL);
	}
}

static int make_dir(const char *path, mode_t mode, struct err *e)
{
	if (mkdir(path, mode) < 0 && errno != EEXIST)
		return err_set_errno(e, "mkdir %s", path);
	return 0;
}

static int mount_layers(const char *disk, struct err *e)
{
	static const char *const dirs[] = { "/m", "/m/image", "/m/rw", "/m/root" };
	char options[64];

	for (size_t i = 0; i < sizeof dirs / sizeof dirs[0]; i++)
		if (make_dir(dirs[i], 0755, e) < 0)
			return -1;
	if (mount(disk, "/m/image", "squashfs", MS_RDONLY | MS_NODEV | MS_NOSUID, NULL) < 0)
		return err_set_errno(e, "mount the root file system from %s", disk);
	if (!text_fmt(options, sizeof options, "mode=0755,size=%d%%", OVERLAY_PERCENT))
		return err_set(e, ERR_INTERNAL, "overlay options");
	if (mount("rw", "/m/rw", "tmpfs", MS_NODEV | MS_NOSUID, options) < 0)
		return err_set_errno(e, "mount the writable layer");
	if (make_dir("/m/rw/upper", 0755, e) < 0 || make_dir("/m/rw/work", 0755, e) < 0 || make_dir("/m/rw/tmp", 0755, e) < 0)
		return -1;
	if (chmod("/m/rw/tmp", 01777) < 0)
		return err_set_errno(e, "chmod /tmp");
	if (mount("root", "/m/root", "overlay", MS_NODEV | MS_NOSUID, "lowerdir=/m/image,upperdir=/m/rw/upper,workdir=/m/rw/work") <
			0)
		return err_set_errno(e, "mount the overlay");
	/* /tmp is a plain tmpfs, but shares the bound of the writable layer. */
	if (mount("/m/rw/tmp", "/m/root/tmp", NULL, MS_BIND, NULL) < 0)
		return err_set_errno(e, "bind /tmp");
	return 0;
}

/* Only what programs expect: no disk, no channel, no console is to be seen in there. */
static int make_dev(struct err *e)
{
	static const struct {
		const char *path;
		unsigned int minor;
		unsigned int major;
	} nodes[] = {
		{ "/dev/null", 3, 1 },
		{ "/dev/zero", 5, 1 },
		{ "/dev/full", 7, 1 },
		{ "/dev/random", 8, 1 },
		{ "/dev/urandom", 9, 1 },
		{ "/dev/tty", 0, 5 },
	};
	static const struct {
		const char *path, *to;
	} links[] = {
		{ "/dev/fd", "/proc/self/fd" },
		{ "/dev/stdin", "/proc/self/fd/0" },
		{ "/dev/stdout", "/proc/self/fd/1" },
		{ "/dev/stderr", "/proc/self/fd/2" },
		{ "/dev/ptmx", "pts/ptmx" },
	};

	if (mount("dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k") < 0)
		return err_set_errno(e, "mount /dev");
	for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++)
		if (mknod(nodes[i].path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0 ||
				chmod(nodes[i].path, 0666) < 0)
			return err_set_errno(e, "make %s", nodes[i].path);
	for (size_t i = 0; i < sizeof links / sizeof links[0]; i++)
		if (symlink(links[i].to, links[i].path) < 0)
			return err_set_errno(e, "link %s", links[i].path);
	if (make_dir("/dev/pts", 0755, e) < 0 || make_dir("/dev/shm", 01777, e) < 0)
		return -1;
	if (mount("pts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, PTS_OPTIONS) < 0)
		return err_set_errno(e, "mount /dev/pts");
	if (mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, SHM_OPTIONS) < 0)
		return err_set_errno(e, "mount /dev/shm");
	return 0;
}

static int mount_kernel(struct err *e)
{
	const unsigned long safe = MS_NOSUID | MS_NODEV | MS_NOEXEC;

	if (mount("proc", "/proc", "proc", safe, NULL) < 0)
		return err_set_errno(e, "mount /proc");
	if (mount("sys", "/sys", "sysfs", safe | MS_RDONLY, NULL) < 0)
		return err_set_errno(e, "mount /sys");
	if (mount("cgroup", "/sys/fs/cgroup", "cgroup2", safe, NULL) < 0)
		return err_set_errno(e, "mount /sys/fs/cgroup");
	if (mount("run", "/run", "tmpfs", safe, "mode=0755,size=1m") < 0)
		return err_set_errno(e, "mount /run");
	return make_dev(e);
}

int mounts_enter_root(struct err *e)
{
	char disk[64];

	if (find_disk(disk, sizeof disk, e) < 0 || mount_layers(disk, e) < 0)
		return -1;
	if (chdir("/m/root") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
		return err_set_errno(e, "enter the new root");
	return mount_kernel(e);
}
