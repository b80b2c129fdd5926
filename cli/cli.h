/*
 * What one invocation of `ephemeral` is: a verb of the table, its arguments, its exit status. Each cmd_*.c holds a group of verbs;
 * one process, one thread, blocking calls are fine everywhere.
 */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include "args.h"

/* Exit statuses, the same for every verb. */
enum {
	CLI_OK = 0,    /* done; where a run's end was awaited: it succeeded */
	CLI_ENDED = 1, /* the run ended otherwise */
	CLI_USE = 2,   /* wrong use: the command line, or the service calls the request wrong */
	CLI_ASK = 3,   /* could not ask, or was not allowed to */
	CLI_DETACHED = 130,
};

enum verb_group { VERB_RUNS, VERB_ACCOUNT, VERB_ADMIN, VERB_ABOUT };

struct verb {
	const char *name; /* "run", "admin org create" */
	enum verb_group group;
	const char *words; /* for the usage line: "[PROMPT]" */
	size_t words_min, words_max;
	const char *summary; /* one line, no full stop */
	const char *text;    /* further help, or NULL */
	const struct opt *options;
	size_t option_count;
	const char *examples; /* lines, or NULL */
	int (*run)(const struct args *a);
};

extern const struct verb VERBS[];
extern const size_t VERBS_COUNT;

/* The verb whose words argv begins with (the longest such name); *used = how many words that is. NULL and e set when there is none.
 */
const struct verb *verb_find(int argc, char *const *argv, int *used, struct err *e);

int cmd_run(const struct args *a);
int cmd_runs(const struct args *a);
int cmd_get(const struct args *a);
int cmd_wait(const struct args *a);
int cmd_cancel(const struct args *a);
int cmd_events(const struct args *a);
int cmd_replay(const struct args *a);
int cmd_login(const struct args *a);
int cmd_logout(const struct args *a);
int cmd_status(const struct args *a);
int cmd_models(const struct args *a);
int cmd_org_create(const struct args *a);
int cmd_org_list(const struct args *a);
int cmd_org_set(const struct args *a);
int cmd_org_credit(const struct args *a);
int cmd_key_create(const struct args *a);
int cmd_key_list(const struct args *a);
int cmd_key_revoke(const struct args *a);
int cmd_member_add(const struct args *a);
int cmd_member_list(const struct args *a);
int cmd_node_token(const struct args *a);
int cmd_node_list(const struct args *a);
int cmd_node_drain(const struct args *a);
int cmd_node_undrain(const struct args *a);
int cmd_node_revoke(const struct args *a);
int cmd_node_remove(const struct args *a);
int cmd_image_add(const struct args *a);
int cmd_image_list(const struct args *a);
int cmd_image_use(const struct args *a);
int cmd_image_rollback(const struct args *a);
int cmd_image_remove(const struct args *a);
int cmd_provider_set(const struct args *a);
int cmd_provider_list(const struct args *a);
int cmd_model_set(const struct args *a);
int cmd_model_list(const struct args *a);
int cmd_price_set(const struct args *a);
int cmd_help(const struct args *a);
int cmd_version(const struct args *a);
/* The first word as a run's id, or CLI_USE after a complaint. */
int run_id_arg(const struct args *a, const char **id);
/* Help of one verb, on standard output. */
void help_verb(const struct verb *v);

#endif
