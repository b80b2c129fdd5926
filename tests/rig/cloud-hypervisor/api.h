/*
 * The API's routes: which call is which method, what it does, and how its result becomes status and body.
 */
#ifndef STANDIN_API_H
#define STANDIN_API_H

#include "http.h"

#include <stdbool.h>

http_handler api_handle;
/* vmm.shutdown was asked for: the loop ends after this turn. */
bool api_shutdown_asked(void);
/* "v53.0", unless a test wants another. */
const char *api_version(void);

#endif
