/*
 * noded's entry: reads the command line and becomes keeper, or, with `--role`, one of the roles that keeper execs (roles.h).
 * Nothing else happens here. One thread; roles are entered before any other exists.
 */
#include "doctor/doctor.h"
#include "keeper/keeper.h"
#include "noded/config.h"
#include "roles.h"

#include "common/log.h"
#include "common/text.h"

#include <getopt.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#define OVERRIDES_MAX 64

enum exit_status { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const char usage_text[] = "Usage: noded [--config FILE] [--set KEY=VALUE]... [-t] [--ready-fd N]\n"
				 "       noded doctor [--config FILE] [--set KEY=VALUE]... [--json]\n"
				 "       noded help [config] | version\n"
				 "\n"
				 "Runs microVMs on this host for a controld. Needs root.\n"
				 "\n"
				 "  --config FILE    read FILE (default: built-in defaults only); `noded help\n"
				 "                   config` lists the keys\n"
				 "  --set KEY=VALUE  override one key; may be repeated\n"
				 "  -t               check the configuration and everything that this host must\n"
				 "                   have, then exit\n"
				 "  doctor           look at this host item by item, and say what was found and\n"
				 "                   how to mend it; exits with 1 when something fails\n"
				 "  --json           doctor: print JSON\n"
				 "  --ready-fd N     when VMs can be started, write one line of JSON to descriptor\n"
				 "                   N and close it\n"
				 "  --version        print the version\n"
				 "  --help           print this\n";

struct options {
	const char *config;
	const char *overrides[OVERRIDES_MAX];
	size_t override_count;
	bool check_only;
	bool json;
	int ready_fd;
	const char *role;
	enum log_level log_level;
	bool log_json;
};

static const struct role {
	const char *name;
	const char *log_name;
	int (*entry)(void);
} roles[] = {
	{ "link", "noded/link", link_main },
	{ "broker", "noded/broker", broker_main },
	{ "channel", "noded/channel", channel_main },
	{ "jail", "noded/jail", jail_main },
};

static int usage_error(const char *what, const char *arg)
{
	fprintf(stderr, "noded: %s%s%s\nRun `noded --help`.\n", what, arg ? ": " : "", arg ? arg : "");
	return EXIT_USAGE;
}

static int run_role(const struct options *o)
{
	for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++) {
		if (strcmp(o->role, roles[i].name) != 0)
			continue;
		log_init(roles[i].log_name, o->log_level, o->log_json);
		signal(SIGPIPE, SIG_IGN);
		signal(SIGXFSZ, SIG_IGN); /* a log file that is longer than a role may write loses lines; nobody dies of it */
		/* The memory of each role is its own business: no core, no ptrace, no /proc/PID/mem. The jail stage sets it itself.
		 */
		if (roles[i].entry != jail_main && prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0)
			log_warn("cannot make this process undumpable");
		return roles[i].entry();
	}
	return usage_error("no such role", o->role);
}

static int help(int argc, char **argv)
{
	struct buf b = BUF_INIT(65536);
	const char *text;

	if (argc > 1 && strcmp(argv[1], "config") != 0)
		return usage_error("there is help for `config` only", argv[1]);
	if (argc <= 1) {
		fputs(usage_text, stdout);
		return EXIT_OK;
	}
	config_help(noded_keys, noded_key_count, &b);
	text = buf_cstr(&b);
	fputs(text ? text : "", stdout);
	buf_free(&b);
	return EXIT_OK;
}

