/*
 * The command line (machine_args.h). Where it deviates from what the configuration says, it is because a microvm has no PCI bus and
 * QEMU no hybrid vsock; everything else is passed on.
 */
#include "machine_args.h"

#include "config.h"
#include "faults.h"
#include "machine.h"

#include "common/buf.h"
#include "common/text.h"
#include "proto/guest.h"
#include "vmm/vmm.h"

#include <inttypes.h>
#include <unistd.h>

#define QEMU "/usr/bin/qemu-system-x86_64"

static void add(struct machine_args *a, const char *fmt, ...) EPH_PRINTF(2, 3);

static void add(struct machine_args *a, const char *fmt, ...)
{
	char *text = NULL;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vasprintf(&text, fmt, ap);
	va_end(ap);
	if (n < 0 || a->argc == MACHINE_ARGS_MAX) {
		a->failed = true;
		if (n >= 0)
			free(text);
		return;
	}
	a->argv[a->argc++] = text;
}

#define FLAG(a, flag, ...) (add((a), "%s", (flag)), add((a), __VA_ARGS__))

/* A word of the kernel's command line, as this machine needs it. */
static void word(struct machine_args *a, struct buf *out, const char *text, size_t n)
{
	static const char channel[] = "eph.channel=vsock:", bus[] = "eph.bus=pci";
	struct err e;
	int64_t port;
	char number[16];

	if (out->len > 0)
		buf_add_char(out, ' ');
	if (n > sizeof(channel) - 1 && memcmp(text, channel, sizeof(channel) - 1) == 0) {
		n -= sizeof(channel) - 1;
		if (!text_fmt(number, sizeof(number), "%.*s", (int)n, text + sizeof(channel) - 1) ||
				text_i64(number, 1, UINT32_MAX, &port, &e))
			port = 0;
		a->vsock_port = (uint32_t)port;
		buf_printf(out, "eph.channel=virtio:%s", GUEST_PORT_NAME);
	} else if (n == sizeof(bus) - 1 && memcmp(text, bus, n) == 0) {
		buf_add_str(out, "eph.bus=mmio");
	} else {
		buf_add(out, text, n);
	}
}

static void kernel(struct machine_args *a, const struct json *config)
{
	const char *text = config_text(config, "payload", "cmdline"), *initramfs = config_text(config, "payload", "initramfs");
	struct buf line = BUF_INIT(128 * 1024);

	for (text = text ? text : ""; *text != '\0'; text += strspn(text, " ")) {
		size_t n = strcspn(text, " ");

		word(a, &line, text, n);
		text += n;
	}
	/* An emulated microvm has no timer to calibrate the TSC against: one boot in three would hang. */
	buf_printf(&line, " tsc_early_khz=%" PRIu64, vmm_measure_tsc_khz());
	FLAG(a, "-kernel", "%s", config_text(config, "payload", "kernel"));
	if (initramfs)
		FLAG(a, "-initrd", "%s", initramfs);
	if (buf_cstr(&line))
		FLAG(a, "-append", "%s", buf_cstr(&line));
	a->failed = a->failed || line.failed;
	buf_free(&line);
}

/* QEMU wants to write to any file that is its memory. */
static void preload(struct machine_args *a)
{
	char path[4096];

	if (!beside_program("private-memory.so", path, sizeof(path)) || access(path, R_OK) != 0 ||
			!text_fmt(a->preload, sizeof(a->preload), "LD_PRELOAD=%s", path))
		a->preload[0] = '\0';
}

static void memory(struct machine_args *a, const struct json *config)
{
	const struct json *memory = json_get(config, "memory"), *zone = config_entry(memory, "zones", 0);
	const char *file = json_get_text(zone, "file");
	int64_t size = json_get_int(zone ? zone : memory, "size", 0);

	FLAG(a, "-M", "microvm,pit=off,pic=off,isa-serial=on%s", file ? ",memory-backend=ram" : "");
	FLAG(a, "-m", "size=%" PRId64 "B", size);
	if (file)
		FLAG(a, "-object", "memory-backend-file,id=ram,size=%" PRId64 ",mem-path=%s,share=%s", size, file,
				json_get_bool(zone, "shared", false) ? "on" : "off");
	if (file && !json_get_bool(zone, "shared", false))
		preload(a);
}

static void devices(struct machine_args *a, const struct json *config, bool console, int guest_fd)
{
	const struct json *disk, *balloon = json_get(config, "balloon");

	FLAG(a, "-device", "virtio-serial-device");
	FLAG(a, "-chardev", "%s", console ? "stdio,id=console,signal=off" : "null,id=console");
	/* The port's first number is the console's: hvc0. */
	if (strcmp(config_text(config, "serial", "mode"), "File") == 0) {
		FLAG(a, "-serial", "chardev:console");
	} else {
		FLAG(a, "-device", "virtconsole,chardev=console");
		FLAG(a, "-serial", "null");
	}
	FLAG(a, "-chardev", "socket,id=guest,fd=%d", guest_fd);
	FLAG(a, "-device", "virtserialport,id=guest,nr=2,chardev=guest,name=%s", GUEST_PORT_NAME);
	FLAG(a, "-object", "rng-builtin,id=rng");
	FLAG(a, "-device", "virtio-rng-device,rng=rng");
	if (balloon && json_type(balloon) == JSON_OBJECT)
		FLAG(a, "-device", "virtio-balloon-device,deflate-on-oom=%s,free-page-reporting=%s",
				json_get_bool(balloon, "deflate_on_oom", false) ? "on" : "off",
				json_get_bool(balloon, "free_page_reporting", false) ? "on" : "off");
	for (size_t i = 0; (disk = config_entry(config, "disks", i)); i++) {
		FLAG(a, "-drive", "id=disk%zu,file=%s,format=raw,if=none,readonly=%s,file.locking=off", i,
				json_get_text(disk, "path"), json_get_bool(disk, "readonly", false) ? "on" : "off");
		FLAG(a, "-device", "virtio-blk-device,drive=disk%zu", i);
	}
}

int machine_args_make(struct machine_args *a, const struct json *config, bool console, bool incoming, int qmp_fd, int guest_fd,
		struct err *e)
{
	*a = (struct machine_args){ 0 };
	add(a, "%s", fault("qemu") ? fault("qemu") : QEMU);
	memory(a, config);
	FLAG(a, "-accel", "tcg,thread=multi,tb-size=128");
	FLAG(a, "-cpu", "Nehalem,+rdrand,-spec-ctrl");
	FLAG(a, "-smp", "%" PRId64, config_int(config, "cpus", "boot_vcpus"));
	add(a, "-nodefaults");
	add(a, "-no-user-config");
	FLAG(a, "-display", "none");
	add(a, "-no-reboot");
	/* Few threads, so that a jail made for the real program has room for them. */
	FLAG(a, "-object", "main-loop,id=loop,thread-pool-max=8");
	FLAG(a, "-chardev", "socket,id=qmp,fd=%d", qmp_fd);
	FLAG(a, "-mon", "chardev=qmp,mode=control");
	kernel(a, config);
	devices(a, config, console, guest_fd);
	if (incoming)
		FLAG(a, "-incoming", "defer");
	if (a->failed)
		return err_set(e, ERR_LIMIT, "the emulator's command line is too long");
	return 0;
}

void machine_args_free(struct machine_args *a)
{
	for (int i = 0; i < a->argc; i++)
		free(a->argv[i]);
	a->argc = 0;
}

bool machine_memory_in_file(const struct json *config)
{
	return json_get_text(config_entry(json_get(config, "memory"), "zones", 0), "file") != NULL;
}
