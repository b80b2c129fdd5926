/*
 * `noded doctor`: looks at a host, item by item, and says of each what was found and how to mend it. Changes nothing that stays: a
 * file that it writes and a group that it makes are gone when it ends. A process of its own beside a noded that may work; blocks.
 */
#ifndef NODED_DOCTOR_DOCTOR_H
#define NODED_DOCTOR_DOCTOR_H

#include "common/error.h"
#include "noded/config.h"

#include <stdbool.h>

/* config NULL: it could not be loaded, and `why` says so. Prints the report; 0 = nothing fails, 1 = something does. */
int doctor_main(const struct noded_config *config, const struct err *why, bool json);

#endif
