/*
 * What a configuration of the right shape may still not say (config.h), and when the real program notices: files of console and
 * serial port at `vm.create`, all else at `vm.boot`. Looks at the files that it names; keeps nothing open but the locks of disks.
 */
#include "config.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define CMDLINE_MAX 65536
#define VCPUS_MAX 254
#define CID_ANY 4294967295

int config_check_create(const struct json *config, struct err *e)
{
	static const char *const ports[] = { "console", "serial" };
	const struct json *rule;

	for (size_t i = 0; i < 2; i++) {
		const char *mode = config_text(config, ports[i], "mode"), *file = config_text(config, ports[i], "file");

		if (strcmp(mode, "File") == 0 && !file)
			return err_set(e, ERR_INVALID, "Path missing when using file mode: %s", ports[i]);
		if (strcmp(mode, "Socket") == 0)
			return err_set(e, ERR_INVALID, "%s: no socket here", ports[i]);
		if (strcmp(mode, "Pty") == 0 || strcmp(mode, "Tty") == 0)
			return err_set(e, ERR_INVALID, "%s: mode %s forks a helper and is not what a service wants: set it",
					ports[i], mode);
	}
	for (size_t i = 0; (rule = config_entry(config, "landlock_rules", i)); i++) {
		const char *access_ = json_get_text(rule, "access"), *path = json_get_text(rule, "path");

		if (*access_ == '\0' || access_[strspn(access_, "rw")] != '\0')
			return err_set(e, ERR_INVALID, "landlock_rules: access '%.16s' is not of r and w", access_);
		if (access(path, F_OK) != 0)
			return err_set_errno(e, "landlock_rules: %s", path);
	}
	return 0;
}

static int readable(const char *what, const char *path, bool write_too, struct err *e)
{
	int fd = open(path, (write_too ? O_RDWR : O_RDONLY) | O_CLOEXEC);

	if (fd < 0)
		return err_set_errno(e, "%s %s", what, path);
	close(fd);
	return 0;
}

/* An ELF file (its PVH note is for the emulator to find) or a bzImage. */
static int check_kernel(const char *path, struct err *e)
{
	char head[0x206] = "";
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (fd < 0)
		return err_set_errno(e, "kernel %s", path);
	n = read(fd, head, sizeof(head));
	close(fd);
	if (n == sizeof(head) && (memcmp(head, "\177ELF", 4) == 0 || memcmp(head + 0x202, "HdrS", 4) == 0))
		return 0;
	return err_set(e, ERR_INVALID, "kernel %s: neither ELF with a PVH header nor a bzImage", path);
}

static int check_payload(const struct json *config, struct err *e)
{
	const char *kernel = config_text(config, "payload", "kernel"), *initramfs = config_text(config, "payload", "initramfs");
	const char *cmdline = config_text(config, "payload", "cmdline");

	if (config_text(config, "payload", "firmware"))
		return err_set(e, ERR_INVALID, "payload: %s",
				kernel ? "kernel and firmware exclude each other" : "no firmware boots here");
	if (!kernel)
		return err_set(e, ERR_INVALID, "payload: kernel is missing");
	if (cmdline && strlen(cmdline) > CMDLINE_MAX)
		return err_set(e, ERR_INVALID, "payload: cmdline is longer than %d bytes", CMDLINE_MAX);
	if (check_kernel(kernel, e))
		return -1;
	return initramfs ? readable("initramfs", initramfs, false, e) : 0;
}

static int check_zone(const struct json *zone, struct err *e)
{
	const char *file = json_get_text(zone, "file");
	int64_t size = json_get_int(zone, "size", 0);
	struct stat st;

	if (size <= 0)
		return err_set(e, ERR_INVALID, "memory zone without a size");
	if (json_get_bool(zone, "shared", false) && json_get_bool(zone, "mergeable", false))
		return err_set(e, ERR_INVALID, "memory zone: shared and mergeable exclude each other");
	if (!file)
		return 0;
	if (readable("memory zone", file, json_get_bool(zone, "shared", false), e))
		return -1;
	if (stat(file, &st) != 0)
		return err_set_errno(e, "memory zone %s", file);
	/* Mapped beyond its end it would be SIGBUS in the guest's first touch. */
	if (!S_ISREG(st.st_mode) || st.st_size < size)
		return err_set(e, ERR_INVALID, "memory zone %s: no file of the zone's size", file);
	return 0;
}

