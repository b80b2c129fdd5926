/*
 * All time of our processes. Build with -DEPHEMERAL_TEST_CLOCK (debug, asan and tsan presets) and set EPHEMERAL_CLOCK_FILE to a
 * file holding "real_ms boot_ms" offsets to move the clocks in a test; release builds ignore it. Thread-safe, never blocks.
 */
#ifndef EPH_CLOCK_H
#define EPH_CLOCK_H

#include <stdint.h>

int64_t clock_real_ms(void); /* wall clock, Unix milliseconds; display and defaults only, never for a deadline */
int64_t clock_boot_ns(void); /* CLOCK_BOOTTIME: leases, timeouts, t of events */
int64_t clock_boot_ms(void);
int64_t clock_mono_ns(void); /* CLOCK_MONOTONIC: measuring */

#endif
