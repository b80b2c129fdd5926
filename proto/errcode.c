/* The texts of errcode.h's table. Pure. */
#include "errcode.h"

#include <string.h>

struct errcode_row {
	const char *text;
	enum run_outcome outcome;
	const char *title;
	const char *remedy;
};

static const struct errcode_row rows[ERRCODE_COUNT] = {
#define X(name, text_, outcome_, title_, remedy_)                                                                                  \
	[ERRCODE_##name] = { .text = (text_), .outcome = (outcome_), .title = (title_), .remedy = (remedy_) },
	ERRCODE_TABLE(X)
#undef X
};

static const struct errcode_row *row(enum errcode c)
{
	return c < ERRCODE_COUNT ? &rows[c] : &rows[ERRCODE_INTERNAL];
}

const char *errcode_text(enum errcode c)
{
	return row(c)->text;
}

const char *errcode_title(enum errcode c)
{
	return row(c)->title;
}

const char *errcode_remedy(enum errcode c)
{
	return row(c)->remedy;
}

enum run_outcome errcode_outcome(enum errcode c)
{
	return row(c)->outcome;
}

enum errcode errcode_parse(const char *text)
{
	for (unsigned i = 0; i < ERRCODE_COUNT; i++)
		if (strcmp(rows[i].text, text) == 0)
			return (enum errcode)i;
	return ERRCODE_COUNT;
}

static const char *const outcome_names[] = {
	[OUTCOME_SUCCEEDED] = "succeeded",
	[OUTCOME_FAILED] = "failed",
	[OUTCOME_CANCELLED] = "cancelled",
	[OUTCOME_TIMED_OUT] = "timed_out",
	[OUTCOME_INTERRUPTED] = "interrupted",
};

const char *outcome_text(enum run_outcome o)
{
	return outcome_valid((int)o) ? outcome_names[o] : "failed";
}

bool outcome_valid(int o)
{
	return o >= (int)OUTCOME_SUCCEEDED && o <= (int)OUTCOME_INTERRUPTED;
}
