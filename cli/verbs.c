/*
 * The table of verbs: names, words, options, help and examples. Everything that help prints and that main.c checks before a verb
 * runs stands here. Read by main.c, cmd_help.c and args.c; constant.
 */
#include "cli.h"

#include "common/text.h"

static const struct opt RUN_OPTIONS[] = {
	{ "request", OPT_VALUE, "FILE",
			"take the request from a JSON file (- for standard input); other options override its fields" },
	{ "shell", OPT_FLAG, NULL, "let the agent run shell commands in its microVM" },
	{ "web", OPT_FLAG, NULL, "let the agent reach the web (not in this version: the service refuses it)" },
	{ "allow-domain", OPT_LIST, "DOMAIN", "as --web, but this domain only (repeatable; *.example.com)" },
	{ "file", OPT_LIST, "[NAME=]PATH", "put a file into the working directory (repeatable)" },
	{ "model", OPT_VALUE, "ID", "model, as `ephemeral models` lists them" },
	{ "max-cost", OPT_VALUE, "DOLLARS", "hard cap of the cost, for example 0.04 (default: see `ephemeral status`)" },
	{ "max-cost-micros", OPT_VALUE, "N", "the same in millionths of a dollar" },
	{ "max-model-calls", OPT_VALUE, "N", "most calls to the model" },
	{ "timeout", OPT_VALUE, "SECONDS", "end the run after this time (default: see `ephemeral status`)" },
	{ "size", OPT_VALUE, "NAME", "of the microVM: small, standard (default) or large" },
	{ "metadata", OPT_LIST, "KEY=VALUE", "label the run (repeatable)" },
	{ "idempotency-key", OPT_VALUE, "KEY", "your own key for safe repeats; without it one is made" },
	{ "wait", OPT_FLAG, NULL, "show the timeline live, then output and cost; the exit status is the run's end" },
	{ "verbose", OPT_FLAG, NULL, "with --wait: show every event, with the output of commands" },
};
static const struct opt RUNS_OPTIONS[] = {
	{ "status", OPT_VALUE, "STATUS", "only runs in this status" },
	{ "metadata", OPT_LIST, "KEY=VALUE", "only runs with this label (repeatable)" },
	{ "limit", OPT_VALUE, "N", "runs a page, 1 to 100 (default 20)" },
	{ "cursor", OPT_VALUE, "CURSOR", "go on after an earlier page" },
	{ "all", OPT_FLAG, NULL, "fetch every page" },
};
static const struct opt WAIT_OPTIONS[] = {
	{ "timeout", OPT_VALUE, "SECONDS", "give up after this time (exit 3); default: wait for the end" },
};
static const struct opt EVENTS_OPTIONS[] = {
	{ "follow", OPT_FLAG, NULL, "go on until the run is settled" },
	{ "after", OPT_VALUE, "N", "only events after this number" },
};
static const struct opt REPLAY_OPTIONS[] = {
	{ "speed", OPT_VALUE, "FACTOR", "0.1 to 1000; 2 is twice as fast (default 1)" },
	{ "verbose", OPT_FLAG, NULL, "show every event, with the output of commands" },
};
static const struct opt ORG_CREATE_OPTIONS[] = {
	{ "allow-emulated", OPT_FLAG, NULL, "let its runs go to hosts without KVM" },
	{ "unlimited", OPT_FLAG, NULL, "no balance is needed" },
	{ "default-model", OPT_VALUE, "ID", "model of runs that name none" },
};
static const struct opt ORG_SET_OPTIONS[] = {
	{ "name", OPT_VALUE, "TEXT", "another name" },
	{ "enabled", OPT_VALUE, "yes|no", "no: keys are refused, queued runs end" },
	{ "allow-emulated", OPT_VALUE, "yes|no", "may its runs go to hosts without KVM" },
	{ "unlimited", OPT_VALUE, "yes|no", "yes: no balance is needed" },
	{ "default-model", OPT_VALUE, "ID", "of runs that name none ('': the deployment's)" },
	{ "default-max-cost", OPT_VALUE, "DOLLARS", "of runs that name none (0: the deployment's)" },
	{ "max-queued", OPT_VALUE, "N", "most runs queued (0: the deployment's)" },
	{ "max-running", OPT_VALUE, "N", "most runs at a time (0: the deployment's)" },
	{ "selector", OPT_LIST, "KEY=VALUE", "its runs go to hosts with this label only (repeatable; '': to any)" },
};
static const struct opt ORG_CREDIT_OPTIONS[] = {
	{ "note", OPT_VALUE, "TEXT", "kept with the ledger's row" },
	{ "idempotency-key", OPT_VALUE, "KEY", "your own key for safe repeats; without it one is made" },
};
static const struct opt KEY_CREATE_OPTIONS[] = {
	{ "role", OPT_VALUE, "ROLE", "admin, member (default) or viewer" },
	{ "name", OPT_VALUE, "TEXT", "what the key is for" },
	{ "member", OPT_VALUE, "ID", "whose key it is: it may do no more than this member, and ends with them" },
	{ "expires-at", OPT_VALUE, "TIME", "RFC 3339, for example 2027-01-31T00:00:00.000Z" },
};
static const struct opt MEMBER_ADD_OPTIONS[] = {
	{ "role", OPT_VALUE, "ROLE", "admin, member (default) or viewer: the most that their keys may do" },
	{ "email", OPT_VALUE, "ADDRESS", "kept with the name" },
};
static const struct opt NODE_TOKEN_OPTIONS[] = {
	{ "uses", OPT_VALUE, "N", "how many hosts may join with it (default 1)" },
	{ "expires-in", OPT_VALUE, "SECONDS", "how long it can be used (default: a day)" },
	{ "label", OPT_LIST, "KEY=VALUE", "label of the hosts that join (repeatable)" },
	{ "isolation", OPT_VALUE, "CLASS", "kvm or emulated: the most that such a host may claim" },
};
static const struct opt PROVIDER_SET_OPTIONS[] = {
	{ "base-url", OPT_VALUE, "URL", "OpenAI-compatible, ends in /v1" },
	{ "api-key-file", OPT_VALUE, "FILE", "file with its API key (- for standard input); the service stores it sealed" },
	{ "any-address", OPT_FLAG, NULL, "its address may be private or on loopback" },
};
static const struct opt MODEL_SET_OPTIONS[] = {
	{ "upstream", OPT_VALUE, "NAME", "what the provider calls it, if not as here" },
	{ "limit-param", OPT_VALUE, "NAME", "max_completion_tokens or max_tokens" },
	{ "max-output-tokens", OPT_VALUE, "N", "most tokens it can answer with" },
	{ "min-output-tokens", OPT_VALUE, "N", "below this a call makes no sense" },
	{ "tokens-per-byte-milli", OPT_VALUE, "N", "thousandths of a token that one byte of the request may cost" },
	{ "overhead-tokens", OPT_VALUE, "N", "tokens a call costs beside its text" },
	{ "call-timeout-ms", OPT_VALUE, "N", "longest call" },
	{ "default", OPT_FLAG, NULL, "model of organizations that have none set" },
};
static const struct opt PRICE_SET_OPTIONS[] = {
	{ "input", OPT_VALUE, "DOLLARS", "per million input tokens" },
	{ "output", OPT_VALUE, "DOLLARS", "per million output tokens" },
	{ "cached-input", OPT_VALUE, "DOLLARS", "per million cached input tokens (default: as input)" },
	{ "percent", OPT_VALUE, "PERCENT", "added to the model part, for example 5 or 2.5" },
	{ "run-fee", OPT_VALUE, "DOLLARS", "per run that started; the deployment's price, without MODEL" },
	{ "compute", OPT_VALUE, "DOLLARS", "per second; the deployment's price, without MODEL" },
	{ "web-request", OPT_VALUE, "DOLLARS", "per request; the deployment's price, without MODEL" },
	{ "web-search", OPT_VALUE, "DOLLARS", "per search; the deployment's price, without MODEL" },
};

