/*
 * Puts attacks into the place of a VM's processes: jobs, groups, limits and filters are made by keeper's own functions, and only
 * the program is another: this one, entered again by `--attack`. Prints a line for each attack. Root, one thread; waits for each
 * process.
 *
 *   jail_try --config FILE [--set KEY=VALUE]... PORT
 */
#include "jail_attacks.h"

#include "common/ids.h"
#include "common/log.h"
#include "common/text.h"
#include "keeper/files.h"
#include "keeper/keeper_internal.h"
#include "roles.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SETS_MAX 8
#define ATTACK_MS 60000
#define DONE 0     /* exit status of an attack that came through */
#define REFUSED 50 /* plus errno */

static const char *const place_names[SLOT_ROLES] = { "broker", "channel", "vmm" };
static const unsigned int places[SLOT_ROLES] = { AT_BROKER, AT_CHANNEL, AT_VMM };

static int attack(const char *name, const char *port)
{
	for (size_t i = 0; i < attack_count; i++)
		if (strcmp(attacks[i].name, name) == 0) {
			int rc = attacks[i].run((uint16_t)strtoul(port, NULL, 10));

			_exit(rc == 0 ? DONE : REFUSED + rc);
		}
	_exit(2);
}

static int spawn_one(struct vm *vm, enum slot_role role, const struct attack *a, const char *port, struct jail_spawned *out,
		struct err *e)
{
	struct jail_job job;
	int rc = vm_process_job(vm, role, &job, e);

	if (rc == 0) {
		for (uint32_t i = 0; i < job.argc; i++)
			free(job.argv[i]);
		free(job.argv);
		job.argv = NULL;
		job.argc = 0;
		job.self = true;
		job.stdio_fd = -1;
		if (!jail_job_arg(&job, "jail_try") || !jail_job_arg(&job, "--attack") || !jail_job_arg(&job, a->name) ||
				!jail_job_arg(&job, port))
			rc = err_set(e, ERR_NOMEM, "no memory");
	}
	if (rc == 0)
		rc = jail_spawn(&job, role == SLOT_BROKER ? JAIL_NET_HOST : JAIL_NET_EMPTY, cgroup_dir_fd(vm->proc[role].cgroup),
				NULL, 0, out, e);
	jail_job_free(&job);
	return rc;
}

static int wait_one(const struct jail_spawned *s, char *how, size_t size)
{
	struct pollfd p = { .fd = s->pidfd, .events = POLLIN };
	char text[ERR_TEXT_MAX] = "";
	int status = 0;
	ssize_t n;

	if (poll(&p, 1, ATTACK_MS) != 1)
		kill(s->pid, SIGKILL);
	while (waitpid(s->pid, &status, __WALL) < 0 && errno == EINTR)
		continue;
	n = read(s->status, text, sizeof(text) - 1);
	close(s->status);
	close(s->pidfd);
	if (n > 0)
		return text_fmt(how, size, "not started: %s", text) ? 0 : -1;
	if (WIFSIGNALED(status))
		return text_fmt(how, size, "killed by signal %d", WTERMSIG(status)) ? 0 : -1;
	if (WEXITSTATUS(status) == DONE)
		return text_fmt(how, size, "done") ? 0 : -1;
	if (WEXITSTATUS(status) > REFUSED)
		return text_fmt(how, size, "%s", strerrorname_np(WEXITSTATUS(status) - REFUSED)) ? 0 : -1;
	return text_fmt(how, size, "exit code %d", WEXITSTATUS(status)) ? 0 : -1;
}

static int try_all(struct vm *vm, const char *port, struct err *e)
{
	for (int role = 0; role < SLOT_ROLES; role++)
		for (size_t i = 0; i < attack_count; i++) {
			struct jail_spawned spawned;
			char how[600];

			if (!(attacks[i].places & places[role]))
				continue;
			if (spawn_one(vm, (enum slot_role)role, &attacks[i], port, &spawned, e) ||
					wait_one(&spawned, how, sizeof(how)))
				return -1;
			printf("%s\t%s\t%s\t%s\n", place_names[role], attacks[i].name,
					attacks[i].harmless ? "harmless"
					: attacks[i].walls  ? "walls"
							    : "filter",
					how);
		}
	return 0;
}

