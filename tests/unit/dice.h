/* Numbers for tests of properties: the same for the same seed, on every machine (xorshift64). */
#ifndef EPH_UNIT_DICE_H
#define EPH_UNIT_DICE_H

#include <stdint.h>

static uint64_t rng_state;

static inline void rng_seed(uint64_t seed)
{
	rng_state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
}

static inline uint64_t rng(void)
{
	rng_state ^= rng_state << 13;
	rng_state ^= rng_state >> 7;
	rng_state ^= rng_state << 17;
	return rng_state;
}

#endif