static const struct opt IMAGE_ADD_OPTIONS[] = {
	{ "note", OPT_VALUE, "TEXT", "shown in the list" },
};
static const struct opt IMAGE_LABEL_OPTIONS[] = {
	{ "label", OPT_VALUE, "KEY=VALUE", "hosts with this label only (default: all that no label is named for)" },
};

#define OPTIONS(table) (table), sizeof(table) / sizeof((table)[0])
#define NO_OPTIONS NULL, 0

const struct verb VERBS[] = {
	{ "run", VERB_RUNS, "[PROMPT]", 0, 1, "start an agent in a fresh microVM",
			"PROMPT is what the agent shall do; - reads it from standard input. Shell and web are off unless you add "
			"them. Prints the run's "
			"id on standard output, with --wait the timeline. Ctrl-C during --wait detaches: the run goes on, and how "
			"to cancel it is printed.",
			OPTIONS(RUN_OPTIONS),
			"ephemeral run 'Which primes are below 40?' --max-cost 0.02 --wait\n"
			"ephemeral run 'Count the lines of data.csv' --shell --file data.csv --wait\n"
			"ephemeral run --request request.json --timeout 60 --json\n"
			"git diff | ephemeral run - --metadata job=review --wait",
			cmd_run },
	{ "runs", VERB_RUNS, "", 0, 0, "list runs, newest first", NULL, OPTIONS(RUNS_OPTIONS),
			"ephemeral runs --status running\nephemeral runs --all --json", cmd_runs },
	{ "get", VERB_RUNS, "RUN", 1, 1, "show a run: status, output, cost", NULL, NO_OPTIONS, "ephemeral get run_… --json",
			cmd_get },
	{ "wait", VERB_RUNS, "RUN", 1, 1, "wait for a run's end; the exit status is its end", NULL, OPTIONS(WAIT_OPTIONS),
			"ephemeral wait run_… --timeout 120", cmd_wait },
	{ "cancel", VERB_RUNS, "RUN", 1, 1, "ask for a run's end", NULL, NO_OPTIONS, "ephemeral cancel run_…", cmd_cancel },
	{ "events", VERB_RUNS, "RUN", 1, 1, "show a run's events, all of them", NULL, OPTIONS(EVENTS_OPTIONS),
			"ephemeral events run_… --follow\nephemeral events run_… --json | jq .type", cmd_events },
	{ "replay", VERB_RUNS, "RUN", 1, 1, "show a run's timeline with the pace of the recording", NULL, OPTIONS(REPLAY_OPTIONS),
			"ephemeral replay run_… --speed 4", cmd_replay },
	{ "models", VERB_RUNS, "", 0, 0, "list models with their prices", NULL, NO_OPTIONS, NULL, cmd_models },
	{ "login", VERB_ACCOUNT, "", 0, 0, "check an API key and save it",
			"The key is read from the terminal without showing it, or from standard input. It is saved (mode 0600) for "
			"the URL it was checked "
			"against, and only ever sent there.",
			NO_OPTIONS, "ephemeral login --url https://ephemeral.example.com\nephemeral login < key.txt", cmd_login },
	{ "logout", VERB_ACCOUNT, "", 0, 0, "forget the saved key", NULL, NO_OPTIONS, NULL, cmd_logout },
	{ "status", VERB_ACCOUNT, "", 0, 0, "show organization, role, balance and limits", NULL, NO_OPTIONS, NULL, cmd_status },
	{ "admin org create", VERB_ADMIN, "NAME", 1, 1, "make an organization", NULL, OPTIONS(ORG_CREATE_OPTIONS),
			"ephemeral admin org create acme --default-model openai/gpt-x", cmd_org_create },
	{ "admin org list", VERB_ADMIN, "", 0, 0, "list organizations", NULL, NO_OPTIONS, NULL, cmd_org_list },
	{ "admin org set", VERB_ADMIN, "ORG", 1, 1, "change an organization", "What is not named stays as it is.",
			OPTIONS(ORG_SET_OPTIONS),
			"ephemeral admin org set org_… --allow-emulated yes\n"
			"ephemeral admin org set org_… --enabled no",
			cmd_org_set },
	{ "admin org credit", VERB_ADMIN, "ORG DOLLARS", 2, 2, "add credit to an organization", NULL, OPTIONS(ORG_CREDIT_OPTIONS),
			"ephemeral admin org credit org_… 20 --note 'invoice 7'", cmd_org_credit },
	{ "admin key create", VERB_ADMIN, "ORG", 1, 1, "make an API key; it is shown this once", NULL, OPTIONS(KEY_CREATE_OPTIONS),
			"ephemeral admin key create org_… --role member --name ci", cmd_key_create },
	{ "admin key list", VERB_ADMIN, "ORG", 1, 1, "list an organization's API keys", NULL, NO_OPTIONS, NULL, cmd_key_list },
	{ "admin key revoke", VERB_ADMIN, "ORG KEY", 2, 2, "revoke an API key", NULL, NO_OPTIONS, NULL, cmd_key_revoke },
	{ "admin member add", VERB_ADMIN, "ORG NAME", 2, 2, "add a member to an organization", NULL, OPTIONS(MEMBER_ADD_OPTIONS),
			"ephemeral admin member add org_… 'Ada Lovelace' --email ada@example.com", cmd_member_add },
	{ "admin member list", VERB_ADMIN, "ORG", 1, 1, "list an organization's members", NULL, NO_OPTIONS, NULL, cmd_member_list },
	{ "admin node token", VERB_ADMIN, "", 0, 0, "make a token with which hosts join", NULL, OPTIONS(NODE_TOKEN_OPTIONS),
			"ephemeral admin node token --uses 3 --expires-in 3600", cmd_node_token },
	{ "admin node list", VERB_ADMIN, "", 0, 0, "list hosts", NULL, NO_OPTIONS, NULL, cmd_node_list },
	{ "admin node drain", VERB_ADMIN, "NODE", 1, 1, "give a host no new runs", NULL, NO_OPTIONS, NULL, cmd_node_drain },
	{ "admin node undrain", VERB_ADMIN, "NODE", 1, 1, "give a host runs again", NULL, NO_OPTIONS, NULL, cmd_node_undrain },
	{ "admin node revoke", VERB_ADMIN, "NODE", 1, 1, "shut a host out for good", NULL, NO_OPTIONS, NULL, cmd_node_revoke },
	{ "admin node remove", VERB_ADMIN, "NODE", 1, 1, "take a host that is stopped or revoked off the list", NULL, NO_OPTIONS,
			NULL, cmd_node_remove },
	{ "admin image add", VERB_ADMIN, "DIR", 1, 1, "upload a guest image, as deploy/guest-image/pack wrote it",
			"Prints the image's hash when the service has checked it. An upload that broke off goes on where it was.",
			OPTIONS(IMAGE_ADD_OPTIONS), "ephemeral admin image add var/image --note 'with jq'", cmd_image_add },
	{ "admin image list", VERB_ADMIN, "", 0, 0, "list guest images and which hosts shall have them", NULL, NO_OPTIONS, NULL,
			cmd_image_list },
	{ "admin image use", VERB_ADMIN, "IMAGE", 1, 1, "have hosts fetch an image and start new VMs from it", NULL,
			OPTIONS(IMAGE_LABEL_OPTIONS), "ephemeral admin image use 4f0c… --label pool=canary", cmd_image_use },
	{ "admin image rollback", VERB_ADMIN, "", 0, 0, "have hosts go back to the image before", NULL,
			OPTIONS(IMAGE_LABEL_OPTIONS), "ephemeral admin image rollback --label pool=canary", cmd_image_rollback },
	{ "admin image remove", VERB_ADMIN, "IMAGE", 1, 1, "delete an image that no host shall have", NULL, NO_OPTIONS, NULL,
			cmd_image_remove },
	{ "admin provider set", VERB_ADMIN, "NAME", 1, 1, "add or change a model provider", NULL, OPTIONS(PROVIDER_SET_OPTIONS),
			"ephemeral admin provider set openai --api-key-file key.txt \\\n"
			"  --base-url https://api.openai.com/v1",
			cmd_provider_set },
	{ "admin provider list", VERB_ADMIN, "", 0, 0, "list model providers", NULL, NO_OPTIONS, NULL, cmd_provider_list },
	{ "admin model set", VERB_ADMIN, "PROVIDER/MODEL", 1, 1, "add or change a model", NULL, OPTIONS(MODEL_SET_OPTIONS),
			"ephemeral admin model set openai/gpt-x --max-output-tokens 16384 --default", cmd_model_set },
	{ "admin model list", VERB_ADMIN, "", 0, 0, "list models", NULL, NO_OPTIONS, NULL, cmd_model_list },
	{ "admin price set", VERB_ADMIN, "[PROVIDER/MODEL]", 0, 1, "set a model's prices, or the deployment's",
			"With a model: --input and --output, and if wanted --cached-input and --percent. Without: the other four.",
			OPTIONS(PRICE_SET_OPTIONS),
			"ephemeral admin price set openai/gpt-x --input 0.25 --output 2\n"
			"ephemeral admin price set --run-fee 0 --compute 0.0002",
			cmd_price_set },
	{ "help", VERB_ABOUT, "[VERB]", 0, 4, "show help", NULL, NO_OPTIONS, "ephemeral help run\nephemeral help admin price set",
			cmd_help },
	{ "version", VERB_ABOUT, "", 0, 0, "show the version", NULL, NO_OPTIONS, NULL, cmd_version },
};
const size_t VERBS_COUNT = sizeof VERBS / sizeof VERBS[0];