static int check_memory(const struct json *config, struct err *e)
{
	static const char *const global[] = { "shared", "mergeable", "hugepages", "prefault", "reserve" };
	const struct json *memory = json_get(config, "memory"), *zone = config_entry(memory, "zones", 0);
	int64_t size = json_get_int(memory, "size", 0);

	if (!zone && size <= 0)
		return err_set(e, ERR_INVALID, "memory: size is 0 and there are no zones");
	if (!zone)
		return json_get_bool(memory, "shared", false) && json_get_bool(memory, "mergeable", false)
				       ? err_set(e, ERR_INVALID, "memory: shared and mergeable exclude each other")
				       : 0;
	if (size != 0)
		return err_set(e, ERR_INVALID, "memory: size must be 0 when zones are given");
	for (size_t i = 0; i < sizeof(global) / sizeof(global[0]); i++)
		if (json_get_bool(memory, global[i], false))
			return err_set(e, ERR_INVALID, "memory: %s is a matter of each zone when zones are given", global[i]);
	if (config_entry(memory, "zones", 1))
		return err_set(e, ERR_INVALID, "memory: this stand-in takes one zone");
	return check_zone(zone, e);
}

static int check_disk(const struct json *disk, struct err *e)
{
	const char *path = json_get_text(disk, "path");
	bool readonly = json_get_bool(disk, "readonly", false);
	struct flock lock = { .l_type = readonly ? F_RDLCK : F_WRLCK, .l_whence = SEEK_SET };
	int64_t queue = json_get_int(disk, "queue_size", 0);
	int fd;

	if (!path)
		return err_set(e, ERR_INVALID, "disk without a path");
	if (json_get_int(disk, "num_queues", 0) < 1 || queue < 2 || (queue & (queue - 1)) != 0)
		return err_set(e, ERR_INVALID, "disk %s: num_queues at least 1, queue_size a power of two", path);
	if (strcmp(json_get_text(disk, "image_type"), "Raw") != 0)
		return err_set(e, ERR_INVALID, "disk %s: image_type must be said and be Raw, or the format is guessed", path);
	fd = open(path, (readonly ? O_RDONLY : O_RDWR) | O_CLOEXEC);
	if (fd < 0)
		return err_set_errno(e, "disk %s", path);
	/* Held to the end of this process, as the real one does. */
	if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
		err_set_errno(e, "disk %s is locked by another", path);
		close(fd);
		return -1;
	}
	return 0;
}

static int check_vsock(const struct json *config, struct err *e)
{
	const char *path = config_text(config, "vsock", "socket");
	int64_t cid = config_int(config, "vsock", "cid");

	if (!path)
		return 0;
	if (cid < 3 || cid == CID_ANY)
		return err_set(e, ERR_INVALID, "vsock: cid 0, 1, 2 and 4294967295 are not for guests");
	/* With _PORT behind it. */
	if (path[0] != '/' || strlen(path) + 11 >= sizeof(((struct sockaddr_un *)NULL)->sun_path))
		return err_set(e, ERR_INVALID, "vsock: socket must be absolute and leave room for _PORT in 108 bytes");
	return 0;
}

static int64_t memory_bytes(const struct json *config)
{
	const struct json *memory = json_get(config, "memory"), *zone = config_entry(memory, "zones", 0);

	return json_get_int(zone ? zone : memory, "size", 0);
}

int config_check_boot(const struct json *config, struct err *e)
{
	const struct json *balloon = json_get(config, "balloon"), *disk;
	int64_t boot = config_int(config, "cpus", "boot_vcpus"), max = config_int(config, "cpus", "max_vcpus");

	if (boot < 1 || boot > max || max > VCPUS_MAX)
		return err_set(e, ERR_INVALID, "cpus: 1 <= boot_vcpus <= max_vcpus <= %d", VCPUS_MAX);
	if (balloon && json_type(balloon) == JSON_OBJECT && json_get_int(balloon, "size", 0) >= memory_bytes(config))
		return err_set(e, ERR_INVALID, "balloon: size must be below the memory's");
	if (check_payload(config, e) || check_memory(config, e) || check_vsock(config, e))
		return -1;
	for (size_t i = 0; (disk = config_entry(config, "disks", i)); i++)
		if (check_disk(disk, e))
			return -1;
	return readable("rng", config_text(config, "rng", "src"), false, e);
}
