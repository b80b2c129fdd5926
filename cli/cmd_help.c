/* Verbs about the program: help, version. Everything comes from the table in verbs.c. */
#include "cli.h"

#include "common/text.h"
#include "term.h"

#define HELP_WIDTH ((size_t)80)
#define LEFT_WIDTH ((size_t)21) /* names of verbs */
#define OPTION_WIDTH ((size_t)28)

/* Two columns: `left`, and `right` wrapped beside it, or below it where `left` is too wide. */
static void columns(const char *left, size_t width, const char *right)
{
	struct buf b = BUF_INIT((size_t)16 * 1024);

	if (strlen(left) > width)
		buf_printf(&b, "  %s\n%*s", left, (int)width + 3, "");
	else
		buf_printf(&b, "  %-*s ", (int)width, left);
	(void)text_wrap(&b, right, width + 3, width + 3, HELP_WIDTH);
	buf_add_char(&b, '\n');
	(void)term_buf(stdout, &b);
	buf_free(&b);
}

static void paragraph(const char *text)
{
	struct buf b = BUF_INIT((size_t)16 * 1024);

	(void)text_wrap(&b, text, 0, 0, HELP_WIDTH);
	buf_add_char(&b, '\n');
	(void)term_buf(stdout, &b);
	buf_free(&b);
}

static void list_group(enum verb_group group)
{
	for (size_t i = 0; i < VERBS_COUNT; i++)
		if (VERBS[i].group == group)
			columns(VERBS[i].name, LEFT_WIDTH, VERBS[i].summary);
}

/* The verbs "admin NOUN …"; false when there are none. */
static bool list_admin(const char *noun)
{
	size_t len = strlen(noun), found = 0;

	for (size_t i = 0; i < VERBS_COUNT; i++) {
		const char *rest = VERBS[i].name + sizeof "admin " - 1;

		if (VERBS[i].group != VERB_ADMIN || strncmp(rest, noun, len) != 0 || rest[len] != ' ')
			continue;
		columns(VERBS[i].name, LEFT_WIDTH, VERBS[i].summary);
		found++;
	}
	return found > 0;
}

static void overview(void)
{
	printf("ephemeral: run an AI agent in a fresh microVM, once, under a hard budget\n\n"
	       "usage: ephemeral VERB [words] [options]\n\nRuns\n");
	list_group(VERB_RUNS);
	printf("\nAccount\n");
	list_group(VERB_ACCOUNT);
	printf("\nOperators (EPHEMERAL_OPERATOR_KEY, EPHEMERAL_OPERATOR_URL)\n");
	list_group(VERB_ADMIN);
	printf("\nAbout\n");
	list_group(VERB_ABOUT);
	printf("\n`ephemeral help VERB` shows options and examples. Every verb takes --json.\n"
	       "Environment: EPHEMERAL_URL, EPHEMERAL_API_KEY, NO_COLOR.\n");
	paragraph("Exit status: 0 done (and the run, where one was awaited, succeeded), 1 the run ended otherwise, 2 wrong use, "
		  "3 could not ask or was not allowed to, 130 detached by Ctrl-C.");
}

static void option_line(const struct opt *o)
{
	char left[64];

	if (!text_fmt(left, sizeof left, "--%s%s%s", o->name, o->value != NULL ? " " : "", o->value != NULL ? o->value : ""))
		left[0] = '\0';
	columns(left, OPTION_WIDTH, o->help);
}

static void indented(const char *text)
{
	while (*text != '\0') {
		size_t n = strcspn(text, "\n");

		printf("  %.*s\n", (int)n, text);
		text += n + (text[n] == '\n' ? 1 : 0);
	}
}

void help_verb(const struct verb *v)
{
	struct buf title = BUF_INIT(1024);

	buf_printf(&title, "ephemeral %s%s%s%s: %s.", v->name, v->words[0] != '\0' ? " " : "", v->words,
			v->option_count > 0 ? " [options]" : "", v->summary);
	paragraph(buf_cstr(&title) != NULL ? buf_cstr(&title) : v->summary);
	buf_free(&title);
	if (v->text != NULL)
		paragraph(v->text);
	printf("\nOptions\n");
	for (size_t i = 0; i < v->option_count; i++)
		option_line(&v->options[i]);
	for (size_t i = 0; i < ARGS_COMMON_COUNT; i++) {
		bool operator_only = strcmp(ARGS_COMMON[i].name, "operator-url") == 0,
		     member_only = strcmp(ARGS_COMMON[i].name, "url") == 0;

		if ((operator_only && v->group != VERB_ADMIN) ||
				(member_only && (v->group == VERB_ADMIN || v->group == VERB_ABOUT)))
			continue;
		option_line(&ARGS_COMMON[i]);
	}
	if (v->examples != NULL) {
		printf("\nExamples\n");
		indented(v->examples);
	}
}

int cmd_help(const struct args *a)
{
	const struct verb *v;
	struct err e;
	int used;

	if (a->word_count == 0) {
		overview();
		return CLI_OK;
	}
	if (a->word_count == 1 && strcmp(a->words[0], "admin") == 0) {
		printf("Verbs for operators; `ephemeral help admin VERB` says more.\n\n");
		list_group(VERB_ADMIN);
		return CLI_OK;
	}
	if (a->word_count == 2 && strcmp(a->words[0], "admin") == 0 && list_admin(a->words[1]))
		return CLI_OK;
	v = verb_find((int)a->word_count, a->words, &used, &e);
	if (v == NULL || (size_t)used != a->word_count) {
		term_complain("%s", v == NULL ? e.text : "that is more than a verb's name");
		return CLI_USE;
	}
	help_verb(v);
	return CLI_OK;
}

int cmd_version(const struct args *a)
{
	if (args_flag(a, "json"))
		printf("{\"version\":\"%s\"}\n", EPHEMERAL_VERSION);
	else
		printf("ephemeral %s\n", EPHEMERAL_VERSION);
	return CLI_OK;
}
