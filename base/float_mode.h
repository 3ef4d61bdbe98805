/*
 * The floating-point mode of the calling thread. The library computes in one mode only: round to nearest even,
 * denormals kept, no traps. Host programs may use another (PyTorch users flush denormals). Public entry points that
 * compute enter the library's mode and restore the caller's on return. Callbacks run in the caller's mode. Thread-safe;
 * nothing fails.
 *
 * x86-64: MXCSR (SSE and AVX; the x87 unit is unused and left alone). arm64: FPCR. Elsewhere: the rounding direction.
 */
#ifndef BASE_FLOAT_MODE_H
#define BASE_FLOAT_MODE_H

#include <stdint.h>

typedef struct float_mode {
    uint64_t bits;
} float_mode;

/* Sets the library's mode and returns the previous one for float_mode_leave. Calls may nest. */
float_mode float_mode_enter(void);
/* Restores a mode returned by float_mode_enter; on x86-64 with its exception flags. */
void float_mode_leave(float_mode saved);

#endif
