/*
 * Keeper's end of link: starts it, restarts it with backoff, tells it all over again what lives here, and carries its orders out.
 * What link says was checked by link, but link talks to a network: lengths and states are checked here too. Keeper's loop; never
 * blocks but for files at the enrolment.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "jail/spawn.h"

#include <event2/event.h>
#include <fcntl.h>
#include <sodium.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINK_QUEUE_MAX (64 * 1024 * 1024) /* ends with their outputs, when a new link is told of many runs at once */
#define BACKOFF_MAX_MS 10000
#define GOOD_LIFE_MS 60000 /* a link that lived this long starts over with the least backoff */

static int relayed(struct keeper *k, const uint8_t *body, size_t n, struct err *e);

/* --- to link ------------------------------------------------------------------------------------------------------------------ */

void link_side_send(struct keeper *k, uint8_t type, const void *body, size_t n)
{
	if (!k->link.frames || framed_send(k->link.frames, type, body, n))
		return;
	/* It does not read any more. A new one is told everything. */
	log_error("link does not take frames type=%u queued=%zu", type, framed_queued(k->link.frames));
	if (k->link.child)
		child_kill(k->link.child);
}

void link_side_capacity(struct keeper *k)
{
	struct buf b = BUF_INIT(64);
	uint32_t slots = slots_free_count(k->slots) + pool_slots(k); /* others use the ids of some */
	struct admission_offer o;
	struct admission a;

	pool_offer(k, &a);
	admission_offer(&a, &o);
	if (o.free_slots > slots)
		o.free_slots = slots;
	if (k->stopping || k->host.image_name[0] == '\0')
		o.free_memory_mib = o.free_vcpus = o.free_slots = 0;
	wire_put_u32(&b, o.free_memory_mib);
	wire_put_u32(&b, o.free_vcpus);
	wire_put_u32(&b, o.free_slots);
	wire_put_u32(&b, o.total_memory_mib);
	wire_put_u32(&b, o.total_vcpus);
	wire_put_u32(&b, o.total_slots);
	if (!b.failed)
		link_side_send(k, RF_LINK_CAPACITY, b.data, b.len);
	buf_free(&b);
}

static enum role_vm_state state_for_link(const struct vm *vm)
{
	/* Whatever became of it: as long as START was not asked for, nothing of it may be sent as if it ran. */
	if (vm->journal.state == JOURNAL_ADMITTED)
		return VM_STARTING;
	/* It was asked for, and whether it was granted is its broker's to say: its frames, or its record, tell link. */
	if (vm->adopt_began_ns > 0 && !vm->want.end)
		return VM_STARTING;
	return vm->want.end || vm->replay[REPLAY_END].body ? VM_ENDED : VM_RUNNING;
}

void link_side_relay(struct keeper *k, struct vm *vm, uint8_t type, const void *body, size_t n)
{
	struct buf b = BUF_INIT(ROLE_FRAME_MAX);

	/* keeper's own report of an end is kept with the broker's frames, but is a frame of its own. */
	wire_put_raw(&b, vm->journal.token, TOKEN_LEN);
	if (type != RF_LINK_ENDED)
		wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	if (!b.failed)
		link_side_send(k, type == RF_LINK_ENDED ? RF_LINK_ENDED : RF_LINK_FROM_BROKER, b.data, b.len);
	buf_free(&b);
}

void link_side_vm(struct keeper *k, struct vm *vm)
{
	struct role_vm m = { .state = (uint8_t)state_for_link(vm), .first_seq = vm->journal.first_seq };
	struct buf b = BUF_INIT(256);
	char path[64];
	int fd = -1;

	if (!k->link.frames || vm->journal.kind != JOURNAL_RUN)
		return;
	memcpy(m.run_id, vm->journal.run_id, sizeof(m.run_id));
	memcpy(m.token, vm->journal.token, TOKEN_LEN);
	role_vm_encode(&m, &b);
	if (vm->spool_fd >= 0 && text_fmt(path, sizeof(path), "/proc/self/fd/%d", vm->spool_fd))
		fd = open(path, O_RDONLY | O_CLOEXEC); /* a descriptor of its own, that cannot write */
	if (b.failed || !framed_send_fds(k->link.frames, RF_LINK_VM, b.data, b.len, &fd, fd >= 0 ? 1 : 0))
		log_error("run=%s link cannot be told of it", vm->journal.run_id);
	if (fd >= 0)
		close(fd);
	buf_free(&b);
	for (int i = 0; i < REPLAY_COUNT; i++)
		if (vm->replay[i].body)
			link_side_relay(k, vm, vm->replay[i].type, vm->replay[i].body, vm->replay[i].n);
	if (vm->refused && vm->seen.reported && !vm->silent)
		link_side_refused(k, vm->journal.run_id, vm->journal.token, vm->refuse_failed, vm->end_code, vm->end_text);
}

