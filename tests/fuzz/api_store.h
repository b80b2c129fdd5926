/*
 * What the files of fuzz_api's store share: answers that are owed, and checks of what the store is given. A check that fails is a
 * finding: the interface let something through.
 */
#ifndef EPH_API_STORE_H
#define EPH_API_STORE_H

#include "api_play.h"

#include "common/clock.h"
#include "common/text.h"
#include "controld/store/store.h"

#define ORG "org_0123456789abcdef0123456789abcdef"
#define OTHER "org_ffffffffffffffffffffffffffffffff"
#define RUN "run_0123456789abcdef0123456789abcdef"
#define NASTY "na\"me\\ \xc3\xa9\x01</script>"

/* An answer that is still to come. */
struct owed {
	void (*deliver)(const struct owed *o);
	void (*cb)(void);
	void *arg;
	char what; /* of the script */
	char id[160];
	int64_t number;
};

extern struct store_played played;
extern struct store_principal asker; /* who the last key was found to be */

/* Queues the answer; -1 when the script says that the call fails. */
int owed_add(void (*deliver)(const struct owed *o), void (*cb)(void), void *arg, const char *id, int64_t number, struct err *e);
/* The error that the script gives this answer, made in e; NULL = none. */
const struct err *owed_trouble(const struct owed *o, struct err *e);
size_t rows(const struct owed *o); /* of a list */

/* What a call answers: a function that fills struct `type` and one that hands it over. */
#define ANSWER(name, type, cb_type)                                                                                                \
	static void fill_##name(const struct owed *o, struct type *r);                                                             \
	static void name(const struct owed *o)                                                                                     \
	{                                                                                                                          \
		struct type r;                                                                                                     \
		struct err e;                                                                                                      \
		const struct err *bad = owed_trouble(o, &e);                                                                       \
                                                                                                                                   \
		memset(&r, 0, sizeof(r));                                                                                          \
		if (!bad)                                                                                                          \
			fill_##name(o, &r);                                                                                        \
		((cb_type)o->cb)(o->arg, bad ? NULL : &r, bad);                                                                    \
	}                                                                                                                          \
	static void fill_##name(const struct owed *o, struct type *r)

#define OWE(name, id, number) owed_add(name, (void (*)(void))cb, arg, id, number, e)

void text_fits(const char *s, size_t min, size_t max);
void text_fits_or_null(const char *s, size_t max);
void within(int64_t v, int64_t min, int64_t max);
void page_fits(const char *cursor, int limit);
/* Of the asker's organization; of any for the operator. */
void org_fits(const char *org_id);
void may(enum store_role role);
void operator_only(void);
void copy(char *out, size_t size, const char *s);

#define COPY(field, s) copy(field, sizeof(field), s)

#endif
