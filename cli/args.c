/*
 * The command line's parser and its "did you mean". Called by main.c and help; pure, owns nothing (all text belongs to argv and to
 * the tables). Never blocks.
 */
#include "args.h"

#include "common/text.h"

const struct opt ARGS_COMMON[] = {
	{ "json", OPT_FLAG, NULL, "answer in JSON on standard output (events: one object a line)" },
	{ "url", OPT_VALUE, "URL", "the service to talk to, instead of EPHEMERAL_URL or the saved one" },
	{ "operator-url", OPT_VALUE, "URL", "its operator listener, instead of EPHEMERAL_OPERATOR_URL (admin only)" },
	{ "help", OPT_FLAG, NULL, "show this verb's help" },
};
const size_t ARGS_COMMON_COUNT = sizeof ARGS_COMMON / sizeof ARGS_COMMON[0];

#define WORD_MAX 40 /* longer words are no typing mistake of a name of ours */
#define NAMES_MAX 64

static size_t min2(size_t a, size_t b)
{
	return a < b ? a : b;
}

/* Edits (insert, delete, replace, swap of neighbours) that lead from a to b. Both at most WORD_MAX long. */
static size_t distance(const char *a, const char *b)
{
	size_t la = strlen(a), lb = strlen(b);
	size_t d[WORD_MAX + 1][WORD_MAX + 1];

	for (size_t i = 0; i <= la; i++)
		d[i][0] = i;
	for (size_t j = 0; j <= lb; j++)
		d[0][j] = j;
	for (size_t i = 1; i <= la; i++) {
		for (size_t j = 1; j <= lb; j++) {
			size_t change = a[i - 1] == b[j - 1] ? 0 : 1;
			size_t best = min2(d[i - 1][j] + 1, d[i][j - 1] + 1);

			best = min2(best, d[i - 1][j - 1] + change);
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
				best = min2(best, d[i - 2][j - 2] + 1);
			d[i][j] = best;
		}
	}
	return d[la][lb];
}

const char *args_nearest(const char *word, const char *const *names, size_t count)
{
	const char *best = NULL;
	size_t best_distance = 0, len = strlen(word);

	if (len == 0 || len > WORD_MAX)
		return NULL;
	for (size_t i = 0; i < count; i++) {
		size_t name_len = strlen(names[i]), near;

		if (name_len > WORD_MAX)
			continue;
		/* Half a word that begins right is meant as often as a slip. */
		near = len >= 3 && name_len > len && strncmp(word, names[i], len) == 0 ? 1 : distance(word, names[i]);
		if (near > (len < 4 ? 1U : len < 8 ? 2U : 3U))
			continue;
		if (best == NULL || near < best_distance) {
			best = names[i];
			best_distance = near;
		}
	}
	return best;
}

static const struct opt *find(const struct opt *table, size_t count, const char *name, size_t len)
{
	for (size_t i = 0; i < count; i++)
		if (strlen(table[i].name) == len && memcmp(table[i].name, name, len) == 0)
			return &table[i];
	return NULL;
}

static int unknown(const struct opt *own, size_t own_count, const char *name, size_t len, struct err *e)
{
	const char *names[NAMES_MAX];
	size_t count = 0;
	char word[WORD_MAX + 1];
	const char *near = NULL;

	for (size_t i = 0; i < own_count && count < NAMES_MAX; i++)
		names[count++] = own[i].name;
	for (size_t i = 0; i < ARGS_COMMON_COUNT && count < NAMES_MAX; i++)
		names[count++] = ARGS_COMMON[i].name;
	if (text_fmt(word, sizeof word, "%.*s", (int)min2(len, WORD_MAX), name))
		near = args_nearest(word, names, count);
	if (near != NULL)
		return err_set(e, ERR_INVALID, "unknown option --%s; did you mean --%s?", word, near);
	return err_set(e, ERR_INVALID, "unknown option --%s", word);
}

static int add_option(struct args *out, const struct opt *opt, const char *value, struct err *e)
{
	if (opt->kind != OPT_LIST) {
		for (size_t i = 0; i < out->option_count; i++)
			if (out->options[i].opt == opt)
				return err_set(e, ERR_INVALID, "--%s is given twice", opt->name);
	}
	if (out->option_count == ARGS_OPTIONS_MAX)
		return err_set(e, ERR_INVALID, "more than %d options", ARGS_OPTIONS_MAX);
	out->options[out->option_count].opt = opt;
	out->options[out->option_count].value = value;
	out->option_count++;
	return 0;
}

/* One `--name...`; *i moves on when the value is the next word. */
static int take_option(
		const struct opt *own, size_t own_count, int argc, char *const *argv, int *i, struct args *out, struct err *e)
{
	const char *name = argv[*i] + 2;
	const char *equals = strchr(name, '=');
	size_t len = equals != NULL ? (size_t)(equals - name) : strlen(name);
	const struct opt *opt = find(own, own_count, name, len);

	if (opt == NULL)
		opt = find(ARGS_COMMON, ARGS_COMMON_COUNT, name, len);
	if (opt == NULL)
		return unknown(own, own_count, name, len, e);
	if (opt->kind == OPT_FLAG) {
		if (equals != NULL)
			return err_set(e, ERR_INVALID, "--%s takes no value", opt->name);
		return add_option(out, opt, NULL, e);
	}
	if (equals != NULL)
		return add_option(out, opt, equals + 1, e);
	if (*i + 1 >= argc)
		return err_set(e, ERR_INVALID, "--%s needs a value: --%s %s", opt->name, opt->name, opt->value);
	*i += 1;
	return add_option(out, opt, argv[*i], e);
}

int args_parse(const struct opt *own, size_t own_count, int argc, char *const *argv, struct args *out, struct err *e)
{
	bool words_only = false;
	static char help[] = "--help";
	char *const help_argv[] = { help };

	memset(out, 0, sizeof *out);
	for (int i = 0; i < argc; i++) {
		char *word = argv[i];
		int zero = 0;

		if (!words_only && strcmp(word, "--") == 0) {
			words_only = true;
			continue;
		}
		if (!words_only && strcmp(word, "-h") == 0) {
			if (take_option(own, own_count, 1, help_argv, &zero, out, e) != 0)
				return -1;
			continue;
		}
		if (!words_only && word[0] == '-' && word[1] == '-') {
			if (take_option(own, own_count, argc, argv, &i, out, e) != 0)
				return -1;
			continue;
		}
		if (!words_only && word[0] == '-' && word[1] != '\0')
			return err_set(e, ERR_INVALID, "unknown option %.40s; options have two dashes", word);
		if (out->word_count == ARGS_WORDS_MAX)
			return err_set(e, ERR_INVALID, "more than %d words; quote a prompt that has spaces", ARGS_WORDS_MAX);
		out->words[out->word_count++] = word;
	}
	return 0;
}

const char *args_list(const struct args *a, const char *name, size_t i)
{
	for (size_t k = 0; k < a->option_count; k++) {
		if (strcmp(a->options[k].opt->name, name) != 0)
			continue;
		if (i == 0)
			return a->options[k].value;
		i--;
	}
	return NULL;
}

const char *args_value(const struct args *a, const char *name)
{
	return args_list(a, name, 0);
}

bool args_flag(const struct args *a, const char *name)
{
	for (size_t k = 0; k < a->option_count; k++)
		if (strcmp(a->options[k].opt->name, name) == 0)
			return true;
	return false;
}
