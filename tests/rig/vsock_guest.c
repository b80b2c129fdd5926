/*
 * The init of a microVM in which the agent has its channel by a vsock, on a host that has none to offer: the kernel's loopback
 * gives the machine a vsock to itself. This program is the host's end of it, carries the bytes between there and the serial port
 * that the test speaks to, and becomes the agent. Its first connection it closes without a word, as a clone finds the one that it
 * was stopped with. Runs in a guest only; blocks wherever it likes.
 *
 * deploy/guest-image/pack puts it where the agent would be; the test adds the agent itself as /agent.
 */
#include "guest-agent/transport.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#define PORT 1024
#define LATE_MS 300 /* the agent comes first, and has to try again */

static void die(const char *what)
{
	fprintf(stderr, "vsock_guest: %s: %s\n", what, strerror(errno));
	reboot(RB_POWER_OFF);
	_exit(1);
}

static void load(const char *name)
{
	char path[128];
	int fd;

	snprintf(path, sizeof path, "/modules/%s.ko", name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) != 0 && errno != EEXIST))
		die(path);
	close(fd);
}

/* The files stay: the agent loads them again and finds them there. */
static void load_all(void)
{
	static const char *const names[] = { "virtio_ring", "virtio", "virtio_mmio", "virtio_console", "vsock",
		"vmw_vsock_virtio_transport_common", "vsock_loopback" };

	for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
		load(names[i]);
}

static int open_port(void)
{
	struct transport t;
	struct err e;
	int fd = -1;

	if (transport_parse("virtio:ephemeral.0", &t, &e) < 0 || (fd = transport_open(&t, &e)) < 0)
		die(e.text);
	if (fcntl(fd, F_SETFL, 0) < 0)
		die("port");
	return fd;
}

static void carry(int from, int to)
{
	static char bytes[65536];
	ssize_t n = read(from, bytes, sizeof bytes);

	if (n <= 0)
		die("the channel is over");
	for (ssize_t at = 0, done; at < n; at += done)
		if ((done = write(to, bytes + at, (size_t)(n - at))) <= 0)
			die("write");
}

/* The host's end: never returns. */
static void be_host(int port)
{
	const struct sockaddr_vm at = { .svm_family = AF_VSOCK, .svm_port = PORT, .svm_cid = VMADDR_CID_ANY };
	int listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0), guest;

	(void)poll(NULL, 0, LATE_MS);
	if (listener < 0 || bind(listener, (const struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 4) != 0)
		die("listen");
	guest = accept(listener, NULL, NULL);
	if (guest < 0)
		die("accept");
	close(guest);
	guest = accept(listener, NULL, NULL);
	if (guest < 0)
		die("accept again");
	close(listener);
	for (;;) {
		struct pollfd p[2] = { { .fd = port, .events = POLLIN }, { .fd = guest, .events = POLLIN } };

		if (poll(p, 2, -1) < 0)
			die("poll");
		if (p[0].revents & POLLIN)
			carry(port, guest);
		if (p[1].revents)
			carry(guest, port);
	}
}

int main(void)
{
	static char *argv[] = { (char *)"/agent", NULL }, *envp[] = { NULL };
	int port;

	if (getpid() != 1) {
		fputs("This is the init of a guest in a test; it cannot be started by hand.\n", stderr);
		return 2;
	}
	if (mount("dev", "/dev", "devtmpfs", 0, NULL) != 0 && errno != EBUSY)
		die("/dev");
	if (mount("sys", "/sys", "sysfs", 0, NULL) != 0)
		die("/sys");
	load_all();
	port = open_port();
	if (fork() == 0)
		be_host(port);
	close(port);
	if (umount2("/sys", MNT_DETACH) != 0)
		die("unmount /sys");
	execve(argv[0], argv, envp);
	die("exec");
}
