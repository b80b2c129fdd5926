/*
 * The machine (machine.h): QEMU's process, its monitor, its state as bytes. Owns the child, the monitor and our end of the guest's
 * stream. The command line is in machine_args.c.
 */
#include "machine.h"

#include "machine_args.h"
#include "monitor.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define TRANSFER_S 30

struct machine {
	struct monitor monitor;
	struct machine_ops ops;
	pid_t pid;
	int guest_fd;
	uint32_t port;  /* vsock port that the guest is told to connect to */
	bool port_open; /* as the guest last said */
	bool memory_in_file;
	enum { IDLE, MOVED, NOT_MOVED } transfer; /* of the state, as QEMU last said */
	enum machine_end end;
};

static void on_event(void *arg, const char *name, const struct json *data)
{
	struct machine *m = arg;

	if (strcmp(name, "VSERPORT_CHANGE") == 0) {
		bool open = json_get_bool(data, "open", false);

		if (open != m->port_open)
			m->ops.on_port(m->ops.arg, m->port, open);
		m->port_open = open;
	} else if (strcmp(name, "MIGRATION") == 0) {
		const char *status = json_get_text(data, "status");

		m->transfer = status && strcmp(status, "completed") == 0 ? MOVED
			      : status && strcmp(status, "failed") == 0  ? NOT_MOVED
									 : m->transfer;
	} else if (strcmp(name, "SHUTDOWN") == 0) {
		const char *reason = json_get_text(data, "reason");

		m->end = reason && strcmp(reason, "guest-reset") == 0      ? MACHINE_RESET
			 : reason && strcmp(reason, "guest-shutdown") == 0 ? MACHINE_POWER_OFF
									   : MACHINE_LOST;
	}
}

/* In the child, between fork and exec. */
static void become_qemu(const struct machine_args *args, pid_t parent, int console_fd, const int input[2], const int inherited[2])
{
	char *env[] = { args->preload[0] != '\0' ? (char *)args->preload : NULL, NULL };

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(126);
	for (int i = 0; i < 2; i++)
		if (inherited[i] >= 0)
			fcntl(inherited[i], F_SETFD, 0);
	/* It holds both ends of its input: nothing ever comes, and no end of it either. */
	fcntl(input[1], F_SETFD, 0);
	dup2(input[0], 0);
	dup2(console_fd >= 0 ? console_fd : 2, 1);
	execve(args->argv[0], args->argv, env);
	dprintf(2, "stand-in: %s: %s\n", args->argv[0], strerror(errno));
	_exit(127);
}

static int spawn(struct machine *m, const struct machine_args *args, int console_fd, const int inherited[2], struct err *e)
{
	pid_t parent = getpid();
	int input[2];
	sigset_t none;

	if (pipe2(input, O_CLOEXEC) != 0)
		return err_set_errno(e, "pipe");
	m->pid = fork();
	if (m->pid == 0) {
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		become_qemu(args, parent, console_fd, input, inherited);
	}
	close(input[0]);
	close(input[1]);
	return m->pid < 0 ? err_set_errno(e, "fork") : 0;
}

/* A stream to the child; the far end is closed by the caller once the child has it. */
static int pair(int out[2], struct err *e)
{
	return socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, out) == 0 ? 0 : err_set_errno(e, "socketpair");
}

static int start(struct machine *m, const struct json *config, int console_fd, bool incoming, struct err *e)
{
	int qmp[2], guest[2] = { -1, -1 }, inherited[2], rc;
	struct machine_args args;

	if (pair(qmp, e))
		return -1;
	m->monitor.fd = qmp[0];
	if (pair(guest, e)) {
		close(qmp[1]);
		return -1;
	}
	inherited[0] = qmp[1];
	inherited[1] = guest[1];
	rc = machine_args_make(&args, config, console_fd >= 0, incoming, qmp[1], guest[1], e);
	if (rc == 0)
		rc = spawn(m, &args, console_fd, inherited, e);
	m->port = args.vsock_port;
	machine_args_free(&args);
	close(qmp[1]);
	close(guest[1]);
	m->guest_fd = guest[0];
	if (rc == 0)
		rc = monitor_open(&m->monitor, qmp[0], e);
	if (m->guest_fd >= 0)
		fcntl(m->guest_fd, F_SETFL, O_NONBLOCK);
	return rc;
}

int machine_start(const struct json *config, int console_fd, bool incoming, const struct machine_ops *ops, struct machine **out,
		struct err *e)
{
	struct machine *m = calloc(1, sizeof(*m));

	*out = NULL;
	if (!m)
		return err_set(e, ERR_NOMEM, "out of memory");
	m->ops = *ops;
	m->guest_fd = m->monitor.fd = -1;
	m->memory_in_file = machine_memory_in_file(config);
	m->monitor.on_event = on_event;
	m->monitor.arg = m;
	if (start(m, config, console_fd, incoming, e)) {
		machine_free(m);
		return -1;
	}
	*out = m;
	return 0;
}

void machine_free(struct machine *m)
{
	if (!m)
		return;
	if (m->pid > 0) {
		kill(m->pid, SIGKILL);
		while (waitpid(m->pid, NULL, 0) < 0 && errno == EINTR)
			continue;
	}
	monitor_close(&m->monitor);
	machine_guest_close(m);
	free(m);
}