void link_side_gone(struct keeper *k, const uint8_t token[TOKEN_LEN])
{
	link_side_send(k, RF_LINK_GONE, token, TOKEN_LEN);
}

void link_side_refused(struct keeper *k, const char *run_id, const uint8_t token[TOKEN_LEN], bool failed, enum errcode code,
		const char *text)
{
	struct buf b = BUF_INIT(2048);

	log_warn("run=%s refused failed=%d code=%s reason=\"%s\"", run_id, failed, errcode_text(code), text);
	wire_put_str(&b, run_id);
	wire_put_raw(&b, token, TOKEN_LEN);
	wire_put_bool(&b, failed);
	wire_put_u32(&b, (uint32_t)code);
	wire_put_str(&b, text);
	if (!b.failed)
		link_side_send(k, RF_LINK_REFUSED, b.data, b.len);
	buf_free(&b);
}

static void send_init(struct keeper *k)
{
	struct role_link_init init = { .epoch = k->epoch, .poll_ms = LINK_POLL_MS };
	struct buf b = BUF_INIT(32768);
	const char *addresses = k->config->controld;
	bool ok = true;

	identity_fill(k->identity, &init);
	if (!identity_enrolled(k->identity)) {
		ok = text_copy(init.join_token, sizeof(init.join_token), k->token_text) &&
		     text_copy(init.addresses, sizeof(init.addresses), k->token->addresses) &&
		     text_copy(init.ca_pem, sizeof(init.ca_pem), k->token->ca_pem);
	}
	if (addresses && *addresses)
		ok = ok && text_copy(init.addresses, sizeof(init.addresses), addresses);
	ok = ok && text_copy(init.isolation, sizeof(init.isolation), k->host.isolation) &&
	     text_copy(init.labels, sizeof(init.labels), k->config->labels ? k->config->labels : "");
	if (k->config->node_name && *k->config->node_name)
		ok = ok && text_copy(init.name, sizeof(init.name), k->config->node_name);
	else if (gethostname(init.name, sizeof(init.name) - 1) != 0 || init.name[0] == '\0')
		ok = ok && text_copy(init.name, sizeof(init.name), "node");
	role_link_init_encode(&init, &b);
	if (!ok || b.failed)
		log_error("link cannot be told who it is: addresses, labels or token are too long");
	else
		link_side_send(k, RF_LINK_INIT, b.data, b.len);
	sodium_memzero(&init, sizeof(init));
	if (b.data)
		sodium_memzero(b.data, b.len);
	buf_free(&b);
}

/* --- from link ---------------------------------------------------------------------------------------------------------------- */

static int take_enrolled(struct keeper *k, const uint8_t *body, size_t n, struct err *e)
{
	struct link_enrol_reply reply;

	if (identity_enrolled(k->identity) || !k->token)
		return 0; /* said twice */
	if (link_enrol_reply_decode(body, n, &reply, e) || identity_enrol(k->identity, &reply, k->token, e))
		return -1;
	log_info("node=%s enrolled", identity_node_id(k->identity));
	sodium_memzero(k->token_text, strlen(k->token_text));
	sodium_memzero(k->token, sizeof(*k->token));
	free(k->token_text);
	free(k->token);
	k->token_text = NULL;
	k->token = NULL;
	return 0;
}

static int take_assign(struct keeper *k, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	const uint8_t *assignment, *sealed;
	size_t assignment_len, sealed_len;
	int64_t received;

	wire_read_init(&r, body, n);
	assignment = wire_bytes(&r, ASSIGNMENT_MAX, &assignment_len);
	sealed = wire_bytes(&r, 8192, &sealed_len);
	received = wire_i64(&r);
	if (wire_end(&r, "assign", e))
		return -1;
	vm_assign(k, assignment, assignment_len, sealed, sealed_len, received);
	return 0;
}

