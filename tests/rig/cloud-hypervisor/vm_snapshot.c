/*
 * Snapshots (vm.h): a directory with config.json (the configuration), state.json (here: QEMU's own state, base64 in JSON) and, when
 * the memory is not in a file of its own, memory-ranges. Restoring takes the configuration from the directory, as the real one
 * does; paths are changed by changing config.json.
 */
#include "vm_internal.h"

#include "config.h"
#include "events.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define STATE_MAX ((size_t)1 << 30)

static int url_path(const char *url, char *out, size_t size, struct err *e)
{
	if (strncmp(url, "file:///", 8) != 0 || !text_copy(out, size, url + 7))
		return err_set(e, ERR_INVALID, "%.100s: not file:///DIRECTORY", url);
	return 0;
}

static int open_in(const char *dir, const char *name, int flags, struct err *e)
{
	char path[4096];
	int fd;

	if (!text_fmt(path, sizeof(path), "%s/%s", dir, name))
		return err_set(e, ERR_INVALID, "%s is too long", dir);
	fd = open(path, flags | O_CLOEXEC, 0600);
	return fd < 0 ? err_set_errno(e, "%s", path) : fd;
}

/* A new file; that there is none of the name is part of the contract. */
static int write_new(const char *dir, const char *name, const struct buf *b, struct err *e)
{
	int fd = open_in(dir, name, O_WRONLY | O_CREAT | O_EXCL, e);
	size_t done = 0;

	if (fd < 0)
		return -1;
	while (done < b->len) {
		ssize_t n = write(fd, b->data + done, b->len - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			err_set_errno(e, "%s/%s", dir, name);
			close(fd);
			return -1;
		}
		done += (size_t)n;
	}
	close(fd);
	return 0;
}

static int read_whole(const char *dir, const char *name, struct buf *b, struct err *e)
{
	int fd = open_in(dir, name, O_RDONLY, e);
	uint8_t *room;
	ssize_t n = -1;

	if (fd < 0)
		return -1;
	while ((room = buf_reserve(b, 65536)) && (n = read(fd, room, 65536)) > 0)
		buf_commit(b, (size_t)n);
	close(fd);
	return room && n == 0 ? 0 : err_set(e, ERR_IO, "%s/%s cannot be read", dir, name);
}

static int write_state(const char *dir, const struct buf *state, struct err *e)
{
	struct buf text = BUF_INIT(STATE_MAX);
	int rc = 0;

	buf_add_str(&text, "{\"id\":\"\",\"snapshots\":{},\"qemu\":\"");
	if (machine_memory_in_file(vm.config)) {
		if (!text_b64(&text, state->data, state->len))
			text.failed = true;
	} else {
		rc = write_new(dir, "memory-ranges", state, e);
	}
	buf_add_str(&text, "\"}");
	if (rc == 0)
		rc = text.failed ? err_set(e, ERR_NOMEM, "out of memory") : write_new(dir, "state.json", &text, e);
	buf_free(&text);
	return rc;
}

static int save(const char *dir, struct err *e)
{
	struct buf config = BUF_INIT(512 * 1024), state = BUF_INIT(STATE_MAX);
	struct jw w;
	int rc;

	jw_init(&w, &config);
	jw_json(&w, vm.config);
	rc = jw_end(&w) ? write_new(dir, "config.json", &config, e) : err_set(e, ERR_INTERNAL, "config.json");
	if (rc == 0)
		rc = machine_save(vm.machine, &state, e);
	if (rc == 0)
		rc = write_state(dir, &state, e);
	buf_free(&config);
	buf_free(&state);
	return rc;
}

enum vm_result vm_snapshot(const char *body, size_t n, struct err *e)
{
	struct json *request;
	char dir[4096];
	int rc;

	if (vm_read(config_snapshot, body, n, &request, e))
		return VM_INVALID;
	rc = url_path(json_get_text(request, "destination_url"), dir, sizeof(dir), e);
	json_free(request);
	if (rc)
		return VM_FAILED;
	if (!vm.machine || vm.state != VM_PAUSED) {
		err_set(e, ERR_CONFLICT, "the VM must be paused before it is snapshotted");
		return vm.config ? VM_FAILED : VM_ABSENT;
	}
	event_say("vm", "snapshotting", NULL, NULL);
	if (save(dir, e))
		return VM_FAILED;
	event_say("vm", "snapshotted", NULL, NULL);
	return VM_OK;
}

/* --- restore -------------------------------------------------------------------------------------------------------------------
 */

static int load_config(const char *dir, struct err *e)
{
	struct buf text = BUF_INIT(512 * 1024);
	struct json *config;
	int rc = read_whole(dir, "config.json", &text, e);

	if (rc == 0)
		rc = vm_read(config_vm, (const char *)text.data, text.len, &config, e);
	buf_free(&text);
	if (rc)
		return -1;
	if (config_check_boot(config, e)) {
		json_free(config);
		return -1;
	}
	return vm_take_config(config, e);
}

static int load_state(const char *dir, struct buf *state, struct err *e)
{
	struct buf text = BUF_INIT(STATE_MAX);
	struct json *v = NULL;
	const char *bytes;
	int rc = read_whole(dir, "state.json", &text, e);

	if (rc == 0)
		rc = json_parse((const char *)text.data, text.len, &v, e);
	buf_free(&text);
	if (rc)
		return -1;
	bytes = json_get_text(v, "qemu");
	if (bytes && *bytes != '\0')
		rc = text_unb64(bytes, strlen(bytes), state) ? 0 : err_set(e, ERR_INVALID, "%s/state.json is damaged", dir);
	else
		rc = read_whole(dir, "memory-ranges", state, e);
	json_free(v);
	return rc;
}

static int restore(const char *dir, struct err *e)
{
	struct buf state = BUF_INIT(STATE_MAX);
	int rc = load_config(dir, e);

	if (rc == 0)
		rc = load_state(dir, &state, e);
	if (rc == 0)
		rc = vm_start_machine(true, e);
	if (rc == 0)
		rc = machine_load(vm.machine, &state, e);
	buf_free(&state);
	return rc;
}

enum vm_result vm_restore(const char *body, size_t n, struct err *e)
{
	struct json *request;
	char dir[4096];
	bool resume;
	int rc;

	if (vm_read(config_restore, body, n, &request, e))
		return VM_INVALID;
	resume = json_get_bool(request, "resume", false);
	rc = url_path(json_get_text(request, "source_url"), dir, sizeof(dir), e);
	if (rc == 0 && strcmp(json_get_text(request, "memory_restore_mode"), "Copy") != 0)
		rc = err_set(e, ERR_INVALID, "this stand-in restores by Copy");
	json_free(request);
	if (rc == 0 && vm.config)
		rc = err_set(e, ERR_CONFLICT, "VM is already created");
	if (rc)
		return VM_FAILED;
	event_say("vm", "restoring", NULL, NULL);
	if (restore(dir, e)) {
		struct err ignored;

		/* Cleaned, so that it may be tried again. */
		vm_delete(&ignored);
		return VM_FAILED;
	}
	vm.state = VM_PAUSED;
	event_say("vm", "restored", NULL, NULL);
	return resume ? vm_resume(e) : VM_OK;
}
