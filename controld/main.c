/*
 * controld: arguments, help, exit codes. One thread, no loop yet; what a subcommand does is in commands.c, the service in serve.c.
 */
#include "program.h"

#include "../common/log.h"
#include "../common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const char help_text[] = "controld - the control plane of Ephemeral\n"
				"\n"
				"usage: controld [COMMAND] [--config FILE] [--set KEY=VALUE]... [options]\n"
				"\n"
				"commands\n"
				"  serve          run the service (default)\n"
				"  bootstrap      make what is missing: schema, keyring, certificates, the first\n"
				"                 operator key; safe to repeat\n"
				"  migrate        bring the database's schema up to date\n"
				"  check-ledger   prove that balances, reservations and charges agree\n"
				"  help [config]  this text, or every configuration key\n"
				"\n"
				"options\n"
				"  --config FILE         read FILE; without it the defaults hold\n"
				"  --set KEY=VALUE       set one key over the file; may be repeated\n"
				"  -t                    check configuration, keyring and certificates, then exit\n"
				"  --ready-fd N          serve: write one JSON line with the bound addresses to\n"
				"                        descriptor N\n"
				"  --json                bootstrap: print {\"operator_key\":...} instead of text\n"
				"  --new-operator-key    bootstrap: make another operator key even if there is\n"
				"                        one\n"
				"  --full                check-ledger: from the first row instead of the last\n"
				"                        checkpoint\n"
				"  --version\n"
				"\n"
				"signals: TERM and INT end the service (a second one at once), HUP reads the\n"
				"reloadable keys again\n"
				"exit codes: 0 ok, 1 failed, 2 wrong use\n"
				"\n"
				"examples\n"
				"  controld bootstrap --config /etc/ephemeral/controld.conf\n"
				"  controld --config /etc/ephemeral/controld.conf\n"
				"  controld -t --config /etc/ephemeral/controld.conf\n"
				"  controld --set database=\"host=/run/postgresql dbname=ephemeral\" \\\n"
				"    --set listen=127.0.0.1:0 --ready-fd 3 3>ready\n";

/* what: may be about `name` ("" = none). */
static int wrong_use(const char *name, const char *what)
{
	fprintf(stderr, "controld: %s%s%s; `controld help` shows the usage\n", name, name[0] ? ": " : "", what);
	return -1;
}

static int take_ready_fd(struct arguments *a, const char *value)
{
	struct err e;
	int64_t n;

	if (text_i64(value, 1, 65535, &n, &e) != 0)
		return wrong_use("--ready-fd", e.text);
	if (fcntl((int)n, F_GETFD) < 0)
		return wrong_use("--ready-fd", "this descriptor is not open");
	a->ready_fd = (int)n;
	return 0;
}

static int take_value(struct arguments *a, const char *name, const char *value)
{
	if (strcmp(name, "--config") == 0) {
		a->config_path = value;
		return 0;
	}
	if (strcmp(name, "--ready-fd") == 0)
		return take_ready_fd(a, value);
	if (!strchr(value, '='))
		return wrong_use("--set", "KEY=VALUE is needed");
	if (a->override_count == OVERRIDES_MAX)
		return wrong_use("--set", "too many of them");
	a->overrides[a->override_count++] = value;
	return 0;
}

/* The switches, with the one command that each belongs to (NULL = any). */
static bool take_switch(struct arguments *a, const char *s)
{
	if (strcmp(s, "-t") == 0)
		a->test = true;
	else if (strcmp(s, "--json") == 0)
		a->json = true;
	else if (strcmp(s, "--full") == 0)
		a->full = true;
	else if (strcmp(s, "--new-operator-key") == 0)
		a->new_operator_key = true;
	else
		return false;
	return true;
}