int machine_fd(const struct machine *m)
{
	return m->monitor.fd;
}

enum machine_end machine_read(struct machine *m)
{
	struct err e;

	if (monitor_read(&m->monitor, &e) == 0)
		return MACHINE_RUNS;
	/* It closes the monitor when it ends, and says why before. */
	return m->end == MACHINE_RUNS ? MACHINE_LOST : m->end;
}

int machine_guest_fd(const struct machine *m)
{
	return m->guest_fd;
}

void machine_guest_close(struct machine *m)
{
	if (m->guest_fd >= 0)
		close(m->guest_fd);
	m->guest_fd = -1;
}

int machine_pause(struct machine *m, struct err *e)
{
	return monitor_call(&m->monitor, "stop", NULL, NULL, e);
}

int machine_resume(struct machine *m, struct err *e)
{
	return monitor_call(&m->monitor, "cont", NULL, NULL, e);
}

/* --- state -------------------------------------------------------------------------------------------------------------------- */

static int prepare_transfer(struct machine *m, struct err *e)
{
	char capabilities[160];

	m->transfer = IDLE;
	if (!text_fmt(capabilities, sizeof(capabilities),
			    "{\"capabilities\":[{\"capability\":\"events\",\"state\":true},"
			    "{\"capability\":\"x-ignore-shared\",\"state\":%s}]}",
			    m->memory_in_file ? "true" : "false"))
		return err_set(e, ERR_INTERNAL, "capabilities");
	if (monitor_call(&m->monitor, "migrate-set-parameters", "{\"max-bandwidth\":8589934592}", NULL, e))
		return -1;
	return monitor_call(&m->monitor, "migrate-set-capabilities", capabilities, NULL, e);
}

/* The stream's two ends; ours gives up after TRANSFER_S. */
static int transfer_pair(int out[2], struct err *e)
{
	struct timeval wait = { .tv_sec = TRANSFER_S };

	if (pair(out, e))
		return -1;
	setsockopt(out[0], SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
	setsockopt(out[0], SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
	return 0;
}

static int read_all(int fd, struct buf *out, struct err *e)
{
	for (;;) {
		uint8_t *room = buf_reserve(out, 65536);
		ssize_t n = room ? read(fd, room, 65536) : -1;

		if (!room)
			return err_set(e, ERR_LIMIT, "the state is larger than %zu bytes", out->max);
		if (n == 0)
			return 0;
		if (n < 0 && errno != EINTR)
			return err_set_errno(e, "the emulator's state");
		if (n > 0)
			buf_commit(out, (size_t)n);
	}
}

static int transfer_wait(struct machine *m, struct err *e)
{
	while (m->transfer == IDLE)
		if (monitor_wait(&m->monitor, e))
			return -1;
	return m->transfer == MOVED ? 0 : err_set(e, ERR_INTERNAL, "the emulator's state could not be moved");
}

int machine_save(struct machine *m, struct buf *state, struct err *e)
{
	int stream[2], rc;

	if (prepare_transfer(m, e) || transfer_pair(stream, e))
		return -1;
	rc = monitor_give(&m->monitor, "state", stream[1], e);
	close(stream[1]);
	if (rc == 0)
		rc = monitor_call(&m->monitor, "migrate", "{\"uri\":\"fd:state\"}", NULL, e);
	if (rc == 0)
		rc = read_all(stream[0], state, e);
	close(stream[0]);
	return rc ? rc : transfer_wait(m, e);
}

int machine_load(struct machine *m, const struct buf *state, struct err *e)
{
	int stream[2], rc;
	size_t sent = 0;

	if (prepare_transfer(m, e) || transfer_pair(stream, e))
		return -1;
	rc = monitor_give(&m->monitor, "state", stream[1], e);
	close(stream[1]);
	if (rc == 0)
		rc = monitor_call(&m->monitor, "migrate-incoming", "{\"uri\":\"fd:state\"}", NULL, e);
	while (rc == 0 && sent < state->len) {
		ssize_t n = send(stream[0], state->data + sent, state->len - sent, MSG_NOSIGNAL);

		if (n < 0 && errno != EINTR)
			rc = err_set_errno(e, "the emulator takes its state no further than byte %zu", sent);
		sent += n > 0 ? (size_t)n : 0;
	}
	if (rc == 0)
		rc = transfer_wait(m, e);
	close(stream[0]);
	return rc;
}

int machine_counters(struct machine *m, int64_t out[4], struct err *e)
{
	static const char *const names[] = { "rd_bytes", "wr_bytes", "rd_operations", "wr_operations" };
	struct json *answer;
	const struct json *all, *stats;

	if (monitor_call(&m->monitor, "query-blockstats", NULL, &answer, e))
		return -1;
	all = json_get(answer, "return");
	stats = json_type(all) == JSON_ARRAY && json_len(all) > 0 ? json_get(json_at(all, 0), "stats") : NULL;
	for (int i = 0; i < 4; i++)
		out[i] = json_get_int(stats, names[i], 0);
	json_free(answer);
	return 0;
}
