/* Opens what the channel runs over (transport.h). Owns nothing. */
#include "transport.h"

#include "common/clock.h"
#include "common/text.h"
#include "fsutil.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#define WAIT_MS 10000
#define CONNECT_MS 500 /* an answer to a connection comes from the machine's own host */
#define PORT_MAX UINT32_MAX

static int parse_vsock(const char *text, struct transport *t, struct err *e)
{
	const char *colon = strchr(text, ':');
	char first[16];
	int64_t cid = VMADDR_CID_HOST, port;

	if (colon != NULL) {
		if (!text_fmt(first, sizeof first, "%.*s", (int)(colon - text), text))
			return err_set(e, ERR_INVALID, "eph.channel=vsock:%s has no CID", text);
		if (text_i64(first, 1, PORT_MAX - 1, &cid, e) < 0)
			return err_wrap(e, "eph.channel=vsock:%s", text);
		text = colon + 1;
	}
	if (text_i64(text, 1, PORT_MAX - 1, &port, e) < 0)
		return err_wrap(e, "eph.channel=vsock:%s", text);
	t->is_vsock = true;
	t->cid = (uint32_t)cid;
	t->port = (uint32_t)port;
	return 0;
}

int transport_parse(const char *text, struct transport *out, struct err *e)
{
	*out = (struct transport){ .is_vsock = false };
	if (strncmp(text, "vsock:", 6) == 0)
		return parse_vsock(text + 6, out, e);
	if (strncmp(text, "virtio:", 7) != 0 || text[7] == '\0')
		return err_set(e, ERR_INVALID,
				"eph.channel=%s is not a transport of this agent; it knows virtio:NAME, vsock:PORT and "
				"vsock:CID:PORT",
				text);
	if (!text_copy(out->name, sizeof out->name, text + 7))
		return err_set(e, ERR_LIMIT, "eph.channel=%s has a name of more than %zu bytes", text, sizeof out->name - 1);
	return 0;
}

/* Looks through the virtio ports once; true when the one of that name has a device node. */
static bool find_port(const char *name, char *path, size_t size)
{
	DIR *d = opendir("/sys/class/virtio-ports");
	struct dirent *ent;
	bool found = false;

	if (d == NULL)
		return false;
	while (!found && (ent = readdir(d)) != NULL) {
		char file[300], text[128];
		struct err e;

		if (ent->d_name[0] == '.' || !text_fmt(file, sizeof file, "/sys/class/virtio-ports/%s/name", ent->d_name))
			continue;
		if (fs_read(AT_FDCWD, file, text, sizeof text, &e) == 0 && strcmp(text, name) == 0)
			found = text_fmt(path, size, "/dev/%s", ent->d_name) && access(path, R_OK | W_OK) == 0;
	}
	closedir(d);
	return found;
}

static int try_port(const struct transport *t, struct err *e)
{
	char path[300];
	int fd;

	if (!find_port(t->name, path, sizeof path))
		return err_set(e, ERR_NOT_FOUND, "there is no virtio port named %s", t->name);
	fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
	return fd < 0 ? err_set_errno(e, "open %s", path) : fd;
}

static int try_vsock(const struct transport *t, struct err *e)
{
	const struct sockaddr_vm at = { .svm_family = AF_VSOCK, .svm_port = t->port, .svm_cid = t->cid };
	const struct timeval wait = { .tv_sec = CONNECT_MS / 1000, .tv_usec = CONNECT_MS % 1000 * 1000 };
	int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return err_set_errno(e, "make a vsock");
	if (setsockopt(fd, AF_VSOCK, SO_VM_SOCKETS_CONNECT_TIMEOUT, &wait, sizeof wait) < 0 ||
			connect(fd, (const struct sockaddr *)&at, sizeof at) < 0 || fcntl(fd, F_SETFL, O_NONBLOCK) < 0) {
		err_set_errno(e, "connect to port %u of CID %u", t->port, t->cid);
		close(fd);
		return -1;
	}
	return fd;
}

int transport_try(const struct transport *t, struct err *e)
{
	return t->is_vsock ? try_vsock(t, e) : try_port(t, e);
}

int transport_open(const struct transport *t, struct err *e)
{
	const struct timespec pause_2ms = { .tv_sec = 0, .tv_nsec = 2000000 };
	int64_t deadline = clock_boot_ms() + WAIT_MS;
	int fd;

	while ((fd = transport_try(t, e)) < 0) {
		if (clock_boot_ms() >= deadline)
			return err_wrap(e, "in %d ms", WAIT_MS);
		nanosleep(&pause_2ms, NULL);
	}
	return fd;
}
