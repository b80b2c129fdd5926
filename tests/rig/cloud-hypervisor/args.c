/*
 * Reading the command line (args.h). A flag that the real program does not have, or that this one would have to act on and does
 * not, ends it with status 2, as the real one's argument parser does. Pure but for what it prints.
 */
#include "args.h"

#include "common/text.h"

#include <limits.h>
#include <stdbool.h>

#define USAGE_ERROR 2

static int complain(const char *what, const char *arg)
{
	fprintf(stderr, "error: %s '%s'\n\nUsage: cloud-hypervisor [OPTIONS]\n\nFor more information, try '--help'.\n", what, arg);
	return USAGE_ERROR;
}

/* `path`, `path=PATH` or `fd=N`. */
static bool place(const char *value, bool bare_path, const char **path, int *fd)
{
	struct err e;
	int64_t n;

	if (strncmp(value, "fd=", 3) == 0) {
		if (text_i64(value + 3, 0, INT_MAX, &n, &e))
			return false;
		*fd = (int)n;
		return true;
	}
	if (strncmp(value, "path=", 5) == 0)
		*path = value + 5;
	else if (bare_path && !strchr(value, '='))
		*path = value;
	return *path && **path != '\0';
}

static bool is_word(const char *value, const char *const *words)
{
	for (; *words; words++)
		if (strcmp(value, *words) == 0)
			return true;
	return false;
}

/* One flag that takes a value. false: the value is none for it. */
static bool take(struct args *out, const char *flag, const char *value, bool *known)
{
	static const char *const seccomp[] = { "true", "false", "log", "errno", NULL };

	*known = true;
	if (strcmp(flag, "--api-socket") == 0)
		return place(value, true, &out->api_path, &out->api_fd);
	if (strcmp(flag, "--event-monitor") == 0)
		return place(value, false, &out->event_path, &out->event_fd);
	if (strcmp(flag, "--seccomp") == 0)
		return is_word(value, seccomp);
	if (strcmp(flag, "--log-file") == 0) {
		out->log_file = value;
		return *value != '\0';
	}
	if (strcmp(flag, "--log-format") == 0)
		return *value != '\0';
	*known = false;
	return false;
}

static int verbosity(const char *arg)
{
	size_t n = strspn(arg + 1, "v");

	return n > 0 && n <= 3 && arg[n + 1] == '\0' ? (int)n : 0;
}

/* An option of a VM that is configured by flags: legal there, but a VM driven over the API has none. */
static int vm_option(const char *arg)
{
	static const char *const options[] = { "--kernel", "--firmware", "--initramfs", "--cmdline", "--cpus", "--memory", "--disk",
		"--net", "--rng", "--balloon", "--fs", "--pmem", "--serial", "--console", "--device", "--vsock", "--watchdog",
		"--pvpanic", "--platform", "--restore", "--landlock", "--landlock-rules", "--no-shutdown", "--igvm", "--tpm",
		"--numa", "--user-device", "--vdpa", NULL };

	return is_word(arg, options);
}

int args_parse(int argc, char **argv, const char *version, struct args *out)
{
	*out = (struct args){ .api_fd = -1, .event_fd = -1 };
	for (int i = 1; i < argc; i++) {
		char flag[64];
		const char *equals = strchr(argv[i], '='), *value;
		bool known;

		if (strcmp(argv[i], "--version") == 0 || strcmp(argv[i], "-V") == 0) {
			printf("cloud-hypervisor %s\n", version);
			return 0;
		}
		if (argv[i][0] == '-' && verbosity(argv[i]) > 0) {
			out->verbose = verbosity(argv[i]);
			continue;
		}
		if (!text_fmt(flag, sizeof(flag), "%.*s", (int)(equals ? equals - argv[i] : (int)strlen(argv[i])), argv[i]) ||
				strncmp(flag, "--", 2) != 0)
			return complain("unexpected argument", argv[i]);
		if (vm_option(flag))
			return complain("this stand-in is driven over its API only; no option of a VM is taken:", argv[i]);
		value = equals ? equals + 1 : i + 1 < argc ? argv[++i] : "";
		if (!take(out, flag, value, &known))
			return complain(known ? "invalid value for" : "unexpected argument", flag);
	}
	if (!out->api_path && out->api_fd < 0)
		return complain("one of these is needed:", "--api-socket");
	return -1;
}
