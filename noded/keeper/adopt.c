/*
 * Taking over a VM that an earlier noded left: looks at what is there, asks its broker over the socket that was made for this, and
 * goes on with it as with any other. The VMM and channel need nothing: their peers are the broker and each other, and they are
 * watched by pid and start time. Keeper's loop; what is read of /proc and cgroupfs does not block. The broker's answer is waited
 * for ADOPT_LIMIT_NS; watch() in keeper.c looks.
 */
#include "keeper/adopt.h"
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "jail/cgroup.h"
#include "keeper/files.h"
#include "proto/adopt.h"
#include "spool.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define PROCS_BYTES (64 * 1024) /* pids of a group: at most a few hundred */

/* --- decisions ---------------------------------------------------------------------------------------------------------------- */

enum adopt_verdict adopt_judge(const struct adopt_seen *seen)
{
	const struct adopt_proc *broker = &seen->proc[SLOT_BROKER];

	if (seen->state == JOURNAL_GONE)
		return ADOPT_OVER;
	if (!seen->same_boot)
		return ADOPT_OTHER_BOOT;
	if (seen->kind == JOURNAL_GOLDEN)
		return ADOPT_GOLDEN;
	if (!broker->named)
		return ADOPT_NOT_STARTED;
	if (!seen->nonce)
		return ADOPT_OLD_JOURNAL;
	if (!broker->alive)
		return ADOPT_NO_BROKER;
	if (!seen->slot)
		return ADOPT_MOVED;
	for (int role = 0; role < SLOT_ROLES; role++)
		if (seen->proc[role].alive && (!seen->proc[role].in_group || !seen->proc[role].right_uid))
			return ADOPT_MOVED;
	return seen->socket ? ADOPT_TAKE : ADOPT_NO_SOCKET;
}

const struct adopt_meaning *adopt_meaning(enum adopt_verdict v)
{
	static const struct adopt_meaning meanings[ADOPT_VERDICTS] = {
		[ADOPT_TAKE] = { "noded was restarted while the run was on this host", ERRCODE_NODE_RESTARTED, STATS_ADOPTED },
		[ADOPT_OVER] = { "noded was restarted when the run was over", ERRCODE_NODE_RESTARTED, STATS_ADOPT_PROCESS },
		[ADOPT_OTHER_BOOT] = { "the host was restarted while the run was on it", ERRCODE_NODE_RESTARTED, STATS_ADOPT_BOOT },
		[ADOPT_GOLDEN] = { "noded was restarted", ERRCODE_NODE_RESTARTED, STATS_ADOPT_UNFIT },
		[ADOPT_NOT_STARTED] = { "noded was restarted before the run's VM was started", ERRCODE_NODE_RESTARTED,
				STATS_ADOPT_UNFIT },
		[ADOPT_OLD_JOURNAL] = { "noded was restarted as another version, which cannot take the run over",
				ERRCODE_NODE_RESTARTED, STATS_ADOPT_JOURNAL },
		[ADOPT_NO_BROKER] = { "the run's broker ended while noded was not there", ERRCODE_BROKER_LOST,
				STATS_ADOPT_PROCESS },
		[ADOPT_MOVED] = { "noded was restarted with another cgroup_parent, uid_base or max_vms, and cannot take the run "
				  "over",
				ERRCODE_NODE_RESTARTED, STATS_ADOPT_UNFIT },
		[ADOPT_NO_SOCKET] = { "noded was restarted, and the run's broker cannot be reached", ERRCODE_NODE_RESTARTED,
				STATS_ADOPT_REFUSED },
	};

	return &meanings[v];
}

bool adopt_may_leave(const struct adopt_leave *l)
{
	return !l->ending && l->broker_alive && !l->has_inputs && !l->golden && !l->boots_unasked;
}

