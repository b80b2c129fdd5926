/*
 * What unit tests share: cmocka with its includes in their order, waiting on a loop for a condition with a deadline (tests never
 * sleep), and a client of raw bytes.
 */
#ifndef EPH_UNIT_H
#define EPH_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

#define assert_ok(call)                                                                                                            \
	do {                                                                                                                       \
		if ((call) != 0)                                                                                                   \
			fail_msg("%s: %s", #call, e.text);                                                                         \
	} while (0)

#endif