/* The run's provider is at an address that the operator listed. */
static int assign(struct vm *vm, const char *port, struct err *e)
{
	struct assignment a = { .model = { .any_address = true } };
	struct buf b = BUF_INIT(ASSIGNMENT_MAX);

	id_make("run", a.run_id);
	a.prompt = strdup("x");
	if (!text_copy(a.model.id, sizeof(a.model.id), "a/b") || !text_copy(a.model.upstream, sizeof(a.model.upstream), "b") ||
			!text_fmt(a.model.base_url, sizeof(a.model.base_url), "http://127.0.0.1:%s/v1", port))
		return err_set(e, ERR_INTERNAL, "assignment");
	a.model.limit_param = LIMIT_MAX_TOKENS;
	a.timeout_s = a.max_model_calls = a.vcpus = a.attempt = 1;
	a.memory_mib = 256;
	a.next_seq = 1;
	assignment_encode(&a, &b);
	free(a.prompt);
	vm->assignment = b.data;
	vm->assignment_len = b.len;
	return b.failed ? err_set(e, ERR_NOMEM, "no memory") : vm_egress_open(vm, e);
}

static int prepare(struct keeper *k, struct vm *vm, struct err *e)
{
	struct journal *j = &vm->journal;
	char dir[256];
	int slot;

	vm->keeper = k;
	if (!text_fmt(k->vm_dir, sizeof(k->vm_dir), "%s/vm", k->config->run_dir) || host_open(k->config, &k->host, e) ||
			slots_new((uint32_t)k->config->uid_base, 1, &k->slots, e))
		return -1;
	slot = slots_take(k->slots);
	if (slot < 0)
		return err_set(e, ERR_LIMIT, "no slot");
	j->slot = (uint32_t)slot;
	j->memory_mib = 256;
	j->vcpus = 1;
	id_make("vm", j->vm);
	for (int i = 0; i < SLOT_ROLES; i++)
		if (!text_fmt(j->cgroup[i], sizeof(j->cgroup[i]), "%s.%s.try", j->vm, place_names[i]))
			return err_set(e, ERR_INTERNAL, "name");
	if (!text_fmt(dir, sizeof(dir), "%s/%s", k->vm_dir, j->vm))
		return err_set(e, ERR_LIMIT, "run_dir is too long");
	return files_mkdir(k->config->run_dir, 0711, e) || files_mkdir(k->vm_dir, 0711, e) || files_mkdir(dir, 0711, e) ||
					       vm_make_places(vm, e)
			       ? -1
			       : 0;
}

static void clean(struct vm *vm)
{
	for (int i = 0; i < SLOT_ROLES; i++) {
		struct err e;

		if (!vm->proc[i].cgroup)
			continue;
		cgroup_kill(vm->proc[i].cgroup);
		if (cgroup_remove(vm->proc[i].cgroup, &e) != 0)
			fprintf(stderr, "group %s stays behind\n", vm->journal.cgroup[i]);
	}
}

int main(int argc, char **argv)
{
	static struct keeper k;
	static struct vm vm;
	const char *config_file = NULL, *sets[SETS_MAX];
	size_t set_count = 0;
	struct noded_config config;
	struct err e = { .code = ERR_NONE };
	int i = 1, rc;

	if (argc == 3 && strcmp(argv[1], "--role") == 0 && strcmp(argv[2], "jail") == 0)
		return jail_main();
	if (argc == 4 && strcmp(argv[1], "--attack") == 0)
		return attack(argv[2], argv[3]);
	for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
		if (strcmp(argv[i], "--config") == 0)
			config_file = argv[i + 1];
		else if (set_count < SETS_MAX)
			sets[set_count++] = argv[i + 1];
	}
	if (i != argc - 1 || sodium_init() < 0)
		return 2;
	log_init("jail_try", LOG_LEVEL_WARN, false);
	rc = noded_config_load(config_file, sets, set_count, &config, &e);
	if (rc == 0) {
		k.config = &config;
		rc = prepare(&k, &vm, &e) || assign(&vm, argv[i], &e) || try_all(&vm, argv[i], &e) ? -1 : 0;
		clean(&vm);
		host_close(&k.host);
		noded_config_free(&config);
	}
	if (rc)
		fprintf(stderr, "jail_try: %s\n", e.text);
	return rc ? 1 : 0;
}