bool adopt_stays(const struct vm *vm)
{
	const struct adopt_leave l = {
		.ending = vm->want.end,
		.broker_alive = vm->broker && vm->proc[SLOT_BROKER].state == PROC_ALIVE,
		.has_inputs = vm->assignment || vm->seen.waiting,
		.golden = vm->journal.kind == JOURNAL_GOLDEN,
		.boots_unasked = vm->journal.kind == JOURNAL_WARM && !vm->warm_ready && vm->adopt_began_ns == 0,
	};

	return adopt_may_leave(&l);
}

/* --- the socket --------------------------------------------------------------------------------------------------------------- */

static int dial(const struct vm *vm, struct err *e)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd;

	if (!text_fmt(at.sun_path, sizeof(at.sun_path), "%s/%s/%s", vm->keeper->vm_dir, vm->journal.vm, VM_CTL_NAME))
		return err_set(e, ERR_LIMIT, "run_dir is too long");
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && connect(fd, (const struct sockaddr *)&at, sizeof(at)) == 0)
		return fd;
	err_set_errno(e, "connect to %s", at.sun_path);
	if (fd >= 0)
		close(fd);
	return -1;
}

bool adopt_identify(struct vm *vm)
{
	struct role_identity m = { .vm = "" };
	struct buf b = BUF_INIT(256);
	bool sent;

	memcpy(m.vm, vm->journal.vm, sizeof(m.vm));
	memcpy(m.nonce, vm->journal.ctl_nonce, sizeof(m.nonce));
	role_identity_encode(&m, &b);
	sent = !b.failed && framed_send(vm->broker, RF_BROKER_IDENTITY, b.data, b.len);
	buf_free(&b);
	return sent;
}

/* --- looking ------------------------------------------------------------------------------------------------------------------ */

static bool in_group(const struct cgroup *g, int32_t pid)
{
	struct buf b = BUF_INIT(PROCS_BYTES);
	char path[CGROUP_PATH_MAX + 32], line[16];
	bool found = false;
	const char *text;
	struct err e;

	if (g && text_fmt(path, sizeof(path), "%s/cgroup.procs", cgroup_dir(g, 0)) &&
			text_fmt(line, sizeof(line), "%d\n", (int)pid) && files_load(path, &b, &e) == 0 &&
			(text = buf_cstr(&b)) != NULL)
		for (const char *at = text; at && *at && !found; at = strchr(at, '\n'), at = at ? at + 1 : NULL)
			found = strncmp(at, line, strlen(line)) == 0;
	buf_free(&b);
	return found;
}

static void look_at(const struct vm *vm, enum slot_role role, struct adopt_proc *out)
{
	const struct journal_process *p = &vm->journal.process[role];
	const uint32_t want = slots_uid(vm->keeper->slots, vm->journal.slot, role);
	uint32_t uid;

	*out = (struct adopt_proc){ .named = p->pid > 0 && p->start_time > 0 };
	if (!out->named || journal_start_time(p->pid) != p->start_time)
		return;
	out->alive = true;
	out->in_group = in_group(vm->proc[role].cgroup, p->pid);
	out->right_uid = slots_uid_of(p->pid, &uid) && uid == want;
}

enum adopt_verdict adopt_look(const struct vm *vm, bool slot)
{
	static const uint8_t none[JOURNAL_NONCE];
	struct adopt_seen seen = {
		.kind = vm->journal.kind,
		.state = vm->journal.state,
		.same_boot = strcmp(vm->journal.boot_id, vm->keeper->host.boot_id) == 0,
		.nonce = memcmp(vm->journal.ctl_nonce, none, sizeof(none)) != 0,
		.slot = slot,
	};
	char path[256];
	struct stat st;

	for (int role = 0; role < SLOT_ROLES && seen.same_boot; role++)
		look_at(vm, (enum slot_role)role, &seen.proc[role]);
	seen.socket = text_fmt(path, sizeof(path), "%s/%s/%s", vm->keeper->vm_dir, vm->journal.vm, VM_CTL_NAME) &&
		      lstat(path, &st) == 0 && S_ISSOCK(st.st_mode);
	return adopt_judge(&seen);
}

