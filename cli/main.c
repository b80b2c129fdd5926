/*
 * `ephemeral`: finds the verb, reads its arguments, runs it. One process, one thread. The exit status is the verb's (cli.h).
 */
#include "cli.h"

#include "common/log.h"
#include "common/text.h"
#include "term.h"

#include <locale.h>
#include <signal.h>
#include <unistd.h>

static int wrong_use(const char *why, const struct verb *v)
{
	term_complain("%s", why);
	if (v != NULL)
		term_note("usage: ephemeral %s%s%s%s; `ephemeral help %s` says more", v->name, v->words[0] != '\0' ? " " : "",
				v->words, v->option_count > 0 ? " [options]" : "", v->name);
	return CLI_USE;
}

/* Names the first word that is missing: v->words is "ORG DOLLARS" and the like. */
static int missing_word(const struct verb *v, size_t given)
{
	const char *word = v->words;
	char why[96];

	for (size_t i = 0; i < given; i++) {
		word += strcspn(word, " ");
		word += strspn(word, " ");
	}
	if (!text_fmt(why, sizeof why, "%.*s is missing%s", (int)strcspn(word, " "), word,
			    strncmp(word, "RUN", 3) == 0   ? "; `ephemeral runs` lists the ids of yours"
			    : strncmp(word, "ORG", 3) == 0 ? "; `ephemeral admin org list` lists the ids"
							   : ""))
		return wrong_use("a word is missing", v);
	return wrong_use(why, v);
}

static int run_verb(const struct verb *v, int argc, char *const *argv)
{
	static struct args args;
	struct err e;

	if (args_parse(v->options, v->option_count, argc, argv, &args, &e) != 0)
		return wrong_use(e.text, v);
	if (args_flag(&args, "help")) {
		help_verb(v);
		return CLI_OK;
	}
	if (args.word_count < v->words_min)
		return missing_word(v, args.word_count);
	if (args.word_count > v->words_max)
		return wrong_use(v->words_max == 0 ? "this verb takes no words" : "too many words; quote what has spaces", v);
	return v->run(&args);
}

/* Finds the verb and runs it. */
static int dispatch(int argc, char **argv)
{
	static struct args none;
	static char admin[] = "admin";
	const struct verb *v;
	struct err e;
	int used;

	if (argc < 2) {
		(void)cmd_help(&none);
		return CLI_USE;
	}
	if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
		return cmd_help(&none);
	if (strcmp(argv[1], "--version") == 0)
		return cmd_version(&none);
	if (argv[1][0] == '-')
		return wrong_use("options stand after the verb: ephemeral VERB [options]", NULL);
	/* `ephemeral admin --help` and `ephemeral admin node --help` ask for help, not for a verb. */
	v = verb_find(argc - 1, argv + 1, &used, &e);
	if (v == NULL && (strcmp(argv[argc - 1], "--help") == 0 || strcmp(argv[argc - 1], "-h") == 0) &&
			strcmp(argv[1], "admin") == 0) {
		none.words[none.word_count++] = admin;
		return cmd_help(&none);
	}
	if (v == NULL)
		return wrong_use(e.text, NULL);
	return run_verb(v, argc - 1 - used, argv + 1 + used);
}

int main(int argc, char **argv)
{
	int rc;

	log_descriptors();
	(void)setlocale(LC_CTYPE, "C.UTF-8"); /* wcwidth() needs it */
	(void)signal(SIGPIPE, SIG_IGN);
	rc = dispatch(argc, argv);
	if (fflush(stdout) != 0 || ferror(stdout)) {
		if (!term_reader_gone())
			term_complain("standard output cannot be written: what is there is not whole");
		return rc == CLI_OK ? CLI_ASK : rc;
	}
	return rc;
}
