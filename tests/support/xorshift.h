/*
 * Random numbers that are the same in every run (Marsaglia, "Xorshift RNGs", J. Stat. Software 8, 2003). A
 * program has one sequence.
 */
#ifndef TESTS_SUPPORT_XORSHIFT_H
#define TESTS_SUPPORT_XORSHIFT_H

#include <stdint.h>

static uint64_t seed = 88172645463325252u;
static inline uint64_t next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

#endif