/* --- asking ------------------------------------------------------------------------------------------------------------------- */

static bool ask(struct vm *vm)
{
	struct role_adopt m = { .version = ADOPT_VERSION, .lease_deadline_boot_ns = vm->keeper->lease_deadline_boot_ns };
	struct buf b = BUF_INIT(256);
	bool sent;

	memcpy(m.nonce, vm->journal.ctl_nonce, sizeof(m.nonce));
	role_adopt_encode(&m, &b);
	sent = !b.failed && framed_send(vm->broker, RF_BROKER_ADOPT, b.data, b.len);
	buf_free(&b);
	return sent;
}

int adopt_begin(struct vm *vm, struct err *e)
{
	int fd = dial(vm, e);

	if (fd < 0 || broker_side_open(vm, fd, e))
		return -1;
	if (!ask(vm))
		return err_set(e, ERR_UNAVAILABLE, "its broker does not take frames");
	for (int role = 0; role < SLOT_ROLES; role++) {
		struct err gone;

		if (vm_watch_process(vm, (enum slot_role)role, &gone) == 0)
			vm->proc[role].state = PROC_ALIVE;
	}
	if (vm->proc[SLOT_VMM].state != PROC_ALIVE) {
		vm->vmm_ended = true;
		vm->vmm_status = CHILD_STATUS_UNKNOWN;
		vm->destroy_boot_ns = clock_boot_ns();
		if (!text_copy(vm->vmm_text, sizeof(vm->vmm_text), "The VMM ended while noded was not there: how is not known."))
			vm->vmm_text[0] = '\0';
	}
	vm->adopt_began_ns = clock_boot_ns();
	return 0;
}

/* Nobody can say any more whether its start was granted: link takes it for granted, and controld knows. */
void adopt_over(struct vm *vm)
{
	if (vm->adopt_began_ns == 0)
		return;
	vm->adopt_began_ns = 0;
	link_side_vm(vm->keeper, vm);
}

void adopt_failed(struct vm *vm, const char *why)
{
	char text[400];

	vm->keeper->stats.adoptions[STATS_ADOPT_REFUSED]++;
	adopt_over(vm);
	if (!text_fmt(text, sizeof(text), "noded was restarted, and the run's broker could not be gone on with: %.256s", why))
		text[0] = '\0';
	vm_end(vm, ERRCODE_NODE_RESTARTED, text);
}

/* --- the answer --------------------------------------------------------------------------------------------------------------- */

static int check_answer(const struct vm *vm, const struct role_adopted *m, struct err *e)
{
	static const uint8_t none[TOKEN_LEN];
	const bool run = vm->journal.kind == JOURNAL_RUN;

	if (m->version != ADOPT_VERSION)
		return err_set(e, ERR_PROTOCOL, "it is of a noded that speaks version %u, this one speaks %u", m->version,
				ADOPT_VERSION);
	if (strcmp(m->vm, vm->journal.vm) != 0)
		return err_set(e, ERR_PROTOCOL, "it is the broker of another VM");
	if (run != ((m->state & ADOPTED_ASSIGNED) != 0))
		return err_set(e, ERR_PROTOCOL, run ? "it has no run" : "it has a run that the journal does not know");
	if (memcmp(m->token, run ? vm->journal.token : none, TOKEN_LEN) != 0)
		return err_set(e, ERR_PROTOCOL, "it has another run, or another attempt of it");
	if (!run && !(m->state & ADOPTED_READY))
		return err_set(e, ERR_PROTOCOL, "its guest has not said hello");
	return 0;
}

/*
 * The record of a run that leaves nothing on disk lived on in the broker alone. What it hands over is opened again with root's
 * rights, so it must be what we made: a file of memory that has no name, open for writing, of the one size, and of this run.
 */
