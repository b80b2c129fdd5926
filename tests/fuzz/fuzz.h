/* What fuzz targets share. A target checks more than that nothing crashes: two ways to the same answer must agree. */
#ifndef EPH_FUZZ_H
#define EPH_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define must(cond)                                                                                                                 \
	do {                                                                                                                       \
		if (!(cond)) {                                                                                                     \
			fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #cond);                                  \
			abort();                                                                                                   \
		}                                                                                                                  \
	} while (0)

#endif
