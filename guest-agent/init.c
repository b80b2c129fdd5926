/*
 * The agent as init of the machine: what must be true before anything else can work, and how the machine ends.
 * Owns no state. Runs once, on the only thread, before the channel is open; may block on the kernel.
 */
#include "init.h"

#include "common/log.h"
#include "common/text.h"
#include "fsutil.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/reboot.h>
#include <net/if.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MODULE_LIST_MAX 4096
#define HOSTNAME "ephemeral"

/* Descriptors 0 to 2 must exist, or the next open takes their place and a log line goes into the channel. */
static void open_standard_fds(void)
{
	int fd = open("/dev/console", O_RDWR | O_NOCTTY);

	if (fd < 0)
		fd = open("/dev/kmsg", O_WRONLY);
	if (fd < 0)
		fd = open("/dev/null", O_RDWR);
	for (int i = 0; i < 3 && fd >= 0; i++)
		if (fd != i)
			dup2(fd, i);
	if (fd > 2)
		close(fd);
}

int init_early(struct boot_options *o, struct err *e)
{
	char cmdline[4096];

	umask(022);
	if (mount("dev", "/dev", "devtmpfs", MS_NOSUID | MS_NOEXEC, NULL) < 0 && errno != EBUSY)
		return err_set_errno(e, "mount /dev");
	open_standard_fds();
	if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		return err_set_errno(e, "mount /proc");
	if (mount("sys", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		return err_set_errno(e, "mount /sys");
	if (fs_read(AT_FDCWD, "/proc/cmdline", cmdline, sizeof cmdline, e) < 0)
		return -1;
	if (!fs_boot_option(cmdline, "eph.channel", o->channel, sizeof o->channel))
		return err_set(e, ERR_INVALID, "the kernel command line has no eph.channel=virtio:NAME or vsock:PORT");
	if (!fs_boot_option(cmdline, "eph.bus", o->bus, sizeof o->bus) && !text_copy(o->bus, sizeof o->bus, "mmio"))
		return err_set(e, ERR_INTERNAL, "bus name too long");
	return fs_write(AT_FDCWD, "/proc/self/oom_score_adj", "-1000", e);
}

static int load_module(const char *file, struct err *e)
{
	char path[128];
	long rc;

	if (!text_fmt(path, sizeof path, "/modules/%s", file))
		return err_set(e, ERR_LIMIT, "module name %s is too long", file);
	AUTO_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return err_set_errno(e, "open %s", path);
	rc = syscall(SYS_finit_module, fd, "", 0);
	if (rc < 0 && errno != EEXIST)
		return err_set_errno(e, "load module %s", file);
	return 0;
}

/* A line is "WHEN FILE". */
static int load_line(char *line, const struct boot_options *o, struct err *e)
{
	char *file = strchr(line, ' ');

	if (file == NULL)
		return err_set(e, ERR_INVALID, "modules.load has a line that is not \"WHEN FILE\": %s", line);
	*file++ = '\0';
	if (strcmp(line, "always") != 0 && strcmp(line, o->bus) != 0 &&
			(strcmp(line, "vsock") != 0 || strncmp(o->channel, "vsock:", 6) != 0))
		return 0;
	return load_module(file, e);
}

/* The initramfs stays in memory for ever; its modules need not. */
static void drop_module_files(char *list)
{
	char path[128], *file;

	for (char *line = list; line != NULL; line = strchr(line, '\n')) {
		line += *line == '\n';
		file = strchr(line, ' ');
		if (file != NULL && text_fmt(path, sizeof path, "/modules/%.*s", (int)strcspn(file + 1, "\n"), file + 1))
			unlink(path);
	}
}

int init_modules(const struct boot_options *o, struct err *e)
{
	char list[MODULE_LIST_MAX], copy[MODULE_LIST_MAX], *save = NULL;

	if (fs_read(AT_FDCWD, "/modules.load", list, sizeof list, e) < 0)
		return -1;
	memcpy(copy, list, sizeof copy);
	for (char *line = strtok_r(copy, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save))
		if (load_line(line, o, e) < 0)
			return -1;
	drop_module_files(list);
	return 0;
}

static void loopback_up(void)
{
	struct ifreq ifr = { .ifr_name = "lo" };
	AUTO_FD int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &ifr) < 0) {
		log_warn("no loopback device errno=%d", errno);
		return;
	}
	ifr.ifr_flags = (short)(ifr.ifr_flags | IFF_UP);
	if (ioctl(fd, SIOCSIFFLAGS, &ifr) < 0)
		log_warn("loopback device stays down errno=%d", errno);
}

void init_settings(void)
{
	/* Less kernel for user processes to attack: nothing in a run needs these. */
	static const struct {
		const char *path, *value;
	} settings[] = {
		{ "/proc/sys/kernel/panic", "-1" }, /* a dead agent restarts the machine, which its host takes as the end */
		{ "/proc/sys/kernel/dmesg_restrict", "1" },
		{ "/proc/sys/kernel/kptr_restrict", "2" },
		{ "/proc/sys/kernel/unprivileged_bpf_disabled", "2" },
		{ "/proc/sys/user/max_user_namespaces", "0" }, /* a worker must not become root of anything */
		{ "/proc/sys/kernel/printk", "1 4 1 7" },
		{ "/proc/sys/kernel/modules_disabled", "1" }, /* all that are needed are in; for root too */
		{ "/proc/sys/kernel/kexec_load_disabled", "1" },
		/*
		 * Bytes in sockets count against no cgroup. So there are few of them, in files that are bounded over the whole
		 * machine: at most 4096 * 16 KiB in unix sockets and 16 MiB in the others. Without this a loop over socketpair()
		 * makes the whole machine, the agent included, wait for memory.
		 */
		{ "/proc/sys/fs/file-max", "4096" },
		{ "/proc/sys/net/core/wmem_default", "16384" },
		{ "/proc/sys/net/core/wmem_max", "8192" },   /* the kernel doubles what a program asks for */
		{ "/proc/sys/net/core/optmem_max", "4096" }, /* filters and options, of each socket */
		{ "/proc/sys/net/core/rmem_default", "32768" },
		{ "/proc/sys/net/core/rmem_max", "16384" },
		{ "/proc/sys/net/ipv4/tcp_mem", "1024 1536 2048" },
		{ "/proc/sys/net/ipv4/udp_mem", "1024 1536 2048" },
	};
	struct err e;

	if (sethostname(HOSTNAME, strlen(HOSTNAME)) < 0)
		log_warn("host name not set errno=%d", errno);
	loopback_up();
	for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
		if (fs_write(AT_FDCWD, settings[i].path, settings[i].value, &e) < 0)
			log_warn("setting not made error=\"%s\"", e.text);
}

void init_power_off(void)
{
	sync();
	reboot(RB_POWER_OFF);
	/* Without a way to power off the machine restarts, which its host takes as the end just as well. */
	reboot(RB_AUTOBOOT);
	for (;;)
		pause();
}