static int take_spool(struct vm *vm, int fd, struct err *e)
{
	struct spool *s;
	struct stat st;
	int flags = fcntl(fd, F_GETFL), copy, rc = 0;

	if (flags < 0 || (flags & O_ACCMODE) != O_RDWR || (flags & O_PATH) != 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) ||
			st.st_nlink != 0 || st.st_size != SPOOL_BYTES || fcntl(fd, F_GET_SEALS) < 0)
		return err_set(e, ERR_PROTOCOL, "what it calls the run's record is none");
	copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (copy < 0)
		return err_set_errno(e, "the run's record");
	if (spool_open(copy, false, &s, e))
		return -1;
	if (strcmp(spool_head(s)->run_id, vm->journal.run_id) != 0 ||
			memcmp(spool_head(s)->token, vm->journal.token, TOKEN_LEN) != 0)
		rc = err_set(e, ERR_PROTOCOL, "the record is another run's");
	spool_close(s);
	if (rc == 0) {
		vm->spool_fd = fd;
		link_side_vm(vm->keeper, vm); /* it was told of the run without it */
	}
	return rc;
}

static void go_on(struct vm *vm, const struct role_adopted *m)
{
	struct keeper *k = vm->keeper;
	const bool boots = !(m->state & (ADOPTED_ASKED | ADOPTED_ENDING | ADOPTED_READY));

	vm->adopt_began_ns = 0;
	vm->lease_ns = vm_lease_later(0, m->lease_deadline_boot_ns, clock_boot_ns());
	/* Its destruction was ordered, and perhaps done and told: a receipt is signed only where this keeper has seen to it too. */
	if (m->state & ADOPTED_ENDING)
		vm->want.destroy = true;
	vm->exec_boot_ns = m->boot_ns > 0 ? m->boot_ns : clock_boot_ns();
	if (boots && vm->proc[SLOT_VMM].state == PROC_ALIVE) {
		vm->booting = true;
		vm->boot_began_ns = clock_boot_ns(); /* the deadline is the broker's; keeper's backstop begins anew */
		k->booting++;
	}
	if (vm->journal.kind == JOURNAL_WARM) {
		vm->prepared = true;
		vm->boot_began_ns = vm->exec_boot_ns;
		pool_ready(vm);
	}
	if (vm->vmm_ended)
		broker_side_exited(vm);
	if (k->lease_deadline_boot_ns > 0)
		broker_side_lease(vm, k->lease_deadline_boot_ns);
	k->stats.adoptions[STATS_ADOPTED]++;
	log_info("run=%s vm=%s adopted state=%" PRIu32 " vmm=%d channel=%d lease_ms=%" PRId64, vm->journal.run_id, vm->journal.vm,
			m->state, vm->proc[SLOT_VMM].state == PROC_ALIVE, vm->proc[SLOT_CHANNEL].state == PROC_ALIVE,
			m->lease_deadline_boot_ns > 0 ? (m->lease_deadline_boot_ns - clock_boot_ns()) / 1000000 : 0);
	keeper_changed(k);
}

int adopt_answered(struct vm *vm, const uint8_t *body, size_t n, int fd, struct err *e)
{
	struct role_adopted m;
	bool kept = false;

	if (role_adopted_decode(body, n, &m, e) || check_answer(vm, &m, e)) {
		if (fd >= 0)
			close(fd);
		return -1;
	}
	if (fd >= 0 && vm->spool_fd < 0 && vm->journal.spool_is_memfd) {
		if (take_spool(vm, fd, e)) {
			close(fd);
			return -1;
		}
		kept = true;
	}
	if (fd >= 0 && !kept)
		close(fd);
	if (vm->journal.kind == JOURNAL_RUN && vm->spool_fd < 0)
		return err_set(e, ERR_NOT_FOUND, "the run's record is not there");
	go_on(vm, &m);
	return 0;
}