static void say_ready(struct keeper *k)
{
	char line[640];

	if (k->ready_fd < 0)
		return;
	if (text_fmt(line, sizeof(line), "{\"node\":\"%s\",\"isolation\":\"%s\",\"metrics\":\"%s\",\"pid\":%d}\n",
			    identity_node_id(k->identity), k->host.isolation, k->metrics_address, (int)getpid()) &&
			write(k->ready_fd, line, strlen(line)) < 0)
		log_warn("cannot write to --ready-fd");
	close(k->ready_fd);
	k->ready_fd = -1;
}

static int take_lease(struct keeper *k, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	int64_t deadline;

	wire_read_init(&r, body, n);
	deadline = wire_i64(&r);
	if (wire_end(&r, "lease", e))
		return -1;
	if (deadline <= 0)
		return err_set(e, ERR_PROTOCOL, "a lease without a time");
	k->lease_deadline_boot_ns = vm_lease_later(k->lease_deadline_boot_ns, deadline, clock_boot_ns());
	for (struct vm *vm = k->vms; vm; vm = vm->next)
		broker_side_lease(vm, k->lease_deadline_boot_ns);
	say_ready(k);
	return 0;
}

/* Frames that are one token. A run that is not here is nobody's mistake: link and keeper may cross. */
static int take_token(struct keeper *k, uint8_t type, const uint8_t *body, size_t n, struct err *e)
{
	struct vm *vm;

	if (n != TOKEN_LEN)
		return err_set(e, ERR_PROTOCOL, "token of %zu bytes", n);
	vm = vm_find(k, body);
	if (!vm)
		link_side_gone(k, body);
	else if (type == RF_KEEPER_DONE)
		vm_done(vm);
	else
		vm_kill_silently(vm);
	return 0;
}

static int take_drain(struct keeper *k, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	bool drain;

	wire_read_init(&r, body, n);
	drain = wire_bool(&r);
	if (wire_end(&r, "drain", e))
		return -1;
	if (drain != k->draining)
		log_info("draining=%d", drain);
	k->draining = drain;
	keeper_changed(k); /* warm VMs end, or are made again */
	return 0;
}

static int take_runs(struct keeper *k, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	uint32_t dropped, count;

	wire_read_init(&r, body, n);
	dropped = wire_u32(&r);
	count = wire_count(&r, LINK_RUNS_MAX);
	if (r.failed || r.left != (size_t)count * TOKEN_LEN)
		return err_set(e, ERR_PROTOCOL, "runs of %zu bytes", n);
	reconcile_link_says(k, dropped, r.p, count);
	return 0;
}

static int relayed(struct keeper *k, const uint8_t *body, size_t n, struct err *e)
{
	struct vm *vm;

	if (n < TOKEN_LEN + 1)
		return err_set(e, ERR_PROTOCOL, "relay without token and type");
	vm = vm_find(k, body);
	if (vm)
		broker_side_from_link(vm, body[TOKEN_LEN], body + TOKEN_LEN + 1, n - TOKEN_LEN - 1);
	return 0;
}

static int take_frame(struct keeper *k, uint8_t type, const uint8_t *body, size_t n, struct err *e)
{
	switch (type) {
	case RF_KEEPER_ENROLLED: return take_enrolled(k, body, n, e);
	case RF_KEEPER_ASSIGN: return take_assign(k, body, n, e);
	case RF_KEEPER_LEASE: return take_lease(k, body, n, e);
	case RF_KEEPER_TO_BROKER: return relayed(k, body, n, e);
	case RF_KEEPER_DONE:
	case RF_KEEPER_KILL: return take_token(k, type, body, n, e);
	case RF_KEEPER_DRAIN: return take_drain(k, body, n, e);
	case RF_KEEPER_COMMAND: /* frames come in order, so those of the command were carried out */
		link_side_send(k, RF_LINK_OBEYED, body, n);
		return 0;
	case RF_KEEPER_RUNS: return take_runs(k, body, n, e);
	case RF_KEEPER_IMAGE: return images_wanted(k->images, body, n, e);
	case RF_KEEPER_IMAGE_BLOB: return images_piece(k->images, body, n, e);
	case RF_KEEPER_BYE:
		if (k->stopping)
			event_base_loopbreak(k->base);
		return 0;
	default: return err_set(e, ERR_PROTOCOL, "frame of type %u", type);
	}
}

static void on_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct keeper *k = arg;
	struct err e;

	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	if (take_frame(k, type, body, n, &e) == 0)
		return;
	log_error("link frame type=%u error=\"%s\"", type, e.text);
	if (k->link.child)
		child_kill(k->link.child);
}

/* --- its life ----------------------------------------------------------------------------------------------------------------- */

