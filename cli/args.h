/*
 * Command line: options come from a verb's table, everything else is a word. `--name VALUE`, `--name=VALUE`, `--` ends options, a
 * single `-` is a word. Pure; keeps pointers into argv. Errors are ERR_INVALID, ready to be shown, with the nearest name if one is
 * near.
 */
#ifndef CLI_ARGS_H
#define CLI_ARGS_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>

#define ARGS_WORDS_MAX 16
#define ARGS_OPTIONS_MAX 256

enum opt_kind {
	OPT_FLAG,
	OPT_VALUE, /* at most once */
	OPT_LIST,  /* as often as wanted */
};

struct opt {
	const char *name; /* without the dashes */
	enum opt_kind kind;
	const char *value; /* what help calls the value; NULL for a flag */
	const char *help;
};

struct args {
	char *words[ARGS_WORDS_MAX];
	size_t word_count;
	struct {
		const struct opt *opt;
		const char *value; /* NULL for a flag */
	} options[ARGS_OPTIONS_MAX];
	size_t option_count;
};

/* Options every verb knows: --json, --url, --operator-url, --help. */
extern const struct opt ARGS_COMMON[];
extern const size_t ARGS_COMMON_COUNT;

/* own[own_count] are the verb's options. argv starts after the verb's words. */
int args_parse(const struct opt *own, size_t own_count, int argc, char *const *argv, struct args *out,
		struct err *e) EPH_MUST_CHECK;
bool args_flag(const struct args *a, const char *name);
const char *args_value(const struct args *a, const char *name); /* NULL when not given */
/* The i-th value of a list option, NULL past the last. */
const char *args_list(const struct args *a, const char *name, size_t i);

/* The name of `names` (count pointers) nearest to `word`, or NULL when none is near enough to be meant. */
const char *args_nearest(const char *word, const char *const *names, size_t count);

#endif
