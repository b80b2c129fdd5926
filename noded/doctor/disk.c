/*
 * `noded doctor` on the directories of a noded and on who uses them: room, writing to disk, kind of file system, the lock, the user
 * ids. Files that are written here are removed at once. Blocks on the disk.
 */
#include "doctor/doctor_internal.h"

#include "common/clock.h"
#include "common/text.h"
#include "keeper/slots.h"
#include "noded/spool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#define MIB (1024 * 1024)
#define SLOW_SYNC_MS 50
#define ROOM_MIN_MIB 64 /* journal, identity, and the spools of two runs */

/* The directory itself, or the nearest above it that is there. */
static void nearest(const char *path, char *out, size_t size)
{
	struct stat st;
	bool fits = text_copy(out, size, path);

	while (!fits || stat(out, &st) != 0 || !S_ISDIR(st.st_mode)) {
		char *slash = fits ? strrchr(out, '/') : NULL;

		if (!slash || slash == out) {
			memcpy(out, "/", 2);
			return;
		}
		*slash = '\0';
	}
}

/* Writes and syncs a file of a page that is gone afterwards; ms it took, -1 with errno where it cannot be done. */
static int64_t sync_ms(const char *dir)
{
	static const char page[4096] = "doctor";
	int64_t began = clock_mono_ns();
	int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	bool ok;
	int saved;

	if (fd < 0)
		return -1;
	ok = write(fd, page, sizeof(page)) == (ssize_t)sizeof(page) && fsync(fd) == 0;
	saved = errno;
	close(fd);
	errno = saved;
	return ok ? (clock_mono_ns() - began) / 1000000 : -1;
}

static void look_at_state(struct doctor *d)
{
	const char *dir = d->config->state_dir;
	char at[1024];
	struct statfs fs;
	int64_t ms, room_mib, want_mib = d->config->max_vms * (SPOOL_BYTES / MIB + 1);

	nearest(dir, at, sizeof(at));
	if (statfs(at, &fs) != 0) {
		doctor_say(d, "state_dir", FINDING_FAIL, "make the directory, or set state_dir", "%s: %s", at, strerror(errno));
		return;
	}
	room_mib = (int64_t)(fs.f_bavail * (uint64_t)fs.f_bsize / MIB);
	ms = sync_ms(at);
	if (ms < 0)
		doctor_say(d, "state_dir", FINDING_FAIL, "give it a file system that root can write to, or free room on it",
				"%s: a file cannot be written and synced: %s", at, strerror(errno));
	else if (room_mib < ROOM_MIN_MIB)
		doctor_say(d, "state_dir", FINDING_FAIL, "free room, or set state_dir to a larger file system",
				"%s: %" PRId64 " MiB free, at least %d are needed", at, room_mib, ROOM_MIN_MIB);
	else if (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC)
		doctor_say(d, "state_dir", FINDING_WARN, "set state_dir to a directory on a disk",
				"%s: a file system in memory; keys, journal and enrolment are lost when the host restarts", at);
	else if (room_mib < want_mib)
		doctor_say(d, "state_dir", FINDING_WARN, "free room, or lower max_vms",
				"%s: %" PRId64 " MiB free; %" PRId64 " VMs at once may write %" PRId64 " MiB of events", at,
				room_mib, d->config->max_vms, want_mib);
	else if (ms > SLOW_SYNC_MS)
		doctor_say(d, "state_dir", FINDING_WARN, "use a faster disk; every start of a VM waits for it some times",
				"%s: writing a file to disk took %" PRId64 " ms", at, ms);
	else
		doctor_say(d, "state_dir", FINDING_OK, NULL, "%s, more than %" PRId64 " MiB free, files reach the disk", at,
				room_mib / 1024 * 1024);
}

