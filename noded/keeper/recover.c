/*
 * What an earlier noded left behind: VMs whose brokers live are taken over (adopt.c); what cannot be is killed, cleaned up, and its
 * run reported. Called once at start, before link; blocks for the disk, and until the earlier link has ended.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "jail/cgroup.h"
#include "keeper/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define KILL_WAIT_MS 2000
#define LINK_WAIT_MS 5000
#define PARENTS_FILE "cgroup-parents"
#define PARENTS_BYTES 8192
#define FORGET_TRIES 20
#define FORGET_PAUSE_MS 10

struct recovery {
	struct keeper *keeper;
	uint32_t runs;
	bool link_lives;
};

/*
 * A process that the journal names, if it is still that one. Its group's kill reaches it too; this is for one that never got there,
 * or whose group is elsewhere now because cgroup_parent (or the session that noded was started from) is another one. Then nothing
 * but this wait says that it is gone.
 */
static void kill_named(const struct journal *j, const char *boot_id, enum slot_role role)
{
	const struct journal_process *p = &j->process[role];
	struct pollfd gone = { .events = POLLIN };

	if (p->pid <= 0 || p->start_time == 0 || strcmp(j->boot_id, boot_id) != 0)
		return;
	gone.fd = (int)syscall(SYS_pidfd_open, p->pid, 0);
	if (gone.fd < 0)
		return;
	/* Checked after it was opened, so that the number cannot have changed hands in between. */
	if (journal_start_time(p->pid) == p->start_time && syscall(SYS_pidfd_send_signal, gone.fd, SIGKILL, NULL, 0) == 0 &&
			poll(&gone, 1, KILL_WAIT_MS) <= 0)
		log_error("run=%s vm=%s process of an earlier noded does not end pid=%d", j->run_id, j->vm, (int)p->pid);
	close(gone.fd);
}

/* What is left of it is on its way out; the steps of vm.c clean up behind it. */
static void end_found(struct vm *vm, enum adopt_verdict verdict, const char *why)
{
	const struct adopt_meaning *m = adopt_meaning(verdict);
	const struct journal *j = &vm->journal;
	char text[400];

	vm->keeper->stats.adoptions[m->count]++;
	for (int role = 0; role < SLOT_ROLES; role++) {
		kill_named(j, vm->keeper->host.boot_id, (enum slot_role)role);
		if (vm->proc[role].child)
			child_leave(vm->proc[role].child);
		vm->proc[role].child = NULL;
		vm->proc[role].state = vm->proc[role].cgroup ? PROC_LEFT : PROC_NONE;
	}
	vm->adopt_began_ns = 0;
	if (j->kind != JOURNAL_RUN) {
		vm_kill_silently(vm);
		return;
	}
	if (!text_fmt(text, sizeof(text), why ? "%s: %.200s" : "%s", m->text, why))
		text[0] = '\0';
	/* A run that had not started is no worse for it: it goes to the next host, and no attempt is counted. */
	vm_end(vm, j->state < JOURNAL_ASKED ? ERRCODE_NODE_RESTARTED : m->code, text);
}

/* Everything that it holds is counted first: nothing is given to others before it is gone. */
static struct vm *hold(struct keeper *k, const struct journal *j, bool *slot)
{
	struct vm *vm = vm_new(k, j);

