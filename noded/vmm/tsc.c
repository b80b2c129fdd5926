/*
 * How fast this host's time stamp counter runs. An emulated microvm has no timer that Linux could calibrate it against (without
 * help one boot in three hangs), so the kernel is told. Called once at start by keeper; blocks for 50 ms.
 */
#include "vmm/vmm.h"

#include <time.h>

#if defined(__x86_64__)
#include <x86intrin.h>

#define MEASURE_NS INT64_C(50000000)

/* The clock, and the counter as close to it as a few tries get: the read with the narrowest window counts. */
static int64_t sample(uint64_t *tsc)
{
	uint64_t best = UINT64_MAX;
	int64_t at = 0;

	for (int i = 0; i < 16; i++) {
		struct timespec ts;
		uint64_t before = __rdtsc(), after;

		clock_gettime(CLOCK_MONOTONIC_RAW, &ts);
		after = __rdtsc();
		if (after - before < best) {
			best = after - before;
			*tsc = before + (after - before) / 2;
			at = (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
		}
	}
	return at;
}

uint64_t vmm_measure_tsc_khz(void)
{
	const struct timespec pause = { .tv_nsec = MEASURE_NS };
	uint64_t first = 0, second = 0;
	int64_t began = sample(&first), ended;

	nanosleep(&pause, NULL);
	ended = sample(&second);
	if (ended - began < MEASURE_NS / 2 || second <= first)
		return 0;
	return (second - first) * 1000000 / (uint64_t)(ended - began);
}

#else

uint64_t vmm_measure_tsc_khz(void)
{
	return 0;
}

#endif