/* 0 go on, else exit with *status. */
static int parse(int argc, char **argv, struct options *o, int *status)
{
	enum { OPT_CONFIG = 1000, OPT_SET, OPT_READY, OPT_ROLE, OPT_LEVEL, OPT_LOG_JSON, OPT_JSON, OPT_VERSION, OPT_HELP };
	static const struct option longs[] = {
		{ "config", required_argument, NULL, OPT_CONFIG },
		{ "set", required_argument, NULL, OPT_SET },
		{ "ready-fd", required_argument, NULL, OPT_READY },
		{ "role", required_argument, NULL, OPT_ROLE },
		{ "log-level", required_argument, NULL, OPT_LEVEL },
		{ "log-json", no_argument, NULL, OPT_LOG_JSON },
		{ "json", no_argument, NULL, OPT_JSON },
		{ "version", no_argument, NULL, OPT_VERSION },
		{ "help", no_argument, NULL, OPT_HELP },
		{ NULL, 0, NULL, 0 },
	};
	int64_t number;
	struct err e;
	int c;

	while ((c = getopt_long(argc, argv, "t", longs, NULL)) != -1) {
		*status = EXIT_USAGE;
		switch (c) {
		case OPT_CONFIG: o->config = optarg; break;
		case OPT_SET:
			if (o->override_count == OVERRIDES_MAX)
				return *status = usage_error("at most 64 --set", NULL);
			o->overrides[o->override_count++] = optarg;
			break;
		case OPT_READY:
			if (text_i64(optarg, 0, 1 << 20, &number, &e))
				return *status = usage_error("--ready-fd", e.text);
			o->ready_fd = (int)number;
			break;
		case OPT_ROLE: o->role = optarg; break;
		case OPT_LEVEL:
			if (!log_level_parse(optarg, &o->log_level))
				return *status = usage_error("--log-level is debug, info, warn or error", optarg);
			break;
		case OPT_LOG_JSON: o->log_json = true; break;
		case OPT_JSON: o->json = true; break;
		case OPT_VERSION:
			puts("noded " EPHEMERAL_VERSION);
			*status = EXIT_OK;
			return 1;
		case OPT_HELP:
			fputs(usage_text, stdout);
			*status = EXIT_OK;
			return 1;
		case 't': o->check_only = true; break;
		default: fputs("Run `noded --help`.\n", stderr); return 1;
		}
	}
	return 0;
}

/* `noded doctor`: whatever the configuration is, there is a report. */
static int doctor(const struct options *o)
{
	struct noded_config config;
	struct err e;
	int status;

	if (o->check_only || o->ready_fd >= 0)
		return usage_error("doctor takes --config, --set and --json only", NULL);
	log_init("noded/doctor", LOG_LEVEL_ERROR, false);
	if (noded_config_load(o->config, o->overrides, o->override_count, &config, &e))
		return doctor_main(NULL, &e, o->json);
	status = doctor_main(&config, NULL, o->json);
	noded_config_free(&config);
	return status;
}

static int run(int argc, char **argv)
{
	struct options o = { .ready_fd = -1, .log_level = LOG_LEVEL_INFO };
	struct noded_config config;
	int status = EXIT_OK;
	struct err e;

	if (parse(argc, argv, &o, &status))
		return status;
	if (o.role)
		return run_role(&o);
	if (optind < argc && strcmp(argv[optind], "help") == 0)
		return help(argc - optind, argv + optind);
	if (optind < argc && strcmp(argv[optind], "version") == 0) {
		puts("noded " EPHEMERAL_VERSION);
		return EXIT_OK;
	}
	if (optind + 1 == argc && strcmp(argv[optind], "doctor") == 0)
		return doctor(&o);
	if (optind < argc)
		return usage_error("unknown argument", argv[strcmp(argv[optind], "doctor") == 0 ? optind + 1 : optind]);
	if (o.json)
		return usage_error("--json is for doctor", NULL);
	if (noded_config_load(o.config, o.overrides, o.override_count, &config, &e)) {
		fprintf(stderr, "noded: %s\n", e.text);
		return EXIT_FAILED;
	}
	log_init("noded/keeper", (enum log_level)config.log_level, config.log_json);
	status = keeper_main(&config, o.check_only, o.ready_fd) == 0 ? EXIT_OK : EXIT_FAILED;
	noded_config_free(&config);
	return status;
}

int main(int argc, char **argv)
{
	int status;

	log_descriptors();
	(void)setrlimit(RLIMIT_CORE,
			&(struct rlimit){ 0, 0 }); /* keys of this host and of runs are in memory: no core of any role */
	status = run(argc, argv);
	if (status == EXIT_OK && (fflush(stdout) != 0 || ferror(stdout))) {
		fputs("noded: standard output cannot be written\n", stderr);
		return EXIT_FAILED;
	}
	return status;
}
