/* Between the files of the program itself: main.c (arguments), commands.c (what runs and ends), serve.c (the service). */
#ifndef CONTROLD_PROGRAM_H
#define CONTROLD_PROGRAM_H

#include "config.h"

#include <stdbool.h>

#define OVERRIDES_MAX 64

/* Exit codes. */
enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct arguments {
	const char *command;     /* "serve" when none was given */
	const char *topic;       /* of help */
	const char *config_path; /* NULL = defaults */
	const char *overrides[OVERRIDES_MAX];
	size_t override_count;
	int ready_fd; /* -1 = none */
	bool test, json, full, new_operator_key;
};

/* serve.c. Runs until a signal; the config may be reloaded meanwhile. */
int serve_run(const struct arguments *args, struct config *config);

/* commands.c */
int command_test(const struct config *config);
int command_bootstrap(const struct arguments *args, const struct config *config);
int command_migrate(const struct config *config);
int command_check_ledger(const struct arguments *args, const struct config *config);
/* Waits until Postgres takes connections, at most start_wait_seconds; says every five what it waits for. */
int wait_for_database(const struct config *config, struct err *e) EPH_MUST_CHECK;

#endif
