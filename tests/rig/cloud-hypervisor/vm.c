/*
 * The VM (vm.h): Created -> Running <-> Paused, and back to Created by a shutdown. Owns configuration, console file and machine.
 * Snapshots are in vm_snapshot.c.
 */
#include "vm_internal.h"

#include "config.h"
#include "events.h"
#include "faults.h"
#include "vsock.h"

#include "common/clock.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

struct vm vm = { .console_fd = -1 };

static enum vm_result absent(struct err *e)
{
	err_set(e, ERR_NOT_FOUND, "VM is not created");
	return VM_ABSENT;
}

static enum vm_result not_in(enum vm_state state, const char *what, struct err *e)
{
	static const char *const names[] = { "Created", "Running", "Paused" };

	err_set(e, ERR_CONFLICT, "InvalidStateTransition: cannot %s a VM that is %s", what, names[state]);
	return VM_FAILED;
}

/* --- configuration ------------------------------------------------------------------------------------------------------------ */

int vm_read(const struct field *fields, const char *body, size_t n, struct json **out, struct err *e)
{
	struct buf filled = BUF_INIT(512 * 1024);
	struct json *in;
	int rc;

	if (json_parse(body, n, &in, e))
		return -1;
	rc = config_fill(fields, in, &filled, e);
	json_free(in);
	if (rc == 0)
		rc = json_parse((const char *)filled.data, filled.len, out, e);
	buf_free(&filled);
	return rc;
}