static void drop_frames(struct keeper *k)
{
	if (k->link.frames)
		framed_free(k->link.frames);
	k->link.frames = NULL;
}

static void on_frames_end(void *arg, const struct err *e)
{
	struct keeper *k = arg;

	if (e)
		log_warn("link socket error=\"%s\"", e->text);
	drop_frames(k);
	if (k->link.child)
		child_kill(k->link.child);
}

/* Returns how long it waits. */
static int schedule_restart(struct keeper *k)
{
	const int ms = vm_link_pause_ms(k->link.backoff_ms, k->lease_deadline_boot_ns, clock_boot_ns());
	const struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };

	if (!k->stopping)
		event_add(k->link.restart, &tv);
	return ms;
}

static void on_link_exec(void *arg, const struct err *e)
{
	(void)arg;
	if (e)
		log_error("link cannot start error=\"%s\"", e->text);
}

static void on_link_exit(void *arg, int status)
{
	struct keeper *k = arg;
	char text[64];
	int pause_ms;

	child_status_text(status, text);
	k->link.child = NULL;
	drop_frames(k);
	if (clock_boot_ms() - k->link.started_ms >= GOOD_LIFE_MS)
		k->link.backoff_ms = LINK_RESTART_MIN_MS;
	link_group_end(k);
	pause_ms = schedule_restart(k);
	if (!k->stopping)
		k->stats.link_restarts++;
	if (!k->stopping)
		log_warn("link ended status=\"%s\" restart_ms=%d", text, pause_ms);
	k->link.backoff_ms = k->link.backoff_ms * 2 < BACKOFF_MAX_MS ? k->link.backoff_ms * 2 : BACKOFF_MAX_MS;
	keeper_maybe_stopped(k);
}

static int spawn_link(struct keeper *k, int fd, struct err *e)
{
	struct child_ops ops = { .on_exec = on_link_exec, .on_exit = on_link_exit, .arg = k };
	struct jail_spawned spawned;
	struct jail_job job;
	int rc = vm_link_job(k, &job, e);

	if (rc == 0)
		rc = link_group_begin(k, &job, e);
	if (rc == 0)
		rc = jail_spawn(&job, JAIL_NET_HOST, cgroup_dir_fd(k->link.group), &fd, 1, &spawned, e);
	jail_job_free(&job);
	if (rc == 0)
		rc = child_new(k->base, &spawned, &ops, &k->link.child, e);
	if (rc != 0)
		link_group_end(k);
	return rc;
}

static int start_once(struct keeper *k, struct err *e)
{
	struct framed_options opt = {
		.max_frame = ROLE_FRAME_MAX,
		.max_queued = LINK_QUEUE_MAX,
		.on_frame = on_frame,
		.on_end = on_frames_end,
		.arg = k,
	};
	int fd[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) != 0)
		return err_set_errno(e, "socketpair");
	k->link.started_ms = clock_boot_ms();
	if (spawn_link(k, fd[1], e)) {
		close(fd[0]);
		close(fd[1]);
		return -1;
	}
	close(fd[1]);
	opt.fd = fd[0];
	if (framed_new(k->base, &opt, &k->link.frames, e)) {
		child_kill(k->link.child);
		return 0; /* its end starts the next one */
	}
	send_init(k);
	metrics_tell(k);
	link_side_capacity(k);
	images_new_link(k->images);
	for (struct vm *vm = k->vms; vm; vm = vm->next)
		link_side_vm(k, vm);
	return 0;
}

static void on_restart(evutil_socket_t fd, short what, void *arg)
{
	struct keeper *k = arg;
	struct err e;

	(void)fd;
	(void)what;
	if (k->stopping || k->link.child)
		return;
	if (start_once(k, &e)) {
		log_error("link cannot be started error=\"%s\"", e.text);
		schedule_restart(k);
	}
}

int link_side_start(struct keeper *k, struct err *e)
{
	k->link.backoff_ms = LINK_RESTART_MIN_MS;
	k->link.restart = event_new(k->base, -1, 0, on_restart, k);
	if (!k->link.restart)
		return err_set(e, ERR_NOMEM, "no memory");
	return start_once(k, e);
}

void link_side_stop(struct keeper *k)
{
	if (k->link.frames)
		framed_flush(k->link.frames, 500);
	drop_frames(k);
	if (k->link.child)
		child_drop(k->link.child);
	k->link.child = NULL;
	link_group_end(k);
	if (k->link.restart)
		event_free(k->link.restart);
	k->link.restart = NULL;
}
