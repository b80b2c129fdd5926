/* Asks a VMM for its version (probe.h). Owns the child for as long as it runs. */
#include "vmm/probe.h"

#include "common/clock.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROBE_MS 5000
#define VERSION_CHARS "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-+_"

size_t vmm_read_output(int fd, int64_t limit_ms, char *out, size_t size)
{
	int64_t deadline = clock_boot_ms() + limit_ms;
	size_t len = 0;

	while (len + 1 < size) {
		struct pollfd p = { .fd = fd, .events = POLLIN };
		int64_t left = deadline - clock_boot_ms();
		ssize_t n;

		if (left <= 0 || poll(&p, 1, (int)left) <= 0)
			break;
		n = read(fd, out + len, size - 1 - len);
		if (n <= 0)
			break;
		len += (size_t)n;
	}
	out[len] = '\0';
	return len;
}

static int run_version(const char *binary, char *out, size_t size, struct err *e)
{
	char *argv[] = { (char *)binary, (char *)"--version", NULL }, *envp[] = { NULL };
	posix_spawn_file_actions_t actions;
	int pipes[2], rc, status;
	pid_t pid;

	if (pipe2(pipes, O_CLOEXEC) != 0)
		return err_set_errno(e, "pipe");
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, pipes[1], 1);
	rc = posix_spawn(&pid, binary, &actions, NULL, argv, envp);
	posix_spawn_file_actions_destroy(&actions);
	close(pipes[1]);
	if (rc != 0) {
		close(pipes[0]);
		errno = rc;
		return err_set_errno(e, "run %s", binary);
	}
	vmm_read_output(pipes[0], PROBE_MS, out, size);
	close(pipes[0]);
	/* It printed what we need, closed its output or is over the deadline: in each case it has to go now. */
	kill(pid, SIGKILL);
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		continue;
	return 0;
}

/* The jail holds the program and its libraries, but no shell for a script around it. */
static bool is_program(const char *path)
{
	char magic[4] = "";
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	bool elf = fd >= 0 && read(fd, magic, sizeof(magic)) == sizeof(magic) && memcmp(magic, "\177ELF", sizeof(magic)) == 0;

	if (fd >= 0)
		close(fd);
	return elf;
}

int vmm_probe_version(const char *binary, const char *key, const char *begins, char *out, size_t size, struct err *e)
{
	char text[1024], *version;
	size_t n;

	if (access(binary, X_OK) != 0)
		return err_set_errno(e, "%s (install it, or set `%s` to its path)", binary, key);
	if (!is_program(binary))
		return err_set(e, ERR_INVALID, "%s is no program: set `%s` to the VMM itself, not to a script around it", binary,
				key);
	if (run_version(binary, text, sizeof(text), e))
		return -1;
	if (strncmp(text, begins, strlen(begins)) != 0)
		return err_set(e, ERR_INVALID, "%s --version does not begin with \"%s\" within %d s: it is not what `%s` must name",
				binary, begins, PROBE_MS / 1000, key);
	version = text + strlen(begins);
	n = strspn(version, VERSION_CHARS);
	if (n == 0 || !text_fmt(out, size, "%.*s", (int)n, version))
		return err_set(e, ERR_INVALID, "%s --version names no version", binary);
	return 0;
}