	if (!vm)
		return NULL;
	vm->recovered = true;
	admission_hold(&k->admission, j->memory_mib, j->vcpus);
	*slot = slots_hold(k->slots, j->slot);
	for (int role = 0; role < SLOT_ROLES; role++) {
		vm->proc[role].cgroup = cgroup_adopt(k->host.cgroups, j->cgroup[role]);
		vm->proc[role].state = vm->proc[role].cgroup ? PROC_LEFT : PROC_NONE;
	}
	/* A warm VM has one too, empty: it is there before the run is. */
	if (j->kind != JOURNAL_GOLDEN && !j->spool_is_memfd &&
			text_fmt(vm->spool_path, sizeof(vm->spool_path), "%s/%s", k->spool_dir, j->vm))
		vm->spool_fd = open(vm->spool_path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
	return vm;
}

/* A slot that two entries name is neither's. */
static bool slot_is_its_own(const struct keeper *k, const struct vm *vm)
{
	for (const struct vm *other = k->vms; other; other = other->next)
		if (other != vm && !other->seen.closed && other->journal.slot == vm->journal.slot)
			return false;
	return true;
}

void recover_entry(struct keeper *k, const struct journal *j)
{
	bool slot = false;
	struct vm *vm = hold(k, j, &slot);
	enum adopt_verdict verdict;
	struct err e;

	if (!vm) {
		log_error("run=%s vm=%s no memory to recover it", j->run_id, j->vm);
		return;
	}
	verdict = adopt_look(vm, slot && slot_is_its_own(k, vm));
	log_info("run=%s vm=%s found in the journal state=%d slot=%u verdict=%d", j->run_id, j->vm, (int)j->state, j->slot,
			(int)verdict);
	if (verdict != ADOPT_TAKE)
		end_found(vm, verdict, NULL);
	else if (adopt_begin(vm, &e))
		end_found(vm, ADOPT_NO_SOCKET, e.text);
	else
		vm_step_all(vm);
}

static void on_entry(void *arg, const struct journal *j)
{
	struct recovery *r = arg;

	r->runs++;
	recover_entry(r->keeper, j);
}

/* Its processes are killed already; the kernel may take a moment to be done with them. */
static bool forget_parent(const struct keeper *k, const char *parent)
{
	for (int tries = 0; tries < FORGET_TRIES; tries++) {
		if (cgroups_forget(parent, k->tag))
			return true;
		poll(NULL, 0, FORGET_PAUSE_MS);
	}
	return false;
}

/*
 * The parents of groups that this noded had: a text, one a line, the present one last. Those before it are removed as soon as they
 * can be; the rest stays written for the next start.
 */
static void forget_parents(struct keeper *k)
{
	const char *now = k->config->cgroup_parent ? k->config->cgroup_parent : "";
	struct buf had = BUF_INIT(PARENTS_BYTES), left = BUF_INIT(PARENTS_BYTES);
	char path[600], line[CGROUP_PATH_MAX];
	const char *at = "";
	struct err e;

	if (text_fmt(path, sizeof(path), "%s/%s", k->config->state_dir, PARENTS_FILE) && files_load(path, &had, &e) == 0 &&
			buf_cstr(&had))
		at = (const char *)had.data;
	while (*at) {
		size_t n = strcspn(at, "\n");
		bool whole = text_fmt(line, sizeof(line), "%.*s", (int)n, at);

		at += at[n] ? n + 1 : n;
		if (!whole || strcmp(line, now) == 0)
			continue;
		if (forget_parent(k, line))
			log_info("an earlier cgroup_parent is gone path=%s", line);
		else if (!buf_add_str(&left, line) || !buf_add_str(&left, "\n"))
			log_warn("too many earlier parents of groups to note path=%s", line);
	}
	if (*now && !(buf_add_str(&left, now) && buf_add_str(&left, "\n")))
		log_warn("too many earlier parents of groups to note");
	if (files_store(k->config->state_dir, PARENTS_FILE, left.len ? left.data : (const uint8_t *)"", left.len, 0600, &e) != 0)
		log_warn("cannot note cgroup_parent, so it stays behind when it is changed error=\"%s\"", e.text);
	buf_free(&had);
	buf_free(&left);
}

uint32_t recover_look_at_slots(struct keeper *k)
{
	uint32_t before = slots_free_count(k->slots), foreign = slots_look(k->slots);

	if (slots_free_count(k->slots) != before)
		link_side_capacity(k);
	/* Not killed: they may be another noded's, whose uid_base overlaps with ours. */
	if (foreign > 0)
		log_warn("processes that are not this noded's have ids of its slots; give it a uid_base of its own slots=%u",
				foreign);
	return foreign;
}

static void on_link_group(void *arg, const char *name)
{
	struct recovery *r = arg;
	struct cgroup *g = reconcile_is_ours(r->keeper, name) ? cgroup_adopt(r->keeper->host.cgroups, name) : NULL;
	struct err e;
	bool lives = true;

	if (!g)
		return;
	/* It speaks for this node until it is dead: two that do would confuse whoever listens. */
	for (int waited = 0; waited < LINK_WAIT_MS && lives; waited += FORGET_PAUSE_MS) {
		cgroup_kill(g);
		lives = cgroup_populated(g);
		if (lives)
			poll(NULL, 0, FORGET_PAUSE_MS);
	}
	if (lives)
		r->link_lives = true;
	else if (cgroup_remove(g, &e) != 0)
		log_debug("link's group stays for a moment name=%s", name);
	cgroup_free(g);
}

int recover(struct keeper *k, struct err *e)
{
	struct recovery r = { .keeper = k };

	cgroups_each(k->host.cgroups, "link_", on_link_group, &r);
	if (r.link_lives)
		return err_set(e, ERR_CONFLICT, "the link process of an earlier noded does not end: it is killed and still there");
	if (journal_each(k->journal_dir, on_entry, &r, e))
		return err_wrap(e, "journal");
	reconcile_groups(k);
	forget_parents(k);
	if (r.runs > 0)
		log_info("an earlier noded left vms=%u", r.runs);
	(void)recover_look_at_slots(k);
	reconcile_directories(k);
	return reconcile_start(k, e);
}

/* Spools whose keep time is over: no VM has them any more, and they were last touched when their end was acknowledged. */
void recover_sweep_spools(struct keeper *k)
{
	DIR *d = opendir(k->spool_dir);
	int64_t now = (int64_t)time(NULL);
	struct dirent *entry;
	struct stat st;

	if (!d)
		return;
	while ((entry = readdir(d)) != NULL)
		if (id_valid("vm", entry->d_name) && !vm_named(k, entry->d_name) &&
				fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
				st.st_mtime + k->config->spool_keep_seconds < now)
			unlinkat(dirfd(d), entry->d_name, 0);
	closedir(d);
}