/* How many words of argv the name consists of, 0 when argv does not begin with it. */
static int name_words(const char *name, int argc, char *const *argv)
{
	int used = 0;

	while (*name != '\0') {
		size_t len = strcspn(name, " ");

		if (used >= argc || strlen(argv[used]) != len || memcmp(argv[used], name, len) != 0)
			return 0;
		used++;
		name += len;
		name += *name == ' ' ? 1 : 0;
	}
	return used;
}

/* argv's words up to the first option, joined, as far as they fit: what a nearest name is looked for. */
static void joined(int argc, char *const *argv, int words, char out[64])
{
	size_t at = 0;

	out[0] = '\0';
	for (int i = 0; i < argc && i < words && argv[i][0] != '-'; i++) {
		int n = snprintf(out + at, 64 - at, "%s%s", i == 0 ? "" : " ", argv[i]);

		if (n < 0 || (size_t)n >= 64 - at) {
			out[at] = '\0';
			return;
		}
		at += (size_t)n;
	}
}

const struct verb *verb_find(int argc, char *const *argv, int *used, struct err *e)
{
	const struct verb *best = NULL;
	const char *names[64];
	const char *near;
	bool admin = argc > 0 && strcmp(argv[0], "admin") == 0;
	char text[64];

	*used = 0;
	for (size_t i = 0; i < VERBS_COUNT; i++) {
		int n = name_words(VERBS[i].name, argc, argv);

		names[i] = VERBS[i].name;
		if (n > *used) {
			*used = n;
			best = &VERBS[i];
		}
	}
	if (best != NULL)
		return best;
	joined(argc, argv, admin ? 3 : 1, text);
	near = strcmp(text, "admin") != 0 ? args_nearest(text, names, VERBS_COUNT) : NULL;
	if (strcmp(text, "admin") == 0)
		(void)err_set(e, ERR_INVALID, "admin needs a verb; `ephemeral help admin` lists its verbs");
	else if (admin && near == NULL)
		(void)err_set(e, ERR_INVALID, "unknown verb \"%s\"; `ephemeral help admin` lists its verbs", text);
	else if (near != NULL)
		(void)err_set(e, ERR_INVALID, "unknown verb \"%s\"; did you mean \"%s\"?", text, near);
	else
		(void)err_set(e, ERR_INVALID, "unknown verb \"%.40s\"; `ephemeral help` lists them", argc > 0 ? argv[0] : "");
	return NULL;
}
