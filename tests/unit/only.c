/* Linked into every unit test: EPHEMERAL_UNIT_ONLY=PATTERN in the environment leaves only the tests whose names match (with * and
 * ?). */
#include "unit.h"

static void __attribute__((constructor)) only_one(void)
{
	const char *pattern = getenv("EPHEMERAL_UNIT_ONLY");

	if (pattern)
		cmocka_set_test_filter(pattern);
}