static int take_option(struct arguments *a, char **argv, int argc, int *i)
{
	static const char *const with_value[] = { "--config", "--set", "--ready-fd" };
	const char *s = argv[*i];

	if (take_switch(a, s))
		return 0;
	for (size_t k = 0; k < sizeof(with_value) / sizeof(with_value[0]); k++) {
		size_t n = strlen(with_value[k]);

		if (strncmp(s, with_value[k], n) == 0 && s[n] == '=')
			return take_value(a, with_value[k], s + n + 1);
		if (strcmp(s, with_value[k]) != 0)
			continue;
		if (*i + 1 >= argc)
			return wrong_use(s, "a value is needed");
		return take_value(a, with_value[k], argv[++*i]);
	}
	return wrong_use(s, "unknown option");
}

static int parse(struct arguments *a, int argc, char **argv)
{
	memset(a, 0, sizeof(*a));
	a->ready_fd = -1;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
			a->command = "help";
		else if (strcmp(argv[i], "--version") == 0)
			a->command = "version";
		else if (argv[i][0] == '-') {
			if (take_option(a, argv, argc, &i) != 0) /* may take the next word as well */
				return -1;
		} else if (!a->command)
			a->command = argv[i];
		else if (strcmp(a->command, "help") == 0 && !a->topic)
			a->topic = argv[i];
		else
			return wrong_use(argv[i], "one argument too many");
	}
	if (!a->command)
		a->command = "serve";
	return 0;
}

static int print_help(const struct arguments *a)
{
	struct buf b = BUF_INIT(256 * 1024);

	if (!a->topic) {
		fputs(help_text, stdout);
		return EXIT_OK;
	}
	if (strcmp(a->topic, "config") != 0) {
		wrong_use(a->topic, "there is no help on this");
		return EXIT_USAGE;
	}
	config_print_help(&b);
	fwrite(b.data, 1, b.len, stdout);
	buf_free(&b);
	return EXIT_OK;
}

/* Keys are in this process' memory: no core file, no debugger of another user. */
static void harden(void)
{
	struct rlimit none = { 0, 0 }, files;

	(void)setrlimit(RLIMIT_CORE, &none);
	(void)prctl(PR_SET_DUMPABLE, 0);
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &files);
	}
	signal(SIGPIPE, SIG_IGN);
	umask(077);
}

static int run(const struct arguments *a, struct config *c)
{
	if (a->test)
		return command_test(c);
	if (strcmp(a->command, "serve") == 0)
		return serve_run(a, c);
	if (strcmp(a->command, "bootstrap") == 0)
		return command_bootstrap(a, c);
	if (strcmp(a->command, "migrate") == 0)
		return command_migrate(c);
	return command_check_ledger(a, c);
}

static bool known_command(const char *s)
{
	static const char *const commands[] = { "serve", "bootstrap", "migrate", "check-ledger" };

	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (strcmp(s, commands[i]) == 0)
			return true;
	}
	return false;
}

static int command(int argc, char **argv)
{
	struct arguments args;
	struct config config;
	struct err e;
	int status;

	if (parse(&args, argc, argv) != 0)
		return EXIT_USAGE;
	if (strcmp(args.command, "help") == 0)
		return print_help(&args);
	if (strcmp(args.command, "version") == 0) {
		puts("controld " EPHEMERAL_VERSION);
		return EXIT_OK;
	}
	if (!known_command(args.command)) {
		wrong_use(args.command, "unknown command");
		return EXIT_USAGE;
	}
	harden();
	if (config_read(&config, args.config_path, args.overrides, args.override_count, &e) != 0) {
		fprintf(stderr, "controld: configuration: %s\n", e.text);
		return EXIT_USAGE;
	}
	log_init("controld", (enum log_level)config.log_level, config.log_json);
	status = run(&args, &config);
	config_release(&config);
	return status;
}

int main(int argc, char **argv)
{
	int status;

	log_descriptors();
	status = command(argc, argv);
	if (status == EXIT_OK && (fflush(stdout) != 0 || ferror(stdout))) {
		fputs("controld: standard output cannot be written: what is there is not whole (a new operator key that was not "
		      "seen is "
		      "lost: `controld bootstrap --new-operator-key` makes another)\n",
				stderr);
		return EXIT_FAILED;
	}
	return status;
}