static void look_at_run(struct doctor *d)
{
	const char *dir = d->config->run_dir;
	char at[1024];
	struct statfs fs;

	nearest(dir, at, sizeof(at));
	if (access(at, W_OK) != 0 || statfs(at, &fs) != 0)
		doctor_say(d, "run_dir", FINDING_FAIL, "mount it writable for root, or set run_dir", "%s: %s", at, strerror(errno));
	else if (fs.f_files > 0 && (int64_t)fs.f_ffree < d->config->max_vms * 8)
		doctor_say(d, "run_dir", FINDING_FAIL, "remount it with more inodes, or set run_dir",
				"%s: %" PRIu64 " inodes free, %" PRId64 " VMs at once need %" PRId64, at, (uint64_t)fs.f_ffree,
				d->config->max_vms, d->config->max_vms * 8);
	else
		doctor_say(d, "run_dir", FINDING_OK, NULL, "%s, writable", at);
}

/* Who holds the lock stands in /proc/locks; taking it, to see, could stop a noded that starts at this moment. */
static void look_at_lock(struct doctor *d)
{
	char path[600], line[256], mark[64];
	struct stat st;
	FILE *locks;
	int pid = 0;

	if (!text_fmt(path, sizeof(path), "%s/lock", d->config->state_dir) || stat(path, &st) != 0 ||
			!text_fmt(mark, sizeof(mark), ":%" PRIu64 " ", (uint64_t)st.st_ino) ||
			(locks = fopen("/proc/locks", "re")) == NULL)
		return;
	while (!d->noded_runs && fgets(line, sizeof(line), locks)) {
		const char *write = strstr(line, " FLOCK  ADVISORY  WRITE ");

		if (!write || !strstr(line, mark))
			continue;
		d->noded_runs = true;
		pid = (int)strtol(write + strlen(" FLOCK  ADVISORY  WRITE "), NULL, 10);
	}
	(void)fclose(locks);
	if (d->noded_runs)
		doctor_say(d, "noded", FINDING_OK, NULL, "process %d works on %s", pid, d->config->state_dir);
}

/* VMs that a noded left for the next one are in the journal; their ids are no stranger's. */
static bool journal_has_entries(const struct noded_config *c)
{
	char path[600];
	struct dirent *entry;
	bool found = false;
	DIR *dir;

	if (!text_fmt(path, sizeof(path), "%s/journal", c->state_dir) || (dir = opendir(path)) == NULL)
		return false;
	while (!found && (entry = readdir(dir)) != NULL)
		found = strncmp(entry->d_name, "vm_", 3) == 0;
	closedir(dir);
	return found;
}

static void look_at_ids(struct doctor *d)
{
	const struct noded_config *c = d->config;
	int64_t last = c->uid_base + SLOT_ROLES * c->max_vms - 1;
	struct slots *s;
	struct err e;
	uint32_t used;

	if (slots_new((uint32_t)c->uid_base, (uint32_t)c->max_vms, &s, &e)) {
		doctor_say(d, "user ids", FINDING_FAIL, "free memory", "%s", e.text);
		return;
	}
	used = slots_look(s);
	slots_free(s);
	if (used == 0)
		doctor_say(d, "user ids", FINDING_OK, NULL, "%" PRId64 " to %" PRId64 " are free", c->uid_base, last);
	else if (d->noded_runs || journal_has_entries(c))
		doctor_say(d, "user ids", FINDING_OK, NULL, "%" PRId64 " to %" PRId64 ", those of %" PRIu32 " VMs in use",
				c->uid_base, last, used);
	else
		doctor_say(d, "user ids", used == (uint32_t)c->max_vms ? FINDING_FAIL : FINDING_WARN,
				"end the processes that run under them, or set uid_base to ids that nothing else uses",
				"%" PRId64 " to %" PRId64 ": processes that are not noded's have ids of %" PRIu32 " of %" PRId64
				" VMs",
				c->uid_base, last, used, c->max_vms);
}

void doctor_look_at_disk(struct doctor *d)
{
	look_at_state(d);
	look_at_run(d);
	look_at_lock(d);
	look_at_ids(d);
}