/* The file of console or serial port, made or emptied. */
static int open_console(const struct json *config, struct err *e)
{
	static const char *const ports[] = { "console", "serial" };

	for (size_t i = 0; i < 2; i++) {
		const char *file = config_text(config, ports[i], "file");

		if (strcmp(config_text(config, ports[i], "mode"), "File") != 0)
			continue;
		if (vm.console_fd >= 0)
			return err_set(e, ERR_INVALID, "this stand-in writes console or serial port to a file, not both");
		vm.console_fd = open(file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
		if (vm.console_fd < 0)
			return err_set_errno(e, "%s %s", ports[i], file);
	}
	return 0;
}

int vm_take_config(struct json *config, struct err *e)
{
	if (config_check_create(config, e) || open_console(config, e)) {
		if (vm.console_fd >= 0)
			close(vm.console_fd);
		vm.console_fd = -1;
		json_free(config);
		return -1;
	}
	vm.config = config;
	return 0;
}

enum vm_result vm_create(const char *body, size_t n, struct err *e)
{
	struct json *config;

	if (vm_read(config_vm, body, n, &config, e))
		return VM_INVALID;
	if (vm.config) {
		json_free(config);
		err_set(e, ERR_CONFLICT, "VM is already created");
		return VM_FAILED;
	}
	return vm_take_config(config, e) ? VM_FAILED : VM_OK;
}

enum vm_result vm_delete(struct err *e)
{
	if (!vm.config)
		return VM_OK;
	if (vm.machine && vm_shutdown(e) != VM_OK)
		return VM_FAILED;
	json_free(vm.config);
	vm.config = NULL;
	if (vm.console_fd >= 0)
		close(vm.console_fd);
	vm.console_fd = -1;
	event_say("vm", "deleted", NULL, NULL);
	return VM_OK;
}

/* --- running -------------------------------------------------------------------------------------------------------------------
 */

/* Drivers of the guest are there when its process opens the port. */
static void say_activated(void)
{
	const struct json *disk;
	const char *id;

	for (size_t i = 0; (disk = config_entry(vm.config, "disks", i)); i++) {
		id = json_get_text(disk, "id");
		event_say("virtio-device", "activated", "id", id ? id : "_disk0");
	}
	id = config_text(vm.config, "vsock", "id");
	event_say("virtio-device", "activated", "id", id ? id : "_vsock1");
	vm.activated = true;
}

static void on_port(void *arg, uint32_t port, bool open)
{
	(void)arg;
	if (open && !vm.activated)
		say_activated();
	/* While the machine is still being made its port may report already. */
	if (vm.machine)
		vsock_guest(vm.machine, port, open);
	else
		vm.early_port = open ? port : 0;
}

int vm_start_machine(bool incoming, struct err *e)
{
	const struct machine_ops ops = { .on_port = on_port };
	const char *path = config_text(vm.config, "vsock", "socket");

	vm.activated = false;
	vm.early_port = 0;
	if (path && vsock_open(path, e))
		return -1;
	if (machine_start(vm.config, vm.console_fd, incoming, &ops, &vm.machine, e)) {
		vsock_close();
		return -1;
	}
	if (vm.early_port > 0)
		vsock_guest(vm.machine, vm.early_port, true);
	return 0;
}

void vm_stop_machine(void)
{
	vsock_close();
	machine_free(vm.machine);
	vm.machine = NULL;
	vm.state = VM_CREATED;
}

enum vm_result vm_boot(struct err *e)
{
	if (!vm.config)
		return absent(e);
	if (vm.machine)
		return not_in(vm.state, "boot", e);
	event_say("vm", "booting", NULL, NULL);
	if (config_check_boot(vm.config, e) || vm_start_machine(false, e)) {
		err_wrap(e, "The VM could not boot");
		return VM_FAILED;
	}
	vm.state = VM_RUNNING;
	vm.booted_ms = clock_boot_ms();
	event_say("vm", "booted", NULL, NULL);
	return VM_OK;
}

enum vm_result vm_shutdown(struct err *e)
{
	if (!vm.machine)
		return vm.config ? not_in(vm.state, "shut down", e) : absent(e);
	vm_stop_machine();
	event_say("vm", "shutdown", NULL, NULL);
	return VM_OK;
}

enum vm_result vm_pause(struct err *e)
{
	if (!vm.machine || vm.state != VM_RUNNING)
		return vm.config ? not_in(vm.state, "pause", e) : absent(e);
	event_say("vm", "pausing", NULL, NULL);
	if (machine_pause(vm.machine, e))
		return VM_FAILED;
	vm.state = VM_PAUSED;
	event_say("vm", "paused", NULL, NULL);
	return VM_OK;
}

enum vm_result vm_resume(struct err *e)
{
	if (!vm.machine || vm.state != VM_PAUSED)
		return vm.config ? not_in(vm.state, "resume", e) : absent(e);
	event_say("vm", "resuming", NULL, NULL);
	if (machine_resume(vm.machine, e))
		return VM_FAILED;
	vm.state = VM_RUNNING;
	event_say("vm", "resumed", NULL, NULL);
	return VM_OK;
}

/* In this process, by whoever's wish: the same VMM boots the same guest again. */
enum vm_result vm_reboot(struct err *e)
{
	if (!vm.machine)
		return vm.config ? not_in(vm.state, "reboot", e) : absent(e);
	event_say("vm", "rebooting", NULL, NULL);
	vm_stop_machine();
	if (vm_start_machine(false, e))
		return VM_FAILED;
	vm.state = VM_RUNNING;
	event_say("vm", "rebooted", NULL, NULL);
	return VM_OK;
}

/* --- telling -------------------------------------------------------------------------------------------------------------------
 */

/* A fault: one field is not what was asked for, as if it had been ignored. */
static void write_config(struct jw *w)
{
	static const char asked[] = "\"nested\":false", other[] = "\"nested\":true";
	struct buf text = BUF_INIT(512 * 1024), changed = BUF_INIT(512 * 1024);
	struct jw inner;
	const char *at, *whole;

	jw_init(&inner, &text);
	jw_json(&inner, vm.config);
	whole = buf_cstr(&text);
	at = whole && fault("info") ? strstr(whole, asked) : NULL;
	if (at) {
		buf_add(&changed, whole, (size_t)(at - whole));
		buf_add_str(&changed, other);
		buf_add_str(&changed, at + sizeof(asked) - 1);
		jw_raw(w, (const char *)changed.data, changed.len);
	} else {
		jw_raw(w, (const char *)text.data, text.len);
	}
	buf_free(&text);
	buf_free(&changed);
}

static void write_device(struct jw *w, const char *id, int slot)
{
	char bdf[16];

	jw_kobject(w, id);
	jw_kstr(w, "id", id);
	jw_karray(w, "resources");
	jw_close(w);
	jw_knull(w, "parent");
	jw_karray(w, "children");
	jw_close(w);
	jw_kstr(w, "pci_bdf", text_fmt(bdf, sizeof(bdf), "0000:00:%02x.0", (unsigned int)slot) ? bdf : "");
	jw_close(w);
}

enum vm_result vm_info(struct buf *out, struct err *e)
{
	static const char *const states[] = { "Created", "Running", "Paused" };
	const struct json *memory, *zone;
	const char *id;
	struct jw w;

	if (!vm.config)
		return absent(e);
	memory = json_get(vm.config, "memory");
	zone = config_entry(memory, "zones", 0);
	jw_init(&w, out);
	jw_object(&w);
	jw_key(&w, "config");
	write_config(&w);
	jw_kstr(&w, "state", states[vm.state]);
	jw_kint(&w, "memory_actual_size", json_get_int(zone ? zone : memory, "size", 0));
	jw_kobject(&w, "device_tree");
	if (vm.machine) {
		for (size_t i = 0; config_entry(vm.config, "disks", i); i++) {
			id = json_get_text(config_entry(vm.config, "disks", i), "id");
			write_device(&w, id ? id : "_disk0", (int)i + 2);
		}
		id = config_text(vm.config, "vsock", "id");
		write_device(&w, id ? id : "_vsock1", 1);
	}
	jw_close(&w);
	jw_close(&w);
	return jw_end(&w) ? VM_OK : VM_FAILED;
}

enum vm_result vm_counters(struct buf *out, struct err *e)
{
	static const char *const zero[] = { "read_latency_min", "read_latency_max", "read_latency_avg", "write_latency_min",
		"write_latency_max", "write_latency_avg" };
	static const char *const names[] = { "read_bytes", "write_bytes", "read_ops", "write_ops" };
	const struct json *disk = config_entry(vm.config, "disks", 0);
	int64_t counted[4] = { 0 };
	const char *id = json_get_text(disk, "id");
	struct jw w;

	if (!vm.machine)
		return vm.config ? not_in(vm.state, "count", e) : absent(e);
	if (machine_counters(vm.machine, counted, e))
		return VM_FAILED;
	jw_init(&w, out);
	jw_object(&w);
	if (disk) {
		jw_kobject(&w, id ? id : "_disk0");
		for (size_t i = 0; i < 4; i++)
			jw_kint(&w, names[i], counted[i]);
		for (size_t i = 0; i < sizeof(zero) / sizeof(zero[0]); i++)
			jw_kint(&w, zero[i], 0);
		jw_close(&w);
	}
	jw_close(&w);
	return jw_end(&w) ? VM_OK : VM_FAILED;
}

/* --- loop ----------------------------------------------------------------------------------------------------------------------
 */

size_t vm_poll(struct pollfd *out)
{
	size_t n = vsock_poll(vm.machine, out);

	if (vm.machine)
		out[n++] = (struct pollfd){ .fd = machine_fd(vm.machine), .events = POLLIN };
	return n;
}

/* The guest or its machine ended. -1: so does this process, which does not tell a power-off from a fault by its status. */
static int machine_ended(enum machine_end end, int *status)
{
	struct err e;

	if (end == MACHINE_RESET) {
		if (vm_reboot(&e) == VM_OK)
			return 0;
		fprintf(stderr, "cloud-hypervisor: reboot: %s\n", e.text);
		*status = 1;
		return -1;
	}
	if (end == MACHINE_LOST)
		fprintf(stderr, "cloud-hypervisor: ERROR: the machine ended by itself\n");
	vm_stop_machine();
	event_say("vm", "shutdown", NULL, NULL);
	event_say("vm", "deleted", NULL, NULL);
	*status = 0;
	return -1;
}

int vm_ready(const struct pollfd *fds, size_t n, int *status)
{
	enum machine_end end = MACHINE_RUNS;
	int limit = fault_number("reboot-after-ms");
	struct err e;

	for (size_t i = 0; i < n; i++)
		if (vm.machine && fds[i].revents != 0 && fds[i].fd == machine_fd(vm.machine))
			end = machine_read(vm.machine);
	if (end != MACHINE_RUNS)
		return machine_ended(end, status);
	vsock_ready(vm.machine, fds, n);
	if (limit > 0 && vm.machine && vm.booted_ms > 0 && clock_boot_ms() >= vm.booted_ms + limit) {
		vm.booted_ms = 0;
		return vm_reboot(&e) == VM_OK ? 0 : -1;
	}
	return 0;
}

void vm_end(void)
{
	if (vm.machine)
		vm_stop_machine();
}
