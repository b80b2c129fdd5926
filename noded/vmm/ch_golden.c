/*
 * The directory of a golden VM of Cloud Hypervisor (ch_config.h): `memory`, the guest's memory, and `snapshot/`, what vm.snapshot
 * wrote. Made for the golden VM's uid, and made root's when that VM is gone. Only our own image ran in it, but what it left is read
 * with bounds and without following links all the same.
 *
 * Keeper's thread; blocks on small files.
 */
#include "vmm/ch_config.h"

#include "common/json.h"
#include "common/text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG_MAX (256 * 1024)
#define FILES_MAX 16
#define MEMORY "memory"
#define SNAPSHOT "snapshot"
#define CONFIG "config.json"

static int make_memory(int dir, const struct vmm_params *p, struct err *e)
{
	int fd = openat(dir, MEMORY, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	int rc = 0;

	if (fd < 0)
		return err_set_errno(e, "create a golden VM's memory");
	if (fchown(fd, p->uid, p->uid) != 0 || ftruncate(fd, (off_t)p->memory_mib << 20) != 0)
		rc = err_set_errno(e, "a golden VM's memory");
	close(fd);
	return rc;
}

int ch_golden_begin(const struct vmm_params *p, struct err *e)
{
	int dir, rc;

	if (mkdir(p->golden_dir, 0700) != 0)
		return err_set_errno(e, "mkdir %s", p->golden_dir);
	dir = open(p->golden_dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (dir < 0)
		return err_set_errno(e, "open %s", p->golden_dir);
	rc = make_memory(dir, p, e);
	if (rc == 0 && (mkdirat(dir, SNAPSHOT, 0700) != 0 || fchownat(dir, SNAPSHOT, p->uid, p->uid, AT_SYMLINK_NOFOLLOW) != 0 ||
				       fchown(dir, p->uid, p->uid) != 0))
		rc = err_set_errno(e, "make %s", p->golden_dir);
	close(dir);
	return rc;
}

/* --- the configuration of clones ---------------------------------------------------------------------------------------------- */

static int read_config(int dir, struct json **out, struct err *e)
{
	int fd = openat(dir, CONFIG, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;
	char *bytes = NULL;
	int rc = -1;

	if (fd < 0)
		return err_set_errno(e, "the snapshot has no " CONFIG);
	if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size <= 0 || st.st_size > CONFIG_MAX)
		err_set(e, ERR_INVALID, CONFIG " of the snapshot is no file of at most %d bytes", CONFIG_MAX);
	else if ((bytes = malloc((size_t)st.st_size)) == NULL)
		err_set(e, ERR_NOMEM, "no memory");
	else if (pread(fd, bytes, (size_t)st.st_size, 0) != st.st_size)
		err_set(e, ERR_IO, "read " CONFIG " of the snapshot");
	else
		rc = json_parse(bytes, (size_t)st.st_size, out, e);
	free(bytes);
	close(fd);
	return rc;
}

/* The object with the member `name` replaced: by false, or by what `change` writes. */
static void copy_but(struct jw *w, const struct json *v, const char *name, void (*change)(struct jw *, const struct json *))
{
	if (json_type(v) != JSON_OBJECT) {
		jw_json(w, v);
		return;
	}
	jw_object(w);
	for (size_t i = 0; i < json_len(v); i++) {
		jw_key(w, json_key(v, i));
		if (strcmp(json_key(v, i), name) != 0)
			jw_json(w, json_at(v, i));
		else
			change(w, json_at(v, i));
	}
	jw_close(w);
}

static void change_shared(struct jw *w, const struct json *v)
{
	(void)v;
	jw_bool(w, false);
}

static void change_zones(struct jw *w, const struct json *v)
{
	jw_array(w);
	for (size_t i = 0; json_type(v) == JSON_ARRAY && i < json_len(v); i++)
		copy_but(w, json_at(v, i), "shared", change_shared);
	jw_close(w);
}

static void change_memory(struct jw *w, const struct json *v)
{
	copy_but(w, v, "zones", change_zones);
}

/* A clone maps the memory privately, and opens it for reading only: it is every other clone's too. */
static int rewrite_config(int dir, struct err *e)
{
	struct buf out = BUF_INIT(CONFIG_MAX);
	struct json *config = NULL;
	struct jw w;
	int fd, rc = -1;

	if (read_config(dir, &config, e))
		return -1;
	jw_init(&w, &out);
	copy_but(&w, config, "memory", change_memory);
	json_free(config);
	fd = openat(dir, CONFIG ".new", O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0444);
	if (!jw_end(&w))
		err_set(e, ERR_LIMIT, CONFIG " of the snapshot does not fit");
	else if (fd < 0 || write(fd, out.data, out.len) != (ssize_t)out.len || renameat(dir, CONFIG ".new", dir, CONFIG) != 0)
		err_set_errno(e, "write " CONFIG " of the snapshot");
	else
		rc = 0;
	if (fd >= 0)
		close(fd);
	buf_free(&out);
	return rc;
}

/* --- root's from now on ------------------------------------------------------------------------------------------------------- */

static int seal_file(int dir, const char *name, struct err *e)
{
	int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), rc = 0;
	struct stat st;

	if (fd < 0)
		return err_set_errno(e, "%s of the snapshot", name);
	if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_nlink != 1)
		rc = err_set(e, ERR_INVALID, "%s of the snapshot is no file of its own", name);
	else if (fchown(fd, 0, 0) != 0 || fchmod(fd, 0444) != 0)
		rc = err_set_errno(e, "%s of the snapshot", name);
	close(fd);
	return rc;
}

static int seal_all(int dir, struct err *e)
{
	int copy = fcntl(dir, F_DUPFD_CLOEXEC, 3), count = 0, rc = 0;
	DIR *list = copy < 0 ? NULL : fdopendir(copy);
	const struct dirent *ent;

	if (!list) {
		if (copy >= 0)
			close(copy);
		return err_set_errno(e, "list the snapshot");
	}
	while (rc == 0 && (ent = readdir(list)) != NULL) {
		if (strcmp(ent->d_name, ".") == 0 || strcmp(ent->d_name, "..") == 0)
			continue;
		rc = ++count > FILES_MAX ? err_set(e, ERR_LIMIT, "the snapshot has more than %d files", FILES_MAX)
					 : seal_file(dir, ent->d_name, e);
	}
	closedir(list);
	return rc;
}

int ch_golden_seal(const char *path, struct err *e)
{
	int dir = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	int sub = dir < 0 ? -1 : openat(dir, SNAPSHOT, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	int rc = -1;

	if (sub < 0)
		err_set_errno(e, "open %s", path);
	else if (fchown(dir, 0, 0) != 0 || fchown(sub, 0, 0) != 0)
		err_set_errno(e, "take %s back", path);
	else if (rewrite_config(sub, e) == 0 && seal_all(sub, e) == 0 && seal_file(dir, MEMORY, e) == 0) {
		rc = fchmod(sub, 0555) == 0 && fchmod(dir, 0555) == 0 ? 0 : err_set_errno(e, "close %s", path);
	}
	if (sub >= 0)
		close(sub);
	if (dir >= 0)
		close(dir);
	return rc;
}
