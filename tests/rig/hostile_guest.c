/*
 * The init of a microVM that wants to break out of the protocol of the guest channel. deploy/guest-image/pack puts it where the
 * agent would be. It behaves as far as the attack needs it, which is the first word of the run's prompt; with another memory than a
 * small machine's it attacks before there is a prompt. Runs in a guest only; blocks wherever it likes.
 */
#include "hostile.h"

#include "common/text.h"
#include "common/wire.h"
#include "guest-agent/fsutil.h"
#include "guest-agent/init.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <unistd.h>

#define SMALL_MIB 384 /* above the size `small`, below `standard` */

static int open_port(const char *name)
{
	for (;;) {
		DIR *d = opendir("/sys/class/virtio-ports");
		struct dirent *ent;
		int fd = -1;

		while (d != NULL && fd < 0 && (ent = readdir(d)) != NULL) {
			char path[300], text[128];
			struct err e;

			if (text_fmt(path, sizeof path, "/sys/class/virtio-ports/%s/name", ent->d_name) &&
					fs_read(AT_FDCWD, path, text, sizeof text, &e) == 0 && strcmp(text, name) == 0 &&
					text_fmt(path, sizeof path, "/dev/%s", ent->d_name))
				fd = open(path, O_RDWR | O_CLOEXEC);
		}
		if (d != NULL)
			closedir(d);
		if (fd >= 0)
			return fd;
		(void)poll(NULL, 0, 2);
	}
}

void hostile_write(struct hostile *h, const void *p, size_t n)
{
	const char *at = p;

	while (n > 0) {
		ssize_t done = write(h->fd, at, n);

		if (done > 0) {
			at += done;
			n -= (size_t)done;
		}
	}
}

void hostile_frame(struct hostile *h, enum guest_frame type, uint32_t stream, const void *body, size_t n)
{
	struct buf b = BUF_INIT(GUEST_FRAME_MAX + 16);

	guest_frame_put(&b, type, stream, body, n);
	hostile_write(h, b.data, b.len);
	buf_free(&b);
}

static void read_exact(struct hostile *h, uint8_t *p, size_t n)
{
	while (n > 0) {
		ssize_t got = read(h->fd, p, n);

		if (got > 0) {
			p += got;
			n -= (size_t)got;
		} else {
			(void)poll(NULL, 0, 2); /* the host's end is not there */
		}
	}
}

static uint8_t read_frame(struct hostile *h, struct buf *body)
{
	static uint8_t bytes[GUEST_FRAME_MAX];
	uint8_t head[GUEST_FRAME_HEAD];
	struct wire_reader r;
	uint32_t n;

	read_exact(h, head, sizeof head);
	wire_read_init(&r, head, sizeof head);
	n = wire_u32(&r) - 5;
	read_exact(h, bytes, n);
	buf_reset(body);
	buf_add(body, bytes, n);
	return head[4];
}

void hostile_until(struct hostile *h, uint8_t type, struct buf *body)
{
	while (read_frame(h, body) != type)
		continue;
}

void hostile_idle(struct hostile *h)
{
	struct buf body = BUF_INIT(GUEST_FRAME_MAX);

	for (;;)
		read_frame(h, &body);
}

void hostile_hello(struct hostile *h, const uint8_t nonce[GUEST_NONCE_LEN])
{
	struct guest_hello hello = {
		.protocol = GUEST_PROTOCOL, .kernel = "hostile", .agent = "hostile", .memory_mib = UINT32_MAX
	};
	struct buf b = BUF_INIT(1024);

	memcpy(hello.nonce, nonce, GUEST_NONCE_LEN);
	guest_hello_encode(&hello, &b);
	hostile_frame(h, GF_HELLO, 0, b.data, b.len);
	buf_free(&b);
}

void hostile_ack(struct hostile *h, const char *workdir, const char *boot_id)
{
	struct guest_setup_ack ack = { .reseeded = true, .clock_set = true };
	struct buf b = BUF_INIT(1024);

	if (!text_copy(ack.workdir, sizeof ack.workdir, workdir) || !text_copy(ack.boot_id, sizeof ack.boot_id, boot_id))
		return;
	guest_setup_ack_encode(&ack, &b);
	hostile_frame(h, GF_SETUP_ACK, 0, b.data, b.len);
	buf_free(&b);
}

/* The setup as it came, whole: the attack is the prompt's first word. */
static const struct attack *receive_setup(struct hostile *h)
{
	struct buf message = BUF_INIT(GUEST_SETUP_MAX), body = BUF_INIT(GUEST_FRAME_MAX);
	struct guest_setup setup = { .prompt = NULL };
	const struct attack *found = NULL;
	struct err e;
	uint8_t type;

	while ((type = read_frame(h, &body)) != GF_SETUP_END || body.data[0] != 1)
		if (type == GF_SETUP)
			buf_add(&message, body.data, body.len);
	if (guest_setup_decode(message.data, message.len, &setup, &e) == 0) {
		setup.prompt[strcspn(setup.prompt, " \n")] = '\0';
		found = attack_find(setup.prompt);
		guest_setup_free(&setup);
	}
	buf_free(&message);
	buf_free(&body);
	return found;
}

static void attack(struct hostile *h)
{
	struct buf body = BUF_INIT(GUEST_FRAME_MAX);
	const struct attack *a = fs_meminfo_kib("MemTotal") > SMALL_MIB * 1024 ? attack_find("wrong-nonce") : NULL;

	hostile_until(h, GF_PROBE, &body);
	memcpy(h->nonce, body.data, GUEST_NONCE_LEN);
	buf_free(&body);
	if (a == NULL) {
		hostile_hello(h, h->nonce);
		a = receive_setup(h);
	}
	if (a != NULL && a->when == WHEN_WORKING)
		hostile_ack(h, "/tmp/hostile", "00000000-0000-0000-0000-000000000000");
	if (a != NULL)
		a->run(h);
	else
		fprintf(stderr, "no such attack\n");
	hostile_idle(h);
}

int main(void)
{
	struct boot_options options;
	struct hostile h = { .fd = -1 };
	struct err e;

	if (getpid() != 1) {
		fputs("This is the init of a guest in a test; it cannot be started by hand.\n", stderr);
		return 2;
	}
	if (init_early(&options, &e) < 0 || init_modules(&options, &e) < 0) {
		fprintf(stderr, "%s\n", e.text);
		init_power_off();
	}
	h.fd = open_port(options.channel + strlen("virtio:"));
	attack(&h);
}
